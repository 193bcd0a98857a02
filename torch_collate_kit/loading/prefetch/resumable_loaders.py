"""What PrefetchLoader reads from, and how it knows and keeps its position there."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from torch_collate_kit._reprs import Shown, call_repr
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.skipping import skip_failing_examples
from torch_collate_kit.loading.sampler import PackedBatchSampler
from torch_collate_kit.loading.sampler.arguments import is_same
from torch_collate_kit.loading.sampler.resumable import ResumableSampler

if TYPE_CHECKING:
    from torch_collate_kit.loading.prefetch.stream_loader import StreamLoader


class _Loader:
    """A loader and its position. While an epoch is being read, the reader counts the steps.

    ``begin()`` returns epoch, first step, number of steps from step 0 on (None if only the end
    will tell), and the batches from that step on.
    """

    batches_may_be_named = False
    """Whether an epoch and a step that a batch has in its metadata stay: those of a stream."""

    max_tokens_may_change = False
    """Whether the same examples follow a state whatever rows they are collated into."""
    plans_rows = False
    """Whether a state says into which rows, so that the sampler tells when these are others."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def described(self) -> str:
        """The loader in a few words."""
        return call_repr(self._loader, repr(Shown(self._loader.dataset)))

    def skip_failing_examples(self) -> None:
        """From now on batches come as ``Collated``, without the examples that fail."""
        raise TypeError(
            f"on_error='skip' leaves out the examples that a sampler names, and this "
            f"{type(self._loader).__name__} has no such sampler; a stream takes it itself: "
            "PackedIterableDataset(..., on_error='skip')"
        )

    def check(self, epoch: int) -> None:
        """StateError if something other than the reader has moved the position meanwhile."""

    def mark(self) -> Any:
        """What ``move_to`` needs besides epoch and step; called after each batch drawn."""

    def end_epoch(self, epoch: int) -> None:
        """The position is now the beginning of the next epoch."""

    def end(self, batches: Iterator[Any]) -> None:
        """Called when nobody draws from the batches of a ``begin()`` any more."""
        if not getattr(self._loader, "persistent_workers", False):
            _end_workers(batches)

    def close(self) -> None:
        """Ends the worker processes that wait for the next epoch, unless they are the caller's."""

    def has_workers(self) -> bool:
        """Whether worker processes wait for the next epoch."""
        persists = getattr(self._loader, "persistent_workers", False)
        return bool(persists) and getattr(self._loader, "_iterator", None) is not None


class _Steps:
    """Stands in for the sampler inside a DataLoader: an epoch that was begun before.

    A DataLoader with workers calls ``iter(batch_sampler)`` twice for its first epoch.
    """

    current: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.current


class _SampledLoader(_Loader):
    """A DataLoader whose batch_sampler knows the state of any position."""

    max_tokens_may_change = True

    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        _check_lengths(loader, sampler)
        super().__init__(copy.copy(loader))  # the caller's keeps its sampler
        self._sampler = sampler
        self._dataset = loader.dataset
        self.plans_rows = isinstance(sampler, PackedBatchSampler)
        self._steps = _Steps()
        # not by setattr: a DataLoader forbids it; and no persistent workers in common
        vars(self._loader).update(batch_sampler=self._steps, _iterator=None)

    def position(self) -> tuple[int, int]:
        state = self._sampler.state_dict()
        return state["epoch"], state["step"]

    def num_steps(self) -> int:
        return len(self._sampler)

    def described(self) -> str:
        sampler = repr(self._sampler).partition(" [next iter(): ")[0]  # the reader knows better
        return call_repr(self._loader, repr(Shown(self._dataset)), f"batch_sampler={sampler}")

    def skip_failing_examples(self) -> None:
        skip_failing_examples(self._loader)

    def begin(self) -> tuple[int, int, int | None, Iterator[Any]]:
        epoch, step = self.position()
        if self._sampler.epoch != epoch:  # somebody called iter() and drew nothing
            self._sampler.set_epoch(epoch, step=step)
        num_steps = self.num_steps()
        self._steps.current = iter(self._sampler)
        return epoch, step, num_steps, iter(self._loader)

    def check(self, epoch: int) -> None:
        if self._sampler.epoch != epoch + 1:  # it is, as soon as iter() was called
            raise StateError(
                f"the sampler was moved to epoch {self._sampler.epoch} while the loader read epoch "
                f"{epoch}; call set_epoch, reshuffle and load_state_dict of the loader, which then "
                "drops what is in flight"
            )

    def move_to(self, epoch: int, step: int, mark: Any) -> None:
        self._sampler.load_state_dict(self._sampler.state_at(epoch, step))

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def reshuffle(self) -> None:
        if not hasattr(self._sampler, "reshuffle"):
            raise TypeError(f"a {type(self._sampler).__name__} cannot reshuffle")
        self._sampler.reshuffle()

    def state_at(self, epoch: int, step: int, mark: Any) -> dict[str, Any]:
        return {"sampler": self._sampler.state_at(epoch, step)}

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], stop_reading: Callable[[], None]) -> None:
        """Checks, and calls ``stop_reading`` only when the state fits."""
        if not isinstance(state.get("sampler"), Mapping):
            raise StateError(
                f"the state has {sorted(map(str, state))}, no sampler; it is of another kind of "
                "loader: wrap a DataLoader of the kind that saved it"
            )
        self._sampler.load_state_dict(state["sampler"])  # an iterator made before stays as it is
        stop_reading()

    def close(self) -> None:
        _end_workers(vars(self._loader)["_iterator"])  # the persistent ones
        vars(self._loader).update(_iterator=None)


class _StatefulLoader(_Loader):
    """A loader that has a state of its own, such as torchdata's StatefulDataLoader.

    It runs ahead of the consumer, so its state is kept as a ``mark`` after every batch.
    """

    batches_may_be_named = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._epoch, self._step = 0, 0
        self._mark: dict[str, Any] | None = None  # None: the loader itself is at the position

    def position(self) -> tuple[int, int]:
        return self._epoch, self._step

    def num_steps(self) -> None:
        return None

    def begin(self) -> tuple[int, int, int | None, Iterator[Any]]:
        self._mark = None
        return self._epoch, self._step, None, iter(self._loader)

    def mark(self) -> dict[str, Any]:
        return copy.deepcopy(self._loader.state_dict())

    def end_epoch(self, epoch: int) -> None:
        self._epoch, self._step = epoch + 1, 0

    def move_to(self, epoch: int, step: int, mark: Any) -> None:
        self._loader.load_state_dict(copy.deepcopy(mark))
        self._epoch, self._step, self._mark = epoch, step, mark

    def set_epoch(self, epoch: int) -> None:
        raise TypeError(
            f"set_epoch({epoch}): a {type(self._loader).__name__} goes from epoch to epoch by "
            "itself; use batch_sampler=PrefetchingSampler(...), or load_state_dict"
        )

    def reshuffle(self) -> None:
        raise TypeError(
            f"reshuffle(): the order is the {type(self._loader).__name__}'s own; use "
            "batch_sampler=PrefetchingSampler(...)"
        )

    def state_at(self, epoch: int, step: int, mark: Any) -> dict[str, Any]:
        text, position = _to_text(mark), {"epoch": epoch, "step": step}
        return {"loader": text, "digest": _digest(text), "position": position, "fits": self._fits()}

    def state_dict(self) -> dict[str, Any]:
        mark = self.mark() if self._mark is None else self._mark
        return self.state_at(self._epoch, self._step, mark)

    def load_state_dict(self, state: Mapping[str, Any], stop_reading: Callable[[], None]) -> None:
        """Checks, and calls ``stop_reading`` only when the state fits."""
        missing = {"loader", "digest", "position", "fits"} - state.keys()
        if missing:
            raise StateError(
                f"the state has {sorted(map(str, state))}, no {', '.join(sorted(missing))}: it is "
                "of another kind of loader, or was saved by an older version; wrap a DataLoader of "
                "the kind that saved it, or start without the state"
            )
        if not is_same(state["fits"], self._fits()):
            raise StateError(
                f"the state is of a loader with {state['fits']}, this one has {self._fits()}; "
                "resume with the same dataset and settings"
            )
        position = state["position"]
        if not _is_position(position):
            raise StateError(
                f"the state has position={position!r}, not an epoch and a step; pass what "
                "state_dict() gave"
            )
        text = state["loader"]
        if not isinstance(text, str) or not is_same(state["digest"], _digest(text)):
            raise StateError(
                "the state's loader does not fit its digest: it was changed or damaged after it "
                "was saved; take an older checkpoint, or start without the state"
            )
        mark = _from_text(text)
        stop_reading()  # before: what is in flight asks the loader for its state
        self.move_to(position["epoch"], position["step"], mark)

    def _fits(self) -> dict[str, Any]:
        try:
            length = len(self._loader.dataset)
        except (AttributeError, TypeError):
            length = None
        settings = {k: getattr(self._loader, k, None) for k in ("batch_size", "num_workers")}
        return {"length": length, **settings}


ResumableLoader: TypeAlias = "_SampledLoader | _StatefulLoader | StreamLoader"


def resumable_loader(loader: Any) -> ResumableLoader:
    """Chosen by what the loader has: a resumable sampler, or a state of its own."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and isinstance(sampler, ResumableSampler):
        return _SampledLoader(loader, sampler)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _StatefulLoader(loader)
    from torch_collate_kit.loading.prefetch import stream_loader  # which builds on this file

    if isinstance(loader, DataLoader) and stream_loader.is_stream_of_shards(loader.dataset):
        return stream_loader.StreamLoader(loader)
    raise TypeError(
        f"a {type(loader).__name__} with batch_sampler={type(sampler).__name__} cannot be resumed; "
        "build it with batch_sampler=PrefetchingSampler(data, batch_size), or wrap torchdata's "
        "StatefulDataLoader, which is also the way for iterable datasets"
    )


def _check_lengths(loader: DataLoader[Any], sampler: ResumableSampler) -> None:
    """ValueError if the sampler is for another number of examples: some would never be read."""
    num_examples = getattr(sampler, "num_examples", None)
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else num_examples
    if type(num_examples) is int and num_examples != length:
        raise ValueError(
            f"the sampler was built for {num_examples} examples, the dataset has {length}; build "
            "it with the dataset that is read (one over a part of the data takes order= or torch's "
            "Subset)"
        )


def _end_workers(batches: Any) -> None:
    """Ends the worker processes of a DataLoader's iterator now.

    The garbage collector closes its queues before it stops the workers, and then waits five seconds
    for each of them. A worker that dies while it ends is no error: nobody wants its batches, and a
    spawned one that is still sending often aborts (its interpreter ends below the thread that
    sends), which torch's handler of SIGCHLD then raises here.
    """
    if not hasattr(batches, "_shutdown_workers"):
        return
    try:
        batches._shutdown_workers()
    except RuntimeError as error:
        if not any(f"(pid {worker.pid})" in str(error) for worker in batches._workers):
            raise
        for queue in batches._index_queues:  # where torch was interrupted; it has ended the workers
            queue.cancel_join_thread()
            queue.close()


def _is_position(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"epoch", "step"}:
        return False
    return all(type(number) is int and 0 <= number < 2**32 for number in value.values())


def _to_text(mark: dict[str, Any]) -> str:
    """A loader's state as text: JSON has no tensors and tuples."""
    buffer = io.BytesIO()
    torch.save(mark, buffer)
    text = base64.b64encode(buffer.getvalue()).decode("ascii")
    _from_text(text)  # refuses what cannot be loaded while it can still be fixed
    return text


def _digest(text: str) -> str:
    """Needed because torch.load reads many damaged files, and returns other numbers."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _from_text(text: str) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:  # of any kind, if it is not a file of torch.save
        raise StateError(
            f"the loader's state cannot be read: {error}; a dataset's state_dict may hold numbers, "
            "strings, tensors, and lists, tuples and dicts of these"
        ) from error
