"""Rollouts in, columns out, checked: prompts, responses, and what belongs to response tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.collators._columns import Columns
from torch_collate_kit.collators._examples import Examples, first_keys, one_value, raw_columns
from torch_collate_kit.collators._flat import int_column, tensor_to_numpy, weight_column
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

__all__ = ["Rollouts", "are_rollouts", "read_rollouts"]

# Columns of one number a response token, and the field of a batch that each becomes.
_RESPONSE_FIELDS = {
    "rewards": "rewards",
    "loss_mask": "loss_mask",
    "logprobs": "rollout_logprobs",
    "advantages": "advantages",
}
_REQUIRED = ("prompt_ids", "response_ids", "rewards", "loss_mask")
_PER_ROLLOUT = ("uid", "is_last_step")
_IMAGES = ("pixel_values", "image_grid_thw")
_KNOWN = (*_REQUIRED, "logprobs", "advantages", *_PER_ROLLOUT, "rollout_expert_indices", *_IMAGES)
_MOST_EXPERTS = np.iinfo(np.int16).max


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a batch, a column at a time."""

    prompt_ids: Ragged  # of ndarrays, as are all
    response_ids: Ragged
    fields: dict[str, Ragged]  # float32, one value a response token, by the name in a batch
    expert_indices: Ragged | None  # int16 [tokens with a route, layers, top_k]
    images: dict[str, Ragged]  # pixel_values float32 [patches, dim], image_grid_thw int64 [n, 3]
    per_rollout: dict[str, list[Any]]  # uids, is_last_step

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of prompt and response."""
        return self.prompt_ids.lengths + self.response_ids.lengths

    def as_columns(self) -> Columns:
        """As SFT examples with the mask of their last tokens; the tokens are copied."""
        pairs = zip(self.prompt_ids, self.response_ids, strict=True)
        tokens = np.concatenate([part for pair in pairs for part in pair])
        counts = self.response_ids.lengths
        ids = Ragged.from_lengths(tokens, self.lengths)
        return Columns(ids, self.lengths, "loss_mask", self.fields["loss_mask"], counts)


def are_rollouts(examples: Examples) -> bool:
    """Whether the examples come as prompt and response."""
    if isinstance(examples, Mapping):
        return "prompt_ids" in examples
    is_list = isinstance(examples, Sequence) and len(examples) > 0
    return is_list and isinstance(examples[0], Mapping) and "prompt_ids" in examples[0]


def read_rollouts(examples: Examples) -> Rollouts:
    """Check the rollouts (DataError names the bad one) and look at them as columns."""
    raw = raw_columns(examples, _KNOWN, "response_ids", f"a rollout has {', '.join(_REQUIRED)}")
    _check_keys(raw, first_keys(examples))
    prompt_ids, response_ids = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    lengths = response_ids.lengths
    fields = {
        field: _response_field(name, raw[name], response_ids)
        for name, field in _RESPONSE_FIELDS.items()
        if name in raw
    }
    _check_loss_mask(fields["loss_mask"])
    per_rollout = {}
    if "uid" in raw:
        per_rollout["uids"] = _uids(raw["uid"])
    if "is_last_step" in raw:
        per_rollout["is_last_step"] = _flags("is_last_step", raw["is_last_step"])
    routes = raw.get("rollout_expert_indices")
    return Rollouts(
        prompt_ids,
        response_ids,
        fields,
        None if routes is None else _routes(routes, prompt_ids.lengths + lengths),
        _images(raw),
        per_rollout,
    )


def _check_keys(raw: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise DataError(
            f"no {' and no '.join(missing)} in example 0, got keys {sorted(map(str, given))}; a "
            f"rollout has {', '.join(_REQUIRED)}"
        )
    if "logprobs" not in raw:
        for key in map(str, given):
            if "prob" in key:
                raise DataError(
                    f"example 0 has no logprobs, but {key!r} looks like them; rename it to "
                    "logprobs, or remove it"
                )
    alone = [key for key in _IMAGES if key in raw]
    if len(alone) == 1:
        raise DataError(
            f"example 0 has {alone[0]}, but not both of {' and '.join(_IMAGES)}; give what the "
            "processor returned"
        )


def _ids(name: str, column: Any) -> Ragged:
    ids = int_column(name, column)
    lengths = ids.lengths
    if not lengths.all():
        i = int(np.flatnonzero(lengths == 0)[0])
        why = (
            "nothing would predict its first response token; put the BOS token there"
            if name == "prompt_ids"
            else "filter it out"
        )
        raise DataError(f"example {i}: {name} is empty (0 tokens); {why}")
    if ids.values.min(initial=0) < 0:
        i, token = _where(ids, ids.values < 0)
        raise DataError(
            f"example {i}: {name} is {ids[i][token]} at token {token}; token ids are 0 or more"
        )
    return ids


def _where(column: Ragged, is_bad: np.ndarray) -> tuple[int, int]:
    """The first bad entry: its example, and its place there."""
    place = int(np.flatnonzero(is_bad)[0])
    i = int(np.searchsorted(column.offsets, place, side="right")) - 1
    return i, place - int(column.offsets[i])


def _response_field(name: str, column: Any, response_ids: Ragged) -> Ragged:
    """One float32 a response token. ``rewards`` and ``advantages`` may be one number a rollout."""
    lengths = response_ids.lengths
    if name in ("rewards", "advantages"):
        column = _spread(name, column, lengths)
    given = weight_column(name, column)
    wrong = np.flatnonzero(given.lengths != lengths)
    if len(wrong):
        i = int(wrong[0])
        one = {"rewards": "one number for the last token, or ", "advantages": "one number, or "}
        raise DataError(
            f"example {i}: {name} has {given.lengths[i]} entries, response_ids has {lengths[i]} "
            f"tokens; give {one.get(name, '')}one entry a response token"
        )
    with np.errstate(over="ignore"):  # what float32 does not hold is refused below
        values = given.values.astype(np.float32, copy=False)
    if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
        i, token = _where(given, ~np.isfinite(values))
        hint = "; of a token that the policy did not sample give 0.0" if name == "logprobs" else ""
        raise DataError(
            f"example {i}: {name} is {given[i][token]} at response token {token}; it must be "
            f"finite in float32{hint}"
        )
    return Ragged(values, given.offsets)


def _spread(name: str, column: Any, lengths: np.ndarray) -> Any:
    """Numbers to rows: a reward to the last token, an advantage to every token."""
    if isinstance(column, Ragged):
        return column
    if isinstance(column, np.ndarray | Tensor) and column.ndim == 1:
        column = tensor_to_numpy(column) if isinstance(column, Tensor) else column
        column = column if column.dtype.hasobject else column.tolist()
    if set(map(type, column)) == {list}:
        return column
    is_number = [_is_number(value) for value in column]
    if not any(is_number):
        return column
    if all(is_number):
        numbers = np.array([one_value(value) for value in column], dtype=np.float64)
        return _rows_of(name, numbers, lengths)
    numbers = np.array(
        [one_value(v) if is_one else 0 for v, is_one in zip(column, is_number, strict=True)],
        dtype=np.float64,
    )
    rows = _rows_of(name, numbers, lengths)
    return [rows[i] if is_one else column[i] for i, is_one in enumerate(is_number)]


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 0
    return isinstance(value, int | float | np.number | np.bool_)


def _rows_of(name: str, numbers: np.ndarray, lengths: np.ndarray) -> Ragged:
    if name == "advantages":
        return Ragged.from_lengths(np.repeat(numbers, lengths), lengths)
    rows = Ragged.from_lengths(np.zeros(int(lengths.sum())), lengths)
    rows.values[rows.offsets[1:] - 1] = numbers
    return rows


def _check_loss_mask(loss_mask: Ragged) -> None:
    if loss_mask.values.min(initial=0) < 0:
        i, token = _where(loss_mask, loss_mask.values < 0)
        raise DataError(
            f"example {i}: loss_mask is {loss_mask[i][token]} at response token {token}; weights "
            "must be finite and 0 or more"
        )


def _uids(column: Any) -> list[Any]:
    uids = [one_value(value) for value in column]
    if None in uids:
        raise DataError(
            f"example {uids.index(None)}: uid is None; give the id of its prompt, or no uid in any "
            "example"
        )
    return uids


def _flags(name: str, column: Any) -> list[bool]:
    flags = [one_value(value) for value in column]
    for i, flag in enumerate(flags):
        if not isinstance(flag, bool) and flag not in (0, 1):
            raise DataError(f"example {i}: {name} is {flag!r:.40}; it must be True or False")
    return [bool(flag) for flag in flags]


def _arrays(name: str, column: Any, num_dims: int, kinds: str, shape: str) -> list[np.ndarray]:
    """The entries as ndarrays of so many dimensions, of a dtype of these kinds."""
    arrays: list[np.ndarray] = []
    for i, entry in enumerate(column):
        try:
            array = tensor_to_numpy(entry) if isinstance(entry, Tensor) else np.asarray(entry)
        except ValueError:  # rows of different length
            array = np.empty(0, dtype=object)
        if array.ndim != num_dims or array.dtype.kind not in kinds:
            raise DataError(
                f"example {i}: {name} has shape {array.shape} and dtype {array.dtype}; give {shape}"
            )
        if arrays and array.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"example {i}: {name} has shape {array.shape}, example 0 has {arrays[0].shape}; "
                "only the first dimension may differ"
            )
        arrays.append(array)
    return arrays


def _routes(column: Any, lengths: np.ndarray) -> Ragged:
    name = "rollout_expert_indices"
    arrays = _arrays(name, column, 3, "iu", "integers [tokens, layers, top_k]")
    counts = np.array([len(array) for array in arrays], dtype=np.int64)
    too_many = np.flatnonzero(counts > lengths)
    if len(too_many):
        i = int(too_many[0])
        raise DataError(
            f"example {i}: {name} has {counts[i]} tokens, the rollout has {lengths[i]}; give "
            "routes for all of them, or for the first ones"
        )
    flat = np.concatenate(arrays)
    if flat.size and not (flat.min() >= 0 and flat.max() <= _MOST_EXPERTS):
        bad = int(flat[(flat < 0) | (flat > _MOST_EXPERTS)][0])
        raise DataError(f"{name} has an expert {bad}; experts are 0 to {_MOST_EXPERTS}")
    return Ragged.from_lengths(flat.astype(np.int16), counts)


def _images(raw: Mapping[str, Any]) -> dict[str, Ragged]:
    """Patches and grids of the images; None stands for no image."""
    if "pixel_values" not in raw:
        return {}
    pixels, grids = (list(raw[name]) for name in _IMAGES)
    for i, (pixel, grid) in enumerate(zip(pixels, grids, strict=True)):
        if (pixel is None) != (grid is None):
            raise DataError(
                f"example {i} has one of {' and '.join(_IMAGES)}; both are None without an image"
            )
    some = next((pixel for pixel in pixels if pixel is not None), None)
    if some is None:
        return {}
    without = np.zeros((0, *np.shape(some)[1:])), np.zeros((0, 3), dtype=np.int64)
    pixels = [without[0] if pixel is None else pixel for pixel in pixels]
    grids = [without[1] if grid is None else grid for grid in grids]
    pixels = _arrays("pixel_values", pixels, 2, "f", "floats [patches, patch size]")
    grids = _arrays("image_grid_thw", grids, 2, "iu", "integers [images, 3]")
    for i, (pixel, grid) in enumerate(zip(pixels, grids, strict=True)):
        patches = int(grid.prod(axis=1).sum())
        if patches != len(pixel) or grid.shape[1] != 3:
            raise DataError(
                f"example {i}: pixel_values has {len(pixel)} patches, image_grid_thw of shape "
                f"{grid.shape} speaks of {patches}; give what the processor returned"
            )
    columns = {}
    for name, arrays, dtype in zip(_IMAGES, (pixels, grids), (np.float32, np.int64), strict=True):
        flat = np.concatenate(arrays).astype(dtype, copy=False)
        columns[name] = Ragged.from_lengths(flat, [len(array) for array in arrays])
    return columns
