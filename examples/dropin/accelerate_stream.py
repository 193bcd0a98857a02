"""Accelerate with a packed stream: `prepare` must not divide it, so it gets a PrefetchLoader.

    python examples/dropin/accelerate_stream.py
    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 \\
        examples/dropin/accelerate_stream.py

`prepare` of a DataLoader of the stream would divide its batches over the ranks again, row by row;
the stream refuses that. It is told its rank instead, and the loader around it is wrapped in a
PrefetchLoader, which is no DataLoader: `prepare` returns it as it is, and
`register_for_checkpointing` saves its position with the rest: of all ranks, since the stream has
`num_shards`.
"""

from __future__ import annotations

import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import torch_collate_kit as kit

accelerator = Accelerator(cpu=True)
num_ranks = accelerator.num_processes
collate = kit.PackedCollator(
    tiny.PAD,
    max_tokens=tiny.MAX_TOKENS,
    parallel=kit.ParallelLayout(dp=num_ranks),
    fields=tiny.NUMBER,
)
stream = kit.PackedIterableDataset(
    tiny.make_examples(),
    collate,
    batch_rows=max(2, num_ranks),
    buffer_size=20,
    num_shards=2,
    dp_rank=accelerator.process_index,
)
loader = kit.PrefetchLoader(
    DataLoader(stream, batch_size=None, collate_fn=stream.as_is),
    device=accelerator.device,
)
model = tiny.make_model()
model, optimizer, loader = accelerator.prepare(model, tiny.make_optimizer(model), loader)
accelerator.register_for_checkpointing(loader)

losses, numbers, own = [], [], torch.zeros(2)
with loader:
    # Ranks may have different numbers of batches: all stop after the same number of steps.
    for batch in loader.steps(tiny.NUM_STEPS):
        own += torch.tensor([batch.num_tokens, batch.num_cells])  # a rank knows no other's rows
        num_loss_tokens = kit.global_num_loss_tokens(batch)  # of all ranks
        logits = model(**batch.model_inputs(model, labels=False)).logits
        loss = kit.token_loss(logits, batch, num_loss_tokens=num_loss_tokens)
        accelerator.backward(loss * num_ranks)  # DDP averages, and the loss is a sum
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "sum").item())
        numbers.append(tiny.numbers_in(batch))

tokens, cells = accelerator.reduce(own, "sum").tolist()
if accelerator.is_main_process:
    print(f"{tokens:,.0f} tokens on all ranks, {1 - tokens / cells:.1%} padding")
    tiny.compare(losses, numbers)
del logits, loss  # they hold the model, and DDP holds the process group
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
