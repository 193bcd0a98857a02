"""Batch samplers that can be stopped at any step: the protocol, and that of one dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol, runtime_checkable

from torch_collate_kit._checks import checked_int
from torch_collate_kit.loading._arguments import Indices, checked_rank, rank_slice
from torch_collate_kit.loading._ordered import Order, OrderedSampler

__all__ = ["PrefetchingSampler", "ResumableSampler"]


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler that can be resumed at any step: what ``PrefetchLoader`` needs.

    One ``iter()`` is one epoch, fixed when it is made, and makes ``epoch`` the one after it. A
    consumer that counts its batches saves ``state_at(epoch, batches)``: the live ``state_dict()``
    is ahead of it. Has no attribute ``batch_size``: Accelerate would read it and lose batches. With
    an int ``num_examples`` it is compared with the length of the dataset.

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


class PrefetchingSampler(OrderedSampler):
    """Batches of one dataset's indices: shuffled by (seed, epoch), sharded, resumable.

    ``data`` is the number of examples or anything with ``len()`` (read once). ``batch_size`` counts
    the examples of a step over all ranks; rank r gets the r-th contiguous run of each global batch,
    so the ranks' batches, concatenated, are those of one rank. Yields lists of Python ints.

    ``order(epoch, rng)`` replaces shuffling: it returns the indices of an epoch (1-D ints; they may
    repeat, leave out, differ in number), must be a pure function of its arguments, and is given
    a ``Generator`` seeded by (seed, epoch). It is called when a length is asked for, too.

    ``tail`` says what happens to the examples after the last full batch. "keep": a short batch,
    dealt out evenly over the ranks. "drop" (or ``drop_last=True``): they are left out. "wrap": they
    begin the next epoch's first batch, so every batch is full and belongs to the epoch in which it
    ends; an epoch shorter than a batch may have no step. With ``order`` and "wrap", the lengths of
    all earlier epochs are needed: a jump to epoch e calls ``order`` e times.

    The ``state_dict`` holds ``version``, ``epoch``, ``step``, ``reshuffles`` (where the epochs that
    still matter were reshuffled) and what it must fit: ``length``, ``batch_size``, ``world_size``,
    ``seed``, ``tail``, ``shuffle``, ``custom_order``. It is the same on all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong, an epoch has no step to drop to, or a kept tail
            has fewer examples than there are ranks.

    >>> sampler = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")
    >>> [list(sampler), list(sampler)]
    [[[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]]]
    >>> resumed = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")
    >>> resumed.load_state_dict(sampler.state_at(epoch=1, step=2))
    >>> list(resumed)
    [[3, 4]]
    """

    def __init__(
        self,
        data: int | Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        tail: str = "keep",
        order: Order | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._world_size = checked_int("world_size", world_size)
        self._rank = checked_rank(rank, self._world_size)
        super().__init__(
            data,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            tail=tail,
            order=order,
            least_examples=self._world_size,
        )

    def _pick(self, batch: Indices) -> list[int]:
        mine: list[int] = batch[rank_slice(len(batch), self._rank, self._world_size)].tolist()
        return mine

    def _fits(self) -> dict[str, Any]:
        return {**super()._fits(), "world_size": self._world_size}
