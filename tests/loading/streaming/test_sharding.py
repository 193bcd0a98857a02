"""Packing a stream: over ranks and workers, every example once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data._utils.worker import WorkerInfo

from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    STREAMS,
    all_tokens,
    tokens_of,
)
from torch_collate_kit import PackedCollator, PackedIterableDataset, ParallelLayout

split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node


def in_worker(
    monkeypatch: pytest.MonkeyPatch, dataset: PackedIterableDataset, worker: int, num_workers: int
) -> list[Any]:
    """What a DataLoader worker would iterate over, without the fork."""
    info = WorkerInfo(id=worker, num_workers=num_workers, seed=0, dataset=dataset)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
    batches = list(dataset)
    monkeypatch.undo()
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("split", "name"),
    [("by the dataset", name) for name in SOURCES] + [("by node", name) for name in STREAMS],
)
def test_ranks_and_workers_lose_nothing(
    name: str, split: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dp_size in (1, 4):
        found = []
        for rank in range(dp_size):
            for worker in range(max(1, num_workers)):
                if split == "by node":
                    source = split_dataset_by_node(SOURCES[name](), rank, dp_size)
                    dataset = packed_stream(source, **SETTINGS)
                else:
                    shard = {"dp_rank": rank, "dp_size": dp_size}
                    dataset = packed_stream(SOURCES[name](), **SETTINGS, **shard)
                if num_workers:
                    found += in_worker(monkeypatch, dataset, worker, num_workers)
                else:
                    found += list(dataset)
        assert tokens_of(found) == all_tokens(EXAMPLES), dp_size


def test_each_rank_packs_its_part_as_one_rank_does() -> None:
    """``batch_rows`` counts the rows of both ranks."""
    one, two = (PackedCollator(0, max_tokens=12, parallel=ParallelLayout(dp=n)) for n in (1, 2))
    for rank in range(2):
        part = PackedIterableDataset(EXAMPLES, two, batch_rows=4, buffer_size=7, dp_rank=rank)
        alone = PackedIterableDataset(EXAMPLES[rank::2], one, batch_rows=2, buffer_size=7)
        assert list(part) == list(alone)
        assert [len(batch) for batch in part][:3] == [2, 2, 2]


def test_a_presharded_source_is_not_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = EXAMPLES[1::2]
    dataset = packed_stream(mine, **SETTINGS, dp_rank=1, dp_size=2, presharded=True)
    assert tokens_of(list(dataset)) == all_tokens(mine)
    found = []

    def source() -> Iterator[Any]:  # iterates over a stream, which looks at the worker
        yield from SOURCES["shards"]()

    for worker in range(2):
        dataset = packed_stream(source, **SETTINGS, presharded=True)
        found += in_worker(monkeypatch, dataset, worker, 2)
    assert tokens_of(found) == all_tokens(EXAMPLES)


def test_pickles_into_spawned_workers() -> None:
    dataset = packed_stream(SOURCES["shards"](), **SETTINGS)
    next(iter(dataset))
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied.state_dict() == dataset.state_dict()
    assert tokens_of(list(copied)) == all_tokens(EXAMPLES)
