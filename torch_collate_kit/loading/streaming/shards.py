"""A stream of examples: opened at a place, divided over ranks and workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.sources import is_a

__all__ = [
    "Example",
    "ExampleSource",
    "Place",
    "Stream",
    "TokenizedShard",
]

Example = Mapping[str, Any]
ExampleSource = Iterable[Example] | Callable[[], Iterable[Example]]


class Place(NamedTuple):
    """A place between two examples of the source, or between two pieces of one."""

    num_read: int = 0  # examples of the source before it, those of other shards included
    start: int = 0  # tokens of the next example before it
    source: Any = None  # the source's own state after num_read examples, if it has one


class TokenizedShard(NamedTuple):
    """A source that is read by position."""

    dataset: TokenizedDataset
    positions: range  # that this rank and worker reads


class Stream:
    """This rank's and worker's examples of a source, from any place on."""

    def __init__(
        self,
        source: ExampleSource,
        rank: int,
        world_size: int,
        *,
        presharded: bool,
        collator: PackedCollator[Any],
    ) -> None:
        _check_source(source)
        self.collator = collator
        self._source, self._rank, self._world_size = source, rank, world_size
        self._presharded = presharded
        self._was_moved = False  # a datasets stream keeps the state it was given for every pass
        self._check_split_once(source)

    @property
    def source(self) -> ExampleSource:
        """As it was given."""
        return self._source

    @property
    def node(self) -> tuple[int, int]:
        """Rank and world size, of the source where it is split already."""
        return _node_of(self._source) or (self._rank, self._world_size)

    @property
    def epoch(self) -> int | None:
        """The source's epoch, which its order may depend on, if it has one."""
        epoch = getattr(self._source, "epoch", None)
        return epoch if type(epoch) is int else None

    def read(self, place: Place) -> TokenizedShard | Iterator[tuple[Example, int, Place]]:
        """What comes after ``place.num_read`` examples.

        Rows of a dataset if the source has columns, otherwise tuples: an example, its position in
        the source, and the place after it.
        """
        source = self._source
        if not _is_iterable(source):
            assert callable(source)
            source = source()
            if not _is_iterable(source):
                raise TypeError(
                    f"the callable source returned a {type(source).__name__}; it must return an "
                    "iterable of examples"
                )
            self._check_split_once(source)
        index, num_shards = self._shard(source)
        if place.source is None and (dataset := self._as_rows(source)) is not None:
            _check_num_read(place, min(len(dataset), place.num_read))
            first = place.num_read + (index - place.num_read) % num_shards
            return TokenizedShard(dataset, range(first, len(dataset), num_shards))
        return self._examples(source, place, index, num_shards)

    def _as_rows(self, source: Any) -> TokenizedDataset | None:
        """The source as rows, if these are what iterating over it gives.

        Not a ``datasets.IterableDataset``, whose state is exact only between the tables that it
        reads (docs/design_log.md), nor a ``datasets.Dataset`` with declared fields. With images
        every example is read, since its length does not say how large they are.
        """
        if self.collator.vision is not None:
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

    def _examples(
        self, source: Any, place: Place, index: int, num_shards: int
    ) -> Iterator[tuple[Example, int, Place]]:
        has_state = _has_exact_state(source)
        for position, example in enumerate(self._open(source, place, has_state), place.num_read):
            if position % num_shards == index:
                state = source.state_dict() if has_state else None
                yield example, position, Place(position + 1, 0, state)

    def _open(self, source: Any, place: Place, has_state: bool) -> Iterator[Example]:
        if place.source is not None:
            if not has_state:
                raise StateError(
                    "the state holds a state of the source, but this source takes none (it has no "
                    "load_state_dict, or a step that is not known to be restored exactly, such as "
                    "a shuffle buffer); resume with the source, and the version of datasets, of "
                    "the run that saved it"
                )
            source.load_state_dict(copy.deepcopy(place.source))
            self._was_moved = True
            return iter(source)
        if self._was_moved and _is_datasets_stream(source):
            source.load_state_dict(None)
            self._was_moved = False
        examples = iter(source)
        _check_num_read(place, sum(1 for _ in islice(examples, place.num_read)))
        return examples

    def _shard(self, source: Any) -> tuple[int, int]:
        """This process reads the examples at ``index`` modulo ``num_shards``."""
        if self._presharded:
            return 0, 1
        index, num_shards = (0, 1) if _node_of(source) else (self._rank, self._world_size)
        worker = get_worker_info()
        if worker is None or _is_datasets_stream(source):  # which looks at the worker itself
            return index, num_shards
        return index * worker.num_workers + worker.id, num_shards * worker.num_workers

    def _check_split_once(self, source: Any) -> None:
        node = _node_of(source)
        if node is not None and self._world_size > 1:
            raise ValueError(
                f"source is split by node already (rank {node[0]} of {node[1]}) and would be split "
                f"again by world_size={self._world_size}; leave rank and world_size out"
            )


def _check_source(source: Any) -> None:
    if isinstance(source, Iterator):
        raise TypeError(
            f"source is a {type(source).__name__}, an iterator that can be read only once; pass "
            "what it was made of, or a callable that makes it"
        )
    if not (_is_iterable(source) or callable(source)):
        raise TypeError(
            "source must be an iterable of examples or a callable that makes one, got "
            f"{type(source).__name__}"
        )


def _check_num_read(place: Place, num_skipped: int) -> None:
    if num_skipped < place.num_read:
        raise StateError(
            f"the state is after example {place.num_read} of the stream, which has "
            f"{num_skipped}; the source is not what it was when the state was saved"
        )


def _is_iterable(source: Any) -> bool:
    return hasattr(source, "__iter__") or hasattr(source, "__getitem__")


def _is_datasets_stream(source: Any) -> bool:
    return is_a(source, "datasets", "IterableDataset")


def _node_of(source: Any) -> tuple[int, int] | None:
    """Rank and world size of a ``datasets`` stream made by ``split_dataset_by_node``."""
    node = source._distributed if _is_datasets_stream(source) else None
    return None if node is None else (node.rank, node.world_size)


# The steps of a datasets stream that their state restores exactly: those that read data, and those
# that take it from other steps. Any other step, such as a shuffle buffer or one that a newer
# datasets has renamed, is not trusted: a resumed pass reads and skips.
_EXACT_BASES = {
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
}
_EXACT_STEPS = {
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "StepExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "SkipExamplesIterable",
    "RepeatExamplesIterable",
    "TakeExamplesIterable",
    "FormattedExamplesIterable",
    "TypedExamplesIterable",
}


def _has_exact_state(source: Any) -> bool:
    """Whether its state restores it exactly; of datasets, only if all steps are known to."""
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return False
    return not _is_datasets_stream(source) or _is_exact(getattr(source, "_ex_iterable", None))


def _is_exact(node: Any) -> bool:
    """Whether a step of a datasets stream, and all those that it takes data from, are known."""
    kind = type(node).__name__
    if kind in _EXACT_BASES:
        return True
    below = getattr(node, "ex_iterables", None) or [getattr(node, "ex_iterable", None)]
    return kind in _EXACT_STEPS and all(map(_is_exact, below))
