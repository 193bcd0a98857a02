"""Rows under two budgets: tokens, and patches of images.

Rows are filled in one budget at a time. Pieces are divided by slope, their share of one budget over
their share of the other. Each class is packed by the larger share, into rows whose room is what
both budgets leave for pieces of this slope. So every row is within both by construction, and every
pass is the packing of one number, by histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from torch_collate_kit.packing.rows import Ints, Limits, Rows, Sizes
from torch_collate_kit.packing.strategies import OpenRows

Fill = Callable[[Ints, int, int | None, OpenRows | None], Rows]

# Classes of images: the larger share, of tokens or of patches, is at least num / den times the
# smaller. Finer classes leave less of what is free unused, but large images no longer all come
# first. Those of more tokens have positive numbers, of more patches negative ones; texts have 0.
_TOKEN_SLOPES = ((1, 1), (4, 3), (2, 1), (3, 1), (4, 1), (8, 1), (16, 1))
_PATCH_SLOPES = ((1, 1), (2, 1))
_STEEPEST = 16
_TOKENS, _PATCHES, _SLOTS = range(3)  # free in a row, and used by a piece
_KEPT = 8  # of the images that are dealt, the smallest are kept to fill rows up: this part of all


def fill_two_budgets(fill: Fill, sizes: Sizes, limits: Limits) -> Rows:
    """Fill rows with the pieces, each of which fits in one, by ``fill``: best fit or first fit.

    Pieces with a larger share of the patches come first, by patches; then those with a larger
    share of the tokens, by tokens, those with the most patches per token first; then those without
    an image, into the tokens that are left. This is best where one budget binds. Where both do,
    rows must hold a mixture, so in two more plans most images are first dealt out over as many rows
    as are needed at least, or 1% more. The plan with the fewest rows is taken.
    """
    num_tokens, num_patches = (int(values.sum()) for values in sizes)
    least = max(-(-num_tokens // limits.tokens), -(-num_patches // limits.patches))
    best: Rows | None = None
    for rows in _plans(fill, _Pieces(sizes, limits), least):
        if best is None or len(rows.offsets) < len(best.offsets):
            best = rows
        if len(best.offsets) - 1 <= least:
            break
    assert best is not None
    return best


def _plans(fill: Fill, pieces: _Pieces, least: int) -> Iterator[Rows]:
    images = np.flatnonzero(pieces.classes)
    yield _Opened(fill, pieces).filled(images)
    order = images[np.argsort(-pieces.shares[images], kind="stable")]
    shares = np.cumsum(pieces.shares[order])
    dealt = int(np.searchsorted(shares, shares[-1] - shares[-1] // _KEPT)) + 1
    for num_rows in (least, least + -(-least // 100)):
        rows = _Opened(fill, pieces)
        left = rows.deal(order[:dealt], min(num_rows, dealt))
        yield rows.filled(np.concatenate([left, order[dealt:]]))


class _Pieces:
    """Sizes, shares and classes of the pieces, each [S], and the limits of their rows."""

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        tokens, patches = sizes
        num_pieces = len(tokens)
        self.limits = limits
        self.most = (limits.tokens, limits.patches, limits.pieces or num_pieces)
        self.takes = (tokens, patches, np.ones(num_pieces, dtype=np.int64))
        # A product of both budgets, a slope and the number of rows must fit.
        is_small = limits.tokens * limits.patches * _STEEPEST < 2**62
        self.integer: type = np.int64 if is_small else object
        by_tokens = tokens.astype(self.integer) * limits.patches
        by_patches = patches.astype(self.integer) * limits.tokens
        self.shares = by_tokens + by_patches
        self.classes = np.zeros(num_pieces, dtype=np.int64)
        for number, (num, den) in enumerate(_TOKEN_SLOPES, 1):
            self.classes[(by_patches * num <= by_tokens * den).astype(bool)] = number
        for number, (num, den) in enumerate(_PATCH_SLOPES, 1):
            self.classes[(by_tokens * num <= by_patches * den).astype(bool)] = -number
        if limits.patches >= int(patches.sum()):  # no limit: images are packed by tokens
            self.classes[:] = len(_TOKEN_SLOPES)
        self.classes[patches == 0] = 0


class _Opened:
    """Rows being filled: their pieces, and the free room in each."""

    def __init__(self, fill: Fill, pieces: _Pieces) -> None:
        self._fill, self._pieces = fill, pieces
        self._free = [np.zeros(0, dtype=np.int64)] * len(pieces.takes)
        self._order: list[Ints] = []
        self._labels: list[Ints] = []

    def deal(self, pieces: Ints, num_rows: int) -> Ints:
        """Deal pieces, at least as many as rows, and return those that did not fit."""
        known, limits = self._pieces, self._pieces.limits
        self._add(pieces[:num_rows], np.arange(num_rows), num_rows)
        left = [pieces[:0]]
        for first in range(num_rows, len(pieces), num_rows):
            dealt = pieces[first : first + num_rows]
            free: Any = self._free[_TOKENS].astype(known.integer) * limits.patches
            free += self._free[_PATCHES].astype(known.integer) * limits.tokens
            rows = np.argsort(-free, kind="stable")[: len(dealt)]
            fits = np.ones(len(dealt), dtype=bool)
            for takes, has in zip(known.takes, self._free, strict=True):
                fits &= takes[dealt] <= has[rows]
            self._add(dealt[fits], rows[fits], 0)
            left.append(dealt[~fits])
        return np.concatenate(left)

    def filled(self, images: Ints) -> Rows:
        """Return the rows with these images, and all pieces without one, as they were placed."""
        known = self._pieces
        classes = known.classes[images]
        if not self._order:  # new rows have room for all with a larger share of patches
            classes = np.where(classes < 0, -1, classes)
        for number, slope in enumerate(_PATCH_SLOPES, 1):
            self._place(images[classes == -number], slope, larger=_PATCHES, smaller=_TOKENS)
        for number, slope in enumerate(_TOKEN_SLOPES, 1):
            self._place(images[classes == number], slope, larger=_TOKENS, smaller=_PATCHES)
        texts = np.flatnonzero(known.classes == 0)
        self._fill_in(texts, known.takes[_TOKENS], known.limits.text, self._free[_TOKENS])
        order, labels = np.concatenate(self._order), np.concatenate(self._labels)
        return Rows.from_labels(order, labels, len(self._free[_TOKENS]))

    def _place(self, images: Ints, slope: tuple[int, int], *, larger: int, smaller: int) -> None:
        """Place images of at least this slope, by the larger share."""
        (num, den), known = slope, self._pieces
        most, free = known.most[larger], self._free[larger]
        room: Any = self._free[smaller].astype(known.integer) * (most * num)
        room = np.minimum(room // (known.most[smaller] * den), free).astype(np.int64)
        self._fill_in(images, known.takes[larger], most, room)

    def _fill_in(self, pieces: Ints, sizes: Ints, capacity: int, room: Ints) -> None:
        """Fill pieces of these sizes into rows with so much room, or into new rows."""
        if len(pieces):
            opened = OpenRows(room, self._free[_SLOTS]) if len(room) else None
            rows = self._fill(sizes[pieces], capacity, self._pieces.limits.pieces, opened)
            self._add(pieces[rows.order], rows.labels(), len(rows.offsets) - 1 - len(room))

    def _add(self, pieces: Ints, labels: Ints, num_new: int) -> None:
        """Record that the pieces are in these rows, of which ``num_new`` are new."""
        known = self._pieces
        for i, (most, takes) in enumerate(zip(known.most, known.takes, strict=True)):
            self._free[i] = np.append(self._free[i], np.full(num_new, most, dtype=np.int64))
            np.subtract.at(self._free[i], labels, takes[pieces])
        self._order.append(pieces)
        self._labels.append(labels)
