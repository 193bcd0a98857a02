"""Batch samplers that can be stopped and resumed at any step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch_collate_kit._checks import checked_bool, checked_int
from torch_collate_kit._reprs import call_repr
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.arguments import checked_batch_size, checked_rank, is_same

__all__ = ["EpochSampler", "Plan", "ResumableSampler", "checked_word", "state_int"]

_VERSION = 1
_MAX_WORD = 2**32 - 1  # one word of a SeedSequence each, or (2**32 + 1, 0) would be (1, 1)
Plan: TypeAlias = Callable[[], Iterator[Any]]
_NEW_RUN = "build the sampler with the arguments of the saved run, or start without the state"


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler that can be resumed at any step: what ``PrefetchLoader`` needs.

    One ``iter()`` is one epoch, which is fixed then, and ``epoch`` becomes the next one. A consumer
    counts its batches and saves ``state_at(epoch, batches)``, since ``state_dict()`` is ahead of
    it. It must not have an attribute ``batch_size``: Accelerate would read it and lose batches. An
    int ``num_examples`` is compared with the length of the dataset.

    >>> from torch_collate_kit.loading import PrefetchingSampler
    >>> isinstance(PrefetchingSampler(10, batch_size=4), ResumableSampler)
    True
    """

    @property
    def epoch(self) -> int:
        """The epoch that the next ``iter()`` yields."""

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches of indices, from the start step."""

    def __len__(self) -> int:
        """Steps of epoch ``self.epoch``, counted from its step 0."""

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """The next ``iter()`` yields this epoch from this step."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next ``iter()``, and what it must fit: small JSON."""

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The same with ``step`` steps of ``epoch`` consumed."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; StateError, and nothing changed, when it does not fit."""


class StepIterator(Iterator[Any]):
    """The steps of one epoch from ``first`` on; ``drawn`` once a step has been asked for.

    Its state is its position, which torchdata's StatefulDataLoader saves: the sampler's is ahead by
    the rest of the epoch.
    """

    def __init__(self, sampler: EpochSampler, plan: Plan, epoch: int, first: int) -> None:
        self.sampler, self.plan, self.epoch, self.first = sampler, plan, epoch, first
        self._num_drawn = 0
        self._steps: Iterator[Any] | None = None

    @property
    def drawn(self) -> bool:
        return self._steps is not None

    def __next__(self) -> Any:
        if self._steps is None:
            self._steps = self.plan()
        batch = next(self._steps)
        self._num_drawn += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_at(self.epoch, self.first + self._num_drawn)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Becomes the iterator that the sampler yields after loading ``state``."""
        self.sampler.load_state_dict(state)
        following = iter(self.sampler)  # drawing from it here is what makes it drawn
        self.epoch, self.first = following.epoch, following.first
        self._steps, self._num_drawn = following, 0


class EpochSampler(ABC):
    """The part of a resumable batch sampler that does not depend on what is in a batch."""

    def __init__(
        self, batch_size: int, *, seed: int, shuffle: bool, rank: int, world_size: int
    ) -> None:
        self._world_size = checked_int("world_size", world_size)
        self._rank = checked_rank(rank, self._world_size)
        self._num_global = checked_batch_size(batch_size, self._least_examples)
        self._seed = checked_word("seed", seed)
        self._shuffle = checked_bool("shuffle", shuffle)
        self._epoch = 0
        self._step = 0
        self._latest: StepIterator | None = None

    @abstractmethod
    def _num_steps(self, epoch: int) -> int:
        """Steps of an epoch, from its step 0."""

    @abstractmethod
    def _plan(self, epoch: int, step: int) -> Plan:
        """A function that yields the batches of an epoch from ``step`` on, the same each time."""

    @property
    def _least_examples(self) -> int:
        """A batch has at least so many examples, and a full one a multiple of it."""
        return self._world_size

    def _fits(self) -> dict[str, Any]:
        """What a state must have in common with this sampler."""
        return {"batch_size": self._num_global, "seed": self._seed, "shuffle": self._shuffle}

    @abstractmethod
    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        """What a state holds besides its position."""

    @abstractmethod
    def _load_extra(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Takes over the ``_extra`` of a state; StateError, and nothing changed, if it is wrong."""

    def _settings(self) -> dict[str, Any]:
        """What the constructor was given, by keyword, without what is the default."""
        shared = {"batch_size": self._num_global}
        if not self._shuffle:
            shared["shuffle"] = False
        shared |= {"seed": self._seed} if self._seed else {}
        return shared

    def _rank_settings(self) -> dict[str, int]:
        if self._world_size == 1:
            return {}
        return {"rank": self._rank, "world_size": self._world_size}

    def _shown(self, *positional: str, **settings: Any) -> str:
        """The repr: the call that makes it, and the position of the next ``iter()``."""
        epoch, step = self._position()
        call = call_repr(self, *positional, **self._settings(), **settings)
        return f"{call} [next iter(): epoch {epoch}, step {step}]"

    @property
    def epoch(self) -> int:
        """The epoch after the one begun last: what the next ``iter()`` yields."""
        return self._epoch

    @property
    def num_examples_per_step(self) -> int:
        """Examples of a full step over all ranks: the ``batch_size`` argument."""
        return self._num_global

    def __len__(self) -> int:
        """Steps of epoch ``self.epoch``, counted from its step 0."""
        return self._num_steps(self._epoch)

    def __iter__(self) -> StepIterator:
        """Begins the next epoch, from its start step.

        An iterator from which nothing was drawn does not count: a DataLoader with workers calls
        ``iter()`` twice for its first epoch.
        """
        epoch, step = self._position()
        undrawn = self._latest is not None and not self._latest.drawn
        plan = self._latest.plan if self._latest and undrawn else self._plan(epoch, step)
        self._latest = StepIterator(self, plan, epoch, step)
        self._epoch, self._step = epoch + 1, 0
        return self._latest

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """The next ``iter()`` yields ``epoch`` from ``step`` on.

        A ``step`` equal to the epoch's number of steps is the start of the next epoch.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        self._jump(*self._checked_position(epoch, step))

    def may_look_ahead(self, step: int) -> bool:
        """Whether the step after ``step`` of the epoch begun last may be prepared now.

        Before the first ``iter()`` or after a jump, of the next epoch. False at an epoch's last
        step, since the next epoch may still be changed.
        """
        step = checked_int("step", step, minimum=0)
        return step + 1 < self._num_steps(self._latest.epoch if self._latest else self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next ``iter()``; a consumer saves :meth:`state_at` instead."""
        return self._state_at(*self._position())  # does not ask for the length of the next epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The state with ``step`` steps of ``epoch`` consumed; small JSON.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        return self._state_at(*self._checked_position(epoch, step))

    def _state_at(self, epoch: int, step: int) -> dict[str, Any]:
        where = {"version": _VERSION, "epoch": epoch, "step": step}
        return {**where, **self._extra(epoch, step), **self._fits()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` goes on where the state was saved.

        Raises:
            StateError: the state is of another sampler, or no state; nothing has been changed.
        """
        epoch, step = self._checked_state(state)
        self._load_extra(state, epoch, step)
        self._epoch, self._step, self._latest = epoch, step, None

    def _position(self) -> tuple[int, int]:
        """The epoch and step that the next ``iter()`` begins with."""
        if self._latest is not None and not self._latest.drawn:
            return self._latest.epoch, self._latest.first
        return self._epoch, self._step

    def _jump(self, epoch: int, step: int) -> None:
        """Makes a checked position the next one."""
        self._epoch, self._step, self._latest = epoch, step, None

    def _checked_position(self, epoch: int, step: int) -> tuple[int, int]:
        """The position as ints; the end of an epoch is the start of the next one."""
        epoch = checked_word("epoch", epoch)
        step = checked_int("step", step, minimum=0)
        num_steps = self._num_steps(epoch)
        if step > num_steps:
            raise ValueError(
                f"step must be at most {num_steps}, the number of steps of epoch {epoch}; "
                f"got {step}"
            )
        return (epoch + 1, 0) if step and step == num_steps else (epoch, step)

    def _checked_state(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Epoch and step of a state that fits this sampler, else StateError."""
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
        fits, position = self._fits(), ("epoch", "step")
        keys = {"version", *position, *fits, *self._extra(0, 0)}
        if state.keys() != keys:
            missing, unknown = sorted(keys - state.keys()), sorted(map(str, state.keys() - keys))
            raise StateError(
                f"state of another kind: keys missing {missing}, unknown {unknown}; "
                f"pass what state_dict() of a {type(self).__name__} gave, in the same version of "
                "the library"
            )
        differ = [k for k in fits if not is_same(state[k], fits[k])]
        if differ:
            raise StateError(
                f"state is of {', '.join(f'{k}={state[k]!r}' for k in differ)}, this sampler has "
                f"{', '.join(f'{k}={fits[k]!r}' for k in differ)}; {_NEW_RUN}"
            )
        epoch, step = (state_int(key, state[key]) for key in position)
        num_steps = self._num_steps(epoch)
        if step and step >= num_steps:
            raise StateError(
                f"state is of step {step}, but epoch {epoch} has {num_steps} steps; {_NEW_RUN}"
            )
        return epoch, step


def checked_word(name: str, value: Any) -> int:
    """``value`` as an int that fills one word of a SeedSequence: 0 .. 2**32 - 1."""
    number = checked_int(name, value, minimum=0)
    if number > _MAX_WORD:
        raise ValueError(f"{name} must be at most {_MAX_WORD}, got {number}; take it modulo 2**32")
    return number


def state_int(name: str, value: Any) -> int:
    """``value`` when it is an int of 0 .. 2**32 - 1, else StateError."""
    if type(value) is not int or not 0 <= value <= _MAX_WORD:
        raise StateError(
            f"state has {name}={value!r}, not an int between 0 and {_MAX_WORD}; "
            "pass what state_dict() gave"
        )
    return value
