"""Batches as a function of (seed, epoch, step): an order, a budget of a step, a division."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torch_collate_kit._checks import KindAndSize, call_repr, checked_int
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.budgets import Budget, SourceLimits, Step
from torch_collate_kit.loading.checks import (
    NEW_RUN,
    DividedOnce,
    Indices,
    checked_word,
    differences,
    is_same,
    sealed,
    unsealed,
)

_VERSION = 5
_USUAL = {"shuffle": True, "seed": 0, "tail": "keep"}
_logger = logging.getLogger("torch_collate_kit.loading")


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler that can be resumed at any step: what ``PrefetchLoader`` needs.

    One ``iter()`` is one epoch, which is fixed then, and ``epoch`` becomes the next one. A consumer
    counts its batches and saves ``state_at(epoch, batches)``, since ``state_dict()`` is the next
    epoch. It must not have an attribute ``batch_size``: Accelerate would read it and lose batches.
    An int ``num_examples`` is compared with the length of the dataset.

    >>> from torch_collate_kit import PrefetchingSampler
    >>> isinstance(PrefetchingSampler(10, batch_size=4), ResumableSampler)
    True
    """

    @property
    def epoch(self) -> int:
        """The epoch that the next ``iter()`` yields."""

    def __iter__(self) -> Iterator[Any]:
        """Return one epoch of batches of indices, from the start step."""

    def __len__(self) -> int:
        """Return the number of steps of epoch ``self.epoch``, counted from its step 0."""

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Let the next ``iter()`` yield this epoch from this step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next ``iter()``, and what it must fit: small JSON."""

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps of ``epoch``."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises StateError, and changes nothing, if it does not fit."""


class Division(Protocol):
    """The part of a step that one rank reads."""

    def part(self, step: Step) -> Any:
        """Return this rank's part of a step."""

    def shown(self) -> dict[str, int]:
        """Return the arguments of the constructor that are not the default."""

    def fingerprint(self) -> dict[str, Any]:
        """Return digests of the sizes of the examples, as JSON."""
        return {}

    def layout(self) -> dict[str, Any]:
        """Return the settings that a resumed run may change, as JSON: the number of ranks."""

    def check_layout(self, layout: dict[str, Any]) -> None:
        """Check the layout of a state. Raises StateError if its steps cannot be repeated here."""
        return

    def replans(self, layout: Mapping[str, Any]) -> bool:
        """Return whether rows differ from those of another layout."""
        return False


class StepIterator(Iterator[Any]):
    """Iterator over a rank's batches in one epoch; ``drawn`` once a step has been asked for.

    Its state is its position, which torchdata's StatefulDataLoader saves: the sampler's is that of
    the next epoch. One that loads step 0 is drawn once a loader asks for a batch, or at its end:
    at the end of an epoch torchdata makes one, draws ahead, and drops it.
    """

    def __init__(self, sampler: StepSampler, budget: Budget, epoch: int, step: int) -> None:
        self.sampler, self.budget, self.epoch, self.step = sampler, budget, epoch, step
        self.first, self.loaded = step, False
        self.drawn = False
        mixture = getattr(budget.order, "mixture", None)
        has_limits = mixture is not None and any(mixture.max_passes)
        self.limits = SourceLimits(budget, epoch) if has_limits else None

    def __next__(self) -> Any:
        step = self.budget.step(self.epoch, self.step)
        counts = self.drawn or not self.loaded or self.first > 0
        self.drawn = counts or _is_asked_for(otherwise=step is None)
        if step is None:
            raise StopIteration
        if self.limits is not None:
            self.limits.log(self.step)
        self.step += 1
        part = self.sampler._division.part(step)
        part.epoch = self.epoch
        return part

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler at the next step."""
        return self.sampler.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the iterator that the sampler yields after loading ``state``."""
        self.sampler.load_state_dict(state)
        vars(self).update(vars(iter(self.sampler)), loaded=True)
        self.sampler._latest = self


def _is_asked_for(*, otherwise: bool) -> bool:
    """Return whether a DataLoader draws for its consumer: not while its iterator is being made."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if name in ("__init__", "__next__") and isinstance(owner, _BaseDataLoaderIter):
            return name == "__next__"
        frame = frame.f_back
    return otherwise


class StepSampler(DividedOnce):
    """A resumable batch sampler: a budget cuts an order into steps, a division picks a rank's part.

    The budget, which has the order, is replaced and never changed: a state that another thread
    asks for is that of one order.
    """

    def __init__(self, data: Any, budget: Budget, division: Division, num_ranks: int) -> None:
        self._budget, self._division, self._num_ranks = budget, division, num_ranks
        self._data_fingerprint = getattr(data, "fingerprint", None)
        self._fingerprints: dict[str, Any] | None = None  # made for the first state
        self._epoch, self._step = 0, 0  # of the next iter()
        self._latest: StepIterator | None = None
        budget.check(0, 0)

    def _shown(self, *positional: str, **settings: Any) -> str:
        """Return the repr: the constructor call, and the position of the next ``iter()``."""
        budget, order = self._budget, self._budget.order
        (name, number), *_ = budget.settings.items()
        own = {**order.settings, "tail": budget.tail}
        given = {name: number, **{k: own[k] for k, usual in _USUAL.items() if own[k] != usual}}
        given |= {} if order.user is None else {"order": KindAndSize(order.user)}
        given |= {**settings, **self._division.shown()}
        epoch, step = self._position()
        return f"{call_repr(self, *positional, **given)} [next iter(): epoch {epoch}, step {step}]"

    @property
    def num_examples(self) -> int:
        """The length of the dataset that the indices are of."""
        return self._budget.order.num_examples

    @property
    def epoch(self) -> int:
        """The epoch after the one begun last: what the next ``iter()`` yields."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of steps of epoch ``self.epoch``, counted from its step 0."""
        return self.count_steps()

    def count_steps(self, epoch: int | None = None) -> int:
        """Return the number of steps of an epoch, by default that of ``len()``.

        By rows every window of the epoch is found first: 24 s for 100 million examples, of which a
        line of the log tells after 5 s. No step, position or state needs this number.

        >>> from torch_collate_kit import PrefetchingSampler
        >>> PrefetchingSampler(10, batch_size=4).count_steps()
        3
        """
        epoch = self._epoch if epoch is None else checked_word("epoch", epoch)
        return self._budget.num_steps(epoch)

    def __iter__(self) -> StepIterator:
        """Begin the next epoch, from its start step.

        An iterator from which nothing was drawn does not count: a DataLoader with workers calls
        ``iter()`` twice for its first epoch.
        """
        if type(sys._getframe(1).f_locals.get("self")).__name__ == "BatchSampler":  # of torch
            raise TypeError(
                f"{type(self).__name__} yields whole batches and was passed as sampler=; pass "
                "DataLoader(dataset, batch_sampler=sampler, collate_fn=collate), no batch_size"
            )
        epoch, step = self._position()
        budget = self._budget
        budget.order.check_epoch(epoch)
        budget.check(epoch, step)
        self._latest = StepIterator(self, budget, epoch, step)
        self._epoch, self._step = epoch + 1, 0
        return self._latest

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Let the next ``iter()`` yield ``epoch`` from ``step`` on.

        A ``step`` equal to the epoch's number of steps is the start of the next epoch.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        position = self._checked_position(epoch, step)
        if position[0] == epoch:  # else that is for its iter() to say
            self._budget.check(*position)
        self._jump(*position)

    def reshuffle(self) -> None:
        """Put the rest of the epoch, from the next ``iter()``'s position on, in a new order.

        It is a function of (seed, epoch, number of reshuffles of the epoch), and recorded in the
        state. Examples carried over by ``tail="wrap"`` stay first, and by rows the window of steps
        that has begun is finished. An iterator made before still yields the old order. In the
        middle of an epoch, call ``set_epoch(epoch, step=batches_consumed)`` first. A jump to before
        a reshuffle undoes it.

        Raises:
            ValueError: the examples are a Mixture, whose order follows from its weights.

        >>> from torch_collate_kit import PrefetchingSampler
        >>> sampler = PrefetchingSampler(6, batch_size=2, shuffle=False)
        >>> sampler.set_epoch(0, step=1)
        >>> sampler.reshuffle()
        >>> sampler.state_dict()["reshuffles"], sorted(sum(sampler, []))
        ([[0, 1, 2]], [2, 3, 4, 5])
        """
        epoch, step = self._position()
        budget = self._budget
        order = budget.order.reshuffled(epoch, step, budget.place(epoch, step))
        self._jump(epoch, step)
        self._budget = budget.over(order)

    @property
    def mixture(self) -> Any:
        """The ``Mixture`` that the indices are of, or None."""
        return getattr(self._budget.order, "mixture", None)

    def examples(self, epoch: int, step: int, *, own: bool = False) -> Indices:
        """Calculate the examples of any step, past or future.

        ``own``: those that ``row_metadata["example_indices"]`` of this rank's batch count, which
        are the rank's own where ranks collate apart, as with a ``PrefetchingSampler``.

        Returns:
            int64 [N], a copy: the indices of the global batch in its order.

        Raises:
            TypeError, ValueError: there is no such step.

        >>> from torch_collate_kit import PrefetchingSampler
        >>> sampler = PrefetchingSampler(10, batch_size=4, shuffle=False)
        >>> sampler.examples(7, 1).tolist()
        [4, 5, 6, 7]
        """
        epoch, step = checked_word("epoch", epoch), checked_int("step", step, minimum=0)
        found = self._budget.step(epoch, step)
        if found is None:
            raise ValueError(
                f"step must be below {self.count_steps(epoch)}, the steps of epoch {epoch}; "
                f"got {step}"
            )
        part = self._division.part(found) if own else None
        return np.array(part, np.int64) if isinstance(part, list) else found.examples.copy()

    def when(self, example: int, epoch: int | None = None) -> list[tuple[int, int]]:
        """Return the steps of an epoch that train on an example, as a list of (epoch, step).

        Mostly one; none if the epoch leaves it out. ``epoch`` is that of the next batch if it is
        not given.

        Raises:
            TypeError, ValueError: there is no such example or epoch.

        >>> from torch_collate_kit import PrefetchingSampler
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
        return [(epoch, step) for step in self._budget.steps_of(epoch, example)]

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next ``iter()``; a consumer saves :meth:`state_at` instead."""
        return self._state_at(*self._position())  # does not ask for the length of the next epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps of ``epoch``, as small JSON.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        return self._state_at(*self._checked_position(epoch, step))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where the state was saved, on any number of ranks.

        Every step has the examples that it would have had. How they are divided over ranks and
        packed into rows follows from this sampler's arguments; what differs is logged.

        Raises:
            StateError: the state is of another sampler, or no state; nothing has been changed.
        """
        content = unsealed(state, _VERSION)
        budget, epoch, step = self._restored(content)
        before, now = content["layout"], self._division.layout()
        self._division.check_layout(before)
        self._budget, self._epoch, self._step, self._latest = budget, epoch, step, None
        changed = [f"{k} {before[k]} -> {v}" for k, v in now.items() if not is_same(v, before[k])]
        if changed:
            level = logging.WARNING if self._division.replans(before) else logging.INFO
            kept = "the same examples in each step" + (", other rows" if level > 20 else "")
            message = "resumed at epoch %d step %d with another layout (%s): %s"
            _logger.log(level, message, epoch, step, ", ".join(changed), kept)

    def _state_at(self, epoch: int, step: int) -> dict[str, Any]:
        budget = self._budget
        content = {
            **{"version": _VERSION, "epoch": epoch, "step": step},
            **budget.order.state(epoch, step),
            **budget.state(epoch, step),
            **self._fits(budget),
            "layout": self._division.layout(),
        }
        return sealed(content)

    def _fits(self, budget: Budget) -> dict[str, Any]:
        """Return the settings that a state must share."""
        if self._fingerprints is None:
            make = self._data_fingerprint
            of_data = make(self.num_examples) if callable(make) else None
            self._fingerprints = {**self._division.fingerprint(), "fingerprint": of_data}
        own = {"tail": budget.tail, **budget.settings, **budget.order.settings}
        return {**own, **self._fingerprints}

    def _restored(self, state: Mapping[str, Any]) -> tuple[Budget, int, int]:
        """Return the budget and the position of a state that fits."""
        keys = self._state_at(0, 0).keys() - {"checksum"}
        if state.keys() != keys:
            missing, unknown = sorted(keys - state.keys()), sorted(map(str, state.keys() - keys))
            raise StateError(
                f"state of another kind: keys missing {missing}, unknown {unknown}; "
                f"pass what state_dict() of a {type(self).__name__} gave, in the same version of "
                "the library"
            )
        epoch, step = state["epoch"], state["step"]
        budget = self._budget.adopt(state)
        budget.order.check_size(state)
        fits = self._fits(budget)
        fits["fingerprint"] = _known(fits["fingerprint"], state["fingerprint"])
        of_state = {key: state[key] for key in fits}  # in the same order
        if was := differences(of_state, fits):
            now = differences(fits, of_state)
            raise StateError(f"state is of {was}, this sampler has {now}; {NEW_RUN}")
        budget = budget.over(budget.order.loaded(state))
        budget.load(state, epoch, step)
        if step and not budget.has_step(epoch, step):
            num_steps = budget.num_steps(epoch)
            raise StateError(
                f"state is of step {step}, but epoch {epoch} has {num_steps} steps; {NEW_RUN}"
            )
        return budget, epoch, step

    # ---- the position ----

    def _position(self) -> tuple[int, int]:
        """Return the epoch and step that the next ``iter()`` begins with."""
        if self._latest is not None and not self._latest.drawn:
            return self._latest.epoch, self._latest.first
        return self._epoch, self._step

    def _jump(self, epoch: int, step: int) -> None:
        """Make a checked position the next one; reshuffles after it are undone."""
        self._epoch, self._step, self._latest = epoch, step, None
        order = self._budget.order.without_later(epoch, step)
        if order is not self._budget.order:
            self._budget = self._budget.over(order)

    def _checked_position(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the position as ints; the end of an epoch is the start of the next one."""
        epoch = checked_word("epoch", epoch)
        step = checked_int("step", step, minimum=0)
        if not step or self._budget.has_step(epoch, step):
            return epoch, step
        num_steps = self._budget.num_steps(epoch)
        if step > num_steps:
            raise ValueError(
                f"step must be at most {num_steps}, the number of steps of epoch {epoch}; "
                f"got {step}"
            )
        return epoch + 1, 0


def _known(mine: Any, other: Any) -> Any:
    """Return my fingerprint; where either side has none, the other's."""
    if mine is None or other is None:
        return other
    own, others = (one.get("sources") if isinstance(one, dict) else None for one in (mine, other))
    if not isinstance(own, list) or not isinstance(others, list) or len(own) != len(others):
        return mine
    return {**mine, "sources": [_known(a, b) for a, b in zip(own, others, strict=True)]}
