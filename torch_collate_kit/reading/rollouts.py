"""Rollouts in, columns out, checked: prompts, responses, and what belongs to response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.declared import DeclaredColumn, DeclaredFields, read_declared
from torch_collate_kit.reading.grouping import flag_column, id_column
from torch_collate_kit.reading.media import IMAGES, image_columns, route_column
from torch_collate_kit.reading.numbers import (
    LEAST_WEIGHT,
    Placed,
    as_weights,
    bad_weight,
    int_column,
    joined,
    narrow_ids,
    taken,
    tensor_to_numpy,
    weight_column,
)
from torch_collate_kit.reading.raw import (
    Examples,
    first_keys,
    is_sequence,
    one_value,
    raw_columns,
)

__all__ = ["ROLLOUT_KEYS", "Rollouts", "are_rollouts", "read_rollouts"]

# Columns with one number per response token, and the batch field that each becomes.
_RESPONSE_FIELDS = {
    "rewards": "rewards",
    "loss_mask": "loss_mask",
    "logprobs": "rollout_logprobs",
    "advantages": "advantages",
}
_REQUIRED = ("prompt_ids", "response_ids", "rewards", "loss_mask")
_IDS = {"uid": "uids", "trajectory_id": "trajectory_ids"}  # and their names in metadata
_PER_ROLLOUT = (*_IDS, "is_last_step")
ROLLOUT_KEYS = (
    *_REQUIRED,
    "logprobs",
    "advantages",
    *_PER_ROLLOUT,
    "rollout_expert_indices",
    *IMAGES,
)


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a batch, a column at a time, each as one flat ndarray."""

    prompt_ids: Ragged
    response_ids: Ragged
    lengths: np.ndarray  # int64 [N], tokens of prompt and response
    fields: dict[str, Ragged]  # float32, one value per response token, by the name in a batch
    routes: Ragged | None  # [tokens with a route, layers, top_k]
    images: dict[str, Ragged]  # pixel_values [patches, dim], image_grid_thw [n, 3], of any dtype
    per_rollout: dict[str, list[Any]]  # uids, trajectory_ids, is_last_step
    declared: list[DeclaredColumn]

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that a batch has of them, beside those of all tokens."""
        routes = ("rollout_expert_indices", "router_padding_mask")
        return (
            "response_mask",
            *self.fields,
            *(() if self.routes is None else routes),
            *self.images,
            *(column.name for column in self.declared),
        )

    def place(self, pieces: Pieces) -> Placed:
        """What the rollouts hold, in the order of the pieces, each of which is a whole one."""
        examples = pieces.examples
        counts = self.response_ids.lengths[examples]
        columns: dict[str, np.ndarray | Tensor] = {"input_ids": self._ids(examples)}
        for name, values in self.fields.items():
            taken_values = _in_order(values, examples)
            if name == "loss_mask":
                weights = as_weights(taken_values)
                assert weights is not None  # they were checked
                columns["loss_weights"] = weights
                num_loss_tokens = int(np.count_nonzero(weights))
            else:
                columns[name] = taken_values.copy()
        offsets, routed = {}, None
        if self.routes is not None:
            columns["rollout_expert_indices"] = _in_order(self.routes, examples).copy()
            routed = self.routes.lengths[examples]
        for name, images in self.images.items():
            columns[name] = _in_order(images, examples).copy()
            offsets[name] = np.append(0, np.cumsum(images.lengths[examples]))
        for column in self.declared:
            columns[column.name] = column.place(pieces, pieces.starts, counts)
        return Placed(columns, num_loss_tokens, counts, routed, offsets)

    def _ids(self, examples: np.ndarray) -> np.ndarray:
        """Prompt and response of each rollout, joined."""
        prompts, responses = self.prompt_ids, self.response_ids
        bounds = [
            offsets[examples + last].tolist()
            for offsets in (prompts.offsets, responses.offsets)
            for last in (0, 1)
        ]
        parts = [
            part
            for a, b, c, d in zip(*bounds, strict=True)
            for part in (prompts.values[a:b], responses.values[c:d])
        ]
        values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        narrow = narrow_ids(values)
        assert narrow is not None  # they were checked
        return narrow


def _in_order(column: Ragged, examples: np.ndarray) -> np.ndarray:
    """The rows of the named examples, joined; it may be a view."""
    lengths = column.lengths[examples]
    return taken(column, examples, np.zeros_like(lengths), lengths)


def are_rollouts(examples: Examples) -> bool:
    """Whether the examples come as prompt and response; with ``input_ids`` too, as a whole."""
    if not isinstance(examples, Mapping) and (not is_sequence(examples) or not len(examples)):
        return False
    keys = first_keys(examples)
    if not isinstance(keys, Mapping):
        return False
    if "input_ids" in keys:
        return all(key in keys for key in _REQUIRED)
    return "prompt_ids" in keys or "response_ids" in keys


def read_rollouts(examples: Examples, fields: DeclaredFields | None = None) -> Rollouts:
    """Check the rollouts (DataError names the bad one) and look at them as columns."""
    fields = fields or {}
    hint = f"a rollout has {', '.join(_REQUIRED)}"
    raw = raw_columns(examples, (*ROLLOUT_KEYS, *fields), "response_ids", hint)
    needed = (*_REQUIRED, *fields)
    raw = {k: column for k, column in raw.items() if k in needed or not _is_all_none(column)}
    _check_keys(raw, [key for key in map(str, first_keys(examples)) if key not in fields])
    prompt_ids, response_ids = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    lengths = response_ids.lengths
    values = {
        field: _response_field(name, raw[name], response_ids)
        for name, field in _RESPONSE_FIELDS.items()
        if name in raw
    }
    _check_loss_mask(values["loss_mask"])
    per_rollout: dict[str, list[Any]] = {
        field: id_column(name, raw[name]) for name, field in _IDS.items() if name in raw
    }
    if "is_last_step" in raw:
        per_rollout["is_last_step"] = flag_column("is_last_step", raw["is_last_step"])
    routes = raw.get("rollout_expert_indices")
    totals = prompt_ids.lengths + lengths
    return Rollouts(
        prompt_ids,
        response_ids,
        totals,
        values,
        None if routes is None else route_column(routes, totals),
        image_columns(raw),
        per_rollout,
        read_declared(raw, fields, totals, lengths),
    )


def _is_all_none(column: Any) -> bool:
    """Whether an optional column stands for one that is not there."""
    if isinstance(column, Ragged | Tensor):
        return False
    if isinstance(column, np.ndarray) and not column.dtype.hasobject:
        return False
    return all(entry is None for entry in column)


def _check_keys(raw: Mapping[str, Any], given: list[str]) -> None:
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise DataError(
            f"no {' and no '.join(missing)} in example 0, got keys {sorted(given)}; a "
            f"rollout has {', '.join(_REQUIRED)}"
        )
    for name in (name for name in ROLLOUT_KEYS if name not in raw):
        for key in (key for key in given if key not in ROLLOUT_KEYS):
            if _bare(key) == _bare(name) or (name == "logprobs" and _is_logprobs(key)):
                raise DataError(
                    f"example 0 has no {name}, but {key!r} looks like it; rename it to {name}, or "
                    "remove it"
                )
    alone = [key for key in IMAGES if key in raw]
    if len(alone) == 1:
        raise DataError(
            f"example 0 has {alone[0]}, but not both of {' and '.join(IMAGES)}; give what the "
            "processor returned"
        )


def _bare(key: str) -> str:
    return key.lower().replace("_", "").rstrip("s")


def _is_logprobs(key: str) -> bool:
    return "logprob" in _bare(key) or _bare(key).endswith("logp")


def _ids(name: str, column: Any) -> Ragged:
    ids = joined(int_column(name, column))
    if ids.values.dtype == np.uint64:  # input_ids would wrap what int64 does not hold
        ids = Ragged(ids.values.astype(np.int64), ids.offsets)
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
    """One float32 per response token. ``rewards`` and ``advantages`` may be one per rollout."""
    lengths = response_ids.lengths
    if name in ("rewards", "advantages"):
        column = _spread(name, column, lengths)
    given = joined(weight_column(name, column, "give numbers"))
    wrong = np.flatnonzero(given.lengths != lengths)
    if len(wrong):
        i = int(wrong[0])
        one = {"rewards": "one number for the last token, or ", "advantages": "one number, or "}
        raise DataError(
            f"example {i}: {name} has {given.lengths[i]} entries, response_ids has {lengths[i]} "
            f"tokens; give {one.get(name, '')}one entry per response token"
        )
    if name == "loss_mask":
        is_lost = (given.values > 0) & (given.values < LEAST_WEIGHT)
        if is_lost.any():
            i, token = _where(given, is_lost)
            raise bad_weight(i, name, float(given[i][token]), token, token)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        values = given.values.astype(np.float32, copy=False)
        total = values.sum(dtype=np.float64)
    if not np.isfinite(total):
        i, token = _where(given, ~np.isfinite(values))
        is_logprob = name == "logprobs"
        hint = "of a token that the policy did not sample give 0.0, or " if is_logprob else ""
        raise DataError(
            f"example {i}: {name} is {given[i][token]} at response token {token}; it must be "
            f"finite in float32: {hint}filter such rollouts out"
        )
    return Ragged(values, given.offsets)


def _spread(name: str, column: Any, lengths: np.ndarray) -> Any:
    """Numbers to rows: a reward to the last token, an advantage to every token."""
    if isinstance(column, Ragged):
        return column
    if isinstance(column, np.ndarray | Tensor) and column.ndim == 1:
        column = tensor_to_numpy(name, None, column) if isinstance(column, Tensor) else column
        if column.dtype.kind in "iufb":
            return _rows_of(name, column, lengths)
        column = column.tolist()
    types = set(map(type, column))
    if types == {list} or (types == {np.ndarray} and all(value.ndim for value in column)):
        return column
    is_number = [_is_number(value) for value in column]
    for i, (value, is_one) in enumerate(zip(column, is_number, strict=True)):
        if not is_one and not is_sequence(value) and not isinstance(value, np.ndarray | Tensor):
            kind = "None" if value is None else type(value).__name__
            raise DataError(
                f"example {i}: {name} is {kind}; give one number, or one per response token"
            )
    if not any(is_number):
        return column
    numbers = np.zeros(len(lengths))
    for i, (value, is_one) in enumerate(zip(column, is_number, strict=True)):
        if is_one:
            numbers[i] = _number(name, i, value)
    rows = _rows_of(name, numbers, lengths)
    if all(is_number):
        return rows
    parts = zip(column, rows, is_number, strict=True)
    return [row if is_one else value for value, row, is_one in parts]


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 0
    return isinstance(value, int | float | np.number | np.bool_)


def _number(name: str, index: int, value: Any) -> float:
    number = one_value(value)
    try:
        if isinstance(number, str | bytes):
            raise TypeError
        return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise DataError(
            f"example {index}: {name} is {number!r:.40} ({type(number).__name__}); give one number "
            "that float32 holds, or one per response token"
        ) from None


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
