"""Collators for ``DataLoader(collate_fn=...)``, one class per layout."""

import torch

from torch_collate_kit.collators.packed import PackedCollator
from torch_collate_kit.collators.padded import PaddedCollator, RolloutCollator
from torch_collate_kit.collators.vision import VisionLanguageCollator

__all__ = ["PackedCollator", "PaddedCollator", "RolloutCollator", "VisionLanguageCollator"]


def _collate_once() -> None:
    """Make a batch of every layout: 5 ms.

    Each operator of torch is set up by its first call, under a lock. A process that is forked while
    another thread is in there, such as a DataLoader's worker, would deadlock on that lock.
    """
    sft = [{"input_ids": [1, 2], "loss_mask": [0.0, 1.0]}, {"input_ids": [1], "loss_mask": [1.0]}]
    rollout = {"prompt_ids": [1, 2], "response_ids": [3], "rewards": 1.0, "loss_mask": [1]}
    with torch.device("cpu"):
        PaddedCollator(0)(sft)
        PackedCollator(0, max_tokens=4)(sft)
        RolloutCollator(0)([rollout])
        PackedCollator(0, max_tokens=4)([rollout])


_collate_once()
