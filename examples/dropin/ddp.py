"""DistributedDataParallel on packed rows: two ranks, gradients accumulated row by row.

    torchrun --standalone --nproc_per_node 2 examples/dropin/ddp.py

Every rank plans the whole batch from lengths alone and reads the rows that are its own. Ranks
have equally many rows, so they make equally many backward passes, and the number of loss tokens
of the whole step is known everywhere without a collective.
"""

from __future__ import annotations

import contextlib
import gc

import tiny
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torch_collate_kit as kit

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()

examples = kit.TokenizedDataset(tiny.make_examples(), columns=["input_ids", "labels", "number"])
packing = kit.PackingOptions(max_tokens=tiny.MAX_TOKENS, parallel=kit.ParallelLayout(dp=num_ranks))
collate = kit.PackedCollator(tiny.PAD, packing=packing, fields=tiny.NUMBER)
sampler = kit.PackedBatchSampler(examples, collate, batch_size=tiny.BATCH_SIZE, dp_rank=rank)
loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)

model = DistributedDataParallel(tiny.make_model())
optimizer = tiny.make_optimizer(model)
losses, numbers, tokens, cells = [], [], 0, 0
for batch in loader:
    tokens, cells = tokens + batch.step.num_tokens, cells + batch.step.num_cells  # of all ranks
    num_loss_tokens = batch.metadata["num_loss_tokens"]  # of all rows of all ranks
    step_loss = 0.0
    for i in range(len(batch)):
        row = batch[i : i + 1]
        is_last = i == len(batch) - 1  # only the last backward pass exchanges gradients
        with contextlib.nullcontext() if is_last else model.no_sync():
            logits = model(**row.model_inputs(model, labels=False)).logits
            loss = kit.token_loss(logits, row, num_loss_tokens=num_loss_tokens)
            (loss * num_ranks).backward()  # DDP averages over the ranks, and the loss is a sum
        step_loss += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(step_loss)  # only to print it
    losses.append(step_loss.item())
    numbers.append(tiny.numbers_in(batch))

if rank == 0:
    print(f"{tokens:,} tokens on all ranks, {1 - tokens / cells:.1%} padding")
    tiny.compare(losses, numbers)
del logits, loss, model, optimizer  # they hold the process group, in a cycle
gc.collect()
dist.barrier()  # a rank that leaves while gloo is in use may abort
dist.destroy_process_group()
