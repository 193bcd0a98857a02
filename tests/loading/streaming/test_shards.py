"""A fixed number of shards: the same batches of each for any number of ranks and workers."""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from tests.batch_checks import assert_same_batch
from tests.building import ForTrainer, packed_stream
from tests.loading.seals import resealed
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    STREAMS,
    StatefulSource,
    all_tokens,
    datasets,
    make_examples,
    plain_loop,
    tokens_of,
)
from torch_collate_kit import PackedCollator, ParallelLayout
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import (
    PackedIterableDataset,
    PrefetchLoader,
    TokenizedDataset,
    merge_states,
)
from torch_collate_kit.testing import batch_digest

split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
NUM_SHARDS = 6


def part_of_list(shard: int) -> list[dict[str, Any]]:
    return EXAMPLES[shard::NUM_SHARDS]


def part_of_stream(shard: int) -> Any:
    return datasets.Dataset.from_list(EXAMPLES[shard::NUM_SHARDS]).to_iterable_dataset()


def of_files(num_files: int) -> Any:
    return datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=num_files)


WHOLE = {
    "list": lambda: EXAMPLES,
    "tuple": lambda: tuple(EXAMPLES),
    "callable": lambda: lambda: iter(EXAMPLES),
    "stateful": lambda: lambda: StatefulSource(EXAMPLES),
    "columns": lambda: TokenizedDataset(EXAMPLES),
    "dataset": lambda: datasets.Dataset.from_list(EXAMPLES),
    "dataset with format": lambda: datasets.Dataset.from_list(EXAMPLES).with_format("numpy"),
    "callable of a stream": lambda: lambda: of_files(4),
    **{name: SOURCES[name] for name in ("one shard", "shards", "odd shards", "mapped")},
    "generator": SOURCES["generator"],  # 6 files
    "shuffled": SOURCES["shuffled"],
    "every file": lambda: of_files(12),
    "side by side": lambda: datasets.concatenate_datasets(
        [of_files(2), of_files(2).rename_column("input_ids", "copy")], axis=1
    ).select_columns(["input_ids"]),
}
PRESHARDED = {"presharded": lambda: part_of_list, "presharded streams": lambda: part_of_stream}
BY_FILES = {"generator", "shuffled", "every file", "side by side"}  # not by position


def make(name: str, rank: int = 0, dp_size: int = 1, **more: Any) -> PackedIterableDataset:
    options: dict[str, Any] = {"num_shards": NUM_SHARDS, "presharded": name in PRESHARDED}
    source = (WHOLE | PRESHARDED)[name]()
    ranks = {"dp_rank": rank, "dp_size": dp_size}
    return packed_stream(source, **SETTINGS | options | ranks | more)


def by_turn(batches: Any) -> dict[tuple[int, int], str]:
    """The digest of each batch by its step and shard; the same turn never twice."""
    found: dict[tuple[int, int], str] = {}
    for batch in batches:
        turn = batch.metadata["step"], batch.metadata["shard"]
        assert turn not in found
        found[turn] = batch_digest(batch)
    return found


def in_worker(
    monkeypatch: pytest.MonkeyPatch, dataset: PackedIterableDataset, worker: int, num_workers: int
) -> list[Any]:
    """What a DataLoader worker would iterate over, without the fork."""
    if not num_workers:
        return list(dataset)
    info = WorkerInfo(id=worker, num_workers=num_workers, seed=0, dataset=dataset)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
    batches = list(dataset)
    monkeypatch.undo()
    return batches


@pytest.mark.parametrize("name", [*WHOLE, *PRESHARDED])
def test_every_source_is_read_once_by_any_ranks_and_goes_on_with_others(name: str) -> None:
    """chains.py has more of ranks and workers."""
    whole = list(make(name))
    assert tokens_of(whole) == all_tokens(EXAMPLES)
    expected = by_turn(whole)
    assert list(expected) == sorted(expected)  # round by round, and in a round by shard
    assert {shard for _, shard in expected} == set(range(NUM_SHARDS))
    if name not in BY_FILES:
        assert_packed_as_by_the_plain_loop(whole, make(name))
    for dp_size in (2, 6):
        parts = [by_turn(make(name, rank, dp_size)) for rank in range(dp_size)]
        assert {turn: batch for part in parts for turn, batch in part.items()} == expected
        for rank, part in enumerate(parts):
            assert list(part) == sorted(part)
            assert {shard * dp_size // NUM_SHARDS for _, shard in part} == {rank}
    first = make(name)
    found = by_turn(islice(first, 7))
    state, states = json.loads(json.dumps(first.state_dict())), []
    for rank in range(3):
        part = make(name, rank, 3)
        part.load_state_dict(state)
        found |= by_turn(islice(part, 1 + rank))
        states.append(part.state_dict())
    assert len(found) == 7 + 1 + 2 + 3
    last = make(name)
    last.load_state_dict(json.loads(json.dumps(merge_states(states))))
    rest = by_turn(last)
    assert not found.keys() & rest.keys()
    assert found | rest == expected


def assert_packed_as_by_the_plain_loop(found: list[Any], dataset: PackedIterableDataset) -> None:
    """Each shard has every sixth example."""
    shards: list[list[Any]] = [[] for _ in range(NUM_SHARDS)]
    for batch in found:
        assert batch.metadata["step"] == len(shards[batch.metadata["shard"]])
        shards[batch.metadata["shard"]].append(batch)
    for shard, batches in enumerate(shards):
        wanted = plain_loop(EXAMPLES[shard::NUM_SHARDS], dataset.collate, dataset.buffer_size, 1)
        assert len(wanted) > 1
        for batch, expected in zip(batches, wanted, strict=True):
            named = {
                k: batch.metadata[k] for k in ("shard", "step", "epoch") if k in batch.metadata
            }
            expected.metadata |= named
            assert_same_batch(batch, expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_without_a_number_of_shards_ranks_and_workers_lose_nothing(
    name: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dp_size, by_node in ((1, False), (4, False), (4, True)):
        if by_node and name not in STREAMS:
            continue
        found = []
        for rank in range(dp_size):
            source: Any = SOURCES[name]()
            ranks = {"dp_rank": rank, "dp_size": dp_size}
            if by_node:
                source, ranks = split_dataset_by_node(source, rank, dp_size), {}
            dataset = packed_stream(source, **SETTINGS, **ranks)
            for worker in range(max(1, num_workers)):
                found += in_worker(monkeypatch, dataset, worker, num_workers)
        assert tokens_of(found) == all_tokens(EXAMPLES), dp_size


def test_names_shard_and_round_and_the_epoch_of_the_source() -> None:
    stream = SOURCES["shuffled"]()
    stream.set_epoch(3)
    dataset = packed_stream(stream, **SETTINGS, num_shards=2)
    found = [batch.metadata for batch in islice(dataset, 4)]
    assert [(m["shard"], m["step"], m["epoch"]) for m in found] == [
        (0, 0, 3),
        (1, 0, 3),
        (0, 1, 3),
        (1, 1, 3),
    ]
    plain = next(iter(make("list"))).metadata
    assert (plain["shard"], plain["step"]) == (0, 0)
    assert "epoch" not in plain
    assert "shard" not in next(iter(packed_stream(EXAMPLES, **SETTINGS))).metadata
    batch = next(iter(make("list", 1, 2)))
    collate = ForTrainer(PackedCollator(0, max_tokens=12, parallel=ParallelLayout(dp=2)))
    around = PackedIterableDataset(EXAMPLES, collate, buffer_size=7, num_shards=6, dp_rank=1)
    inputs = next(iter(around))
    assert torch.equal(inputs["input_ids"], batch["input_ids"])
    assert inputs["use_cache"] is False
    assert collate.collate.packing.parallel.dp == 2


# --- resuming ---


def test_of_a_merged_state_a_rank_saves_its_own_shards() -> None:
    whole = make("list")
    list(islice(whole, 4))
    rank = make("list", 1, 3)
    rank.load_state_dict(whole.state_dict())
    assert list(rank.state_dict()["shards"]) == ["2", "3"]


def test_states_by_hand() -> None:
    common = {
        "buffer_size": 7, "rows_per_rank": 1, "max_tokens": 12, "strategy": "balanced",
        "isolate": True, "share_prefixes": False,
        "align": 1, "row_align": 1, "dp": 1, "overflow": "raise", "max_sequences_per_row": None,
        "balance": "attention", "max_patches": None, "cost": [24576, 1, 5266, 1],
        "dummy_image_tokens": 0, "rows_multiple_of": None, "fixed_width": False, "pad_token_id": 0,
        "normalize_loss": True, "train_all": False, "fields": "", "targets": None,
        "seed": None, "presharded": False, "epoch": None,
        "fingerprint": {"num_examples": 43, **TokenizedDataset(EXAMPLES).fingerprint()},
    }  # fmt: skip
    first, second = ({"num_batches": n, "num_given": n} for n in (2, 1))
    alone = {"dp_size": 1, "num_workers": 0, "shards": {"0": first}}
    divided = {"shards": {"0": second, "1": second}}
    for num_shards, shards in ((None, alone), (2, divided)):
        expected = {"version": 8, "num_shards": num_shards, **common, **shards}
        dataset = packed_stream(EXAMPLES, **SETTINGS, num_shards=num_shards)
        list(islice(dataset, 2))
        assert dataset.state_dict() == resealed(expected)
        dataset = packed_stream(EXAMPLES, **SETTINGS, num_shards=num_shards)
        with PrefetchLoader(DataLoader(dataset, batch_size=None)) as loader:
            list(islice(loader, 2))
            assert loader.state_dict()["stream"] == resealed(expected)


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


split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node


def divided(source: Any = EXAMPLES, **more: Any) -> PackedIterableDataset:
    return packed_stream(source, **SETTINGS | {"num_shards": 4} | more)


# --- arguments ---


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        (EXAMPLES, {"num_shards": 0}, ValueError, "num_shards must be at least 1, got 0; None ma"),
        (EXAMPLES, {"dp_size": 3}, ValueError, r"num_shards=4 does not divide by parallel\.dp=3;"),
        (EXAMPLES, {"presharded": True}, TypeError, "with num_shards=4 a presharded source must "),
        (StatefulSource(EXAMPLES), {}, TypeError, "stream is a StatefulSource with a state_dict,"),
        (
            split_dataset_by_node(SOURCES["shards"](), 1, 2),
            {},
            ValueError,
            r"stream is split by node already \(rank 1 of 2\), so it cannot be divided into "
            "num_shards=4 shards; pass the stream before split_dataset_by_node, and dp_rank",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    source: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        divided(source, **options)


def test_more_workers_than_shards_are_refused() -> None:
    message = r"num_workers=3, but with num_shards=4 and parallel\.dp=2 a rank has 2 shards; use at"
    dataset = divided(dp_size=2)
    loader = DataLoader(dataset, batch_size=None, num_workers=3, collate_fn=dataset.as_is)
    with pytest.raises(ValueError, match=message):
        PrefetchLoader(loader)
    batches = iter(loader)
    with pytest.raises(ValueError, match=message):
        next(batches)
    batches._shutdown_workers()  # the garbage collector takes five seconds for each


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (lambda wrong: wrong, {}, "example 9 of the stream"),
        (
            lambda wrong: lambda shard: TokenizedDataset(wrong[shard::4]),
            {"presharded": True},
            "example 2 of shard 1 of the stream",
        ),
        (
            lambda wrong: datasets.Dataset.from_list(wrong).to_iterable_dataset(num_shards=4),
            {},
            "example 9 of shard 0 of the stream",  # the first that is opened
        ),
    ],
)
def test_a_wrong_example_is_named_by_its_position(
    source: Any, options: dict[str, Any], message: str
) -> None:
    wrong = [*EXAMPLES[:9], {"input_ids": []}, *EXAMPLES[10:]]
    with pytest.raises(DataError, match=f"{message} is empty"):
        list(divided(source(wrong), **options))
    wrong[9] = {"input_ids": [1, -5, 2]}  # found when its batch is made
    with pytest.raises(DataError, match=f"{message}: input_ids is -5 at token 1"):
        list(divided(source(wrong), **options))


# --- states ---


def saved(**more: Any) -> dict[str, Any]:
    dataset = divided(**more)
    list(islice(dataset, 5))
    return dataset.state_dict()


def test_the_state_of_another_rank_is_refused() -> None:
    state = saved(dp_rank=1, dp_size=4)
    message = r"the state has 1 shards, but not \[0\], which this rank reads; it is the state of"
    with pytest.raises(StateError, match=message):
        divided(dp_rank=0, dp_size=2).load_state_dict(state)


def load_and_read(dataset: PackedIterableDataset, state: dict[str, Any]) -> None:
    dataset.load_state_dict(state)
    list(dataset)


def test_rounds_without_a_batch_are_not_counted_one_by_one() -> None:
    state, dataset = saved(), divided(overflow="split")
    expected = len(list(divided(overflow="split"))) - 5
    state["shards"]["2"]["num_given"] += 2**20
    dataset.load_state_dict(resealed(state, overflow="split"))
    began = time.perf_counter()
    assert len(list(dataset)) == expected
    assert time.perf_counter() - began < 1


# --- merging ---


def states_of(dp_size: int, **more: Any) -> list[dict[str, Any]]:
    return [saved(dp_rank=rank, dp_size=dp_size, **more) for rank in range(dp_size)]


def test_merged_states_are_those_of_one_rank_and_change_nothing() -> None:
    states = states_of(4)
    before = copy.deepcopy(states)
    merged = merge_states(iter(reversed(states)))
    assert states == before
    assert list(merged["shards"]) == ["0", "1", "2", "3"]
    assert merged == merge_states([merge_states(states[2:]), merge_states(states[:2])])
    merged["shards"]["0"]["num_read"] = 99
    assert states == before
    assert merge_states([whole := saved()]) == whole


def test_the_ended_shards_of_all_states_have_ended() -> None:
    states = []
    for rank in range(2):
        dataset = divided(EXAMPLES[:6], dp_rank=rank, dp_size=2, num_shards=4)
        list(dataset)
        states.append(dataset.state_dict())
    merged = merge_states(states)
    assert all(record["has_ended"] for record in merged["shards"].values())
    assert merge_states(states[::-1]) == merged
    whole = divided(EXAMPLES[:6])
    whole.load_state_dict(merged)
    assert whole.state_dict() == merged
    assert list(whole) == []
    assert len(list(whole)) > 0  # the next pass


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "there is no state to merge; pass the states of all ranks"),
        ([None], "state 0 must be a mapping, got NoneType"),
        (
            [resealed({"version": 8})],
            r"state 0 has \['version'\], no shards; pass the state of a Pa",
        ),
        (states_of(4) + states_of(2)[:1], "state 4 has the shards 0, 1 of a state before it; pass"),
        ([states_of(2)[0], states_of(2, buffer_size=9)[1]], "state 1 is of buffer_size=9, state "),
        (
            [states_of(2)[0], saved(num_shards=8, dp_rank=1, dp_size=2)],
            "state 1 is of num_shards=8, state 0 of num_shards=4",
        ),
        ([packed_stream(EXAMPLES, **SETTINGS).state_dict()], "state 0 is of a stream without num"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(states: list[Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        merge_states(states)


def test_states_of_loaders_in_other_passes_are_refused() -> None:
    states = []
    for rank, num_passes in ((0, 1), (1, 0)):
        dataset = divided(make_examples([5] * 8), dp_rank=rank, dp_size=2)
        with PrefetchLoader(DataLoader(dataset, batch_size=None)) as loader:
            for _ in range(num_passes):
                list(loader)
            states.append(loader.state_dict())
    with pytest.raises(
        StateError, match="state 1 is of epoch=0, state 0 of epoch=1; merge the sta"
    ):
        merge_states(states)
    with pytest.raises(StateError, match="state 1 has version 2, this release reads version 8"):
        merge_states([saved(dp_rank=0, dp_size=2), states[1]])
