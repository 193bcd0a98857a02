"""What rows hold that fill up a batch: nothing to train, nothing to count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_collate_kit._rows import is_per_row, with_empty_rows
from torch_collate_kit.ragged import Ragged

__all__ = ["IGNORE_INDEX", "clear_added_rows"]

IGNORE_INDEX = -100  # a label that is not trained, as in torch and transformers
# Fields not named repeat row 0, so that every model can run it, but floating-point fields of the
# shape of one of the masks (values, log-probabilities) hold 0.
_LOSS_MASKS = ("loss_mask", "response_mask")
_TARGETS = ("rewards", "advantages", "returns")  # 0 whatever their shape: one a row, say
_FILL = {"labels": IGNORE_INDEX, **dict.fromkeys((*_LOSS_MASKS, *_TARGETS), 0)}
_EMPTY = ("sub_seq_lengths", *_FILL)  # where they are ragged
_FILL["router_padding_mask"] = 1  # True: a router counts and balances none of their tokens


def clear_added_rows(
    fields: dict[str, Any], metadata: dict[str, Any], before: Mapping[str, Any], added: int
) -> None:
    """Changes fields and metadata whose last ``added`` rows repeat a row of ``before``."""
    masks = [before[name].shape for name in _LOSS_MASKS if isinstance(before.get(name), Tensor)]
    for name, field in before.items():
        if isinstance(field, Ragged):
            if name in _EMPTY:
                fields[name] = with_empty_rows(field, added)
        elif name in _FILL or (field.is_floating_point() and field.shape in masks):
            fields[name][len(field) :] = _FILL.get(name, 0)
        elif name == "rollout_expert_indices":  # what pads hold: no expert is there twice
            fields[name][len(field) :] = torch.arange(field.shape[-1], device=field.device)
    for key, value in metadata.items():
        if isinstance(value, Ragged):
            metadata[key] = with_empty_rows(value[: len(value) - added], added)
        elif key == "is_last_step" and is_per_row(value):
            value[len(value) - added :] = [True] * added if isinstance(value, list) else True
