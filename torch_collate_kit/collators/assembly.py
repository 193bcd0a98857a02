"""From what was read and planned to a Batch: the last step of every collator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import OWN_FIELDS
from torch_collate_kit.batch.placement import Pieces, Placement
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.declared import DeclaredFields
from torch_collate_kit.reading.numbers import Placed

__all__ = ["NOTHING_LOST", "assemble", "counts_of"]

NOTHING_LOST: dict[str, Any] = {  # metadata of a layout that has a row for every example
    "num_dummy_rows": 0,
    "num_dropped": 0,
    "num_cut": 0,
    "dropped": (),
    "cut": (),
}


def counts_of(pieces: Pieces, placed: Placed) -> dict[str, np.ndarray]:
    """What a placement counts in each piece."""
    counts = {"lengths": pieces.lengths, "responses": placed.num_actions}
    return counts if placed.routed is None else counts | {"routed": placed.routed}


def assemble(
    pieces: Pieces,
    placed: Placed,
    placement: Placement,
    names: tuple[str, ...],
    *,
    normalize_loss: bool,
    row_metadata: Mapping[str, Any],
    metadata: Mapping[str, Any],
    fields: DeclaredFields | None = None,
    num_loss_tokens_elsewhere: int = 0,
) -> Batch:
    """The Batch of pieces that are placed. ``names`` are its fields, ``fields`` the declared ones.

    ``num_loss_tokens_elsewhere``: of rows that other ranks collate. Metadata given goes last.
    """
    known = {**OWN_FIELDS, **(fields or {})}
    specs = {name: spec for name, spec in known.items() if name in placed.columns}
    segments: dict[str, Any] = {
        name: Ragged(torch.from_numpy(of.values), of.offsets)
        for name, of in placement.segments.items()
    }
    segments["num_segments"] = torch.from_numpy(placement.row_counts)
    columns = Columns({}, specs, names, placement, segments)
    offsets: dict[str | None, np.ndarray] = {}
    for name, values in placed.columns.items():
        count = columns.count_of(name)
        if count is None:
            row_offsets = placed.offsets.get(name, np.arange(len(pieces.lengths) + 1))
            row_offsets = row_offsets[pieces.row_offsets]
        else:
            row_offsets = offsets.setdefault(count, placement.offsets(count))
        columns.values[name] = Ragged(torch.as_tensor(values), row_offsets)
    num_loss_tokens = placed.num_loss_tokens + num_loss_tokens_elsewhere
    per_piece = {
        "example_indices": pieces.examples,
        "example_starts": pieces.starts,
        "num_actions": placed.num_actions,
    }
    return Batch.of_storage(
        Storage(columns, {}),
        {
            **{key: Ragged(values, pieces.row_offsets) for key, values in per_piece.items()},
            **row_metadata,
        },
        {
            "response_length": placement.response_length,
            "num_loss_tokens": num_loss_tokens,
            "loss_mask_divisor": max(1, num_loss_tokens) if normalize_loss else 1,
            "num_tokens": int(pieces.lengths.sum()),
            **metadata,
        },
    )
