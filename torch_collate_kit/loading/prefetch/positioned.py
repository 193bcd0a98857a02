"""A loader that knows its position: what its kinds have in common."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_collate_kit._reprs import KindAndSize, call_repr
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.waits import PATIENCE, is_collecting

__all__ = ["LoaderPosition", "PositionedLoader", "changed_copy", "part_of_state"]


class LoaderPosition(NamedTuple):
    """After ``step`` batches of ``epoch``."""

    epoch: int
    step: int
    mark: Any = None
    """What else the loader must know to go on from there."""


class PositionedLoader:
    """A loader and its position. While an epoch is being read, the reader counts the steps.

    ``begin()`` returns ``num_steps()``, and the batches of this epoch from the position on.
    """

    has_sampler = False
    """Whether a sampler says which examples a step has. Then they follow a state into other rows,
    and the loader names epoch and step; those that a stream has given to a batch stay."""
    is_closed = False
    plans_rows = False
    """Whether a state says into which rows, so that the sampler tells when these are others."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Any = None  # of the epoch that is being read

    def described(self) -> str:
        """The loader in a few words."""
        return call_repr(self._loader, repr(KindAndSize(self._loader.dataset)))

    def skip_failing_examples(self) -> None:
        """From now on batches come as ``Collated``, without the examples that fail."""
        raise TypeError(
            f"on_error='skip' leaves out the examples that a sampler names, and this "
            f"{type(self._loader).__name__} has no such sampler; a stream takes it itself: "
            "PackedIterableDataset(..., on_error='skip')"
        )

    def num_steps(self) -> int | None:
        """Of this epoch, from its step 0 on; None if only its end will tell."""
        return None

    def pinned(self, position: LoaderPosition | None) -> LoaderPosition | None:
        """Return what stays true of the position while the loader is moved.

        None, that the loader tells it, stays true where it moves by a single assignment.
        """
        return position

    def check(self, epoch: int) -> None:
        """StateError if something other than the reader has moved the position meanwhile."""

    def mark(self) -> Any:
        """What ``move_to`` needs besides epoch and step; called after each batch drawn."""

    def end_epoch(self, epoch: int) -> None:
        """The position is now the beginning of the next epoch."""

    def _begun(self) -> Iterator[Any]:
        """The DataLoader's iterator, whose workers end in ``end()``, not at the last batch.

        torch would end them in the thread that draws it, and raise the death of one of them in the
        main thread: in the middle of a training step.
        """
        self._batches = iter(self._loader)
        if hasattr(self._batches, "_persistent_workers"):
            self._batches._persistent_workers = True
        return self._batches

    def end(self, seconds: float = PATIENCE) -> None:
        """End the workers, after the last batch that is drawn from the last ``begin()``.

        Those that have not ended after so many seconds are killed. Persistent ones stay.
        """
        batches, self._batches = self._batches, None
        if not getattr(self._loader, "persistent_workers", False):
            _end_workers(batches, seconds)

    def close(self, seconds: float = PATIENCE) -> None:
        """End the persistent workers, too. The loader is not read any more."""
        _end_workers(vars(self._loader)["_iterator"], seconds)
        vars(self._loader).update(_iterator=None)

    def has_workers(self) -> bool:
        """Whether worker processes wait for the next epoch."""
        persists = getattr(self._loader, "persistent_workers", False)
        return bool(persists) and getattr(self._loader, "_iterator", None) is not None


def changed_copy(loader: Any, **parts: Any) -> Any:
    """A DataLoader with other parts. The caller's stays as it is, persistent workers included."""
    changed = copy.copy(loader)
    vars(changed).update(parts, _iterator=None)  # not by setattr: a DataLoader forbids it
    return changed


def _end_workers(batches: Any, seconds: float) -> None:
    """End the worker processes of a DataLoader's iterator now, as torch asks them to.

    Those that have not ended after so many seconds are killed: torch would wait five seconds for
    each of them, and the garbage collector does so for all, since it closes their queues first.
    With 0 seconds they are not asked, and no lock is taken. A worker that dies while it ends is no
    error: nobody wants its batches, and a spawned one that is still sending often aborts (its
    interpreter ends below the thread that sends). So torch, whose handler of SIGCHLD would raise
    that here, watches them no longer.
    """
    if getattr(batches, "_shutdown", True):  # without workers it has no such attribute
        return
    batches._shutdown = True
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    try:
        if seconds and not is_collecting():
            _ask_workers_to_end(batches, time.monotonic() + seconds)
    finally:
        alive = [worker for worker in batches._workers if worker.is_alive()]
        for worker in alive:
            worker.kill()
        for worker in alive:
            worker.join(PATIENCE)


def _ask_workers_to_end(batches: Any, deadline: float) -> None:
    """Ask the workers to end, in torch's order: first the thread that pins batches.

    It reads the queue of results, in which a worker that ends may leave half a batch.
    """
    ending = list(batches._workers)
    if hasattr(batches, "_pin_memory_thread"):
        batches._pin_memory_thread_done_event.set()
        batches._worker_result_queue.put((None, None))
        ending.insert(0, batches._pin_memory_thread)
    batches._workers_done_event.set()
    for queue in batches._index_queues:
        queue.put(None)
    for one in ending:
        one.join(max(0.0, deadline - time.monotonic()))
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()


def part_of_state(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What ``state`` has under the name of the thing that knows the position."""
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise StateError(
            f"the state has {sorted(map(str, state))}, no {name}; it is of another kind of "
            "loader: wrap a DataLoader of the kind that saved it"
        )
    return part
