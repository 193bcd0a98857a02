"""The result of packing: the row and the place of every piece of every example."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int, plural
from torch_collate_kit.packing.atoms import NO_ATOMS, NO_INTS, Atoms
from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints, Rows, row_sums


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

    atoms: Atoms
    """The pieces: columns [S] ``examples``, ``starts``, ``tokens``, ``cells`` (segments aligned),
    ``costs``, ``segments``, and of their images ``patches`` and ``vision_costs``."""
    row_offsets: Ints
    """[R + 1] row r holds the pieces ``row_offsets[r]:row_offsets[r + 1]``."""
    packing: PackingOptions
    """How the rows were planned."""
    rows_multiple_of: int = 1
    """Number of ranks that the rows are planned for; the number of rows is a multiple of it."""
    left_out: Atoms = NO_ATOMS
    """[D] examples left out, ascending (overflow="drop")."""
    cut: Ints = field(default_factory=NO_INTS.copy)
    """[C] examples truncated or split, ascending (overflow="truncate", "split")."""
    num_cut_tokens: int = 0
    """Tokens lost by truncation. A split loses none."""

    @property
    def example_indices(self) -> Ints:
        """[S] the example of each piece."""
        return self.atoms.examples

    @property
    def starts(self) -> Ints:
        """[S] position of the piece's first token in its example; non-zero only after a split."""
        return self.atoms.starts

    @property
    def lengths(self) -> Ints:
        """[S] number of tokens in the piece, padding not counted."""
        return self.atoms.tokens

    @property
    def dropped(self) -> Ints:
        """[D] examples left out, ascending (overflow="drop")."""
        return self.left_out.examples

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens of the dropped examples."""
        return int(self.left_out.tokens.sum())

    @property
    def max_tokens(self) -> int:
        """Capacity of a row, in tokens."""
        return self.packing.max_tokens

    @property
    def rows(self) -> Rows:
        """The rows of the pieces, numbered as they are listed."""
        return Rows(np.arange(len(self.atoms.tokens)), self.row_offsets)

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
        indices = self.atoms.examples.tolist()
        return [indices[a:b] for a, b in pairwise(self.row_offsets.tolist())]

    @property
    def row_tokens(self) -> Ints:
        """[R] tokens in each row, padding not counted."""
        return row_sums(self.atoms.tokens, self.row_offsets)

    @property
    def row_cells(self) -> Ints:
        """[R] cells used in each row, including alignment gaps; at most ``max_tokens``."""
        return row_sums(self.atoms.cells, self.row_offsets)

    @property
    def row_patches(self) -> Ints:
        """[R] patches of the images in each row, dummy images not counted."""
        return row_sums(self.atoms.patches, self.row_offsets)

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
        cells, layout = self.row_cells, self.packing.parallel
        if self.atoms.patches.any():
            dummy_cells = -(-self.packing.dummy_image_tokens // layout.align) * layout.align
            cells = cells + self.needs_dummy_image * dummy_cells
        return -(-max(1, int(cells.max())) // layout.row_align) * layout.row_align

    @property
    def efficiency(self) -> float:
        """Tokens divided by the ``num_rows * width`` cells of the batch."""
        return int(self.atoms.tokens.sum()) / (self.num_rows * self.width)

    @property
    def tokens_per_rank(self) -> Ints:
        """[N] tokens of each rank, padding not counted."""
        return self._rank_sums(self.atoms.tokens)

    @property
    def cost_per_rank(self) -> Ints:
        """[N] cost in the language model: ``atoms.costs`` of the pieces."""
        return self._rank_sums(self.atoms.costs)

    @property
    def vision_cost_per_rank(self) -> Ints:
        """[N] cost in the vision tower, in the same unit: ``cost.vision`` of the images."""
        return self._rank_sums(self.atoms.vision_costs)

    def __repr__(self) -> str:
        pieces = [plural(len(self.atoms.tokens), "piece" if len(self.cut) else "example")]
        pieces += (
            [f"{len(self.left_out.examples):,} dropped"] if len(self.left_out.examples) else []
        )
        pieces += [f"{len(self.cut):,} cut"] if len(self.cut) else []
        ranks = "" if self.rows_multiple_of == 1 else f" for {self.rows_multiple_of} ranks"
        return (
            f"PackingPlan({', '.join(pieces)}; {int(self.atoms.tokens.sum()):,} tokens in "
            f"{self.num_rows:,} rows of {self.width:,} cells{ranks}, efficiency "
            f"{self.efficiency:.2%}, max_tokens={self.packing.max_tokens})"
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
        plan = object.__new__(PackingPlan)  # dataclasses.replace takes as long as the arrays
        atoms = self.atoms.take(rows.order)
        changed = {"row_offsets": rows.offsets, "rows_multiple_of": rows_multiple_of}
        vars(plan).update(vars(self), atoms=atoms, **changed)
        return plan

    def _rank_sums(self, values: Ints) -> Ints:
        rows_per_rank = (len(self.row_offsets) - 1) // self.rows_multiple_of
        return row_sums(values, self.row_offsets[::rows_per_rank])
