"""Rows that fill up a batch, with nothing to train and nothing to count.

They repeat row 0, so that every model can run them, and have no loss, no response, no route and no
sub-sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    PerExample,
    PerImage,
    PerResponseToken,
    PerToken,
)
from torch_collate_kit.batch.rows import take, with_empty_rows
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

__all__ = ["padded"]

_LOSS_MASKS = ("loss_mask", "response_mask")
_TARGETS = ("rewards", "advantages", "returns")  # 0 whatever their shape: one per row, say
_FILL = {"labels": IGNORE_INDEX, **dict.fromkeys((*_LOSS_MASKS, *_TARGETS), 0)}
_EMPTY = ("sub_seq_lengths", *_FILL)  # where they are ragged
_FILL["router_padding_mask"] = 1  # True: a router counts and balances none of their tokens


def padded(storage: Storage, added: int) -> Storage:
    """With ``added`` rows at the end; ``sub_seq_lengths`` must be given beside columns."""
    num_dummy_rows = storage.metadata.get("num_dummy_rows", 0) + added
    return Storage(
        None if storage.columns is None else _columns(storage.columns, added),
        _given(storage, added),
        {k: _row_metadata(k, value, added) for k, value in storage.row_metadata.items()},
        {**storage.metadata, "num_dummy_rows": num_dummy_rows},
    )


def _repeated(value: Any, added: int) -> Any:
    """A copy with row 0 again ``added`` times at the end."""
    return take(value, np.append(np.arange(len(value)), np.zeros(added, dtype=np.int64)))


def _filled(ragged: Ragged, added: int, value: int) -> Ragged:
    ragged.values[ragged.offsets[-1 - added] :] = value
    return ragged


def _columns(columns: Columns, added: int) -> Columns:
    untrained = {"loss_weights": 0, "labels": IGNORE_INDEX}

    def column(name: str, values: Ragged) -> Ragged:
        if not isinstance(columns.specs[name], PerToken | PerImage):
            return with_empty_rows(values, added)
        repeated = _repeated(values, added)
        return _filled(repeated, added, untrained[name]) if name in untrained else repeated

    def counts(name: str, segments: Any) -> Any:
        repeated = _repeated(segments, added)
        return _filled(repeated, added, 0) if name in ("responses", "routed") else repeated

    return columns.change(column, counts)


def _given(storage: Storage, added: int) -> dict[str, Any]:
    """Dense fields; those that have a column are padded as it is.

    Those not named above repeat row 0, but floating-point fields whose rows have the shape of a
    mask's (values, log-probabilities) hold 0.
    """
    shapes = storage.row_shapes()
    masks = [shapes[name] for name in _LOSS_MASKS if name in shapes]
    specs = {} if storage.columns is None else storage.columns.specs
    given: dict[str, Any] = {}
    for name, field in storage.given.items():
        spec = specs.get(name)
        if isinstance(field, Ragged):
            is_empty = name in _EMPTY or isinstance(spec, PerExample)
            given[name] = (with_empty_rows if is_empty else _repeated)(field, added)
            continue
        given[name] = new = _repeated(field, added)
        if isinstance(spec, PerResponseToken):
            new[-added:] = spec.pad
        elif name in _FILL or (field.is_floating_point() and list(field.shape[1:]) in masks):
            new[-added:] = _FILL.get(name, 0)
        elif name == "rollout_expert_indices":  # what pads hold: no expert is there twice
            new[-added:] = torch.arange(field.shape[-1], device=field.device)
    return given


def _row_metadata(key: str, value: Any, added: int) -> Any:
    if isinstance(value, Ragged):
        return with_empty_rows(value, added)
    repeated = _repeated(value, added)
    if key == "is_last_step":
        repeated[-added:] = [True] * added if isinstance(repeated, list) else True
    return repeated
