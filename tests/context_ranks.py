"""What each rank of a context group does in the tests, and the same on whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.tiny_models import VOCAB
from tests.tree_samples import exact_model
from torch_collate_kit import Batch, PackedCollator, ParallelLayout, token_loss

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
WINDOWED["layer_types"] = ["full_attention", "sliding_attention"]


def random_examples(seed: int, count: int = 8) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for n in rng.integers(1, 30, count):
        weights = rng.random(n) * (rng.random(n) < 0.7)
        found.append({"input_ids": rng.integers(3, VOCAB, n), "loss_mask": weights})
    return found


def collated(seed: int, layout: ParallelLayout, max_tokens: int = 64) -> Batch:
    return PackedCollator(0, max_tokens=max_tokens, parallel=layout)(random_examples(seed))


@contextmanager
def process_groups(cp: int) -> Iterator[Any]:
    """Context groups of neighbours, and the one of this rank."""
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(cp)
    try:
        yield group
    finally:
        dist.barrier()
        dist.destroy_process_group()


def gradients(model: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def alone(model: Any, batch: Batch) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = token_loss(
        model(**batch.model_inputs(model, labels=False)).logits,
        batch,
        num_loss_tokens=batch.metadata["num_loss_tokens"],
    )
    loss.backward()
    return float(loss.detach()), [g.clone() for g in gradients(model)]


def compare(dp: int, cp: int, layout: Any, dtype: torch.dtype, seeds: int) -> list[float]:
    """The largest relative differences of losses and gradients from those of whole rows."""
    parallel = ParallelLayout(dp=dp, cp=cp)
    worst = [0.0, 0.0]
    with process_groups(cp) as group:
        dp_rank, cp_rank = parallel.place(dist.get_rank())
        for seed in range(seeds):
            changes = WINDOWED if seed % 2 else {}
            model = exact_model("qwen3", "torch_varlen", **changes).to(dtype)
            batch = collated(seed, parallel)
            expected, wanted = alone(model, batch)
            model.zero_grad()
            total = torch.zeros((), dtype=dtype)
            for part in batch.chunk(dp)[dp_rank].split(1):
                shard = part.context_shard(cp_rank, cp, layout=layout)
                logits = model(**shard.model_inputs(model, context_group=group)).logits
                loss = token_loss(logits, shard, num_loss_tokens=batch.metadata["num_loss_tokens"])
                loss.backward()
                total += loss.detach()
            found = gradients(model)
            for tensor in (total, *found):
                dist.all_reduce(tensor)
            worst[0] = max(worst[0], abs(float(total) - expected) / abs(expected))
            largest = max(float(g.abs().max()) for g in wanted)
            for one, other in zip(found, wanted, strict=True):
                worst[1] = max(worst[1], float((one - other).abs().max()) / largest)
    return worst
