"""Gradients of an isolated hybrid model under DDP and FSDP2, two ranks on a CPU, saved by one."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.test_isolate_mixers import gradients, isolated, rows_with_a_pad
from tests.test_isolated_models import LAYOUTS_OF_RANKS


def found(wrapped: str) -> dict[str, torch.Tensor]:
    model = isolated("qwen3_5", scale=5.0, dtype=torch.float64)
    inputs = rows_with_a_pad(*LAYOUTS_OF_RANKS[dist.get_rank()])
    if wrapped == "DDP":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    grads = gradients(model, model(**inputs).logits)
    return {
        name.removeprefix("module."): value.full_tensor() if wrapped == "FSDP2" else value
        for name, value in grads.items()
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {wrapped: found(wrapped) for wrapped in ("DDP", "FSDP2")}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[1])
    dist.destroy_process_group()
