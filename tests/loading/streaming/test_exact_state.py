"""The steps of a datasets stream whose state is trusted: each is restored exactly, everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torch_collate_kit.loading.streaming.shards import has_exact_state

datasets = pytest.importorskip("datasets")
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
