"""Epochs of batches as a function of (seed, epoch): positions, states, and lineage."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any, get_args

from torch.utils.data.dataloader import _BaseDataLoaderIter

from torch_collate_kit._checks import checked_bool, checked_choice, checked_int
from torch_collate_kit._reprs import KindAndSize, call_repr
from torch_collate_kit.loading.orders import Mixture
from torch_collate_kit.loading.orders.checks import (
    Indices,
    Shuffle,
    Tail,
    checked_length,
    checked_shuffle,
    checked_word,
)
from torch_collate_kit.loading.orders.mixed_order import MixedOrder
from torch_collate_kit.loading.orders.order import Order, ShuffledOrder, UserOrder
from torch_collate_kit.loading.orders.states import Growth
from torch_collate_kit.loading.ranks import DividedOnce
from torch_collate_kit.loading.sampler.budgets import Budget, Step
from torch_collate_kit.loading.sampler.source_limits import SourceLimits


class StepIterator(Iterator[Any]):
    """Iterator over a rank's batches in one epoch; ``drawn`` once a step has been asked for.

    Its state is its position, which torchdata's StatefulDataLoader saves: the sampler's is that of
    the next epoch. One that loads step 0 is drawn once a loader asks for a batch, or at its end:
    at the end of an epoch torchdata makes one, draws ahead, and drops it.
    """

    def __init__(self, sampler: EpochSampler, budget: Budget, epoch: int, step: int) -> None:
        self.sampler, self.budget, self.epoch, self.step = sampler, budget, epoch, step
        self.first, self.loaded = step, False
        self.drawn, self.limits = False, SourceLimits(budget, epoch)

    def __next__(self) -> Any:
        has_step = self.budget.has_step(self.epoch, self.step)
        counts = self.drawn or not self.loaded or self.first > 0
        self.drawn = counts or _is_asked_for(otherwise=not has_step)
        if not has_step:
            raise StopIteration
        batch = self.budget.step(self.epoch, self.step)
        self.limits.log(self.step)
        self.step += 1
        return self.sampler._pick(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler at the next step."""
        return self.sampler.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Becomes the iterator that the sampler yields after loading ``state``."""
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


class EpochSampler(DividedOnce, ABC):
    """The part of a resumable batch sampler that does not depend on what is in a batch.

    An order says which example comes next, a budget where a step ends, and ``_pick`` which part of
    a step this rank has.
    """

    def __init__(
        self,
        examples: int | Sized | Mixture,
        *,
        num_global: tuple[str, int],
        shuffle: Shuffle,
        seed: int,
        tail: Tail,
        order: UserOrder | None,
        dp_rank: int,
        dp_size: int,
        allow_appended: bool,
    ) -> None:
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_ranks = dp_size
        self._num_global = num_global  # "batch_size" or "batch_rows", and how many
        self._seed = checked_word("seed", seed)
        self._shuffle = checked_shuffle(shuffle)
        self._tail = tail
        checked_choice("tail", tail, get_args(Tail))
        self._allow_appended = checked_bool("allow_appended", allow_appended)
        if order is not None and not callable(order):
            raise TypeError(f"order must be a function of (epoch, rng), got {order!r}")
        self._user_order = order
        self._data_fingerprint = getattr(examples, "fingerprint", None)
        self._fingerprints: dict[int, dict[str, Any]] = {}  # by the number of examples
        self._epoch, self._step = 0, 0  # of the next iter()
        self._latest: StepIterator | None = None
        self._set_order(self._new_order(examples))
        self._budget.check(0, 0)

    def _new_order(self, examples: Any) -> Order:
        if not isinstance(examples, Mixture):
            return ShuffledOrder(
                Growth([(0, checked_length(examples))]),
                seed=self._seed,
                shuffle=self._shuffle,
                user=self._user_order,
                offsets=self._piece_offsets(),
            )
        if self._user_order is not None or self._allow_appended:
            raise ValueError(
                "a Mixture has an order of its own, and sources of fixed sizes; leave out order= "
                "and allow_appended="
            )
        return MixedOrder(
            examples,
            seed=self._seed,
            shuffle=self._shuffle,
            lengths=self._entry_lengths(),
            offsets=self._piece_offsets(),
        )

    def _set_order(self, order: Order) -> None:
        self._order, self._budget = order, self._new_budget(order)

    @abstractmethod
    def _new_budget(self, order: Order) -> Budget:
        """Return the steps of an order."""

    @abstractmethod
    def _pick(self, step: Step) -> Any:
        """Return this rank's part of a step."""

    def _piece_offsets(self) -> Indices | None:
        """Return where the pieces of each example begin, if the order is one of pieces."""
        return None

    def _entry_lengths(self) -> Indices | None:
        """Return the tokens of what is ordered, if the sampler has them."""
        return None

    def _num_steps(self, epoch: int) -> int:
        return self._budget.num_steps(epoch)

    @abstractmethod
    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps of ``epoch``."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where the state was saved."""

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's keywords that are not the default."""
        name, num_global = self._num_global
        settings: dict[str, Any] = {name: num_global}
        settings |= {} if self._shuffle is True else {"shuffle": self._shuffle}
        settings |= {"seed": self._seed} if self._seed else {}
        settings |= {} if self._tail == "keep" else {"tail": self._tail}
        if self._user_order is not None:
            settings["order"] = KindAndSize(self._user_order)
        return settings

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
    def num_examples(self) -> int:
        """The length of the dataset that the indices are of."""
        return self._order.num_examples

    @property
    def epoch(self) -> int:
        """The epoch after the one begun last: what the next ``iter()`` yields."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of steps of epoch ``self.epoch``, counted from its step 0.

        By rows, those of more than 10 million examples are counted by a thread, about 3 s for each
        10 million. Until then this is an estimate, which a warning says once.
        """
        return self._budget.length(self._epoch)

    @property
    def is_length_exact(self) -> bool:
        """Whether ``len()`` is exact now, and not an estimate of a very long epoch."""
        return self._budget.is_counted(self._epoch)

    def count_steps(self, epoch: int | None = None) -> int:
        """Return the exact number of steps of an epoch, by default that of ``len()``.

        Waits until a very long epoch is counted. No step, position or state needs this number.

        >>> from torch_collate_kit import PrefetchingSampler
        >>> PrefetchingSampler(10, batch_size=4).count_steps()
        3
        """
        return self._num_steps(self._epoch if epoch is None else checked_word("epoch", epoch))

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
        latest = self._latest
        budget = self._budget if latest is None or latest.drawn else latest.budget
        budget.order.fix(epoch)
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
        place = self._budget.place(epoch, step)
        order = self._order.reshuffled(epoch, step, place)
        self._jump(epoch, step)
        self._set_order(order)

    def examples(self, epoch: int, step: int) -> Indices:
        """Calculate the examples of any step, past or future.

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
        if not self._budget.has_step(epoch, step):
            raise ValueError(
                f"step must be below {self._num_steps(epoch)}, the steps of epoch {epoch}; "
                f"got {step}"
            )
        return self._budget.step(epoch, step).examples.copy()

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

    def _position(self) -> tuple[int, int]:
        """Return the epoch and step that the next ``iter()`` begins with."""
        if self._latest is not None and not self._latest.drawn:
            return self._latest.epoch, self._latest.first
        return self._epoch, self._step

    def _jump(self, epoch: int, step: int) -> None:
        """Make a checked position the next one; reshuffles after it are undone."""
        self._epoch, self._step, self._latest = epoch, step, None
        order = self._order.until(epoch, step)
        if order is not self._order:
            self._set_order(order)

    def _checked_position(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the position as ints; the end of an epoch is the start of the next one."""
        epoch = checked_word("epoch", epoch)
        step = checked_int("step", step, minimum=0)
        if self._budget.has_step(epoch, step) or not step:
            return epoch, step
        num_steps = self._num_steps(epoch)
        if step > num_steps:
            raise ValueError(
                f"step must be at most {num_steps}, the number of steps of epoch {epoch}; "
                f"got {step}"
            )
        return epoch + 1, 0
