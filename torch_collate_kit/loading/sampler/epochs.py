"""Epochs of batches as a function of (seed, epoch): positions, states, and lineage."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import call_repr
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.checks import (
    Indices,
    checked_batch_size,
    checked_rank,
    checked_shuffle,
    checked_word,
    damaged_state,
    differences,
    is_count,
    is_same,
    state_int,
)

__all__ = ["NEW_RUN", "EpochSampler", "Plan"]

_VERSION = 3
Plan: TypeAlias = Callable[[int], Indices]  # a step's global batch
NEW_RUN = "build the sampler with the arguments of the saved run, or start without the state"
_logger = logging.getLogger("torch_collate_kit.loading")


class StepIterator(Iterator[Any]):
    """Iterator over a rank's batches in one epoch; ``drawn`` once a step has been asked for.

    Its state is its position, which torchdata's StatefulDataLoader saves: the sampler's is that of
    the next epoch.
    """

    def __init__(self, sampler: EpochSampler, plan: Plan, epoch: int, step: int) -> None:
        self.sampler, self.plan, self.epoch, self.step = sampler, plan, epoch, step
        self.drawn = False
        self._num_steps = sampler._num_steps(epoch)

    def __next__(self) -> Any:
        self.drawn = True
        if self.step >= self._num_steps:
            raise StopIteration
        batch = self.plan(self.step)
        self.step += 1
        return self.sampler._pick(batch)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Becomes the iterator that the sampler yields after loading ``state``."""
        self.sampler.load_state_dict(state)
        vars(self).update(vars(iter(self.sampler)))
        self.sampler._latest = self


class EpochSampler(ABC):
    """The part of a resumable batch sampler that does not depend on what is in a batch."""

    def __init__(
        self, batch_size: int, *, seed: int, shuffle: bool | str, dp_rank: int, dp_size: int
    ) -> None:
        self._dp_size = checked_int("dp_size", dp_size)
        self._dp_rank = checked_rank(dp_rank, self._dp_size)
        self._num_global = checked_batch_size(batch_size, self._least_examples)
        self._seed = checked_word("seed", seed)
        self._shuffle = checked_shuffle(shuffle)
        self._epoch, self._step = 0, 0  # of the next iter()
        self._latest: StepIterator | None = None

    @abstractmethod
    def _num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch, from its step 0."""

    @abstractmethod
    def _plan(self, epoch: int, step: int) -> Plan:
        """Return the global batches of an epoch from ``step`` on, fixed from now on."""

    @abstractmethod
    def _steps_of(self, example: int, epoch: int) -> list[int]:
        """Return the steps of an epoch whose batches hold an example, ascending."""

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """The length of the dataset that the indices are of."""

    def _pick(self, batch: Indices) -> Any:
        """Return this rank's part of a global batch, in the order in which it is read."""
        each, longer = divmod(len(batch), self._dp_size)  # the first ranks may have one more
        start = self._dp_rank * each + min(self._dp_rank, longer)
        mine: list[int] = batch[start : start + each + (self._dp_rank < longer)].tolist()
        return mine

    @property
    def _least_examples(self) -> int:
        """Smallest number of examples in a batch."""
        return self._dp_size

    def _layout(self) -> dict[str, Any]:
        """Return the settings that a resumed run may have otherwise, as JSON."""
        return {"dp_size": self._dp_size}

    def _check_layout(self, layout: dict[str, Any]) -> None:
        """Raise StateError if no run can have had the layout of a state."""
        if not is_count(layout["dp_size"]) or not layout["dp_size"]:
            raise damaged_state(f"layout={layout!r}")

    def _fits(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings that a state must share, for as many examples as ``like`` has."""
        return {"batch_size": self._num_global, "seed": self._seed, "shuffle": self._shuffle}

    @abstractmethod
    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state holds besides its position and settings."""

    @abstractmethod
    def _load_extra(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Restore the ``_extra`` of a state. Raises StateError if it is wrong."""

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's keywords that are not the default."""
        shuffle = {} if self._shuffle is True else {"shuffle": self._shuffle}
        seed = {"seed": self._seed} if self._seed else {}
        return {"batch_size": self._num_global, **shuffle, **seed}

    def _rank_settings(self) -> dict[str, int]:
        if self._dp_size == 1:
            return {}
        return {"dp_rank": self._dp_rank, "dp_size": self._dp_size}

    def _shown(self, positional: str, **settings: Any) -> str:
        """Return the repr: the constructor call, and the position of the next ``iter()``."""
        epoch, step = self._position()
        settings = {**self._settings(), **settings, **self._rank_settings()}
        call = call_repr(self, positional, **settings)
        return f"{call} [next iter(): epoch {epoch}, step {step}]"

    @property
    def epoch(self) -> int:
        """The epoch after the one begun last: what the next ``iter()`` yields."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of steps of epoch ``self.epoch``, counted from its step 0."""
        return self._num_steps(self._epoch)

    def __iter__(self) -> StepIterator:
        """Begin the next epoch, from its start step.

        An iterator from which nothing was drawn does not count: a DataLoader with workers calls
        ``iter()`` twice for its first epoch.
        """
        epoch, step = self._position()
        latest = self._latest
        plan = self._plan(epoch, step) if latest is None or latest.drawn else latest.plan
        self._latest = StepIterator(self, plan, epoch, step)
        self._epoch, self._step = epoch + 1, 0
        return self._latest

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Let the next ``iter()`` yield ``epoch`` from ``step`` on.

        A ``step`` equal to the epoch's number of steps is the start of the next epoch.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        self._jump(*self._checked_position(epoch, step))

    def examples(self, epoch: int, step: int) -> Indices:
        """Calculate the examples of any step, past or future.

        Returns:
            int64 [N], a copy: the indices of the global batch in its order.

        Raises:
            TypeError, ValueError: there is no such step.

        >>> from torch_collate_kit.loading import PrefetchingSampler
        >>> sampler = PrefetchingSampler(10, batch_size=4, shuffle=False)
        >>> sampler.examples(7, 1).tolist()
        [4, 5, 6, 7]
        """
        epoch, step = checked_word("epoch", epoch), checked_int("step", step, minimum=0)
        if step >= (num_steps := self._num_steps(epoch)):
            raise ValueError(
                f"step must be below {num_steps}, the steps of epoch {epoch}; got {step}"
            )
        return self._plan(epoch, step)(step).copy()

    def when(self, example: int, epoch: int | None = None) -> list[tuple[int, int]]:
        """Return the steps of an epoch that train on an example, as a list of (epoch, step).

        Mostly one; none if the epoch leaves it out. ``epoch`` is that of the next batch if it is
        not given.

        Raises:
            TypeError, ValueError: there is no such example or epoch.

        >>> from torch_collate_kit.loading import PrefetchingSampler
        >>> sampler = PrefetchingSampler(10, batch_size=4, seed=1)
        >>> [sampler.examples(*at).tolist().count(7) for at in sampler.when(7, epoch=2)]
        [1]
        """
        example = checked_int("example", example, minimum=0)
        if example >= self.num_examples:
            raise ValueError(
                f"example {example} does not exist: the {self.num_examples} examples have indices "
                f"0 to {self.num_examples - 1}"
            )
        epoch = self._position()[0] if epoch is None else checked_word("epoch", epoch)
        return [(epoch, step) for step in self._steps_of(example, epoch)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next ``iter()``; a consumer saves :meth:`state_at` instead."""
        return self._state_at(*self._position())  # does not ask for the length of the next epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps of ``epoch``, as small JSON.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        epoch, step = self._checked_position(epoch, step)
        return self._state_at(epoch, step)

    def _state_at(self, epoch: int, step: int) -> dict[str, Any]:
        where = {"version": _VERSION, "epoch": epoch, "step": step}
        return {**where, **self._extra(epoch, step), **self._fits(), "layout": self._layout()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where the state was saved, on any number of ranks.

        Every step has the examples that it would have had. How they are divided over ranks and
        packed into rows follows from this sampler's arguments; what differs is logged.

        Raises:
            StateError: the state is of another sampler, or no state; nothing has been changed.
        """
        other = copy.copy(self)
        before = other._load(state)
        vars(self).update(vars(other))
        now = self._layout().items()
        changed = [f"{k} {before[k]} -> {v}" for k, v in now if not is_same(v, before[k])]
        if changed:
            level = logging.WARNING if self._replans(before) else logging.INFO
            kept = "the same examples in each step" + (", other rows" if level > 20 else "")
            message = "resumed at epoch %d step %d with another layout (%s): %s"
            _logger.log(level, message, *self._position(), ", ".join(changed), kept)

    def _replans(self, before: Mapping[str, Any]) -> bool:
        """Return whether rows differ from those of another layout."""
        return False

    def _load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore a state that fits, and return the layout of its run."""
        if not isinstance(state, Mapping):
            raise StateError(
                f"a state must be a mapping, got {type(state).__name__}; "
                "pass what state_dict() gave"
            )
        if not is_same(state.get("version"), _VERSION):
            raise StateError(
                f"state has version {state.get('version')!r}, this release reads version "
                f"{_VERSION}; load it with the release that saved it"
            )
        self._check_keys(state)
        epoch, step = (state_int(key, state[key]) for key in ("epoch", "step"))
        self._check_fits(state, epoch, step)
        num_steps = self._num_steps(epoch)
        if step and step >= num_steps:
            raise StateError(
                f"state is of step {step}, but epoch {epoch} has {num_steps} steps; {NEW_RUN}"
            )
        self._load_extra(state, epoch, step)
        layout = state["layout"]
        if not isinstance(layout, dict) or layout.keys() != self._layout().keys():
            raise damaged_state(f"layout={layout!r}")
        self._check_layout(layout)
        self._jump(epoch, step)
        return layout

    def _check_keys(self, state: Mapping[str, Any]) -> None:
        keys = {"version", "epoch", "step", "layout", *self._extra(0, 0), *self._fits()}
        if state.keys() != keys:
            missing, unknown = sorted(keys - state.keys()), sorted(map(str, state.keys() - keys))
            raise StateError(
                f"state of another kind: keys missing {missing}, unknown {unknown}; "
                f"pass what state_dict() of a {type(self).__name__} gave, in the same version of "
                "the library"
            )

    def _check_fits(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Check that a state of this position is of the same run."""
        fits = self._fits(like=state)
        state = {key: state[key] for key in fits}  # in the same order
        was, now = differences(state, fits), differences(fits, state)
        if was:
            raise StateError(f"state is of {was}, this sampler has {now}; {NEW_RUN}")

    def _position(self) -> tuple[int, int]:
        """Return the epoch and step that the next ``iter()`` begins with."""
        if self._latest is not None and not self._latest.drawn:
            return self._latest.epoch, self._latest.step
        return self._epoch, self._step

    def _jump(self, epoch: int, step: int) -> None:
        """Make a checked position the next one."""
        self._epoch, self._step, self._latest = epoch, step, None

    def _checked_position(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the position as ints; the end of an epoch is the start of the next one."""
        epoch = checked_word("epoch", epoch)
        step = checked_int("step", step, minimum=0)
        num_steps = self._num_steps(epoch)
        if step > num_steps:
            raise ValueError(
                f"step must be at most {num_steps}, the number of steps of epoch {epoch}; "
                f"got {step}"
            )
        return (epoch + 1, 0) if step and step == num_steps else (epoch, step)
