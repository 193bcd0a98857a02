"""A stream of examples: opened at a place, divided over ranks and workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from torch_collate_kit._checks import type_name
from torch_collate_kit.collators.packed import checked_collator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.orders.order import seeded_generator
from torch_collate_kit.loading.streaming.fingerprints import SourceFingerprint
from torch_collate_kit.loading.streaming.outside_streams import (
    canonical_part,
    has_exact_state,
    is_datasets_stream,
    no_worker,
    node_of,
    outside_workers,
    with_shuffled_files,
)
from torch_collate_kit.loading.streaming.states import Place
from torch_collate_kit.reading.source import is_a

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
        self.stage_rows: list[int] = []  # where stages of a mixture begin
        self._was_moved = False  # a datasets stream keeps the state it was given for every pass
        if num_shards is not None:
            _check_divisible(source, num_shards, dp_size, presharded=presharded)
        self._check_not_split(source)

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

    def columns(self, part: Part, place: Place) -> TokenizedDataset | None:
        """Return the source as columns, if their rows are what iterating over it gives.

        Not a ``datasets.IterableDataset``, whose state is exact only between the tables that it
        reads (docs/design_log.md), nor a ``datasets.Dataset`` with declared fields. With images
        every example is read, since its length does not say how large they are.
        """
        source = part.source
        if self.collator.vision is not None or place.source is not None or self.added:
            return None
        if (
            is_a(source, "datasets", "Dataset")
            and type(source).__module__ == "datasets.arrow_dataset"
        ):
            has_format = source.format["type"] or source.format["columns"] != source.column_names
            if has_format or self.collator.fields:
                return None
            try:
                source = TokenizedDataset(source, train_all=self.collator.train_all)
            except DataError:  # raised with its position when it is read
                return None
        return source if type(source) is TokenizedDataset and source._is_plain() else None

    def examples(self, part: Part, place: Place) -> Iterator[tuple[Example, int, Place]]:
        """Yield each example after ``place``, its position, and the place after it."""
        source, num_shards = part.source, part.num_shards
        has_state = has_exact_state(source)
        examples = self._open(source, place, has_state)
        num_before = (part.first - place.num_read) % num_shards
        for i, example in enumerate(islice(examples, num_before, None, num_shards)):
            position = place.num_read + num_before + i * num_shards
            state = source.state_dict() if has_state else None
            if self.added:
                example = {**example, **self.added}
            yield example, position, Place(position + 1, 0, state)

    def _open(self, source: Any, place: Place, has_state: bool) -> Iterator[Example]:
        if place.source is not None:
            if not has_state:
                raise StateError(
                    "the state holds a state of the source, but this source cannot load one (it "
                    "has no load_state_dict, or a step that is not known to be restored exactly, "
                    "such as a shuffle buffer); resume with the source, and the version of "
                    "datasets, of the run that saved it"
                )
            source.load_state_dict(copy.deepcopy(place.source))
            self._was_moved = True
            return self._iterated(source)
        if self.num_shards is None and self._was_moved and is_datasets_stream(source):
            source.load_state_dict(None)
            self._was_moved = False
        if type(source) in (list, tuple):
            _check_num_read(place, len(source))
            return islice(source, place.num_read, None)
        examples = self._iterated(source)
        _check_num_read(place, sum(1 for _ in islice(examples, place.num_read)))
        return examples

    def _iterated(self, source: Any) -> Iterator[Example]:
        return iter(source) if self.num_shards is None else outside_workers(source)

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


def _is_iterable(source: Any) -> bool:
    return hasattr(source, "__iter__") or hasattr(source, "__getitem__")
