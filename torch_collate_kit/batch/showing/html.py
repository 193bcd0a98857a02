"""A batch in a notebook: its rows as coloured bars, in HTML without scripts or style sheets.

Trained tokens are bars of full height in a strong colour, others are half as high and pale, so that
they differ without colours, too. The colours are those of Okabe and Ito, which are told apart with
every kind of colour vision, on a light and on a dark page.
"""

from __future__ import annotations

from html import escape

from torch_collate_kit.batch.showing.cells import Kind, example_numbers
from torch_collate_kit.batch.showing.drawing import NAMES, Run, field_lines, runs_of_rows, title
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
    drawn = runs_of_rows(stored, max_blocks=_MAX_BLOCKS)
    if drawn is not None:
        rows, _, is_known = drawn
        examples = example_numbers(stored)
        names = None if examples is None else examples.tolist()
        parts += [_row(i, row, names, is_known) for i, row in enumerate(rows)]
        if stored.num_rows > len(rows):
            parts.append(f"<div>... {stored.num_rows - len(rows):,} more rows</div>")
        parts.append(_legend(rows, is_known))
    lines = field_lines(stored).items()
    fields = "".join(f"<div><b>{name}</b>: {escape(fields)}</div>" for name, fields in lines)
    parts.append(f"<details><summary>fields</summary>{fields}</details></div>")
    return "".join(parts)


def _row(number: int, runs: list[Run], names: list[int] | None, is_known: bool) -> str:
    width = sum(run.num_cells for run in runs)
    bars = "".join(
        f'<div style="width:{100 * run.num_cells / width:.4g}%;{_look(run, is_known)}" '
        f'title="{_told(run, names, is_known)}"></div>'
        for run in runs
    )
    return (
        '<div style="display:flex;align-items:center;margin:2px 0">'
        f'<code style="flex:none;width:5em">row {number}</code>'
        '<div style="display:flex;flex:1;align-items:flex-end;height:16px;'
        f'outline:1px solid #888">{bars}</div></div>'
    )


def _look(run: Run, is_known: bool) -> str:
    if run.kind != Kind.TOKEN:
        return f"height:100%;background:{_FILLS[run.kind]}"
    color = _COLORS[run.example % len(_COLORS)]
    if not is_known:
        return f"height:100%;background:{color}"
    return f"height:{100 if run.trained else 50}%;background:{color}{'' if run.trained else '88'}"


def _told(run: Run, names: list[int] | None, is_known: bool) -> str:
    """What a bar says under the pointer."""
    cells = f"{run.num_cells:,} cell{'' if run.num_cells == 1 else 's'}"
    if run.kind not in (Kind.TOKEN, Kind.IMAGE):
        return f"{NAMES[run.kind]}: {cells}"
    example = "an example" if names is None else f"example {names[run.example]}"
    if run.kind == Kind.IMAGE:
        return f"image of {example}: {cells}"
    trained = (", trained" if run.trained else ", not trained") if is_known else ""
    return f"{example}: {cells}{trained}"


def _legend(rows: list[list[Run]], is_known: bool) -> str:
    found = {(run.kind, run.trained) for row in rows for run in row}
    looks = []
    if is_known and any(kind == Kind.TOKEN for kind, _ in found):
        looks = [
            (Run(Kind.TOKEN, 0, True, 1, 1), "trained"),
            (Run(Kind.TOKEN, 0, False, 1, 1), "not trained"),
        ]
    kinds = {kind for kind, _ in found}
    looks += [(Run(k, -1, False, 1, 1), name) for k, name in NAMES.items() if k in kinds]
    keys = "".join(
        '<span style="display:inline-flex;align-items:flex-end;width:1.2em;height:12px;'
        'outline:1px solid #888;margin:0 .4em 0 1em">'
        f'<span style="width:100%;{_look(run, is_known)}"></span></span>{name}'
        for run, name in looks
    )
    return f'<div style="font-size:90%">one color: one example{keys}</div>'
