"""Explanation: tokens with all that a batch holds of them, as a table."""

from __future__ import annotations

from html import escape
from typing import Any

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.fields import IGNORE_INDEX
from torch_collate_kit.batch.showing.tables import html_table, text_table
from torch_collate_kit.batch.showing.token_text import token_texts

__all__ = ["Explanation"]

_MAX_TEXT = 32
_LEFT = ("text",)
_TRAINED = "background:#009E7344;font-weight:bold"


class Explanation:
    """Tokens of a row; ``str()`` is an aligned table, and a notebook shows one in HTML.

    ``columns`` maps names to a list with one entry per token: ``cell``, the place in the row;
    ``example``, its number in the collator's call, and ``segment``, its number in the row; ``id``;
    ``position``; ``label``; ``weight`` of the loss, before it is divided; and other fields with
    values per token, response token or example, None where there is none. ``len()`` is the number
    of tokens. With a tokenizer, :meth:`to_dict` and :meth:`records` have ``text``, too.

    >>> import torch
    >>> from torch_collate_kit.batch import Batch
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
        tokenizer: Any = None,
        *,
        max_tokens: int | None = None,
        width: int | None = None,
    ) -> None:
        self.title = title
        self.columns = columns
        self._tokenizer = tokenizer
        self._max_tokens = len(self) if max_tokens is None else max_tokens
        self._width = width
        self._part(slice(0, 1))  # a wrong tokenizer raises here

    def __len__(self) -> int:
        return len(self.columns["cell"])

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns, with ``text`` after ``id``: what ``pandas.DataFrame`` takes."""
        return self._part(slice(None))

    def records(self) -> list[dict[str, Any]]:
        """A dict for every token."""
        columns = self.to_dict()
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def _part(self, part: slice) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for name, values in self.columns.items():
            columns[name] = values[part]
            if name == "id" and self._tokenizer is not None:
                columns["text"] = token_texts(values[part], self._tokenizer)
        return columns

    def _lines(self) -> tuple[list[str], list[list[str] | str]]:
        """The names of the columns, and lines of cells, or of words about what is not shown."""
        hidden = max(0, len(self) - self._max_tokens)
        tail = self._max_tokens // 2 if hidden else 0
        head = len(self) - hidden - tail
        parts = [self._part(slice(0, head)), self._part(slice(head + hidden, None))]
        lines: list[list[str] | str] = []
        expected = None if self._width is None else 0
        for part in parts:
            for values in zip(*part.values(), strict=True):
                shown = dict(zip(part, values, strict=True))
                lines += _skipped(expected, shown["cell"])
                lines.append([_shown(name, value) for name, value in shown.items()])
                expected = shown["cell"] + 1
            if hidden and part is parts[0]:
                lines.append(f"... {plural(hidden, 'more token')}")
                expected = None
        if self._width is not None and expected is not None:
            lines += _skipped(expected, self._width)
        return list(parts[0]), lines

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


def _skipped(expected: int | None, cell: int) -> list[str]:
    """A line about the cells without a token before ``cell``."""
    count = 0 if expected is None else cell - expected
    return [f"... {plural(count, 'cell')} of padding"] if count > 0 else []


def _shown(name: str, value: Any) -> str:
    if value is None or (name == "label" and value == IGNORE_INDEX):
        return "-"
    if name == "weight" and value == 0:
        return "-"
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # no -0
    text = str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 4] + "..." + text[-1]
