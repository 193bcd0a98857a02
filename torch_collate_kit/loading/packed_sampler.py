"""The two ways to make a StepSampler: by examples, and packed over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import numpy.typing as npt

from torch_collate_kit._checks import KindAndSize, checked_int
from torch_collate_kit.collators.packed import checked_collator
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.budgets import Budget, ByExamples, ByTokens, Step
from torch_collate_kit.loading.by_rows import ByRows, Entries
from torch_collate_kit.loading.checks import (
    NEW_RUN,
    Shuffle,
    Tail,
    checked_batch_size,
    is_same,
    rank_and_size,
    rank_in,
)
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.example_sizes import ExampleSizes
from torch_collate_kit.loading.mixed_order import order_of
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.loading.orders import UserOrder
from torch_collate_kit.loading.sampler import Division, StepSampler
from torch_collate_kit.packing import PackingOptions, RankPlan
from torch_collate_kit.packing.atoms import Patches
from torch_collate_kit.packing.planner import plan_rows


class EpochIndices(list[int]):
    """The indices of a batch, a list, with the ``epoch`` that they are of, also in a worker."""

    epoch: int


class PrefetchingSampler(StepSampler):
    """Batches of one dataset's indices: shuffled by (seed, epoch), sharded, resumable.

    Args:
        examples: their number, anything with ``len()``, or a ``Mixture``. A state is refused by
            other data if they have a ``fingerprint``, as a TokenizedDataset has.
        batch_size: examples of a step over all ranks. Rank r gets the r-th contiguous part.
        shuffle, seed: an epoch is in an order that is a function of (seed, epoch), or in sequence
            (False). "keyed" is a shuffled order in O(1) memory, for very many examples.
        tail: the examples after the last full batch make a short batch ("keep"), are left out
            ("drop"), or begin the next epoch's first batch ("wrap").
        order: ``order(epoch, rng)`` returns the indices of an epoch, which may repeat or be left
            out. It must be a pure function; ``rng`` is seeded by (seed, epoch).
        dp_rank, dp_size: which part of each batch is yielded, as a list of Python ints with an
            attribute ``epoch``; by default that of this process in ``torch.distributed`` when the
            sampler is made.

    The ``state_dict`` is small JSON, the same on all ranks, and loads on any number of them.

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
    ) -> None:
        rank, size = rank_and_size(dp_rank, dp_size)
        batch_size = checked_batch_size(batch_size, size)
        own = order_of(examples, seed=seed, shuffle=shuffle, user=order)
        self._mixture = examples if isinstance(examples, Mixture) else None
        budget = ByExamples(own, tail, batch_size, least=size)
        division = _ExamplesOfRank(rank, size)
        super().__init__(examples, budget, division, size)

    def __repr__(self) -> str:
        return self._shown(str(self.num_examples) if self._mixture is None else repr(self._mixture))


class PackedBatchSampler(StepSampler):
    """Batches whose rows are planned over all ranks, of which each rank reads only its own.

    Args:
        examples: a ``TokenizedDataset``, a ``Mixture`` of them, or the number of tokens of every
            example, ints [N] (an int64 array is read in place: do not change it meanwhile).
        collate: the ``PackedCollator`` of the DataLoader, or a collator around one. Its ``packing``
            says how rows are filled, and for how many ranks (``packing.parallel.dp``).
        batch_size: examples of a step over all ranks.
        batch_rows: in place of ``batch_size``, the rows of a step over all ranks, a multiple of
            ``dp``: every step is full, and costs the same.
        window: by rows, the steps that are planned together.
        dp_rank: the rank whose rows are yielded; by default ``parallel.place`` of this process in
            ``torch.distributed`` when the sampler is made.
        shuffle, seed, tail, order: as for ``PrefetchingSampler``; a kept tail may
            be of any size, since ranks without examples get rows of pads.
        num_loss_tokens: beside bare lengths, trained tokens of every example, ints [N], of which
            several ranks with ``normalize_loss=True`` need the sum (docs/loss.md).
        patches: beside bare lengths, patches of images, as for
            :func:`~torch_collate_kit.packing.pack`.

    Every rank computes the same order and plan, without collectives, so all have equally many rows
    of one width. It yields a ``RankPlan``, which a ``TokenizedDataset`` passes on to the collator.
    By rows, or with ``rows_multiple_of``, a state goes on with the same rows on any number of ranks
    that divides them; by examples without it, with the same examples in each step, packed anew. How
    rows are dealt to steps, and how full and even these are: docs/loading.md.

    Raises:
        TypeError, ValueError, DataError: an argument or a length is wrong. See docs/loading.md.

    >>> from torch_collate_kit import PackedCollator, ParallelLayout
    >>> collate = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(dp=2))
    >>> rows = [{"input_ids": [7] * n} for n in (3, 1, 4, 2)]
    >>> sampler = PackedBatchSampler(TokenizedDataset(rows), collate, batch_size=4, shuffle=False)
    >>> part = next(iter(sampler))
    >>> part.indices, part.plan.bins, part.num_loss_tokens
    ([1, 2], [[2, 1], [0, 3]], 6)
    """

    _division: _RowsOfRank

    def __init__(
        self,
        examples: TokenizedDataset | Mixture | npt.ArrayLike,
        collate: Any,
        *,
        batch_size: int | None = None,
        batch_rows: int | None = None,
        window: int = 8,
        dp_rank: int | None = None,
        shuffle: Shuffle = True,
        seed: int = 0,
        tail: Tail = "keep",
        order: UserOrder | None = None,
        num_loss_tokens: npt.ArrayLike | None = None,
        patches: Patches | None = None,
    ) -> None:
        self._collate = checked_collator(collate)
        packing = self._collate.packing
        parallel = packing.parallel
        dp_rank = rank_in(parallel, dp_rank)
        window = checked_int("window", window)
        batch_size, batch_rows = _checked_global(packing, batch_size, batch_rows)
        sizes = ExampleSizes(examples, self._collate, num_loss_tokens, patches)
        entries = Entries(sizes.lengths) if batch_rows is None else sizes.entries()
        self._data = examples if isinstance(examples, TokenizedDataset | Mixture) else None
        own = order_of(
            len(sizes.lengths) if self._data is None else self._data,
            seed=seed,
            shuffle=shuffle,
            user=order,
            lengths=entries.lengths,
            offsets=entries.offsets,
        )
        budget: Budget
        if batch_size is not None:
            budget = ByExamples(own, tail, batch_size, least=1)  # rows are divided, not examples
        else:
            rows = {"batch_rows": batch_rows or 0, "window": window}
            if packing.strategy == "wrapped":
                budget = ByTokens(own, tail, packing, lengths=sizes.lengths, **rows)
            else:
                budget = ByRows(own, tail, packing, entries=entries, **rows)
        division = _RowsOfRank(sizes, packing, dp_rank, self._data, by_rows=batch_size is None)
        num_ranks = parallel.dp * parallel.cp * parallel.tp
        super().__init__(self._data, budget, division, num_ranks)

    def __repr__(self) -> str:
        if self._data is not None:
            is_mixture = isinstance(self._data, Mixture)
            shown = repr(self._data if is_mixture else KindAndSize(self._data))
            return self._shown(shown, repr(self._collate))
        sizes = self._division.sizes
        given = {"patches": sizes.patches, "num_loss_tokens": sizes.counts}
        shown = f"<{self.num_examples:,} lengths, {int(sizes.lengths.sum()):,} tokens>"
        counts = {k: KindAndSize(values) for k, values in given.items() if values is not None}
        return self._shown(shown, repr(self._collate), **counts)


def _checked_global(
    packing: PackingOptions, batch_size: int | None, batch_rows: int | None
) -> tuple[int | None, int | None]:
    """Check that one of the two is given, and fits the ranks."""
    if (batch_size is None) == (batch_rows is None):
        raise TypeError(
            "pass one of batch_size, the examples of a step, and batch_rows, its rows; got "
            f"batch_size={batch_size!r}, batch_rows={batch_rows!r}"
        )
    if batch_rows is None:
        return checked_int("batch_size", batch_size), None
    batch_rows = checked_int("batch_rows", batch_rows)
    for name, divisor in (
        ("parallel.dp", packing.parallel.dp),
        ("rows_multiple_of", packing.row_multiple),
    ):
        if batch_rows % divisor:
            raise ValueError(
                f"batch_rows must be a multiple of {name}={divisor}, got {batch_rows}; it "
                "counts the rows of a step over all ranks"
            )
    return None, batch_rows


class _ExamplesOfRank(Division):
    """A contiguous part of the examples of a step; the first ranks may have one more."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self._rank, self._size = dp_rank, dp_size

    def part(self, step: Step) -> EpochIndices:
        batch = step.examples
        each, longer = divmod(len(batch), self._size)
        start = self._rank * each + min(self._rank, longer)
        return EpochIndices(batch[start : start + each + (self._rank < longer)].tolist())

    def shown(self) -> dict[str, int]:
        return {} if self._size == 1 else {"dp_rank": self._rank, "dp_size": self._size}

    def layout(self) -> dict[str, Any]:
        return {"dp_size": self._size}


class _RowsOfRank(Division):
    """A rank's rows of the plan of a step, which is made here if the budget did not."""

    def __init__(
        self,
        sizes: ExampleSizes,
        packing: PackingOptions,
        dp_rank: int,
        data: TokenizedDataset | Mixture | None,
        *,
        by_rows: bool,
    ) -> None:
        self.sizes, self._packing, self._rank = sizes, packing, dp_rank
        self._mixture = data if isinstance(data, Mixture) else None
        self._by_rows = by_rows
        self._costs = {"image_costs_digest": sizes.image_costs_digest}

    def part(self, step: Step) -> RankPlan:
        packing, batch, plan, sizes = self._packing, step.examples, step.plan, self.sizes
        lengths = sizes.lengths[batch]
        counts = None if sizes.counts is None else sizes.counts[batch]
        if plan is None:
            plan = plan_rows(sizes.atoms(batch), packing)
        is_wrapped = packing.strategy == "wrapped"
        own = None if is_wrapped else counts
        part = RankPlan(plan, self._rank, batch, lengths, own, dp_size=packing.parallel.dp)
        if not sizes.are_divisors:
            part.is_divisor = False
        if is_wrapped and counts is not None:  # all tokens are trained
            firsts = len(plan.lengths) if packing.isolate else plan.num_rows - plan.num_dummy_rows
            part.num_loss_tokens = int(plan.lengths.sum()) - firsts * sizes.num_firsts
        if self._mixture is not None:
            part.metadata = self._mixture.counts_in(self._mixture.source_of(batch), plan)
        return part

    def shown(self) -> dict[str, int]:
        return {"dp_rank": self._rank} if self._rank else {}

    def fingerprint(self) -> dict[str, Any]:
        found = self.sizes.fingerprint(with_trees=self._by_rows)
        return {**found, **self._costs} if self._by_rows else found

    def layout(self) -> dict[str, Any]:
        if self._by_rows:
            return {"dp": self._packing.parallel.dp}
        return {**self._packing.as_state(), **self._costs}

    def check_layout(self, layout: dict[str, Any]) -> None:
        if self._by_rows:
            return
        known = {key: value for key, value in layout.items() if key != "image_costs_digest"}
        before = PackingOptions.from_state(known)
        now = self._packing  # what was too long then, and lost tokens, must lose the same ones now
        if before != now and self.sizes.lost(before) != self.sizes.lost(now):
            was, has = (
                f"max_tokens={of.max_tokens}, overflow={of.overflow!r}"
                + (f", share_prefixes={of.share_prefixes!r}" if of.share_prefixes else "")
                for of in (before, now)
            )
            raise StateError(
                f"state is of {was}, this sampler has {has}, which drops or cuts other examples, "
                f"so steps would not have what they had; {NEW_RUN}"
            )

    def replans(self, layout: Mapping[str, Any]) -> bool:
        if self._by_rows:
            return False
        other = {k for k, v in self.layout().items() if not is_same(v, layout.get(k))}
        planned_for = layout.get("rows_multiple_of") or layout["dp"]
        return bool(other - {"dp", "rows_multiple_of"}) or planned_for != self._packing.row_multiple
