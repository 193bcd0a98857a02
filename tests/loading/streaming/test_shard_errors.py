"""A fixed number of shards: what cannot be divided, loaded or merged is refused."""

from __future__ import annotations

import copy
import time
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.building import packed_stream
from tests.loading.seals import resealed
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    StatefulSource,
    datasets,
    make_examples,
)
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import (
    PackedIterableDataset,
    PrefetchLoader,
    TokenizedDataset,
    merge_states,
)

split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node


def make(source: Any = EXAMPLES, **more: Any) -> PackedIterableDataset:
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
        make(source, **options)


def test_more_workers_than_shards_are_refused() -> None:
    message = r"num_workers=3, but with num_shards=4 and parallel\.dp=2 a rank has 2 shards; use at"
    dataset = make(dp_size=2)
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
        list(make(source(wrong), **options))
    wrong[9] = {"input_ids": [1, -5, 2]}  # found when its batch is made
    with pytest.raises(DataError, match=f"{message}: input_ids is -5 at token 1"):
        list(make(source(wrong), **options))


# --- states ---


def saved(**more: Any) -> dict[str, Any]:
    dataset = make(**more)
    list(islice(dataset, 5))
    return dataset.state_dict()


def test_the_state_of_another_rank_is_refused() -> None:
    state = saved(dp_rank=1, dp_size=4)
    message = r"the state has 1 shards, but not \[0\], which this rank reads; it is the state of"
    with pytest.raises(StateError, match=message):
        make(dp_rank=0, dp_size=2).load_state_dict(state)


def load_and_read(dataset: PackedIterableDataset, state: dict[str, Any]) -> None:
    dataset.load_state_dict(state)
    list(dataset)


def test_rounds_without_a_batch_are_not_counted_one_by_one() -> None:
    state, dataset = saved(), make(overflow="split")
    expected = len(list(make(overflow="split"))) - 5
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
        dataset = make(EXAMPLES[:6], dp_rank=rank, dp_size=2, num_shards=4)
        list(dataset)
        states.append(dataset.state_dict())
    merged = merge_states(states)
    assert all(record["has_ended"] for record in merged["shards"].values())
    assert merge_states(states[::-1]) == merged
    whole = make(EXAMPLES[:6])
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
        dataset = make(make_examples([5] * 8), dp_rank=rank, dp_size=2)
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
