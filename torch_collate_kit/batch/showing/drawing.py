"""A batch as text, and in HTML for a notebook: its first rows, and the stored fields.

In HTML, without scripts or style sheets, rows are coloured bars. Trained tokens are bars of full
height in a strong colour, others half as high and pale, so that they differ without colours, too.
"""

from __future__ import annotations

from html import escape
from textwrap import fill
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import plural
from torch_collate_kit.batch.counts import examples_per_row, num_cells, num_filled, num_tokens
from torch_collate_kit.batch.showing.cells import (
    NAMES,
    Cells,
    Kind,
    cells_of,
    example_numbers,
)
from torch_collate_kit.batch.showing.style import COLORS
from torch_collate_kit.batch.storage import Storage, tensor_of

_MAX_ROWS = 8
_WIDTH = 80
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SYMBOLS = {Kind.IMAGE: "#", Kind.FILLER: "+", Kind.GAP: "-", Kind.PAD: "."}
_MAX_BLOCKS = 200
_EXAMPLES = [COLORS[name] for name in ("blue", "orange", "green", "purple")]
_FILLS = {
    Kind.IMAGE: "repeating-linear-gradient(90deg,#D55E00 0 3px,#D55E0066 3px 6px)",
    Kind.FILLER: "repeating-linear-gradient(45deg,#999 0 2px,transparent 2px 5px)",
    Kind.GAP: "repeating-linear-gradient(90deg,#999 0 1px,transparent 1px 4px)",
    Kind.PAD: "transparent",
}


def _first_rows(stored: Storage, most: int) -> tuple[Cells, int, int] | None:
    """Return blocks of the first rows, cells per block and per row; None if not known."""
    cells = cells_of(stored.change(lambda rows: rows[:_MAX_ROWS]))
    return None if cells is None else (*cells.in_blocks(most), cells.kinds.shape[1])


def described(stored: Storage) -> str:
    """Return the repr: a title, the first rows, a legend and the fields, 80 characters wide."""
    lines = [fill(_title(stored), _WIDTH, subsequent_indent="    ")]
    if (found := _first_rows(stored, _WIDTH - 10)) is not None:
        blocks, size, _ = found
        trained = np.zeros_like(blocks.kinds) if blocks.trained is None else blocks.trained
        looks = np.stack([blocks.kinds, blocks.examples, trained], axis=-1)
        for i, row in enumerate(looks.tolist()):
            lines.append(f"  row {i} |{''.join(_symbol(*block) for block in row)}|")
        lines += [f"  {line}" for line in _left_out(stored)]
        if legend := _text_legend(blocks, size, stored):
            lines.append(fill(legend, _WIDTH, initial_indent="  ", subsequent_indent="  "))
    for name, fields in _field_lines(stored).items():
        text = f"{name}: {fields}"
        lines.append(fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _left_out(stored: Storage) -> list[str]:
    hidden = stored.num_rows - _MAX_ROWS
    return [f"... {plural(hidden, 'more row')}"] if hidden > 0 else []


def _title(stored: Storage) -> str:
    """Return the number of rows and what they hold, in one line."""
    devices = {tensor_of(value).device for value in stored.items().values()}
    places = ", ".join(sorted(str(device) for device in devices if device.type != "cpu"))
    where = f", on {places}" if places else ""
    if not stored.columns:
        return f"Batch of {plural(stored.num_rows, 'row')}{where}, built from tensors"
    placement = stored.columns.placement
    rows = plural(stored.num_rows, "packed row" if placement.is_packed else "padded row")
    counts: Any = examples_per_row(stored)
    tokens, cells, num_pieces = num_tokens(stored), num_cells(stored), int(counts.sum())
    examples = example_numbers(stored)
    num_examples = num_pieces if examples is None else len(np.unique(examples))
    kind = "segments" if "segment_numbers" in stored.row_metadata else "pieces"
    pieces = f" in {num_pieces:,} {kind}" if num_pieces > num_examples else ""
    share = f" ({_percent(tokens / cells)} of the cells)" if cells else ""
    width = f"{placement.width:,} wide"
    if placement.tree_width:  # the rows that are drawn have an entry per token
        width = f"of {plural(placement.tree_width, 'cell')} for {placement.width:,} tokens"
        filled = num_filled(stored)
        factor = f", {tokens / filled:.2f} for each" if filled else ""
        share = f" in {plural(filled, 'cell')} ({_percent(filled / cells)} of them{factor})"
    parts = [plural(num_examples, "example") + pieces, plural(tokens, "token") + share]
    if not places and "loss_mask" in stored.columns.names and "loss_mask" not in stored.given:
        parts.append(f"{int(stored.columns.num_trained().sum()):,} trained")
    title = f"Batch of {rows}, {width}{where}: {', '.join(parts)}"
    if (shard := placement.shard) is not None:
        return f"Shard of context rank {shard.rank} of {shard.size}, {shard.layout}: {title}"
    return title


def _percent(share: float) -> str:
    """Format a share; only 0 is shown as 0%, and only 1 as 100%."""
    text = f"{share:.0%}"
    return text if (text in ("0%", "100%")) == (share in (0, 1)) else f"{share:.2%}"


def _field_lines(stored: Storage) -> dict[str, str]:
    """Return the names of the fields: those stored, made when read, and given."""
    columns, given = stored.columns, stored.given
    lines = {}
    if columns:
        forms = ", ".join(f"{name} {_form(column)}" for name, column in columns.values.items())
        lines["stored"] = f"{forms} ({stored.nbytes:,} bytes)"
        made = [n for n in columns.names if n not in columns.values and n not in given]
        lines["made when read"] = ", ".join(made)
    lines["given" if columns else "fields"] = ", ".join(
        f"{k} {_form(value) if isinstance(value, Tensor) else repr(value)}"
        for k, value in given.items()
    )
    return {name: line for name, line in lines.items() if line}


def _form(value: Any) -> str:
    tensor = tensor_of(value)
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _symbol(kind: Kind, example: int, is_trained: bool) -> str:
    letter = _SYMBOLS.get(kind, _LETTERS[example % len(_LETTERS)])
    return letter.upper() if is_trained else letter


def _text_legend(blocks: Cells, size: int, stored: Storage) -> str:
    is_made, shares = bool(stored.columns), stored.columns and stored.columns.placement.tree_width
    is_known = blocks.trained is not None
    found = {*blocks.kinds.ravel().tolist()}
    parts = []
    if Kind.TOKEN in found:
        parts.append("letters: examples" + (", upper case where trained" if is_known else ""))
    if found and size > 1:
        parts.append(f"1 letter = {size:,} {'tokens' if shares else 'cells'}")
    parts += [f"{_SYMBOLS[kind]} {name}" for kind, name in NAMES.items() if kind in found]
    if not is_known and is_made and stored.columns.placement.targets is not None:
        parts.append('batch.to("cpu") shows what is trained')
    return "; ".join(parts)


def html_of(stored: Storage) -> str:
    """Return the batch in HTML."""
    html = f"<div><div><b>{escape(_title(stored))}</b></div>"
    if (found := _first_rows(stored, _MAX_BLOCKS)) is not None:
        shares = stored.columns and stored.columns.placement.tree_width
        unit = "token" if shares else "cell"
        for i, row in enumerate(_html_rows(*found, example_numbers(stored), unit)):
            html += (
                '<div style="display:flex;align-items:center;margin:2px 0">'
                f'<code style="flex:none;width:5em">row {i}</code>'
                '<div style="display:flex;flex:1;align-items:flex-end;height:16px;'
                f'outline:1px solid #888">{row}</div></div>'
            )
        html += "".join(f"<div>{line}</div>" for line in _left_out(stored))
        html += _html_legend(found[0])
    lines = _field_lines(stored).items()
    fields = "".join(f"<div><b>{name}</b>: {escape(fields)}</div>" for name, fields in lines)
    return f"{html}<details><summary>fields</summary>{fields}</details></div>"


def _html_rows(
    blocks: Cells, size: int, width: int, names: np.ndarray | None, unit: str
) -> list[str]:
    """Draw a bar for each run of blocks; ``names`` are the numbers of the examples."""
    bars = [""] * len(blocks.kinds)
    runs = blocks.runs()
    num_cells = np.minimum((runs.starts + runs.lengths) * size, width) - runs.starts * size
    looks = np.stack([runs.rows, num_cells, runs.kinds, runs.examples, runs.trained], axis=1)
    for row, count, kind, example, trained in looks.tolist():
        is_trained = None if blocks.trained is None else bool(trained)
        hover = NAMES.get(kind, "")
        if kind in (Kind.TOKEN, Kind.IMAGE):
            of_image = "image of " if kind == Kind.IMAGE else ""
            hover = of_image + ("an example" if names is None else f"example {names[example]}")
        hover += f": {plural(count, unit)}"
        if kind == Kind.TOKEN and is_trained is not None:
            hover += ", trained" if is_trained else ", not trained"
        look = f"width:{100 * count / width:.4g}%;{_look(kind, example, is_trained)}"
        bars[row] += f'<div style="{look}" title="{hover}"></div>'
    return bars


def _look(kind: Kind, example: int, is_trained: bool | None) -> str:
    """Return the style of a bar; ``is_trained`` is None where that is not known."""
    if kind != Kind.TOKEN:
        return f"height:100%;background:{_FILLS[kind]}"
    color = _EXAMPLES[example % len(_EXAMPLES)]
    height, shade = (50, "88") if is_trained is False else (100, "")
    return f"height:{height}%;background:{color}{shade}"


def _html_legend(blocks: Cells) -> str:
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
