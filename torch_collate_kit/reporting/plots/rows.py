"""``plot_rows``: the rows of a batch, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import plural
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.showing.cells import Cells, Kind, Runs, example_numbers, runs_of
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    boxed_number,
    cells_to_draw,
    legend_below,
    matplotlib_module,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_rows"]

_CYCLE = ("blue", "vermillion", "green", "purple")  # neighbours differ
_HEIGHT = 0.8  # of a row, of the distance between two
_NUMBERED_ROWS = 60
_LABELLED = 0.025  # of the width: a block that is narrower has no number
_BORDERED = 0.006  # and one that is narrower than this no line
_HATCHES = {Kind.PAD: "////", Kind.GAP: "xxxx", Kind.FILLER: "++"}
_NAMES = {Kind.PAD: "padding", Kind.GAP: "alignment gap", Kind.FILLER: "filler, of no example"}


def plot_rows(batch: Batch, *, max_rows: int = 40, ax: Axes | None = None) -> Axes:
    """Draw the rows of a batch: a block per example, dark where it is trained.

    Padding is hatched; blocks are numbered by example where they are wide enough. Batches of every
    collator can be drawn, and those built by hand from ``input_ids`` ``[R, W]``. It reads which
    cells are trained from ``loss_mask``, else from ``labels``.

    Args:
        batch: on the CPU; to draw others than the first rows, slice it: ``batch[40:80]``.
        max_rows: the most rows that are drawn; the title says if there are more.
        ax: axes to draw on; by default those of a new figure.

    Returns:
        The axes. Nothing is shown: call ``plt.show()``, or ``ax.figure.savefig("rows.png")``.

    Raises:
        TypeError: not a Batch.
        ValueError: a batch without rows, or without ``input_ids`` in host memory.
        ImportError: matplotlib is not installed.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> plot_rows(batch).get_title()
    '1 row of 5 cells: 5 tokens, 0.0% padding, 3 trained'
    """
    if not isinstance(batch, Batch):
        raise TypeError(
            f"plot_rows draws a Batch, got {type(batch).__name__}; pass what a collator returns "
            "(with model_inputs=True it returns a dict, which does not say where examples begin)"
        )
    drawn = batch[: checked_int("max_rows", max_rows)]
    cells = cells_to_draw(drawn)
    num_rows, width = cells.kinds.shape
    if not cells.kinds.size:
        raise ValueError(
            f"the batch has {num_rows} rows of {width} cells, so there is nothing to draw; pass a "
            "batch with at least one token"
        )
    ax = axes_for(ax, 9.0, min(12.0, 1.6 + 0.27 * num_rows))
    runs = runs_of(cells)
    handles = _draw_blocks(ax, runs, is_known=cells.trained is not None)
    _draw_borders(ax, runs, width)
    if num_rows <= _NUMBERED_ROWS:
        _draw_numbers(ax, drawn, runs, width)
    ax.set(
        xlim=(0, width),
        ylim=(num_rows - 0.5, -0.5),
        xlabel="position in the row (cells); numbers are those of the examples",
        yticks=range(0, num_rows, -(-num_rows // 20)),
        ylabel="row of the batch",
        title=_title(cells, len(batch)),
    )
    legend_below(ax, handles)
    return ax


def _draw_blocks(ax: Any, runs: Runs, *, is_known: bool) -> list[Any]:
    """A collection for each look; the entries of the legend."""
    patch = matplotlib_module("patches").Patch
    handles = []
    for is_trained, name in ((1, "trained"), (0, "not trained" if is_known else "tokens")):
        chosen = (runs.examples >= 0) & (runs.trained == is_trained)
        for i, color in enumerate(_CYCLE):
            face = COLORS[color] if is_trained else tint(COLORS[color])
            of_color = chosen & (runs.segments % len(_CYCLE) == i)
            _add(ax, runs, of_color, name, facecolor=face, edgecolor="none")
        if chosen.any():
            face = "#404040" if is_trained else "#DDDDDD"
            shade = "dark" if is_trained else "light"
            handles.append(patch(facecolor=face, edgecolor="black", label=f"{shade}: {name}"))
    look = {"facecolor": "none", "edgecolor": "black", "hatch": "....", "linewidth": 0}
    if _add(ax, runs, runs.kinds == Kind.IMAGE, "image", **look):
        handles.append(patch(facecolor="white", edgecolor="black", hatch="....", label="image"))
    for kind, hatch in _HATCHES.items():
        look = {"facecolor": "white", "edgecolor": COLORS["grey"], "hatch": hatch}
        if _add(ax, runs, runs.kinds == kind, _NAMES[kind], linewidth=0.4, **look):
            handles.append(patch(label=_NAMES[kind], **look))
    return handles


def _add(ax: Any, runs: Runs, chosen: np.ndarray, name: str, **look: Any) -> bool:
    """The chosen runs as rectangles; whether there are any."""
    if not chosen.any():
        return False
    left, right = runs.starts[chosen], (runs.starts + runs.lengths)[chosen]
    top, bottom = runs.rows[chosen] - _HEIGHT / 2, runs.rows[chosen] + _HEIGHT / 2
    corners = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
    collection = matplotlib_module("collections").PolyCollection(
        corners.transpose(2, 0, 1), label=name, **look
    )
    ax.add_collection(collection)
    return True


def _draw_borders(ax: Any, runs: Runs, width: int) -> None:
    """A line where an example begins or padding does, unless it would hide what is between."""
    begins = np.ones(len(runs.rows), dtype=bool)
    begins[1:] = (runs.segments[1:] != runs.segments[:-1]) | (runs.rows[1:] != runs.rows[:-1])
    first = np.flatnonzero(begins)
    is_wide = np.add.reduceat(runs.lengths, first) >= _BORDERED * width
    x, y = runs.starts[first[is_wide]], runs.rows[first[is_wide]]
    ax.vlines(x, y - _HEIGHT / 2, y + _HEIGHT / 2, color="black", linewidth=0.8)


def _draw_numbers(ax: Any, batch: Batch, runs: Runs, width: int) -> None:
    """The number of each example that is wide enough, in the middle of its tokens."""
    names = example_numbers(batch.stored())
    if names is None and "example_indices" in batch.row_metadata:
        return
    is_own = np.flatnonzero(runs.examples >= 0)
    examples, first, of = np.unique(runs.examples[is_own], return_index=True, return_inverse=True)
    sizes = np.bincount(of, weights=runs.lengths[is_own])
    for example, size, run in zip(examples, sizes, is_own[first], strict=True):
        row = int(runs.rows[run])
        if size >= _LABELLED * width:
            number = row if names is None else int(names[example])
            boxed_number(ax, runs.starts[run] + size / 2, row, number)


def _title(cells: Cells, num_rows: int) -> str:
    drawn, width = cells.kinds.shape
    rows = plural(drawn, "row")
    if drawn < num_rows:
        rows = f"first {drawn:,} of {num_rows:,} rows"
    num_tokens = int(cells.is_own.sum())
    padding = 1 - num_tokens / cells.kinds.size
    trained = "" if cells.trained is None else f", {int(cells.trained.sum()):,} trained"
    return f"{rows} of {width:,} cells: {num_tokens:,} tokens, {padding:.1%} padding{trained}"
