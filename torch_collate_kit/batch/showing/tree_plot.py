"""Rows whose segments share prefixes, drawn with matplotlib: one line per path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.counts import examples_per_row, num_filled
from torch_collate_kit.batch.showing.cells import Cells, example_numbers
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    legend_below,
    matplotlib_module,
    tint,
)
from torch_collate_kit.batch.storage import Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CYCLE = ("blue", "vermillion", "green", "purple")  # neighbours differ
_HEIGHTS = {True: 0.8, False: 0.16}  # of a segment's own cells, and of those it shares
_MOST_NAMES = 40


def draw_paths(stored: Storage, cells: Cells, num_rows: int, ax: Axes | None) -> Axes:
    """Draw the segments of the rows from position 0, thin where an earlier one has the cells."""
    placement, counts = stored.columns.placement, examples_per_row(stored)
    assert counts is not None
    chosen = placement.numbers() < counts[placement.rows()]
    starts, lengths, own = (
        placement.segments[name].values[chosen].astype(np.int64)
        for name in ("starts", "lengths", "own")
    )
    rows = placement.rows()[chosen]
    line = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(line)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_own = position >= (lengths - own)[line]
    trained = np.zeros(len(line), dtype=bool)
    if cells.trained is not None:
        trained = cells.trained[rows[line], starts[line] + position]
    ax = axes_for(ax, 9.0, min(12.0, 1.6 + 0.22 * len(lengths)))
    numbers = example_numbers(stored)
    examples = np.arange(len(lengths)) if numbers is None else numbers
    blocks = _blocks(line, position, is_own, trained)
    handles = _draw(ax, blocks, examples, is_known=cells.trained is not None)
    _name(ax, rows, examples)
    ax.set(
        xlim=(0, int(lengths.max(initial=1))),
        ylim=(len(lengths) - 0.4, -0.6),
        xlabel="position in the segment (tokens)",
        title=_title(cells, num_rows, len(line), num_filled(stored)),
    )
    legend_below(ax, handles)
    return ax


def _title(cells: Cells, num_rows: int, num_tokens: int, filled: int) -> str:
    drawn = len(cells.kinds)
    shown = f"first {drawn:,} of {num_rows:,} rows" if drawn < num_rows else plural(drawn, "row")
    more = "" if cells.trained is None else f", {int(cells.trained.sum()):,} trained"
    factor = num_tokens / max(1, filled)
    return f"{shown}: {num_tokens:,} tokens in {filled:,} cells ({factor:.2f} for each){more}"


def _blocks(
    line: np.ndarray, position: np.ndarray, is_own: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return runs of tokens of a path that are shared or not, and trained or not."""
    first = np.flatnonzero(np.diff(line * 4 + is_own * 2 + trained, prepend=-1))
    stops = position[np.append(first[1:], len(line)) - 1] + 1
    return line[first], position[first], stops, is_own[first], trained[first]


def _draw(ax: Any, blocks: tuple[np.ndarray, ...], examples: np.ndarray, *, is_known: bool) -> Any:
    """Draw the blocks, a collection for each look, and return the entries of the legend."""
    patch = matplotlib_module("patches").Patch
    line, left, right, is_own, trained = blocks
    names = {True: "trained", False: "not trained" if is_known else "tokens"}
    handles = []
    for is_trained in (True, False):
        for own, height in _HEIGHTS.items():
            for i, color in enumerate(_CYCLE):
                face = COLORS[color] if is_trained else tint(COLORS[color])
                some = (trained == is_trained) & (is_own == own)
                some &= examples[line] % len(_CYCLE) == i
                x = np.array([left[some], right[some], right[some], left[some]])
                y = line[some] + height / 2 * np.array([[-1], [-1], [1], [1]])
                corners = np.stack([x, y], axis=-1).transpose(1, 0, 2)
                collection = matplotlib_module("collections").PolyCollection(
                    corners, facecolor=face, edgecolor="none", label=names[is_trained]
                )
                ax.add_collection(collection)
        if (trained == is_trained).any():
            face = "#404040" if is_trained else "#BBBBBB"
            shade = "dark" if is_trained else "light"
            handles.append(patch(facecolor=face, label=f"{shade}: {names[is_trained]}"))
    drawn = matplotlib_module("lines").Line2D
    handles.append(drawn([], [], color="#404040", linewidth=7, label="thick: its own cells"))
    handles.append(drawn([], [], color="#404040", linewidth=1.5, label="thin: shared with above"))
    return handles


def _name(ax: Any, rows: np.ndarray, examples: np.ndarray) -> None:
    """Name the first segment of each example, and draw a line between rows."""
    is_first = np.diff(examples, prepend=-1) != 0
    is_first |= np.diff(rows, prepend=-1) != 0
    first = np.flatnonzero(is_first)
    first = first[:: -(-len(first) // _MOST_NAMES) or 1]
    labels = [
        f"row {row}, example {i}" for row, i in zip(rows[first], examples[first], strict=True)
    ]
    ax.set_yticks(first, labels)
    edges = np.flatnonzero(np.diff(rows)) + 0.5
    ax.hlines(edges, 0, 1, transform=ax.get_yaxis_transform(), color="black", linewidth=0.8)
