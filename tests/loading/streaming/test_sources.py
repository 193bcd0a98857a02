"""What a stream reads: streams of datasets whose state is exact, files, tables and datasets."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    all_tokens,
    datasets,
    make_examples,
    tokens_of,
)
from torch_collate_kit import PackedCollator, PackedIterableDataset, PrefetchLoader
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset, merge_states, shards
from torch_collate_kit.loading.shards import has_exact_state
from torch_collate_kit.testing import batch_digest

split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
NO_STREAM_IS_TRUSTED = int(datasets.__version__.partition(".")[0]) < 5


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for i in range(4):
            yield {"x": 10 * shard + i}


def generated(num_shards: int = 3) -> Any:
    shards = {"shards": list(range(num_shards))}
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs=shards)


def from_tables(num_shards: int = 3) -> Any:
    rows = datasets.Dataset.from_list([{"x": i} for i in range(11)])
    return rows.to_iterable_dataset(num_shards=num_shards)


def plus_one(example: dict[str, Any]) -> dict[str, Any]:
    return {"x": example["x"] + 1}


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": [value for value in batch["x"] for _ in range(2)]}


NARROW = datasets.Features({"x": datasets.Value("int32")})
STREAMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda make: make(),
    "map": lambda make: make().map(plus_one),
    "batched map": lambda make: make().map(twice, batched=True, batch_size=4),
    "filter": lambda make: make().filter(lambda example: example["x"] % 3),
    "skip and take": lambda make: make().skip(3).map(plus_one).take(6),
    "repeat": lambda make: make().repeat(2),
    "interleave": lambda make: datasets.interleave_datasets([make(), make(2)]),
    "interleave at random": lambda make: datasets.interleave_datasets(
        [make(), make(2)], probabilities=[0.3, 0.7], seed=4, stopping_strategy="all_exhausted"
    ),
    "concatenate": lambda make: datasets.concatenate_datasets([make(), make(2)]),
    "side by side": lambda make: datasets.concatenate_datasets(
        [make(), make().rename_column("x", "y")], axis=1
    ),
    "every second": lambda make: split_dataset_by_node(make(), 1, 2),
    "columns": lambda make: make().select_columns(["x"]),
    "cast": lambda make: make().map(plus_one).cast(NARROW),
    "numpy": lambda make: make().with_format("numpy").map(plus_one),
    "tables": lambda make: make().with_format("arrow").map(lambda table: table, batched=True),
}


def read(stream: Any) -> list[str]:
    return [str(example) for example in stream]


@pytest.mark.skipif(NO_STREAM_IS_TRUSTED, reason="before datasets 5 no stream is trusted")
@pytest.mark.parametrize("make", [generated, from_tables])
@pytest.mark.parametrize("name", STREAMS)
def test_a_trusted_stream_is_restored_exactly_at_every_example(name: str, make: Any) -> None:
    stream = STREAMS[name](make)
    assert has_exact_state(stream)
    whole = read(stream)
    assert len(whole) >= 5
    for num_read in range(len(whole) + 1):
        begun = STREAMS[name](make)
        examples = iter(begun)
        for _ in range(num_read):
            next(examples)
        state = json.loads(json.dumps(begun.state_dict()))
        resumed = STREAMS[name](make)
        resumed.load_state_dict(state)
        assert read(resumed) == whole[num_read:]


@pytest.mark.parametrize("version", ["4.0.0", "4.8.5"])
def test_streams_before_datasets_5_are_not_trusted(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a filter of Arrow tables was resumed at another example, before 4.8 a map, too."""
    monkeypatch.setattr(datasets, "__version__", version)
    assert not has_exact_state(from_tables())
    assert not has_exact_state(generated().map(plus_one))


@pytest.mark.parametrize("make", [generated, from_tables])
def test_a_shuffle_buffer_is_not_trusted(make: Any) -> None:
    shuffled = make().shuffle(seed=1, buffer_size=4)
    assert not has_exact_state(shuffled)
    assert not has_exact_state(shuffled.map(plus_one))
    assert not has_exact_state(datasets.concatenate_datasets([make(), shuffled]))


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


@pytest.fixture
def made_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PrefetchLoader]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kind = request.param
    files = [tmp_path / f"part-{i}.{kind}" for i in range(NUM_FILES)]
    for i, file in enumerate(files):
        write(file, EXAMPLES[i::NUM_FILES])
    source = by_datasets(files)

    def made(num_workers: int = 0, rank: int = 0, dp_size: int = 1, **more: Any) -> PrefetchLoader:
        options = {"num_shards": 4, "shuffle": True} | more
        ranks = {"dp_rank": rank, "dp_size": dp_size}
        stream = packed_stream(source, **SETTINGS | options | ranks)
        return PrefetchLoader(DataLoader(stream, batch_size=None, num_workers=num_workers))

    return made


@pytest.mark.parametrize("made_of", KINDS, indirect=True)
def test_every_example_once_in_every_pass_and_resumed_elsewhere(
    made_of: Callable[..., PrefetchLoader],
) -> None:
    with made_of() as loader:
        passes = [list(loader), list(loader)]
    for batches in passes:
        assert tokens_of(batches) == all_tokens(EXAMPLES)
    expected = [list(map(batch_digest, batches)) for batches in passes]
    assert expected[0] != expected[1]
    with made_of(2) as loader:
        assert [batch_digest(batch) for batch in islice(loader, 5)] == expected[0][:5]
        state = json.loads(json.dumps(loader.state_dict()))
    found, states = expected[0][:5], []
    for rank in (0, 1):
        with made_of(0, rank, 2) as loader:
            loader.load_state_dict(state)
            found += map(batch_digest, islice(loader, 3))
            states.append(loader.state_dict())
    with made_of(1) as loader:
        loader.load_state_dict(merge_states(states))
        found += map(batch_digest, loader)
    assert sorted(found) == sorted(expected[0])


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
    kind: str, damaged: bytes, message: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"part-{i}.{kind}" for i in range(4)]
    for i, file in enumerate(files):
        write(file, EXAMPLES[i::4])
    files[2].write_bytes(damaged)
    with pytest.raises(Exception, match=message) as caught:
        list(packed_stream(by_datasets(files), **SETTINGS, num_shards=4, on_error="skip"))
    assert not isinstance(caught.value, AssertionError)


def test_files_without_token_ids_are_named(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    write(file, [{"text": "not tokenized"}])
    with pytest.raises(DataError, match="no input_ids in example 0 of the str"):
        list(packed_stream(by_datasets([file]), **SETTINGS))


class Doubled(TokenizedDataset):
    """Gives other rows than it holds."""

    def __getitem__(self, index: Any) -> Any:
        return {name: np.repeat(row, 2) for name, row in super().__getitem__(index).items()}


LONG = make_examples(np.random.default_rng(0).integers(1, 30, size=40).tolist(), masks=True)


def table_of(num_chunks: int = 1) -> Any:
    return pa.concat_tables([pa.Table.from_pylist(LONG[i::num_chunks]) for i in range(num_chunks)])


def plain() -> Any:
    return datasets.Dataset.from_list(LONG)


COLUMNS: dict[str, Callable[[], Any]] = {
    "table": lambda: TokenizedDataset(table_of()),
    "chunks": lambda: TokenizedDataset(table_of(3)),
    "callable": lambda: lambda: TokenizedDataset(table_of()),
    "dataset": plain,
    "permuted": lambda: plain().select(np.random.default_rng(1).permutation(len(LONG))),
    "with text": lambda: plain().add_column("text", ["x"] * len(LONG)),
    "format": lambda: plain().with_format("numpy"),
    "columns": lambda: plain().with_format(None, columns=["input_ids"]),
    "transform": lambda: plain().with_transform(lambda r: {k: [v * 2 for v in r[k]] for k in r}),
    "subclass": lambda: Doubled(table_of()),
    "stream": lambda: plain().to_iterable_dataset(),
}


@pytest.mark.parametrize("overflow", ["truncate", "split"])
@pytest.mark.parametrize("name", COLUMNS)
def test_batches_are_those_of_the_examples(name: str, overflow: str) -> None:
    """In every form of target they are those of a collator: tests/collators has the forms."""
    source = COLUMNS[name]()
    rows = source() if callable(source) else source
    wanted = [dict(example) for example in rows]
    for more in ({}, {"num_shards": 2, "dp_size": 2, "dp_rank": 1}, {"shuffle": True}):
        settings = SETTINGS | {"overflow": overflow} | more
        found, expected = packed_stream(source, **settings), packed_stream(wanted, **settings)
        for batch, other in zip(found, expected, strict=True):
            if name == "stream":
                assert batch.metadata.pop("epoch", 0) == 0  # that of the source
            assert_same_batch(batch, other)


class Map:
    """A map-style dataset as torch defines it: it has a length, and no IndexError at its end."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        return [][0] if i == self.broken else {"input_ids": [i % 5 + 1] * 4}


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_map_style_dataset_is_read_to_its_length(num_shards: int | None) -> None:
    collate = PackedCollator(0, max_tokens=4)
    stream = PackedIterableDataset(Map(), collate, buffer_size=2, num_shards=num_shards)
    assert sorted(int(batch["input_ids"][0, 0]) for batch in stream) == [1, 2, 3, 4, 5]
    with pytest.raises(IndexError, match="list index out of range"):
        list(PackedIterableDataset(Map(3), collate, buffer_size=2, num_shards=num_shards))


def test_the_log_says_once_that_a_sampler_is_faster(caplog: Any) -> None:
    shards._log_faster_way.cache_clear()
    with caplog.at_level(logging.INFO, logger="torch_collate_kit.loading"):
        for _ in range(2):
            packed_stream(TokenizedDataset(make_examples([3, 4])), **SETTINGS)
    assert [record.getMessage() for record in caplog.records] == [
        "a stream reads a TokenizedDataset example by example; PackedBatchSampler is about twice "
        "as fast"
    ]
