"""Several streams mixed by weight, in every shard by the same rule as a ``Mixture`` of datasets.

An entry is due when the share of its source reaches its middle, and the source whose next entry is
due first has the next turn. So each source is within half of its longest example of its share in
every shard, and a place is that of each source and how much was read of it: nothing is drawn.
With a schedule the count of what was read begins anew in each stage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from torch_collate_kit.loading.orders.mixture import Mixture
from torch_collate_kit.loading.skipping import SkipPolicy
from torch_collate_kit.loading.streaming.entries import ENTRY, place_after
from torch_collate_kit.loading.streaming.mixed_source import MixedSource
from torch_collate_kit.loading.streaming.outside_streams import node_of
from torch_collate_kit.loading.streaming.readers import Reader, reader_of
from torch_collate_kit.loading.streaming.shards import Part, Stream
from torch_collate_kit.loading.streaming.shuffled_blocks import ShuffledReader
from torch_collate_kit.loading.streaming.skipping import WrongExamples
from torch_collate_kit.loading.streaming.stages import ShardStages
from torch_collate_kit.loading.streaming.states import Place

_logger = logging.getLogger("torch_collate_kit.loading")


class MixedStream:
    """A ``Mixture`` as a stream: a ``Stream`` for each source that has a weight."""

    def __init__(self, mixture: Mixture, *args: Any, batch_rows: int, **options: Any) -> None:
        _check_mixture(mixture)
        self.source = mixture
        self.streams = {
            number: Stream(source, *args, **options)
            for number, source in enumerate(mixture.sources)
            if any(weights[number] for _, weights in mixture.stages)
        }
        for number, stream in self.streams.items():
            is_asked = mixture._is_named and "source" in stream.collator.fields
            stream.added = {"source": mixture.names[number]} if is_asked else {}
        self.periods = [_periods(weights) for _, weights in mixture.stages]
        # rows over all ranks before each later stage
        self.stage_rows = [step * batch_rows for step, _ in mixture.stages[1:]]
        self.reported: set[tuple[int, int | None]] = set()  # sources and passes
        first = next(iter(self.streams.values()))
        self.collate, self.collator, self.seed = first.collate, first.collator, first.seed
        self.node, self.presharded, self.num_shards = first.node, first.presharded, first.num_shards
        self.shards = first.shards

    @property
    def epoch(self) -> None:
        """None: the epochs of the sources are in the fingerprint."""
        return None

    def stages(self) -> list[list[Any]]:
        """Return the rows of the pass, over all ranks, before each later stage, and its weights."""
        weights = [list(map(str, weights)) for _, weights in self.source.stages[1:]]
        return [[rows, *of] for rows, of in zip(self.stage_rows, weights, strict=True)]

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the mixture and the fingerprints of its sources."""
        mixture = self.source
        found: dict[str, Any] = {
            "mixture": {
                "weights": list(map(str, mixture.stages[0][1])),
                "by": mixture.by,
                "stop": mixture.stop,
                "names": mixture.names,
                "max_passes": [None if of is None else int(of) for of in mixture.max_passes],
            }
        }
        for number, stream in self.streams.items():
            of_source = {"epoch": stream.epoch, **(stream.fingerprint() or {})}
            found[f"source {mixture.names[number]!r}"] = of_source
        return found


class _MixedReader:
    """Reads entries of several sources, each when it is due, in stages if there are several."""

    def __init__(
        self,
        stream: MixedStream,
        sources: list[MixedSource],
        stages: ShardStages,
        place: Place,
        epoch: int | None,
    ) -> None:
        self._stream, self._sources, self._place = stream, sources, place
        self._stages, self._epoch = stages, epoch
        for source in sources:
            source.period = stream.periods[stages.number].get(source.number, 0)
        self._states = [source.state() for source in sources]

    @property
    def place(self) -> Place:
        """The place after all that was read."""
        return self._place

    def read(self, num_entries: int) -> np.ndarray:
        """Return the next entries, ENTRY [num_entries]; fewer only at the end of the mixture."""
        parts, numbers, states = [np.empty(0, dtype=ENTRY)], list[int](), list[Any]()
        has_stages = len(self._stream.periods) > 1
        while len(numbers) < num_entries and (source := self._next()) is not None:
            parts.append(source.given())
            numbers.append(source.number)
            # a source that has begun another pass stays described as it was until it is read
            self._states = list(self._states)
            self._states[self._sources.index(source)] = source.state()
            self._stages.read(int(parts[-1]["num_tokens"][0]))
            states.append([*self._states, self._stages.state()] if has_stages else self._states)
        entries, num_read = np.concatenate(parts), self._place.num_read
        entries["of"], entries["next_start"], entries["taken"] = numbers, 0, 0
        entries["num_read"] = num_read + 1 + np.arange(len(entries))
        for column, i in ((entries["source"], i) for i in range(len(entries))):
            column[i] = states[i]  # one by one: a list of lists would be taken for an array
        if len(entries):
            self._place = place_after(entries[-1])
        return entries

    def examples(self, entries: np.ndarray, *, as_rows: bool = False) -> list[Any]:
        """Return the examples of entries, as a list."""
        found: list[Any] = [None] * len(entries)
        for source in self._sources:
            places = np.flatnonzero(entries["of"] == source.number)
            if len(places):
                examples: Any = source.opened().examples(entries[places], as_rows=True)
                for place, example in zip(places.tolist(), examples, strict=True):
                    found[place] = example
        return found

    def _next(self) -> MixedSource | None:
        """Return the source whose next entry is due first; None at the end."""
        while self._stages.begins():
            self._end_passes()
            for source in self._sources:
                source.begin_stage(self._stream.periods[self._stages.number].get(source.number, 0))
            self._states = [source.state() for source in self._sources]
        self._end_passes()
        ready = [source for source in self._sources if source.period and source.has_next()]
        first, end = min(ready, key=MixedSource.due, default=None), self._end_time()
        if first is None or (end is not None and first.due() > end):
            self._stages.has_ended = True
            return None
        return first

    def _end_passes(self) -> None:
        """Record where passes over sources have ended; read these again if the others go on."""
        is_read_again = self._stream.source.stop == "all_exhausted"
        while over := [
            source
            for source in self._sources
            if source.period and not source.has_ended and not source.has_next()
        ]:
            used_up = [s for s in over if s.end_pass(is_read_again=is_read_again)]
            if any(source.period and not source.has_ended for source in self._sources):
                for source in used_up:
                    self._report(source)

    def _report(self, source: MixedSource) -> None:
        """Log a source that has been read ``max_passes`` times, in the first of the shards."""
        key = source.number, self._epoch
        if key not in self._stream.reported:
            self._stream.reported.add(key)
            _logger.warning(
                "%s has been read max_passes=%d times in this pass over the stream; from here on "
                "its weight goes to the others (each shard counts for itself; the first is logged)",
                *(source.name, source.most_passes),
            )

    def _end_time(self) -> int | None:
        """Return twice the virtual time at which the mixture ends; None if not known yet."""
        if self._stream.source.stop == "first_exhausted":
            ends = [2 * source.end * source.period for source in self._sources if source.end >= 0]
            return min(ends, default=None)
        read = [source for source in self._sources if source.period]
        if any(source.end < 0 for source in read):
            return None
        return max((2 * source.end * source.period for source in read), default=0)


def open_shard(
    stream: Stream | MixedStream,
    shard: int,
    place: Place,
    stages: ShardStages,
    *,
    epoch: int | None,
    policy: SkipPolicy,
    block_size: int,
) -> tuple[Reader, WrongExamples, str]:
    """Return a reader of a shard from a place on, its wrong examples, and its name."""
    words = None if stream.seed is None else (stream.seed, epoch or 0)
    if stream.collator.packing.strategy == "wrapped":
        place = place._replace(start=0)  # it is of the batches, not of what is read
    if isinstance(stream, Stream):
        part = stream.part(shard, words)
        wrong = WrongExamples(policy, part.name)
        name = part.name if part.num_shards == 1 else f"shard {part.first} of the stream"
        return _reader(stream, part, shard, place, words, block_size, wrong), wrong, name
    mixture, sources, names = stream.source, [], {}
    for number, of in stream.streams.items():
        names[number] = f"source {mixture.names[number]!r} of the mixture"
        wrong = WrongExamples(policy, names[number])
        opened = partial(_open_source, of, shard, number, words, block_size, wrong)
        where = "" if stream.num_shards is None else f"shard {shard} of "
        by_tokens, passes = mixture.by == "tokens", mixture.max_passes[number]
        most_passes = None if passes is None else int(passes)
        name = where + names[number]
        sources.append(MixedSource(number, name, opened, by_tokens, most_passes))
    if place.source is not None:
        states = place.source
        if len(mixture.stages) > 1:
            *states, of_stages = states
            stages.restore(of_stages)
        _restore(sources, states)
    reader = _MixedReader(stream, sources, stages, place, epoch)
    return reader, WrongExamples(policy, "the mixture", names), "the mixture"


def _open_source(
    stream: Stream,
    shard: int,
    number: int,
    words: tuple[int, ...] | None,
    block_size: int,
    wrong: WrongExamples,
    place: Place,
    turn: int,
) -> Reader:
    words = None if words is None else (*words, number, turn)
    part = stream.part(shard, words)
    return _reader(stream, part, shard, place, words, block_size, wrong)


def _reader(
    stream: Stream,
    part: Part,
    shard: int,
    place: Place,
    words: tuple[int, ...] | None,
    block_size: int,
    wrong: WrongExamples,
) -> Reader:
    reader = reader_of(stream, part, place._replace(taken=0), wrong)
    if words is None:
        return reader
    return ShuffledReader(reader, place, block_size=block_size, words=(*words, shard))


def _restore(sources: list[MixedSource], states: Any) -> None:
    """Move sources to where a state has them."""
    for source, (*counts, units, turn, end) in zip(sources, (of[:6] for of in states), strict=True):
        source.units, source.turn, source.end = units, turn, end
        source.place = Place(counts[0], counts[1], None, counts[2])
    for source, state in zip(sources, states, strict=True):
        if len(state) > 6:
            source.place = source.place._replace(source=state[6])


def _check_mixture(mixture: Mixture) -> None:
    """Refuse what a mixture of streams cannot have."""
    for name, passes in zip(mixture.names, mixture.max_passes, strict=True):
        if passes is not None and passes.denominator > 1:
            raise ValueError(
                f"max_passes={float(passes):g} of source {name!r}, a stream, must be a whole "
                "number: how many examples it has is known at its end"
            )
        if passes is not None and mixture.stop == "first_exhausted":
            raise ValueError(
                "max_passes= of streams counts within a pass over the mixture, and one with "
                'stop="first_exhausted" reads no example twice; leave it out, or pass '
                'stop="all_exhausted"'
            )
    if len({id(source) for source in mixture.sources}) < len(mixture.sources):
        raise ValueError("the mixture has one stream twice, which has one position; give it once")
    for name, source in zip(mixture.names, mixture.sources, strict=True):
        if node_of(source) is not None:
            raise ValueError(
                f"source {name!r} of the mixture is split by node already; pass the stream before "
                "split_dataset_by_node, and dp_rank"
            )


def _periods(weights: Sequence[Fraction]) -> dict[int, int]:
    """Return the inverse of each weight that is not 0, as integers, by the number of its source."""
    read = {number: weight for number, weight in enumerate(weights) if weight}
    whole = math.lcm(*(weight.denominator for weight in read.values()))
    exact = {number: int(weight * whole) for number, weight in read.items()}
    common = math.lcm(*exact.values())
    return {number: common // weight for number, weight in exact.items()}
