"""A shuffled stream: shards and files in a seeded order, then blocks of examples in themselves."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.seals import resealed
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    StatefulSource,
    all_tokens,
    datasets,
    plain_loop,
    tokens_of,
)
from torch_collate_kit import PackedIterableDataset, PrefetchLoader
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import merge_states
from torch_collate_kit.testing import assert_exact_resume, batch_digest

SHUFFLED = SETTINGS | {"shuffle": True, "seed": 3}


def permuted(seed: tuple[int, ...], size: int) -> list[int]:
    return np.random.default_rng(np.random.SeedSequence(seed)).permutation(size).tolist()


def blocks_of(
    examples: list[dict[str, Any]], size: int, words: tuple[int, ...], first: int, step: int
) -> list[dict[str, Any]]:
    """The order of a shard, which has every ``step``-th example from ``first`` on."""
    found: list[dict[str, Any]] = []
    positions = list(range(first, len(examples), step))
    num_read = 0
    for start in range(0, len(positions), size):
        block = positions[start : start + size]
        found += [examples[block[j]] for j in permuted((*words, num_read + 1, 0), len(block))]
        num_read = block[-1] + 1
    return found


@pytest.mark.parametrize("name", ["list", "callable", "stateful", "map-style", "one shard"])
@pytest.mark.parametrize("more", [{}, {"rows": 2, "strategy": "sequential"}, {"buffer_size": 60}])
def test_a_pass_packs_blocks_in_shuffled_order(name: str, more: dict[str, Any]) -> None:
    dataset = packed_stream(SOURCES[name](), **SHUFFLED | more)
    for epoch in range(3):  # passes are counted where iter() is called
        ordered = blocks_of(EXAMPLES, dataset.buffer_size, (3, epoch, 0), 0, 1)
        wanted = plain_loop(ordered, dataset.collate, dataset.buffer_size, dataset.batch_rows)
        found = list(dataset)
        assert len(found) == len(wanted) > 1
        for batch, expected in zip(found, wanted, strict=True):
            assert_same_batch(batch, expected)


def test_shards_are_in_a_seeded_order_and_each_is_shuffled() -> None:
    num_shards = 4
    for epoch in (0, 1):
        order = permuted((3, epoch), num_shards)
        for rank in (0, 1):
            dataset = packed_stream(
                EXAMPLES, **SHUFFLED, num_shards=num_shards, dp_rank=rank, dp_size=2
            )
            dataset.set_epoch(epoch)
            found: dict[int, list[Any]] = {}
            for batch in dataset:
                assert batch.metadata.pop("epoch") == epoch
                batch.metadata.pop("step")
                found.setdefault(batch.metadata.pop("shard"), []).append(batch)
            assert list(found) == [2 * rank, 2 * rank + 1]
            for shard, batches in found.items():
                first = order[shard]
                ordered = blocks_of(EXAMPLES, 7, (3, epoch, shard), first, num_shards)
                wanted = plain_loop(ordered, dataset._stream.collate, 7, 1)
                for batch, expected in zip(batches, wanted, strict=True):
                    assert_same_batch(batch, expected)


def files_read(epoch: int, **options: Any) -> tuple[list[int], list[Any]]:
    opened: list[int] = []

    def read(files: list[int]) -> Iterator[dict[str, Any]]:
        for file in files:
            opened.append(file)
            yield from EXAMPLES[file::12]

    source = datasets.IterableDataset.from_generator(read, gen_kwargs={"files": list(range(12))})
    opened.clear()  # of guessing the features
    dataset = packed_stream(source, **SHUFFLED, **options)
    dataset.set_epoch(epoch)
    return opened, list(dataset)


@pytest.mark.parametrize("num_shards", [None, 4])
def test_files_of_a_datasets_stream_are_read_in_another_order_in_every_pass(
    num_shards: int | None,
) -> None:
    orders = []
    for epoch in (0, 1):
        opened, batches = files_read(epoch, num_shards=num_shards)
        assert sorted(opened) == list(range(12))  # each once
        assert tokens_of(batches) == all_tokens(EXAMPLES)
        assert opened == files_read(epoch, num_shards=num_shards)[0]
        orders.append(opened)
    assert orders[0] != orders[1]
    assert list(range(12)) not in orders


def test_a_stream_after_take_keeps_the_order_of_its_files() -> None:
    source = SOURCES["shards"]().take(20)
    assert tokens_of(list(packed_stream(source, **SHUFFLED))) == all_tokens(EXAMPLES[:20])


# --- resuming ---

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SOURCES),
    ("list", {"buffer_size": 3}),
    ("list", {"buffer_size": 1}),
    ("stateful", {"rows": 3, "buffer_size": 16}),
    ("stateful", {"dp_rank": 1, "dp_size": 2}),
    ("stateful", {"overflow": "split", "max_tokens": 5}),
    ("map-style", {"overflow": "split", "max_tokens": 3, "buffer_size": 4}),
    ("map-style", {"overflow": "drop", "max_tokens": 5}),
    ("list", {"num_shards": 3}),
    ("shards", {"num_shards": 2}),
]


@pytest.mark.parametrize(("name", "more"), CASES, ids=str)
def test_exact_resume_at_every_batch(name: str, more: dict[str, Any]) -> None:
    def make() -> PackedIterableDataset:
        return packed_stream(SOURCES[name](), **SHUFFLED | more)

    batches = list(make())
    if "dp_rank" not in more and more.get("overflow") != "drop":
        assert tokens_of(batches) == all_tokens(EXAMPLES)
    stops = None if name in ("list", "stateful") else range(0, len(batches) + 3, 4)
    assert_exact_resume(make, num_steps=len(batches) + 3, stops=stops, max_state_bytes=2500)


def test_a_state_in_the_middle_of_a_block_names_it() -> None:
    examples = EXAMPLES * 12
    options: dict[str, Any] = {"tokenizer": 0, "max_tokens": 12, "rows": 3, "shuffle": True}
    dataset = packed_stream(StatefulSource(examples), **options, buffer_size=20)
    found = set()
    batches = iter(dataset)
    for _ in batches:
        record = {"num_read": 0, "taken": 0} | dataset.state_dict()["shards"]["0"]
        found.add((record["num_read"], record["taken"]))
        source = StatefulSource(examples)
        resumed = packed_stream(source, **options, buffer_size=20)
        resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
        assert source.num_reads == 0
        next(iter(resumed), None)
        assert source.num_reads <= 20 + 20  # a window, and the block in which it begins
    assert any(taken for _, taken in found)
    starts = {*range(0, len(examples), 20), len(examples)}
    assert all(num_read in starts and taken < 20 for num_read, taken in found)


def rounds(batches: Any) -> dict[tuple[int, int, int], str]:
    keys = ("epoch", "step", "shard")
    return {tuple(b.metadata[key] for key in keys): batch_digest(b) for b in batches}


@pytest.mark.parametrize("name", ["list", "map-style", "shards", "odd shards"])
def test_a_loader_numbers_the_passes_for_any_workers_and_ranks(name: str) -> None:
    def make(rank: int = 0, dp_size: int = 1, num_workers: int = 0, **more: Any) -> PrefetchLoader:
        dataset = packed_stream(
            SOURCES[name](), **SHUFFLED, num_shards=4, dp_rank=rank, dp_size=dp_size
        )
        return PrefetchLoader(DataLoader(dataset, batch_size=None, num_workers=num_workers, **more))

    with make() as loader:
        whole = rounds(list(loader) + list(loader))
    assert {epoch for epoch, _, _ in whole} == {0, 1}
    for more in ({}, {"persistent_workers": True}):
        with make(num_workers=2, **more) as loader:
            assert rounds(list(loader) + list(loader)) == whole
    states, found = [], {}
    for rank in (0, 1):
        with make(rank, 2) as loader:
            list(loader)
            found |= rounds(islice(loader, 3))
            states.append(json.loads(json.dumps(loader.state_dict())))
    with make(num_workers=1) as loader:
        loader.load_state_dict(merge_states(states))
        assert loader.epoch == 1
        rest = rounds(loader)
    assert not found.keys() & rest.keys()
    assert found | rest == {at: batch for at, batch in whole.items() if at[0] == 1}


def test_a_loader_begins_at_the_pass_of_its_dataset() -> None:
    dataset = packed_stream(EXAMPLES, **SHUFFLED)
    dataset.set_epoch(2)
    expected = [batch_digest(batch) for batch in dataset]
    for kind in ("set_epoch", "state"):
        again = packed_stream(EXAMPLES, **SHUFFLED)
        if kind == "set_epoch":
            again.set_epoch(2)
        else:
            dataset.set_epoch(2)
            list(islice(dataset, 3))
            again.load_state_dict(dataset.state_dict())
        with PrefetchLoader(DataLoader(again, batch_size=None)) as loader:
            assert loader.epoch == 2
            batches = list(loader)
        for batch in batches:
            assert (batch.metadata.pop("epoch"), batch.metadata.pop("step") >= 0) == (2, True)
        assert [batch_digest(batch) for batch in batches] == expected[kind == "state" and 3 :]


def test_passes_of_a_plain_dataloader() -> None:
    """Workers are given the number that the dataset has; persistent ones count on."""
    dataset = packed_stream(EXAMPLES, **SHUFFLED, num_shards=2)
    expected = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        expected.append(sorted(map(batch_digest, dataset)))
    assert expected[0] != expected[1]
    for persistent in (False, True):
        dataset.set_epoch(0)
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            persistent_workers=persistent,
            collate_fn=dataset.as_is,
        )
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            assert sorted(map(batch_digest, loader)) == expected[epoch]


def test_set_epoch_keeps_a_state_of_its_pass_and_copies_move_on_alone() -> None:
    def make() -> PackedIterableDataset:
        return packed_stream(EXAMPLES, **SHUFFLED)

    first = make()
    first.set_epoch(1)
    whole = [batch_digest(batch) for batch in first]
    first.set_epoch(1)
    list(islice(first, 4))
    state = first.state_dict()
    assert (state["seed"], state["pass"]) == (3, 1)
    for copied in (make(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        copied.load_state_dict(state)
        copied.set_epoch(1)
        assert [batch_digest(batch) for batch in copied] == whole[4:]
        assert copied.state_dict()["pass"] == 1
        copied.load_state_dict(state)
        copied.set_epoch(2)
        assert len(list(copied)) >= len(whole) - 2  # from its beginning
        assert copied.state_dict()["pass"] == 2


SHUFFLED = SETTINGS | {"shuffle": True, "seed": 3}


def test_skips_wrong_examples_of_a_shuffled_stream() -> None:
    wrong = {5, 6, 20, 41, 42}
    examples = [
        example | {"input_ids": [-7] if i == 20 else []} if i in wrong else example
        for i, example in enumerate(EXAMPLES)
    ]

    def make() -> PackedIterableDataset:
        return packed_stream(examples, **SHUFFLED, on_error="skip")

    batches = list(make())
    skipped = [i for batch in batches for i in batch.metadata.get("skipped", [])]
    assert sorted(skipped) == sorted(wrong)
    assert tokens_of(batches) == all_tokens([e for i, e in enumerate(EXAMPLES) if i not in wrong])
    assert_exact_resume(make, num_steps=len(batches) + 2, stops=range(0, len(batches), 3))


def saved(num_batches: int = 5, **more: Any) -> dict[str, Any]:
    dataset = packed_stream(EXAMPLES, **SHUFFLED | more)
    list(islice(dataset, num_batches))
    return json.loads(json.dumps(dataset.state_dict()))


def test_a_source_that_became_shorter_is_noticed() -> None:
    dataset = packed_stream(lambda: iter(EXAMPLES[:10]), **SHUFFLED)
    dataset.load_state_dict(
        resealed(saved(), fingerprint=None, shards={"0": {"num_read": 7, "taken": 3}})
    )
    message = "after 3 examples of a shuffled block of 3 that begins after example 7 of the stream"
    with pytest.raises(StateError, match=message):
        list(dataset)
