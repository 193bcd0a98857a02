"""One optimizer step on every rank, as docs and examples do it; rank 0 writes what came out."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.test_packed_training import examples
from tests.tiny_models import tiny_model
from torch_collate_kit import PackedCollator, ParallelLayout, token_loss

if __name__ == "__main__":
    accelerator = Accelerator(gradient_accumulation_steps=1)
    model = accelerator.prepare(tiny_model("qwen3", "torch_varlen", dtype=torch.float64).train())
    ranks = accelerator.num_processes
    collate = PackedCollator(
        0, max_tokens=40, parallel=ParallelLayout(dp=ranks), normalize_loss=False
    )
    batch = collate(examples())
    mine = batch.chunk(ranks)[accelerator.process_index]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(mine)):
        micro = mine[i : i + 1]
        inputs = micro.model_inputs(labels=False)
        last = i == len(mine) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            logits = model(**inputs).logits
            loss = token_loss(logits, micro, num_loss_tokens=batch.metadata["num_loss_tokens"])
            accelerator.backward(loss * ranks)
        total += loss.detach()
    total = accelerator.reduce(total, "sum")
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    if accelerator.is_main_process:
        found = {
            "num_processes": ranks,
            "loss": total.item(),
            "gradients": torch.cat(gradients).tolist(),
        }
        Path(sys.argv[1]).write_text(json.dumps(found))
    # DDP holds the process group, whose threads must have ended before the interpreter does.
    model = accelerator.free_memory(model)
    accelerator.wait_for_everyone()
    accelerator.end_training()
