"""What polars and pandas write: views, dictionaries; and Parquet files without rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.command import run_command
from torch_collate_kit import (
    PackedCollator,
    PerExample,
    TokenizedDataset,
    audit,
    packing_report,
)
from torch_collate_kit.errors import DataError

ROWS = [[5, 6, 7], [8, 9], [4], [1, 2, 3]]
NESTED = [[[5, 6], [7]], [[8, 9]], [[4], [3, 2, 1]]]
COLLATE = PackedCollator(0, max_tokens=16, strategy="sequential")
INT, LIST = pa.int64(), pa.list_(pa.int64())
CODES = pa.dictionary(pa.int32(), pa.int64())
SHARED = pa.ListViewArray.from_arrays(  # rows that lie anywhere, and share values
    pa.array([3, 0, 2, 1], pa.int32()), pa.array([2, 3, 1, 4], pa.int32()), pa.array([*range(1, 6)])
)
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "list_view": (pa.array(ROWS, pa.list_view(INT)), ROWS),
    "large_list_view": (pa.array(ROWS, pa.large_list_view(pa.uint16())), ROWS),
    "views in any order": (SHARED, [[4, 5], [1, 2, 3], [3], [2, 3, 4, 5]]),
    "lists of codes": (pa.array(ROWS, pa.list_(CODES)), ROWS),
    "views of codes": (pa.array(ROWS, pa.list_view(CODES)), ROWS),
    "fixed lists of codes": (pa.array([[5, 6]] * 3, pa.list_(CODES, 2)), [[5, 6]] * 3),
    "views of views": (pa.array(NESTED, pa.list_view(pa.list_view(INT))), NESTED),
    "lists of views": (pa.array(NESTED, pa.list_(pa.list_view(INT))), NESTED),
}  # fmt: skip


def as_lists(value: Any) -> Any:
    return [*map(as_lists, value)] if isinstance(value, list | np.ndarray) else int(value)


@pytest.mark.parametrize(("column", "rows"), COLUMNS.values(), ids=COLUMNS)
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
        table = pa.table({"input_ids": ROWS[:3], "name": column, "k": numbers.dictionary_encode()})
        table = table.append_column("weight", weights.dictionary_encode())
        for given in (table, TokenizedDataset(table, columns=table.column_names)[:]):
            batch = collate(given)
            assert batch.row_metadata["name"] == [("a", "b", "a")]
            assert batch["k"].values.tolist() == [3, 4, 3]
            assert batch["loss_mask"].max() / batch["loss_mask"][batch["loss_mask"] > 0].min() == 2


def test_parquet_files_without_rows(tmp_path, capsys):
    empty, full = str(tmp_path / "empty.parquet"), str(tmp_path / "full.parquet")
    pq.write_table(pa.table({"input_ids": pa.array([], LIST)}), empty)
    pq.write_table(pa.table({"input_ids": ROWS}), full)
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
