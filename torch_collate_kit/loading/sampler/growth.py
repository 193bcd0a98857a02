"""How many examples each epoch has, where data were appended between two runs."""

from __future__ import annotations

from typing import Any

from torch_collate_kit.errors import StateError

__all__ = ["Growth", "last_of"]

_MAX_COUNT = 2**63 - 1


class Growth:
    """The number of examples by epoch: more from some epochs on.

    >>> growth = Growth.of([[0, 100]], now=120, from_epoch=3)
    >>> growth.at(2), growth.at(3), growth.before(4), growth.as_state()
    (100, 120, 420, [[0, 100], [3, 120]])
    """

    def __init__(self, num_examples: int) -> None:
        self._changes = [(0, num_examples)]

    @classmethod
    def of(cls, changes: Any, *, now: int, from_epoch: int) -> Growth:
        """From a state, with ``now`` examples, new ones from ``from_epoch`` on."""
        growth = cls(last_of(changes))
        growth._changes = [(int(at), int(n)) for at, n in changes]
        if growth.last != now:
            growth._changes = [at for at in growth._changes if at[0] < from_epoch]
            growth._changes.append((from_epoch, now))
        return growth

    @property
    def last(self) -> int:
        """What there is now."""
        return self._changes[-1][1]

    def at(self, epoch: int) -> int:
        """Examples of an epoch."""
        return next(n for first, n in reversed(self._changes) if first <= epoch)

    def before(self, epoch: int) -> int:
        """Examples of all epochs before one."""
        starts = [min(first, epoch) for first, _ in self._changes] + [epoch]
        sizes = [n for _, n in self._changes]
        return sum(n * (b - a) for n, a, b in zip(sizes, starts, starts[1:], strict=False))

    def as_state(self) -> list[list[int]]:
        """All changes, those to come as well: [epoch, examples from it on]."""
        return [list(change) for change in self._changes]


def last_of(changes: Any) -> int:
    """The number of examples that a state knows; StateError if its changes are none."""
    pairs = isinstance(changes, list) and all(isinstance(at, (list, tuple)) for at in changes)
    if not pairs or not changes or any(len(at) != 2 for at in changes):
        raise _damaged(changes)
    if not all(type(n) is int and 0 <= n <= _MAX_COUNT for at in changes for n in at):
        raise _damaged(changes)
    epochs, sizes = zip(*changes, strict=True)
    is_rising = list(epochs) == sorted(set(epochs)) and list(sizes) == sorted(sizes)
    if epochs[0] != 0 or not is_rising or sizes[0] < 1:
        raise _damaged(changes)
    return int(sizes[-1])


def _damaged(changes: Any) -> StateError:
    return StateError(
        f"state has num_examples={changes!r}, not a list of [epoch, examples from it on]; pass "
        "what state_dict() gave"
    )
