"""Several streams mixed by weight, in every shard by the same rule as a ``Mixture`` of datasets.

An entry is due when the share of its source reaches its middle, and the source whose next entry is
due first has the next turn. So each source is within half of its longest example of its share in
every shard, and a place is that of each source and how much was read of it: nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.orders.mixture import Mixture
from torch_collate_kit.loading.skipping import SkipPolicy
from torch_collate_kit.loading.streaming.entries import ENTRY, place_after
from torch_collate_kit.loading.streaming.outside_streams import node_of
from torch_collate_kit.loading.streaming.readers import Reader, reader_of
from torch_collate_kit.loading.streaming.shards import Part, Stream
from torch_collate_kit.loading.streaming.shuffled_blocks import ShuffledReader
from torch_collate_kit.loading.streaming.skipping import WrongExamples
from torch_collate_kit.loading.streaming.states import Place

_BEGIN = Place()
_READ_AHEAD = 32  # entries of each source


class MixedStream:
    """A ``Mixture`` as a stream: a ``Stream`` for each source that has a weight."""

    def __init__(self, mixture: Mixture, *args: Any, **options: Any) -> None:
        _check_mixture(mixture)
        self.source = mixture
        weights = mixture.stages[0][1]
        self.streams = {
            number: Stream(source, *args, **options)
            for number, source in enumerate(mixture.sources)
            if weights[number]
        }
        for number, stream in self.streams.items():
            is_asked = mixture._is_named and "source" in stream.collator.fields
            stream.added = {"source": mixture.names[number]} if is_asked else {}
        whole = math.lcm(*(weights[number].denominator for number in self.streams))
        exact = {number: int(weights[number] * whole) for number in self.streams}
        common = math.lcm(*exact.values())
        self.periods = {number: common // weight for number, weight in exact.items()}
        first = next(iter(self.streams.values()))
        self.collate, self.collator, self.seed = first.collate, first.collator, first.seed
        self.node, self.presharded, self.num_shards = first.node, first.presharded, first.num_shards
        self.shards = first.shards

    @property
    def epoch(self) -> None:
        """None: the epochs of the sources are in the fingerprint."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the mixture and the fingerprints of its sources."""
        mixture = self.source
        found: dict[str, Any] = {
            "mixture": {
                "weights": list(map(str, mixture.stages[0][1])),
                "by": mixture.by,
                "stop": mixture.stop,
                "names": mixture.names,
            }
        }
        for number, stream in self.streams.items():
            of_source = {"epoch": stream.epoch, **(stream.fingerprint() or {})}
            found[f"source {mixture.names[number]!r}"] = of_source
        return found


@dataclass(eq=False)
class _Source:
    """A source in one shard: what was read of it, and what comes next."""

    number: int
    name: str
    open: Callable[[Place, int], Reader]  # of pass ``turn`` from a place on
    period: int  # inverse of its weight
    by_tokens: bool
    place: Place = _BEGIN  # after the last entry given out
    units: int = 0  # examples or tokens given out, in all passes
    turn: int = 0  # passes before this one
    end: int = -1  # units at the end of the first pass; -1: not yet
    ahead: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=ENTRY))
    places: list[Place] = field(default_factory=list)  # after each entry of ``ahead``
    counts: list[int] = field(default_factory=list)  # units of each entry of ``ahead``
    next: int = 0  # the first entry of ``ahead`` that was not given out
    reader: Reader | None = None
    has_ended: bool = False  # it is not read again

    def opened(self) -> Reader:
        """Return the reader of the pass."""
        self.reader = self.reader or self.open(self.place, self.turn)
        return self.reader

    def has_next(self) -> bool:
        """Return whether an entry is ready, after reading on if necessary."""
        if self.next == len(self.places) and not self.has_ended:
            ahead = self.ahead = self.opened().read(_READ_AHEAD)
            names = ("num_read", "next_start", "source", "taken")
            self.places = list(map(Place, *(ahead[name].tolist() for name in names)))
            self.counts = ahead["num_tokens"].tolist() if self.by_tokens else [1] * len(ahead)
            self.next = 0
        return self.next < len(self.places)

    def due(self) -> int:
        """Return twice the virtual time at which the next entry is due."""
        return (2 * self.units + self.counts[self.next]) * self.period

    def given(self) -> np.ndarray:
        """Return the next entry, ENTRY [1], and move after it."""
        entry = self.ahead[self.next : self.next + 1]
        self.place, self.units = self.places[self.next], self.units + self.counts[self.next]
        self.next += 1
        return entry

    def state(self) -> list[Any]:
        """Return the place as JSON."""
        place = self.place
        state = [place.num_read, place.start, place.taken, self.units, self.turn, self.end]
        return state if place.source is None else [*state, place.source]


class _MixedReader:
    """Reads entries of several sources, each when it is due."""

    def __init__(self, sources: list[_Source], stop: str, place: Place) -> None:
        self._sources, self._stop, self._place = sources, stop, place
        self._states = [source.state() for source in sources]

    @property
    def place(self) -> Place:
        """The place after all that was read."""
        return self._place

    def read(self, num_entries: int) -> np.ndarray:
        """Return the next entries, ENTRY [num_entries]; fewer only at the end of the mixture."""
        parts, numbers, states = [np.empty(0, dtype=ENTRY)], list[int](), list[Any]()
        while len(numbers) < num_entries and (source := self._next()) is not None:
            parts.append(source.given())
            numbers.append(source.number)
            # a source that has begun another pass stays described as it was until it is read
            self._states = list(self._states)
            self._states[self._sources.index(source)] = source.state()
            states.append(self._states)
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

    def _next(self) -> _Source | None:
        """Return the source whose next entry is due first; None at the end."""
        while over := [s for s in self._sources if not s.has_next() and not s.has_ended]:
            self._end_passes(over)
        first = min((s for s in self._sources if s.has_next()), key=_Source.due, default=None)
        end = self._end_time()
        return None if first is None or (end is not None and first.due() > end) else first

    def _end_passes(self, over: list[_Source]) -> None:
        """Record the end of a pass over sources; read them again if the others go on."""
        for source in over:
            if source.place == _BEGIN:
                raise DataError(
                    f"{source.name} has no examples; leave it out of the mixture, or use fewer "
                    "shards or workers than it has files and examples"
                )
            source.end = source.units if source.end < 0 else source.end
            if self._stop == "first_exhausted":
                source.has_ended = True
            else:
                source.place, source.turn, source.reader = _BEGIN, source.turn + 1, None

    def _end_time(self) -> int | None:
        """Return twice the virtual time at which the mixture ends; None if not known yet."""
        ends = [2 * source.end * source.period for source in self._sources if source.end >= 0]
        if self._stop == "first_exhausted":
            return min(ends, default=None)
        return max(ends) if len(ends) == len(self._sources) else None


def open_shard(
    stream: Stream | MixedStream,
    shard: int,
    place: Place,
    *,
    epoch: int | None,
    policy: SkipPolicy,
    block_size: int,
) -> tuple[Reader, WrongExamples, str]:
    """Return a reader of a shard from a place on, its wrong examples, and its name."""
    words = None if stream.seed is None else (stream.seed, epoch or 0)
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
        period, by_tokens = stream.periods[number], mixture.by == "tokens"
        sources.append(_Source(number, where + names[number], opened, period, by_tokens))
    if place.source is not None:
        _restore(sources, place.source)
    reader = _MixedReader(sources, mixture.stop, place)
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


def _restore(sources: list[_Source], states: Any) -> None:
    """Move sources to where a state has them. Raises StateError if it is damaged."""
    if not isinstance(states, list) or len(states) != len(sources):
        raise StateError(f"the state has {states!r} of a mixture of {len(sources)}; it is damaged")
    for source, state in zip(sources, states, strict=True):
        counts: list[Any] = (
            state[:6] if isinstance(state, list) and len(state) in (6, 7) else [None]
        )
        if not all(type(count) is int and -1 <= count < 2**63 for count in counts):
            raise StateError(
                f"the state has {state!r} of {source.name}, not [num_read, start, taken, units, "
                "turn, end] with a state of the source or without; it is damaged"
            )
        source.units, source.turn, source.end = counts[3:]
        own = state[6] if len(state) > 6 else None
        source.place = Place(counts[0], counts[1], own, counts[2])


def _check_mixture(mixture: Mixture) -> None:
    """Refuse what a mixture of streams cannot have."""
    if len(mixture.stages) > 1:
        raise ValueError(
            "schedule= counts steps over all ranks, and a shard of a stream is packed without "
            "knowing them; leave it out, or mix datasets with PackedBatchSampler(Mixture(...))"
        )
    if any(passes is not None for passes in mixture.max_passes):
        raise ValueError(
            "max_passes= counts passes over the whole run, and a pass over streams begins all of "
            'them anew; leave it out: stop="first_exhausted" reads no example twice in a pass'
        )
    if len({id(source) for source in mixture.sources}) < len(mixture.sources):
        raise ValueError("the mixture has one stream twice, which has one position; give it once")
    for name, source in zip(mixture.names, mixture.sources, strict=True):
        if node_of(source) is not None:
            raise ValueError(
                f"source {name!r} of the mixture is split by node already; pass the stream before "
                "split_dataset_by_node, and dp_rank"
            )
