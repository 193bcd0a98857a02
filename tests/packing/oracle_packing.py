"""The slow and obvious packers that the fast ones are compared with; no import from the kit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

Bins = list[list[int]]  # sizes, a list per row


def one_by_one(
    sizes: Sequence[int], capacity: int, max_pieces: int | None = None, *, best: bool
) -> Bins:
    """Descending sizes, each into the fullest (best fit) or the earliest (first fit) open row.

    Of equally full rows best fit takes the one with the most pieces, then the earliest.
    """
    rows: Bins = []
    for size in sorted(sizes, reverse=True):
        fitting = [
            row
            for row in rows
            if sum(row) + size <= capacity and (max_pieces is None or len(row) < max_pieces)
        ]
        if not fitting:
            rows.append([size])
        elif best:
            max(fitting, key=lambda row: (sum(row), len(row))).append(size)
        else:
            fitting[0].append(size)
    return rows


def next_fit(sizes: Sequence[int], capacity: int, max_pieces: int | None = None) -> Bins:
    """In the order given; a new row when the next piece does not fit the last one."""
    rows: Bins = []
    for size in sizes:
        full = not rows or sum(rows[-1]) + size > capacity or len(rows[-1]) == max_pieces
        if full:
            rows.append([])
        rows[-1].append(size)
    return rows


def fewest_rows(sizes: Sequence[int], capacity: int, max_pieces: int | None = None) -> int:
    """The true minimum, by trying every row for every piece."""
    ordered = sorted(sizes, reverse=True)
    best = len(ordered)

    def place(index: int, rows: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if index == len(ordered):
            best = len(rows)
            return
        size, tried = ordered[index], set()
        for i, (used, pieces) in enumerate(rows):
            fits = used + size <= capacity and pieces != max_pieces
            if fits and (used, pieces) not in tried:
                tried.add((used, pieces))
                place(index + 1, [*rows[:i], (used + size, pieces + 1), *rows[i + 1 :]])
        place(index + 1, [*rows, (size, 1)])

    place(0, [])
    return best


def best_fit_row_count(sizes: Sequence[int], capacity: int) -> int:
    """Rows of one-by-one best fit decreasing, with a sorted list of free spaces: n log n."""
    spaces: list[int] = []
    num_rows = 0
    for size in sorted(sizes, reverse=True):
        place = bisect_left(spaces, size)
        if place == len(spaces):
            num_rows += 1
            space = capacity
        else:
            space = spaces.pop(place)
        if space > size:
            insort(spaces, space - size)
    return num_rows
