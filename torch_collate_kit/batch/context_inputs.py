"""Whole rows for frameworks that cut them for context parallelism by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.batch.context_shards import refuse_shard
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.storage import Storage


class _Framework(NamedTuple):
    """What a framework does with rows."""

    parts: int
    """Parts per rank that it cuts a row into."""
    reads_positions: bool
    """Whether positions that restart keep the segments of a row apart."""
    attentions: tuple[str, ...]


_FLASH = tuple(f"flash_attention_{version}" for version in (2, 3, 4))
_FRAMEWORKS = {
    "torch": _Framework(2, False, ("sdpa",)),
    "accelerate": _Framework(2, False, ("sdpa",)),
    "ulysses": _Framework(1, True, ("sdpa", *_FLASH)),
}


def context_inputs(
    batch: Mapping[str, Any], stored: Storage, framework: str, cp_size: int, model: Any
) -> dict[str, Any]:
    """Return the inputs of ``Batch.context_inputs``: copies, which a framework may cut in place."""
    checked_choice("framework", framework, tuple(_FRAMEWORKS))
    known = _FRAMEWORKS[framework]
    checked_int("cp_size", cp_size)
    refuse_shard(stored, f"cut by {framework}", "pass it whole rows")
    if not stored.columns:
        raise ValueError(
            "the batch was built from tensors, which do not say where its segments lie; pass on "
            "the Batch that the collator returned"
        )
    _check_rows(stored, stored.columns.placement, framework, known)
    _check_targets(batch, stored, framework)
    if model is not None:
        _check_model(ModelKind.of(model), framework, known)
    width, parts = stored.columns.placement.width, known.parts * cp_size
    if width % parts:
        raise ValueError(
            f"rows have {width} cells, which {framework} cuts into {parts} parts for "
            f"{cp_size} ranks, and would cut wrongly; collate with "
            f"parallel=ParallelLayout(cp={cp_size}), or padded rows with pad_to_multiple_of={parts}"
        )
    names = ["input_ids", "position_ids", "labels"]
    inputs: dict[str, Any] = {name: batch[name].clone() for name in names}
    if framework != "ulysses":  # which shifts before it cuts
        shifted = batch["labels"].new_full(batch["labels"].shape, -100)
        shifted[:, :-1] = batch["labels"][:, 1:]
        inputs["shift_labels"] = shifted
    return inputs | {"use_cache": False}


def buffers_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``context_parallel`` for these inputs."""
    buffers = [value for value in inputs.values() if isinstance(value, Tensor)]
    return {
        "buffers": buffers,
        "buffer_seq_dims": [1] * len(buffers),
        "no_restore_buffers": set(buffers),
    }


def _check_rows(stored: Storage, placement: Placement, framework: str, known: _Framework) -> None:
    """Refuse rows that the framework's attention would see wrongly, since it drops the mask."""
    if placement.tree_width:
        raise ValueError(
            f"segments of the batch share prefixes (share_prefixes), which {framework} does not "
            "know; collate without share_prefixes"
        )
    if placement.vision is not None:
        raise ValueError(
            f"{framework} cuts every input along the row, and images are not along it; pass whole "
            "rows of vision-language models to the model"
        )
    if placement.has_left_pads:
        raise ValueError(
            f"rows are padded on the left, and {framework} drops the mask, so tokens would attend "
            'to pads; collate with PaddedCollator(..., padding_side="right")'
        )
    lengths = placement.segments["lengths"]
    counts = np.bincount(placement.rows()[lengths.values > 0], minlength=stored.num_rows)
    packed = np.flatnonzero(counts > 1)
    if len(packed) and not known.reads_positions:
        raise ValueError(
            f"row {packed[0]} has {counts[packed[0]]} examples, and {framework} drops the mask "
            "that keeps them apart; use PackingOptions(max_sequences_per_row=1), padded rows, or "
            'for packed rows "ulysses", or batch.context_shard()'
        )


def _check_targets(batch: Mapping[str, Any], stored: Storage, framework: str) -> None:
    """Refuse targets that labels cannot express."""
    if "response_mask" in batch:
        raise ValueError(
            f"{framework} gets labels alone, so the rewards of rollouts would be lost; use "
            "batch.context_shard(), and token_loss or token_logps"
        )
    weights: Any = stored.columns.values.get("loss_weights")
    is_weighted = weights is not None and weights.values.is_floating_point()
    if "loss_mask" in stored.given or (
        is_weighted and bool(((weights.values != 0) & (weights.values != 1)).any())
    ):
        raise ValueError(
            f"{framework} gets labels, which cannot carry the weights of loss_mask; give masks of "
            "0 and 1, or use batch.context_shard() and token_loss"
        )


def _check_model(kind: ModelKind, framework: str, known: _Framework) -> None:
    """Refuse a model that the framework would run wrongly."""
    family = kind.family
    if family.keywords or family.needs_isolation or family.refused or kind.is_isolated:
        reason = f"are refused ({family.refused})" if family.refused else "carry state along a row"
        raise ValueError(
            f"{family.name} models {reason}, which {framework} cuts without passing "
            "it on, so outputs and gradients would be wrong; train them on whole rows"
        )
    if kind.attention not in known.attentions:
        raise ValueError(
            f"{framework} replaces attention {' or '.join(map(repr, known.attentions))}, and the "
            f"model has {kind.attention!r}; load it with attn_implementation="
            f'"{known.attentions[0]}"'
        )
    if not known.reads_positions and (kind.window is not None or kind.odd_layers):
        found = kind.odd_layers or f"a sliding window of {kind.window}"
        raise ValueError(
            f"the model has {found}, and {framework} drops the mask that makes it, so its layers "
            'would attend to everything; use "ulysses", or batch.context_shard()'
        )
