"""Several datasets mixed by weight, resumable at any step.

Which source comes next is decided by a rule, not drawn at random. So every prefix of the stream has
the proportions asked for, to one example, and a rare source comes at even distances. The rule is
the P-fair schedule (worst-case fair queueing, if examples have sizes).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Sized
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_choice, checked_int, checked_lengths
from torch_collate_kit.loading.sampler.checks import Indices, checked_length, damaged_state
from torch_collate_kit.loading.sampler.epochs import EpochSampler, Plan
from torch_collate_kit.loading.sampler.mixture import Mixture, Place
from torch_collate_kit.loading.sampler.states import digest_in_blocks

__all__ = ["MixedSampler"]

_PICKS_PER_PLACE = 4096  # a place is a few ints; a state costs the picks since the last one: 5 ms


class MixedSampler(EpochSampler):
    """Batches of indices into several datasets, laid end to end, in given proportions.

    Args:
        sources: datasets, or their numbers of examples. Indices are those of a
            ``torch.utils.data.ConcatDataset`` of them. Of those that have a ``fingerprint``, as a
            TokenizedDataset has, a state is refused by other data of the same size.
        batch_size, seed, shuffle, dp_rank, dp_size: as for ``PrefetchingSampler``.
        weights: the shares, positive numbers; by default the sizes of the sources.
        by: whether these are shares of the "examples" or of the "tokens".
        lengths: by tokens, the int lengths of each source's examples; by default its ``.lengths``.
        num_steps: steps of an epoch. Otherwise an epoch lasts until one source has been read.
        stop: until the "first" (the default) or until "all" sources have been read.

    After any number of examples every source is within one example, or one longest example's
    tokens, of its share. None of its examples comes again before all have come. The stream goes on
    from epoch to epoch, so no batch is short. More in docs/loading.md.

    Raises:
        TypeError, ValueError, DataError: an argument is wrong, or an epoch would have no step.

    >>> sampler = MixedSampler([100, 10], batch_size=4, weights=[3, 1], shuffle=False, num_steps=2)
    >>> [list(sampler), list(sampler)]
    [[[0, 1, 2, 100], [3, 4, 5, 101]], [[6, 7, 8, 102], [9, 10, 11, 103]]]
    """

    def __init__(
        self,
        sources: Sequence[int | Sized],
        *,
        batch_size: int,
        weights: Sequence[float | Fraction] | None = None,
        by: str = "examples",
        lengths: Sequence[npt.ArrayLike] | None = None,
        num_steps: int | None = None,
        stop: str | None = None,
        shuffle: bool | str = True,
        seed: int = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, shuffle=shuffle, dp_rank=dp_rank, dp_size=dp_size)
        checked_choice("by", by, ("examples", "tokens"))
        sizes, arrays = _checked_sources(sources, lengths, by)
        self._by = by
        exact = _checked_weights(weights, len(sizes))
        self._mixture = Mixture(sizes, exact, arrays, seed=self._seed, shuffle=self._shuffle)
        self._lengths_digest = digest_in_blocks(np.concatenate(arrays)) if arrays else None
        self._fingerprints = [_fingerprint(source) for source in sources]
        self._known: dict[int, Place] = {}  # by the examples before them
        self._latest_place: Place | None = None  # after the batch taken last
        self._set_steps_per_epoch(num_steps, stop)

    def _set_steps_per_epoch(self, num_steps: int | None, stop: str | None) -> None:
        if num_steps is not None and stop is not None:
            raise ValueError(
                f"num_steps={num_steps!r} and stop={stop!r} both say when an epoch ends; "
                "pass only one of them"
            )
        self._steps_per_epoch, self._stop = num_steps, None
        if num_steps is not None:
            self._steps_per_epoch = checked_int("num_steps", num_steps)
            return
        checked_choice("stop", stop, (None, "first", "all"))
        self._stop = stop or "first"
        self._examples_per_epoch = self._mixture.num_examples(last=self._stop == "all")
        if self._num_steps(0) < 1:
            raise ValueError(
                f"a source ends after {float(self._examples_per_epoch):.4g} examples, fewer "
                f"than batch_size={self._num_global}, so that stop='first' leaves no step; use "
                "stop='all', num_steps=..., or a lower batch_size"
            )

    def __repr__(self) -> str:
        settings: dict[str, Any] = {"weights": self._mixture.weights}
        settings |= {"by": self._by} if self._by != "examples" else {}
        if self._steps_per_epoch is not None:
            settings["num_steps"] = self._steps_per_epoch
        settings |= {"stop": self._stop} if self._stop == "all" else {}
        return self._shown(str(self._mixture.sizes), **settings)

    @property
    def num_examples(self) -> int:
        """Examples of all sources: the length of the dataset that the indices are of."""
        return sum(self._mixture.sizes)

    def _first_step(self, epoch: int) -> int:
        """Return the first step of an epoch, counted from the start of the run."""
        if self._steps_per_epoch is not None:
            return epoch * self._steps_per_epoch
        end = epoch * self._examples_per_epoch / self._num_global
        return int(end) if self._stop == "first" else -int(-end // 1)

    def _num_steps(self, epoch: int) -> int:
        return self._first_step(epoch + 1) - self._first_step(epoch)

    def _place(self, epoch: int, step: int) -> Place:
        """Return the place before a step, from the nearest known one."""
        num_taken = (self._first_step(epoch) + step) * self._num_global
        latest = self._latest_place  # one read: another thread may be at another place
        if latest is not None and latest.num_taken == num_taken:
            return latest
        if 0 not in self._known:  # not before: by tokens it needs the orders
            self._known[0] = self._mixture.place([0] * len(self._mixture.sizes))
        known = max(known for known in list(self._known) if known <= num_taken)
        place = self._known[known]
        while place.num_taken < num_taken:
            stop = num_taken
            if self._mixture.lengths:
                stop = min(stop, place.num_taken + _PICKS_PER_PLACE)
            before, place = place, self._mixture.after(place, stop)
            self._keep(before, place)
        return place

    def _keep(self, before: Place, place: Place) -> None:
        """Record a place now and then, since states are asked for earlier steps."""
        if before.num_taken // _PICKS_PER_PLACE != place.num_taken // _PICKS_PER_PLACE:
            self._known[place.num_taken] = place

    def _plan(self, epoch: int, step: int) -> Plan:
        return partial(self._batch, epoch)

    def _batch(self, epoch: int, step: int) -> Indices:
        before = self._place(epoch, step)
        batch, after = self._mixture.take(before, self._num_global)
        self._keep(before, after)
        self._latest_place = after
        return batch

    def _steps_of(self, example: int, epoch: int) -> list[int]:
        steps = range(self._num_steps(epoch))
        first, last = self._place(epoch, 0), self._place(epoch, len(steps))
        source, numbers = self._mixture.numbers(example, first, last)

        def begun(step: int) -> int:
            return self._place(epoch, step).taken[source]

        return sorted({bisect_right(steps, number, key=begun) - 1 for number in numbers})

    def _fits(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        like, mixture = like or {}, self._mixture
        return {
            "sizes": list(mixture.sizes),
            "weights": list(map(str, mixture.shares)),
            "by": self._by,
            "num_units": list(mixture.num_units),
            "lengths_digest": self._lengths_digest,
            "fingerprints": self._known_fingerprints(like),
            "num_steps": self._steps_per_epoch,
            "stop": self._stop,
            **super()._fits(like),
        }

    def _known_fingerprints(self, like: Mapping[str, Any]) -> Any:
        """Return the digests of the sources; where either side has none, those of ``like``."""
        saved = like.get("fingerprints", self._fingerprints)
        if not isinstance(saved, list) or len(saved) != len(self._fingerprints):
            return list(self._fingerprints)
        pairs = zip(self._fingerprints, saved, strict=True)
        return [b if a is None or b is None else a for a, b in pairs]

    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        return {"taken": list(self._place(epoch, step).taken)}

    def _load_extra(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        taken, num_steps = state["taken"], self._first_step(epoch) + step
        if not isinstance(taken, list) or any(type(n) is not int or n < 0 for n in taken):
            raise damaged_state(f"taken={taken!r}, not a list of counts")
        num_sources, num_examples = len(self._mixture.sizes), num_steps * self._num_global
        if len(taken) != num_sources or sum(taken) != num_examples:
            raise damaged_state(
                f"taken={taken!r}, but after {num_steps} steps the {num_sources} sources have "
                f"given {num_examples} examples in all"
            )
        mixture, place = self._mixture, self._mixture.place(taken)
        known = self._known.get(num_examples) if mixture.lengths else self._place(epoch, step)
        is_right = place == known if known else mixture.is_fair(place)
        if not is_right:
            raise damaged_state(
                f"taken={taken!r}, which is not in the proportions of weights="
                f"{list(map(str, mixture.shares))}"
            )
        self._known = {**self._known, num_examples: place}  # not that of the sampler that loads


def _fingerprint(source: Any) -> str | None:
    """Return a digest of a dataset's fingerprint, or None without one."""
    make = getattr(source, "fingerprint", None)
    if not callable(make):
        return None
    text = json.dumps(make(len(source)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _checked_weights(weights: Sequence[Any] | None, num_sources: int) -> list[Fraction] | None:
    """Return the weights as fractions; a float means the decimal it is written as."""
    if weights is None:
        return None
    if isinstance(weights, (str, bytes)) or not hasattr(weights, "__len__"):
        raise TypeError(
            f"weights must be a sequence with a number for each source, got {weights!r}"
        )
    if len(weights) != num_sources:
        raise ValueError(
            f"weights must have one number for each of the {num_sources} sources, "
            f"got {len(weights)}"
        )
    exact = []
    for source, weight in enumerate(weights):
        try:
            exact.append(Fraction(str(weight)))
        except (ValueError, ZeroDivisionError):
            exact.append(Fraction(0))
        if isinstance(weight, (bool, str)) or exact[-1] <= 0:
            raise ValueError(
                f"weights[{source}] must be a finite number above 0, got {weight!r}; "
                "leave a source out that is not to be used"
            )
    return exact


def _checked_sources(
    sources: Sequence[Any], lengths: Sequence[Any] | None, by: str
) -> tuple[list[int], list[Indices]]:
    """Return the size of each source and, by tokens, the length of each example."""
    if isinstance(sources, (str, bytes)) or not hasattr(sources, "__len__") or not len(sources):
        raise ValueError(
            f"sources must be a sequence of at least one dataset or number of examples, "
            f"got {sources!r}"
        )
    sizes = [checked_length(source, f"sources[{i}]") for i, source in enumerate(sources)]
    if by == "examples":
        if lengths is not None:
            raise ValueError("lengths are used by='tokens' only, got lengths with by='examples'")
        return sizes, []
    if lengths is None:
        lengths = [getattr(source, "lengths", None) for source in sources]
    if len(lengths) != len(sizes):
        raise ValueError(
            f"lengths must have one entry for each of the {len(sizes)} sources, got {len(lengths)}"
        )
    arrays = []
    for source, (size, given) in enumerate(zip(sizes, lengths, strict=True)):
        if given is None:
            raise ValueError(
                f"by='tokens' needs the length of every example, and sources[{source}] has no "
                "lengths; pass lengths=[...], one sequence of ints for each source"
            )
        try:
            array = checked_lengths(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"lengths[{source}]: {error}") from error
        if len(array) != size:
            raise ValueError(
                f"lengths[{source}] must have one int for each of the {size} examples of "
                f"sources[{source}], got {len(array)}"
            )
        arrays.append(array)
    return sizes, arrays
