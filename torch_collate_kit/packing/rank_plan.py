"""One rank's part of a shared plan: which examples it reads, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.plan import PackingPlan

__all__ = ["PlannedExamples", "RankPlan"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What ``PackedBatchSampler`` yields: the plan of a batch, and what one rank reads for it.

    It replaces the list of indices that a DataLoader passes to a dataset's ``__getitems__``. A
    ``TokenizedDataset`` understands it. Your own dataset does with

        def __getitems__(self, indices):
            return indices.with_examples([self[i] for i in indices.indices])

    and then ``PackedCollator`` follows the plan. A RankPlan cannot be iterated, because a dataset
    that does not know about plans would return the examples alone, and each rank would pack its
    own.

    >>> from torch_collate_kit.packing import pack
    >>> lengths = np.array([5, 3, 9, 2])  # of examples 40, 41, 42 and 43 of a dataset
    >>> plan = pack(lengths, 10, rows_multiple_of=2)
    >>> part = RankPlan.of(plan, 0, np.arange(40, 44), lengths)
    >>> part.indices, part.lengths.tolist()
    ([40, 41, 43], [5, 3, 2])
    """

    plan: PackingPlan
    """The plan of the whole batch, over all ranks."""
    rank: int
    """The rank whose rows are collated."""
    indices: list[int]
    """The dataset indices that the rank reads."""
    lengths: _Ints
    """int64 [len(indices)], the number of tokens that the plan assumes for each of them."""
    num_examples: int
    """Number of examples in the batch, over all ranks."""
    num_loss_tokens: int | None = None
    """Number of loss tokens in the batch, over all ranks; None if unknown."""
    own_num_loss_tokens: int | None = None
    """Number of loss tokens in the examples that the rank reads; None if unknown."""

    @classmethod
    def of(
        cls,
        plan: PackingPlan,
        rank: int,
        indices: _Ints,
        lengths: _Ints,
        num_loss_tokens: _Ints | None = None,
    ) -> RankPlan:
        """The part of ``rank`` in ``plan``, which packs the dataset's examples at ``indices``.

        ``lengths`` and ``num_loss_tokens`` are int64 [N], one entry per example of the batch.
        """
        examples = np.unique(plan.example_indices[_pieces(plan, rank)])
        total = own = None
        if num_loss_tokens is not None:
            total = int(np.delete(num_loss_tokens, plan.dropped).sum())
            own = int(num_loss_tokens[examples].sum())
        mine = indices[examples].tolist()
        return cls(plan, rank, mine, lengths[examples], len(indices), total, own)

    @property
    def rows(self) -> range:
        """The rows of the plan that belong to the rank."""
        return self.plan.rank_rows(self.rank)

    @property
    def pieces(self) -> slice:
        """The pieces of the plan in these rows."""
        return _pieces(self.plan, self.rank)

    @property
    def positions(self) -> _Ints:
        """[S] for each of these pieces, the position of its example in ``indices``."""
        examples = self.plan.example_indices[self.pieces]
        return np.searchsorted(np.unique(examples), examples)

    def with_examples(self, examples: Any) -> PlannedExamples:
        """The plan with the examples at ``indices``, a list or columns, for the collator."""
        return PlannedExamples(self, examples)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError(
            "PackedBatchSampler yields plans, and this dataset takes a list of indices; wrap it: "
            "TokenizedDataset(dataset), or give it a __getitems__ as RankPlan's docstring shows"
        )


@dataclass(frozen=True)
class PlannedExamples:
    """Examples for ``PackedCollator``, and the plan that it follows."""

    plan: RankPlan | PackingPlan
    """A rank's part of a batch, or the whole."""
    examples: Any
    """A list or columns: the examples at ``plan.indices`` in that order; for a whole batch, all
    that the plan numbers."""


def _pieces(plan: PackingPlan, rank: int) -> slice:
    rows = plan.rank_rows(rank)
    return slice(int(plan.row_offsets[rows.start]), int(plan.row_offsets[rows.stop]))
