"""A batch in a notebook: its rows as coloured bars, in HTML without scripts or style sheets.

Trained tokens are bars of full height in a strong colour, others are half as high and pale, so that
they differ without colours, too. The colours are those of Okabe and Ito, which are told apart with
every kind of colour vision, on a light and on a dark page.
"""

from __future__ import annotations

from html import escape

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.showing.cells import Cells, Kind, example_numbers, runs_of
from torch_collate_kit.batch.showing.drawing import (
    NAMES,
    field_lines,
    first_rows,
    title,
)
from torch_collate_kit.batch.storage import Storage

__all__ = ["html_of"]

_MAX_BLOCKS = 200
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_FILLS = {
    Kind.IMAGE: "repeating-linear-gradient(90deg,#D55E00 0 3px,#D55E0066 3px 6px)",
    Kind.FILLER: "repeating-linear-gradient(45deg,#999 0 2px,transparent 2px 5px)",
    Kind.GAP: "repeating-linear-gradient(90deg,#999 0 1px,transparent 1px 4px)",
    Kind.PAD: "transparent",
}


def html_of(stored: Storage) -> str:
    """What ``_repr_html_`` returns."""
    parts = [f"<div><div><b>{escape(title(stored))}</b></div>"]
    cells = first_rows(stored)
    if cells is not None:
        blocks, size = cells.in_blocks(_MAX_BLOCKS)
        rows = _rows(blocks, size, cells.kinds.shape[1], example_numbers(stored))
        parts += rows
        if stored.num_rows > len(rows):
            parts.append(f"<div>... {stored.num_rows - len(rows):,} more rows</div>")
        parts.append(_legend(blocks))
    lines = field_lines(stored).items()
    fields = "".join(f"<div><b>{name}</b>: {escape(fields)}</div>" for name, fields in lines)
    parts.append(f"<details><summary>fields</summary>{fields}</details></div>")
    return "".join(parts)


def _rows(blocks: Cells, size: int, width: int, names: np.ndarray | None) -> list[str]:
    """A bar for each run of blocks; ``names`` are the numbers of the examples in the call."""
    bars = [""] * len(blocks.kinds)
    runs = runs_of(blocks)
    num_cells = np.minimum((runs.starts + runs.lengths) * size, width) - runs.starts * size
    looks = np.stack([runs.rows, num_cells, runs.kinds, runs.examples, runs.trained], axis=1)
    for row, count, kind, example, trained in looks.tolist():
        is_trained = None if blocks.trained is None else bool(trained)
        share, look = 100 * count / width, _look(kind, example, is_trained)
        told = _told(kind, example, is_trained, count, names)
        bars[row] += f'<div style="width:{share:.4g}%;{look}" title="{told}"></div>'
    return [
        '<div style="display:flex;align-items:center;margin:2px 0">'
        f'<code style="flex:none;width:5em">row {i}</code>'
        '<div style="display:flex;flex:1;align-items:flex-end;height:16px;'
        f'outline:1px solid #888">{row}</div></div>'
        for i, row in enumerate(bars)
    ]


def _look(kind: Kind, example: int, is_trained: bool | None) -> str:
    """The style of a bar; ``is_trained`` is None where that is not known."""
    if kind != Kind.TOKEN:
        return f"height:100%;background:{_FILLS[kind]}"
    color = _COLORS[example % len(_COLORS)]
    pale = is_trained is False
    return f"height:{50 if pale else 100}%;background:{color}{'88' if pale else ''}"


def _told(
    kind: Kind, example: int, is_trained: bool | None, num_cells: int, names: np.ndarray | None
) -> str:
    """What a bar says under the pointer."""
    cells = plural(num_cells, "cell")
    if kind not in (Kind.TOKEN, Kind.IMAGE):
        return f"{NAMES[kind]}: {cells}"
    name = "an example" if names is None else f"example {names[example]}"
    if kind == Kind.IMAGE:
        return f"image of {name}: {cells}"
    trained = {None: "", True: ", trained", False: ", not trained"}[is_trained]
    return f"{name}: {cells}{trained}"


def _legend(blocks: Cells) -> str:
    found = {*blocks.kinds.ravel().tolist()}
    looks = {}
    if blocks.trained is not None and Kind.TOKEN in found:
        looks = {"trained": _look(Kind.TOKEN, 0, True), "not trained": _look(Kind.TOKEN, 0, False)}
    looks |= {name: _look(kind, -1, None) for kind, name in NAMES.items() if kind in found}
    keys = "".join(
        '<span style="display:inline-flex;align-items:flex-end;width:1.2em;height:12px;'
        'outline:1px solid #888;margin:0 .4em 0 1em">'
        f'<span style="width:100%;{look}"></span></span>{name}'
        for name, look in looks.items()
    )
    return f'<div style="font-size:90%">one color: one example{keys}</div>'
