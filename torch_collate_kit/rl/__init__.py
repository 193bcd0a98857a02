"""Reinforcement learning: prompt-aligned mini-batches, advantages, and steps into trajectories."""

from torch_collate_kit.rl.advantages import compute_advantages
from torch_collate_kit.rl.groups import mini_batch_boundaries, prompt_boundaries
from torch_collate_kit.rl.merging import merge_steps
from torch_collate_kit.rl.micro_batches import micro_batches
from torch_collate_kit.rl.normalization import normalize_advantages
from torch_collate_kit.rl.responses import from_response_values, response_values
from torch_collate_kit.rl.staging import stage_mini_batches, unstage

__all__ = [
    "compute_advantages",
    "from_response_values",
    "merge_steps",
    "micro_batches",
    "mini_batch_boundaries",
    "normalize_advantages",
    "prompt_boundaries",
    "response_values",
    "stage_mini_batches",
    "unstage",
]
