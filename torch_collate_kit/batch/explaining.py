"""A row of a batch token by token, as a table to read and as records for programs."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_optional_int
from torch_collate_kit.batch.cells import Cells, Kind, cells_of
from torch_collate_kit.batch.explanation import Explanation
from torch_collate_kit.batch.fields import PerExample, PerResponseToken, PerToken
from torch_collate_kit.ragged import Ragged, span_indices

if TYPE_CHECKING:
    from torch_collate_kit.batch.batch import Batch

__all__ = ["explained"]

_OWN = ("input_ids", "position_ids", "labels", "loss_weights", "loss_mask")
_UNSHOWN = ("attention_mask", "response_mask", "router_padding_mask")


def explained(
    batch: Batch,
    row: int | None,
    tokenizer: Any,
    *,
    example: int | None,
    start: int | None,
    stop: int | None,
    max_tokens: int | None,
) -> Explanation:
    """As ``Batch.explain``."""
    checked_optional_int("max_tokens", max_tokens, hint="None shows all tokens")
    row = _row_of(batch, row, example)
    one = batch[row : row + 1].to("cpu")
    cells = cells_of(one)
    if cells is None:
        raise ValueError(f"the batch has no input_ids [R, W] to explain; it has {', '.join(batch)}")
    names = _examples_of_cells(one, cells)
    picked = np.flatnonzero((cells.kinds[0] != Kind.PAD) & (cells.kinds[0] != Kind.GAP))
    begin, end, _ = slice(start, stop).indices(cells.kinds.shape[1])
    picked = picked[(picked >= begin) & (picked < end)]
    if example is not None:
        picked = picked[[names[cell] == example for cell in picked]]
    columns: dict[str, list[Any]] = {"cell": picked.tolist()}
    if names:
        columns["example"] = [names[cell] for cell in picked]
    columns |= {name: of[picked].tolist() for name, of in _own_columns(one, cells).items()}
    columns |= {name: [of[cell] for cell in picked] for name, of in _others(one, cells).items()}
    is_part = example is not None or start is not None or stop is not None
    return Explanation(
        _title(batch, row, example, cells),
        columns,
        tokenizer,
        max_tokens=max_tokens,
        width=None if is_part else cells.kinds.shape[1],
    )


def _row_of(batch: Batch, row: int | None, example: int | None) -> int:
    indices = batch.row_metadata.get("example_indices")
    if example is not None:
        if not isinstance(indices, Ragged):
            raise ValueError(
                'example needs row_metadata["example_indices"], which a collator writes, and the '
                "batch was built without it; pass the row alone"
            )
        rows = [i for i in range(len(batch)) if example in np.asarray(indices[i])]
        found = f"it is in {_listed('row', rows)}" if rows else "it is in none of them"
        if row is None and rows:
            return rows[0]
        if row is None or index(row) % max(len(batch), 1) not in rows:
            at = f"{len(batch)} rows" if row is None else f"row {row}"
            raise ValueError(f"example {example} is not in {at} of the batch: {found}")
    if row is None:
        raise TypeError("explain() needs a row, or the example to look for: explain(example=3)")
    if not -len(batch) <= index(row) < len(batch):
        raise IndexError(f"row {row} of a batch with {len(batch)} rows")
    return index(row) % len(batch)


def _listed(word: str, rows: list[int]) -> str:
    plural = "" if len(rows) == 1 else "s"
    return f"{word}{plural} {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''}"


def _title(batch: Batch, row: int, example: int | None, cells: Cells) -> str:
    is_token = cells.segments[0] >= 0
    numbers = f"{int(is_token.sum()):,} tokens in {is_token.size:,} cells"
    if cells.trained is not None:
        numbers += f", {int(cells.trained.sum()):,} trained"
    of = "" if example is None else f", example {example} of it"
    return f"row {row} of {len(batch)}: {numbers}{of}"


def _examples_of_cells(one: Batch, cells: Cells) -> list[int | None]:
    """The example of every cell, None where there is none; empty if examples are not known."""
    indices = one.row_metadata.get("example_indices")
    if not isinstance(indices, Ragged):
        return []
    examples = [*map(int, indices[0])]
    segments = cells.segments[0].tolist()
    return [examples[of] if 0 <= of < len(examples) else None for of in segments]


def _own_columns(one: Batch, cells: Cells) -> dict[str, np.ndarray]:
    """What every batch has; each [W]."""
    width = cells.kinds.shape[1]
    columns = {"segment": cells.segments[0]} if "cu_seq_lens" in one else {}
    columns["id"] = one["input_ids"][0].numpy()
    for name, field in {"position": "position_ids", "label": "labels"}.items():
        if field in one and getattr(one[field], "shape", None) == (1, width):
            columns[name] = one[field][0].numpy()
    if "loss_mask" in one:
        mask = one.divide_loss_mask(1)["loss_mask"]
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] <= width:
            columns["weight"] = np.zeros(width)
            columns["weight"][width - mask.shape[1] :] = mask[0].detach().double().numpy()
    return columns


def _others(one: Batch, cells: Cells) -> dict[str, list[Any]]:
    """Fields with one value per token, response token or example; each [W], None without one."""
    width, stored = cells.kinds.shape[1], one._stored()
    specs = {} if stored.columns is None else stored.columns.specs
    others: dict[str, list[Any]] = {}
    for name in one:
        spec = specs.get(name)
        if name in (*_OWN, *_UNSHOWN) or (spec is None and name not in stored.given):
            continue
        if isinstance(spec, PerExample):
            values = [*one[name][0].tolist()]
            segments = cells.segments[0].tolist()
            others[name] = [values[s] if 0 <= s < len(values) else None for s in segments]
        elif spec is None or isinstance(spec, PerToken | PerResponseToken):
            field = one[name]
            if _is_of_cells(field, one, width):
                values = [None] * (width - field.shape[1]) + field[0].tolist()
                others[name] = _responses_only(values, one, spec)
    return others


def _is_of_cells(field: Any, one: Batch, width: int) -> bool:
    """Whether it is ``[R, W]``, or ``[R, A]`` and right-aligned."""
    if not isinstance(field, Tensor) or field.ndim != 2:
        return False
    mask = one.get("loss_mask")
    responses = one.metadata.get("response_length", getattr(mask, "shape", (0, None))[-1])
    return field.shape[1] in (width, responses) and field.shape[1] <= width


def _responses_only(values: list[Any], one: Batch, spec: Any) -> list[Any]:
    placement = one.placement
    if placement is None or not isinstance(spec, PerResponseToken):
        return values
    starts, lengths, responses = (
        placement.segments[name].flat_values.astype(np.int64)
        for name in ("starts", "lengths", "responses")
    )
    cells = {*span_indices(starts + lengths - responses, responses).tolist()}
    return [value if cell in cells else None for cell, value in enumerate(values)]
