"""Batches of so many examples, each rank a part of them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch_collate_kit.loading.orders import Mixture
from torch_collate_kit.loading.orders.checks import Shuffle, Tail, checked_batch_size
from torch_collate_kit.loading.orders.order import Order, UserOrder
from torch_collate_kit.loading.ranks import rank_and_size
from torch_collate_kit.loading.sampler.budgets import Budget, ByExamples, Step
from torch_collate_kit.loading.sampler.resuming import ResumingSampler


class PrefetchingSampler(ResumingSampler):
    """Batches of one dataset's indices: shuffled by (seed, epoch), sharded, resumable.

    Args:
        examples: their number, anything with ``len()``, or a ``Mixture``. If it has a
            ``fingerprint``, as a TokenizedDataset has, a state is refused by other data of the same
            size.
        batch_size: examples of a step over all ranks. Rank r gets the r-th contiguous part.
        shuffle, seed: an epoch is in an order that is a function of (seed, epoch), or in sequence
            (False). "keyed" is a shuffled order in O(1) memory, for very many examples.
        tail: the examples after the last full batch make a short batch ("keep"), are left out
            ("drop"), or begin the next epoch's first batch ("wrap").
        order: ``order(epoch, rng)`` returns the indices of an epoch, which may repeat or be left
            out. It must be a pure function; ``rng`` is seeded by (seed, epoch).
        dp_rank, dp_size: which part of each batch is yielded, as a list of Python ints; by default
            that of this process in ``torch.distributed`` when the sampler is made.
        allow_appended: a state of fewer examples loads, if these are the first ones here. The
            running epoch keeps its order, and the next one has all.

    The ``state_dict`` is small JSON, the same on all ranks, and loads on any number of them. More
    in docs/loading.md.

    Raises:
        TypeError, ValueError: an argument is wrong, an epoch has no step to drop to, or a kept tail
            has fewer examples than there are ranks.

    >>> sampler = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")
    >>> [list(sampler), list(sampler)]
    [[[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]]]
    """

    def __init__(
        self,
        examples: int | Sized | Mixture,
        *,
        batch_size: int,
        shuffle: Shuffle = True,
        seed: int = 0,
        tail: Tail = "keep",
        order: UserOrder | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        allow_appended: bool = False,
    ) -> None:
        self._mixture = examples if isinstance(examples, Mixture) else None
        rank, size = rank_and_size(dp_rank, dp_size)
        super().__init__(
            examples,
            num_global=("batch_size", checked_batch_size(batch_size, size)),
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            order=order,
            dp_rank=rank,
            dp_size=size,
            allow_appended=allow_appended,
        )

    def __repr__(self) -> str:
        return self._shown(str(self.num_examples) if self._mixture is None else repr(self._mixture))

    def _new_budget(self, order: Order) -> Budget:
        return ByExamples(order, self._tail, self._num_global[1], self._dp_size)

    def _pick(self, step: Step) -> Any:
        """Return this rank's part of a global batch, in the order in which it is read."""
        batch = step.examples
        each, longer = divmod(len(batch), self._dp_size)  # the first ranks may have one more
        start = self._dp_rank * each + min(self._dp_rank, longer)
        mine: list[int] = batch[start : start + each + (self._dp_rank < longer)].tolist()
        return mine
