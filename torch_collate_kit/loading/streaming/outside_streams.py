"""Streams that are not ours: those of ``datasets``, and sources that look at the DataLoader worker.

A stream of ``datasets`` divides itself over DataLoader workers, and one of its examples iterables
has one position. A canonical shard needs neither: it is read as outside a worker, and from an
object of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data._utils import worker as torch_worker

from torch_collate_kit.reading.source import is_a

_END: Any = object()


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

    alone = _alone(stream)
    part = split_dataset_by_node(alone, shard, num_shards)
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
    if kind in _EXACT_BASES:
        return True
    below = getattr(node, "ex_iterables", None) or [getattr(node, "ex_iterable", None)]
    return kind in _EXACT_STEPS and all(map(_is_exact, below))
