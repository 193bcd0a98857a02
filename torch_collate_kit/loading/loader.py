"""A DataLoader that builds the next batch while this one trains, and resumes to the byte."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from torch_collate_kit._checks import call_repr, changed_settings, checked_bool, checked_int
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.checks import LOADER_VERSION, sealed, unsealed
from torch_collate_kit.loading.device_copy import device_copy
from torch_collate_kit.loading.reader import END, Reading
from torch_collate_kit.loading.resumable_loaders import Position, resumable_loader
from torch_collate_kit.loading.skipping import OnError, SkippedExample, SkippedExamples, SkipPolicy
from torch_collate_kit.loading.states import of_all_ranks
from torch_collate_kit.loading.timeline import StepTimes, Timeline, draw_timeline
from torch_collate_kit.loading.watchdog import PATIENCE, checked_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
_OnEpoch: TypeAlias = Callable[[int], object] | None


class PrefetchLoader:
    """The batches of a DataLoader, the next one built on a thread while the consumer trains.

    Args:
        loader: a DataLoader with a resumable ``batch_sampler``, such as a PrefetchingSampler, or of
            a PackedIterableDataset (``batch_size=None``). Nothing else may iterate it.
        prefetch: False builds each batch when it is asked for, in the consumer's thread.
        device: the device of the batches, copied on a separate stream of CUDA. None and "cpu" leave
            them in place.
        warn_after: a wait of more than so many seconds is logged once: the step, the worker, the
            stack of the thread that collates. None: never.
        on_error: "skip" leaves out and logs examples that cannot be read or collated, at most
            ``max_skipped``, and ``max_skipped_in_a_row`` one after the other.

    The loader has one position. ``for batch in loader`` yields the rest of the epoch, ``steps(n)``
    the next n batches across epochs. A loop that is left early keeps the position after the last
    batch received. ``wait_seconds`` is how long the consumer has waited so far.
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
        self._to_device = device_copy(device)
        self.device = None if self._to_device is None else str(self._to_device.device)
        self._at = self._loader.start(SkippedExamples(policy))
        self._pid = 0  # of the process that has the thread or workers; 0: there are none
        self._loop: object = None  # the loop that may draw from it
        self._drawing = 0  # the thread that draws a batch now
        self._interrupt: BaseException | None = None  # of the thread, to be raised at the next call
        self._is_closed = False

    def __repr__(self) -> str:
        position = self._answer(lambda position: position)
        where = "closed" if self._is_closed else f"epoch {position.epoch}, step {position.step}"
        call = call_repr(self, self._loader.described, **changed_settings(self))
        return f"{call} [{where}]"

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, or of the last one while its loop still runs."""
        return self._answer(lambda position: position.epoch)

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
        return list(self._at.skipped.examples)

    def __len__(self) -> int:
        """Return the number of steps in the current epoch, counted from its step 0."""
        return self._loader.num_steps(self._at)

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
        if (reading := self._at.reading) and not reading.has(self._at.step):
            self._stop()
        num_taken = 0
        try:
            while num_steps is None or num_taken < num_steps:
                batch, position = self._draw(loop, on_epoch)
                if batch is not END:
                    num_taken += 1
                    self._at = position  # received: one moment for a signal handler
                    yield batch
                    del batch  # it would be held beside the next
                    self._check_loop(loop)
                    self._timeline.trained()
                    if self._loader.here(self._at).epoch == position.epoch:
                        continue  # else reshuffle() after the last batch ended the epoch
                else:
                    self._stop()
                    if num_taken == 0 < position.step and self._loader.has_sampler:
                        continue  # the loop before had the whole epoch
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

    def _draw(self, loop: object, on_epoch: _OnEpoch) -> tuple[Any, Position]:
        """Return the next batch, or END, and the position after it."""
        self._check_one_consumer()
        self._drawing = threading.get_ident()
        try:
            reading: Reading = self._at.reading or self._begin(on_epoch)
            self._check_loop(loop)
            began = time.perf_counter()
            try:
                batch, position, times = reading.take(self._at, ahead=self.prefetch)
            finally:
                self.wait_seconds += (ended := time.perf_counter()) - began
            self._check_loop(loop)
        finally:
            self._drawing = 0
        if batch is not END:
            self._timeline.received(position.epoch, position.step - 1, *times, began, ended)
        return batch, position

    def _begin(self, on_epoch: _OnEpoch) -> Reading:
        """Begin to read the epoch of the position."""
        loader = self._loader
        self._at = loader.move_to(self._at)  # an interrupt may have come before that
        position = loader.here(self._at)
        if on_epoch is not None and position.step == 0:
            on_epoch(position.epoch)
            position = loader.here(self._at)
        self._at = position
        self._pid = os.getpid()
        reading = Reading(loader, position, self._to_device, self.warn_after)
        self._at = position._replace(reading=reading)
        return reading

    def _stop(self, seconds: float | None = None, *, abandon: bool = False) -> None:
        """Drop the batch in flight, end the reading, and move the loader to the position.

        A batch that takes more than ``seconds`` (None: any time) is kept for the next loop, and the
        reading with it, unless ``abandon``.
        """
        reading: Reading | None = self._at.reading
        if reading is None or self._is_elsewhere():
            return
        is_late = not reading.is_settled(self._at, seconds) and seconds is not None
        at = self._at
        if at.reading is not reading or (is_late and not abandon):
            return
        if is_late:
            self._loader.is_closed = True  # before: then the thread leaves all as it is
        if not reading.is_over:
            self._at = at = self._loader.released(at)
        try:
            self._at = self._loader.end_epoch(at) if reading.is_over else self._loader.move_to(at)
        finally:
            if is_late:
                reading.abandon(at)
            else:
                try:
                    reading.end()
                finally:
                    self._pid = self._pid if self._loader.has_workers() else 0

    def _leave(self, loop: object, error: BaseException) -> None:
        if self._loop is loop:
            self._timeline.trained()
            try:
                self._stop(PATIENCE)
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
        _refuse_trainer(sys._getframe(1).f_locals.get("self"))
        self._move(partial(self._loader.set_epoch, epoch))
        self._loop = None

    def _move(self, move: Callable[[Position], Position]) -> None:
        """Move the loader; while it moves, and if that fails, it has the position before."""
        self._check_open()
        self._stop()
        self._raise_interrupt()
        before = self._at
        self._at = at = self._loader.pinned(self._loader.here(before))
        try:
            self._at = move(at)
        except BaseException:
            self._at = before
            raise

    def _answer(self, ask: Callable[[Position], T]) -> T:
        """Ask about the position after the batches received so far; any thread, at any moment."""
        while True:  # again if the consumer moves the loader meanwhile
            at = self._at
            try:
                answer = ask(self._loader.here(at))
            except Exception:
                if self._is_at(at):
                    raise
            else:
                if self._is_at(at):
                    return answer

    def _is_at(self, at: Position) -> bool:
        """Return whether no more than batches have been received since."""
        now = self._at
        return now is at or (now.reading is not None and now.reading is at.reading)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches received so far, and the examples skipped in them.

        Small JSON. Any thread may ask, and a signal handler, at any moment. Accelerate, which asks
        each rank and saves the answer of the first, gets that of all ranks of a stream.
        """
        state = sealed({"version": LOADER_VERSION, **self._answer(self._loader.state_at)})
        is_saved_once = sys._getframe(1).f_code.co_name == "save_custom_state"  # of Accelerate
        return state if self._loader.has_sampler or not is_saved_once else of_all_ranks(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a saved position.

        Another ``max_tokens`` of the collator is logged: the same examples are in other rows.
        Around a stream it is refused. StateError for another version, data, batch size or kind of
        loader; then nothing has changed.
        """
        self._check_open()
        content = unsealed(state, LOADER_VERSION)
        skipped = self._at.skipped.after(content)
        self._move(partial(self._loader.load_state_dict, content, skipped))
        self._loop = None

    def close(self) -> None:
        """Wait a second for what is in flight, then end thread and workers. May be called again.

        A batch that takes longer is abandoned, with a warning: its workers are killed, and a thread
        that does not return ends with the process.
        """
        self._is_closed, self._loop = True, None
        if self._is_elsewhere():
            return
        self._timeline.trained()
        try:
            self._stop(PATIENCE, abandon=True)
        finally:
            self._loader.close()
        self._raise_interrupt()

    def _is_elsewhere(self) -> bool:
        """Return whether this is a fork: the parent process has the thread or workers."""
        return self._pid not in (0, os.getpid())

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("the loader is closed; make a new PrefetchLoader")
        if self._is_elsewhere():
            raise StateError(
                f"the loader is read in process {self._pid}, and this is process "
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


def _refuse_trainer(caller: Any) -> None:
    """Refuse a ``transformers.Trainer`` that would skip batches when it resumes."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(caller).__mro__]
    if ("transformers.trainer", "Trainer") in kinds and not caller.args.ignore_data_skip:
        raise TypeError(
            "Trainer cannot resume a PrefetchLoader: accelerate.skip_first_batches would make "
            "another DataLoader of it; give Trainer PackedRows(TokenizedDataset(data), collate), "
            "read a stream in a loop of your own, or pass ignore_data_skip=True, with which a "
            "resumed run begins its epoch anew"
        )
