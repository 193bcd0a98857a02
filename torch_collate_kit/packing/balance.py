"""Balance: pieces evened out over rows by tokens, as rows are padded; rows over ranks by cost."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from torch_collate_kit.packing.atoms import Atoms
from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints, Limits, Rows, Sizes, stable_argsort
from torch_collate_kit.packing.strategies import OpenRows, best_fit_decreasing, split_evenly

# Levelling takes apart at most this many rows per rank: they have enough pieces for the few rows
# that rounding adds, and redistributing a million pieces one by one would be slow.
_LEVELLED_ROWS_PER_RANK = 32
_CLOSED = 1 << 96  # the weight of a row without a free slot: more than any int64 weights together
_TOTAL = 1 << 30  # costs are scaled to about this sum, so that a product of two sums fits int64
_EVEN = 1000  # ranks within 1 / _EVEN of the mean are even
_SWAPS_PER_RANK = 16
_FILLED_UP = (0, 1 / 4)  # shares of the pieces: more leaves less room, and is less even


def weights_of(atoms: Atoms, packing: PackingOptions) -> Sizes:
    """Return the weights to even out: costs in the language model and vision tower, or sizes."""
    if packing.balance != "attention":
        return atoms.sizes
    has_tower = atoms.vision_costs.any()  # a model without one computes no image
    return atoms.costs, atoms.vision_costs if has_tower else atoms.patches


def assign_ranks(rows: Rows, atoms: Atoms, packing: PackingOptions, *, num_ranks: int) -> Rows:
    """Order rows shard-major, so that the ranks cost alike; their number is a multiple of them."""
    if num_ranks == 1 or not len(rows.order):
        return rows
    if packing.balance is None:  # round robin
        return rows.take(np.arange(len(rows.offsets) - 1).reshape(-1, num_ranks).T.ravel())
    costs_S, image_costs_S = weights_of(atoms, packing)
    given = over_ranks(
        rows.totals(costs_S),
        num_ranks,
        keep_order=packing.strategy == "sequential",
        image_costs=rows.totals(image_costs_S) if atoms.patches.any() else None,
    )
    return rows.take(given)


def level_rows(
    rows: Rows,
    atoms: Atoms,
    limits: Limits,
    packing: PackingOptions,
    *,
    num_rows: int,
    num_ranks: int,
) -> Rows:
    """Even out filled rows over ``num_rows``, by the strategy."""
    if not len(rows.order):
        return Rows(rows.order, np.zeros(num_rows + 1, dtype=np.int64))
    if packing.strategy == "sequential":
        return split_evenly(atoms.sizes, num_rows, limits)
    is_balanced = packing.strategy == "balanced"
    return level(
        rows,
        atoms.sizes,
        num_rows,
        limits=limits,
        image_weights=atoms.patches if is_balanced else weights_of(atoms, packing)[1],
        most=len(rows.offsets) - 1 if is_balanced else _LEVELLED_ROWS_PER_RANK * num_ranks,
    )


def level(
    rows: Rows, sizes: Sizes, num_rows: int, *, limits: Limits, image_weights: Ints, most: int
) -> Rows:
    """Redistribute pieces over ``num_rows`` rows, at least as many as now, as evenly as possible.

    The emptiest row and those with the most pieces, ``most`` rows in all, are taken apart. Their
    pieces go to these rows and the added ones, longest first, each to the row with the least weight
    so far (LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969): those with
    images by ``image_weights``, int64 [S], then the others by tokens. If that overfills a row,
    images are dealt by their patches; then half as many rows are taken apart, at last rows are
    split in two. If no row is added, rows change only if the heaviest and the lightest differ less.
    """
    old_rows = len(rows.offsets) - 1
    added = np.arange(old_rows, num_rows)
    row_of, num_chosen = rows.labels(), min(most, old_rows)
    tokens, longest = sizes[0], int(sizes[0].max())
    weights = tokens, image_weights
    while num_chosen:
        chosen, places = _taken_apart(rows, tokens, num_chosen)
        if len(places) < num_chosen + len(added) and num_chosen < old_rows:
            break  # a row would stay empty, and others can be split
        places = places[stable_argsort(longest - tokens[rows.order[places]], longest)]
        pieces = rows.order[places]
        taken = tokens[pieces], sizes[1][pieces]
        for weigh in (weights, sizes) if limits.patches else (sizes,):
            bins = _deal(taken, weigh[1][pieces], num_chosen + len(added), limits)
            if bins is None:
                continue
            if len(added) or _is_evener(
                bins, (taken[0], image_weights[pieces]), rows, weights, chosen
            ):
                row_of[places] = np.concatenate([chosen, added])[bins]
                return Rows.from_labels(rows.order, row_of, num_rows)
        num_chosen //= 2
    for _ in added:
        rows = _with_a_row_split(rows, sizes, limits)
    return rows


def _taken_apart(rows: Rows, sizes: Ints, number: int) -> tuple[Ints, Ints]:
    """Choose the emptiest row and those with the most pieces, ascending, and their places."""
    counts, places = rows.counts(), np.arange(len(rows.order))
    if number == len(counts):
        return np.arange(number), places
    by_pieces = np.argsort(-counts, kind="stable")
    emptiest = by_pieces[rows.totals(sizes)[by_pieces].argmin()]
    others = by_pieces[by_pieces != emptiest]
    chosen = np.sort(np.append(others[: number - 1], emptiest))
    return chosen, Rows(places, rows.offsets).take(chosen).order


def _is_evener(bins: Ints, taken: Sizes, rows: Rows, weights: Sizes, chosen: Ints) -> bool:
    """Return whether the rows ``bins`` differ less in weight than the rows ``chosen``."""
    dealt = [_added(values, bins, len(chosen)) for values in taken]
    before = [rows.totals(values)[chosen] for values in weights]
    sums = [max(1, int(values.sum())) for values in taken]
    after, now = (
        max(int(np.ptp(tokens)) * sums[1], int(np.ptp(patches)) * sums[0])
        for tokens, patches in (dealt, before)
    )
    return after < now


def _deal(sizes: Sizes, image_weights: Ints, num_rows: int, limits: Limits) -> Ints | None:
    """Return the row of each piece, the lightest row so far, or None if a row overflows."""
    tokens, patches = sizes
    if limits.pieces is not None and len(tokens) > num_rows * limits.pieces:
        return None
    slots = None if limits.pieces is None else [limits.pieces] * num_rows
    loads = [0] * num_rows
    if not limits.patches:
        bins = _lightest(tokens, loads, slots)
        return bins if (_added(tokens, bins, num_rows) <= limits.text).all() else None
    bins = np.zeros(len(tokens), dtype=np.int64)
    images = np.flatnonzero(patches)
    images = images[np.argsort(-image_weights[images], kind="stable")]
    bins[images] = _lightest(image_weights[images], loads, slots)
    loads = _added(tokens[images], bins[images], num_rows).tolist()
    texts = np.flatnonzero(patches == 0)
    bins[texts] = _lightest(tokens[texts], loads, slots)
    used, used_patches = (_added(values, bins, num_rows) for values in sizes)
    cells = np.where(used_patches > 0, limits.tokens, limits.text)
    return bins if ((used <= cells) & (used_patches <= limits.patches)).all() else None


def dealt(sizes: Sizes, num_rows: int, limits: Limits) -> Rows | None:
    """Deal all pieces to rows as ``level`` does; None if a row is overfilled.

    Where that leaves too little room, the shortest pieces go to the fullest row with room instead.
    """
    longest = int(sizes[0].max())
    order = stable_argsort(longest - sizes[0], longest)
    for share in _FILLED_UP:
        first, rest = np.split(order, [len(order) - int(len(order) * share)])
        tokens, patches = (values[first] for values in sizes)
        bins = _deal((tokens, patches), patches, num_rows, limits)
        if bins is not None and len(rest):
            used, counts = _added(tokens, bins, num_rows), np.bincount(bins, minlength=num_rows)
            opened = OpenRows(limits.text - used, (limits.pieces or len(order)) - counts)
            rows = best_fit_decreasing(sizes[0][rest], limits.text, limits.pieces, opened)
            order, bins = np.append(first, rest[rows.order]), np.append(bins, rows.labels())
        if bins is not None and int(bins.max()) < num_rows:
            return Rows.from_labels(order, bins, num_rows)
        if limits.patches:
            break
    return None


def _added(values: Ints, bins: Ints, num_rows: int) -> Ints:
    """Sum the values of each row exactly: int64 [num_rows]."""
    totals = np.zeros(num_rows, dtype=np.int64)
    np.add.at(totals, bins, values)
    return totals


def _lightest(weights: Ints, loads: list[int], slots: list[int] | None) -> Ints:
    """Return the row of each piece, the lightest with a free slot; counts ``slots`` down."""
    num_rows = len(loads)
    heap = [load * num_rows + row for row, load in enumerate(loads)]  # cheap to compare
    if slots is None:
        heapify(heap)
        most = sum(loads) + int(weights.max(initial=0)) * len(weights)
        integer: type = np.int64 if (most + 1) * num_rows < 2**63 else object
        added = (weights.astype(integer, copy=False) * num_rows).tolist()
        taken = [heapreplace(heap, heap[0] + weight) for weight in added]
        rows: Ints = np.fromiter(taken, integer, len(taken)) % num_rows
        return rows.astype(np.int64, copy=False)
    heap = [key if slots[row] else key + _CLOSED * num_rows for row, key in enumerate(heap)]
    heapify(heap)
    bins = []
    for weight in weights.tolist():
        row = heap[0] % num_rows
        bins.append(row)
        slots[row] -= 1
        heapreplace(heap, heap[0] + (weight if slots[row] else _CLOSED) * num_rows)
    return np.fromiter(bins, np.int64, len(bins))


def _with_a_row_split(rows: Rows, sizes: Sizes, limits: Limits) -> Rows:
    """Move about half of the pieces of the row that has the most to a new row."""
    num_rows = len(rows.offsets) - 1
    row = int(rows.counts().argmax())
    places = np.arange(rows.offsets[row], rows.offsets[row + 1])
    pieces = rows.order[places]
    is_image = sizes[1][pieces] > 0
    moved = np.zeros(len(pieces), dtype=bool)
    if is_image.sum() == 1:  # the text that leaves its image must leave room for a dummy image
        texts = np.flatnonzero(~is_image)
        fit = np.cumsum(sizes[0][pieces[texts]]) <= limits.text
        moved[texts[fit][: -(-len(texts) // 2)]] = True
    else:
        moved[np.flatnonzero(is_image)[1::2]] = moved[np.flatnonzero(~is_image)[1::2]] = True
    row_of = rows.labels()
    row_of[places[moved]] = num_rows
    return Rows.from_labels(rows.order, row_of, num_rows + 1)


def over_ranks(
    costs: Ints, rows_multiple_of: int, *, keep_order: bool, image_costs: Ints | None = None
) -> Ints:
    """Return row numbers in shard-major order, equally many per rank: int64 [R], as ``costs``.

    Rows are taken in groups of one row per rank: in descending order of cost, so that the i-th rows
    of all ranks cost nearly the same, or with ``keep_order`` in the given order. Within a group the
    most expensive row goes to the rank with the lowest total so far, so the totals differ by at
    most the largest difference within a group.

    With ``image_costs`` groups are formed in descending order of these, so that rows with images
    are at the same indices on all ranks, but for one group. Both costs count, and ranks that still
    differ swap rows of a group. The most expensive images come last: DDP exchanges gradients in the
    backward pass of the last row, and demands some of the vision tower there.
    """
    places = order = np.arange(len(costs))
    if rows_multiple_of == 1:
        return order
    if image_costs is not None and not image_costs.any():
        image_costs = None
    both = costs
    if image_costs is not None:
        costs, image_costs = _comparable(costs, image_costs)
        both = costs + image_costs
    if not keep_order:
        order = np.lexsort((-costs,) if image_costs is None else (-costs, -image_costs))
    if keep_order or image_costs is not None:  # else each group is in descending order already
        order = order[np.lexsort((-both[order], places // rows_multiple_of))]
    order = order[np.argsort(_lightest_first(both[order], rows_multiple_of), kind="stable")]
    if image_costs is None:
        return order
    rows = _swapped(order.reshape(rows_multiple_of, -1), costs, image_costs)
    return (rows if keep_order else rows[:, ::-1]).ravel()


def _lightest_first(costs: Ints, rows_multiple_of: int) -> Ints:
    """Return the rank of each row: in each group in turn, the ranks by ascending cost so far."""
    ranks: list[int] = []
    load = [0] * rows_multiple_of
    row_costs = costs.tolist()
    for first in range(0, len(costs), rows_multiple_of):
        group = sorted(range(rows_multiple_of), key=load.__getitem__)
        ranks += group
        for rank, cost in zip(group, row_costs[first : first + rows_multiple_of], strict=True):
            load[rank] += cost
    return np.array(ranks)


def _comparable(costs: Ints, image_costs: Ints) -> tuple[Ints, Ints]:
    """Scale both to equal sums, in integers, so that every rank decides alike."""
    scaled = []
    for values in (costs, image_costs):
        shift = max(0, int(values.sum()).bit_length() - _TOTAL.bit_length() + 1)
        scaled.append(values >> shift)
    sums = [max(1, int(values.sum())) for values in scaled]
    return scaled[0] * sums[1], scaled[1] * sums[0]


def _swapped(rows: Ints, costs: Ints, image_costs: Ints) -> Ints:
    """Swap rows between the heaviest rank and others: rows of each rank [ranks, rows].

    ``costs`` are comparable. A rank is as heavy as the larger of its two totals. Each swap is of
    two rows at one index, the one after which the heavier of both ranks is lightest.
    """
    rows = rows.copy()
    rows_multiple_of = len(rows)
    even = int(costs.sum()) // rows_multiple_of * (_EVEN + 1) // _EVEN
    both = np.stack([costs[rows], image_costs[rows]])  # [2, ranks, rows]
    for _ in range(_SWAPS_PER_RANK * rows_multiple_of):
        totals = both.sum(axis=2)
        heaviest = int(totals.max(axis=0).argmax())
        most = int(totals[:, heaviest].max())
        if most <= even:
            break
        gained = both - both[:, heaviest, None]  # by the heaviest rank
        after = np.maximum(
            (totals[:, heaviest, None, None] + gained).max(axis=0),
            (totals[:, :, None] - gained).max(axis=0),
        )
        other, index = divmod(int(after.argmin()), after.shape[1])
        if after[other, index] >= most:
            break
        swap, back = [heaviest, other], [other, heaviest]
        rows[swap, index] = rows[back, index]
        both[:, swap, index] = both[:, back, index]
    return rows
