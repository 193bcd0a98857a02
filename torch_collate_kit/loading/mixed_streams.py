"""Several streams mixed by weight, in every shard by the same rule as a ``Mixture`` of datasets.

The next entry is of the source with the least (2 * taken + units of its next entry) / weight: it is
due when the share of its source reaches its middle. So each source is within half of its longest
example of its share in every shard, and a place is that of each source and how much was taken of
it: nothing is drawn. A pass ends when the source whose turn it is has no next entry.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, count
from typing import Any

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.loading.shards import Stream, node_of
from torch_collate_kit.loading.skipping import SkipPolicy
from torch_collate_kit.loading.states import MixedPlace, Place, ShardPosition
from torch_collate_kit.loading.stream_entries import Entry, LeftOut, read_entries, shuffled_blocks

_BEGIN = Place()
_STOP = "first_exhausted"
_logger = logging.getLogger("torch_collate_kit.loading")


class MixedStream:
    """A ``Mixture`` as a stream: a ``Stream`` for each source."""

    def __init__(self, mixture: Mixture, *args: Any, **options: Any) -> None:
        _check_mixture(mixture)
        self.source = mixture
        self.streams = [Stream(source, *args, **options) for source in mixture.sources]
        for name, stream in zip(mixture.names, self.streams, strict=True):
            is_asked = mixture._is_named and "source" in stream.collator.fields
            stream.added = {"source": name} if is_asked else {}
        self._weights = tuple(str(weight) for weight in mixture.stages[0][1])
        first = self.streams[0]
        self.collate, self.collator, self.seed = first.collate, first.collator, first.seed
        self.node, self.presharded, self.num_shards = first.node, first.presharded, first.num_shards
        self.shards = first.shards
        self.epoch: int | None = None  # those of the sources are in the fingerprint
        self._none = (0,) * len(self.streams)
        begin = MixedPlace(self._weights, self._none, (_BEGIN,) * len(self.streams))
        self.beginning = Place(mixed=begin)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the mixture and the fingerprints of its sources."""
        mixture = self.source
        found: dict[str, Any] = {"mixture": {"by": mixture.by, "names": mixture.names}}
        for name, stream in zip(mixture.names, self.streams, strict=True):
            found[f"source {name!r}"] = {"epoch": stream.epoch, **(stream.fingerprint() or {})}
        return found

    def renewed(self, place: Place) -> Place:
        """Return a place from which on the mixture's own weights apply, and what is taken is 0.

        Within a joined document it stays: the document is chosen with the weights before.
        """
        mixed = place.mixed
        if mixed is None or mixed.weights == self._weights or place.start:
            return place
        return place._replace(mixed=mixed._replace(weights=self._weights, taken=self._none))

    def check_weights(self, positions: Mapping[int, ShardPosition]) -> None:
        """Warn if the positions in a state are of a run with other weights."""
        places = [position.place.mixed for position in positions.values()]
        others = {mixed.weights for mixed in places if mixed is not None} - {self._weights}
        if others:
            _logger.warning(
                "the state was saved with weights=%s, the mixture has %s: what is taken of each "
                "source is counted anew, in each shard from its next window on",
                *(list(min(others)), list(self._weights)),
            )

    def entries(
        self, place: Place, open_source: Callable[[int, Place], Iterator[Entry]], *, is_within: bool
    ) -> Iterator[Entry]:
        """Yield the entries after ``place``, each with the place after it.

        All are chosen with the weights of the place, or if it ``is_within`` a document only the
        first one.
        """
        assert place.mixed is not None
        weights, all_taken, places = place.mixed
        sources = [
            _MixedSource(number, taken, own, partial(open_source, number), self.source)
            for number, (taken, own) in enumerate(zip(all_taken, places, strict=True))
        ]
        periods = _periods(weights)
        for num_read in count(place.num_read + 1):
            source = sources[min(sources[i].due(period) for i, period in periods.items())[-1]]
            entry = source.take()
            if entry is None:
                return
            if is_within and weights != self._weights:
                weights, periods = self._weights, _periods(self._weights)
                for other in sources:
                    other.taken = 0
            all_taken, places = zip(*((one.taken, one.place) for one in sources), strict=True)
            after = Place(num_read, mixed=MixedPlace(weights, all_taken, places))
            yield entry._replace(place=after, source=source.number)
            del entry  # it would be held beside the next


class _MixedSource:
    """A source in one shard: how much was taken of it, and what comes next."""

    def __init__(
        self,
        number: int,
        taken: int,
        place: Place,
        open_source: Callable[[Place], Iterator[Entry]],
        mixture: Mixture,
    ) -> None:
        self.number, self.taken, self.place = number, taken, place
        self._open, self._by_tokens = open_source, mixture.by == "tokens"
        self._entries: Iterator[Entry] | None = None
        self._next: Entry | None = None

    def due(self, period: int) -> tuple[int, bool, int]:
        """Return twice the virtual time at which the next entry is due, or the end if it has none.

        Of what is due at once the first source comes first, and an end last.
        """
        if self._entries is None:
            self._entries = self._open(self.place)
            self._next = next(self._entries, None)
        time = (2 * self.taken + self._units(self._next)) * period
        return time, self._next is None, self.number

    def take(self) -> Entry | None:
        """Return the next entry and move after it; None if there is none."""
        entry = self._next
        if entry is not None:
            assert self._entries is not None
            self.taken, self.place = self.taken + self._units(entry), entry.place
            self._next = next(self._entries, None)
        return entry

    def _units(self, entry: Entry | None) -> int:
        if entry is None:
            return 0
        return entry.num_tokens if self._by_tokens else 1


def open_shard(
    stream: Stream | MixedStream,
    shard: int,
    place: Place,
    *,
    epoch: int | None,
    policy: SkipPolicy,
    block_size: int,
) -> tuple[Iterator[Entry], LeftOut]:
    """Return the entries of a shard from a place on, and those left out where it is read."""
    words = () if stream.seed is None else (stream.seed, epoch or 0)
    is_within = False
    if stream.collator.packing.strategy == "wrapped":  # the start is of the batches
        is_within, place = place.start > 0, place._replace(start=0)
    if isinstance(stream, Stream):
        return _open_source(stream, shard, place, words, policy, block_size)

    def open_source(number: int, own: Place) -> Iterator[Entry]:
        source = stream.streams[number]
        name = f"source {stream.source.names[number]!r} of the mixture"
        mixed_words = (*words, number) if words else ()
        entries, _ = _open_source(source, shard, own, mixed_words, policy, block_size, name)
        first = next(entries, None)
        if first is None and own == _BEGIN:
            where = "" if stream.num_shards is None else f"shard {shard} of "
            raise DataError(
                f"{where}{name} has no examples; leave it out of the mixture, or use fewer shards "
                "or workers than it has files and examples"
            )
        return entries if first is None else chain([first], entries)

    return stream.entries(place, open_source, is_within=is_within), LeftOut(policy, "the mixture")


def _open_source(
    stream: Stream,
    shard: int,
    place: Place,
    words: tuple[int, ...],
    policy: SkipPolicy,
    block_size: int,
    where: str = "",
) -> tuple[Iterator[Entry], LeftOut]:
    part = stream.part(shard, words or None)
    whole = part.name if part.num_shards == 1 else f"shard {part.first} of the stream"
    left_out = LeftOut(policy, where or part.name, whole)
    begin = place._replace(taken=0)
    entries = read_entries(stream.examples(part, begin), begin, stream.collator, left_out)
    if words:
        words = (*words, shard)
        entries = shuffled_blocks(entries, place, block_size=block_size, words=words)
    return entries, left_out


def _check_mixture(mixture: Mixture) -> None:
    """Refuse what a mixture of streams cannot have."""
    if any(passes is not None for passes in mixture.max_passes) or mixture.stop != _STOP:
        name = "max_passes=" if mixture.stop == _STOP else f"stop={mixture.stop!r}"
        raise ValueError(
            f"{name} of a mixture of streams: its pass ends with the first source that ends; let a "
            "source that is to be read again repeat itself: stream.repeat(None) of datasets, or a "
            "class that begins anew and has a state (docs/migration.md)"
        )
    if len(mixture.stages) > 1:
        raise ValueError(
            "schedule= of a mixture of streams: save the state where the next stage is to begin, "
            "and load it with a Mixture of the same streams with other weights (docs/migration.md)"
        )
    if len({id(source) for source in mixture.sources}) < len(mixture.sources):
        raise ValueError("the mixture has one stream twice, which has one position; give it once")
    for name, source in zip(mixture.names, mixture.sources, strict=True):
        if node_of(source) is not None:
            raise ValueError(
                f"source {name!r} of the mixture is split by node already; pass the stream before "
                "split_dataset_by_node, and dp_rank"
            )


def _periods(weights: Sequence[str]) -> dict[int, int]:
    """Return the inverse of each weight that is not 0, as integers, by the number of its source."""
    periods = {i: 1 / Fraction(weight) for i, weight in enumerate(weights) if Fraction(weight)}
    scale = math.lcm(*(period.denominator for period in periods.values()))
    return {number: int(period * scale) for number, period in periods.items()}
