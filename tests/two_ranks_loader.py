"""A step over a DataLoader that accelerate.prepare splits over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from tests.test_packed_training import examples
from tests.tiny_models import tiny_model
from torch_collate_kit import PackedCollator, global_num_loss_tokens, token_loss

FOUR_TOKENS = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2, 3, 4, 5]}])


def of_all_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def on_rank() -> dict[str, Any]:
    """Return what came of it, on this rank."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    collate = PackedCollator(0, max_tokens=256, normalize_loss=False)
    model = tiny_model("qwen3", "torch_varlen", dtype=torch.float64).train()
    model, loader = accelerator.prepare(
        model, DataLoader(examples(), batch_size=6, collate_fn=collate)
    )
    (batch,) = loader  # this rank's half of the examples
    micro_batches = [batch[i : i + 1] for i in range(len(batch))]
    number = global_num_loss_tokens(micro_batches)
    loss = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        logits = model(**micro.model_inputs(labels=False)).logits
        loss = loss + token_loss(logits, micro, num_loss_tokens=number)
    accelerator.backward(loss * ranks)
    own = token_loss(logits, micro, num_loss_tokens=batch.metadata["num_loss_tokens"])
    groups = [torch.distributed.new_group([i]) for i in range(ranks)]
    found = {
        "num_processes": ranks,
        "number": number.item(),
        "metadata": of_all_ranks(batch.metadata["num_loss_tokens"]),
        "loss": accelerator.reduce(loss.detach(), "sum").item(),
        "loss_by_metadata": accelerator.reduce(own.detach(), "mean").item(),
        "gradients": torch.cat([p.grad.flatten() for p in model.parameters()]).tolist(),
        "unequal": of_all_ranks(global_num_loss_tokens([FOUR_TOKENS] * (1 - rank)).item()),
        "alone": of_all_ranks(
            global_num_loss_tokens([FOUR_TOKENS] * (1 + rank), group=groups[rank]).item()
        ),
    }
    # DDP holds the process group, whose threads must have ended before the interpreter does.
    model = accelerator.free_memory(model)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return found
