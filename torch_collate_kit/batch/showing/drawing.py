"""A batch as text and as HTML: what is stored, and its first rows, drawn."""

from __future__ import annotations

from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.showing.cells import Kind, cells_of, example_numbers, examples_per_row
from torch_collate_kit.batch.storage import Storage, tensor_of

__all__ = ["NAMES", "Run", "described", "field_lines", "runs_of_rows", "title"]

MAX_ROWS = 8
_WIDTH = 80
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SYMBOLS = {Kind.IMAGE: "#", Kind.FILLER: "+", Kind.GAP: "-", Kind.PAD: "."}
NAMES = {
    Kind.IMAGE: "image",
    Kind.FILLER: "filler, of no example",
    Kind.GAP: "alignment",
    Kind.PAD: "padding",
}


class Run(NamedTuple):
    """Neighbouring blocks of a row that look the same."""

    kind: Kind
    example: int
    """Its number among the examples that are drawn, in the order of the rows; -1 of padding."""
    trained: bool
    num_blocks: int
    num_cells: int


def described(stored: Storage) -> str:
    """The repr: a title, the first rows, a legend and the fields, in lines of 80 characters."""
    lines = [fill(title(stored), _WIDTH, subsequent_indent="    ")]
    drawn = runs_of_rows(stored, max_blocks=_WIDTH - 10)
    if drawn is not None:
        rows, block, is_known = drawn
        for i, row in enumerate(rows):
            lines.append(f"  row {i} |{''.join(_symbol(run) * run.num_blocks for run in row)}|")
        if stored.num_rows > len(rows):
            lines.append(f"  ... {stored.num_rows - len(rows):,} more rows")
        if legend := _legend(rows, block, is_known, is_made=stored.columns is not None):
            lines.append(fill(legend, _WIDTH, initial_indent="  ", subsequent_indent="  "))
    for name, fields in field_lines(stored).items():
        text = f"{name}: {fields}"
        lines.append(fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def title(stored: Storage) -> str:
    """The rows, and what they hold, in one line.

    >>> import torch
    >>> title(Storage(None, {"x": torch.zeros(2)}))
    'Batch of 2 rows, built from tensors'
    """
    rows = f"{stored.num_rows:,} {{}}row{'' if stored.num_rows == 1 else 's'}"
    devices = {tensor_of(value).device for value in stored.items().values()}
    places = ", ".join(sorted(str(device) for device in devices if device.type != "cpu"))
    where = f", on {places}" if places else ""
    if stored.columns is None:
        return f"Batch of {rows.format('')}{where}, built from tensors"
    placement = stored.columns.placement
    kind = "packed " if placement.is_packed else "padded "
    parts = _counts(stored, placement)
    if not places and "loss_mask" not in stored.given:
        parts.append(f"{int(stored.columns.num_trained().sum()):,} trained")
    return f"Batch of {rows.format(kind)}, {placement.width:,} wide{where}: {', '.join(parts)}"


def _counts(stored: Storage, placement: Placement) -> list[str]:
    """Examples and tokens."""
    counts: Any = examples_per_row(stored)
    is_own = placement.numbers() < counts[placement.rows()]
    num_tokens = int(placement.segments["lengths"].values[is_own].sum())
    num_pieces, num_cells = int(counts.sum()), stored.num_rows * placement.width
    examples = example_numbers(stored)
    num_examples = num_pieces if examples is None else len(np.unique(examples))
    found = f"{num_examples:,} example{'' if num_examples == 1 else 's'}"
    if num_pieces > num_examples:
        found += f" in {num_pieces:,} pieces"
    share = f" ({_percent(num_tokens / num_cells)} of the cells)" if num_cells else ""
    return [found, f"{num_tokens:,} token{'' if num_tokens == 1 else 's'}{share}"]


def _percent(share: float) -> str:
    """Without rounding to 0% what is more, or to 100% what is less."""
    text = f"{share:.0%}"
    return text if (text in ("0%", "100%")) == (share in (0, 1)) else f"{share:.2%}"


def field_lines(stored: Storage) -> dict[str, str]:
    """The fields: what is stored of them, what is made when it is read, and what was given."""
    columns, given = stored.columns, stored.given
    lines = {}
    if columns is not None:
        forms = ", ".join(f"{name} {_form(of)}" for name, of in columns.values.items())
        lines["stored"] = f"{forms} ({stored.nbytes:,} bytes)"
        made = [n for n in columns.names if n not in columns.values and n not in given]
        lines["made when read"] = ", ".join(made)
    if given:
        lines["given" if columns else "fields"] = ", ".join(
            f"{name} {_form(of) if isinstance(of, Tensor) else repr(of)}"
            for name, of in given.items()
        )
    return {name: line for name, line in lines.items() if line}


def _form(value: Any) -> str:
    tensor = tensor_of(value)
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def runs_of_rows(stored: Storage, *, max_blocks: int) -> tuple[list[list[Run]], int, bool] | None:
    """The first rows as runs, the cells of a block, and whether it is known what is trained.

    A block shows what most of its cells hold. None where the batch does not say what they hold.
    """
    cells = cells_of(stored.change(lambda rows: rows[:MAX_ROWS]))
    if cells is None:
        return None
    num_rows, width = cells.kinds.shape
    block = 1
    while block * max_blocks < width:
        block *= 2
    is_known = cells.trained is not None
    trained = np.zeros_like(cells.kinds, dtype=bool) if cells.trained is None else cells.trained
    rows, before = [], 0
    for row in range(num_rows):
        is_own = (cells.kinds[row] == Kind.TOKEN) | (cells.kinds[row] == Kind.IMAGE)
        found, numbers = np.unique(cells.segments[row][is_own], return_inverse=True)
        examples = np.full(width, -1)
        examples[is_own] = numbers + before
        before += len(found)
        rows.append(_runs(cells.kinds[row], examples, trained[row], block))
    return rows, block, is_known


def _runs(kinds: np.ndarray, examples: np.ndarray, trained: np.ndarray, block: int) -> list[Run]:
    runs: list[Run] = []
    codes = (examples + 1) * 8 + kinds
    for begin in range(0, len(kinds), block):
        part = codes[begin : begin + block]
        found, counts = np.unique(part, return_counts=True)
        code = found[counts.argmax()]
        is_trained = bool(trained[begin : begin + block][part == code].mean() >= 0.5)
        run = Run(Kind(int(code % 8)), int(code // 8) - 1, is_trained, 1, len(part))
        if runs and runs[-1][:3] == run[:3]:
            last = runs.pop()
            run = run._replace(num_blocks=last.num_blocks + 1, num_cells=last[-1] + len(part))
        runs.append(run)
    return runs


def _symbol(run: Run) -> str:
    if run.kind != Kind.TOKEN:
        return _SYMBOLS[run.kind]
    letter = _LETTERS[run.example % len(_LETTERS)]
    return letter.upper() if run.trained else letter


def _legend(rows: list[list[Run]], block: int, is_known: bool, *, is_made: bool) -> str:
    found = {run.kind for row in rows for run in row}
    parts = []
    if Kind.TOKEN in found:
        parts.append("letters: examples" + (", upper case where trained" if is_known else ""))
    if found and block > 1:
        parts.append(f"1 letter = {block:,} cells")
    parts += [f"{_SYMBOLS[kind]} {name}" for kind, name in NAMES.items() if kind in found]
    if not is_known and is_made:
        parts.append('batch.to("cpu") shows what is trained')
    return "; ".join(parts)
