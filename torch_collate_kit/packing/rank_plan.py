"""One rank's part of a plan that all ranks share: which examples it reads, and where they go."""

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

    It takes the place of a list of indices, so a dataset's ``__getitems__`` gets it. A
    ``TokenizedDataset`` reads it; a dataset of your own does so with

        def __getitems__(self, indices):
            return indices.with_examples([self[i] for i in indices.indices])

    after which ``PackedCollator`` follows the plan. It cannot be iterated: a dataset that knows
    nothing of plans would hand the examples on without theirs, and every rank would pack alone.

    >>> from torch_collate_kit.packing import pack
    >>> lengths = np.array([5, 3, 9, 2])  # of examples 40, 41, 42 and 43 of a dataset
    >>> plan = pack(lengths, 10, rows_multiple_of=2)
    >>> part = RankPlan.of(plan, 0, np.arange(40, 44), lengths)
    >>> part.indices, part.lengths.tolist()
    ([40, 41, 43], [5, 3, 2])
    """

    plan: PackingPlan
    """Of the whole batch, over all ranks."""
    rank: int
    """The rank whose rows are collated."""
    indices: list[int]
    """What the rank reads of the dataset."""
    lengths: _Ints
    """int64 [len(indices)], the tokens that the plan takes each of them to have."""
    num_examples: int
    """Examples of the batch, over all ranks."""
    num_loss_tokens: int | None = None
    """Loss tokens of the batch, over all ranks; None: not known."""
    own_num_loss_tokens: int | None = None
    """Loss tokens of what the rank reads."""

    @classmethod
    def of(
        cls,
        plan: PackingPlan,
        rank: int,
        indices: _Ints,
        lengths: _Ints,
        num_loss_tokens: _Ints | None = None,
    ) -> RankPlan:
        """The part of ``rank``, where ``plan`` packs the examples at ``indices`` of a dataset.

        ``lengths`` and ``num_loss_tokens`` are int64 [N], an entry an example of the batch.
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
        """The rows of the plan that are the rank's."""
        return self.plan.rank_rows(self.rank)

    @property
    def pieces(self) -> slice:
        """The pieces of the plan that lie in these rows."""
        return _pieces(self.plan, self.rank)

    @property
    def positions(self) -> _Ints:
        """[S] the position in ``indices`` of the example of each of these pieces."""
        examples = self.plan.example_indices[self.pieces]
        return np.searchsorted(np.unique(examples), examples)

    def with_examples(self, examples: Any) -> PlannedExamples:
        """What the collator takes: the examples at ``indices``, as a list or as columns."""
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
    """Examples on their way to ``PackedCollator``, and the plan it is to follow."""

    plan: RankPlan
    examples: Any
    """A list of examples, or columns: those at ``plan.indices``, in that order."""


def _pieces(plan: PackingPlan, rank: int) -> slice:
    rows = plan.rank_rows(rank)
    return slice(int(plan.row_offsets[rows.start]), int(plan.row_offsets[rows.stop]))
