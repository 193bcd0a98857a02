"""A row of a batch, token by token: which row, and what every cell of it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_optional_int
from torch_collate_kit.batch.fields import PerExample, PerResponseToken, PerToken
from torch_collate_kit.batch.showing.cells import Cells, cells_of
from torch_collate_kit.batch.showing.explanation import Explanation
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

__all__ = ["explained", "row_of"]

_TITLES = {"input_ids": "id", "position_ids": "position", "labels": "label"}
_UNSHOWN = ("loss_weights", "loss_mask", "attention_mask", "response_mask", "router_padding_mask")


def explained(
    one: Mapping[str, Any],
    stored: Storage,
    title: str,
    tokenizer: Any,
    *,
    example: int | None,
    start: int | None,
    stop: int | None,
    max_tokens: int | None,
) -> Explanation:
    """As ``Batch.explain``: one row in host memory, its dense fields and all that is stored."""
    checked_optional_int("max_tokens", max_tokens, hint="None shows all tokens")
    cells = cells_of(stored)
    if cells is None:
        raise ValueError(f"the batch has no input_ids [R, W] to explain; it has {', '.join(one)}")
    width = cells.kinds.shape[1]
    columns = _columns(one, stored, cells)
    picked = [cell for cell in columns["cell"][start:stop] if cells.segments[0, cell] >= 0]
    if example is not None:
        picked = [cell for cell in picked if columns["example"][cell] == example]
    is_part = example is not None or start is not None or stop is not None
    return Explanation(
        f"{title}: {_counts(cells)}{'' if example is None else f', example {example} of it'}",
        {name: [values[cell] for cell in picked] for name, values in columns.items()},
        tokenizer,
        max_tokens=max_tokens,
        width=None if is_part else width,
    )


def row_of(stored: Storage, row: int | None, example: int | None) -> int:
    """The row that is named, counted from 0, or the first one with a piece of the example."""
    num_rows, indices = stored.num_rows, stored.row_metadata.get("example_indices")
    if example is not None:
        if not isinstance(indices, Ragged):
            raise ValueError(
                'example needs row_metadata["example_indices"], which a collator writes, and the '
                "batch was built without it; pass the row alone"
            )
        rows = [i for i in range(num_rows) if example in np.asarray(indices[i])]
        found = f"it is in {_listed(rows)}" if rows else "it is in none of them"
        if row is None and rows:
            return rows[0]
        if row is None or index(row) % max(num_rows, 1) not in rows:
            at = f"{num_rows} rows" if row is None else f"row {row}"
            raise ValueError(f"example {example} is not in {at} of the batch: {found}")
    if row is None:
        raise TypeError("explain() needs a row, or the example to look for: explain(example=3)")
    if not -num_rows <= index(row) < num_rows:
        raise IndexError(f"row {row} of a batch with {num_rows} rows")
    return index(row) % num_rows


def _listed(rows: list[int]) -> str:
    plural = "" if len(rows) == 1 else "s"
    return f"row{plural} {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''}"


def _counts(cells: Cells) -> str:
    is_token = cells.segments[0] >= 0
    trained = "" if cells.trained is None else f", {int(cells.trained.sum()):,} trained"
    return f"{int(is_token.sum()):,} tokens in {is_token.size:,} cells{trained}"


def _of_examples(values: list[Any], cells: Cells) -> list[Any]:
    """The value of every cell's example, by its number in the row; None where there is none."""
    return [values[i] if 0 <= i < len(values) else None for i in cells.segments[0].tolist()]


def _columns(one: Mapping[str, Any], stored: Storage, cells: Cells) -> dict[str, list[Any]]:
    """What there is of every cell, with all fields that have a value per token, response token or
    example; a list [W] of each."""
    width, mask = cells.kinds.shape[1], one.get("loss_mask")
    columns: dict[str, list[Any]] = {"cell": [*range(width)]}
    indices = stored.row_metadata.get("example_indices")
    if isinstance(indices, Ragged):
        columns["example"] = _of_examples([*map(int, indices[0])], cells)
    if "cu_seq_lens" in one:
        columns["segment"] = cells.segments[0].tolist()
    for field, name in _TITLES.items():
        values = _of_cells(one.get(field), width, [width])
        if values is not None:
            columns[name] = values
    weights = _of_cells(mask, width, range(width + 1))
    if weights is not None:
        columns["weight"] = [float(weight or 0) for weight in weights]
    responses = stored.metadata.get("response_length", getattr(mask, "shape", (0,))[-1])
    specs = {} if stored.columns is None else stored.columns.specs
    for name in one:
        values, spec = None, specs.get(name)
        if name in (*_TITLES, *_UNSHOWN) or (spec is None and name not in stored.given):
            continue
        if isinstance(spec, PerExample):
            values = _of_examples(one[name][0].tolist(), cells)
        elif spec is None or isinstance(spec, PerToken | PerResponseToken):
            values = _of_cells(one[name], width, [width, min(width, responses)])
        if values is not None and isinstance(spec, PerResponseToken) and stored.placement:
            shown = {*stored.placement.cells("responses").tolist()}
            values = [value if i in shown else None for i, value in enumerate(values)]
        if values is not None:
            columns[name] = values
    return columns


def _of_cells(field: Any, width: int, sizes: Sequence[int]) -> list[Any] | None:
    """A field ``[1, W]``, or right-aligned ``[1, A]``, of one of these sizes; else None."""
    if not isinstance(field, Tensor) or field.ndim != 2 or field.shape[1] not in sizes:
        return None
    return [None] * (width - field.shape[1]) + field[0].tolist()
