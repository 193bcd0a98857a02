"""TokenizedDataset against rows read one by one in plain Python, whatever the rows lie in."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, random_split

from tests.batch_checks import assert_same_batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.ragged import Ragged

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
}
PACKED = PackedCollator(0, max_tokens=64)
PADDED = PaddedCollator(0)


# ---------------------------------------------------------------- the oracle


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


# ---------------------------------------------------------------- fuzz

TARGETS = {
    "loss_mask": [pa.int8(), pa.float32(), pa.bool_(), pa.uint16(), pa.float64(), pa.int64()],
    "assistant_masks": [pa.int8(), pa.bool_(), pa.int64()],
    "completion_mask": [pa.bool_(), pa.int32()],
    "labels": [pa.int64(), pa.int32(), pa.int16()],
}
IDS = [pa.int32(), pa.int64(), pa.int16(), pa.uint16()]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A table as messy as Arrow allows: any list type, chunks of any size, a slice of a longer one.

    `key` is a column that collators do not know; `num_actions` comes with a mask of that length.
    """
    num_rows = draw(st.integers(1, 12))
    kinds = {name: draw(st.sampled_from(["list", "large", "fixed"])) for name in ("ids", "target")}
    fixed = "fixed" in kinds.values()
    width = draw(st.integers(1, 5))
    lengths = [width if fixed else draw(st.integers(1, 9)) for _ in range(num_rows)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    name = draw(st.sampled_from([None, *TARGETS]))
    spans = lengths
    columns = {"key": pa.array(rng.permutation(num_rows))}
    columns["input_ids"] = _lists(lengths, draw(st.sampled_from(IDS)), kinds["ids"], rng)
    if name == "loss_mask" and not fixed and draw(st.booleans()):
        spans = [int(rng.integers(0, n + 1)) for n in lengths]
        columns["num_actions"] = pa.array(spans, draw(st.sampled_from([pa.int64(), pa.uint8()])))
    if name is not None:
        dtype = draw(st.sampled_from(TARGETS[name]))
        columns[name] = _lists(spans, dtype, kinds["target"], rng)
    if draw(st.booleans()):
        ones = [[1] * n for n in lengths]
        columns["attention_mask"] = pa.array(ones, pa.list_(pa.int8()))
    table = pa.table({key: _chunked(draw, column) for key, column in columns.items()})
    start = draw(st.integers(0, num_rows - 1))
    return table.slice(start, draw(st.integers(1, num_rows - start)))


def _lists(lengths: list[int], dtype: pa.DataType, kind: str, rng: Any) -> pa.Array:
    top = 2 if pa.types.is_boolean(dtype) else 100
    values = [rng.integers(0, top, n).tolist() for n in lengths]
    if pa.types.is_boolean(dtype):
        values = [[bool(v) for v in row] for row in values]
    if pa.types.is_floating(dtype):
        values = [[v / 8 for v in row] for row in values]
    if kind == "fixed":
        return pa.array(values, pa.list_(dtype, lengths[0]))
    return pa.array(values, (pa.large_list if kind == "large" else pa.list_)(dtype))


def _chunked(draw: st.DrawFn, column: pa.Array) -> pa.ChunkedArray:
    """Cut anywhere (an own cut for every column), empty chunks included; some are slices."""
    cuts = sorted(draw(st.lists(st.integers(0, len(column)), max_size=4)))
    bounds = [0, *cuts, len(column)]
    chunks = [column[a:b] for a, b in pairwise(bounds)]
    if draw(st.booleans()):
        chunks = [pa.array(chunk.to_pylist(), column.type) for chunk in chunks]
    return pa.chunked_array(chunks, type=column.type)


INDICES = st.lists(st.integers(-(10**6), 10**6), max_size=12)


def _within(indices: list[int], num_rows: int) -> list[int]:
    """-N to N - 1, with repetitions."""
    return [i % (2 * num_rows) - num_rows for i in indices]


@given(tables(), INDICES)
def test_tables_give_what_plain_rows_give(table, indices):
    ds = TokenizedDataset(table)
    indices = _within(indices, table.num_rows)
    assert_like_plain_rows(ds, table, indices)
    assert_like_plain_rows(pickle.loads(pickle.dumps(ds)), table, indices)
    batch = table.combine_chunks().to_batches()[0]
    assert_like_plain_rows(TokenizedDataset(batch), batch, indices)


OPERATIONS = {
    "shuffle": lambda d, n: d.shuffle(seed=n),
    "select": lambda d, n: d.select([(n * k + n) % len(d) for k in range(len(d))]),
    "contiguous": lambda d, n: d.select(range(n % len(d), len(d))),
    "concatenate": lambda d, n: datasets.concatenate_datasets([d, d.shuffle(seed=n), d]),
    "split": lambda d, n: d.train_test_split(0.5, seed=n)["train"] if len(d) > 1 else d,
    "shard": lambda d, n: d.shard(2, n % 2, contiguous=n % 3 == 0) if len(d) > 1 else d,
    "sort": lambda d, n: d.sort("key", reverse=n % 2 == 0),
    "torch format": lambda d, n: d.with_format("torch"),
    "flatten": lambda d, n: d.flatten_indices(),
}


@given(
    tables(),
    INDICES,
    st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 20)), max_size=3),
)
def test_datasets_give_what_plain_rows_give(table, indices, operations):
    source = datasets.Dataset(table)
    for name, number in operations:
        source = OPERATIONS[name](source, number)
    indices = _within(indices, len(source))
    ds = TokenizedDataset(source)
    assert_like_plain_rows(ds, source.with_format(None), indices)
    assert_like_plain_rows(pickle.loads(pickle.dumps(ds)), source.with_format(None), indices)


# ---------------------------------------------------------------- what comes out, by hand


def test_columns_views_and_dtypes():
    ids = pa.array([[5, 6, 7], [8], [9, 4]], pa.list_(pa.uint16()))
    mask = pa.array([[True], [], [False, True]], pa.large_list(pa.bool_()))
    table = pa.table({"text": ["a", "b", "c"], "input_ids": ids, "loss_mask": mask})
    table = table.append_column("num_actions", pa.array([1, 0, 2], pa.int16()))
    ds = TokenizedDataset(table)
    columns = ds.__getitems__([2, 0, 2])
    assert list(columns) == ["input_ids", "loss_mask", "num_actions"]
    assert isinstance(columns["input_ids"], Ragged)
    assert columns["input_ids"].values.tolist() == [9, 4, 5, 6, 7, 9, 4]
    assert columns["input_ids"].offsets.tolist() == [0, 2, 5, 7]
    assert columns["loss_mask"].tolist() == [[False, True], [True], [False, True]]
    assert columns["num_actions"].tolist() == [2, 1, 2]
    dtypes = (columns["input_ids"].values.dtype, columns["loss_mask"].values.dtype)
    assert (*dtypes, columns["num_actions"].dtype) == (np.uint16, np.bool_, np.int64)
    row = ds[-1]
    assert row["input_ids"].tolist() == [9, 4]
    assert (row["input_ids"].dtype, row["num_actions"]) == (np.uint16, 2)


def test_a_row_is_a_read_only_view_and_a_batch_is_a_copy():
    values = np.arange(10, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays([0, 4, 10], values)})
    examples = [{"input_ids": values[:4]}]
    for ds in (TokenizedDataset(table), TokenizedDataset(table.slice(1))):
        assert np.shares_memory(ds[0]["input_ids"], values)
        assert not ds[0]["input_ids"].flags.writeable
        batch = ds.__getitems__([0])["input_ids"]
        assert not np.shares_memory(batch.values, values)
        assert batch.values.flags.writeable
    ds = TokenizedDataset(examples)
    assert not np.shares_memory(ds[0]["input_ids"], values)
    assert not ds[0]["input_ids"].flags.writeable
    assert examples[0]["input_ids"].flags.writeable  # the caller's array stays as it was


def test_indices_of_every_kind():
    ds = TokenizedDataset(ROWS)
    wanted = [[2, 2], [5, 6, 7], [2, 2]]
    for indices in ([4, 0, -1], np.array([4, -5, 4]), torch.tensor([-1, 0, 4]), (4, 0, 4)):
        assert ds.__getitems__(indices)["input_ids"].tolist() == wanted
    assert ds[1:3]["input_ids"].tolist() == [[8], [9, 4]]
    assert ds[::-2]["loss_mask"].tolist() == [[0, 1], [1, 1], [0, 1, 1]]
    assert [row["input_ids"].tolist() for row in ds] == [row["input_ids"] for row in ROWS]


@pytest.mark.parametrize("source", [ROWS, pa.Table.from_pylist(ROWS), pa.table({"input_ids": []})])
def test_no_index_gives_columns_without_rows(source):
    if not isinstance(source, list) and not source.num_rows:
        source = source.cast(pa.schema([("input_ids", pa.list_(pa.int64()))]))
    ds = TokenizedDataset(source)
    for columns in (ds.__getitems__([]), ds[3:3], ds[9:]):
        assert columns["input_ids"].tolist() == []
        assert columns["input_ids"].values.dtype == np.int64
        with pytest.raises(DataError, match=r"the batch is empty \(0 examples\)"):
            PACKED(columns)
    assert TokenizedDataset(pa.Table.from_pylist(ROWS).slice(0, 0)).lengths.tolist() == []


def test_columns_chooses():
    rows = [{**row, "rewards": [0.5, 1.0], "score": 2.5, "text": "a"} for row in ROWS]
    for source in (rows, pa.Table.from_pylist(rows), datasets.Dataset.from_list(rows)):
        ds = TokenizedDataset(source, columns=["input_ids", "rewards", "score"])
        assert list(ds[0]) == ["input_ids", "rewards", "score"]
        columns = ds.__getitems__([1, 0])
        assert columns["rewards"].tolist() == [[0.5, 1.0]] * 2
        assert (columns["score"].tolist(), columns["score"].dtype) == ([2.5, 2.5], np.float64)
    shown = datasets.Dataset.from_list(rows).with_format("numpy", columns=["input_ids"])
    assert list(TokenizedDataset(shown)[0]) == ["input_ids"]  # its format hides the others


def test_empty_rows_and_rows_of_width_nothing():
    assert TokenizedDataset([{"input_ids": []}, {"input_ids": [1]}]).lengths.tolist() == [0, 1]
    for kind in (pa.list_(pa.null()), pa.list_(pa.bool_()), pa.list_(pa.int8(), 0)):
        ds = TokenizedDataset(pa.table({"input_ids": pa.array([[], [], []], kind)}))
        assert ds.lengths.tolist() == [0, 0, 0]
        assert ds[1]["input_ids"].tolist() == []
        assert ds.__getitems__([0, 2])["input_ids"].tolist() == [[], []]


@pytest.mark.parametrize("nulls", [[], [5]])
@pytest.mark.parametrize("dtype", [pa.bool_(), pa.int16(), pa.float32()])
def test_values_that_are_a_slice_themselves(dtype, nulls):
    """The values of a list column may start anywhere in their own buffer."""
    plain = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]
    given = [None if i in nulls else v for i, v in enumerate(plain)]
    values = pa.array(given, pa.int8()).cast(dtype).slice(3)
    offsets = [0, 2, 3, 9]
    column = pa.ListArray.from_arrays(offsets, values)
    ds = TokenizedDataset(pa.table({"input_ids": column}))
    assert ds[0]["input_ids"].tolist() == plain[3:5]
    assert ds.__getitems__([2, 0])["input_ids"].tolist() == [plain[6:], plain[3:5]]
    assert (
        TokenizedDataset(pa.table({"input_ids": column[2:]}))[0]["input_ids"].tolist() == plain[6:]
    )


def test_an_empty_chunk_without_buffers():
    kind = pa.list_(pa.int32())
    empty = pa.Array.from_buffers(kind, 0, [None, None], children=[pa.array([], pa.int32())])
    column = pa.chunked_array([empty, pa.array([[1, 2]], kind), empty])
    ds = TokenizedDataset(pa.table({"input_ids": column}))
    assert (len(ds), ds.lengths.tolist(), ds[-1]["input_ids"].tolist()) == (1, [2], [1, 2])


# ---------------------------------------------------------------- sources


def write_stream(path: Path, table: pa.Table, **options: Any) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, **options)
    return path


def write_file(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Parquet is decoded into the cache of datasets; not into the user's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield tmp_path / "cache"
    datasets.enable_progress_bars()


def test_files(tmp_path, cache):
    table = pa.Table.from_pylist([{**row, "text": "a"} for row in ROWS])
    stream = write_stream(tmp_path / "stream.arrow", table)
    file = write_file(tmp_path / "file.arrow", table)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for source in (str(stream), stream, [file]):
        assert_like_plain_rows(TokenizedDataset(source), ROWS, [3, 0, -1, 3])
    ds = TokenizedDataset([stream, str(file)])
    assert_like_plain_rows(ds, ROWS + ROWS, [9, 0, 4, 5])
    assert_like_plain_rows(pickle.loads(pickle.dumps(ds)), ROWS + ROWS, [9, 0, 4, 5])
    assert len(pickle.dumps(ds)) < 1000 + 2 * len(str(tmp_path))
    ds = TokenizedDataset([tmp_path / "a.parquet"] * 2)
    assert_like_plain_rows(ds, ROWS + ROWS, [9, 0, 4, 5])
    assert_like_plain_rows(pickle.loads(pickle.dumps(ds)), ROWS + ROWS, [9, 0, 4, 5])


def test_a_parquet_file_written_anew_is_read_anew(tmp_path, cache):
    path = tmp_path / "a.parquet"
    for rows in (ROWS, ROWS[::-1]):
        pq.write_table(pa.Table.from_pylist(rows), path)
        assert_like_plain_rows(TokenizedDataset(path), rows, [0, 1])


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor, np.float32])
def test_lists_of_examples(convert):
    if convert is np.float32:
        rows = [{**row, "loss_mask": torch.tensor(row["loss_mask"]).bfloat16()} for row in ROWS]
    else:
        rows = [{name: convert(value) for name, value in row.items()} for row in ROWS]
    ds = TokenizedDataset(rows)
    assert_like_plain_rows(ds, ROWS, [4, 0, 0, -2])
    assert_like_plain_rows(pickle.loads(pickle.dumps(ds)), ROWS, [4, 0, 0, -2])
    assert_same_batch(PACKED(ds.__getitems__([3, 1])), PACKED([rows[3], rows[1]]))


@pytest.mark.parametrize(
    "wrap", [int, np.int32, np.array, torch.tensor, lambda n: torch.tensor([n])]
)
def test_lists_of_examples_with_num_actions(wrap):
    rows = [
        {"input_ids": [1, 2, 3], "loss_mask": [1], "num_actions": wrap(1)},
        {"input_ids": [4, 5], "loss_mask": [1, 0.5], "num_actions": wrap(2)},
    ]
    columns = TokenizedDataset(rows).__getitems__([1, 0])
    assert columns["num_actions"].dtype == np.int64
    assert columns["loss_mask"].tolist() == [[1, 0.5], [1]]
    assert_same_batch(PACKED(columns), PACKED(rows[::-1]))


def test_a_pickle_holds_the_kept_rows_and_columns_alone(tmp_path):
    long = pa.table({"input_ids": [list(range(100))] * 1000, "text": ["x" * 1000] * 1000})
    ds = TokenizedDataset(long.slice(500, 2))
    assert len(pickle.dumps(ds)) < 5000
    assert pickle.loads(pickle.dumps(ds)).lengths.tolist() == [100, 100]
    datasets.Dataset(long).save_to_disk(tmp_path)
    mapped = TokenizedDataset(datasets.load_from_disk(tmp_path))
    assert len(pickle.dumps(mapped)) < 5000 + 2 * len(str(tmp_path))


# ---------------------------------------------------------------- in a DataLoader


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
    ],
    ids=["0", "fork", "spawn"],
)
def test_workers_give_the_batches_of_plain_rows(tmp_path, workers):
    source = datasets.Dataset.from_list(ROWS * 4)
    source.save_to_disk(tmp_path)
    source = datasets.load_from_disk(tmp_path).shuffle(seed=3)
    expected = [PACKED([source[k] for k in range(i, min(i + 6, 20))]) for i in range(0, 20, 6)]
    ds = TokenizedDataset(source)
    loader = DataLoader(ds, batch_size=6, collate_fn=PACKED, **workers)
    for batch, wanted in zip(loader, expected, strict=True):
        assert_same_batch(batch, wanted)


def test_a_subset_of_it_stays_columnar():
    ds = TokenizedDataset(ROWS)
    part, _ = random_split(ds, [3, 2], generator=torch.Generator().manual_seed(0))
    seen = []
    loader = DataLoader(part, batch_size=3, collate_fn=seen.append)
    list(loader)
    assert seen[0]["input_ids"].tolist() == [ROWS[i]["input_ids"] for i in part.indices]


# ---------------------------------------------------------------- nulls


def test_a_null_is_an_error_where_it_is_read_and_nowhere_else():
    rows = [[1, 2], None, [3], [4, None, 5], [6]]
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.bool_()), pa.list_(pa.int32(), 2)):
        if pa.types.is_fixed_size_list(kind):
            values = [[1, 2], None, [3, 3], [4, None], [6, 6]]
        elif pa.types.is_boolean(kind.value_type):
            values = [row and [v and v % 2 == 0 for v in row] for row in rows]
        else:
            values = rows
        whole = pa.table({"input_ids": pa.array(values, kind)})
        chunks = pa.concat_tables([whole.slice(4), whole.slice(0, 4)])
        for table, null_row, null_token, fine in (
            (whole, 1, 3, {0: 0, 2: 2, 4: 4}),
            (whole.slice(1), 0, 2, {1: 2, 3: 4}),
            (chunks, 2, 4, {0: 4, 1: 0, 3: 2}),
        ):
            ds = TokenizedDataset(table)
            columns = ds.__getitems__(list(fine))
            assert columns["input_ids"].tolist() == [values[i] for i in fine.values()]
            for i, j in fine.items():
                assert ds[i]["input_ids"].tolist() == values[j]
            for i in (null_row, null_token):
                with pytest.raises(DataError, match=f"row {i}: input_ids is null or holds a null"):
                    ds.__getitems__([next(iter(fine)), i - len(ds)])
                with pytest.raises(DataError, match=f"row {i}: input_ids"):
                    ds[i]
            with pytest.raises(DataError, match=f"row {null_row}: input_ids is null"):
                _ = ds.lengths


def test_null_tokens_alone():
    whole = pa.table({"input_ids": pa.array([[1], [2, None], [3]], pa.list_(pa.int32()))})
    for table, fine in ((whole, [1, 3]), (whole.slice(1), [3])):
        ds = TokenizedDataset(table)
        assert ds.lengths.tolist() == [1, 2, 1][-len(ds) :]  # a null is a token; reading it is not
        keep = [i for i in range(len(ds)) if i != len(ds) - 2]
        assert ds.__getitems__(keep)["input_ids"].values.tolist() == fine
        with pytest.raises(
            DataError, match=f"row {len(ds) - 2}: input_ids is null or holds a null"
        ):
            ds[-2]


def test_a_null_behind_an_indices_mapping_is_named_by_its_place_in_the_dataset():
    source = datasets.Dataset.from_dict(
        {"input_ids": [[1], None, [2]], "num_actions": [1, 1, None]}
    )
    ds = TokenizedDataset(source.select([2, 0, 1]))
    with pytest.raises(DataError, match="row 0: num_actions is null"):
        ds[0]
    assert ds[1]["input_ids"].tolist() == [1]
    with pytest.raises(DataError, match="row 2: input_ids is null"):
        ds.__getitems__([1, 2])
    with pytest.raises(DataError, match="row 2: input_ids is null"):
        _ = ds.lengths
    assert TokenizedDataset(source.select([2, 0])).lengths.tolist() == [1, 1]


# ---------------------------------------------------------------- errors


def _rows(**changes: Any) -> list[dict[str, Any]]:
    return [dict(ROWS[0]), {**ROWS[1], **changes}]


BAD_SOURCES = [
    ([], DataError, r"no input_ids, got columns \[\]; tokenize the text first"),
    ([{"text": "a"}], DataError, r"no input_ids, got columns \['text'\]"),
    (pa.table({"text": ["a"]}), DataError, r"no input_ids, got columns \['text'\]"),
    (pa.table({"input_ids": [1, 2]}), DataError, "input_ids holds one number a row"),
    ([{"input_ids": 3}], DataError, "input_ids holds one number a row"),
    (pa.table({"input_ids": ["a b"]}), DataError, "input_ids has the Arrow type string"),
    (pa.table({"input_ids": [["a"]]}), DataError, r"input_ids has the Arrow type list<"),
    (pa.table({"input_ids": [[[1]]]}), DataError, r"holds one flat list of numbers a row"),
    (_rows(input_ids=None), DataError, "row 1: input_ids is None; it must be a flat list of integ"),
    (_rows(input_ids=[1.5]), DataError, r"row 1: input_ids is \[1.5\]; it must be a flat list"),
    (_rows(input_ids=[1, None]), DataError, r"row 1: input_ids is \[1, None\]; it must be"),
    (_rows(input_ids=[[1], [2, 3]]), DataError, r"row 1: input_ids is \[\[1\], \[2, 3\]\]"),
    (_rows(input_ids=[[1, 2]]), DataError, r"row 1: input_ids has shape \(1, 2\)"),
    (_rows(loss_mask="abc"), DataError, "row 1: loss_mask is 'abc'; .*list of numbers"),
    (_rows(labels=[1]), DataError, "row 0 has no labels, other rows have; give every row the same"),
    ([*ROWS, {"input_ids": [1]}], DataError, "row 5 has no loss_mask, other rows have"),
    (7, TypeError, "source is a int; pass a datasets.Dataset"),
    ([1, 2], TypeError, "source is a list; pass"),
    ({"input_ids": [[1]]}, TypeError, "source is a dict; pass"),
    (datasets.DatasetDict(), TypeError, "source is a DatasetDict; .*of a DatasetDict one split"),
]


@pytest.mark.parametrize(("source", "error", "message"), BAD_SOURCES)
def test_bad_sources(source, error, message):
    with pytest.raises(error, match=message):
        TokenizedDataset(source)


def test_bad_settings_and_files(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pytest.raises(
        ValueError, match=r"columns names 'rewards', the source has \['input_ids', "
    ):
        TokenizedDataset(table, columns=["input_ids", "rewards"])
    with pytest.raises(DataError, match=r"no input_ids, got columns \['loss_mask'\]"):
        TokenizedDataset(ROWS, columns=["loss_mask"])
    with pytest.raises(TypeError, match=r"on the fly \(set_transform\).*apply it with .map first"):
        TokenizedDataset(datasets.Dataset(table).with_transform(lambda rows: rows))
    with pytest.raises(ValueError, match=r"is a folder; pass datasets.load_from_disk"):
        TokenizedDataset(tmp_path)
    (tmp_path / "a.txt").write_text("not an Arrow file, and long enough to be taken for one")
    with pytest.raises(ValueError, match=r"a.txt' is neither an Arrow nor a Parquet file"):
        TokenizedDataset(tmp_path / "a.txt")
    arrow = write_stream(tmp_path / "a.arrow", table)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="mixes Parquet and Arrow files"):
        TokenizedDataset([arrow, tmp_path / "a.parquet"])
    narrow = write_stream(tmp_path / "b.arrow", table.select(["input_ids"]))
    with pytest.raises(ValueError, match="a file has no column 'loss_mask', the first one has"):
        TokenizedDataset([arrow, narrow])
    assert len(TokenizedDataset([arrow, narrow], columns=["input_ids"])) == 10
    small = pa.table({"input_ids": pa.array([[1]], pa.list_(pa.int8()))})
    with pytest.raises(ValueError, match="the files of the source have columns of different types"):
        TokenizedDataset([narrow, write_stream(tmp_path / "c.arrow", small)])


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 5], IndexError, "index 5 is outside the dataset, which has 5 rows; give -5 to 4"),
        ([-6], IndexError, "index -6 is outside the dataset"),
        ([0.5], TypeError, "rows are named by integers, got float64"),
        ([True, False], TypeError, r"got bool; of a mask take mask.nonzero\(\)"),
        ([[0, 1]], TypeError, r"indices must be a flat list of integers, got shape \(1, 2\)"),
    ],
)
def test_bad_indices(indices, error, message):
    for source in (ROWS, datasets.Dataset.from_list(ROWS).shuffle(seed=0)):
        ds = TokenizedDataset(source)
        with pytest.raises(error, match=message):
            ds.__getitems__(indices)
        with pytest.raises(error):
            ds[indices[-1]]


# ---------------------------------------------------------------- memory and imports


def resident(kind: str) -> int:
    """Resident bytes of this process: RssAnon (its own), RssFile (pages of mapped files)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {kind} in /proc/self/status")


MB = 1 << 20


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="/proc/self/status is Linux only"
)
@pytest.mark.parametrize("form", ["path", "shuffled dataset", "null in every chunk"])
def test_200_mb_read_in_random_batches_stay_on_disk(tmp_path, form):
    num_rows, length = 100_000, 500
    values = np.arange(num_rows * length, dtype=np.int32)
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    nulls = np.arange(num_rows) % 10_000 == 0
    mask = {"mask": pa.array(nulls)} if form.startswith("null") else {}
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), values, **mask)})
    path = write_stream(tmp_path / "a.arrow", table, max_chunksize=10_000)
    del table, values
    own, mapped, allocated = resident("RssAnon"), resident("RssFile"), pa.total_allocated_bytes()
    if form == "shuffled dataset":
        ds = TokenizedDataset(datasets.Dataset.from_file(str(path)).shuffle(seed=0))
    else:
        ds = TokenizedDataset(path)
    if mask:
        with pytest.raises(DataError, match="row 0: input_ids is null"):
            _ = ds.lengths
    else:
        assert (ds.lengths == length).all()
    assert resident("RssFile") - mapped < 20 * MB, "lengths looked at values"
    rng = np.random.default_rng(0)
    for _ in range(60):
        batch = rng.integers(0, num_rows, 256)
        rows = ds.__getitems__(batch[batch % 10_000 > 0])["input_ids"]
        assert (np.diff(rows[5]) == 1).all()
    assert resident("RssFile") - mapped > 20 * MB, "the measure sees what is read"
    assert resident("RssAnon") - own < 20 * MB
    assert pa.total_allocated_bytes() - allocated < 2 * MB


def test_parquet_is_mapped_from_the_cache(tmp_path, cache):
    values = np.arange(5_000_000, dtype=np.int64)
    offsets = np.arange(0, len(values) + 1, 500, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    pq.write_table(table, tmp_path / "a.parquet")
    del table, values
    before = pa.total_allocated_bytes()
    ds = TokenizedDataset(tmp_path / "a.parquet")
    assert ds.__getitems__([9_999, 3])["input_ids"].values[-1] == 1999
    assert pa.total_allocated_bytes() - before < 2 * MB  # of 40


def test_the_module_imports_neither_datasets_nor_pyarrow():
    code = (
        "import sys, torch_collate_kit.loading.dataset as module\n"
        "ds = module.TokenizedDataset([{'input_ids': [1, 2]}])\n"
        "assert ds.__getitems__([0])['input_ids'].tolist() == [[1, 2]]\n"
        "print(*sorted({'datasets', 'pyarrow', 'pandas', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_num_loss_tokens_are_those_of_the_collators():
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 30, size=2500)
    rows = [
        {"input_ids": rng.integers(1, 99, size=n), "loss_mask": rng.integers(0, 2, size=n)}
        for n in lengths
    ]
    counts = TokenizedDataset(rows).num_loss_tokens
    assert counts.dtype == np.int64
    collate = PaddedCollator(0)
    assert counts.tolist() == [collate([row]).metadata["num_loss_tokens"] for row in rows]
    assert counts.sum() > 10_000


def test_num_loss_tokens_of_wrong_rows_say_where():
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1]}] * 1203
    rows[1101] = {"input_ids": [1, 2], "loss_mask": [1]}
    message = r"rows 1000 to 1202, counted from 0: example 101: loss_mask has 1 entries"
    with pytest.raises(DataError, match=message):
        _ = TokenizedDataset(rows).num_loss_tokens
