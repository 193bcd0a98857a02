"""Examples whose segments share prefixes, and models in float64 throughout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.tiny_models import VOCAB, tiny_model
from torch_collate_kit import Batch, PackedCollator, PerToken

FIELDS = {"old": PerToken(torch.float64)}


class ExactNorm(nn.Module):
    """The norm of transformers computes in float32, which hides differences up to 1e-6."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().double())
        self.eps = getattr(norm, "variance_epsilon", None) or norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def exact_model(kind: str, attention: str, **changes: Any) -> Any:
    """A tiny model of which everything is float64."""
    model = tiny_model(kind, attention, dtype=torch.float64, **changes)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child))
    return model


def random_tree(rng: np.random.Generator, depth: int = 6) -> list[list[int]]:
    """Segments that begin as one before, or are the same, a beginning of it, or a stranger."""
    segments: list[list[int]] = []
    levels: list[int] = []
    for _ in range(rng.integers(1, 8)):
        near = [i for i, level in enumerate(levels) if level < depth]
        if near and rng.random() < 0.8:
            i = int(rng.choice(near))
            kept = int(rng.integers(0, len(segments[i]) + 1))
            segment = segments[i][:kept] + rng.integers(3, VOCAB, rng.integers(0, 6)).tolist()
            levels.append(levels[i] + 1)
        else:
            segment = rng.integers(3, VOCAB, rng.integers(1, 12)).tolist()
            levels.append(1)
        segments.append(segment or [3])
    return segments


def random_examples(seed: int, most: int = 3) -> list[dict[str, Any]]:
    """Examples with weights, of which some are 0, and a declared value per token."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng) for _ in range(rng.integers(1, most + 1))]
    return [
        {
            "input_ids": tree,
            "loss_mask": [(rng.random(len(s)) * (rng.random(len(s)) < 0.6)).tolist() for s in tree],
            "old": [(-3 * rng.random(len(s))).tolist() for s in tree],
        }
        for tree in trees
    ]


def pairs(seed: int, count: int = 3) -> list[dict[str, Any]]:
    """Two answers to one prompt, the answers trained."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 8)).tolist()
        answers = [rng.integers(3, VOCAB, rng.integers(1, 6)).tolist() for _ in range(2)]
        masks = [[0] * len(prompt) + [1] * len(answer) for answer in answers]
        found.append({"input_ids": [prompt + answer for answer in answers], "loss_mask": masks})
    return found


def both(examples: Any, **options: Any) -> tuple[Batch, Batch]:
    """The rows with shared prefixes, and without."""
    options = {"max_tokens": 320, **options}
    shared = PackedCollator(0, share_prefixes=True, **options)(examples)
    return shared, PackedCollator(0, **options)(examples)


def inputs_of(batch: Batch, model: Any, window: int | None = None) -> dict[str, Any]:
    """The inputs of rows with shared prefixes or without, for any attention."""
    attention = model.config._attn_implementation
    shares = batch.placement is not None and batch.placement.tree_width > 0
    if shares or attention == "torch_varlen":
        return batch.model_inputs(model, labels=False)
    return batch.model_inputs(attention, labels=False, mask="block", sliding_window=window)
