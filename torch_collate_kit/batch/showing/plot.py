"""The rows of a batch drawn with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._checks import plural
from torch_collate_kit.batch.dense import cells_of_tokens
from torch_collate_kit.batch.showing.cells import (
    NAMES,
    Cells,
    Kind,
    Runs,
    cells_of,
    example_numbers,
)
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    boxed_number,
    legend_below,
    matplotlib_module,
    tint,
)
from torch_collate_kit.batch.storage import Columns, Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CYCLE = ("blue", "vermillion", "green", "purple")  # neighbours differ
_HEIGHT = 0.8  # of a row, of the distance between two
_NUMBERED_ROWS = 60
_LABELLED = 0.025  # of the width: a block that is narrower has no number
_BORDERED = 0.006  # and one that is narrower than this no line
_HATCHES = {Kind.PAD: "////", Kind.GAP: "xxxx", Kind.FILLER: "++"}


def draw_rows(stored: Storage, num_rows: int, ax: Axes | None) -> Axes:
    """Draw the rows of ``stored``, the first of ``num_rows``; ``Batch.plot`` says how."""
    tokens = cells = _drawable_cells(stored)
    if stored.columns and stored.columns.placement.tree_width:
        cells = _in_trees(tokens, stored.columns)
    drawn, width = cells.kinds.shape
    ax = axes_for(ax, 9.0, min(12.0, 1.6 + 0.27 * drawn))
    ax.set(
        xlim=(0, width),
        ylim=(drawn - 0.5, -0.5),
        xlabel="position in the row (cells); numbers are those of the examples",
        yticks=range(0, drawn, -(-drawn // 20)),
        ylabel="row of the batch",
        title=_title(tokens, cells, num_rows),
    )
    runs = cells.runs()
    handles = _draw_blocks(ax, runs, is_known=cells.trained is not None)
    handles += _draw_kinds(ax, runs)
    _draw_borders(ax, runs, width)
    if drawn <= _NUMBERED_ROWS:
        _draw_numbers(ax, stored, runs, width)
    legend_below(ax, handles)
    return ax


def _drawable_cells(stored: Storage) -> Cells:
    """Return the cells of the rows, or raise if they are not known or there are none."""
    cells = cells_of(stored)
    if cells is None:
        raise ValueError(
            "the batch does not say what its cells hold: it has no input_ids [R, W] in host "
            'memory; pass batch.to("cpu")'
        )
    drawn, width = cells.kinds.shape
    if not cells.kinds.size:
        raise ValueError(
            f"the batch has {drawn} rows of {width} cells, so there is nothing to draw; pass a "
            "batch with at least one token"
        )
    return cells


def _in_trees(tokens: Cells, columns: Columns) -> Cells:
    """Return the cells of rows that share prefixes, from one entry per token.

    A cell belongs to the first segment that has it, and is trained if it is in any.
    """
    shape, places = (columns.num_rows, columns.placement.tree_width), columns.placement.cells
    cells, entries = cells_of_tokens(columns).cpu().numpy()[::-1], places("lengths")[::-1]
    kinds, segments = np.full(shape, Kind.PAD, dtype=np.uint8), np.full(shape, -1, dtype=np.int64)
    kinds.flat[cells] = tokens.kinds.flat[entries]
    segments.flat[cells] = tokens.segments.flat[entries]
    trained = None
    if tokens.trained is not None:
        trained = np.zeros(shape, dtype=bool)
        trained.flat[cells[tokens.trained.flat[entries]]] = True
    return Cells(kinds, segments, trained, tokens.num_examples)


def _draw_blocks(ax: Any, runs: Runs, *, is_known: bool) -> list[Any]:
    """Draw a collection for each look, and return the entries of the legend."""
    patch = matplotlib_module("patches").Patch
    handles = []
    for is_trained, name in ((1, "trained"), (0, "not trained" if is_known else "tokens")):
        chosen = (runs.examples >= 0) & (runs.trained == is_trained)
        for i, color in enumerate(_CYCLE):
            face = COLORS[color] if is_trained else tint(COLORS[color])
            of_color = chosen & (runs.segments % len(_CYCLE) == i)
            _draw_runs(ax, runs, of_color, name, facecolor=face, edgecolor="none")
        if chosen.any():
            face = "#404040" if is_trained else "#DDDDDD"
            shade = "dark" if is_trained else "light"
            handles.append(patch(facecolor=face, edgecolor="black", label=f"{shade}: {name}"))
    return handles


def _draw_kinds(ax: Any, runs: Runs) -> list[Any]:
    """Hatch images, gaps, padding and fillers, and return the entries of the legend."""
    patch = matplotlib_module("patches").Patch
    handles = []
    look = {"facecolor": "none", "edgecolor": "black", "hatch": "....", "linewidth": 0}
    if _draw_runs(ax, runs, runs.kinds == Kind.IMAGE, "image", **look):
        handles.append(patch(facecolor="white", edgecolor="black", hatch="....", label="image"))
    for kind, hatch in _HATCHES.items():
        look = {"facecolor": "white", "edgecolor": COLORS["grey"], "hatch": hatch}
        if _draw_runs(ax, runs, runs.kinds == kind, NAMES[kind], linewidth=0.4, **look):
            handles.append(patch(label=NAMES[kind], **look))
    return handles


def _draw_runs(ax: Any, runs: Runs, chosen: np.ndarray, name: str, **look: Any) -> bool:
    """Draw the chosen runs as rectangles, and return whether there are any."""
    if not chosen.any():
        return False
    begins, ends = runs.starts[chosen], (runs.starts + runs.lengths)[chosen]
    top, bottom = runs.rows[chosen] - _HEIGHT / 2, runs.rows[chosen] + _HEIGHT / 2
    corners = np.array([[begins, top], [ends, top], [ends, bottom], [begins, bottom]])
    collection = matplotlib_module("collections").PolyCollection(
        corners.transpose(2, 0, 1), label=name, **look
    )
    ax.add_collection(collection)
    return True


def _draw_borders(ax: Any, runs: Runs, width: int) -> None:
    """Draw a line where an example or padding begins, unless the block is too narrow."""
    begins = np.ones(len(runs.rows), dtype=bool)
    begins[1:] = (runs.segments[1:] != runs.segments[:-1]) | (runs.rows[1:] != runs.rows[:-1])
    first = np.flatnonzero(begins)
    is_wide = np.add.reduceat(runs.lengths, first) >= _BORDERED * width
    x, y = runs.starts[first[is_wide]], runs.rows[first[is_wide]]
    ax.vlines(x, y - _HEIGHT / 2, y + _HEIGHT / 2, color="black", linewidth=0.8)


def _draw_numbers(ax: Any, stored: Storage, runs: Runs, width: int) -> None:
    """Write the number of each example that is wide enough in the middle of its tokens."""
    names = example_numbers(stored)
    if names is None and "example_indices" in stored.row_metadata:
        return
    is_own = np.flatnonzero(runs.examples >= 0)
    examples, first, numbers = np.unique(
        runs.examples[is_own], return_index=True, return_inverse=True
    )
    sizes = np.bincount(numbers, weights=runs.lengths[is_own])
    for example, size, run in zip(examples, sizes, is_own[first], strict=True):
        row = int(runs.rows[run])
        if size >= _LABELLED * width:
            number = row if names is None else int(names[example])
            boxed_number(ax, runs.starts[run] + size / 2, row, number)


def _title(tokens: Cells, cells: Cells, num_rows: int) -> str:
    num_tokens, num_filled = int(tokens.is_own.sum()), int(cells.is_own.sum())
    drawn, width = cells.kinds.shape
    rows = f"first {drawn:,} of {num_rows:,} rows" if drawn < num_rows else plural(drawn, "row")
    shared = "" if num_filled == num_tokens else f" in {num_filled:,} cells"
    padding = 1 - num_filled / cells.kinds.size
    trained = "" if tokens.trained is None else f", {int(tokens.trained.sum()):,} trained"
    return (
        f"{rows} of {width:,} cells: {num_tokens:,} tokens{shared}, {padding:.1%} padding{trained}"
    )
