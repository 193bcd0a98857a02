"""Inputs of a context shard for attention to keys that are gathered from all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.context_group import (
    check_group,
    check_one_batch,
    content_of,
    gathered_ints,
)
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.batch.placement import MAX_WIDTH, Placement, Shard
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.packing.context import slices_of_rank
from torch_collate_kit.ragged import span_indices

_COMPARED: WeakSet[Any] = WeakSet()
"""Groups whose ranks were seen to have shards of one batch."""


def shard_inputs(
    batch: Mapping[str, Any], columns: Columns, kind: ModelKind, group: Any
) -> dict[str, Any]:
    """Return the inputs of a shard: no labels, since its targets are shifted already.

    Raises:
        IsolationError: a model whose layers carry state from cell to cell.
        ValueError: another attention, images, pads on the left, or a group that does not fit.
    """
    shard: Any = columns.placement.shard
    _refuse_other_models(kind, columns.placement, shard)
    check_group(shard, group)
    if group not in _COMPARED:  # once: it waits for the device
        check_one_batch(gathered_ints(content_of(shard), group))
        _COMPARED.add(group)
    queries, keys, cells = paths_of_shard(columns.placement, columns.num_rows)
    ends = [np.append(0, np.cumsum(of)) for of in (queries, keys)]
    if max(int(of[-1]) for of in ends) > MAX_WIDTH:
        raise ValueError(
            f"rows of {ends[1][-1]} cells are more than int32 boundaries can count, {MAX_WIDTH}; "
            "cut them in parts, such as batch.split(rows)"
        )
    device = batch["input_ids"].device
    bounds = torch.from_numpy(np.stack(ends).astype(np.int32)).to(device, non_blocking=True)
    return {
        **{name: batch[name] for name in ("input_ids", "position_ids")},
        "use_cache": False,
        "cu_seq_lens_q": bounds[0],
        "cu_seq_lens_k": bounds[1],
        "max_length_q": int(queries.max(initial=0)),
        "max_length_k": int(keys.max(initial=0)),
        "path_cells": torch.from_numpy(cells).to(device, non_blocking=True),
        "context_group": group,
    }


def paths_of_shard(
    placement: Placement, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the queries and keys of each run of cells, int64 [K], and where the keys are.

    The keys of a run are those of its segment up to its end. They are found in the cells of all
    ranks joined, rank after rank: int64, the sum of the keys of all runs.
    """
    shard: Any = placement.shard
    bounds = np.array(shard.bounds, dtype=np.int64)
    own = slices_of_rank(bounds, num_rows, shard.rank, shard.size, shard.layout)
    firsts = bounds[own.segments]
    keys = own.ends - firsts
    places = places_in_ranks(placement, num_rows)
    return own.ends - own.begins, keys, places[span_indices(firsts, keys)]


def places_in_ranks(placement: Placement, num_rows: int) -> np.ndarray:
    """Return where each cell of the batch is in the cells of all ranks joined: int64 [R * W]."""
    shard: Any = placement.shard
    bounds = np.array(shard.bounds, dtype=np.int64)
    of_ranks = [
        slices_of_rank(bounds, num_rows, rank, shard.size, shard.layout)
        for rank in range(shard.size)
    ]
    cells = np.concatenate([span_indices(of.begins, of.ends - of.begins) for of in of_ranks])
    places = np.empty_like(cells)
    places[cells] = np.arange(len(cells))
    return places


def _refuse_other_models(kind: ModelKind, placement: Placement, shard: Shard) -> None:
    """Refuse a model or rows for which keys of other ranks are not all that is needed."""
    family = kind.family
    if family.keywords or family.needs_isolation or kind.is_isolated or family.refused:
        reason = family.refused or "its layers carry state along a row, which no rank has whole"
        raise IsolationError(
            f"context shards are wrong in {family.name} models: {reason}; pass it whole rows"
        )
    if kind.attention != "torch_varlen":
        raise ValueError(
            f"attention {kind.attention!r} does not see the keys of other context ranks; use "
            '"torch_varlen" for the model, or cut rows as another framework does (docs/recipes.md)'
        )
    if placement.vision is not None:
        raise ValueError(
            "the placeholders of an image may be on several context ranks, and its features on "
            "one; pass whole rows of vision-language models"
        )
    if shard.has_left_pads:
        raise ValueError(
            "rows padded on the left need a mask, which shards do not pass on; collate with "
            'PaddedCollator(..., padding_side="right"), or pack'
        )
