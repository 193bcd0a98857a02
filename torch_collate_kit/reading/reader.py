"""Examples in, columns out, checked. A rollout is an example in other words.

Its prompt and its response are one sequence, whose response tokens are the last ``num_actions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    OWN_FIELDS,
    PerResponseToken,
    PerToken,
)
from torch_collate_kit.batch.placement import whole_examples
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.arrays import route_column
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.fields import DeclaredFields, FieldColumn, read_fields
from torch_collate_kit.reading.media import (
    IMAGES,
    MEDIA,
    TOKEN_TYPES,
    read_images,
    token_type_fields,
)
from torch_collate_kit.reading.numbers import (
    Numbers,
    first_bad,
    in_pairs,
    joined,
    number_column,
    tensor_to_numpy,
)
from torch_collate_kit.reading.raw import (
    KNOWN,
    TARGETS,
    Examples,
    bare_key,
    check_keys,
    first_keys,
    first_with,
    flag_column,
    id_column,
    is_sequence,
    one_value,
    raw_columns,
)
from torch_collate_kit.vision import VisionLayout

__all__ = ["ROLLOUT_KEYS", "are_rollouts", "read_columns", "read_rollouts", "unknown_images"]

_PER_TOKEN, _PER_RESPONSE_TOKEN = PerToken(torch.float32), PerResponseToken(torch.float32)
_LABELS = PerToken(torch.int64, IGNORE_INDEX)
_REQUIRED = ("prompt_ids", "response_ids", "rewards", "loss_mask")
# Columns of rollouts with one number per response token, and the batch field that each becomes.
_OF_RESPONSES = {
    "rewards": "rewards",
    "loss_mask": "loss_mask",
    "logprobs": "rollout_logprobs",
    "advantages": "advantages",
}
_IDS = {"uid": "uids", "trajectory_id": "trajectory_ids"}  # and their names in metadata
_ROUTES = "rollout_expert_indices"
ROLLOUT_KEYS = (*_REQUIRED, "logprobs", "advantages", *_IDS, "is_last_step", _ROUTES)
# Of rollouts with images whose model is not known: they are carried along.
_UNKNOWN_MODEL = VisionLayout("qwen2_vl", image_token_id=None, patch_shape=(1, 1, 1))


def read_columns(
    examples: Examples,
    *,
    train_all: bool = False,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
) -> ExampleColumns:
    """Check SFT examples (DataError names the bad one) and look at them as columns.

    ``train_all``: they have no target, whatever other keys they have. ``fields`` are read too, and
    of a model with ``vision`` the images.
    """
    fields = fields or {}
    of_images = () if vision is None else (*vision.fields, *TOKEN_TYPES)
    media = () if vision is None else tuple(dict.fromkeys((*MEDIA, *of_images)))
    hint = "tokenize the text first"
    raw = raw_columns(examples, (*KNOWN, *fields), "input_ids", hint, sometimes=media)
    owners = {key: f"example {i}" for key, i in first_with(examples).items()}
    if vision is None and "pixel_values" in owners and "pixel_values" not in fields:
        raise unknown_images(owners["pixel_values"])
    check_keys(owners, train_all=train_all, declared=(*fields, *of_images))
    input_ids = _ids("input_ids", raw["input_ids"])
    target = _target_name(raw)
    num_actions = _num_actions(raw, input_ids.lengths) if "num_actions" in raw else None
    weights = _PER_TOKEN if num_actions is None else _PER_RESPONSE_TOKEN
    own: dict[str, PerToken | PerResponseToken] = {}
    if target is not None:
        own[target] = _LABELS if target == "labels" else weights
    if "attention_mask" in raw:
        own["attention_mask"] = _PER_TOKEN
    types = {} if vision is None else token_type_fields(raw, vision)
    columns = read_fields(raw, {**own, **fields, **types}, input_ids.lengths, num_actions)
    if "attention_mask" in raw:
        _check_attention_mask(joined(columns["attention_mask"]))
    images = None if vision is None else read_images(raw, vision, input_ids)
    return ExampleColumns(
        input_ids,
        target,
        None if target is None else columns[target],
        num_actions,
        [FieldColumn(name, spec, columns[name]) for name, spec in {**fields, **types}.items()],
        (*fields, *(() if images is None else images.arrays)),
        images,
    )


def read_rollouts(
    examples: Examples,
    *,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
) -> ExampleColumns:
    """Check rollouts, and look at them as columns, as ``read_columns`` does with SFT examples."""
    fields = fields or {}
    of_images = IMAGES if vision is None else (*MEDIA, *vision.fields)
    hint = f"a rollout has {', '.join(_REQUIRED)}"
    keys = (*ROLLOUT_KEYS, *fields)
    raw = raw_columns(examples, keys, "response_ids", hint, sometimes=of_images)
    needed = (*_REQUIRED, *fields)
    raw = {k: column for k, column in raw.items() if k in needed or not _is_all_none(column)}
    _check_rollout_keys(raw, [key for key in map(str, first_keys(examples)) if key not in fields])
    prompts, responses = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    input_ids, num_actions = in_pairs(prompts, responses), responses.lengths
    for name in {"rewards", "advantages"} & raw.keys():
        raw[name] = _spread(name, raw[name], num_actions)
    own = {key: name for key, name in _OF_RESPONSES.items() if key in raw}
    specs = {**dict.fromkeys(own, _PER_RESPONSE_TOKEN), **fields}
    columns = read_fields(raw, specs, input_ids.lengths, num_actions, are_rollouts=True)
    names = ["response_mask", *own.values()]
    target = columns[own.pop("loss_mask")]
    placed = [FieldColumn(name, OWN_FIELDS[name], columns[key], key) for key, name in own.items()]
    if _ROUTES in raw:
        routes = route_column(raw[_ROUTES], input_ids.lengths)
        placed.append(FieldColumn(_ROUTES, OWN_FIELDS[_ROUTES], routes))
        names += [_ROUTES, "router_padding_mask"]
    placed += [FieldColumn(name, spec, columns[name]) for name, spec in fields.items()]
    if vision is None and any(name in raw for name in IMAGES):
        vision = _UNKNOWN_MODEL
    images = None if vision is None else read_images(raw, vision, input_ids)
    return ExampleColumns(
        input_ids,
        "loss_mask",
        target,
        num_actions,
        placed,
        (*names, *(() if images is None else images.arrays), *fields),
        images,
        _per_example(raw),
        are_rollouts=True,
    )


def unknown_images(owner: str) -> DataError:
    """Images, and no processor that says what they are."""
    return DataError(
        f"{owner} has pixel_values, and the collator does not know the images of the model; give "
        "it the processor in place of the tokenizer"
    )


def _ids(name: str, column: Any) -> Numbers:
    ids = number_column(name, column, "ids")
    lengths = ids.lengths
    if not lengths.all():
        i = int(np.flatnonzero(lengths == 0)[0])
        why = "filter it out"
        if name == "prompt_ids":
            why = "nothing would predict its first response token; put the BOS token there"
        raise DataError(f"example {i}: {name} is empty (0 tokens); {why}")
    return ids


def _target_name(raw: Mapping[str, Any]) -> str | None:
    given = [key for key in TARGETS if key in raw]
    if len(given) > 1:
        raise DataError(
            f"example 0 says twice where its loss is: {' and '.join(given)}; keep one of them"
        )
    return given[0] if given else None


def _num_actions(raw: Mapping[str, Any], lengths: np.ndarray) -> np.ndarray:
    if "loss_mask" not in raw:
        raise DataError(
            "example 0 has num_actions but no loss_mask; give the mask of its last num_actions "
            "tokens, or remove num_actions"
        )
    given = raw["num_actions"]
    if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in "iu":
        given = [one_value(value) for value in given]
        for i, count in enumerate(given):
            if not isinstance(count, int) or isinstance(count, bool):
                raise DataError(
                    f"example {i}: num_actions is {count!r:.40}; it must be an integer, the number "
                    "of tokens at the end that loss_mask covers"
                )
    counts = np.asarray(given)  # no integers if one is beyond 64 bits
    bad = np.flatnonzero((counts < 0) | (counts > lengths))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"example {i} has num_actions={given[i]}, but {lengths[i]} tokens; it counts the "
            "tokens at the end, 0 to all of them"
        )
    return counts.astype(np.int64, copy=False)


def _check_attention_mask(mask: Ragged) -> None:
    if not mask.values.all():
        i, _ = first_bad(mask.values == 0, whole_examples(mask.lengths))
        raise DataError(
            f"example {i}: attention_mask contains a 0, so the example is padded already; "
            "tokenize without padding, collators pad"
        )


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


def _is_all_none(column: Any) -> bool:
    """Whether an optional column stands for one that is not there."""
    if isinstance(column, Ragged | Tensor):
        return False
    if isinstance(column, np.ndarray) and not column.dtype.hasobject:
        return False
    return all(entry is None for entry in column)


def _check_rollout_keys(raw: Mapping[str, Any], given: list[str]) -> None:
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


def _per_example(raw: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Row metadata of rollouts."""
    found: dict[str, list[Any]] = {
        name: id_column(key, raw[key]) for key, name in _IDS.items() if key in raw
    }
    if "is_last_step" in raw:
        found["is_last_step"] = flag_column("is_last_step", raw["is_last_step"])
    return found


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
