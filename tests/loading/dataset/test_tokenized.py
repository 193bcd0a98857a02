"""TokenizedDataset against rows read one by one in plain Python, whatever the rows lie in."""

from __future__ import annotations

import gc
import pickle
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loading.dataset.dataset_oracle import ROWS, assert_like_plain_rows
from torch_collate_kit.collators import PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

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
    ds = without_key(table)
    indices = _within(indices, table.num_rows)
    assert_like_plain_rows(ds, table, indices)
    assert_like_plain_rows(pickle.loads(pickle.dumps(ds)), table, indices)
    batch = table.combine_chunks().to_batches()[0]
    assert_like_plain_rows(without_key(batch), batch, indices)


def without_key(source: Any) -> TokenizedDataset:
    """Without a target the other column must be seen to be left out."""
    train_all = not set(source.column_names) & set(TARGETS)
    return TokenizedDataset(source, train_all=train_all)


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
    ds = without_key(source)
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


def test_buffers_that_are_missing_or_odd():
    """Files that others wrote have buffers of any length, and none where there is nothing."""
    kind = pa.list_(pa.int32())
    empty = pa.Array.from_buffers(kind, 0, [None, None], children=[pa.array([], pa.int32())])
    column = pa.chunked_array([empty, pa.array([[1, 2]], kind), empty])
    ds = TokenizedDataset(pa.table({"input_ids": column}))
    assert (len(ds), ds.lengths.tolist(), ds[-1]["input_ids"].tolist()) == (1, [2], [1, 2])

    nothing = pa.Array.from_buffers(pa.bool_(), 0, [None, None])
    chunks = [pa.ListArray.from_arrays([0, 0, 0], nothing), pa.array([[True, False], [True]])]
    table = pa.table({"input_ids": [[1], [2], [3], [4]], "loss_mask": pa.chunked_array(chunks)})
    masks = TokenizedDataset(table).__getitems__([0, 3, 1, 2])["loss_mask"]
    assert masks.tolist() == [[], [True], [], [True, False]]

    numbers = np.array([5, 6], dtype=np.int64).tobytes()
    values = pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(numbers + b"\0" * 3)])
    ds = TokenizedDataset(pa.table({"input_ids": pa.ListArray.from_arrays([0, 2], values)}))
    assert ds[0]["input_ids"].tolist() == [5, 6]


@pytest.mark.parametrize("rows_per_chunk", [1000, 300, 1])
def test_a_large_batch_is_that_of_single_rows(rows_per_chunk):
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 40, size=1100).tolist()
    ids = _lists(lengths, pa.int32(), "list", rng)
    mask = _lists(lengths, pa.bool_(), "large", rng)
    weights = pa.array(rng.integers(0, 2, size=1100) == 0)
    table = pa.table({"input_ids": ids, "loss_mask": mask, "weight": weights})[33:1033]
    chunks = [table[i : i + rows_per_chunk] for i in range(0, 1000, rows_per_chunk)]
    names = table.column_names
    ds = TokenizedDataset(pa.concat_tables(chunks), columns=names)
    assert ds._columns["loss_mask"]._starts.tolist()[1] == rows_per_chunk
    indices = rng.integers(-1000, 1000, size=2000)
    for count in (127, 128, 129, 256, 257, 2000):
        columns = ds.__getitems__(indices[:count])
        expected = table.take(pa.array(indices[:count] % 1000)).to_pydict()
        assert {name: columns[name].tolist() for name in names} == expected


def test_a_large_batch_does_not_start_the_garbage_collector():
    """As many containers alive at once as its threshold would: a pause in a process with many."""
    table = pa.table({"input_ids": [[1, 2]] * 10, "loss_mask": [[True, False]] * 10})
    ds = TokenizedDataset(pa.concat_tables([table] * 3))
    started = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: started.append(phase))
    try:
        ds.__getitems__(np.arange(6000) % 30)
    finally:
        gc.callbacks.pop()
    assert started == []


def test_num_loss_tokens_are_those_of_the_collators(monkeypatch):
    monkeypatch.setattr("torch_collate_kit.loading.dataset.tokenized._ROWS_AT_A_TIME", 100)
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 30, size=250)
    rows = [
        {"input_ids": rng.integers(1, 99, size=n), "loss_mask": rng.integers(0, 2, size=n)}
        for n in lengths
    ]
    counts = TokenizedDataset(rows).num_loss_tokens
    assert counts.dtype == np.int64
    collate = PaddedCollator(0)
    assert counts.tolist() == [collate([row]).metadata["num_loss_tokens"] for row in rows]
    assert counts.sum() > 1_000


def test_num_loss_tokens_of_wrong_rows_say_where():
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1]}] * 1203
    rows[1101] = {"input_ids": [1, 2], "loss_mask": [1]}
    message = r"rows 1000 to 1202, counted from 0: example 101: loss_mask has 1 entries"
    with pytest.raises(DataError, match=message):
        _ = TokenizedDataset(rows).num_loss_tokens


# ---------------------------------------------------------------- images


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({}, [2, 1]),
        ({"labels": [[5, 9, 6, 9], [7, 8]]}, [1, 1]),
        ({"loss_mask": [[1, 1, 1, 1], [1, 1]]}, [1, 1]),
        ({"loss_mask": [[1, 1], [1, 1]], "num_actions": [2, 2]}, [1, 1]),
    ],
)
def test_placeholders_of_images_are_no_loss_tokens(target, expected):
    ids = [[5, 9, 6, 9], [7, 8]]
    if not target:
        ids[0].append(5)
    vision = VisionLayout("qwen3_vl", image_token_id=9, merge_size=2)
    columns = {"input_ids": ids, **target}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(2)]
    counts = TokenizedDataset(rows, train_all=not target, vision=vision).num_loss_tokens
    assert counts.tolist() == expected


@pytest.mark.parametrize("form", ["list", "table"])
def test_a_pickled_dataset_still_counts_patches_and_image_tokens(form):
    vision = VisionLayout("qwen3_vl", image_token_id=9, merge_size=2)
    grid = np.array([[1, 2, 2]])
    row = {"input_ids": [9, 5, 7], "pixel_values": np.zeros((4, 8)), "image_grid_thw": grid}
    if form == "list":
        ds = TokenizedDataset([row], train_all=True, vision=vision)
    else:
        rows = datasets.Dataset.from_list([{k: np.array(v).tolist() for k, v in row.items()}])
        ds = TokenizedDataset(rows, train_all=True, vision=vision)
    other = pickle.loads(pickle.dumps(ds))
    assert other.vision == vision
    assert other.patches == ds.patches == [[4]]
    assert other.num_loss_tokens.tolist() == ds.num_loss_tokens.tolist() == [2]


@pytest.mark.parametrize("family", ["internvl", "gemma3", "qwen3_vl"])
def test_a_source_in_which_no_example_has_an_image(family):
    """Arrow then knows no type of their columns."""
    vision = VisionLayout(family, image_token_id=9, merge_size=2)
    images = {name: pa.nulls(3) for name in vision.fields}
    table = pa.table({"input_ids": [[1, 2], [3], [4]], **images})
    tables = pa.concat_tables([table, table.slice(1)])
    for source in (table, tables):
        ds = TokenizedDataset(source, train_all=True, vision=vision)
        assert ds.patches == [[] for _ in range(len(ds))]
        assert ds.num_loss_tokens.tolist() == [1, 0, 0, 0, 0][: len(ds)]
        assert all(ds[1][name] is None for name in images)
