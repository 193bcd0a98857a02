"""Examples that are lists of segments: each column opened, and its errors named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

import numpy as np

from torch_collate_kit._checks import type_name
from torch_collate_kit._reprs import plural
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Nested
from torch_collate_kit.reading.entries import weights_of_examples
from torch_collate_kit.reading.keys import MEDIA
from torch_collate_kit.reading.source import is_list_of_rows, is_sequence


def opened(raw: Mapping[str, Any], keys: Collection[str]) -> tuple[dict[str, Any], np.ndarray]:
    """Return ``raw`` with an entry per segment in ``keys``, and the offsets of examples."""
    columns = dict(raw)
    columns["input_ids"], counts = opened_column("input_ids", raw["input_ids"])
    if not counts.all():
        raise DataError(
            f"example {counts.argmin()} is empty (input_ids has no segment); filter it out"
        )
    for key in keys:
        if key not in raw or key == "input_ids":
            continue
        columns[key], found = opened_column(key, raw[key], counts)
        if len(wrong := np.flatnonzero(found != counts)):
            i = int(wrong[0])
            raise DataError(
                f"example {i}: {key} has {plural(int(found[i]), 'segment')}, input_ids has "
                f"{counts[i]}; give one entry for each segment"
            )
    if "weight" in raw:  # of an example, for all of its segments
        columns["weight"] = np.repeat(weights_of_examples(raw["weight"]), counts)
    return columns, np.append(0, np.cumsum(counts))


def opened_column(
    key: str, column: Any, counts: np.ndarray | None = None
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
    else:
        is_list = [is_list_of_rows(entry) or _is_empty(entry) for entry in entries]
        wanted = "a list with one list for each segment"
    if not all(is_list):
        i = is_list.index(False)
        raise DataError(
            f"example {i}: {key} is {type_name(entries[i])} that is no list of segments, as "
            f"input_ids of example 0 is; give {wanted}"
        )
    return list(chain.from_iterable(entries)), np.array(list(map(len, entries)), dtype=np.int64)


def _is_empty(entry: Any) -> bool:
    return is_sequence(entry) and not len(entry)


def name_of(offsets: np.ndarray | None) -> Callable[[int], str] | None:
    """Return a function that names a segment in errors; None for examples of one each."""
    if offsets is None:
        return None

    def name(segment: int) -> str:
        example = int(np.searchsorted(offsets, segment, side="right")) - 1
        return f"example {example}, segment {segment - offsets[example]}"

    return name
