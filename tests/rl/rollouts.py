"""Rollout batches built by hand, as RolloutCollator lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from torch_collate_kit.batch import Batch

OUTCOME = ("grpo", "grpo_no_std", "rloo", "maxrl")


def rollout_batch(
    shape: Sequence[tuple[int, int]],
    uids: Sequence[Any],
    *,
    seed: int = 0,
    divided: bool = False,
    is_last_step: list[bool] | None = None,
) -> Batch:
    """A row of ``(prompt tokens, response tokens)`` each, left-padded, with random contents.

    About one response token in three is not trained; weights are 0, 1 or 2. ``advantages`` and
    ``old_logprobs`` are float64, so that gradients can be compared to 1e-10.
    """
    rng = np.random.default_rng(seed)
    width, response_length = max(p + r for p, r in shape), max(r for _, r in shape)
    n = len(shape)
    lengths = np.array([p + r for p, r in shape])
    attention = np.arange(width) >= width - lengths[:, None]
    responses = np.array([r for _, r in shape])
    response_mask = np.arange(response_length) >= response_length - responses[:, None]
    loss_mask = response_mask * rng.integers(0, 3, response_mask.shape)
    rewards = np.zeros(response_mask.shape)
    rewards[:, -1] = rng.integers(-2, 3, n)
    count = int(np.count_nonzero(loss_mask))
    divisor = max(count, 1) if divided else 1
    fields = {
        "input_ids": torch.from_numpy(attention * rng.integers(1, 11, attention.shape)),
        "attention_mask": torch.from_numpy(attention.astype(np.int64)),
        "position_ids": torch.from_numpy(np.maximum(attention.cumsum(axis=1) - 1, 0)),
        "response_mask": torch.from_numpy(response_mask.astype(np.int64)),
        "loss_mask": torch.from_numpy(loss_mask).float() / divisor,
        "rewards": torch.from_numpy(rewards).float(),
        "rollout_logprobs": torch.from_numpy(rng.normal(size=rewards.shape)).float(),
        "advantages": torch.from_numpy(rng.normal(size=rewards.shape) * response_mask),
    }
    row_metadata = {
        "uids": list(uids),
        "is_last_step": [True] * n if is_last_step is None else is_last_step,
    }
    metadata = {
        "num_loss_tokens": count,
        "loss_mask_divisor": divisor,
        "response_length": response_length,
        "num_examples": n,
        "step_num_tokens": int(lengths.sum()),
        "num_dummy_rows": 0,
    }
    return Batch(fields, row_metadata=row_metadata, metadata=metadata)


@st.composite
def grouped_uids(draw: st.DrawFn, max_prompts: int = 6, max_rows: int = 4) -> list[str]:
    """Uids of rows that lie prompt by prompt."""
    counts = draw(st.lists(st.integers(1, max_rows), min_size=1, max_size=max_prompts))
    return [f"p{i}" for i, count in enumerate(counts) for _ in range(count)]
