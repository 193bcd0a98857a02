"""Which packed segment every cell of a batch of model inputs belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RowSegments", "find_segments"]


class RowSegments(NamedTuple):
    """The segment of each cell [R, W], -1 where none is, and the row of each segment."""

    ids_RW: Tensor
    rows: list[int]

    def name(self, segment: int) -> str:
        row = self.rows[segment]
        return f"row {row} segment {segment - self.rows.index(row)}"


def find_segments(inputs: Mapping[str, Any]) -> RowSegments:
    """By ``cu_seq_lens_q``, otherwise by positions, without cells that a 2-D mask excludes.

    Raises:
        ValueError: neither of the two, or they do not cover ``input_ids``.

    >>> inputs = {"input_ids": torch.ones(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> find_segments(inputs).ids_RW.tolist()
    [[0, 0, 0, 1, 1]]
    """
    ids = inputs["input_ids"]
    cu_seq_lens, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if cu_seq_lens is not None:
        lengths = torch.diff(cu_seq_lens.long())
    elif positions is not None:
        lengths = _lengths_from_positions(positions, len(ids))
    else:
        raise ValueError(
            "neither cu_seq_lens_q nor position_ids is passed, so neither this check nor the model "
            "knows the segments; pass what Batch.model_inputs() returns"
        )
    if int(lengths.sum()) != ids.numel():
        raise ValueError(
            f"the segments cover {int(lengths.sum())} tokens, but input_ids has {ids.numel()} "
            f"cells ({list(ids.shape)}); cu_seq_lens_q must be flat over the rows"
        )
    cells = torch.repeat_interleave(lengths).view(ids.shape).to(ids.device)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        cells = cells.masked_fill(mask == 0, -1)
    # renumbered from 0, without segments that are empty or all padding, which is -1
    found, dense = torch.unique(cells, return_inverse=True)
    dense = dense - int(found[0] < 0)
    row_of = dense.new_zeros(int(dense.max()) + 1)
    rows, columns = torch.nonzero(dense >= 0, as_tuple=True)
    row_of[dense[rows, columns]] = rows
    return RowSegments(dense, row_of.tolist())


def _lengths_from_positions(positions: Tensor, num_rows: int) -> Tensor:
    """Of positions [R, W] or [1, W], of [4, R, W] with a text row first, or of [3, R, W]."""
    if positions.ndim == 3 and len(positions) == 3:
        # time, height and width: images repeat and skip positions, only a first token has 0 in all
        is_first = (positions == 0).all(0)
    else:  # as transformers sees it: a segment that counts on from the one before is part of it
        of_text = positions.flatten(0, -2)[:num_rows].expand(num_rows, -1)
        is_first = torch.diff(of_text, dim=1, prepend=of_text[:, :1]) != 1
    is_first[:, 0] = True
    starts = torch.nonzero(is_first.flatten()).flatten()
    return torch.diff(torch.cat([starts, starts.new_full((1,), is_first.numel())]))
