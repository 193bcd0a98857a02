"""Examples in any form -> checked columns; a rollout's response is its last ``num_actions``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from torch_collate_kit._checks import plural, type_name
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import (
    FieldSpec,
    PerExample,
    PerResponseToken,
    PerRoutedToken,
    PerToken,
)
from torch_collate_kit.batch.placement import MAX_WIDTH, TargetKind, too_wide
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.ragged import Nested, Ragged, unchecked
from torch_collate_kit.reading.columns import (
    Kind,
    Numbers,
    flag_column,
    id_column,
    is_number,
    number_column,
    scalar_column,
    shape_of,
    spread_numbers,
    text_column,
    vector_column,
)
from torch_collate_kit.reading.entries import (
    DeclaredFields,
    FieldColumn,
    are_int32_ids,
    concatenated,
    joined,
    segment_name,
    weights_of_examples,
)
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.images import read_images, route_column
from torch_collate_kit.reading.keys import (
    CHECKED,
    IMAGES,
    KNOWN,
    MEDIA,
    PER_TOKEN,
    ROLLOUT_KEYS,
    ROLLOUT_PER_TOKEN,
    TARGETS,
    check_one_text,
    raw_columns,
)
from torch_collate_kit.reading.source import Examples, are_nested, is_list_of_rows, is_sequence
from torch_collate_kit.vision import VisionLayout

_SFT_FIELDS: Mapping[str, FieldSpec] = {
    **dict.fromkeys((*TARGETS, *CHECKED), PerToken(torch.float32)),
    "labels": PerToken(torch.int64, IGNORE_INDEX),
    "token_type_ids": PerToken(torch.int64),
}
_ROLLOUT_FIELDS: Mapping[str, FieldSpec] = {
    **dict.fromkeys(
        ("rewards", "loss_mask", "logprobs", "advantages"), PerResponseToken(torch.float32)
    ),
    **dict.fromkeys(CHECKED, PerToken(torch.float32)),
    "rollout_expert_indices": PerRoutedToken(torch.int16),
}
# rollouts with images of an unknown model: they are carried along
_UNKNOWN_MODEL = VisionLayout("qwen2_vl", image_token_id=None, patch_shape=(1, 1, 1))


def read_columns(
    examples: Examples,
    *,
    rollouts: bool | None = False,
    train_all: bool = False,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
    targets: TargetKind = "next_token",
) -> ExampleColumns:
    """Check the examples, and return their columns."""
    options: dict[str, Any] = {"train_all": train_all, "fields": fields or {}, "targets": targets}
    raw, are_rollouts, token_types = raw_columns(
        examples, rollouts=rollouts, vision=vision, **options
    )
    declared = {**(fields or {}), **token_types}
    per_example: dict[str, list[Any]] = {}
    numbers: dict[str, Numbers] = {}
    for key in [key for key, spec in declared.items() if isinstance(spec, PerExample)]:
        if declared[key].dtype is str:
            del declared[key]
            per_example[key] = text_column(key, _declared(key, raw))
        else:
            numbers[key] = _of_examples(key, declared[key], _declared(key, raw))
    offsets, ids = None, "response_ids" if are_rollouts else "input_ids"
    if are_nested(raw[ids]):
        others = [key for key in declared if key not in numbers]
        raw, offsets = opened(raw, (*ROLLOUT_PER_TOKEN, *PER_TOKEN, *others, *MEDIA), ids)
    per_segment = _row_metadata(raw, offsets) if are_rollouts else {}
    with examples_named(segment_name(offsets)):
        columns = _per_token(raw, declared, numbers, vision, are_rollouts=are_rollouts)
    if not per_example and not per_segment and offsets is None and targets == "next_token":
        return columns  # a copy takes 10 us
    found: dict[str, Any] = {"per_example": per_example, "per_segment": per_segment}
    return replace(columns, **found, segment_offsets=offsets, targets=targets)


def _per_token(
    raw: dict[str, Any],
    declared: Mapping[str, FieldSpec],
    numbers: Mapping[str, Numbers],
    vision: VisionLayout | None,
    *,
    are_rollouts: bool,
) -> ExampleColumns:
    """Read the columns with an entry per token; ``numbers`` are the declared fields per example."""
    ids, num_actions = _rollout_ids(raw) if are_rollouts else _sft_ids(raw)
    table = _ROLLOUT_FIELDS if are_rollouts else _SFT_FIELDS
    own = {key: spec for key, spec in table.items() if key in raw and key not in declared}
    if vision is not None:
        own.pop("token_type_ids", None)
    if num_actions is not None:
        own["loss_mask"] = _ROLLOUT_FIELDS["loss_mask"]
    columns = {}
    for key, spec in {**own, **declared}.items():
        values = numbers.get(key)
        if values is None:
            values = _field(key, spec, raw, ids, num_actions, are_rollouts=are_rollouts)
        columns[key] = FieldColumn(key, spec, values, key if key in own else None)
    if "logprobs" in own:  # at most 0, and rounding
        columns["logprobs"] = replace(columns["logprobs"], name="rollout_logprobs", most=1e-3)
    for key in CHECKED:
        if own.pop(key, None) is not None:
            check_one_text(key, joined(columns.pop(key).values))
    targets = [key for key in TARGETS if key in own]
    if len(targets) > 1:
        raise DataError(
            f"example 0 has two loss targets: {' and '.join(targets)}; keep one of them"
        )
    names = ["token_type_ids"] if "token_type_ids" in own else []
    if are_rollouts:
        names = ["response_mask", *(columns[key].name for key in own)]
    if "rollout_expert_indices" in own:
        names.append("router_padding_mask")
    if are_rollouts and vision is None and any(name in raw for name in IMAGES):
        vision = _UNKNOWN_MODEL
    images = None if vision is None else read_images(raw, vision, ids)
    return ExampleColumns(
        ids,
        columns.pop(targets[0]) if targets else None,
        num_actions,
        list(columns.values()),
        (*names, *declared, *(() if images is None else images.arrays)),
        images,
        are_rollouts=are_rollouts,
        weights=weights_of_examples(raw["weight"]) if "weight" in raw else None,
    )


def _sft_ids(raw: Mapping[str, Any]) -> tuple[Numbers, np.ndarray | None]:
    """Return the ids, and ``num_actions`` int64 [N] if it was given."""
    ids = _ids("input_ids", raw["input_ids"])
    if "num_actions" not in raw:
        return ids, None
    if "loss_mask" not in raw:
        raise DataError(
            "example 0 has num_actions but no loss_mask; give the mask of its last num_actions "
            "tokens, or remove num_actions"
        )
    wanted = "it must be an integer, the number of tokens at the end that loss_mask covers"
    counts, lengths = scalar_column("num_actions", raw["num_actions"], "iu", wanted), ids.lengths
    bad = np.flatnonzero((counts < 0) | (counts > lengths))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"example {i} has num_actions={counts[i]}, but {lengths[i]} tokens; it counts the "
            "tokens at the end, 0 to all of them"
        )
    return ids, counts.astype(np.int64, copy=False)


def _rollout_ids(raw: dict[str, Any]) -> tuple[Ragged, np.ndarray]:
    """Return prompts and responses as one, int32 if they fit, and the lengths of the responses."""
    prompts, responses = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    num_actions = responses.lengths
    lengths = prompts.lengths + num_actions
    if (longest := int(lengths.max())) > MAX_WIDTH:
        raise too_wide(longest, f"filter out example {lengths.argmax()}")
    for name in ("rewards", "advantages"):
        if name in raw:
            raw[name] = spread_numbers(name, raw[name], num_actions)
    sides = (prompts, responses)
    is_narrow = all(isinstance(side, Ragged) and are_int32_ids(side.values) for side in sides)
    dtype = np.dtype(np.int32 if is_narrow else np.int64)
    parts: list[Any] = [None] * (2 * len(prompts))
    parts[::2], parts[1::2] = (
        unchecked(side.values.astype(dtype), side.offsets) if isinstance(side, Ragged) else side
        for side in sides
    )
    if {part.dtype for part in parts[:2]} == {dtype}:
        return Ragged.from_lengths(concatenated(parts), lengths), num_actions
    values = np.concatenate(parts, dtype=dtype, casting="unsafe")
    return Ragged.from_lengths(values, lengths), num_actions


def _ids(name: str, column: Any) -> Numbers:
    ids = number_column(name, column, "ids")
    is_empty = ids.offsets[1:] == ids.offsets[:-1]
    if is_empty.any():
        i = int(is_empty.argmax())
        if name == "input_ids":
            raise DataError(f"example {i} is empty (input_ids has 0 tokens); filter it out")
        hint = "filter it out"
        if name == "prompt_ids":
            hint = "nothing would predict its first response token; put the BOS token there"
        raise DataError(f"example {i}: {name} is empty (0 tokens); {hint}")
    return ids


def _field(
    key: str,
    spec: FieldSpec,
    raw: Mapping[str, Any],
    ids: Numbers,
    num_actions: np.ndarray | None,
    *,
    are_rollouts: bool,
) -> Numbers:
    """Return the column of a field of our own or a declared one."""
    column = _declared(key, raw)
    if isinstance(spec, PerRoutedToken):
        return route_column(column, ids.lengths)
    is_response = isinstance(spec, PerResponseToken)
    if is_response and num_actions is None:
        raise DataError(
            f"fields declares {key} per response token, and the examples have no num_actions, "
            "which says how many these are; give it, or declare PerToken"
        )
    dtype: Any = spec.dtype  # of a string it is read elsewhere
    is_float = dtype.is_floating_point or dtype == torch.bool
    kind: Kind = "labels" if key == "labels" else "numbers" if is_float else "whole numbers"
    rows = _numbers(key, column, kind, getattr(spec, "shape", ()))
    if is_response or not np.array_equal(rows.offsets, ids.offsets):
        expected = np.asarray(num_actions if is_response else ids.lengths)
        wrong = np.flatnonzero(rows.lengths != expected)
        if len(wrong):
            i = int(wrong[0])
            wanted = _wanted_entries(key, int(expected[i]), is_response, are_rollouts)
            raise DataError(f"example {i}: {key} has {rows.lengths[i]} entries, {wanted}")
    return rows


def _of_examples(key: str, spec: Any, column: Any) -> Ragged:
    """Return one entry per example, a number or a vector."""
    if not spec.shape:
        wanted = "it is declared PerExample, so give one number"
        numbers = scalar_column(key, column, "iufb", wanted)
    else:
        kind: Kind = "numbers" if spec.dtype.is_floating_point else "whole numbers"
        rows = number_column(key, column, kind)
        if len(wrong := np.flatnonzero(rows.lengths != spec.shape[0])):
            i = int(wrong[0])
            raise DataError(
                f"example {i}: {key} has {rows.lengths[i]} entries, and the field's shape is "
                f"{spec.shape}; give {spec.shape[0]}"
            )
        numbers = joined(rows).values.reshape(-1, *spec.shape)
    return Ragged(numbers, np.arange(len(numbers) + 1))


def _numbers(key: str, column: Any, kind: Kind, shape: tuple[int, ...]) -> Numbers:
    """Return the numbers, or vectors of this shape, of a column."""
    if shape:
        return vector_column(key, column, kind, shape)
    try:
        return number_column(key, column, kind)
    except DataError as error:
        if key in (*KNOWN, *ROLLOUT_KEYS) or not (found := shape_of(column)):
            raise
        raise DataError(f"{error}; for a vector per token declare shape={found}") from error


def _declared(key: str, raw: Mapping[str, Any]) -> Any:
    """Return the column of a field; DataError if no example has one."""
    if key not in raw:
        raise DataError(
            f"example 0 has no {key}, which fields declares; give every example one, or "
            "leave it out of fields"
        )
    return raw[key]


def _wanted_entries(key: str, expected: int, is_response: bool, are_rollouts: bool) -> str:
    """Return the part of an error with the number of entries that a field needs."""
    if not is_response:
        hint = ""
        if key == "loss_mask":
            hint = " (or pass num_actions too, if it is the mask of the last tokens)"
        owner = "the rollout" if are_rollouts else "input_ids"
        return f"{owner} has {expected} tokens; give one entry per token{hint}"
    if not are_rollouts:
        return f"num_actions={expected}; give one entry for each of the last num_actions tokens"
    numbers = {"rewards": "one number for the last token, or ", "advantages": "one number, or "}
    wanted = f"{numbers.get(key, '')}one entry per response token"
    return f"response_ids has {expected} tokens; give {wanted}"


def _row_metadata(raw: Mapping[str, Any], offsets: np.ndarray | None) -> dict[str, list[Any]]:
    names = [key for key in ("uid", "trajectory_id") if key in raw]
    found: dict[str, list[Any]] = {f"{key}s": id_column(key, raw[key]) for key in names}
    if "is_last_step" in raw:
        found["is_last_step"] = flag_column("is_last_step", raw["is_last_step"])
    if offsets is not None:  # the segments of a rollout are steps of one trajectory
        owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)).tolist()
        last = found.setdefault("is_last_step", [True] * (len(offsets) - 1))
        found = {name: [values[i] for i in owners] for name, values in found.items()}
        found["is_last_step"] = [last[i] and i != j for i, j in pairwise([*owners, -1])]
    return found


def opened(
    raw: Mapping[str, Any], keys: Collection[str], ids: str
) -> tuple[dict[str, Any], np.ndarray]:
    """Return ``raw`` with an entry per segment in ``ids`` and ``keys``; the offsets of examples."""
    columns = dict(raw)
    columns[ids], counts = opened_column(ids, raw[ids], ids)
    if not counts.all():
        raise DataError(f"example {counts.argmin()} is empty ({ids} has no segment); filter it out")
    for key in keys:
        if key not in raw or key == ids:
            continue
        columns[key], found = opened_column(key, raw[key], ids, counts)
        if len(wrong := np.flatnonzero(found != counts)):
            i = int(wrong[0])
            raise DataError(
                f"example {i}: {key} has {plural(int(found[i]), 'segment')}, {ids} has "
                f"{counts[i]}; give one entry for each segment"
            )
    if "weight" in raw:  # of an example, for all of its segments
        columns["weight"] = np.repeat(weights_of_examples(raw["weight"]), counts)
    return columns, np.append(0, np.cumsum(counts))


def opened_column(
    key: str, column: Any, ids: str = "input_ids", counts: np.ndarray | None = None
) -> tuple[Any, np.ndarray]:
    """Return the column with an entry per segment, and the number of segments of each example."""
    if isinstance(column, Nested):
        return column.rows, np.diff(column.offsets)
    entries: list[Any] = list(column)
    if key == "num_actions":
        is_list = [is_sequence(entry) or np.ndim(entry) == 1 for entry in entries]
        wanted = "a list with one number for each segment"
    elif key in MEDIA and counts is not None:  # None of an example without an image
        pairs = zip(entries, counts.tolist(), strict=True)
        entries = [[None] * count if entry is None else entry for entry, count in pairs]
        is_list = [is_sequence(entry) for entry in entries]
        wanted = "a list with one array, or None, for each segment"
    elif key in ("rewards", "advantages") and counts is not None:
        of_all, pairs = key == "advantages", zip(entries, counts.tolist(), strict=True)
        entries = [
            [entry if of_all else 0.0] * (n - 1) + [entry] if is_number(entry) else entry
            for entry, n in pairs
        ]
        is_list = [is_sequence(entry) or np.ndim(entry) > 0 for entry in entries]
        wanted = "one number, or a list with a number or a list for each segment"
    else:
        is_list = [
            is_list_of_rows(entry) or (is_sequence(entry) and not len(entry)) for entry in entries
        ]
        wanted = "a list with one list for each segment"
    if not all(is_list):
        i = is_list.index(False)
        raise DataError(
            f"example {i}: {key} is {type_name(entries[i])} that is not a list of segments, as "
            f"{ids} of example 0 is; give {wanted}"
        )
    return list(chain.from_iterable(entries)), np.array(list(map(len, entries)), dtype=np.int64)
