"""Several datasets mixed by weight: a dataset of their examples, and the order in which they come.

Example j of a source is due when the source's share reaches its middle; sources are merged by that
number (virtual time, as in fair queueing: Demers, Keshav & Shenker 1989). So each source is always
within half of its longest example of its share, and the place of any example follows from the
lengths alone: nothing is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_choice, checked_int, checked_lengths
from torch_collate_kit._reprs import KindAndSize, call_repr
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.orders.checks import (
    MAX_COUNT,
    Indices,
    checked_length,
    damaged_state,
    is_count,
)
from torch_collate_kit.loading.orders.source_passes import SourcePasses
from torch_collate_kit.loading.orders.states import digest_in_blocks
from torch_collate_kit.packing import RankPlan

__all__ = ["MixedOrder", "Mixture"]

_STOPS = ("first_exhausted", "all_exhausted")


class Mixture:
    """Several datasets as one, with the shares in which their examples come.

    Args:
        sources: datasets, end to end: ``mixture[i]`` is an example of the first one that has so
            many. For a sampler that only needs sizes, also numbers of examples, or int arrays of
            the lengths of a source's examples.
        weights: the share of each source, positive numbers, 0 for a source that is not read. By
            default the sizes of the sources.
        by: whether these are shares of the "examples" or of the "tokens".
        schedule: ``[(step, weights), ...]``: from this step of the epoch on, these weights. Steps
            are those of the sampler. By rows, a new stage begins a new window.
        max_passes: the most passes over a source in the whole run, a number or one for each source
            (None: no limit). The others then share its weight.
        stop: an epoch ends when the "first_exhausted" source has been read once, or when all have
            been ("all_exhausted"), in the words of ``datasets.interleave_datasets``.
        names: a name for each source, for ``source_counts``. Examples then have the key "source",
            the number of their source; declare it with ``fields={"source":
            PerExample(torch.int64)}`` to have it in the batch.

    ``PrefetchingSampler`` and ``PackedBatchSampler`` accept it as their examples, and yield batches
    of its indices in its order. A source goes on from epoch to epoch, and none of its examples
    comes again before all have come.

    Raises:
        TypeError, ValueError, DataError: an argument is wrong.

    >>> from torch_collate_kit.loading import PrefetchingSampler
    >>> mixture = Mixture([100, 10], weights=[3, 1])
    >>> sampler = PrefetchingSampler(mixture, batch_size=4, shuffle=False)
    >>> [sampler.examples(0, step).tolist() for step in (0, 1)]
    [[0, 1, 100, 2], [3, 4, 101, 5]]
    """

    def __init__(
        self,
        sources: Sequence[Any],
        *,
        weights: Sequence[float | Fraction] | None = None,
        by: str = "examples",
        schedule: Sequence[tuple[int, Sequence[float | Fraction]]] | None = None,
        max_passes: float | Sequence[float | Fraction | None] | None = None,
        stop: str = "first_exhausted",
        names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(sources, (str, bytes)) or not hasattr(sources, "__len__") or not len(sources):
            raise ValueError(
                f"sources must be a sequence of at least one dataset or number of examples, "
                f"got {sources!r}"
            )
        self.sources = list(sources)
        self.sizes = [checked_length(s, f"sources[{i}]") for i, s in enumerate(self.sources)]
        self._is_named = names is not None
        self.names = _checked_names(names, len(self.sources))
        checked_choice("by", by, ("examples", "tokens"))
        checked_choice("stop", stop, _STOPS)
        self.by, self.stop = by, stop
        self._lengths = [_lengths_of(s, i, by) for i, s in enumerate(self.sources)]
        units = [int(n.sum()) for n in self._lengths] if by == "tokens" else self.sizes
        first = units if weights is None else _checked_weights("weights", weights, len(units))
        self.stages = [(0, [Fraction(w) for w in first])]
        for number, stage in enumerate(schedule or []):
            self.stages = _with_stage(self.stages, number, stage, weights is not None)
        self.max_passes = _checked_passes(max_passes, self.sizes)
        self.offsets: Indices = np.cumsum([0, *self.sizes])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __repr__(self) -> str:
        sources = [repr(s) if isinstance(s, int) else repr(KindAndSize(s)) for s in self.sources]
        shown: dict[str, Any] = {"weights": [str(weight) for weight in self.stages[0][1]]}
        shown |= {"by": self.by} if self.by != "examples" else {}
        if len(self.stages) > 1:
            shown["schedule"] = [(step, list(map(str, w))) for step, w in self.stages[1:]]
        if any(passes is not None for passes in self.max_passes):
            shown["max_passes"] = self.max_passes
        shown |= {"stop": self.stop} if self.stop != _STOPS[0] else {}
        return call_repr(self, f"[{', '.join(sources)}]", **shown)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Any) -> Any:
        """Return the examples of these indices as a list, or of a ``RankPlan`` with it."""
        if isinstance(indices, RankPlan):
            return indices.with_examples(self.__getitems__(indices.indices))
        picked = np.asarray(indices, dtype=np.int64)
        outside = (picked < 0) | (picked >= len(self))
        if outside.any():
            raise IndexError(
                f"index {picked[outside][0]} is outside the mixture, which has {len(self)} examples"
            )
        found: list[Any] = [None] * len(picked)
        sources = self.source_of(picked)
        for source in np.unique(sources).tolist():
            data, places = self.sources[source], np.flatnonzero(sources == source)
            if not hasattr(data, "__getitem__") or isinstance(data, np.ndarray):
                raise TypeError(
                    f"source {self.names[source]!r} of the mixture is {data!r:.60}, which has no "
                    "examples to read; pass the dataset itself"
                )
            for place, row in zip(
                places.tolist(), (picked[places] - self.offsets[source]).tolist(), strict=True
            ):
                found[place] = {**data[row], **({"source": source} if self._is_named else {})}
        return found

    def source_of(self, indices: Any) -> Indices:
        """Return the number of the source of each index: int64, their shape."""
        return np.searchsorted(self.offsets, np.asarray(indices), side="right") - 1

    def source_counts(self, indices: Any) -> dict[str, int]:
        """Return how many of these indices are of each source, by its name.

        >>> Mixture([100, 10], names=["web", "math"]).source_counts([0, 5, 103])
        {'web': 2, 'math': 1}
        """
        counts = np.bincount(self.source_of(indices), minlength=len(self.sizes)).tolist()
        return dict(zip(self.names, counts, strict=True))

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of every example: int64 [N]. Raises ValueError if a source has no lengths."""
        return np.concatenate(
            [_lengths_of(source, i, "tokens") for i, source in enumerate(self.sources)]
        )

    @property
    def num_loss_tokens(self) -> Indices:
        """Trained tokens of every example: int64 [N], of sources that are TokenizedDatasets."""
        return np.concatenate([of.num_loss_tokens for of in self._tokenized()])

    @property
    def patches(self) -> list[list[int]]:
        """[N] lists, patches of each image, of sources that are TokenizedDatasets."""
        return [patches for of in self._tokenized() for patches in of.patches]

    @property
    def is_tokenized(self) -> bool:
        """Whether all sources are TokenizedDatasets."""
        return all(isinstance(source, TokenizedDataset) for source in self.sources)

    def _tokenized(self) -> list[TokenizedDataset]:
        for name, source in zip(self.names, self.sources, strict=True):
            if not isinstance(source, TokenizedDataset):
                raise ValueError(f"source {name!r} is no TokenizedDataset")
        return self.sources

    def fingerprint(self, num_examples: int | None = None) -> dict[str, Any]:
        """Return the settings and the fingerprints of the sources: small JSON."""
        makers = [getattr(source, "fingerprint", None) for source in self.sources]
        lengths = self.lengths if self.by == "tokens" else None
        return {
            "lengths_digest": None if lengths is None else digest_in_blocks(lengths),
            "sizes": self.sizes,
            "by": self.by,
            "stop": self.stop,
            "stages": [[step, list(map(str, weights))] for step, weights in self.stages],
            "max_passes": [None if of is None else str(of) for of in self.max_passes],
            "sources": [make() if callable(make) else None for make in makers],
        }


class MixedOrder:
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
        shuffle: bool | str,
        lengths: Indices | None = None,
        offsets: Indices | None = None,
    ) -> None:
        self.mixture, self._piece_offsets = mixture, offsets
        self._bounds = mixture.offsets if offsets is None else offsets[mixture.offsets]
        if mixture.by == "tokens" and lengths is None:
            lengths = mixture.lengths
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
        """Return the examples at places ``start`` to ``stop`` - 1: int64."""
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
        if stop > size:
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

    def state(self, epoch: int) -> dict[str, Any]:
        """Return the examples of each source before an epoch, as JSON."""
        return {"taken": list(self._taken(epoch))}

    def loaded(self, state: Mapping[str, Any], epoch: int) -> MixedOrder:
        """Return the order with an epoch as a state has it. Raises StateError if it is damaged."""
        taken = state["taken"]
        if not isinstance(taken, list) or not all(is_count(n, MAX_COUNT) for n in taken):
            raise damaged_state(f"taken={taken!r}, not a list of counts")
        if len(taken) != len(self._sources) or (epoch == 0 and any(taken)):
            raise damaged_state(f"taken={taken!r}, of another mixture")
        other = MixedOrder.__new__(MixedOrder)
        vars(other).update(vars(self), _sizes={}, _counts=None)
        other.taken = {0: [0] * len(self._sources), epoch: list(taken)}
        other.stage_places = {}
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
                if weight and of.limit is None:
                    ends.append(of.end((n // of.size + 1) * of.size, n, weight))
        if not ends:
            left = [
                MAX_COUNT if of.limit is None else of.limit - n
                for of, n, weight in zip(self._sources, before, weights, strict=True)
                if weight
            ]
            return place + sum(left) if all(n < MAX_COUNT for n in left) else place
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


def _lengths_of(source: Any, number: int, by: str) -> Indices:
    """Return the lengths of a source's examples; none by examples."""
    if by == "examples":
        return np.zeros(0, dtype=np.int64)
    found = source if isinstance(source, np.ndarray) else getattr(source, "lengths", None)
    if found is None:
        raise ValueError(
            f"the length of every example is needed, and sources[{number}] has no lengths; pass "
            "TokenizedDataset(source), or an int array of the lengths"
        )
    try:
        return checked_lengths(found)
    except (TypeError, ValueError) as error:
        raise type(error)(f"lengths of sources[{number}]: {error}") from error


def _checked_names(names: Sequence[str] | None, num_sources: int) -> list[str]:
    if names is None:
        return [str(number) for number in range(num_sources)]
    found = list(names)
    if len(found) != num_sources or len(set(found)) != len(found):
        raise ValueError(
            f"names must be {num_sources} different strings, one for each source, got {names!r}"
        )
    return found


def _checked_weights(name: str, weights: Any, num_sources: int) -> list[Fraction]:
    """Return weights as fractions; a float means the decimal it is written as."""
    if isinstance(weights, (str, bytes)) or not hasattr(weights, "__len__"):
        raise TypeError(f"{name} must be a sequence with a number for each source, got {weights!r}")
    if len(weights) != num_sources:
        raise ValueError(
            f"{name} must have one number for each of the {num_sources} sources, got {len(weights)}"
        )
    exact = []
    for source, weight in enumerate(weights):
        try:
            exact.append(Fraction(str(weight)))
        except (ValueError, ZeroDivisionError):
            exact.append(Fraction(-1))
        if isinstance(weight, (bool, str)) or exact[-1] < 0:
            raise ValueError(
                f"{name}[{source}] must be a finite number of at least 0, got {weight!r}"
            )
    if not any(exact):
        raise ValueError(f"{name} are all 0; at least one source must be read")
    return exact


def _with_stage(
    stages: list[tuple[int, list[Fraction]]], number: int, stage: Any, has_weights: bool
) -> list[tuple[int, list[Fraction]]]:
    """Return the stages with one more of a schedule."""
    if not isinstance(stage, Sequence) or len(stage) != 2:
        raise TypeError(f"schedule[{number}] must be a pair (step, weights), got {stage!r}")
    step = checked_int(f"schedule[{number}] step", stage[0], minimum=0)
    weights = _checked_weights(f"schedule[{number}] weights", stage[1], len(stages[0][1]))
    if number == 0 and step == 0:
        if has_weights:
            raise ValueError("schedule begins at step 0, and weights= says so too; pass one")
        return [(0, weights)]
    if number == 0 and not has_weights:
        raise ValueError(
            f"schedule begins at step {step}; pass the weights before it, weights=[...], or begin "
            "it at step 0"
        )
    if step <= stages[-1][0]:
        raise ValueError(
            f"schedule[{number}] begins at step {step}, not after {stages[-1][0]}, where the stage "
            "before it begins"
        )
    return [*stages, (step, weights)]


def _checked_passes(passes: Any, sizes: list[int]) -> list[Fraction | None]:
    num_sources = len(sizes)
    given = passes if isinstance(passes, list | tuple) else [passes] * num_sources
    if len(given) != num_sources:
        raise ValueError(
            f"max_passes must be a number, or one for each of the {num_sources} sources, "
            f"got {len(given)}"
        )
    found: list[Fraction | None] = []
    for source, number in enumerate(given):
        is_number = isinstance(number, int | float | Fraction) and not isinstance(number, bool)
        if number is not None and not (is_number and 0 < number < 2**31):
            raise ValueError(
                f"max_passes of source {source} must be a number above 0, or None for no limit, "
                f"got {number!r}"
            )
        found.append(None if number is None else Fraction(str(number)))
        if number is not None and found[-1] * sizes[source] < 1:
            raise ValueError(
                f"max_passes={number} of source {source} is less than one of its {sizes[source]} "
                "examples; raise it, or give the source the weight 0"
            )
    return found
