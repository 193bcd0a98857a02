"""Balancing: pieces over a given number of rows."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.rows import Limits, Rows, Sizes, stable_argsort

__all__ = ["level"]

_Ints = npt.NDArray[np.int64]

_CLOSED = 1 << 96  # the weight of a row without a free slot: more than any int64 weights together


def level(
    rows: Rows, sizes: Sizes, num_rows: int, *, limits: Limits, weights: Sizes, most: int
) -> Rows:
    """Redistribute pieces over ``num_rows`` rows, as evenly as their sizes allow.

    ``num_rows`` is at least the present number of rows. The emptiest row and those with the most
    pieces, ``most`` rows in all, are taken apart. Their pieces are redistributed over these rows
    and the added ones, longest piece first, each to the row with the least weight so far (LPT:
    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969): those with images by their
    weight in the vision tower, then the others by their weight in the language model. If that
    overfills a row, ``sizes`` (tokens and patches) are the weights instead; if that fails too, half
    as many rows are taken apart. At last rows are split in two, so there are always ``num_rows``.

    Without images and ``limits.pieces`` no row is split. Dealing succeeds at the latest when as
    many rows are taken apart as are added. For a piece of size n to fit nowhere, each of the new
    rows, twice as many, would have to hold more than ``limits.tokens - n``. That is more than the
    tokens of the old rows or, for n over half the limit, more such pieces than the old rows hold.

    If no row is added, rows change only if that reduces the difference between the heaviest and
    the lightest of them.

    >>> sizes = Sizes(np.array([4, 3, 2, 1]), np.zeros(4, dtype=np.int64))
    >>> rows = Rows(np.arange(4), np.array([0, 4]))
    >>> level(rows, sizes, 2, limits=Limits(10, 0), weights=sizes, most=1)
    Rows(order=array([0, 3, 1, 2]), offsets=array([0, 2, 4]))
    """
    old_rows = len(rows.offsets) - 1
    added = np.arange(old_rows, num_rows)
    row_of, num_chosen = rows.labels(), min(most, old_rows)
    while num_chosen:
        chosen = np.arange(old_rows)
        if num_chosen < old_rows:
            chosen = np.sort(_by_pieces(rows, sizes.tokens)[:num_chosen])
        is_chosen = np.zeros(old_rows, dtype=bool)
        is_chosen[chosen] = True
        places = np.flatnonzero(is_chosen[row_of])
        longest = int(sizes.tokens.max())
        places = places[stable_argsort(longest - sizes.tokens[rows.order[places]], longest)]
        pieces = rows.order[places]
        if len(pieces) < num_chosen + len(added) and num_chosen < old_rows:
            break  # a row would stay empty, and others can be split
        taken = sizes.take(pieces)
        weighed = taken if weights is sizes else weights.take(pieces)
        for weigh in (taken,) if weights is sizes else (weighed, taken):
            bins = _deal(taken, weigh, num_chosen + len(added), limits)
            if bins is None:
                continue
            if len(added) or _is_evener(bins, weighed, rows, weights, chosen):
                row_of[places] = np.concatenate([chosen, added])[bins]
                return Rows.from_labels(rows.order, row_of, num_rows)
        num_chosen //= 2
    for _ in added:
        rows = _with_a_row_split(rows, sizes, limits)
    return rows


def _by_pieces(rows: Rows, sizes: _Ints) -> _Ints:
    """Row numbers: the emptiest row, then the others by descending number of pieces: int64 [R]."""
    by_pieces = np.argsort(-rows.counts(), kind="stable")
    emptiest = rows.totals(sizes)[by_pieces].argmin()
    return np.concatenate([by_pieces[[emptiest]], np.delete(by_pieces, emptiest)])


def _is_evener(bins: _Ints, taken: Sizes, rows: Rows, weights: Sizes, chosen: _Ints) -> bool:
    """Whether the rows ``bins`` of the pieces differ less in weight than the rows ``chosen``.

    Of two weights, the one that differs more in relation to its sum decides.
    """
    dealt = [_added(values, bins, len(chosen)) for values in taken]
    before = [rows.totals(values)[chosen] for values in weights]
    sums = [max(1, int(values.sum())) for values in taken]
    after, now = (
        max(int(np.ptp(tokens)) * sums[1], int(np.ptp(patches)) * sums[0])
        for tokens, patches in (dealt, before)
    )
    return after < now


def _deal(sizes: Sizes, weights: Sizes, num_rows: int, limits: Limits) -> _Ints | None:
    """The row of each piece: the lightest row so far. None if a row overflows."""
    if limits.pieces is not None and len(sizes.tokens) > num_rows * limits.pieces:
        return None
    slots = None if limits.pieces is None else [limits.pieces] * num_rows
    bins = np.zeros(len(sizes.tokens), dtype=np.int64)
    loads = [0] * num_rows
    images = np.flatnonzero(sizes.patches)
    if len(images):
        images = images[np.argsort(-weights.patches[images], kind="stable")]
        bins[images] = _lightest(weights.patches[images].tolist(), loads, slots)
        loads = _added(weights.tokens[images], bins[images], num_rows).tolist()
    texts = np.flatnonzero(sizes.patches == 0)
    bins[texts] = _lightest(weights.tokens[texts].tolist(), loads, slots)
    tokens, patches = (_added(values, bins, num_rows) for values in sizes)
    cells = np.where(patches > 0, limits.tokens, limits.text)
    return bins if ((tokens <= cells) & (patches <= limits.patches)).all() else None


def _added(values: _Ints, bins: _Ints, num_rows: int) -> _Ints:
    """The sum of the values of each row, exactly: int64 [num_rows]."""
    totals = np.zeros(num_rows, dtype=np.int64)
    np.add.at(totals, bins, values)
    return totals


def _lightest(weights: list[int], loads: list[int], slots: list[int] | None) -> list[int]:
    """The row of each piece: the lightest so far that has a free slot. Counts ``slots`` down."""
    num_rows = len(loads)
    heap = [load * num_rows + row for row, load in enumerate(loads)]  # cheap to compare
    if slots is None:
        heapify(heap)
        return [heapreplace(heap, heap[0] + weight * num_rows) % num_rows for weight in weights]
    heap = [key if slots[row] else key + _CLOSED * num_rows for row, key in enumerate(heap)]
    heapify(heap)
    bins: list[int] = []
    for weight in weights:
        row = heap[0] % num_rows
        bins.append(row)
        slots[row] -= 1
        heapreplace(heap, heap[0] + (weight if slots[row] else _CLOSED) * num_rows)
    return bins


def _with_a_row_split(rows: Rows, sizes: Sizes, limits: Limits) -> Rows:
    """One row more: about half of the pieces of the row that has the most."""
    num_rows = len(rows.offsets) - 1
    row = int(rows.counts().argmax())
    places = np.arange(rows.offsets[row], rows.offsets[row + 1])
    pieces = rows.order[places]
    is_image = sizes.patches[pieces] > 0
    moved = np.zeros(len(pieces), dtype=bool)
    if is_image.sum() == 1:  # the text that leaves its image must leave room for a dummy image
        texts = np.flatnonzero(~is_image)
        fit = np.cumsum(sizes.tokens[pieces[texts]]) <= limits.text
        moved[texts[fit][: -(-len(texts) // 2)]] = True
    else:
        moved[np.flatnonzero(is_image)[1::2]] = moved[np.flatnonzero(~is_image)[1::2]] = True
    row_of = rows.labels()
    row_of[places[moved]] = num_rows
    return Rows.from_labels(rows.order, row_of, num_rows + 1)
