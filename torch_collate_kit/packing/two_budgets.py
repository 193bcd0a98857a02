"""Rows under two budgets: tokens, and patches of images.

Rows are filled in one budget at a time. Pieces are divided by slope, their share of one budget over
their share of the other. Each class is packed by the larger share, into rows whose room is what
both budgets leave for pieces of this slope. So every row is within both by construction, and every
pass is the packing of one number, by histogram.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.fit_decreasing import Fill, OpenRows
from torch_collate_kit.packing.rows import Limits, Rows, Sizes

__all__ = ["fill_two_budgets"]

_Ints = npt.NDArray[np.int64]

# Classes of images: the larger share, of tokens or of patches, is at least num / den times the
# smaller. Finer classes leave less of what is free unused, but large images no longer all come
# first. Those of more tokens have positive numbers, of more patches negative ones; texts have 0.
_TOKEN_SLOPES = ((1, 1), (4, 3), (2, 1), (3, 1), (4, 1), (8, 1), (16, 1))
_PATCH_SLOPES = ((1, 1), (2, 1))
_STEEPEST = 16
_KEPT = 8  # of the images that are dealt, the smallest are kept to fill rows up: this part of all


def fill_two_budgets(fill: Fill, sizes: Sizes, limits: Limits) -> Rows:
    """Rows of the pieces, within the limits, by ``fill``: best fit or first fit.

    Each piece must fit in a row of its own.

    Pieces with a larger share of the patches come first, by patches; then those with a larger
    share of the tokens, by tokens, those with the most patches per token first; then those without
    an image, into the tokens that are left. This is best where one budget binds. Where both do,
    rows must hold a mixture, so in two more plans most images are first dealt out over as many rows
    as are needed at least, or 1% more. The plan with the fewest rows is taken.

    >>> from torch_collate_kit.packing.fit_decreasing import best_fit_decreasing
    >>> sizes = Sizes(np.array([4, 3, 5, 2]), np.array([8, 6, 0, 0]))
    >>> rows = fill_two_budgets(best_fit_decreasing, sizes, Limits(9, 9))
    >>> rows.order.tolist(), rows.offsets.tolist()
    ([0, 2, 1, 3], [0, 2, 4])
    """
    by_tokens = -(-int(sizes.tokens.sum()) // limits.tokens)
    least = max(by_tokens, -(-int(sizes.patches.sum()) // limits.patches))
    best: Rows | None = None
    for rows in _plans(fill, _Pieces(sizes, limits), least):
        if best is None or len(rows.offsets) < len(best.offsets):
            best = rows
        if len(best.offsets) - 1 <= least:
            break
    assert best is not None
    return best


def _plans(fill: Fill, pieces: _Pieces, least: int) -> Iterator[Rows]:
    images = np.flatnonzero(pieces.patches)
    yield _Opened(fill, pieces).filled(images)
    order = images[np.argsort(-pieces.shares[images], kind="stable")]
    shares = np.cumsum(pieces.shares[order])
    dealt = int(np.searchsorted(shares, shares[-1] - shares[-1] // _KEPT)) + 1
    for num_rows in (least, least + -(-least // 100)):
        rows = _Opened(fill, pieces)
        left = rows.deal(order[:dealt], min(num_rows, dealt))
        yield rows.filled(np.concatenate([left, order[dealt:]]))


class _Pieces:
    """What is known of the pieces, each array [S], and of the rows that they are for."""

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        # A product of both budgets, a slope and the number of rows must fit.
        is_small = limits.tokens * limits.patches * _STEEPEST < 2**62
        self.integer: type = np.int64 if is_small else object
        self.tokens, self.patches = sizes
        self.limits = limits
        by_tokens, by_patches = self.in_one_unit(*sizes)
        self.shares = by_tokens + by_patches
        self.classes = np.zeros(len(self.tokens), dtype=np.int64)
        for number, (num, den) in enumerate(_TOKEN_SLOPES, 1):
            self.classes[(by_patches * num <= by_tokens * den).astype(bool)] = number
        for number, (num, den) in enumerate(_PATCH_SLOPES, 1):
            self.classes[(by_tokens * num <= by_patches * den).astype(bool)] = -number
        if limits.patches >= int(self.patches.sum()):  # no limit: images are packed by tokens
            self.classes[:] = len(_TOKEN_SLOPES)
        self.classes[self.patches == 0] = 0

    def in_one_unit(self, tokens: _Ints, patches: _Ints) -> tuple[Any, Any]:
        """Both as shares of their budget."""
        limits = self.limits
        return (
            tokens.astype(self.integer) * limits.patches,
            patches.astype(self.integer) * limits.tokens,
        )


class _Opened:
    """Rows that are being filled: their pieces, and what is free in each."""

    def __init__(self, fill: Fill, pieces: _Pieces) -> None:
        self._fill, self._pieces, self._limits = fill, pieces, pieces.limits
        self._tokens = self._patches = self._slots = np.zeros(0, dtype=np.int64)
        self._order: list[_Ints] = []
        self._labels: list[_Ints] = []

    def deal(self, pieces: _Ints, num_rows: int) -> _Ints:
        """Deals the pieces, at least as many as rows, and returns those that did not fit.

        In rounds of a piece for each row: the largest goes to the emptiest row.
        """
        known = self._pieces
        self._add(pieces[:num_rows], np.arange(num_rows), num_rows)
        left = [pieces[:0]]
        for first in range(num_rows, len(pieces), num_rows):
            dealt = pieces[first : first + num_rows]
            free = sum(known.in_one_unit(self._tokens, self._patches))
            rows = np.argsort(-free, kind="stable")[: len(dealt)]
            fits = (known.tokens[dealt] <= self._tokens[rows]) & (self._slots[rows] > 0)
            fits &= known.patches[dealt] <= self._patches[rows]
            self._add(dealt[fits], rows[fits], 0)
            left.append(dealt[~fits])
        return np.concatenate(left)

    def filled(self, images: _Ints) -> Rows:
        """The rows with these images, and all pieces without one, in the order of placing."""
        known = self._pieces
        classes = known.classes[images]
        if not len(self._tokens):  # new rows have room for all with a larger share of patches
            classes = np.where(classes < 0, -1, classes)
        for number, slope in enumerate(_PATCH_SLOPES, 1):
            self._place(images[classes == -number], slope, by_tokens=False)
        for number, slope in enumerate(_TOKEN_SLOPES, 1):
            self._place(images[classes == number], slope, by_tokens=True)
        texts = np.flatnonzero(known.classes == 0)
        self._fill_in(texts, known.tokens, self._limits.text, self._tokens)
        order, labels = np.concatenate(self._order), np.concatenate(self._labels)
        return Rows.from_labels(order, labels, len(self._tokens))

    def _place(self, images: _Ints, slope: tuple[int, int], *, by_tokens: bool) -> None:
        """Places images of at least this slope, by their larger share."""
        (num, den), known = slope, self._pieces
        larger = (known.tokens, self._limits.tokens, self._tokens)
        smaller = (known.patches, self._limits.patches, self._patches)
        if not by_tokens:
            larger, smaller = smaller, larger
        sizes, most, free = larger
        room: Any = smaller[2].astype(known.integer) * (most * num) // (smaller[1] * den)
        self._fill_in(images, sizes, most, np.minimum(room, free).astype(np.int64))

    def _fill_in(self, pieces: _Ints, sizes: _Ints, capacity: int, room: _Ints) -> None:
        """Fills pieces of these sizes into rows with so much room, or into new rows."""
        if len(pieces):
            opened = OpenRows(room, self._slots) if len(room) else None
            rows = self._fill(sizes[pieces], capacity, self._limits.pieces, opened)
            self._add(pieces[rows.order], rows.labels(), len(rows.offsets) - 1 - len(room))

    def _add(self, pieces: _Ints, labels: _Ints, num_new: int) -> None:
        """Notes that the pieces are in these rows, of which ``num_new`` are new."""
        limits, known = self._limits, self._pieces
        most = len(known.tokens) if limits.pieces is None else limits.pieces
        self._tokens = _extended(self._tokens, num_new, limits.tokens)
        self._patches = _extended(self._patches, num_new, limits.patches)
        self._slots = _extended(self._slots, num_new, most)
        np.subtract.at(self._tokens, labels, known.tokens[pieces])
        np.subtract.at(self._patches, labels, known.patches[pieces])
        np.subtract.at(self._slots, labels, 1)
        self._order.append(pieces)
        self._labels.append(labels)


def _extended(values: _Ints, number: int, value: int) -> _Ints:
    return np.concatenate([values, np.full(number, value, dtype=np.int64)])
