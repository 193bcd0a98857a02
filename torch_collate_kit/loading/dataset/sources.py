"""Sources of a TokenizedDataset with only the kept columns, small to send to a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from torch_collate_kit._checks import type_name
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.loading.dataset.files import read_records
from torch_collate_kit.loading.dataset.mapped_files import TokenFiles
from torch_collate_kit.ragged import Nested, Ragged
from torch_collate_kit.reading.columns import number_column
from torch_collate_kit.reading.entries import joined
from torch_collate_kit.reading.keys import (
    KNOWN,
    TOKEN_TYPES,
    TOKENIZE,
    added_keys,
    check_keys,
    column_of,
    first_with,
)
from torch_collate_kit.reading.packed_elsewhere import refuse_boundaries
from torch_collate_kit.reading.segments import name_of, opened_column
from torch_collate_kit.reading.source import Examples, Source, are_nested, is_a, is_sequence
from torch_collate_kit.reading.values import is_number, scalar_column
from torch_collate_kit.reading.vectors import shape_of, vector_column
from torch_collate_kit.vision.families import IMAGE_FIELDS

DatasetSource: TypeAlias = "Examples | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
IDS = ("input_ids", "labels")  # tokens; masks may be weights


def kept_source(given: Any, columns: Sequence[str] | None, train_all: bool) -> Any:
    """Return a Dataset, a Table, Arrow files or a dict of arrays, with the kept columns alone."""
    if is_a(given, "datasets", "Dataset") and given.format["type"] == "custom":
        raise TypeError(
            "the datasets.Dataset computes its rows on the fly (set_transform), and columns would "
            "bypass that; apply it with .map first"
        )
    if isinstance(given, TokenFiles):
        return given.select(_chosen(given.column_names, columns, train_all, lambda _: ()))
    if isinstance(given, str | os.PathLike) and os.path.isdir(given):
        given = read_records(given)
    source = Source(given, "source")
    if not source.is_arrow:
        return _copied(source, columns, train_all)
    names = _chosen(source.names, columns, train_all, source.first_rows)
    if is_a(source.data, "datasets", "Dataset"):
        return source.data.with_format(None).select_columns(names)
    return source.data.select(names)


def _chosen(
    available: Sequence[str],
    columns: Sequence[str] | None,
    train_all: bool,
    column: Callable[[str], Any],
) -> list[str]:
    """Return the columns to keep: without ``columns`` those that the collators read."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, got {columns!r}; pass [{columns!r}]")
    if columns is None:
        if "input_ids" in available:
            images = tuple(name for name in IMAGE_FIELDS if name in available)
            known = (*images, *TOKEN_TYPES) if images else ()
            refuse_boundaries(available, column, known, lambda _: "the source")
            check_keys(dict.fromkeys(available, "the source"), train_all=train_all, declared=known)
        columns = [name for name in (*KNOWN, *IMAGE_FIELDS, "num_cut_tokens") if name in available]
    for name in columns:
        if name not in available:
            raise ValueError(f"columns names {name!r}, the source has {list(available)}")
    if "input_ids" not in columns:
        given = list(available if "input_ids" not in available else columns)
        raise DataError(f"no input_ids, got columns {given}; {TOKENIZE}")
    return list(dict.fromkeys(columns))


def _copied(
    source: Source, columns: Sequence[str] | None, train_all: bool
) -> dict[str, np.ndarray | Ragged | Nested | list[Any]]:
    """Return examples as columns in memory: one copy."""
    if not len(source):
        raise DataError("the source is empty (0 examples); give at least one")
    examples = source.part(0, len(source))
    if isinstance(examples, Mapping):
        names = _chosen(list(examples), columns, train_all, column_of(examples))
        of_segments = are_nested(examples["input_ids"])
        return {name: _column(name, examples[name], of_segments=of_segments) for name in names}
    for i, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise DataError(
                f"example {i} is {type_name(example)}; an example is a mapping with input_ids"
            )
    copied: dict[str, Any] = {}
    owners = first_with(examples)
    added = [] if columns else added_keys(examples, owners)
    available = [key for key in owners if key not in added]
    names = _chosen(available, columns, train_all, column_of(examples))
    of_segments = are_nested([examples[0].get("input_ids")])
    for name in names:
        without = next((i for i, example in enumerate(examples) if name not in example), None)
        if without is not None and name not in IMAGE_FIELDS:
            raise DataError(
                f"example {without} has no {name}, other examples have; give every one the same "
                "keys, or pass columns="
            )
        column = [example.get(name) for example in examples]
        copied[name] = _column(name, column, of_segments=of_segments)
    return copied


def _column(
    name: str, column: Any, *, of_segments: bool
) -> np.ndarray | Ragged | Nested | list[Any]:
    if name in IMAGE_FIELDS:
        if of_segments:
            return list(column)  # which is refused
        return [None if entry is None else np.array(entry) for entry in column]
    if of_segments and are_nested(column):
        flat, counts = opened_column(name, column)
        offsets = np.append(0, np.cumsum(counts))
        with examples_named(name_of(offsets)):
            return Nested(_numbers(name, flat), offsets)
    if name not in KNOWN and all(isinstance(entry, str) for entry in column):
        return list(map(str, column))
    is_list = name == "num_actions" and any(map(is_sequence, column))  # of each segment
    if not is_list and (name == "num_actions" or all(map(is_number, column))):
        kinds = "iu" if name == "num_actions" else "iufb"
        return np.array(scalar_column(name, column, kinds, "give a number"))
    return _numbers(name, column)


def _numbers(name: str, column: Any) -> Ragged:
    shape = () if name in KNOWN else shape_of(column)
    read = partial(vector_column, shape=shape) if shape else number_column
    if name in IDS:
        numbers = joined(number_column(name, column, "ids" if name == "input_ids" else "labels"))
    else:
        try:
            numbers = joined(read(name, column, "whole numbers"))
        except DataError:  # not whole, or True and False
            numbers = joined(read(name, column, "numbers"))
    return Ragged(numbers.values.astype(numbers.values.dtype.str), numbers.offsets)
