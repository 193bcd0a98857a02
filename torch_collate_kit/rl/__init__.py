"""Reinforcement learning: mini-batches of prompts, advantages, trajectories, and ratios."""

from torch_collate_kit.rl.advantages import compute_advantages, normalize_advantages
from torch_collate_kit.rl.groups import merge_steps, mini_batch_boundaries, prompt_boundaries
from torch_collate_kit.rl.mini_batches import micro_batches, stage_mini_batches, unstage
from torch_collate_kit.rl.off_policy import importance_weights, kl_estimates, log_ratios
from torch_collate_kit.rl.responses import from_response_values, response_values

__all__ = [
    "compute_advantages",
    "from_response_values",
    "importance_weights",
    "kl_estimates",
    "log_ratios",
    "merge_steps",
    "micro_batches",
    "mini_batch_boundaries",
    "normalize_advantages",
    "prompt_boundaries",
    "response_values",
    "stage_mini_batches",
    "unstage",
]
