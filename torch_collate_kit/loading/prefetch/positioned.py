"""A DataLoader that knows its position: what its two kinds have in common."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.workers import PATIENCE, end_workers

__all__ = ["LoaderPosition", "PositionedLoader", "changed_copy", "part_of_state"]


class LoaderPosition(NamedTuple):
    """The position after ``step`` batches of ``epoch``."""

    epoch: int
    step: int
    mark: Any = None
    """All else that the loader must know to go on from there."""


class PositionedLoader:
    """A loader and its position. While an epoch is being read, the reader counts the steps.

    ``begin()`` returns ``num_steps()``, and the batches of this epoch from the position on.
    ``load_state_dict`` leaves an iterator that was made before as it is.
    """

    has_sampler = False
    """Whether a sampler says which examples a step has. Then the loader names epoch and step, and
    counts what is left out; else a stream does."""
    is_closed = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Any = None  # of the epoch that is being read

    def skip_failing_examples(self) -> None:
        """Make batches come as ``Collated``, without the examples that fail."""
        raise TypeError(
            "on_error='skip' of a PrefetchLoader leaves out the examples that a sampler names, and "
            "a stream has no sampler; pass it to the stream: PackedIterableDataset(..., "
            "on_error='skip')"
        )

    def num_steps(self) -> int | None:
        """Return the number of steps in the epoch; None where only its end will tell."""
        return None

    def pinned(self, position: LoaderPosition | None) -> LoaderPosition | None:
        """Return what stays true of the position while the loader is moved.

        None, that the loader tells it, stays true where it moves by a single assignment.
        """
        return position

    def check(self, epoch: int) -> None:
        """Raise StateError if anything but the reader has moved the position meanwhile."""

    def mark(self) -> Any:
        """Return the mark of the position after the last batch drawn."""

    def end_epoch(self, epoch: int) -> None:
        """Move to the beginning of the epoch after the one that was read."""

    def _begun(self) -> Iterator[Any]:
        """Return the DataLoader's iterator, whose workers end in ``end()``, not at the last batch.

        torch would end them in the thread that draws it, and raise the death of one of them in the
        main thread: in the middle of a training step.
        """
        self._batches = iter(self._loader)
        if hasattr(self._batches, "_persistent_workers"):
            self._batches._persistent_workers = True
        return self._batches

    def end(self, seconds: float = PATIENCE) -> None:
        """End the workers of the last ``begin()``; kill those that need longer than ``seconds``.

        Persistent ones stay.
        """
        batches, self._batches = self._batches, None
        if not self._loader.persistent_workers:
            end_workers(batches, seconds)

    def close(self, seconds: float = PATIENCE) -> None:
        """End the persistent workers, too. The loader is not read any more."""
        end_workers(vars(self._loader)["_iterator"], seconds)
        vars(self._loader).update(_iterator=None)

    def has_workers(self) -> bool:
        """Return whether worker processes wait for the next epoch."""
        return bool(self._loader.persistent_workers and self._loader._iterator is not None)


def changed_copy(loader: Any, **parts: Any) -> Any:
    """Copy a DataLoader, with other parts. The caller's keeps its persistent workers."""
    changed = copy.copy(loader)
    vars(changed).update(parts, _iterator=None)  # not by setattr: a DataLoader forbids it
    return changed


def part_of_state(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what the state has under the name of the thing that knows the position."""
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise StateError(
            f"the state has {sorted(map(str, state))}, no {name}; it is of another kind of "
            "loader: wrap a DataLoader of the kind that saved it"
        )
    return part
