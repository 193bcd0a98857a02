"""The order of a mixture: which example of which source comes next.

Example j of a source is due when the source's share reaches its middle; sources are merged by that
number (virtual time, as in fair queueing: Demers, Keshav & Shenker 1989). So each source is always
within half of its longest example of its share, and the place of any example follows from the
lengths alone: nothing is replayed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sized
from itertools import pairwise
from typing import Any

import numpy as np

from torch_collate_kit.loading.orders.checks import (
    MAX_COUNT,
    Indices,
    Shuffle,
    checked_length,
    checked_shuffle,
    checked_word,
)
from torch_collate_kit.loading.orders.mixture import Mixture
from torch_collate_kit.loading.orders.order import Order, ShuffledOrder, UserOrder
from torch_collate_kit.loading.orders.source_passes import SourcePasses


class MixedOrder(Order):
    """The order of a mixture: an ``Order``.

    With ``offsets``, int64 [examples + 1], what is ordered are the pieces ``offsets[i]:offsets[i +
    1]`` of example i, and ``lengths`` are theirs. ``taken`` of an epoch are the examples of each
    source before it, and ``stage_places`` the places in it where its later stages begin, as far as
    they are known: a budget adds them.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seed: int,
        shuffle: Shuffle,
        lengths: Indices | None = None,
        offsets: Indices | None = None,
    ) -> None:
        super().__init__(seed, shuffle)
        self.mixture, self._piece_offsets = mixture, offsets
        self._bounds = mixture.offsets if offsets is None else offsets[mixture.offsets]
        if mixture.by == "tokens" and lengths is None:
            lengths = mixture.num_tokens
        self._sources = [
            SourcePasses(
                stop - start,
                None if lengths is None or mixture.by == "examples" else lengths[start:stop],
                limit=None if passes is None else int(passes * (stop - start)),
                words=(seed, source),
                shuffle=shuffle,
            )
            for source, ((start, stop), passes) in enumerate(
                zip(pairwise(self._bounds.tolist()), mixture.max_passes, strict=True)
            )
        ]
        self.taken: dict[int, list[int]] = {0: [0] * len(self._sources)}
        self.stage_places: dict[int, list[int]] = {}
        self._sizes: dict[tuple[int, int], int] = {}
        self._counts: tuple[tuple[int, int, int], list[int]] | None = None

    @property
    def num_examples(self) -> int:
        """Number of examples of all sources."""
        return len(self.mixture)

    @property
    def is_permutation(self) -> bool:
        """Whether an epoch has each example once: not known."""
        return False

    def apart(self) -> MixedOrder:
        """Return a copy that another thread may read."""
        other = copy.copy(self)
        other._sources = list(map(copy.copy, self._sources))
        other.taken, other._sizes = dict(self.taken), dict(self._sizes)
        known = list(self.stage_places.items())  # at once: another thread may add an epoch
        other.stage_places = {of: list(places) for of, places in known}
        return other

    @property
    def breaks(self) -> list[int]:
        """Steps of an epoch at which a later stage begins."""
        return [step for step, _ in self.mixture.stages[1:]]

    def size(self, epoch: int) -> int:
        """Return the number of examples of an epoch, if no other stage begins in it.

        0 once all sources have been read ``max_passes`` times.
        """
        num_stages = 1 + len(self.stage_places.get(epoch, []))
        if (epoch, num_stages) not in self._sizes:
            self._sizes[epoch, num_stages] = self._end(epoch, num_stages - 1)
        return self._sizes[epoch, num_stages]

    def before(self, epoch: int) -> int:
        """Return the number of examples of all epochs before one."""
        return sum(map(self.size, range(epoch)))

    def begin_stage(self, epoch: int, place: int) -> None:
        """Let the next stage of an epoch begin at a place; later epochs follow from it."""
        self.stage_places.setdefault(epoch, []).append(place)
        self.taken = {at: taken for at, taken in self.taken.items() if at <= epoch}
        self._sizes = {key: size for key, size in self._sizes.items() if key[0] <= epoch}
        self._counts = None

    def take(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the examples at places ``start`` to ``stop`` - 1: int64; fewer where all end."""
        parts = [np.zeros(0, dtype=np.int64)]
        if start < 0 < epoch:
            size = self.size(epoch - 1)
            parts.append(self.take(epoch - 1, size + start, size + min(stop, 0)))
        start, size = max(start, 0), self.size(epoch)
        bounds = [0, *self.stage_places.get(epoch, []), size]
        for stage, (first, last) in enumerate(pairwise(bounds)):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                parts.append(self._merged(epoch, stage, begin, end))
        if stop > size and self.size(epoch + 1):
            parts.append(self.take(epoch + 1, max(start - size, 0), stop - size))
        return np.concatenate(parts)

    def places(self, epoch: int, example: int) -> list[int]:
        """Return the places of an example in an epoch, ascending."""
        source = int(self.mixture.source_of(example))
        size = self.size(epoch)
        begin, end = self._taken(epoch)[source], self._counts_at(epoch, size)[source]
        pieces = range(example, example + 1)
        if self._piece_offsets is not None:
            pieces = range(*self._piece_offsets[example : example + 2].tolist())
        return sorted(
            self._place(epoch, source, number)
            for piece in pieces
            for number in self._sources[source].numbers(
                piece - int(self._bounds[source]), begin, end
            )
        )

    def left(self, epoch: int, place: int) -> dict[int, int]:
        """Return how many examples of each source with ``max_passes`` are left after a place."""
        counts = zip(self._sources, self._counts_at(epoch, place), strict=True)
        return {i: of.limit - n for i, (of, n) in enumerate(counts) if of.limit is not None}

    def fix(self, epoch: int) -> None:
        """Raise ValueError if no example is left for an epoch."""
        if not self.size(epoch):
            raise ValueError(
                f"epoch {epoch} of the mixture has no example left: all sources have been read "
                "max_passes times"
            )

    def reshuffled(self, epoch: int, step: int, place: int) -> MixedOrder:
        """Raise ValueError: the order follows from the weights."""
        raise ValueError("a Mixture cannot be reshuffled: its order follows from its weights")

    def until(self, epoch: int, step: int) -> MixedOrder:
        """Return the order as it is, since it has no reshuffles."""
        return self

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the examples taken of each source before an epoch."""
        return {"taken": list(self._taken(epoch))}

    def loaded(self, state: Mapping[str, Any]) -> MixedOrder:
        """Return the order with an epoch as a state has it."""
        epoch, taken = state["epoch"], state["taken"]
        other = self.apart()
        other.taken = {0: [0] * len(self._sources), epoch: list(taken)}
        other.stage_places, other._sizes, other._counts = {}, {}, None
        return other

    def _taken(self, epoch: int) -> list[int]:
        if epoch not in self.taken:
            first = max(known for known in self.taken if known <= epoch)
            for at in range(first, epoch):
                self.taken[at + 1] = self._counts_at(at, self.size(at))
        return self.taken[epoch]

    def _stage(self, epoch: int, number: int) -> tuple[int, list[int], list[float]]:
        """Return a stage's place, the examples taken before it, and twice its weights."""
        exact = self.mixture.stages[number][1]
        scale = 2 * math.lcm(*(weight.denominator for weight in exact))  # equal times stay equal
        weights = [float(weight * scale) for weight in exact]
        place = [0, *self.stage_places.get(epoch, [])][number]
        before = self._taken(epoch) if number == 0 else self._counts_in(epoch, number - 1, place)
        return place, before, weights

    def _counts_at(self, epoch: int, place: int) -> list[int]:
        """Return the examples of each source taken before a place."""
        starts = self.stage_places.get(epoch, [])
        stage = int(np.searchsorted(starts, place, side="left"))
        return self._counts_in(epoch, stage, place)

    def _counts_in(self, epoch: int, number: int, place: int) -> list[int]:
        """Return the examples taken before a place that the stage reaches."""
        key = epoch, number, place
        kept = self._counts  # one read: another thread may be at another place
        if kept is not None and kept[0] == key:
            return kept[1]
        start, before, weights = self._stage(epoch, number)
        wanted = place - start
        if not wanted:
            return before
        low, num_low, high = 0.0, 0, self._duration(wanted, weights)
        while (num_high := sum(self._until(high, before, weights)) - sum(before)) < wanted:
            low, num_low, high = high, num_high, 2 * high
            if high > 1e300:
                raise ValueError("the mixture has no more examples")
        is_halved = False  # interpolated and halved in turn
        while (middle := (low + high) / 2) not in (low, high):
            if not is_halved and num_low < wanted < num_high:
                share = (wanted - num_low) / (num_high - num_low)
                middle = min(max(low + (high - low) * share, low), high)
            is_halved = not is_halved
            counts = self._until(middle, before, weights)
            found = sum(counts) - sum(before)
            if found == wanted:
                break
            if found < wanted:
                low, num_low = middle, found
            else:
                high, num_high = middle, found
        else:  # several are due at once: the first sources come first
            counts = self._until(low, before, weights)
            for source, most in enumerate(self._until(high, before, weights)):
                rest = wanted - (sum(counts) - sum(before))
                counts[source] += min(rest, most - counts[source])
        self._counts = key, counts
        return counts

    def _duration(self, num_examples: int, weights: list[float]) -> float:
        """Return about the virtual time that so many examples take, with some to spare."""
        rates = [
            weight / 2 / source.mean_units
            for source, weight in zip(self._sources, weights, strict=True)
        ]
        return 1.05 * (num_examples + 1) / sum(rates)

    def _until(self, time: float, before: list[int], weights: list[float]) -> list[int]:
        """Return the examples of each source that are due by a virtual time of the stage."""
        return [
            source.until(time, first, weight) if weight else first
            for source, first, weight in zip(self._sources, before, weights, strict=True)
        ]

    def _merged(self, epoch: int, number: int, begin: int, end: int) -> Indices:
        """Return the examples at places ``begin`` to ``end`` - 1 of one stage."""
        _, before, weights = self._stage(epoch, number)
        starts = self._counts_in(epoch, number, begin)
        stops = self._counts_in(epoch, number, end)
        examples, dues = [], []
        for i, source in enumerate(self._sources):
            if starts[i] < stops[i]:
                examples.append(self._bounds[i] + source.read(starts[i], stops[i]))
                dues.append(source.due(starts[i], stops[i], before[i], weights[i]))
        order = np.argsort(np.concatenate(dues), kind="stable")
        merged: Indices = np.concatenate(examples)[order]
        return merged

    def _end(self, epoch: int, number: int) -> int:
        """Return the size of an epoch whose last stage is ``number``."""
        place, before, weights = self._stage(epoch, number)
        ends = []
        for i, source in enumerate(self._sources):
            target = (epoch + 1) * source.size
            if source.limit is not None and target > source.limit:
                target = source.limit if self.mixture.stop == "all_exhausted" else MAX_COUNT
            if weights[i] and before[i] < target < MAX_COUNT:
                ends.append(source.end(target, before[i], weights[i]))
            elif before[i] >= target and self.mixture.stop == "first_exhausted":
                return place
        if not ends and not place:  # the rest was read oftener than epochs count: one more pass
            for of, n, weight in zip(self._sources, before, weights, strict=True):
                limit = MAX_COUNT if of.limit is None else of.limit
                if weight and n < limit:
                    ends.append(of.end(min((n // of.size + 1) * of.size, limit), n, weight))
        if not ends:
            return place
        pick = min if self.mixture.stop == "first_exhausted" else max
        return place + sum(self._until(pick(ends), before, weights)) - sum(before)

    def _place(self, epoch: int, source: int, number: int) -> int:
        """Return the place of the ``number``-th example of a source."""
        places = [0, *self.stage_places.get(epoch, []), self.size(epoch)]
        for stage, (low, high) in enumerate(pairwise(places)):
            if self._counts_in(epoch, stage, high)[source] > number:
                while high - low > 1:
                    middle = (low + high) // 2
                    if self._counts_in(epoch, stage, middle)[source] > number:
                        high = middle
                    else:
                        low = middle
                return low
        raise AssertionError("the example is not in this epoch")


def order_of(
    examples: int | Sized | Mixture,
    *,
    seed: int,
    shuffle: Shuffle,
    user: UserOrder | None,
    lengths: Indices | None = None,
    offsets: Indices | None = None,
) -> Order:
    """Return the order of a dataset or a Mixture, its arguments checked."""
    seed, shuffle = checked_word("seed", seed), checked_shuffle(shuffle)
    if user is not None and not callable(user):
        raise TypeError(f"order must be a function of (epoch, rng), got {user!r}")
    if not isinstance(examples, Mixture):
        number = checked_length(examples)
        return ShuffledOrder(number, seed=seed, shuffle=shuffle, user=user, offsets=offsets)
    if user is not None:
        raise ValueError("a Mixture has an order of its own; leave out order=")
    return MixedOrder(examples, seed=seed, shuffle=shuffle, lengths=lengths, offsets=offsets)
