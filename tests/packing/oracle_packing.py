"""The slow and obvious packers that the fast ones are compared with, and ``pack_with``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_collate_kit.packing import PackingOptions, PackingPlan, ParallelLayout, pack

Bins = list[list[int]]  # sizes, a list per row


def sizes_of(tokens: np.ndarray, patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells and patches of pieces, as packers take them."""
    return tokens, patches


def pack_with(
    lengths: Any, max_tokens: int, *, align: int = 1, patches: Any = None, **fields: Any
) -> PackingPlan:
    """``pack`` with any field of PackingOptions as a keyword."""
    if align != 1:
        fields["parallel"] = ParallelLayout(tp=align)
    return pack(lengths, patches=patches, packing=PackingOptions(max_tokens, **fields))


def real_lengths(folder: Path, count: int, *, longest: int) -> np.ndarray:
    """Resampled lengths of real conversations; without the data, of a like distribution."""
    path = folder / "lengths" / "mix_all.qwen.npy"
    made_up = np.random.default_rng(1).lognormal(5.4, 1.0, 10_000).astype(np.int64) + 1
    lengths = np.load(path).astype(np.int64) if path.is_file() else made_up
    return np.minimum(np.random.default_rng(0).choice(lengths, count), longest)


def assert_same(a: PackingPlan, b: PackingPlan) -> None:
    for found, expected in ((a, b), (a.atoms, b.atoms), (a.left_out, b.left_out)):
        for name, value in vars(found).items():
            if name not in ("atoms", "left_out"):
                np.testing.assert_array_equal(value, getattr(expected, name))


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


def fits(row: Sequence[tuple[int, int]], limits: tuple[int, int, int | None, int]) -> bool:
    """Whether pieces of (tokens, patches) make a row within (tokens, patches, pieces, reserved)."""
    most_tokens, most_patches, most_pieces, reserved = limits
    tokens = patches = 0
    for piece_tokens, piece_patches in row:
        tokens += piece_tokens
        patches += piece_patches
    if patches == 0:
        most_tokens -= reserved
    few = most_pieces is None or len(row) <= most_pieces
    return tokens <= most_tokens and patches <= most_patches and few


def fewest_rows_of_both(
    pieces: Sequence[tuple[int, int]], limits: tuple[int, int, int | None, int]
) -> int:
    """The true minimum under two budgets, by trying every row for every piece."""
    ordered = sorted(pieces, key=lambda piece: (piece[1] == 0, -sum(piece)))  # images first
    best = len(ordered)

    def place(index: int, rows: list[list[tuple[int, int]]]) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if index == len(ordered):
            best = len(rows)
            return
        tried = set()
        for i, row in enumerate(rows):
            grown = [*row, ordered[index]]
            key = tuple(sorted(row))
            if key not in tried and fits(grown, limits):
                tried.add(key)
                place(index + 1, [*rows[:i], grown, *rows[i + 1 :]])
        place(index + 1, [*rows, [ordered[index]]])

    place(0, [])
    return best


def into_rows(
    sizes: Sequence[int],
    capacity: int,
    max_pieces: int | None,
    opened: Sequence[tuple[int, int]],
    *,
    best: bool,
) -> list[tuple[int, int]]:
    """Free space and free slots of each row after one-by-one packing into opened rows and new ones.

    ``opened`` are the free space and slots of each. Best fit: into the row with the least free
    space, of equals the one with the fewest free slots; a new row if no opened or new one has
    room. First fit: into the first row with room.
    """
    rows = [[space, slots] for space, slots in opened]
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if row[0] >= size and row[1] > 0]
        if not fitting:
            rows.append([capacity, len(sizes) if max_pieces is None else max_pieces])
            fitting = rows[-1:]
        row = min(fitting, key=lambda row: (row[0], row[1])) if best else fitting[0]
        row[0] -= size
        row[1] -= 1
    return [(space, slots) for space, slots in rows]


def needed_dummies(bins: Sequence[Sequence[int]], patches: Sequence[int], ranks: int) -> list[bool]:
    """Per row: it has no image, and the row at its index on another rank has one."""
    per_rank = len(bins) // ranks
    needed = []
    for number, row in enumerate(bins):
        same_index = [bins[rank * per_rank + number % per_rank] for rank in range(ranks)]
        others = any(patches[i] for other in same_index for i in other)
        needed.append(others and not any(patches[i] for i in row))
    return needed
