"""The order of a shard of mixed streams in stages, and with sources that are read so many times."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

Examples = list[dict[str, Any]]


class StagedOrder:
    """What comes next in a shard, from lists of all its sources.

    ``stages`` are (batches of the shard before a stage, weights), and ``full`` the tokens of a full
    batch. A stage begins where the tokens read fill, at the mean of the batches packed so far, all
    batches before it.
    """

    def __init__(
        self,
        sources: list[Examples],
        stages: list[tuple[Fraction, list[Any]]],
        by: str,
        stop: str,
        passes: list[int | None],
        full: int,
    ) -> None:
        self.sources, self.by, self.stop, self.passes = sources, by, stop, passes
        self.stages = [(at, [Fraction(str(w)) for w in weights]) for at, weights in stages]
        self.full = full
        self.taken = [0] * len(sources)
        self.num_read = 0
        self.found: list[tuple[int, int]] = []  # source, stage
        self.has_ended = False
        self.begin(0)

    def units(self, source: int, number: int) -> int:
        examples = self.sources[source]
        ids = examples[number % len(examples)]["input_ids"]
        return len(ids) if self.by == "tokens" else 1

    def begin(self, stage: int) -> None:
        self.stage, self.weights = stage, self.stages[stage][1]
        self.done = [0] * len(self.sources)
        read = [i for i, _ in enumerate(self.sources) if any(w[i] for _, w in self.stages)]
        rest = {
            i: sum(self.units(i, n) for n in range(self.taken[i], len(self.sources[i])))
            for i in read
        }
        ends = {i: rest[i] / self.weights[i] for i in read if self.weights[i]}
        if self.stop == "all_exhausted":
            self.end = max(ends.values())
        else:
            self.end = min(ends.values()) if all(rest.values()) else Fraction(0)

    def __call__(self, num_batches: int, num_packed: int) -> dict[str, Any] | None:
        mean: Any = Fraction(num_packed, num_batches) if num_packed and num_batches else self.full
        while not self.has_ended and self.stage + 1 < len(self.stages):
            if self.num_read < self.stages[self.stage + 1][0] * mean:
                break
            self.begin(self.stage + 1)
        due = {}
        for i, weight in enumerate(self.weights):
            size, most = len(self.sources[i]), self.passes[i]
            most = 1 if self.stop == "first_exhausted" else most
            if weight and (most is None or self.taken[i] < most * size):
                due[i] = (self.done[i] + Fraction(self.units(i, self.taken[i]), 2)) / weight
        first = min(due, key=lambda i: (due[i], i), default=-1)
        if self.has_ended or first < 0 or due[first] > self.end:
            self.has_ended = True
            return None
        example = self.sources[first][self.taken[first] % len(self.sources[first])]
        self.done[first] += self.units(first, self.taken[first])
        self.taken[first] += 1
        self.num_read += len(example["input_ids"])
        self.found.append((first, self.stage))
        return example
