"""Every reader accepts every form of dataset, and every type of Arrow columns."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset

from tests.batch_checks import assert_same_batch
from tests.command import run_command
from tests.loading.dataset.dataset_oracle import ROWS, write_stream
from torch_collate_kit import (
    PackedCollator,
    PerExample,
    TokenizedDataset,
    audit,
    packing_report,
)
from torch_collate_kit.collators import PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError

COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
ROLLOUTS = [
    {"prompt_ids": [5], "response_ids": [6, 7], "rewards": 0.5, "loss_mask": [1, 1]},
    {"prompt_ids": [8, 9], "response_ids": [4], "rewards": 1.0, "loss_mask": [1]},
]


class MapStyle(Dataset):
    """A map-style dataset that knows nothing of this library."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def saved(rows: list[Any], folder: Path, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        return folder / "rows.parquet"
    return write_stream(folder / "rows.arrow", pa.Table.from_pylist(rows))


def chunked(rows: list[Any]) -> pa.Table:
    return pa.concat_tables([pa.Table.from_pylist([row]) for row in rows])


def formatted(kind: str | None) -> Callable[[list[Any], Path], Any]:
    return lambda rows, _: datasets.Dataset.from_list(rows).with_format(kind)


def columns(rows: list[Any]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


FORMS: dict[str, Callable[[list[Any], Path], Any]] = {
    "list": lambda rows, _: rows,
    "tuple": lambda rows, _: tuple(rows),
    "arrays": lambda rows, _: [{k: np.array(v) for k, v in row.items()} for row in rows],
    "tensors": lambda rows, _: [{k: torch.tensor(v) for k, v in row.items()} for row in rows],
    "columns": lambda rows, _: columns(rows),
    "data frame": lambda rows, _: pd.DataFrame(rows),
    "map-style dataset": lambda rows, _: MapStyle(rows),
    "table": lambda rows, _: pa.Table.from_pylist(rows),
    "chunked table": lambda rows, _: chunked([rows[0], *rows]).slice(1),
    "record batch": lambda rows, _: pa.RecordBatch.from_pylist(rows),
    "arrow file": lambda rows, folder: saved(rows, folder, "arrow"),
    "path as a string": lambda rows, folder: str(saved(rows, folder, "arrow")),
    "list of files": lambda rows, folder: [saved(rows, folder, "arrow")],
    "parquet file": lambda rows, folder: saved(rows, folder, "parquet"),
    "shuffled dataset": lambda rows, _: datasets.Dataset.from_list(rows[::-1]).select(
        range(len(rows) - 1, -1, -1)
    ),
    **{
        f"dataset as {kind}": formatted(kind)
        for kind in (None, "numpy", "torch", "arrow", "pandas")
    },
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@forms
def test_tokens_in_any_form(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = form(ROWS, tmp_path)
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=8)):
        if form is not FORMS["list of files"]:  # a list of paths is no batch
            assert_same_batch(collate(data), collate(ROWS))
    expected = [len(row["input_ids"]) for row in ROWS]
    dataset = TokenizedDataset(data)
    assert dataset.lengths.tolist() == expected
    assert [row["loss_mask"].tolist() for row in dataset] == COLUMNS["loss_mask"]
    assert packing_report(data, 8, show=False)["data"]["num_tokens"] == sum(expected)
    found, wanted = audit(data), audit(ROWS)
    assert (found.names, found.num_tokens) == (wanted.names, wanted.num_tokens)


@forms
def test_rollouts_in_any_form(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = form(ROLLOUTS, tmp_path)
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        if form is not FORMS["list of files"]:
            assert_same_batch(collate(data), collate(ROLLOUTS))
    assert packing_report(data, 8, show=False)["data"]["num_tokens"] == 6
    assert audit(data).num_tokens == 6


def test_a_tokenized_dataset_in_every_reader() -> None:
    data = TokenizedDataset(ROWS)
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=8)):
        assert_same_batch(collate(data), collate(ROWS))
    assert TokenizedDataset(data, columns=["input_ids"]).column_names == ["input_ids"]
    assert packing_report(data, 8, show=False)["data"]["num_tokens"] == 13
    assert audit(data).num_tokens == 13


@pytest.mark.parametrize("read", [PaddedCollator(0), TokenizedDataset, audit, packing_report])
@pytest.mark.parametrize("data", [7, None, b"ab"])
def test_no_form_of_dataset(read: Any, data: Any) -> None:
    with pytest.raises(TypeError, match=r"is an? \w+; pass .*a list of examples, a mapping of col"):
        read(data)


LISTS = [[5, 6, 7], [8, 9], [4, 3], [1, 2, 3]]
TABLE = pa.table({"input_ids": LISTS, "labels": LISTS})
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
        {name: pd.Series([[0], *LISTS], dtype=lists) for name in TABLE.column_names}
    )
    return frame[1:]  # with an index of its own


PRODUCERS: dict[str, Callable[[], Any]] = {
    "reader": TABLE.to_reader,
    "batch": lambda: TABLE.to_batches()[0],
    "stream": BareStream,
    "pandas": pandas,
    "pandas of objects": lambda: pd.DataFrame({"input_ids": LISTS, "labels": LISTS}),
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


SHORT = [[5, 6, 7], [8, 9], [4], [1, 2, 3]]
NESTED = [[[5, 6], [7]], [[8, 9]], [[4], [3, 2, 1]]]
INT, LIST = pa.int64(), pa.list_(pa.int64())
CODES = pa.dictionary(pa.int32(), pa.int64())
SHARED = pa.ListViewArray.from_arrays(  # rows that lie anywhere, and share values
    pa.array([3, 0, 2, 1], pa.int32()), pa.array([2, 3, 1, 4], pa.int32()), pa.array([*range(1, 6)])
)
ODD_COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "list_view": (pa.array(SHORT, pa.list_view(INT)), SHORT),
    "large_list_view": (pa.array(SHORT, pa.large_list_view(pa.uint16())), SHORT),
    "views in any order": (SHARED, [[4, 5], [1, 2, 3], [3], [2, 3, 4, 5]]),
    "lists of codes": (pa.array(SHORT, pa.list_(CODES)), SHORT),
    "views of codes": (pa.array(SHORT, pa.list_view(CODES)), SHORT),
    "fixed lists of codes": (pa.array([[5, 6]] * 3, pa.list_(CODES, 2)), [[5, 6]] * 3),
    "views of views": (pa.array(NESTED, pa.list_view(pa.list_view(INT))), NESTED),
    "lists of views": (pa.array(NESTED, pa.list_(pa.list_view(INT))), NESTED),
}  # fmt: skip


def as_lists(value: Any) -> Any:
    return [*map(as_lists, value)] if isinstance(value, list | np.ndarray) else int(value)


@pytest.mark.parametrize(("column", "rows"), ODD_COLUMNS.values(), ids=ODD_COLUMNS)
def test_views_and_dictionaries_are_read_as_lists(column, rows):
    for start in (0, 1):
        part, wanted = column[start:], rows[start:]
        table = pa.table({"input_ids": pa.chunked_array([part, part[1:], part[:0]])})
        wanted = [*wanted, *wanted[1:]]
        dataset = TokenizedDataset(table)
        assert [as_lists(dataset[i]["input_ids"]) for i in range(len(dataset))] == wanted
        plain = COLLATE([{"input_ids": row} for row in wanted])
        assert COLLATE(table)["input_ids"].equal(plain["input_ids"])
        assert COLLATE(dataset[:])["input_ids"].equal(plain["input_ids"])
        assert f"{len(wanted)} examples" in str(packing_report(table, [16], show=False))
        assert len(audit(table, None).to_dict()) > 0
    with pytest.raises(DataError, match="row 1: input_ids is null"):
        TokenizedDataset(pa.table({"input_ids": pa.array([[5], None], pa.list_view(INT))}))[1]


def test_texts_and_numbers_of_dictionaries_are_read():
    names = pa.array(["a", "b", "a"])
    views = pa.array(["a", "b", "a"], pa.string_view())
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), views[:2])
    fields = {"name": PerExample(str), "k": PerExample(torch.int64)}
    collate = PackedCollator(0, max_tokens=16, strategy="sequential", fields=fields)
    numbers, weights = pa.array([3, 4, 3]), pa.array([1.0, 0.5, 1.0])
    for column in (views, codes, names.dictionary_encode(), names):
        table = pa.table({"input_ids": SHORT[:3], "name": column, "k": numbers.dictionary_encode()})
        table = table.append_column("weight", weights.dictionary_encode())
        for given in (table, TokenizedDataset(table, columns=table.column_names)[:]):
            batch = collate(given)
            assert batch.row_metadata["name"] == [("a", "b", "a")]
            assert batch["k"].values.tolist() == [3, 4, 3]
            assert batch["loss_mask"].max() / batch["loss_mask"][batch["loss_mask"] > 0].min() == 2


def test_parquet_files_without_rows(tmp_path, capsys):
    empty, full = str(tmp_path / "empty.parquet"), str(tmp_path / "full.parquet")
    pq.write_table(pa.table({"input_ids": pa.array([], LIST)}), empty)
    pq.write_table(pa.table({"input_ids": SHORT}), full)
    for read in (TokenizedDataset, COLLATE, packing_report, lambda path: audit(path, None)):
        with pytest.raises(
            DataError, match=r"there are no rows in '.*empty.parquet' \(0 examples\)"
        ):
            read(empty)
    assert len(TokenizedDataset([empty, full])) == 4
    for command in ("report", "audit"):
        assert run_command(command, empty) == 2
        assert "empty.parquet: there are no rows in it (0 ex" in capsys.readouterr().err


@pytest.mark.parametrize("old", [b"(3,)", b"'<i8'", b"shape", b"\x93NUMPY"])
@pytest.mark.parametrize("new", [b"(1125899906842624,)", b"(-3,)", b"(3, 9)", b"'<O8'", b"\xff"])
def test_a_report_of_a_file_of_lengths_that_lies(tmp_path, capsys, old, new):
    """A header that claims 2^50 lengths was a MemoryError."""
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([3, 4, 5]))
    path.write_bytes(path.read_bytes().replace(old, new))
    assert run_command("report", str(path)) == 2
    assert "lengths.npy: not a file of lengths that np.save wrote" in capsys.readouterr().err
