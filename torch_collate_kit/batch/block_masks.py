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

    ``flat``, int [S + 1], bounds the segments, ``segments_RW`` is that of each cell, both over all
    rows. A cell sees its segment up to itself, or all of it (``two_way``), and of that at most
    ``window`` cells to a side, itself included. Waits for no device.

    >>> document_masks(torch.tensor([0, 3, 5]), torch.tensor([[0, 0, 0, 1, 1]])).shape
    (1, 1, 5, 5)
    """
    num_rows, width = segments_RW.shape
    columns = torch.arange(width, dtype=torch.int32, device=flat.device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=flat.device)[:, None] * width
    starts, stops = (bounds[segments_RW] - rows for bounds in (flat[:-1], flat[1:]))
    firsts = starts if two_way else columns.expand(num_rows, -1)
    full = _block_mask(firsts, stops)
    if window is None:
        return full
    firsts = torch.maximum(firsts, columns - (window - 1)) if two_way else firsts
    sliding = _block_mask(firsts, torch.minimum(stops, columns + window))
    return {"full_attention": full, "sliding_attention": sliding}


def _block_mask(first: Tensor, stop: Tensor) -> BlockMask:
    """Return the mask where query q sees key k if ``first[k] <= q < stop[k]``: [R, W] each."""
    from torch.nn.attention.flex_attention import BlockMask

    def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[row, key] <= query) & (query < stop[row, key])

    width = first.shape[1]
    at = torch.arange(0, width, _SIZE, dtype=torch.int32, device=first.device)
    last = (at + (_SIZE - 1)).clamp(max=width - 1)
    least, most = ([x[:, cells].contiguous() for x in (first, stop)] for cells in (at, last))
    begin, end = (x.expand(len(first), -1).contiguous() for x in (at, last + 1))
    of_queries = (
        torch.searchsorted(most[1], begin, right=True, out_int32=True),
        torch.searchsorted(least[0], end, out_int32=True),
        torch.searchsorted(least[1], end, out_int32=True),
        torch.searchsorted(most[0], begin, right=True, out_int32=True),
    )
    of_keys = (least[0] // _SIZE, -(-most[1] // _SIZE), -(-most[0] // _SIZE), least[1] // _SIZE)
    tables = (*_tables(*of_queries, width // _SIZE), *_tables(*of_keys, width // _SIZE))
    make: Any = BlockMask
    return make((width, width), *tables, (_SIZE, _SIZE), is_seen)


def _tables(lo: Tensor, hi: Tensor, full_lo: Tensor, full_hi: Tensor, num_whole: int) -> Any:
    """Return the count of partial blocks [R, 1, N], these [R, 1, N, N], and the same of full ones.

    Seen are those from ``lo`` to before ``hi``, int32 [R, N] each, as a whole from ``full_lo`` to
    before ``full_hi``, but no block that the row cuts. All others follow, ascending.
    """
    number = torch.arange(lo.shape[1], dtype=torch.int32, device=lo.device)
    full = (full_hi.clamp(max=num_whole) - full_lo).clamp_(min=0) * (number < num_whole)
    partial = hi - lo - full
    full_lo = torch.where(full > 0, full_lo, lo + partial)
    before, none = full_lo - lo, torch.zeros_like(lo)
    starts = [none, before, partial, partial + lo, partial + lo + full]
    seen = _counted_up(starts, [lo, lo + full, -partial, before - partial, none])
    whole = _counted_up([none, full, full + full_lo], [full_lo, -full, none])
    return partial[:, None], seen, full[:, None], whole


def _counted_up(starts: list[Tensor], shifts: list[Tensor]) -> Tensor:
    """Return ``n + shift`` for n below N, each shift from its start on: int32 [R, 1, N, N]."""
    at, steps = torch.stack(starts, 2).long(), torch.stack(shifts, 2)
    steps = torch.diff(steps, prepend=torch.ones_like(steps[..., :1]))
    size = at.shape[1]
    found = torch.ones(len(at), size, size, dtype=torch.int32, device=at.device)
    found.scatter_add_(2, at.clamp(max=size - 1), torch.where(at < size, steps, 0))
    return torch.cumsum(found, 2, dtype=torch.int32, out=found)[:, None]
