"""A row of a batch token by token: text, label, weight and the other fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from operator import index
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from torch_collate_kit._checks import checked_optional_int, plural
from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    PerExample,
    PerResponseToken,
    PerTarget,
    PerToken,
)
from torch_collate_kit.batch.showing.cells import Cells, cells_of
from torch_collate_kit.batch.showing.style import html_table, text_table
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

_MAX_TEXT = 32
_LEFT = ("text",)
_TRAINED = "background:#009E7344;font-weight:bold"
_TITLES = {"input_ids": "id", "position_ids": "position", "labels": "label", "targets": "target"}
_NO_TARGET = (("label", IGNORE_INDEX), ("target", IGNORE_INDEX), ("weight", 0))
_UNSHOWN = ("loss_weights", "loss_mask", "attention_mask", "response_mask", "router_padding_mask")
_GROUPS = ("uids", "trajectory_ids")  # of rollouts, whatever they are made of
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in a SentencePiece vocabulary
_SPACE = "\u2581"  # a space there


def explained(
    batch: Any,
    row: int | None,
    tokenizer: Any,
    example: int | None,
    cells: slice,
    max_tokens: int | None,
) -> Explanation:
    """Explain a row of a Batch."""
    number = row_of(batch.stored(), row, example)
    only = batch.stored().with_divisor(1).change(lambda rows: rows[number : number + 1])
    one = type(batch).of_storage(only).to("cpu")
    stored, title = one.stored(), f"row {number} of {len(batch)}"
    checked_optional_int("max_tokens", max_tokens, hint="None shows all tokens")
    of_row = cells_of(stored)
    if of_row is None:
        raise ValueError(f"the batch has no input_ids [R, W] to explain; it has {', '.join(one)}")
    is_token = of_row.segments[0] >= 0
    in_tree = None  # the cell of each token, where segments share them
    if stored.columns and stored.columns.placement.tree_width:
        in_tree = stored.columns.values["tree_cells"].values.numpy()
    found = _columns_of(one, stored, of_row, in_tree)
    in_cells = plural(len(is_token) if in_tree is None else len({*in_tree.tolist()}), "cell")
    title = f"{title}: {plural(int(is_token.sum()), 'token')} in {in_cells}"
    title += "" if of_row.trained is None else f", {int(of_row.trained.sum()):,} trained"
    picked = [cell for cell in range(len(is_token))[cells] if is_token[cell]]
    if example is not None:
        picked = [cell for cell in picked if found["example"][cell] == example]
        title += f", example {example} of it"
    columns = {}
    for name, values in found.items():
        columns[name] = [values[cell] for cell in picked]
        if name == "id" and tokenizer is not None:
            columns["text"] = _token_texts(columns["id"], tokenizer)
    width = None if example is not None or cells != slice(None) else len(is_token)
    return Explanation(title, columns, max_tokens=max_tokens, width=width, has_gaps=in_tree is None)


def row_of(stored: Storage, row: int | None, example: int | None) -> int:
    """Return the number of the row, or of the first one with a piece of the example."""
    num_rows, indices = stored.num_rows, stored.row_metadata.get("example_indices")
    if example is not None:
        if not isinstance(indices, Ragged):
            raise ValueError(
                'example needs row_metadata["example_indices"], which a collator writes, and the '
                "batch was built without it; pass the row alone"
            )
        rows = [i for i in range(num_rows) if example in np.asarray(indices[i])]
        if row is None and rows:
            return rows[0]
        if row is None or index(row) % max(num_rows, 1) not in rows:
            where = f"{num_rows} rows" if row is None else f"row {row}"
            some = f"{', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''}"
            found = f"; it is in rows {some}" if rows else ""
            raise ValueError(f"example {example} is not in {where} of the batch{found}")
    if row is None:
        raise TypeError("explain() needs a row, or the example to look for: explain(example=3)")
    if not -num_rows <= index(row) < num_rows:
        raise IndexError(f"row {row} of a batch with {num_rows} rows")
    return index(row) % num_rows


def _of_segments(values: list[Any], cells: Cells) -> list[Any]:
    """Return the value of every cell's segment; None where there is no example."""
    return [values[i] if 0 <= i < len(values) else None for i in cells.segments[0].tolist()]


def _of_examples(values: list[Any], stored: Storage, cells: Cells) -> list[Any]:
    """Return the value of every cell's example, given once for each; None where there is none."""
    numbers = stored.row_metadata.get("segment_numbers")
    if isinstance(numbers, Ragged):
        before = np.cumsum(np.asarray(numbers[0]) == 0)  # of a padded row maybe none begins here
        values = [values[i - 1] if 0 < i <= len(values) else None for i in before.tolist()]
    return _of_segments(values, cells)


def _columns_of(
    one: Mapping[str, Any], stored: Storage, cells: Cells, in_tree: np.ndarray | None
) -> dict[str, list[Any]]:
    """Return the known values per cell: a list [W] for each name.

    With ``in_tree`` of the tokens, of which several may be in one cell.
    """
    width = cells.kinds.shape[1]
    columns: dict[str, Any] = {"cell": [*range(width)]}
    if in_tree is not None:
        columns["cell"] = [*in_tree.tolist(), *[None] * (width - len(in_tree))]
    indices = stored.row_metadata.get("example_indices")
    if isinstance(indices, Ragged):
        columns["example"] = _of_segments([*map(int, indices[0])], cells)
    numbers = stored.row_metadata.get("segment_numbers")
    if isinstance(numbers, Ragged):
        columns["part"] = _of_segments([*map(int, numbers[0])], cells)
    if "cu_seq_lens" in one:
        columns["segment"] = cells.segments[0].tolist()
    for field, name in _TITLES.items():
        values: Any = one.get(field)
        if in_tree is not None and field in ("input_ids", "position_ids"):  # of cells, [1, W]
            values = F.pad(values[:, in_tree], (0, width - len(in_tree)))
        columns[name] = _of_cells(values, width, [width])
    weights = _of_cells(one.get("loss_mask"), width, range(width + 1))
    if weights is not None:
        columns["weight"] = [float(weight or 0) for weight in weights]
    own = (*columns, "text")
    given = {n: _values_of(n, one, stored, cells) for n in one if n not in (*_TITLES, *_UNSHOWN)}
    for name, rows in stored.row_metadata.items():
        texts = [*rows[0]] if isinstance(rows[0], tuple) else [rows[0]]
        if name not in _GROUPS and all(isinstance(text, str) for text in texts):
            given[name] = _of_examples(texts, stored, cells)
    columns |= {f"field {name}" if name in own else name: column for name, column in given.items()}
    return {name: values for name, values in columns.items() if values is not None}


def _values_of(
    name: str, one: Mapping[str, Any], stored: Storage, cells: Cells
) -> list[Any] | None:
    """Return a value per cell of a field per token, response token or example, else None."""
    spec = stored.columns.specs.get(name)
    if isinstance(spec, PerExample):
        return _of_examples(one[name][0].tolist(), stored, cells)
    is_per_token = isinstance(spec, PerToken | PerResponseToken | PerTarget)
    if not is_per_token and (spec is not None or name not in stored.given):
        return None
    width, mask = cells.kinds.shape[1], one.get("loss_mask")
    responses = stored.metadata.get("response_length", getattr(mask, "shape", (0,))[-1])
    num_dims = 2 + len(getattr(spec, "shape", ()))
    values = _of_cells(one[name], width, [width, min(width, responses)], num_dims)
    if values is None or not isinstance(spec, PerResponseToken) or not stored.columns:
        return values
    shown = {*stored.columns.placement.cells("responses").tolist()}
    return [value if i in shown else None for i, value in enumerate(values)]


def _of_cells(field: Any, width: int, sizes: Sequence[int], num_dims: int = 2) -> list[Any] | None:
    """Return a value per cell of a field ``[1, W]``, or right-aligned ``[1, A]``, else None."""
    if not isinstance(field, Tensor) or field.ndim != num_dims or field.shape[1] not in sizes:
        return None
    return [None] * (width - field.shape[1]) + field[0].tolist()


class Explanation:
    """Tokens of a row; ``str()`` is an aligned table, and a notebook shows one in HTML.

    ``columns`` maps names to a list with one entry per token: ``cell``, the place in the row, which
    segments that share prefixes have in common;
    ``example``, its number in the collator's call, ``part``, which of its segments, of examples
    with several, and ``segment``, its number in the row; ``id``;
    ``text``, with a tokenizer; ``position``; ``label``, or of a context shard ``target``, the id
    that the cell predicts; ``weight`` of the loss, before it is divided and times that of its
    example; and other fields with values per token, response token or example, texts too, None
    where there is none. ``len()`` is the number of tokens.

    >>> import torch
    >>> from torch_collate_kit import Batch
    >>> explanation = Batch({"input_ids": torch.tensor([[5, 6]])}).explain(0)
    >>> explanation
    row 0 of 1: 2 tokens in 2 cells
    cell  id
       0   5
       1   6
    >>> explanation.records()
    [{'cell': 0, 'id': 5}, {'cell': 1, 'id': 6}]
    """

    def __init__(
        self,
        title: str,
        columns: dict[str, list[Any]],
        *,
        max_tokens: int | None = None,
        width: int | None = None,
        has_gaps: bool = True,
    ) -> None:
        self.title, self.columns, self._width = title, columns, width
        self._has_gaps = has_gaps
        self._max_tokens = len(self) if max_tokens is None else max_tokens

    def __len__(self) -> int:
        return len(self.columns["cell"])

    def to_dict(self) -> dict[str, list[Any]]:
        """Return a copy of the columns, as ``pandas.DataFrame`` accepts them."""
        return {name: [*values] for name, values in self.columns.items()}

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for every token."""
        rows = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, values, strict=True)) for values in rows]

    def _lines(self) -> tuple[list[str], list[list[str] | str]]:
        """Return the names of the columns, and lines of cells, or words for what is left out."""
        hidden = max(0, len(self) - self._max_tokens)
        head = len(self) - hidden - (self._max_tokens // 2 if hidden else 0)
        lines: list[list[str] | str] = []
        expected = None if self._width is None else 0
        for number, values in enumerate(zip(*self.columns.values(), strict=True)):
            if head <= number < head + hidden:
                lines += [f"... {plural(hidden, 'more token')}"] if number == head else []
                expected = None
                continue
            lines += _skipped(expected, values[0]) if self._has_gaps else []
            lines.append([_cell_text(*shown) for shown in zip(self.columns, values, strict=True)])
            expected = values[0] + 1
        after = _skipped(expected, self._width) if self._has_gaps else []
        return list(self.columns), lines + after

    def __str__(self) -> str:
        names, lines = self._lines()
        return "\n".join([self.title, *text_table(names, lines, _LEFT)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names, lines = self._lines()
        weight = names.index("weight") if "weight" in names else None
        styles = [
            "" if weight is None or isinstance(line, str) or line[weight] == "-" else _TRAINED
            for line in lines
        ]
        table = html_table(names, lines, _LEFT, styles)
        return f"<div><b>{escape(self.title)}</b>{table}</div>"


def _skipped(expected: int | None, cell: int | None) -> list[str]:
    """Return a line about the cells without a token before ``cell``."""
    count = 0 if expected is None or cell is None else cell - expected
    return [f"... {plural(count, 'cell')} of padding"] if count > 0 else []


def _cell_text(name: str, value: Any) -> str:
    if value is None or (name, value) in _NO_TARGET:
        return "-"
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # no -0
    is_vector = isinstance(value, list)
    text = f"[{', '.join(_cell_text('', entry) for entry in value)}]" if is_vector else str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 4] + "..." + text[-1]


def _token_texts(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of every id alone; ``tokenizer`` may be a processor."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "decode"):
        raise TypeError(
            f"tokenizer must have decode(), got {type(tokenizer).__name__}; load it with "
            "AutoTokenizer.from_pretrained"
        )
    texts = {token: _text(token, tokenizer) for token in set(ids)}
    return [texts[token] for token in ids]


def _text(token: int, tokenizer: Any) -> str:
    r"""Return the text of an id alone, quoted; bytes (``b'\xe2'``) for a part of a character."""
    try:  # as the vocabulary writes it
        piece = tokenizer.convert_ids_to_tokens(token) if token >= 0 else None
    except (IndexError, KeyError, OverflowError):
        piece = None
    if piece is None:
        return "?"
    text: str = tokenizer.decode([token])
    if "\ufffd" in text and (part := _bytes_of(piece)) is not None:
        return repr(part)
    if piece.startswith(_SPACE) and not text.startswith(" "):
        text = " " + text  # decode() drops it at the beginning of a text
    return repr(text)


def _bytes_of(piece: str) -> bytes | None:
    """Return the bytes of a piece of a byte-level vocabulary; None if it is of another kind.

    Byte-level BPE writes printable bytes as they are, and the others from U+0100 on.
    """
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else None
