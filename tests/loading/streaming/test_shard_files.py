"""Shards of JSONL (plain, gz, zst) and Parquet, read by ``datasets`` or by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    all_tokens,
    datasets,
    tokens_of,
)
from torch_collate_kit import PrefetchLoader
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import merge_states
from torch_collate_kit.testing import batch_digest

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
NUM_FILES = 6


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
        return
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text)
    if path.suffix == ".zst":
        text = pa.compress(text, codec="zstd", asbytes=True)
    path.write_bytes(text)


def by_datasets(files: list[Path]) -> Any:
    if files[0].suffix == ".zst":
        pytest.importorskip("zstandard", reason="datasets needs it for .zst")
    kind = "parquet" if files[0].suffix == ".parquet" else "json"
    names = [str(file) for file in files]
    return datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        for group in parquet.ParquetFile(file).iter_batches(batch_size=4):
            yield from group.to_pylist()
        return
    with pa.input_stream(str(file), compression="detect") as stream:
        for line in stream.read().splitlines():
            yield json.loads(line)


def by_hand(files: list[Path]) -> Callable[[int], Iterator[dict[str, Any]]]:
    def shard(number: int) -> Iterator[dict[str, Any]]:
        for file in files[number::4]:
            yield from lines_of(file)

    return shard


@pytest.fixture
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PrefetchLoader]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kind, reader = request.param
    files = [tmp_path / f"part-{i}.{kind}" for i in range(NUM_FILES)]
    for i, file in enumerate(files):
        write(file, EXAMPLES[i::NUM_FILES])
    source = (by_datasets if reader == "datasets" else by_hand)(files)

    def made(num_workers: int = 0, rank: int = 0, dp_size: int = 1, **more: Any) -> PrefetchLoader:
        options = {"num_shards": 4, "presharded": reader == "by hand", "shuffle": True} | more
        ranks = {"dp_rank": rank, "dp_size": dp_size}
        stream = packed_stream(source, **SETTINGS | options | ranks)
        return PrefetchLoader(DataLoader(stream, batch_size=None, num_workers=num_workers))

    return made


READ = [(kind, reader) for kind in KINDS for reader in ("datasets", "by hand")]
of_files = pytest.mark.parametrize("make", READ, indirect=True, ids=" ".join)


@of_files
def test_every_example_once_in_every_pass_and_resumed_elsewhere(
    make: Callable[..., PrefetchLoader],
) -> None:
    with make() as loader:
        passes = [list(loader), list(loader)]
    for batches in passes:
        assert tokens_of(batches) == all_tokens(EXAMPLES)
    expected = [list(map(batch_digest, batches)) for batches in passes]
    assert expected[0] != expected[1]
    with make(2) as loader:
        assert [batch_digest(batch) for batch in islice(loader, 5)] == expected[0][:5]
        state = json.loads(json.dumps(loader.state_dict()))
    found, states = expected[0][:5], []
    for rank in (0, 1):
        with make(0, rank, 2) as loader:
            loader.load_state_dict(state)
            found += map(batch_digest, islice(loader, 3))
            states.append(loader.state_dict())
    with make(1) as loader:
        loader.load_state_dict(merge_states(states))
        found += map(batch_digest, loader)
    assert sorted(found) == sorted(expected[0])


@pytest.mark.parametrize("make", [(kind, "datasets") for kind in KINDS], indirect=True, ids=str)
def test_without_num_shards_each_worker_reads_files_of_its_own(
    make: Callable[..., PrefetchLoader],
) -> None:
    for num_workers in (0, 2):
        with make(num_workers, num_shards=None) as loader:
            for _ in range(2):
                assert tokens_of(list(loader)) == all_tokens(EXAMPLES)


@pytest.mark.parametrize("reader", ["datasets", "by hand"])
@pytest.mark.parametrize(
    ("kind", "damaged", "message"),
    [
        ("jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": [3,\n', "parse|Expecting|JSON"),
        (
            "jsonl.gz",
            gzip.compress(b'{"input_ids": [1, 2]}\n' * 99, mtime=0)[:-9],
            "end|EOF|[Tt]runcated",
        ),
        ("parquet", b"PAR1 and no more", "[Pp]arquet|magic"),
    ],
)
def test_a_damaged_file_ends_the_run(
    kind: str, damaged: bytes, message: str, reader: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"part-{i}.{kind}" for i in range(4)]
    for i, file in enumerate(files):
        write(file, EXAMPLES[i::4])
    files[2].write_bytes(damaged)
    options = {"num_shards": 4, "presharded": reader == "by hand", "on_error": "skip"}

    def read() -> None:
        source = (by_datasets if reader == "datasets" else by_hand)(files)
        list(packed_stream(source, **SETTINGS, **options))

    with pytest.raises(Exception, match=message) as caught:
        read()
    assert not isinstance(caught.value, AssertionError)


def test_files_without_token_ids_are_named(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    write(file, [{"text": "not tokenized"}])
    with pytest.raises(DataError, match="no input_ids in example 0 of the str"):
        list(packed_stream(by_datasets([file]), **SETTINGS))
