"""Which form a dataset has, and how its rows are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.sources import is_a
from torch_collate_kit.reading.raw import check_even
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.reading import ReadRows, Refused, read_rows
from torch_collate_kit.vision import VisionLayout

__all__ = ["ChatSettings", "read_dataset"]

_CHAT_KEYS = ("messages", "conversations", "instruction", "prompt")
_TOKEN_KEYS = ("input_ids", "prompt_ids", "response_ids")
_RECORDS_AT_A_TIME = 256
_FORMS = (
    "a list of examples, rollouts or chat records (of a DataFrame df.to_dict('records'), of a "
    "stream its first rows), a mapping of columns, a TokenizedDataset, a datasets.Dataset (of a "
    "DatasetDict one split), a pyarrow Table, or paths of Arrow or Parquet files"
)


@dataclass(frozen=True)
class ChatSettings:
    """What tokenize_chat is called with."""

    tokenizer: Any
    train_on: str = "all"
    tools: Any = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_root: Any = None

    def options(self) -> ChatOptions:
        """Of a processor images are read too, but not their pixels."""
        chosen: dict[str, Any] = {
            "train_on": self.train_on,
            "tools": self.tools,
            "chat_template_kwargs": self.template_kwargs,
        }
        if hasattr(self.tokenizer, "image_processor"):
            images = {"pixels": False, "image_root": self.image_root}
            return ChatOptions(None, self.tokenizer, **chosen, **images)
        if self.tokenizer is None:
            raise ValueError(
                "the rows are chat records, which only a tokenizer makes tokens of; pass the "
                "tokenizer that the model is trained with"
            )
        return ChatOptions(self.tokenizer, **chosen)


def read_dataset(
    dataset: Any, *, train_all: bool, vision: VisionLayout | None, chat: ChatSettings
) -> ReadRows:
    """The rows of a dataset in any form.

    Raises:
        DataError: no row can be read, or the dataset is empty.
        TypeError: no known form.
    """
    keys = _keys(dataset)
    ids = next((key for key in (*_TOKEN_KEYS, *_CHAT_KEYS) if key in keys), None)
    if isinstance(dataset, Mapping) and ids is not None:
        check_even(dataset, ids)
    is_text = any(key in keys for key in _CHAT_KEYS) and not any(key in keys for key in _TOKEN_KEYS)
    if is_text:
        return _read_chats(dataset, chat)
    has_rows = isinstance(dataset, Mapping) or (
        isinstance(dataset, Sequence) and any(isinstance(row, Mapping) for row in dataset)
    )
    if is_a(dataset, "datasets", "Dataset") and "input_ids" not in keys:
        dataset, has_rows = dataset.with_format("numpy"), True
    if not has_rows and not isinstance(dataset, TokenizedDataset):
        dataset = TokenizedDataset(dataset, train_all=train_all)
    if isinstance(dataset, TokenizedDataset):
        train_all, vision = dataset._train_all, vision or dataset._vision
    num_rows = len(next(iter(dataset.values()))) if isinstance(dataset, Mapping) else len(dataset)
    if not num_rows:
        raise DataError("the dataset is empty (0 rows); give at least one")

    def rows(start: int, stop: int) -> Any:
        if isinstance(dataset, Mapping):
            return {key: column[start:stop] for key, column in dataset.items()}
        return dataset[start:stop]

    return read_rows(rows, num_rows, train_all=train_all, vision=vision)


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
        raise DataError("the dataset is empty (0 rows); give at least one")
    return list(next((row for row in dataset if isinstance(row, Mapping)), ["input_ids"]))


def _read_chats(records: Any, chat: ChatSettings) -> ReadRows:
    """Tokenize chat records, whose rows are numbered as the records are."""
    options = chat.options()
    is_arrow = is_a(records, "datasets", "Dataset")
    if is_a(records, "pyarrow", "Table"):
        records, is_arrow = records.to_pylist(), True
    if isinstance(records, Mapping):
        by_row = zip(*records.values(), strict=True)
        records = [dict(zip(records, row, strict=True)) for row in by_row]
    if not len(records):
        raise DataError("the dataset is empty (0 records); give at least one")
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    without_answer: list[int] = []
    refused: list[Refused] = []
    for start in _starts(len(records), shows_progress=is_a(records, "datasets", "Dataset")):
        stop = min(start + _RECORDS_AT_A_TIME, len(records))
        some = {i: records[i] for i in range(start, stop)}
        for i in [i for i, record in some.items() if not isinstance(record, Mapping)]:
            what = f"a record is a mapping, such as one with messages, got {type(some[i]).__name__}"
            refused.append(Refused(i, f"row {i}: {what}"))
            del some[i]
        results = tokenize_records(some.values(), options, from_arrow=is_arrow)
        for number, found in zip(some, results, strict=True):
            if isinstance(found, DataError):
                refused.append(Refused(number, f"row {number}: {found}"))
                continue
            kept = [row for row in found if not row["skip_reason"]]
            rows += [{key: row[key] for key in ("input_ids", "loss_mask")} for row in kept]
            numbers += [number] * len(kept)
            if not kept:
                without_answer.append(number)
    columns: AuditColumns | None = None
    if rows:
        image_token = None if options.images is None else options.images.layout.image_token_id
        columns = _columns_of(rows, numbers, image_token)
    refused.sort(key=lambda row: row.number)
    skipped = np.array(without_answer, dtype=np.int64)
    return ReadRows(columns, refused, without_answer=skipped)


def _columns_of(
    rows: list[dict[str, Any]], numbers: list[int], image_token: int | None
) -> AuditColumns:
    """Tokenized rows, which every reader takes."""
    columns = read_rows(lambda start, stop: rows[start:stop], len(rows)).columns
    assert columns is not None
    has_image = None
    if image_token is not None:
        has_image = np.logical_or.reduceat(columns.ids == image_token, columns.starts)
    return replace(
        columns,
        numbers=np.array(numbers),
        has_image=has_image,
    )


def _starts(num_records: int, *, shows_progress: bool) -> Iterator[int]:
    """Where each part of the records begins; of a Dataset with progress, as its map shows it."""
    if not shows_progress:
        yield from range(0, num_records, _RECORDS_AT_A_TIME)
        return
    from datasets.utils import tqdm

    with tqdm(total=num_records, desc="Tokenizing chats", unit=" examples") as bar:
        for start in range(0, num_records, _RECORDS_AT_A_TIME):
            yield start
            bar.update(min(_RECORDS_AT_A_TIME, num_records - start))
