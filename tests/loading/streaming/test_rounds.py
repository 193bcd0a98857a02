"""The order of shards: a plain loop, and the same over workers as a DataLoader takes turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit.loading.streaming.shard_batches import Turn, in_rounds
from torch_collate_kit.loading.streaming.states import Place, Position


def reader(lengths: dict[int, int]) -> Any:
    """Shard 3 gives "3.0", "3.1", ... up to its length."""

    def read(shard: int, position: Position) -> Iterator[tuple[str, Position]]:
        for i in range(position.num_given, lengths[shard]):
            yield f"{shard}.{i}", Position(Place(i + 1), 0, i + 1)

    return read


def fewest_first(lengths: dict[int, int], given_before: dict[int, int]) -> list[str]:
    """Always the shard with the fewest batches given out, the first of these, until all end."""
    counts, found = dict(given_before), []
    while left := [shard for shard in lengths if counts[shard] < lengths[shard]]:
        shard = min(left, key=lambda shard: (counts[shard], shard))
        found.append(f"{shard}.{counts[shard]}")
        counts[shard] += 1
    return found


def by_workers(workers: list[Iterator[Turn]]) -> list[Turn]:
    """One turn of each worker in rotation, without those that have ended."""
    found, live = [], dict(enumerate(workers))
    for number in cycle(range(len(workers))):
        if number in live:
            turn = next(live[number], None)
            if turn is None:
                del live[number]
            else:
                found.append(turn)
        if not live:
            return found
    raise AssertionError


def test_by_hand() -> None:
    lengths = {4: 3, 5: 1, 6: 2}
    positions = {4: Position(num_given=1), 5: Position(), 6: Position()}
    found = list(in_rounds(range(4, 7), positions, reader(lengths)))
    assert [turn.batch for turn in found] == ["5.0", "6.0", "4.1", None, "6.1", "4.2", None, None]
    assert [turn.shard for turn in found] == [5, 6, 4, 5, 6, 4, 6, 4]
    assert [turn.has_batch for turn in found] == [turn.batch is not None for turn in found]
    assert found[3].after == Position(Place(1), 0, 1, has_ended=True)
    assert found[5].after == Position(Place(3), 0, 3)
    assert positions == {4: Position(num_given=1), 5: Position(), 6: Position()}


@pytest.mark.parametrize("ended", [Position(has_ended=True), Position(Place(9), 2, 7, True)])
def test_a_shard_that_has_ended_is_not_opened(ended: Position) -> None:
    positions = {0: ended, 1: Position(num_given=5)}
    found = list(in_rounds(range(2), positions, reader({1: 6})))
    assert [turn.batch for turn in found] == ["1.5", None]
    assert list(in_rounds(range(1), {0: ended}, reader({}))) == []
    workers = [
        list(in_rounds(range(2), positions, reader({1: 6}), worker=w, num_workers=2))
        for w in (0, 1)
    ]
    assert [[turn.batch for turn in turns] for turns in workers] == [[], ["1.5", None]]


@given(st.data())
def test_any_number_of_workers_gives_the_order_of_the_plain_loop(data: Any) -> None:
    first = data.draw(st.integers(0, 3))
    shards = range(first, first + data.draw(st.integers(1, 6)))
    lengths = {shard: data.draw(st.integers(0, 5)) for shard in shards}
    before = {shard: data.draw(st.integers(0, lengths[shard])) for shard in shards}
    ended = data.draw(st.sets(st.sampled_from(list(shards))))
    positions = {
        shard: Position(
            num_given=before[shard], has_ended=shard in ended and before[shard] == lengths[shard]
        )
        for shard in shards
    }
    expected = fewest_first(lengths, before)
    for num_workers in range(1, len(shards) + 1):
        options = [{"worker": worker, "num_workers": num_workers} for worker in range(num_workers)]
        turns = by_workers([in_rounds(shards, positions, reader(lengths), **o) for o in options])
        assert [turn.batch for turn in turns if turn.has_batch] == expected, num_workers
        after = positions | {turn.shard: turn.after for turn in turns if turn.shard is not None}
        assert all(after[shard].has_ended for shard in shards)
        assert {shard: after[shard].num_given for shard in shards} == lengths
