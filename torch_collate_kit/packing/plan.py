"""The result of packing: the row and the place of every piece of every example."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import plural
from torch_collate_kit.packing.cost import ModelCost
from torch_collate_kit.packing.rows import Ints, Rows, row_sums
from torch_collate_kit.packing.segments import Segments


@dataclass(frozen=True, eq=False, repr=False)
class PackingPlan:
    """Rows of pieces, listed row by row, as ``pack`` returns them. Legend: S pieces, R rows.

    A piece is an example, with all its segments, or a part of one. All arrays are int64; treat them
    as read-only. Rows are planned for ``N = rows_multiple_of`` ranks and are shard-major: rank r
    owns the rows ``[r * R / N, (r + 1) * R / N)``.

    >>> from torch_collate_kit import pack
    >>> plan = pack([5, 3, 9, 2], 10)
    >>> plan.bins, plan.row_tokens.tolist(), plan.efficiency
    ([[2], [0, 1, 3]], [9, 10], 0.95)
    """

    example_indices: Ints
    """[S] the example of each piece."""
    starts: Ints
    """[S] position of the piece's first token in its example; non-zero only after a split."""
    lengths: Ints
    """[S] number of tokens in the piece, padding not counted."""
    row_offsets: Ints
    """[R + 1] row r holds the pieces ``row_offsets[r]:row_offsets[r + 1]``."""
    max_tokens: int
    """Capacity of a row, in tokens."""
    align: int
    """A piece occupies its length rounded up to a multiple of this."""
    row_align: int
    """The width of the rows is a multiple of this."""
    rows_multiple_of: int
    """Number of ranks that the rows are planned for; the number of rows is a multiple of it."""
    dropped: Ints
    """[D] examples left out, ascending (overflow="drop")."""
    cut: Ints
    """[C] examples truncated or split, ascending (overflow="truncate", "split")."""
    num_cut_tokens: int
    """Tokens lost by truncation. A split loses none."""
    num_dropped_tokens: int
    """Tokens of the dropped examples."""
    patches: Ints
    """[S] patches of the images in the piece; 0 without an image, or if none were given."""
    vision_costs: Ints
    """[S] cost of these images in the vision tower."""
    max_patches: int | None
    """Capacity of a row, in patches; None for no limit."""
    dummy_image_tokens: int
    """Tokens of the dummy image that ``needs_dummy_image`` asks for."""
    cost: ModelCost
    """Cost of a piece in the language model."""
    segments: Segments | None = None
    """What the segments of each example take, [N] each; None where an example is one segment."""
    runs: Segments | None = None
    """What the segments of each piece take, [S] each, where examples were cut between them."""

    @property
    def num_rows(self) -> int:
        """Number of rows, including empty ones."""
        return len(self.row_offsets) - 1

    @property
    def num_dummy_rows(self) -> int:
        """Number of empty rows, which give every rank the same number of rows."""
        return int(np.count_nonzero(np.diff(self.row_offsets) == 0))

    @property
    def bins(self) -> list[list[int]]:
        """Example indices, a list per row. Python lists are slow: meant for inspection."""
        indices = self.example_indices.tolist()
        return [indices[a:b] for a, b in pairwise(self.row_offsets.tolist())]

    @property
    def aligned_lengths(self) -> Ints:
        """[S] cells each piece occupies: every segment rounded up to ``align``. A copy."""
        if self.runs is not None:
            return self.runs.cells
        if self.segments is not None:
            return self.segments.cells[self.example_indices]
        return -(-self.lengths // self.align) * self.align

    @property
    def num_segments(self) -> Ints:
        """[S] segments of each piece."""
        if self.runs is not None:
            return self.runs.counts
        if self.segments is not None:
            return self.segments.counts[self.example_indices]
        return np.ones_like(self.lengths)

    @property
    def costs(self) -> Ints:
        """[S] cost of each piece: ``cost.language`` of its aligned segments."""
        if self.runs is not None:
            return self.runs.costs
        if self.segments is not None:
            return self.segments.costs[self.example_indices]
        return self.cost.language(self.aligned_lengths)

    @property
    def row_tokens(self) -> Ints:
        """[R] tokens in each row, padding not counted."""
        return row_sums(self.lengths, self.row_offsets)

    @property
    def row_cells(self) -> Ints:
        """[R] cells used in each row, including alignment gaps; at most ``max_tokens``."""
        return row_sums(self.aligned_lengths, self.row_offsets)

    @property
    def row_patches(self) -> Ints:
        """[R] patches of the images in each row, dummy images not counted."""
        return row_sums(self.patches, self.row_offsets)

    @property
    def needs_dummy_image(self) -> npt.NDArray[np.bool_]:
        """[R] rows without an image, where another rank has one in its row at the same index: bool.

        Ranks must run the vision tower equally often, else their collectives do not match.
        """
        has_image = (self.row_patches > 0).reshape(self.rows_multiple_of, -1)
        needed: npt.NDArray[np.bool_] = (has_image.any(axis=0) & ~has_image).ravel()
        return needed

    @property
    def width(self) -> int:
        """Cells of the widest row, dummy images included, rounded up to ``row_align``; never 0."""
        cells = self.row_cells
        if self.patches.any():
            dummy_cells = -(-self.dummy_image_tokens // self.align) * self.align
            cells = cells + self.needs_dummy_image * dummy_cells
        return -(-max(1, int(cells.max())) // self.row_align) * self.row_align

    @property
    def efficiency(self) -> float:
        """Tokens divided by the ``num_rows * width`` cells of the batch."""
        return int(self.lengths.sum()) / (self.num_rows * self.width)

    @property
    def lower_bound(self) -> int:
        """A lower bound on the number of rows that these pieces need at this capacity.

        All cells (or patches) divided by the capacity, or the number of pieces of more than half of
        it, whichever is larger; rounded up to a multiple of ``rows_multiple_of``.
        """
        budgets = [(self.aligned_lengths, self.max_tokens // self.row_align * self.row_align)]
        if self.max_patches is not None:
            budgets.append((self.patches, self.max_patches))
        rows = 1
        for sizes, usable in budgets:
            by_sum = -(-int(sizes.sum()) // usable)
            by_large_pieces = int(np.count_nonzero(sizes > usable // 2))
            rows = max(rows, by_sum, by_large_pieces)
        return -(-rows // self.rows_multiple_of) * self.rows_multiple_of

    @property
    def tokens_per_rank(self) -> Ints:
        """[N] tokens of each rank, padding not counted."""
        return self._rank_sums(self.lengths)

    @property
    def cost_per_rank(self) -> Ints:
        """[N] cost in the language model: ``costs`` of the pieces."""
        return self._rank_sums(self.costs)

    @property
    def vision_cost_per_rank(self) -> Ints:
        """[N] cost in the vision tower, in the same unit: ``cost.vision`` of the images."""
        return self._rank_sums(self.vision_costs)

    def __repr__(self) -> str:
        pieces = [plural(len(self.lengths), "piece" if len(self.cut) else "example")]
        pieces += [f"{len(self.dropped):,} dropped"] if len(self.dropped) else []
        pieces += [f"{len(self.cut):,} cut"] if len(self.cut) else []
        ranks = "" if self.rows_multiple_of == 1 else f" for {self.rows_multiple_of} ranks"
        return (
            f"PackingPlan({', '.join(pieces)}; {int(self.lengths.sum()):,} tokens in "
            f"{self.num_rows:,} rows of {self.width:,} cells{ranks}, efficiency "
            f"{self.efficiency:.2%}, max_tokens={self.max_tokens})"
        )

    def rank_rows(self, rank: int) -> range:
        """Return the rows that belong to rank ``rank``; every rank has the same number.

        Raises:
            TypeError: ``rank`` is not an int.
            ValueError: ``rank`` is not in ``range(rows_multiple_of)``.

        >>> from torch_collate_kit import ParallelLayout, pack
        >>> pack([3, 3, 2, 2], max_tokens=5, parallel=ParallelLayout(dp=2)).rank_rows(1)
        range(1, 2)
        """
        num_ranks = self.rows_multiple_of
        hint = f"this plan has ranks 0 to {num_ranks - 1}"
        rank = checked_int("rank", rank, minimum=0, hint=hint)
        if rank >= num_ranks:
            raise ValueError(f"rank must be less than {num_ranks}, got {rank}; {hint}")
        rows_per_rank = self.num_rows // num_ranks
        return range(rank * rows_per_rank, (rank + 1) * rows_per_rank)

    def in_rows(self, rows: Rows, rows_multiple_of: int = 1) -> PackingPlan:
        """Return the plan of these pieces, or of some of them, in other rows. A copy."""
        order = rows.order
        patches = costs = np.zeros(len(order), dtype=np.int64)
        if self.patches.any():
            patches, costs = self.patches[order], self.vision_costs[order]
        plan = object.__new__(PackingPlan)  # dataclasses.replace takes as long as the arrays
        vars(plan).update(
            vars(self),
            example_indices=self.example_indices[order],
            starts=self.starts[order],
            lengths=self.lengths[order],
            row_offsets=rows.offsets,
            rows_multiple_of=rows_multiple_of,
            patches=patches,
            vision_costs=costs,
            runs=None if self.runs is None else self.runs.take(order),
        )
        return plan

    def _rank_sums(self, values: Ints) -> Ints:
        rows_per_rank = (len(self.row_offsets) - 1) // self.rows_multiple_of
        return row_sums(values, self.row_offsets[::rows_per_rank])
