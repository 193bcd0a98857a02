"""A stream of examples: opened at a place, divided over ranks and workers.

A stream of ``datasets`` divides itself over DataLoader workers, and one of its examples iterables
has one position. A canonical shard needs neither: it is read as outside a worker, and from an
object of its own.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from torch_collate_kit._checks import type_name
from torch_collate_kit.collators.packed import checked_collator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.orders import seeded_generator
from torch_collate_kit.loading.states import Place, SourceFingerprint
from torch_collate_kit.reading.source import is_a

_END: Any = object()
_logger = logging.getLogger("torch_collate_kit.loading")
Example = Mapping[str, Any]
ExampleSource = Iterable[Example] | Callable[..., Iterable[Example]]


class Part(NamedTuple):
    """A source, and the examples of it that are a shard: every num_shards-th from ``first`` on."""

    source: Any
    first: int = 0
    num_shards: int = 1
    name: str = "the stream"  # where positions count, in the words of an error message

    def after(self, place: Place, num_examples: int) -> range:
        """Return the positions after ``place``, in a source of so many examples."""
        _check_num_read(place, num_examples)
        first = place.num_read + (self.first - place.num_read) % self.num_shards
        return range(first, num_examples, self.num_shards)


class Stream:
    """The examples of each shard of a source, from any place on.

    With ``num_shards`` the shards are the same for any number of ranks and workers, and a rank has
    an equal run of them. Without, every worker of every rank is one shard.
    """

    def __init__(
        self,
        source: ExampleSource,
        dp_rank: int,
        dp_size: int,
        *,
        presharded: bool,
        collate: Any,
        num_shards: int | None = None,
        seed: int | None = None,
    ) -> None:
        _check_source(source)
        self.collate, self.collator = collate, checked_collator(collate)
        self.source, self._dp_rank, self._dp_size = source, dp_rank, dp_size
        self.fingerprint = SourceFingerprint(source)
        self.presharded, self.num_shards = presharded, num_shards
        self.seed = seed  # None: not shuffled
        self.added: dict[str, Any] = {}  # to every example
        self._was_moved = False  # a datasets stream keeps the state it was given for every pass
        if num_shards is not None:
            _check_divisible(source, num_shards, dp_size, presharded=presharded)
        self._check_not_split(source)
        if isinstance(source, TokenizedDataset) or is_a(source, "datasets", "Dataset"):
            _log_faster_way(type(source).__name__)

    @property
    def node(self) -> tuple[int, int]:
        """Rank and number of ranks, of the source where it is split already."""
        return node_of(self.source) or (self._dp_rank, self._dp_size)

    @property
    def epoch(self) -> int | None:
        """The source's epoch, which its order may depend on, if it has one."""
        epoch = getattr(self.source, "epoch", None)
        return epoch if type(epoch) is int else None

    def shards(self, num_workers: int) -> range:
        """Return this rank's shards, of which worker w has every num_workers-th from w on.

        Raises:
            ValueError: more workers than shards.
        """
        dp_rank, dp_size = self.node
        num_each = max(1, num_workers)
        if self.num_shards is not None:
            num_each = self.num_shards // dp_size
            if num_workers > num_each:
                raise ValueError(
                    f"num_workers={num_workers}, but with num_shards={self.num_shards} and "
                    f"parallel.dp={dp_size} a rank has {num_each} shards; use at most as many "
                    "workers"
                )
        return range(dp_rank * num_each, (dp_rank + 1) * num_each)

    def part(self, shard: int, words: tuple[int, ...] | None = None) -> Part:
        """Return the source and the examples of a shard; ``words`` seed the order of shards."""
        if self.num_shards is None:
            source = self._opened(words)
            return Part(source, *self._index(source))
        if words is not None:
            shard = int(seeded_generator(*words).permutation(self.num_shards)[shard])
        name = f"shard {shard} of the stream"
        with no_worker():
            if self.presharded:
                return Part(self._made(shard), name=name)
            source = self._opened(words)
            if is_datasets_stream(source):
                return Part(canonical_part(source, shard, self.num_shards), name=name)
            return Part(source, shard, self.num_shards)

    def _opened(self, words: tuple[int, ...] | None) -> Any:
        """Return the whole source, the files of a ``datasets`` stream in a seeded order."""
        source = self._made()
        self._check_not_split(source)
        if words is None or not is_datasets_stream(source):
            return source
        return with_shuffled_files(source, seeded_generator(*words))

    def _made(self, *shard: int) -> Any:
        if _is_iterable(self.source):
            return self.source
        assert callable(self.source)
        source = self.source(*shard)
        if not _is_iterable(source):
            raise TypeError(
                f"the callable source returned {type_name(source)}; it must return an "
                "iterable of examples"
            )
        return source

    beginning = Place()
    """The place before the first example."""

    def renewed(self, place: Place) -> Place:
        """Return the place: only of a mixture may it be one of other weights."""
        return place

    def check_weights(self, positions: Mapping[int, Any]) -> None:
        """Do nothing: it is a mixture that has weights."""

    def examples(self, part: Part, place: Place) -> Iterator[tuple[Example, int, Place]]:
        """Yield each example after ``place``, its position, and the place after it.

        In place of an example that cannot be read its DataError is yielded.
        """
        source = part.source
        if _is_indexed(source) and place.source is None:
            found, has_state = _indexed(part, place), False
        else:
            found, has_state = self._iterated(part, place), has_exact_state(source)
        for position, example in found:
            state = source.state_dict() if has_state else None
            if self.added and not isinstance(example, DataError):
                example = {**example, **self.added}
            yield example, position, Place(position + 1, 0, 0, state)

    def _iterated(self, part: Part, place: Place) -> Iterator[tuple[int, Example]]:
        """Yield examples of a source that can only be iterated over, and their positions."""
        num_before = (part.first - place.num_read) % part.num_shards
        following = islice(self._open(part.source, place), num_before, None, part.num_shards)
        for number, example in enumerate(following):
            yield place.num_read + num_before + number * part.num_shards, example

    def _open(self, source: Any, place: Place) -> Iterator[Example]:
        read = iter if self.num_shards is None else outside_workers
        if place.source is not None:
            if not has_exact_state(source):
                raise StateError(
                    "the state holds a state of the source, but this source cannot load one (it "
                    "has no load_state_dict, or a step that is not known to be restored exactly, "
                    "such as a shuffle buffer); resume with the source, and the version of "
                    "datasets, of the run that saved it"
                )
            source.load_state_dict(copy.deepcopy(place.source))
            self._was_moved = True
            return read(source)
        if self.num_shards is None and self._was_moved and is_datasets_stream(source):
            source.load_state_dict(None)
            self._was_moved = False
        examples = read(source)
        _check_num_read(place, sum(1 for _ in islice(examples, place.num_read)))
        return examples

    def _index(self, source: Any) -> tuple[int, int]:
        """Return the first example of this process, and the distance to its next one."""
        if self.presharded:
            return 0, 1
        index, num_shards = (0, 1) if node_of(source) else (self._dp_rank, self._dp_size)
        worker = get_worker_info()
        if worker is None or is_datasets_stream(source):  # which looks at the worker itself
            return index, num_shards
        return index * worker.num_workers + worker.id, num_shards * worker.num_workers

    def _check_not_split(self, source: Any) -> None:
        node = node_of(source)
        if node is None:
            return
        found = f"stream is split by node already (rank {node[0]} of {node[1]})"
        if self.num_shards is not None:
            raise ValueError(
                f"{found}, so it cannot be divided into num_shards={self.num_shards} shards; pass "
                "the stream before split_dataset_by_node, and dp_rank"
            )
        if self._dp_size > 1:
            raise ValueError(
                f"{found} and would be split again by parallel.dp={self._dp_size}; pass the stream "
                "before split_dataset_by_node"
            )


def _check_source(source: Any) -> None:
    if isinstance(source, Iterator):
        raise TypeError(
            f"stream is a {type(source).__name__}, an iterator that can be read only once; pass "
            "what it was made of, or a callable that makes it"
        )
    if not (_is_iterable(source) or callable(source)):
        raise TypeError(
            "stream must be an iterable of examples or a callable that makes one, got "
            f"{type(source).__name__}"
        )


def _check_divisible(source: Any, num_shards: int, dp_size: int, *, presharded: bool) -> None:
    """Refuse a source that cannot be divided into shards for any number of ranks."""
    if num_shards % dp_size:
        raise ValueError(
            f"num_shards={num_shards} does not divide by parallel.dp={dp_size}; take a number "
            "that every number of ranks of the run divides, such as 64"
        )
    if presharded and _is_iterable(source):
        raise TypeError(
            f"with num_shards={num_shards} a presharded source must be a callable that accepts the "
            f"number of a shard, 0 to {num_shards - 1}, and makes its examples, got "
            f"{type(source).__name__}"
        )
    if _is_iterable(source) and not is_datasets_stream(source) and has_exact_state(source):
        raise TypeError(
            f"stream is a {type(source).__name__} with a state_dict, so it has one position, but "
            f"with num_shards={num_shards} each shard needs its own; pass a callable that makes one"
        )


def _check_num_read(place: Place, num_examples: int) -> None:
    if num_examples < place.num_read:
        raise StateError(
            f"the state is after example {place.num_read} of the stream, which has "
            f"{num_examples}; the source is not what it was when the state was saved"
        )


@cache
def _log_faster_way(kind: str) -> None:
    """Log once that a dataset is read faster by a sampler."""
    _logger.info(
        "a stream reads a %s example by example; PackedBatchSampler is about twice as fast", kind
    )


def _is_indexed(source: Any) -> bool:
    """Return whether an example of a source can be read without those before it."""
    is_ours = isinstance(source, list | tuple | TokenizedDataset)
    is_map_style = hasattr(source, "__getitem__") and not hasattr(source, "__iter__")
    return is_ours or is_map_style or is_a(source, "datasets", "Dataset")


def _indexed(part: Part, place: Place) -> Iterator[tuple[int, Example]]:
    """Yield the examples of a shard after ``place``, and their positions."""
    positions = part.after(place, len(part.source))
    if positions and hasattr(part.source, "select"):  # twice as fast as one by one
        return zip(positions, part.source.select(positions), strict=True)
    return ((position, _example_at(part.source, position)) for position in positions)


def _example_at(source: Any, position: int) -> Any:
    """Return an example, or the DataError with which it cannot be read."""
    try:
        return source[position]
    except DataError as error:
        return error


def _is_iterable(source: Any) -> bool:
    is_map_style = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return hasattr(source, "__iter__") or is_map_style


# ---- streams of datasets, and sources that look at the DataLoader worker ----


def is_datasets_stream(source: Any) -> bool:
    """Return whether a source is a ``datasets.IterableDataset``."""
    return is_a(source, "datasets", "IterableDataset")


def node_of(source: Any) -> tuple[int, int] | None:
    """Return rank and number of ranks of a stream made by ``split_dataset_by_node``, or None."""
    node = source._distributed if is_datasets_stream(source) else None
    return None if node is None else (node.rank, node.world_size)


def canonical_part(stream: Any, shard: int, num_shards: int) -> Any:
    """Return a new stream of the shard-th part of a ``datasets`` stream.

    Files of its own if ``num_shards`` divides their number, otherwise every num_shards-th example.
    """
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(_alone(stream), shard, num_shards)
    part.set_epoch(stream.epoch)
    return part


def with_shuffled_files(stream: Any, generator: np.random.Generator) -> Any:
    """Return a new stream of the same files in another order; after take or skip, the same.

    ``stream.shuffle`` would add a buffer, whose state ``datasets`` does not restore.
    """
    alone = _alone(stream)
    try:
        alone._ex_iterable = alone._ex_iterable.shuffle_data_sources(generator)
    except Exception as error:
        if type(error).__name__ != "DataSourcesShufflingDisallowed":
            raise
    return alone


def _alone(stream: Any) -> Any:
    """Copy a stream with its steps; ``copy.copy`` of one shares its attributes."""
    alone = object.__new__(type(stream))
    vars(alone).update(vars(stream), _ex_iterable=_own_steps(stream._ex_iterable))
    return alone


def _own_steps(step: Any) -> Any:
    """Copy the steps of a stream: a position is kept in them."""
    step = copy.copy(step)
    if hasattr(step, "ex_iterables"):
        step.ex_iterables = [_own_steps(below) for below in step.ex_iterables]
    elif hasattr(step, "ex_iterable"):
        step.ex_iterable = _own_steps(step.ex_iterable)
    return step


@contextmanager
def no_worker() -> Iterator[None]:
    """``torch.utils.data.get_worker_info()`` is None inside."""
    info = torch_worker._worker_info
    if info is not None:  # else nothing is written: another thread may be a loader's
        torch_worker._worker_info = None
    try:
        yield
    finally:
        if info is not None:
            torch_worker._worker_info = info


def outside_workers(examples: Iterable[Any]) -> Iterator[Any]:
    """Iterate over examples as if this were no DataLoader worker."""
    if torch_worker._worker_info is None:
        yield from examples
        return
    with no_worker():
        rest = iter(examples)
    while True:
        with no_worker():
            example = next(rest, _END)
        if example is _END:
            return
        yield example


# The steps of a datasets stream that their state restores exactly: those that read data, and those
# that take it from other steps. Any other step, such as a shuffle buffer or one that a newer
# datasets has renamed, is not trusted: a resumed pass reads and skips.
_EXACT_BASE = re.compile(r"(ShuffledDataSources)?(Arrow)?ExamplesIterable")
_EXACT_STEP = re.compile(
    "(RebatchedArrow|Step|Mapped|Filtered|Skip|Repeat|Take|Formatted|Typed"
    "|((Randomly)?Cycling|(Vertically|Horizontally)Concatenated)MultiSources)ExamplesIterable"
    "|SelectColumnsIterable"
)


def has_exact_state(source: Any) -> bool:
    """Return whether a source's state restores it exactly; of datasets, if all steps are known to.

    Before datasets 5 a step that follows Arrow tables goes on at another example.
    """
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return False
    if not is_datasets_stream(source):
        return True
    from datasets import __version__

    is_new = int(__version__.partition(".")[0]) >= 5
    return is_new and _is_exact(getattr(source, "_ex_iterable", None))


def _is_exact(node: Any) -> bool:
    """Return whether a step of a datasets stream, and all steps before it, are known."""
    kind = type(node).__name__
    if _EXACT_BASE.fullmatch(kind):
        return True
    below = getattr(node, "ex_iterables", None) or [getattr(node, "ex_iterable", None)]
    return bool(_EXACT_STEP.fullmatch(kind)) and all(map(_is_exact, below))
