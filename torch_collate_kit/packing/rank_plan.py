"""One rank's part of a shared plan: which examples it reads, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints, row_sums, running_sum

__all__ = ["PlannedExamples", "RankPlan"]


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

    >>> from torch_collate_kit.packing import ParallelLayout, pack
    >>> lengths = np.array([5, 3, 9, 2])  # of examples 40, 41, 42 and 43 of a dataset
    >>> plan = pack(lengths, 10, parallel=ParallelLayout(dp=2))
    >>> part = RankPlan.of(plan, 0, np.arange(40, 44), lengths)
    >>> part.indices, part.lengths.tolist()
    ([40, 41, 43], [5, 3, 2])
    """

    plan: PackingPlan
    """The plan of the whole batch, over all ranks."""
    rank: int | None
    """The rank whose rows are collated; None for those of all ranks."""
    indices: list[int]
    """The dataset indices that the rank reads; none for all ranks, whose examples are at hand."""
    lengths: Ints
    """int64 [len(indices)], the number of tokens that the plan assumes for each of them."""
    num_examples: int
    """Number of examples in the batch, over all ranks; 0 for as many as are at hand."""
    num_loss_tokens: int | None = None
    """Number of loss tokens in the batch, over all ranks; None if unknown."""
    own_num_loss_tokens: int | None = None
    """Number of loss tokens in the examples that the rank reads; None if unknown."""
    world_size: int | None = None
    """Number of ranks that divide the rows; None for as many as the plan was made for."""
    left_out: tuple[int, ...] = ()
    """Examples, as the plan numbers them, that the rank was to read and does not: see without."""

    @classmethod
    def of(
        cls,
        plan: PackingPlan,
        rank: int,
        indices: Ints,
        lengths: Ints,
        num_loss_tokens: Ints | None = None,
        *,
        world_size: int | None = None,
    ) -> RankPlan:
        """The part of ``rank`` in ``plan``, which packs the dataset's examples at ``indices``.

        ``world_size`` divides the number of ranks that the plan was made for. ``lengths`` and
        ``num_loss_tokens`` are int64 [N], one entry per example of the batch.
        """
        part = cls(plan, rank, [], lengths[:0], len(indices), world_size=world_size)
        examples = np.unique(plan.example_indices[part.pieces])
        total = own = None
        if num_loss_tokens is not None:
            total = int(np.delete(num_loss_tokens, plan.dropped).sum())
            own = int(num_loss_tokens[examples].sum())
        return replace(
            part,
            indices=indices[examples].tolist(),
            lengths=lengths[examples],
            num_loss_tokens=total,
            own_num_loss_tokens=own,
        )

    @classmethod
    def whole(cls, plan: PackingPlan) -> RankPlan:
        """All rows of ``plan``; its pieces may be any parts of the examples that it numbers."""
        return cls(plan, None, [], np.zeros(0, dtype=np.int64), 0)

    @property
    def num_parts(self) -> int:
        """Number of ranks that divide the rows."""
        return self.world_size or self.plan.num_ranks

    @property
    def rows(self) -> range:
        """The rows of the plan that are collated."""
        if self.rank is None:
            return range(self.plan.num_rows)
        each = self.plan.num_ranks // self.num_parts  # ranks of the plan, whose rows follow
        first = self.plan.rank_rows(self.rank * each)
        return range(first.start, self.plan.rank_rows((self.rank + 1) * each - 1).stop)

    def without(self, positions: Sequence[int]) -> RankPlan:
        """The same rows, of the same width, without the examples at ``positions`` of ``indices``.

        What follows in a row moves up, and the pad tail grows; a row may be left without a piece.
        Other ranks do not know, so what is said of the whole batch stays as it was planned,
        ``num_loss_tokens`` too.

        >>> from torch_collate_kit.packing import ParallelLayout, pack
        >>> lengths = np.array([5, 3, 9, 2])
        >>> plan = pack(lengths, 10, parallel=ParallelLayout(dp=2))
        >>> part = RankPlan.of(plan, 0, np.arange(40, 44), lengths)
        >>> shorter = part.without([1])
        >>> shorter.indices, shorter.row_offsets.tolist(), shorter.plan.width
        ([40, 43], [0, 2], 10)
        """
        gone = [int(position) for position in positions]
        examples = np.unique(self.plan.example_indices[self.pieces])[gone]
        return replace(
            self,
            indices=np.delete(np.array(self.indices, dtype=np.int64), gone).tolist(),
            lengths=np.delete(self.lengths, gone),
            own_num_loss_tokens=None,
            left_out=(*self.left_out, *examples.tolist()),
        )

    @property
    def pieces(self) -> slice | Ints:
        """The pieces of the plan that are collated, row by row."""
        planned = self._planned
        return planned.start + np.flatnonzero(self._is_kept) if self.left_out else planned

    @property
    def row_offsets(self) -> Ints:
        """[rows + 1] row r of these rows holds ``row_offsets[r]:row_offsets[r + 1]`` of them."""
        offsets = self.plan.row_offsets[self.rows.start : self.rows.stop + 1]
        offsets = offsets - offsets[0]
        return running_sum(self._is_kept)[offsets] if self.left_out else offsets

    @property
    def _planned(self) -> slice:
        offsets = self.plan.row_offsets
        return slice(int(offsets[self.rows.start]), int(offsets[self.rows.stop]))

    @property
    def _is_kept(self) -> npt.NDArray[np.bool_]:
        """Of each piece planned for these rows, whether its example is read."""
        return ~np.isin(self.plan.example_indices[self._planned], self.left_out)

    @property
    def positions(self) -> Ints:
        """[S] for each piece in these rows, the position of its example among those read."""
        if self.rank is None:
            return self.plan.example_indices
        examples = self.plan.example_indices[self.pieces]
        return np.searchsorted(np.unique(examples), examples)

    @property
    def needs_dummy_image(self) -> npt.NDArray[np.bool_]:
        """bool [rows]: as planned, and rows that have lost their images in a plan of several ranks.

        However many ranks there are, so that the rows do not depend on it.
        """
        rows = slice(self.rows.start, self.rows.stop)
        needed = self.plan.needs_dummy_image[rows]
        if not self.left_out or self.plan.num_ranks == 1:
            return needed
        left = row_sums(self.plan.patches[self.pieces], self.row_offsets)
        return needed | ((self.plan.row_patches[rows] > 0) & (left == 0))

    @property
    def patches(self) -> Ints:
        """[len(indices)] patches of images that the plan assumes for each example that is read."""
        patches = np.zeros(len(self.indices), dtype=np.int64)
        if self.rank is not None:
            patches[self.positions] = self.plan.patches[self.pieces]
        return patches

    def num_loss_tokens_elsewhere(self, found: int) -> int:
        """Loss tokens of the batch besides those found in the examples read; 0 if unknown."""
        return 0 if self.num_loss_tokens is None else self.num_loss_tokens - found

    def check_lengths(self, lengths: Ints) -> None:
        """That the examples read, of these lengths, are those that were planned.

        Raises:
            DataError: more or fewer examples, or others; a plan of them would cut or leave holes.
        """
        if self.rank is None:
            numbered = np.append(self.plan.example_indices, self.plan.dropped)
            num_planned = int(numbered.max(initial=-1)) + 1
            if len(lengths) != num_planned:
                raise DataError(
                    f"there are {len(lengths)} examples, and the plan was made for {num_planned}; "
                    "give all that were planned, in their order, and no others"
                )
            ends = np.zeros_like(lengths)
            np.maximum.at(ends, self.plan.example_indices, self.plan.starts + self.plan.lengths)
            beyond = np.flatnonzero(ends > lengths)
            if len(beyond):
                i = int(beyond[0])
                raise DataError(
                    f"example {i} has {lengths[i]} tokens, the plan reads {ends[i]} of it; an "
                    "example must stay as it was when it was planned"
                )
            return
        if len(lengths) != len(self.indices):
            raise DataError(
                f"the batch has {len(lengths)} examples where {len(self.indices)} were asked for; "
                "a dataset's __getitems__ must return one per index, in their order"
            )
        wrong = np.flatnonzero(lengths != self.lengths)
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"example {self.indices[i]} of the dataset has {lengths[i]} tokens, the sampler "
                f"was told {self.lengths[i]}; its lengths must be those of the dataset that is "
                "read: pass dataset.lengths"
            )

    def check_patches(self, patches: Ints) -> None:
        """That the examples read, with so many patches of images (int64), are those planned.

        Raises:
            DataError: another number of patches, whole or of what the plan reads; a row might then
                hold more than it may, and ranks would not run the vision tower equally often.
        """
        planned = np.zeros_like(patches)
        np.add.at(planned, self.positions, self.plan.patches[self.pieces])
        if self.rank is None:
            cut = np.isin(np.arange(len(patches)), [*self.plan.cut, *self.plan.dropped])
            planned = np.where(cut, patches, planned)
        wrong = np.flatnonzero(patches != planned)
        if len(wrong):
            i = int(wrong[0])
            example = f"{i}" if self.rank is None else f"{self.indices[i]} of the dataset"
            raise DataError(
                f"example {example} has {patches[i]} patches of images, the plan was made for "
                f"{planned[i]}; give the sampler patches= of the dataset that is read"
            )

    def check_loss_tokens(self, num_loss_tokens: int) -> None:
        """That the examples read have as many loss tokens as the sampler was told.

        Raises:
            DataError: they have not.
        """
        if self.own_num_loss_tokens not in (None, num_loss_tokens):
            raise DataError(
                f"the examples at {self.indices} of the dataset have {num_loss_tokens} loss "
                f"tokens, the sampler was told {self.own_num_loss_tokens}; its num_loss_tokens "
                "must be those of the dataset that is read: pass dataset.num_loss_tokens"
            )

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

    @property
    def part(self) -> RankPlan:
        """The plan, as a part of the batch or as all of it."""
        return RankPlan.whole(self.plan) if isinstance(self.plan, PackingPlan) else self.plan
