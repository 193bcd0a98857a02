"""What tests of TokenizedDataset share: rows read one by one in plain Python, and Arrow files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.batch_checks import assert_same_batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.loading import TokenizedDataset

ROWS = [
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    {"input_ids": [8], "loss_mask": [0]},
    {"input_ids": [9, 4], "loss_mask": [1, 1]},
    {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1]},
    {"input_ids": [2, 2], "loss_mask": [0, 1]},
]
KNOWN = {
    "input_ids",
    "loss_mask",
    "labels",
    "assistant_masks",
    "completion_mask",
    "num_actions",
    "attention_mask",
    "weight",
}
PACKED = PackedCollator(0, max_tokens=64)
PADDED = PaddedCollator(0)


def plain_row(source: Any, i: int) -> dict[str, Any]:
    """Row i as Python numbers, by the source's own means."""
    if isinstance(source, pa.Table | pa.RecordBatch):
        return source.slice(i, 1).to_pylist()[0]
    return dict(source[i])


def assert_like_plain_rows(ds: TokenizedDataset, source: Any, indices: list[int]) -> None:
    num_rows = source.num_rows if isinstance(source, pa.Table | pa.RecordBatch) else len(source)
    rows = [plain_row(source, i % num_rows) for i in indices]
    rows = [{key: row[key] for key in row if key in KNOWN} for row in rows]
    columns = ds.__getitems__(indices)
    for name in rows[0] if rows else ():
        assert columns[name].tolist() == [row[name] for row in rows], name
        for i, row in zip(indices, rows, strict=True):
            assert ds[i][name].tolist() == row[name], (name, i)
    if rows:
        assert columns.keys() == rows[0].keys() == ds[indices[0]].keys()
        assert_same_batch(PACKED(columns), PACKED(rows))
        assert_same_batch(PADDED(columns), PADDED(rows))
    assert len(ds) == num_rows
    assert ds.lengths.dtype == np.int64
    assert ds.lengths.tolist() == [len(plain_row(source, i)["input_ids"]) for i in range(num_rows)]


def write_stream(path: Path, table: pa.Table, **options: Any) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, **options)
    return path


def write_file(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path
