"""Whatever hands out Arrow columns is read as a pyarrow Table is, without a copy of its lists."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.batch_checks import assert_same_batch
from torch_collate_kit import PackedCollator, TokenizedDataset, audit, packing_report

ROWS = [[5, 6, 7], [8, 9], [4, 3], [1, 2, 3]]
TABLE = pa.table({"input_ids": ROWS, "labels": ROWS})
COLLATE = PackedCollator(0, max_tokens=16, strategy="sequential")


class BareStream:
    """An object with nothing but the stream."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


def polars() -> Any:
    return pytest.importorskip("polars", reason="polars is not installed").DataFrame(TABLE)


def duckdb() -> Any:
    module = pytest.importorskip("duckdb", reason="duckdb is not installed")
    return module.connect().from_arrow(TABLE)


def pandas() -> Any:
    lists = pd.ArrowDtype(pa.list_(pa.int64()))
    frame = pd.DataFrame(
        {name: pd.Series([[0], *ROWS], dtype=lists) for name in TABLE.column_names}
    )
    return frame[1:]  # with an index of its own


PRODUCERS: dict[str, Callable[[], Any]] = {
    "reader": TABLE.to_reader,
    "batch": lambda: TABLE.to_batches()[0],
    "stream": BareStream,
    "pandas": pandas,
    "pandas of objects": lambda: pd.DataFrame({"input_ids": ROWS, "labels": ROWS}),
    "polars": polars,
    "polars, lazy": lambda: polars().lazy(),
    "duckdb": duckdb,
}


def test_every_producer_is_read_as_a_table():
    wanted = TokenizedDataset(TABLE)
    tried = 0
    for name, make in PRODUCERS.items():
        try:
            dataset = TokenizedDataset(make())
        except pytest.skip.Exception:
            continue
        tried += 1
        assert dataset[:]["input_ids"] == wanted[:]["input_ids"], name
        assert_same_batch(COLLATE(dataset[:]), COLLATE(TABLE))
        assert_same_batch(COLLATE(make()), COLLATE(TABLE))
        assert (
            packing_report(make(), [16], show=False)["data"]
            == packing_report(TABLE, [16], show=False)["data"]
        )
        assert audit(make(), None).to_dict() == audit(TABLE, None).to_dict()
    assert tried >= 5


def test_lists_are_not_copied():
    ids = np.arange(4_000_000)
    table = pa.table({"input_ids": pa.ListArray.from_arrays([0, 1_000_000, 4_000_000], ids)})
    before = pa.total_allocated_bytes()
    datasets = [TokenizedDataset(table.to_reader())]
    if importlib.util.find_spec("polars"):
        frame = pytest.importorskip("polars").DataFrame(table)
        before = pa.total_allocated_bytes()
        datasets += [TokenizedDataset(frame), TokenizedDataset(frame.lazy())]
    assert pa.total_allocated_bytes() - before < 1_000_000
    for dataset in datasets:
        assert np.array_equal(dataset[1]["input_ids"], ids[1_000_000:])
