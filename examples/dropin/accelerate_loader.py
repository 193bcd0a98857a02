"""Accelerate with an ordinary DataLoader, which `prepare` divides over the ranks.

    python examples/dropin/accelerate_loader.py
    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 \\
        examples/dropin/accelerate_loader.py

Each rank packs the examples that prepare gives it, so nobody knows the loss tokens of the whole
step: global_num_loss_tokens counts them. It needs all micro-batches of a step before the first is
trained. So `accelerator.accumulate` is not used, which goes by the batch that was fetched last, and
the accumulation is written out. `dispatch_batches=True` would cut a Batch apart.
"""

from __future__ import annotations

import contextlib
from itertools import islice

import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import torch_collate_kit as kit

NUM_MICRO_BATCHES = 2  # per step, on every rank

config = DataLoaderConfiguration(dispatch_batches=False)
accelerator = Accelerator(cpu=True, dataloader_config=config)
num_ranks = accelerator.num_processes

loader = DataLoader(
    tiny.make_examples(),
    batch_size=tiny.BATCH_SIZE // num_ranks // NUM_MICRO_BATCHES,
    shuffle=True,
    drop_last=True,  # or a short end is filled up with examples of the beginning
    generator=torch.Generator().manual_seed(0),
    collate_fn=kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS, fields=tiny.NUMBER),
)
model = tiny.make_model()
model, optimizer, loader = accelerator.prepare(model, tiny.make_optimizer(model), loader)

losses, numbers = [], []
batches = iter(loader)
while window := list(islice(batches, NUM_MICRO_BATCHES)):
    num_loss_tokens = kit.global_num_loss_tokens(window)  # of all micro-batches and ranks
    step_loss = torch.zeros(())
    for i, batch in enumerate(window):
        is_last = i == len(window) - 1  # only the last backward pass exchanges gradients
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            logits = model(**batch.model_inputs(model, labels=False)).logits
            loss = kit.token_loss(logits, batch, num_loss_tokens=num_loss_tokens)
            accelerator.backward(loss * num_ranks)  # DDP averages, and the loss is a sum
        step_loss += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(step_loss, "sum").item())
    numbers.append(tiny.numbers_in(*window))

if accelerator.is_main_process:
    tiny.compare(losses, numbers)
del logits, loss  # they hold the model, and DDP holds the process group
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
