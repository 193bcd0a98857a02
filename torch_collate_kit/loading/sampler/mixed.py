"""Several datasets mixed by weight, resumable at any step.

Which source comes next is decided by a rule, not drawn at random. So every prefix of the stream has
the proportions asked for, to one example, and a rare source comes at even distances. The rule is
the P-fair schedule (worst-case fair queueing, if examples have sizes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.arguments import Indices, digest_of, rank_slice
from torch_collate_kit.loading.sampler.epochs import EpochSampler, Plan
from torch_collate_kit.loading.sampler.fair_schedule import (
    Cursor,
    Mark,
    Mixture,
    checked_sources,
)

__all__ = ["MixedSampler"]

_PICKS_PER_MARK = 4096  # a mark is a few ints; a state costs the picks since the last one: 5 ms


class MixedSampler(EpochSampler):
    """Batches of indices into several datasets, laid end to end, in given proportions.

    Args:
        sources: datasets, or their numbers of examples. Indices are those of a
            ``torch.utils.data.ConcatDataset`` of them.
        batch_size, seed, shuffle, rank, world_size: as for ``PrefetchingSampler``.
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
        batch_size: int,
        *,
        weights: Sequence[float | Fraction] | None = None,
        by: str = "examples",
        lengths: Sequence[npt.ArrayLike] | None = None,
        num_steps: int | None = None,
        stop: str | None = None,
        shuffle: bool | str = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size)
        checked_choice("by", by, ("examples", "tokens"))
        sizes, arrays = checked_sources(sources, lengths, by)
        self._by = by
        self._mixture = Mixture(sizes, weights, arrays, seed=self._seed, shuffle=self._shuffle)
        self._lengths_digest = digest_of(arrays) if arrays else None
        nothing = (0,) * len(sizes)
        self._marks = {0: Mark(nothing, nothing)}  # by the steps before them
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
        self._num_examples = self._mixture.num_examples(last=self._stop == "all")
        if self._num_steps(0) < 1:
            raise ValueError(
                f"a source ends after {float(self._num_examples):.4g} examples, fewer "
                f"than batch_size={self._num_global}, so that stop='first' leaves no step; use "
                "stop='all', num_steps=..., or a lower batch_size"
            )

    def __repr__(self) -> str:
        settings: dict[str, Any] = {"weights": self._mixture.weights}
        settings |= {"by": self._by} if self._by != "examples" else {}
        if self._steps_per_epoch is not None:
            settings["num_steps"] = self._steps_per_epoch
        settings |= {"stop": self._stop} if self._stop == "all" else {}
        return self._shown(str(self._mixture.sizes), **settings, **self._rank_settings())

    @property
    def num_examples(self) -> int:
        """Examples of all sources: the length of the dataset that the indices are of."""
        return sum(self._mixture.sizes)

    def _first_step(self, epoch: int) -> int:
        """Where an epoch starts, in steps of the whole stream."""
        if self._steps_per_epoch is not None:
            return epoch * self._steps_per_epoch
        end = epoch * self._num_examples / self._num_global
        return int(end) if self._stop == "first" else -int(-end // 1)

    def _num_steps(self, epoch: int) -> int:
        return self._first_step(epoch + 1) - self._first_step(epoch)

    def _cursor(self, step: int) -> Cursor:
        """The place in the stream after ``step`` steps, from the nearest mark before it."""
        first = max(marked for marked in self._marks if marked <= step)
        cursor = Cursor(self._mixture, self._marks[first])
        for done in range(first, step):
            self._keep_mark(cursor, done)
            cursor.picks(self._num_global)
        return cursor

    def _keep_mark(self, cursor: Cursor, step: int) -> None:
        """Keeps a mark now and then, since states are asked for steps before the iterator."""
        if step % max(1, _PICKS_PER_MARK // self._num_global) == 0:
            self._marks[step] = cursor.mark()

    def _batches(self, steps: range) -> Iterator[list[int]]:
        """This rank's part of the batches at these steps of the stream."""
        cursor, index = self._cursor(steps.start), self._mixture.index
        mine = rank_slice(self._num_global, self._rank, self._world_size)
        for step in steps:
            self._keep_mark(cursor, step)
            yield [index(*pick) for pick in cursor.picks(self._num_global)[mine]]

    def _plan(self, epoch: int, step: int) -> Plan:
        first = self._first_step(epoch)
        return partial(self._batches, range(first + step, self._first_step(epoch + 1)))

    def _examples(self, epoch: int, step: int) -> Indices:
        cursor, index = self._cursor(self._first_step(epoch) + step), self._mixture.index
        return np.array([index(*pick) for pick in cursor.picks(self._num_global)])

    def _steps_of(self, example: int, epoch: int) -> list[int]:
        source, within = self._mixture.source_of(example)
        first, found = self._first_step(epoch), []
        cursor = self._cursor(first)
        for step in range(self._num_steps(epoch)):
            self._keep_mark(cursor, first + step)
            numbers = [number for of, number in cursor.picks(self._num_global) if of == source]
            if numbers and self._mixture.has(source, within, numbers[0], numbers[-1]):
                found.append(step)
        return found

    def _fits(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {
            "sizes": list(self._mixture.sizes),
            "weights": list(map(str, self._mixture.shares)),
            "by": self._by,
            "num_units": list(self._mixture.num_units),
            "lengths_digest": self._lengths_digest,
            "num_steps": self._steps_per_epoch,
            "stop": self._stop,
            **super()._fits(like),
        }

    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        step += self._first_step(epoch)
        return {"taken": list(self._cursor(step).mark().taken)}

    def _load_extra(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        taken, step = state["taken"], step + self._first_step(epoch)
        if not isinstance(taken, list) or any(type(n) is not int or n < 0 for n in taken):
            raise StateError(
                f"state has taken={taken!r}, not a list of counts; pass what state_dict() gave"
            )
        num_sources, num_examples = len(self._mixture.sizes), step * self._num_global
        if len(taken) != num_sources or sum(taken) != num_examples:
            raise StateError(
                f"state has taken={taken!r}, but after {step} steps the {num_sources} sources have "
                f"given {num_examples} examples in all; pass what state_dict() gave"
            )
        used = self._mixture.used(taken)
        if not self._mixture.is_fair(used):
            raise StateError(
                f"state has taken={taken!r}, which is not in the proportions of weights="
                f"{list(map(str, self._mixture.shares))}; pass what state_dict() gave"
            )
        self._marks.setdefault(step, Mark(tuple(taken), used))
