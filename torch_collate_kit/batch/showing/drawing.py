"""A batch as text: what is stored, and its first rows, drawn."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.buffer import tensor_of
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.showing.cells import (
    Cells,
    Kind,
    cells_of,
    example_numbers,
    examples_per_row,
)
from torch_collate_kit.batch.storage import Storage

__all__ = ["NAMES", "described", "field_lines", "first_rows", "title"]

_MAX_ROWS = 8
_WIDTH = 80
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SYMBOLS = {Kind.IMAGE: "#", Kind.FILLER: "+", Kind.GAP: "-", Kind.PAD: "."}
NAMES = {
    Kind.IMAGE: "image",
    Kind.FILLER: "filler, of no example",
    Kind.GAP: "alignment",
    Kind.PAD: "padding",
}


def first_rows(stored: Storage) -> Cells | None:
    """The rows that are drawn; None where the batch does not say what their cells hold."""
    return cells_of(stored.change(lambda rows: rows[:_MAX_ROWS]))


def described(stored: Storage) -> str:
    """The repr: a title, the first rows, a legend and the fields, in lines of 80 characters."""
    lines = [fill(title(stored), _WIDTH, subsequent_indent="    ")]
    cells = first_rows(stored)
    if cells is not None:
        blocks, size = cells.in_blocks(_WIDTH - 10)
        rows = _drawn_rows(blocks)
        lines += [f"  row {i} |{row}|" for i, row in enumerate(rows)]
        if stored.num_rows > len(rows):
            lines.append(f"  ... {stored.num_rows - len(rows):,} more rows")
        if legend := _legend(blocks, size, is_made=stored.columns is not None):
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
    devices = {tensor_of(value).device for value in stored.items().values()}
    places = ", ".join(sorted(str(device) for device in devices if device.type != "cpu"))
    where = f", on {places}" if places else ""
    if stored.columns is None:
        return f"Batch of {plural(stored.num_rows, 'row')}{where}, built from tensors"
    placement = stored.columns.placement
    rows = plural(stored.num_rows, "packed row" if placement.is_packed else "padded row")
    parts = _counts(stored, placement)
    if not places and "loss_mask" not in stored.given:
        parts.append(f"{int(stored.columns.num_trained().sum()):,} trained")
    return f"Batch of {rows}, {placement.width:,} wide{where}: {', '.join(parts)}"


def _counts(stored: Storage, placement: Placement) -> list[str]:
    """Examples and tokens."""
    counts: Any = examples_per_row(stored)
    is_own = placement.numbers() < counts[placement.rows()]
    num_tokens = int(placement.segments["lengths"].values[is_own].sum())
    num_pieces, num_cells = int(counts.sum()), stored.num_rows * placement.width
    examples = example_numbers(stored)
    num_examples = num_pieces if examples is None else len(np.unique(examples))
    pieces = f" in {num_pieces:,} pieces" if num_pieces > num_examples else ""
    share = f" ({_percent(num_tokens / num_cells)} of the cells)" if num_cells else ""
    return [plural(num_examples, "example") + pieces, plural(num_tokens, "token") + share]


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


def _drawn_rows(blocks: Cells) -> list[str]:
    """A letter or symbol for each block."""
    trained = np.zeros_like(blocks.kinds) if blocks.trained is None else blocks.trained
    looks = np.stack([blocks.kinds, blocks.examples, trained], axis=-1)
    return ["".join(_symbol(*block) for block in row) for row in looks.tolist()]


def _symbol(kind: Kind, example: int, is_trained: bool) -> str:
    if kind != Kind.TOKEN:
        return _SYMBOLS[kind]
    letter = _LETTERS[example % len(_LETTERS)]
    return letter.upper() if is_trained else letter


def _legend(blocks: Cells, size: int, *, is_made: bool) -> str:
    is_known = blocks.trained is not None
    found = {*blocks.kinds.ravel().tolist()}
    parts = []
    if Kind.TOKEN in found:
        parts.append("letters: examples" + (", upper case where trained" if is_known else ""))
    if found and size > 1:
        parts.append(f"1 letter = {size:,} cells")
    parts += [f"{_SYMBOLS[kind]} {name}" for kind, name in NAMES.items() if kind in found]
    if not is_known and is_made:
        parts.append('batch.to("cpu") shows what is trained')
    return "; ".join(parts)
