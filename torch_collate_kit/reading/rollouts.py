"""Rollouts in, columns out, checked: prompts, responses, and what belongs to response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.fields import OWN_FIELDS
from torch_collate_kit.batch.placement import whole_examples
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.arrays import route_column
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.fields import DeclaredFields, FieldColumn, read_declared
from torch_collate_kit.reading.media import IMAGES, MEDIA, read_images
from torch_collate_kit.reading.numbers import (
    Numbers,
    first_bad,
    in_pairs,
    joined,
    number_column,
    tensor_to_numpy,
)
from torch_collate_kit.reading.raw import (
    Examples,
    bare_key,
    first_keys,
    flag_column,
    id_column,
    is_sequence,
    one_value,
    raw_columns,
)
from torch_collate_kit.reading.targets import as_flags, is_bad_weight, weight_error
from torch_collate_kit.vision import VisionLayout

__all__ = ["ROLLOUT_KEYS", "are_rollouts", "read_rollouts"]

# Columns with one number per response token, and the batch field that each becomes.
_RESPONSE_FIELDS = {
    "rewards": "rewards",
    "loss_mask": "loss_mask",
    "logprobs": "rollout_logprobs",
    "advantages": "advantages",
}
_REQUIRED = ("prompt_ids", "response_ids", "rewards", "loss_mask")
_IDS = {"uid": "uids", "trajectory_id": "trajectory_ids"}  # and their names in metadata
_ROUTES = "rollout_expert_indices"
ROLLOUT_KEYS = (
    *_REQUIRED,
    "logprobs",
    "advantages",
    *_IDS,
    "is_last_step",
    _ROUTES,
)
# Of rollouts with images whose model is not known: they are carried along.
_UNKNOWN_MODEL = VisionLayout("qwen2_vl", image_token_id=None, patch_shape=(1, 1, 1))


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


def read_rollouts(
    examples: Examples,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
) -> ExampleColumns:
    """Check the rollouts (DataError names the bad one) and look at them as columns.

    Prompt and response are one example, whose response tokens are its last ``num_actions``.
    """
    fields = fields or {}
    hint = f"a rollout has {', '.join(_REQUIRED)}"
    of_images = IMAGES if vision is None else (*MEDIA, *vision.fields)
    keys = (*ROLLOUT_KEYS, *fields)
    raw = raw_columns(examples, keys, "response_ids", hint, sometimes=of_images)
    needed = (*_REQUIRED, *fields)
    raw = {k: column for k, column in raw.items() if k in needed or not _is_all_none(column)}
    _check_keys(raw, [key for key in map(str, first_keys(examples)) if key not in fields])
    prompts, responses = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    num_actions = responses.lengths
    input_ids = in_pairs(prompts, responses)
    _check_ids(input_ids, prompts.lengths)
    values = {
        field: _response_field(name, raw[name], num_actions)
        for name, field in _RESPONSE_FIELDS.items()
        if name in raw
    }
    names = ["response_mask", *values]
    target = values.pop("loss_mask")
    if _ROUTES in raw:
        values[_ROUTES] = route_column(raw[_ROUTES], input_ids.lengths)
        names += [_ROUTES, "router_padding_mask"]
    if vision is None and any(name in raw for name in IMAGES):
        vision = _UNKNOWN_MODEL
    images = None if vision is None else read_images(raw, vision, input_ids)
    per_example: dict[str, list[Any]] = {
        field: id_column(name, raw[name]) for name, field in _IDS.items() if name in raw
    }
    if "is_last_step" in raw:
        per_example["is_last_step"] = flag_column("is_last_step", raw["is_last_step"])
    columns = [FieldColumn(k, OWN_FIELDS[k], of) for k, of in values.items()]
    columns += read_declared(raw, fields, input_ids.lengths, num_actions)
    names += [*(() if images is None else images.arrays), *fields]
    return ExampleColumns(
        input_ids,
        "loss_mask",
        target,
        num_actions,
        columns,
        tuple(names),
        images,
        per_example,
        are_rollouts=True,
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
    for name in (name for name in (*ROLLOUT_KEYS, *IMAGES) if name not in raw):
        for key in (key for key in given if key not in (*ROLLOUT_KEYS, *IMAGES)):
            if bare_key(key) == bare_key(name) or (name == "logprobs" and _is_logprobs(key)):
                raise DataError(
                    f"example 0 has no {name}, but {key!r} looks like it; rename it to {name}, or "
                    "remove it"
                )


def _is_logprobs(key: str) -> bool:
    return "logprob" in bare_key(key) or bare_key(key).endswith("logp")


def _ids(name: str, column: Any) -> Numbers:
    ids = number_column(name, column, "ids")
    lengths = ids.lengths
    if not lengths.all():
        i = int(np.flatnonzero(lengths == 0)[0])
        why = (
            "nothing would predict its first response token; put the BOS token there"
            if name == "prompt_ids"
            else "filter it out"
        )
        raise DataError(f"example {i}: {name} is empty (0 tokens); {why}")
    return ids


def _check_ids(input_ids: Ragged, prompt_lengths: np.ndarray) -> None:
    if input_ids.values.min() < 0:
        i, token = _where(input_ids, input_ids.values < 0)
        value, hidden = input_ids[i][token], int(prompt_lengths[i])
        name = "prompt_ids" if token < hidden else "response_ids"
        place = token if token < hidden else token - hidden
        raise DataError(f"example {i}: {name} is {value} at token {place}; token ids are 0 or more")


def _where(column: Ragged, is_bad: np.ndarray) -> tuple[int, int]:
    """The first bad entry: its example, and its place there."""
    return first_bad(is_bad, whole_examples(column.lengths))


def _response_field(name: str, column: Any, lengths: np.ndarray) -> Ragged:
    """One float32 per response token. ``rewards`` and ``advantages`` may be one per rollout."""
    if name in ("rewards", "advantages"):
        column = _spread(name, column, lengths)
    given = joined(number_column(name, column, "numbers"))
    wrong = np.flatnonzero(given.lengths != lengths)
    if len(wrong):
        i = int(wrong[0])
        one = {"rewards": "one number for the last token, or ", "advantages": "one number, or "}
        raise DataError(
            f"example {i}: {name} has {given.lengths[i]} entries, response_ids has {lengths[i]} "
            f"tokens; give {one.get(name, '')}one entry per response token"
        )
    if name == "loss_mask" and (given := as_flags(given)).values.dtype == np.bool_:
        return given
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
    if name == "loss_mask" and (is_bad := is_bad_weight(given.values)).any():
        i, token = _where(given, is_bad)
        weight = given[i][token]
        raise weight_error(f"example {i}: {name}", weight, token, f"response token {token}")
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
    numbers = np.zeros(len(lengths))
    for i, (value, is_one) in enumerate(zip(column, is_number, strict=True)):
        if is_one:
            numbers[i] = _number(name, i, value)
        elif not is_sequence(value) and not isinstance(value, np.ndarray | Tensor):
            kind = "None" if value is None else type(value).__name__
            raise DataError(
                f"example {i}: {name} is {kind}; give one number, or one per response token"
            )
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
