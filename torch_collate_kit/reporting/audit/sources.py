"""Which form a dataset has, and how its rows are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.sources import is_a
from torch_collate_kit.reading.raw import check_even
from torch_collate_kit.reporting.audit.columns import AuditColumns, Refused
from torch_collate_kit.reporting.audit.reading import RowReader
from torch_collate_kit.vision import VisionLayout

__all__ = ["read_dataset"]

_TOKEN_KEYS = ("input_ids", "prompt_ids", "response_ids")
_CHAT_KEYS = ("messages", "conversations", "instruction", "prompt")
_ROWS_AT_A_TIME = 4096
_RECORDS_AT_A_TIME = 256
_EMPTY = "the dataset is empty (0 {rows}); give at least one"
_FORMS = (
    "a list of examples, rollouts or chat records (of a DataFrame df.to_dict('records'), of a "
    "stream its first rows), a mapping of columns, a TokenizedDataset, a datasets.Dataset (of a "
    "DatasetDict one split), a pyarrow Table, or paths of Arrow or Parquet files"
)


def read_dataset(
    dataset: Any,
    *,
    train_all: bool,
    vision: VisionLayout | None,
    chat_options: Callable[[], ChatOptions],
) -> AuditColumns:
    """The rows of a dataset in any form.

    Raises:
        DataError: no row can be read, or the dataset is empty.
        TypeError: no known form.
    """
    keys = _keys(dataset)
    first = next((key for key in (*_TOKEN_KEYS, *_CHAT_KEYS) if key in keys), None)
    if isinstance(dataset, Mapping) and first is not None:
        check_even(dataset, first)
    if first in _CHAT_KEYS:
        return _read_chats(dataset, chat_options())
    if isinstance(dataset, TokenizedDataset):
        train_all, vision = dataset._train_all, vision or dataset.vision
    elif is_a(dataset, "datasets", "Dataset") and "input_ids" not in keys:
        dataset = dataset.with_format("numpy")
    elif not isinstance(dataset, Mapping) and not _has_mappings(dataset):
        dataset = TokenizedDataset(dataset, train_all=train_all)
    return _read_rows(dataset, RowReader(train_all, vision))


def _read_rows(dataset: Any, reader: RowReader) -> AuditColumns:
    """Examples or rollouts, in a sequence or in columns."""

    def rows(start: int, stop: int) -> Any:
        if isinstance(dataset, Mapping):
            return {key: column[start:stop] for key, column in dataset.items()}
        return dataset[start:stop]

    num_rows = len(next(iter(dataset.values()))) if isinstance(dataset, Mapping) else len(dataset)
    if not num_rows:
        raise DataError(_EMPTY.format(rows="rows"))
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        reader.read(rows, start, min(start + _ROWS_AT_A_TIME, num_rows))
    columns = reader.columns()
    if not len(columns.lengths) and not any(row.of_images for row in columns.refused):
        raise DataError(columns.refused[0].message)
    return columns


def _keys(dataset: Any) -> Sequence[str]:
    """Of the first row, or the names of the columns."""
    if is_a(dataset, "datasets", "DatasetDict"):
        raise TypeError(f"dataset is a DatasetDict; pass {_FORMS}")
    if isinstance(dataset, Mapping):
        return list(dataset)
    if is_a(dataset, "datasets", "Dataset") or is_a(dataset, "pyarrow", "Table"):
        return list(dataset.column_names)
    if isinstance(dataset, TokenizedDataset | str | os.PathLike):
        return ["input_ids"]
    if not isinstance(dataset, Sequence) or isinstance(dataset, bytes):
        raise TypeError(f"dataset is a {type(dataset).__name__}; pass {_FORMS}")
    if not len(dataset):
        raise DataError(_EMPTY.format(rows="rows"))
    return list(next((row for row in dataset if isinstance(row, Mapping)), ["input_ids"]))


def _has_mappings(dataset: Any) -> bool:
    return isinstance(dataset, Sequence) and any(isinstance(row, Mapping) for row in dataset)


def _read_chats(dataset: Any, options: ChatOptions) -> AuditColumns:
    """Tokenize chat records, whose rows are numbered as the records are."""
    records = _records(dataset)
    if not len(records):
        raise DataError(_EMPTY.format(rows="records"))
    is_dataset = is_a(dataset, "datasets", "Dataset")
    is_arrow = is_dataset or is_a(dataset, "pyarrow", "Table")
    image_token_id = None if options.images is None else options.images.layout.image_token_id
    reader = RowReader()
    without_answer: list[int] = []
    for part in _parts(len(records), shows_progress=is_dataset):
        given = {i: records[i] for i in part}
        known = {i: record for i, record in given.items() if isinstance(record, Mapping)}
        for i in given.keys() - known.keys():
            what = (
                f"a record is a mapping, such as one with messages, got {type(given[i]).__name__}"
            )
            reader.refused.append(Refused(i, f"row {i}: {what}"))
        examples: list[dict[str, Any]] = []
        numbers: list[int] = []
        results = tokenize_records(known.values(), options, from_arrow=is_arrow)
        for i, found in zip(known, results, strict=True):
            if isinstance(found, DataError):
                reader.refused.append(Refused(i, f"row {i}: {found}"))
                continue
            kept = [example for example in found if not example["skip_reason"]]
            examples += kept
            numbers += [i] * len(kept)
            without_answer += [] if kept else [i]
        if examples:
            reader.read_chats(examples, numbers, image_token_id)
    return replace(reader.columns(), without_answer=np.array(without_answer, dtype=np.int64))


def _records(dataset: Any) -> Any:
    """What ``len`` and ``[i]`` say of chat records in any form."""
    if is_a(dataset, "pyarrow", "Table"):
        return dataset.to_pylist()
    if isinstance(dataset, Mapping):
        by_row = zip(*dataset.values(), strict=True)
        return [dict(zip(dataset, row, strict=True)) for row in by_row]
    return dataset


def _parts(num_records: int, *, shows_progress: bool) -> Iterator[range]:
    """The records, some at a time; of a Dataset with progress, as its map shows it."""
    starts = range(0, num_records, _RECORDS_AT_A_TIME)
    parts = (range(start, min(start + _RECORDS_AT_A_TIME, num_records)) for start in starts)
    if not shows_progress:
        yield from parts
        return
    from datasets.utils import tqdm

    with tqdm(total=num_records, desc="Tokenizing chats", unit=" examples") as bar:
        for part in parts:
            yield part
            bar.update(len(part))
