"""TokenizedDataset of files and lists: workers, memory, and files by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.loading.dataset.dataset_oracle import (
    PACKED,
    ROWS,
    assert_like_plain_rows,
    write_file,
    write_stream,
)
from tests.ranks import FORKS
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset, read_records


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
    ds = TokenizedDataset(long.slice(500, 2), train_all=True)
    assert len(pickle.dumps(ds)) < 5000
    assert pickle.loads(pickle.dumps(ds)).lengths.tolist() == [100, 100]
    datasets.Dataset(long).save_to_disk(tmp_path)
    mapped = TokenizedDataset(datasets.load_from_disk(tmp_path), train_all=True)
    assert len(pickle.dumps(mapped)) < 5000 + 2 * len(str(tmp_path))


# ---------------------------------------------------------------- in a DataLoader


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": FORKS},  # the dataset is pickled
    ],
    ids=["0", "fork", "forkserver"],
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


def test_a_relative_path_is_found_from_another_folder(tmp_path, monkeypatch):
    write_stream(tmp_path / "a.arrow", pa.Table.from_pylist(ROWS))
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(TokenizedDataset("a.arrow"))
    monkeypatch.chdir("/")
    assert_like_plain_rows(pickle.loads(pickled), ROWS, [3, 0])


def test_a_parquet_file_written_anew_is_read_anew(tmp_path, cache):
    path = tmp_path / "a.parquet"
    for rows in (ROWS, ROWS[::-1]):
        pq.write_table(pa.Table.from_pylist(rows), path)
        assert_like_plain_rows(TokenizedDataset(path), rows, [0, 1])


def written(path: Path, ids: list[int]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"input_ids": ids}) + "\n")
    return path


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "b[1]/a1.jsonl", "A.JSONL"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    written(tmp_path / "a1.jsonl", [3, 3])
    found = read_records(written(tmp_path / name, [1, 1]))
    assert found["input_ids"][:] == [[1, 1]]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n\xff\xfe\n')
    with pytest.raises(DataError, match="line 2 is not JSON: 'utf-8' codec can't decode"):
        read_records(path)


def nested(depth: int, kind: str = "[]") -> str:
    opening, closing = ("[", "]") if kind == "[]" else ('{"a": ', "}")
    return '{"messages": "[[{{", "x": ' + opening * depth + "1" + closing * depth + "}"


@pytest.mark.parametrize("kind", ["[]", "{}"])
@pytest.mark.parametrize(
    ("name", "depth"),
    [("a.jsonl", d) for d in (99, 999, 50_000)] + [("a.json", d) for d in (999, 50_000)],
)
def test_nesting_is_checked_before_a_line_is_parsed(
    name: str, depth: int, kind: str, tmp_path: Path
) -> None:
    """The reader of datasets raises RecursionError at 1,000 levels, and crashes at 10,000."""
    lines = [nested(1, kind), "", nested(depth, kind)]
    text = "\n".join(lines) if name == "a.jsonl" else f"[{lines[0]},\n\n{lines[2]}]"
    (tmp_path / name).write_text(text)
    shown = depth + 1 + (name == "a.json")
    with pytest.raises(DataError) as caught:
        read_records(tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path / name}: line 3 is nested {shown:,} deep, more than the 63 levels that an "
        "Arrow table holds; give what is inside as a JSON string"
    )


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older datasets read it as it is")
@pytest.mark.parametrize("number", [48.85837012345678, 1.5e-12, 0.5])
def test_numbers_in_objects_that_datasets_changes_are_named(number, tmp_path, caplog):
    rows = [{"x": {"a": 1}, "y": 1e-12}, {"x": {"b": [number]}, "y": 1e-12}, {"x": "a", "y": 2.0}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept = read_records(tmp_path / "a.jsonl")[1]["x"] == rows[1]["x"]
    said = [record.getMessage() for record in caplog.records if "exactly" in record.getMessage()]
    assert kept == (not said) == (number == 0.5)
    assert kept or said[0].startswith(f"{tmp_path / 'a.jsonl'}: line 2 has numbers that datasets d")


def test_brackets_in_strings_are_no_nesting(tmp_path: Path) -> None:
    texts = ["[" * 1000 + '"', '\\"[' * 1200, "[" * 62 + "1" + "]" * 62, "{\\"]
    path = tmp_path / "a.jsonl"
    row = {"texts": texts, "deep": json.loads(texts[2])}
    path.write_text((json.dumps(row) + "\n") * 2)
    assert read_records(path)["texts"][1] == texts


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older datasets read it as it is")
def test_a_saved_dataset_without_rows_is_refused(tmp_path):
    datasets.Dataset.from_dict({"input_ids": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(DataError, match=r"empty: there are no rows in it \(0 examples\); give at"):
        read_records(tmp_path / "empty")
