"""The batches of several shards in rounds: a batch of every shard, then the next of every shard.

A round is the same for any number of ranks and workers, because what a shard gives depends on
nothing else, and which shards have a turn is decided by their numbers of batches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from torch_collate_kit.loading.streaming.states import Position

__all__ = ["Turn", "in_rounds"]


class Turn(NamedTuple):
    """A shard's turn in a round. With workers a turn without a batch keeps their places."""

    shard: int | None = None
    batch: Any = None
    after: Position | None = None  # of the shard; None if it has not changed

    @property
    def has_batch(self) -> bool:
        """Not None: a loader's ``collate_fn`` may return that."""
        return self.after is not None and not self.after.has_ended


_NO_TURN = Turn()


def in_rounds(
    shards: range,
    positions: Mapping[int, Position],
    read: Callable[[int, Position], Iterable[tuple[Any, Position]]],
    *,
    worker: int = 0,
    num_workers: int = 1,
) -> Iterator[Turn]:
    """The turns of a worker's shards, from ``positions`` (of all ``shards``) until all have ended.

    Every worker has equally many turns in a round. So the workers' turns, one of each in rotation
    as a DataLoader takes them, are those of a single process: the shards in order, round by round.
    """
    mine = shards[worker::num_workers]
    num_turns = -(-len(shards) // num_workers)
    live = {shard: positions[shard] for shard in mine if not positions[shard].has_ended}
    batches: dict[int, Iterator[tuple[Any, Position]]] = {}
    counts = [at.num_given for at in positions.values() if not at.has_ended]
    for step in count(min(counts, default=0)):
        if not live:
            return
        for i in range(num_turns):
            shard = mine[i] if i < len(mine) else None
            if shard is None or shard not in live or live[shard].num_given > step:
                turn = _NO_TURN
            else:
                if shard not in batches:
                    batches[shard] = iter(read(shard, live[shard]))
                turn = _next_turn(shard, live, batches[shard])
            if turn.after is not None or num_workers > 1:
                yield turn
            del turn  # its batch would be held beside the next


def _next_turn(
    shard: int, live: dict[int, Position], batches: Iterator[tuple[Any, Position]]
) -> Turn:
    given = next(batches, None)
    if given is None:
        return Turn(shard, after=live.pop(shard)._replace(has_ended=True))
    batch, live[shard] = given
    return Turn(shard, batch, live[shard])
