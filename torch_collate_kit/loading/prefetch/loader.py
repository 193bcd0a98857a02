"""A DataLoader that builds the next batch while this one trains, and resumes to the byte."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_collate_kit._checks import checked_bool, checked_int
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.checks import (
    LOADER_VERSION,
    refuse_trainer,
    sealed,
    unsealed,
)
from torch_collate_kit.loading.prefetch.device_copy import device_copy
from torch_collate_kit.loading.prefetch.reader import END, Reader, Run, Taken
from torch_collate_kit.loading.prefetch.resumable_loaders import LoaderPosition, resumable_loader
from torch_collate_kit.loading.prefetch.skipped_examples import SkippedExample, SkippedExamples
from torch_collate_kit.loading.prefetch.timeline import StepTimes, Timeline, draw_timeline
from torch_collate_kit.loading.prefetch.watchdog import checked_seconds
from torch_collate_kit.loading.skipping import OnError, SkipPolicy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OnEpoch: TypeAlias = Callable[[int], object] | None


class PrefetchLoader:
    """The batches of a DataLoader, the next one built on a thread while the consumer trains.

    Args:
        loader: a DataLoader with a resumable ``batch_sampler``, such as a PrefetchingSampler, or of
            a PackedIterableDataset (``batch_size=None``). Nothing else may iterate it.
        prefetch: False builds each batch when it is asked for, in the consumer's thread: the same
            batches.
        device: the device of the batches. For CUDA they are pinned, and copied on a separate
            stream. None and "cpu" leave them in place.
        warn_after: a wait for a batch that takes longer than so many seconds is logged once: the
            step, the worker, the stack of the thread that collates. None: never.
        on_error: "skip" leaves an example out of its batch that cannot be read or collated, and
            logs it; at most ``max_skipped`` of them, and ``max_skipped_in_a_row`` one after the
            other. "raise" raises at its step.

    The loader has one position. ``for batch in loader`` yields the rest of the epoch, ``steps(n)``
    the next n batches across epochs. A loop that is left early keeps the position after the last
    batch received. ``wait_seconds`` is how long the consumer has waited for batches so far, and
    ``timeline`` has the times of the last 1,000 steps, ``skipped`` what was left out.
    What ends a loop, forks, devices and states: docs/loading.md.

    Raises:
        TypeError: a loader that cannot be resumed.
        ValueError: a sampler for another number of examples than the dataset has.
        DataError: more examples fail than may be skipped, or all of a batch.
        StateError: a loop that is over, a loader that is closed or in use by another process.

    >>> from torch.utils.data import DataLoader
    >>> from torch_collate_kit import PrefetchingSampler
    >>> sampler = PrefetchingSampler(5, batch_size=2, shuffle=False)
    >>> with PrefetchLoader(DataLoader(range(5), batch_sampler=sampler)) as loader:
    ...     [batch.tolist() for batch in loader.steps(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    def __init__(
        self,
        loader: Any,
        *,
        prefetch: bool = True,
        device: torch.device | str | int | None = None,
        warn_after: float | None = 60.0,
        on_error: OnError = "raise",
        max_skipped: int = 100,
        max_skipped_in_a_row: int = 10,
    ) -> None:
        self.wait_seconds = 0.0
        self._timeline = Timeline()
        policy = SkipPolicy(on_error, max_skipped, max_skipped_in_a_row)
        self._loader = resumable_loader(loader, skips=policy.skips)
        self.on_error, self.max_skipped = on_error, max_skipped
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.prefetch = checked_bool("prefetch", prefetch)
        self.warn_after = checked_seconds("warn_after", warn_after)
        copy = device_copy(device)
        self.device = None if copy is None else str(copy.device)
        skipped = SkippedExamples(policy)
        self._reader = Reader(self._loader, copy, self.prefetch, self.warn_after, skipped)
        self._loop: object = None  # the loop that may draw from it
        self._drawing = 0  # the thread that draws a batch now
        self._interrupt: BaseException | None = None  # of the thread, to be raised at the next call
        self._is_closed = False

    def __repr__(self) -> str:
        position = self._reader.answer(lambda position, _: position)
        where = "closed" if self._is_closed else f"epoch {position.epoch}, step {position.step}"
        call = call_repr(self, self._loader.described, **changed_settings(self))
        return f"{call} [{where}]"

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, or of the last one while its loop still runs."""
        return self._reader.answer(lambda position, _: position.epoch)

    @property
    def timeline(self) -> list[StepTimes]:
        """The times of the last 1,000 batches, oldest first; a new list. No part of the state.

        >>> from torch.utils.data import DataLoader
        >>> from torch_collate_kit import PrefetchingSampler
        >>> data = DataLoader(range(4), batch_sampler=PrefetchingSampler(4, batch_size=2))
        >>> with PrefetchLoader(data, prefetch=False) as loader:
        ...     batches = list(loader)
        >>> [(step.epoch, step.step, step.was_ahead) for step in loader.timeline]
        [(0, 0, False), (0, 1, False)]
        """
        return self._timeline.steps()

    def plot_timeline(self, *, num_steps: int = 30, ax: Axes | None = None) -> Axes:
        """Draw when the last ``num_steps`` batches were collated, copied, waited for, trained on.

        The title says how much of building them was hidden: the time that it took, less the time
        that the training loop waited. Draws on ``ax``, or on axes of a new figure, and returns
        them; nothing is shown. Needs matplotlib. ValueError if no batch was read yet.
        """
        return draw_timeline(self.timeline, num_steps, ax)

    @property
    def skipped(self) -> list[SkippedExample]:
        """Examples left out of the batches received so far, oldest first; a new list.

        Each time counts that an example is left out. With a sampler the list goes on after a
        resume; a stream, which leaves examples out itself, keeps only their number in its state.

        >>> from torch.utils.data import DataLoader
        >>> from torch_collate_kit import PrefetchingSampler
        >>> sampler = PrefetchingSampler(4, batch_size=2, shuffle=False)
        >>> data = DataLoader([1, 2, 0, 5], batch_sampler=sampler, collate_fn=lambda x: 10 // x[0])
        >>> with PrefetchLoader(data, on_error="skip") as loader:
        ...     list(loader), loader.skipped[0][:3]
        ([10, 2], (0, 1, 2))
        """
        return list(self._reader.stand.skipped.examples)

    def __len__(self) -> int:
        """Return the number of steps in the current epoch, counted from its step 0."""
        if (num_steps := self._reader.num_steps()) is None:
            raise TypeError("the length of an epoch of this loader is known only at its end")
        return num_steps

    def __iter__(self) -> Iterator[Any]:
        return self._batches(None, None)

    def steps(self, num_steps: int, on_epoch: _OnEpoch = None) -> Iterator[Any]:
        """Iterate over the next ``num_steps`` batches, across epochs.

        ``on_epoch(epoch)`` is called at the first step of each epoch, before any of its batches is
        built. Nothing reads the data then, so it may change them. Persistent workers keep their
        copy of the dataset and do not see the change. StateError at an epoch without a batch.
        """
        return self._batches(checked_int("num_steps", num_steps, minimum=0), on_epoch)

    def _batches(self, num_steps: int | None, on_epoch: _OnEpoch) -> Iterator[Any]:
        """Yield the next batches; None: those left in the epoch."""
        self._check_open()
        self._check_one_consumer()
        self._raise_interrupt()
        self._loop = loop = object()
        self._timeline.trained()  # on the last batch of an older loop
        reader = self._reader
        reader.stop_if_over()
        num_taken = 0
        try:
            while num_steps is None or num_taken < num_steps:
                run, (batch, position, stand, _) = self._draw(loop, on_epoch)
                if batch is not END:
                    num_taken += 1
                    reader.stand = stand  # received: the two are one moment for a signal handler
                    yield batch
                    del batch  # it would be held beside the next
                    self._check_loop(loop)
                    self._timeline.trained()
                    if reader.run is run or not run.is_over(position):  # else reshuffle() ended it
                        continue
                else:
                    reader.stop()
                if num_steps is None:
                    return
                if not position.step and not self._loader.carries_over:
                    raise StateError(
                        f"epoch {position.epoch} has no batch here, so steps() would not end: the "
                        "share of this rank is empty; give each rank examples, files or shards"
                    )
        except BaseException as error:  # a break too: GeneratorExit
            self._leave(loop, error)
            raise

    def _draw(self, loop: object, on_epoch: _OnEpoch) -> tuple[Run, Taken]:
        """Return the run, and its next batch or END."""
        self._check_one_consumer()
        self._drawing = threading.get_ident()
        try:
            run = self._reader.run or self._reader.begin(on_epoch)
            self._check_loop(loop)
            began = time.perf_counter()
            try:
                taken = self._reader.take(run)
            finally:
                self.wait_seconds += (ended := time.perf_counter()) - began
            self._check_loop(loop)
        finally:
            self._drawing = 0
        if taken.batch is not END:
            epoch, step, _ = taken.position
            self._timeline.received(epoch, step - 1, *taken.times, began, ended)
        return run, taken

    def _leave(self, loop: object, error: BaseException) -> None:
        if self._loop is loop:
            self._timeline.trained()
            try:
                self._reader.leave()
            except BaseException as interrupt:  # there is nobody to raise it to
                self._interrupt = interrupt
        elif isinstance(error, Exception):  # of what another thread has done meanwhile
            if self._is_closed:
                self.close()  # it may have begun to read after the first close
            self._check_loop(loop)

    def reshuffle(self) -> None:
        """Put the rest of the epoch in a new order; drop what is in flight.

        A loop that is running continues in the new order, and the data may be changed until it asks
        for the next batch. After an epoch's last batch the next epoch changes. Resuming is exact:
        the order is a function of seed, epoch and steps.
        """
        self._move(self._loader.reshuffle)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of ``epoch``; drop what is in flight. A Trainer is refused."""
        refuse_trainer(sys._getframe(1).f_locals.get("self"))
        self._move(partial(self._loader.set_epoch, epoch))
        self._loop = None

    def _move(self, move: Callable[[], None]) -> None:
        self._check_open()
        self._reader.stop()
        self._raise_interrupt()
        with self._reader.moving():
            move()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches received so far, and the examples skipped in them.

        Small JSON. Any thread may ask, and a signal handler, at any moment.
        """

        def state(position: LoaderPosition, skipped: SkippedExamples) -> dict[str, Any]:
            at = self._loader.state_at(position)
            counts = skipped.state() if self._loader.has_sampler else {}  # a stream has its own
            return sealed({"version": LOADER_VERSION, **at, **counts})

        return self._reader.answer(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a saved position.

        Another ``max_tokens`` of the collator is logged: the same examples are in other rows.
        Around a stream it is refused. StateError for another version, data, batch size or kind of
        loader; then nothing has changed.
        """
        self._check_open()
        state = unsealed(state, LOADER_VERSION)
        skipped = self._reader.stand.skipped.after(state)
        self._reader.settled(None)
        with self._reader.moving(skipped):
            self._loader.load_state_dict(state)
            self._reader.stop(move_back=False)
        self._loop = None
        self._raise_interrupt()

    def close(self) -> None:
        """Wait a second for what is in flight, then end thread and workers. May be called again.

        A batch that takes longer is abandoned, with a warning: its workers are killed, and a thread
        that does not return ends with the process.
        """
        self._is_closed, self._loop = True, None
        if self._reader.is_elsewhere():
            return
        self._timeline.trained()
        try:
            self._reader.close()
        finally:
            self._loader.close()
        self._raise_interrupt()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("the loader is closed; make a new PrefetchLoader")
        if self._reader.is_elsewhere():
            raise StateError(
                f"the loader is read in process {self._reader.pid}, and this is process "
                f"{os.getpid()}, a fork without its thread and workers; make a new PrefetchLoader "
                "here"
            )

    def _check_loop(self, loop: object) -> None:
        self._check_open()
        if self._loop is not loop:
            raise StateError(
                "this loop over the loader is over: set_epoch, load_state_dict or a newer loop has "
                "taken its place; begin a new one (a loader has one position and one consumer)"
            )

    def _check_one_consumer(self) -> None:
        if self._drawing not in (0, threading.get_ident()):
            raise StateError(
                "another thread is waiting for a batch of this loader, which has one position and "
                "one consumer; give each thread a loader of its own, or hand batches on"
            )

    def _raise_interrupt(self) -> None:
        error, self._interrupt = self._interrupt, None
        if error is not None:
            raise error
