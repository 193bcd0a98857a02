"""Lengths of examples, from whatever holds them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing.atoms import Patches, checked_sizes
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.trees import depths_of
from torch_collate_kit.ragged import Ragged, unchecked
from torch_collate_kit.reading.columns import number_column
from torch_collate_kit.reading.entries import joined
from torch_collate_kit.reading.keys import (
    CHECKED,
    check_one_text,
    column_of,
    first_with,
    refuse_boundaries,
)
from torch_collate_kit.reading.reader import opened_column
from torch_collate_kit.reading.source import (
    Source,
    are_nested,
    check_even,
    is_list_of_rows,
    is_sequence,
)

_IDS = (("input_ids",), ("prompt_ids", "response_ids"))
_NO_NUMBERS = (Mapping, str, os.PathLike)
_ROWS = 4096  # read at a time


class DataLengths(NamedTuple):
    """Sizes of the examples of a plan."""

    lengths: Any
    """int64 [N], tokens of each example; of lists of segments a Ragged with those of each."""
    patches: Patches | None = None
    """Vision patches of each example; None without images, or if unknown."""
    dummy_image_tokens: int = 0
    """Tokens of the smallest image, which a row without one may need."""
    shared: np.ndarray | None = None
    """int64 [Q], tokens that each segment shares with an earlier one of its example; None where
    examples are not lists of segments, or have images."""


def data_lengths(data: Any) -> DataLengths:
    """Return given lengths, or those of a dataset in any form, reading only its masks."""
    lengths: Any
    patches, smallest, shared = None, 0, None
    if isinstance(data, Batch):
        raise TypeError(
            "data is a Batch, whose rows are padded or packed already; pass the examples that the "
            "batch was made of"
        )
    begins_with_number = is_sequence(data) and not isinstance(next(iter(data), 0), _NO_NUMBERS)
    if isinstance(data, Ragged):  # as `pack` reads it, and TokenizedDataset.lengths returns it
        lengths = _checked(data)
    elif hasattr(data, "dtype") or isinstance(data, range) or begins_with_number:
        lengths = checked_lengths(data)
    else:
        source = Source(data, "data", "lengths, or ")
        if source.is_arrow or isinstance(source.data, Mapping):
            refuse_boundaries(source.names, source.first_rows, (), lambda _: "data")
        if source.is_arrow and "input_ids" in source.names:
            names = [name for name in ("input_ids", *CHECKED) if name in source.names]
            data = TokenizedDataset(source.data, columns=names)  # a reader is read once
        if isinstance(data, TokenizedDataset) and data.vision is not None:
            patches, smallest = data.patches, data.vision.smallest_tokens
        is_dataset = isinstance(data, TokenizedDataset)
        found: Any = _of_dataset(data) if is_dataset else None
        if is_dataset and patches is None and data.shared_lengths is not None:
            shared = data.shared_lengths.values
        if not is_dataset:
            found, shared = _of_source(source)
        lengths = _checked(found)
    if not len(lengths):
        raise DataError("there are no examples (0 lengths), so nothing to report; pass at least 1")
    return DataLengths(lengths, patches, smallest, shared)


def _checked(lengths: Any) -> np.ndarray | Ragged:
    values, offsets = checked_sizes(lengths)
    return values if offsets is None else unchecked(values, offsets)


def _of_dataset(data: TokenizedDataset) -> np.ndarray | Ragged:
    for start in range(0, len(data), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(data)))
        _check_whole(data._take(rows, {*CHECKED} & {*data.column_names}), start)
    return data.lengths


def _of_source(source: Source) -> tuple[np.ndarray | Ragged, np.ndarray | None]:
    """Return the tokens of each example, or segment, and those that each segment shares: int64."""
    names = next((names for names in _IDS if all(name in source.names for name in names)), _IDS[0])
    if source.is_arrow or isinstance(source.data, Mapping):
        _check_columns(source, names[0])
    counts = [np.empty(0, dtype=np.int64)]
    nested: list[Ragged] = []
    depths: list[np.ndarray] = []
    for start in range(0, len(source), _ROWS):
        part = source.part(start, min(start + _ROWS, len(source)))
        if not isinstance(part, Mapping):
            part = _as_columns(part, names, start)
        _check_whole(part, start)
        if are_nested(part[names[0]]):
            opened = [opened_column(name, part[name], names[0]) for name in names]
            flat, per_example = opened[0]
            lengths = _lengths(names[0], flat, start)
            ids = flat.values if isinstance(flat, Ragged) else np.concatenate(list(flat))
            if len(opened) > 1:  # prompts and responses of rollouts
                responses = opened[1][0]
                pairs = zip(flat, responses, strict=True)
                ids = np.concatenate([side for pair in pairs for side in pair])
                lengths = lengths + _lengths(names[-1], responses, start)
            nested.append(Ragged.from_lengths(lengths, per_example))
            depths.append(
                depths_of(np.asarray(ids), running_sum(lengths), running_sum(per_example))
            )
            continue
        counts.append(np.sum([_lengths(name, part[name], start) for name in names], axis=0))
    if nested and len(counts) > 1:
        raise DataError(
            "some examples are lists of segments, and others are not; give every example a list, "
            "of one where it has one segment"
        )
    return (
        (Ragged.cat(nested), np.concatenate(depths)) if nested else (np.concatenate(counts), None)
    )


def _check_columns(source: Source, name: str) -> None:
    """Check that there are ids, one row per example, and columns of one length."""
    if name not in source.names:
        raise DataError(
            f"no input_ids among the columns {sorted(map(str, source.names))}; tokenize first "
            "(tokenize_chat_dataset), or pass lengths"
        )
    if source.is_arrow:
        return
    columns = source.data
    if isinstance(next(iter(columns[name]), None), int | np.integer):
        raise DataError(
            f"a mapping is taken as columns, but its {name} are the tokens of one example; pass a "
            "list: [example]"
        )
    check_even(columns, name)


def _as_columns(examples: Sequence[Any], names: Sequence[str], start: int) -> dict[str, list[Any]]:
    """Return the ids of examples, or of rollouts, and their masks."""
    for i, example in enumerate(examples, start):
        is_mapping = isinstance(example, Mapping)
        if not is_mapping or any(name not in example for name in names):
            keys = sorted(map(str, example)) if is_mapping else type(example).__name__
            raise DataError(
                f"example {i} has no {names[0]}, got {keys}; tokenize it first (tokenize_chat), or "
                "pass lengths"
            )
    columns = {name: [example[name] for example in examples] for name in names}
    refuse_boundaries(
        first_with(examples), column_of(examples), (), lambda i: f"example {start + i}"
    )
    return columns | {name: [example.get(name) for example in examples] for name in CHECKED}


def _lengths(name: str, column: Any, start: int) -> np.ndarray:
    if isinstance(column, Ragged):
        return column.lengths
    for i, ids in enumerate(column, start):
        is_text = not hasattr(ids, "__len__") or isinstance(ids, str | bytes)
        if is_text or getattr(ids, "ndim", 1) == 0:
            raise DataError(
                f"example {i}: {name} must be token ids, such as [5, 6], got {type(ids).__name__}; "
                "tokenize it first, or drop the example"
            )
    return np.array([len(ids) for ids in column], dtype=np.int64)


def _check_whole(columns: Mapping[str, Any], start: int) -> None:
    """Check that no row is padded or packed already; ``start`` is the number of the first one."""
    for key in CHECKED:
        column = columns.get(key, ())
        given = [(i, row) for i, row in enumerate(column, start) if row is not None]
        if given and is_list_of_rows(given[0][1]):
            given = [(i, segment) for i, row in given for segment in row]
        with examples_named([f"example {i}" for i, _ in given].__getitem__):
            if given:
                rows = number_column(key, [row for _, row in given], "numbers")
                check_one_text(key, joined(rows))
