"""The order of a mixture by loops: every example has the time at which it is due, sorted."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tests.loading.sampler.sampler_oracle import generator


class Mixed:
    """The examples of all epochs, each (source, index in the mixture)."""

    def __init__(self, lengths, by, stop, limits=None, *, seed=0):
        self.lengths = [[int(n) if by == "tokens" else 1 for n in of] for of in lengths]
        self.stop, self.seed = stop, seed
        self.limits = limits or [None] * len(lengths)
        self.taken = [0] * len(lengths)
        self.num_epochs = 0

    def example(self, source, number):
        """The index within its source of an example taken from it, and its length."""
        turn, at = divmod(number, len(self.lengths[source]))
        index = int(generator(self.seed, source, turn).permutation(len(self.lengths[source]))[at])
        return index, self.lengths[source][index]

    def due(self, weights, end):
        """(time, source, index) of the next examples, those due by ``end``."""
        found = []
        for source, weight in enumerate(weights):
            before, number, limit = 0, self.taken[source], self.limits[source]
            while weight and (limit is None or number < limit):
                index, length = self.example(source, number)
                time = Fraction(2 * before + length) / (2 * weight)
                if time > end:
                    break
                number += 1
                found.append((time, source, index + sum(map(len, self.lengths[:source]))))
                before += length
        return sorted(found)

    def end(self, weights, at):
        """The time at which the first source, or all, have been read once more; None if now."""
        targets = {}
        for source, weight in enumerate(weights):
            size, limit = len(self.lengths[source]), self.limits[source]
            target = (self.num_epochs + 1) * size
            if limit is not None and target > limit:
                if self.stop == "first_exhausted":
                    continue
                target = limit
            if self.taken[source] < target:
                targets |= {source: target} if weight else {}
            elif self.stop == "first_exhausted":
                return None
        for source, weight in enumerate(weights if not targets and not at else []):
            size, limit = len(self.lengths[source]), self.limits[source]
            once_more = (self.taken[source] // size + 1) * size
            target = once_more if limit is None else min(once_more, limit)
            if weight and self.taken[source] < target:
                targets[source] = target
        times = [
            Fraction(sum(self.example(i, n)[1] for n in range(self.taken[i], target))) / weights[i]
            for i, target in targets.items()
        ]
        if not times:
            return None
        return min(times) if self.stop == "first_exhausted" else max(times)

    def epoch(self, stages):
        """All examples of the next epoch; ``stages`` are (units of the epoch before, weights)."""
        exact = [(at, [Fraction(str(weight)) for weight in weights]) for at, weights in stages]
        bounds = np.cumsum([0, *map(len, self.lengths)])
        found, units = [], 0
        for (_, weights), (following, _) in zip(exact, [*exact[1:], (np.inf, None)], strict=True):
            end, is_reached = self.end(weights, len(found)), False
            for _, source, index in [] if end is None else self.due(weights, end):
                if units >= following:
                    is_reached = True
                    break
                self.taken[source] += 1
                units += self.lengths[source][index - bounds[source]]
                found.append((source, index))
            if not is_reached:
                break
        self.num_epochs += 1
        return found
