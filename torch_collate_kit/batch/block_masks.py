"""Block masks of flex attention in closed form, from the boundaries of segments.

A cell k is seen by one run of queries, ``first[k] <= q < stop[k]``, and both rise along a row. So
the blocks of keys that a block of queries sees are a run, those that it sees whole a run inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_SIZE = 128  # cells of a block, the default of flex attention


def document_masks(
    flat: Tensor, segments_RW: Tensor, *, window: int | None = None, two_way: bool = False
) -> BlockMask | dict[str, BlockMask]:
    """Return what ``create_block_mask`` would for rows of segments; with ``window`` a dict of two.

    ``flat``, int32 [S + 1], bounds the segments, ``segments_RW`` is that of each cell, both over
    all rows. A cell sees its segment up to itself, or all of it (``two_way``), and of that at most
    ``window`` cells to a side, itself included. Waits for no device.

    >>> document_masks(torch.tensor([0, 3, 5]).int(), torch.tensor([[0, 0, 0, 1, 1]])).shape
    (1, 1, 5, 5)
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_rows, width = segments_RW.shape
    window = None if window is None else min(window, width)  # sums below are of int32
    begin = torch.arange(0, width, _SIZE, dtype=torch.int32, device=flat.device)
    ends = torch.stack([begin, (begin + (_SIZE - 1)).clamp_(max=width - 1)])  # cells of a block
    segments = segments_RW[:, ends]
    rows = torch.arange(num_rows, dtype=torch.int32, device=flat.device)[:, None, None] * width
    starts, stops = flat[segments] - rows, flat[segments + 1] - rows
    firsts = starts if two_way else ends.expand_as(starts)

    def mask(first: Tensor, stop: Tensor, window: int | None) -> BlockMask:
        def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = segments_RW[row, query] == segments_RW[row, key]
            seen = seen if two_way else seen & (key <= query)
            return seen if window is None else seen & ((query - key).abs() < window)

        make: Any = BlockMask
        tables = _tables(first, stop, begin, width)
        made: BlockMask = make((width, width), *tables, (_SIZE, _SIZE), is_seen)
        return made

    full = mask(firsts, stops, None)
    if window is None:
        return full
    firsts = torch.maximum(firsts, ends - (window - 1)) if two_way else firsts
    sliding = mask(firsts, torch.minimum(stops, ends + window), window)
    return {"full_attention": full, "sliding_attention": sliding}


def _tables(first: Tensor, stop: Tensor, begin: Tensor, width: int) -> list[Tensor]:
    """Return the eight tables of a mask, from the first and the last key of blocks: [R, 2, N]."""
    low, high = torch.stack([first[:, 0], stop[:, 0]]), torch.stack([stop[:, 1], first[:, 1]])
    if width % _SIZE:
        high[1, :, -1] = width  # a block that the row cuts is never full
    of_block = begin.expand_as(low).contiguous()
    inside = torch.searchsorted(high, of_block, right=True, out_int32=True)
    beyond = torch.searchsorted(low, of_block + _SIZE, out_int32=True)
    lo, full_hi = torch.stack([inside, low // _SIZE], 1)  # of blocks of queries, and of keys
    hi, full_lo = torch.stack([beyond, (high + (_SIZE - 1)) // _SIZE], 1)
    # The blocks from lo to before hi are seen, as a whole those from full_lo to before full_hi.
    full = (full_hi - full_lo).clamp_(min=0)
    partial, full_lo = hi - lo - full, torch.clamp(full_lo, lo, hi)
    before, end, none = full_lo - lo, full_lo + full, torch.zeros_like(lo)
    # A table counts up by one, but for a step here and there; all blocks not seen follow at last.
    at = [none, before, partial, partial + lo, hi, none, none, none, full, end]
    steps = [lo - 1, full, -hi, before, partial - before, none, none, full_lo - 1, -end, full]
    at_5, steps_5 = (torch.stack(x).view(2, 5, *lo.shape).movedim(1, -1) for x in (at, steps))
    size = lo.shape[-1]
    found = torch.ones(*at_5.shape[:-1], size, dtype=torch.int32, device=lo.device)
    found.scatter_add_(-1, at_5.clamp(max=size - 1).long(), steps_5.masked_fill(at_5 >= size, 0))
    torch.cumsum(found, -1, dtype=torch.int32, out=found)
    tables = (partial, found[0], full, found[1])
    return [table[side][:, None] for side in (0, 1) for table in tables]
