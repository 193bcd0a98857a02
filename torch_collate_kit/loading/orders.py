"""The order of one dataset's examples, epoch by epoch: a function of (seed, epoch) and place."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.checks import NEW_RUN, Indices, Shuffle, checked_order

_NUM_ROUNDS = 12  # even, so that both halves end where they began
_Words = npt.NDArray[np.uint64]
_BLOCK = 8192  # positions computed together: a call of a keyed permutation costs 80 us

K = TypeVar("K")
V = TypeVar("V")
UserOrder: TypeAlias = Callable[[int, np.random.Generator], npt.ArrayLike]


class Recent(Generic[K, V]):
    """The values of the ``number`` keys that were asked for last.

    They are read and replaced as a whole, since several threads may ask for different keys: each
    finds or makes its own value.
    """

    def __init__(self, number: int) -> None:
        self._number, self._values = number, dict[K, V]()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made if it is not held."""
        held = self._values
        if key in held:
            return held[key]
        value = make()
        others = list(self._values.items())[-self._number + 1 :] if self._number > 1 else []
        self._values = {**dict(others), key: value}
        return value


class Order(ABC):
    """The examples of all epochs in order; immutable but for what it keeps to be fast.

    Places count from the start of an epoch: below 0 are the last ones of epochs before it, and
    those from its size on are the first ones of the next. ``settings`` are those that a resumed
    run must share.
    """

    _offsets: Indices | None
    """int64 [examples + 1], where the pieces of each begin, if what is ordered are pieces."""

    is_permutation = False
    """Whether an epoch has each of the first ``size`` examples once."""

    def __init__(
        self, num_examples: int, seed: int, shuffle: Shuffle, user: UserOrder | None = None
    ) -> None:
        self.num_examples, self.user = num_examples, user
        self._seed, self._shuffle = seed, shuffle
        self.settings = {"custom_order": user is not None, "seed": seed, "shuffle": shuffle}

    @abstractmethod
    def size(self, epoch: int) -> int:
        """Return the number of examples of an epoch."""

    @abstractmethod
    def _epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""

    def before(self, epoch: int) -> int:
        """Return the number of examples of all epochs before one."""
        return sum(map(self.size, range(epoch)))

    def take(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the examples at places ``start`` to ``stop`` - 1: int64."""
        while start < 0 < epoch:
            epoch -= 1
            start, stop = start + self.size(epoch), stop + self.size(epoch)
        parts, start = [np.zeros(0, dtype=np.int64)], max(start, 0)
        while start < stop and (size := self.size(epoch)):  # none: a mixture has ended
            if start < size:
                parts.append(self._epoch(epoch).take(start, min(stop, size)))
            epoch, start, stop = epoch + 1, max(start - size, 0), stop - size
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def places(self, epoch: int, example: int) -> list[int]:
        """Return the places of an example in an epoch, ascending."""
        order, pieces = self._epoch(epoch), range(example, example + 1)
        if self._offsets is not None:
            pieces = range(*self._offsets[example : example + 2].tolist())
        return sorted(place for piece in pieces for place in order.places(piece))

    def check_size(self, state: Mapping[str, Any]) -> None:
        """Check the number of examples of a state. Raises StateError if the data have another."""
        was, now = state.get("num_examples", self.num_examples), self.num_examples
        if was == now:
            return
        hint = "examples were taken away; " + NEW_RUN
        if was < now:
            following = state["epoch"] + (state["step"] > 0)
            hint = (
                "another number has another order: to go on with more data, leave the state out "
                f"and call set_epoch({following}), the next epoch, which has them all"
            )
        raise StateError(f"state is of {was} examples, the data has {now}; {hint}")


class ShuffledOrder(Order):
    """One dataset, shuffled in each epoch, in sequence, or in the user's order.

    ``reshuffles`` are (epoch, step, place): from this place on the epoch is in a new order. With
    ``offsets``, int64 [examples + 1], what is ordered are the pieces ``offsets[i]:offsets[i + 1]``
    of example i.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        seed: int,
        shuffle: Shuffle,
        user: UserOrder | None = None,
        offsets: Indices | None = None,
    ) -> None:
        super().__init__(num_examples, seed, shuffle, user)
        self._offsets = offsets
        self.reshuffles: tuple[tuple[int, int, int], ...] = ()
        self.is_permutation = user is None
        self._sizes: dict[int, int] = {}  # of the user's epochs
        self._epochs = Recent[int, EpochOrder](2)

    def _with(self, reshuffles: tuple[tuple[int, int, int], ...]) -> ShuffledOrder:
        """Return a copy with other reshuffles."""
        other = copy.copy(self)
        other.reshuffles, other._epochs = reshuffles, Recent(2)
        return other

    def reshuffled(self, epoch: int, step: int, place: int) -> ShuffledOrder:
        """Return the order with the rest of an epoch, from a place on, in a new order."""
        made = self.without_later(epoch, step).reshuffles
        return self._with((*made, (epoch, step, place)))

    def without_later(self, epoch: int, step: int) -> ShuffledOrder:
        """Return the order without the reshuffles made after a position."""
        if not self.reshuffles:
            return self  # as nearly always
        kept = tuple(made for made in self.reshuffles if made[:2] <= (epoch, step))
        return self if kept == self.reshuffles else self._with(kept)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the number of examples, and the reshuffles until a position."""
        made = [list(reshuffle) for reshuffle in self.without_later(epoch, step).reshuffles]
        return {"num_examples": self.num_examples, "reshuffles": made}

    def loaded(self, state: Mapping[str, Any]) -> ShuffledOrder:
        """Return the order of a state that fits."""
        return self._with(tuple(tuple(made) for made in state["reshuffles"]))

    def check_epoch(self, epoch: int) -> None:
        """Check that an epoch has examples: a user's function is called, unless it was before."""
        self._epoch(epoch)

    def size(self, epoch: int) -> int:
        """Return the number of examples of an epoch."""
        if self.user is None:
            return self.num_examples if self._offsets is None else int(self._offsets[-1])
        if epoch not in self._sizes:
            self._sizes[epoch] = len(self._users(epoch))
        return self._sizes[epoch]

    def before(self, epoch: int) -> int:
        """Return the number of examples of all epochs before one."""
        if self.user is None and self._offsets is None:
            return self.num_examples * epoch
        return super().before(epoch)

    def _users(self, epoch: int) -> Indices:
        """Return an epoch in the user's order, checked."""
        assert self.user is not None
        found = self.user(epoch, seeded_generator(self._seed, epoch))
        examples = checked_order(found, epoch, self.num_examples)
        if self._offsets is None:
            return examples
        counts = np.diff(self._offsets)[examples]
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self._offsets[examples], counts) + np.arange(len(first)) - first

    def _epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch after its reshuffles."""
        return self._epochs.get(epoch, partial(self._made, epoch))

    def _made(self, epoch: int) -> EpochOrder:
        done = [place for reshuffled, _, place in self.reshuffles if reshuffled == epoch]
        words = self._seed, epoch
        if self.user is not None:
            return ArrayOrder(self._users(epoch), words, reshuffled_after=done)
        return epoch_order(self.size(epoch), self._shuffle, words, reshuffled_after=done)


# ---- one epoch ----


class ArrayOrder:
    """An order held in memory, 8 bytes per example.

    A reshuffle after ``num_done`` examples puts those that come later in a new order.
    """

    def __init__(
        self, indices: Indices, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
    ) -> None:
        # from 1: a SeedSequence drops trailing zeros
        for count, num_done in enumerate(reshuffled_after, start=1):
            rest = seeded_generator(*words, count).permutation(indices[num_done:])
            indices = np.concatenate([indices[:num_done], rest])
        self._indices = indices

    def take(self, start: int, stop: int) -> Indices:
        """Return the indices at positions ``start`` to ``stop`` - 1, or to the end: int64."""
        return self._indices[start:stop]

    def places(self, index: int) -> list[int]:
        """Return the positions of an index, ascending."""
        found: list[int] = np.flatnonzero(self._indices == index).tolist()
        return found


class KeyedOrder:
    """An order in O(1) memory, see ``KeyedPermutation``; otherwise as ``ArrayOrder``."""

    def __init__(
        self, size: int, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
    ) -> None:
        self._size = size
        self._permutations = [(0, KeyedPermutation(size, *words))]
        for count, num_done in enumerate(reshuffled_after, start=1):
            if num_done < size:
                rest = KeyedPermutation(size - num_done, *words, count)
                self._permutations.append((num_done, rest))
        self._block = 0, np.zeros(0, dtype=np.int64)  # its first position, and its indices

    def take(self, start: int, stop: int) -> Indices:
        """Return the indices at positions ``start`` to ``stop`` - 1, or to the end: int64."""
        stop = min(stop, self._size)
        first, block = self._block  # read and replaced as a whole, as ``Recent`` is
        if not first <= start <= stop <= first + len(block):
            kept = block[start - first :] if first <= start else block[:0]
            first = start if len(kept) else start // _BLOCK * _BLOCK
            done = first + len(kept)  # read on, so that no position of a scan is computed twice
            rest = self._at(np.arange(done, min(self._size, max(stop, done + _BLOCK))))
            block = np.concatenate([kept, rest])
            self._block = first, block
        return block[start - first : stop - first]

    def _at(self, positions: Indices) -> Indices:
        for num_done, permutation in reversed(self._permutations):
            moved = positions >= num_done
            positions[moved] = num_done + permutation(positions[moved] - num_done)
        return positions

    def places(self, index: int) -> list[int]:
        """Return the positions of an index, ascending."""
        if index >= self._size:
            return []
        place = np.array([index])
        for num_done, permutation in self._permutations:
            if place[0] >= num_done:
                place = num_done + permutation.inverse(place - num_done)
        return [int(place[0])]


EpochOrder: TypeAlias = ArrayOrder | KeyedOrder


def seeded_generator(*words: int) -> np.random.Generator:
    """Return a generator seeded by (seed, epoch, ...)."""
    return np.random.default_rng(np.random.SeedSequence(words))


def epoch_order(
    size: int, shuffle: Shuffle, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
) -> EpochOrder:
    """Return the order of indices 0 to ``size`` - 1, shuffled by the words or in sequence."""
    if shuffle == "keyed":
        return KeyedOrder(size, words, reshuffled_after=reshuffled_after)
    order = seeded_generator(*words).permutation(size) if shuffle else np.arange(size)
    return ArrayOrder(order, words, reshuffled_after=reshuffled_after)


class KeyedPermutation:
    """A permutation of ``range(size)`` in O(1) memory, chosen by ints such as (seed, epoch).

    A Feistel network (Luby & Rackoff 1988) over the next power of two; where it leaves the range it
    is applied again ("cycle walking", Black & Rogaway 2002). Its round function is the finalizer of
    SplitMix64 (Steele, Lea & Flood 2014). About 0.2 us per index, in calls of thousands.
    """

    def __init__(self, size: int, *words: int) -> None:
        self._size = size
        num_bits = max(2, (size - 1).bit_length())
        self._num_low = np.uint64(num_bits // 2)
        halves = num_bits - num_bits // 2, num_bits // 2
        self._masks = [np.uint64((1 << bits) - 1) for bits in halves]  # high, low
        keys = np.random.SeedSequence(words).generate_state(_NUM_ROUNDS, np.uint64)
        # one mask for each key: the halves, which may differ by a bit, change places every round
        self._rounds = [(key, self._masks[i % 2]) for i, key in enumerate(keys)]

    def __call__(self, positions: Indices) -> Indices:
        """Return the indices at these positions of the order: int64 of their shape."""
        return self._walked(positions, backward=False)

    def inverse(self, indices: Indices) -> Indices:
        """Return the positions of these indices: int64 of their shape."""
        return self._walked(indices, backward=True)

    def _walked(self, values: Indices, *, backward: bool) -> Indices:
        found = self._network(values.astype(np.uint64), backward)
        while (outside := np.flatnonzero(found >= self._size)).size:
            found[outside] = self._network(found[outside], backward)
        return found.astype(np.int64)

    def _network(self, values: _Words, backward: bool) -> _Words:
        """Apply all rounds, in reverse order if backward."""
        high, low = values >> self._num_low, values & self._masks[1]
        changed, other = (low, high) if backward else (high, low)
        for key, mask in reversed(self._rounds) if backward else self._rounds:
            changed, other = other, changed ^ (_mixed(other ^ key) & mask)
        high, low = (other, changed) if backward else (changed, other)
        return (high << self._num_low) | low


def _mixed(words: _Words) -> _Words:
    """Apply the finalizer of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
