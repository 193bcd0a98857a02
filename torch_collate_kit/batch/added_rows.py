"""Rows that fill up a batch, with nothing to train and nothing to count.

They repeat row 0, so that every model can run them, and have no loss, no response, no route and no
sub-sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    FieldSpec,
    PerExample,
    PerImage,
    PerResponseToken,
    PerToken,
)
from torch_collate_kit.batch.rows import take, with_empty_rows
from torch_collate_kit.ragged import Ragged

__all__ = ["pad_columns", "pad_given", "pad_metadata"]

_LOSS_MASKS = ("loss_mask", "response_mask")
_TARGETS = ("rewards", "advantages", "returns")  # 0 whatever their shape: one per row, say
_FILL = {"labels": IGNORE_INDEX, **dict.fromkeys((*_LOSS_MASKS, *_TARGETS), 0)}
_EMPTY = ("sub_seq_lengths", *_FILL)  # where they are ragged
_FILL["router_padding_mask"] = 1  # True: a router counts and balances none of their tokens


def pad_columns(columns: Columns, added: int) -> Columns:
    """Columns with ``added`` rows at the end."""
    last = columns.num_rows
    order = np.append(np.arange(last), np.zeros(added, dtype=np.int64))
    counted = ("responses", "routed")
    untrained = {"loss_weights": 0, "labels": IGNORE_INDEX}

    def padded(name: str, column: Any) -> Any:
        if not isinstance(columns.specs[name], PerToken | PerImage):
            return with_empty_rows(column, added)
        repeated = take(column, order)
        return _filled(repeated, last, untrained[name]) if name in untrained else repeated

    def placed(name: str, counts: Any) -> Any:
        repeated = take(counts, order)
        return _filled(repeated, last, 0) if name in counted else repeated

    placement = columns.placement
    return replace(
        columns,
        values={name: padded(name, column) for name, column in columns.values.items()},
        segments={name: placed(name, counts) for name, counts in columns.segments.items()},
        placement=replace(
            placement,
            segments={name: placed(name, of) for name, of in placement.segments.items()},
        ),
    )


def _filled(ragged: Ragged, first_row: int, value: int) -> Ragged:
    ragged.values[ragged.offsets[first_row] :] = value
    return ragged


def pad_given(
    fields: Mapping[str, Any],
    added: int,
    row_shapes: Mapping[str, list[int]],
    specs: Mapping[str, FieldSpec],
) -> dict[str, Any]:
    """Dense fields with ``added`` rows at the end; those of ``specs`` as their columns have them.

    Those not named above repeat row 0, but floating-point fields whose rows have the shape of a
    mask's (values, log-probabilities) hold 0.
    """
    masks = [row_shapes[name] for name in _LOSS_MASKS if name in row_shapes]
    padded = {}
    for name, field in fields.items():
        spec = specs.get(name)
        if isinstance(field, Ragged) and (name in _EMPTY or isinstance(spec, PerExample)):
            padded[name] = with_empty_rows(field, added)
            continue
        last = len(field)
        padded[name] = new = take(field, np.append(np.arange(last), np.zeros(added, np.int64)))
        if isinstance(field, Ragged):
            continue
        if isinstance(spec, PerResponseToken):
            new[last:] = spec.pad
        elif name in _FILL or (field.is_floating_point() and list(field.shape[1:]) in masks):
            new[last:] = _FILL.get(name, 0)
        elif name == "rollout_expert_indices":  # what pads hold: no expert is there twice
            new[last:] = torch.arange(field.shape[-1], device=field.device)
    return padded


def pad_metadata(row_metadata: Mapping[str, Any], added: int) -> dict[str, Any]:
    """Row metadata with ``added`` rows at the end."""
    padded: dict[str, Any] = {}
    for key, value in row_metadata.items():
        if isinstance(value, Ragged):
            padded[key] = with_empty_rows(value, added)
            continue
        last = len(value)
        padded[key] = new = take(value, np.append(np.arange(last), np.zeros(added, np.int64)))
        if key == "is_last_step":
            new[last:] = [True] * added if isinstance(new, list) else True
    return padded
