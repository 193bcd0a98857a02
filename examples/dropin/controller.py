"""A controller that collates once and ships each data-parallel rank its rows, as Megatron does it.

    python examples/dropin/controller.py

The layout is dp=2, tp=2, cp=2. The controller plans and collates the whole step, cuts it with
`batch.chunk(dp)`, and sends each shard through a queue. Pickled are tokens, labels, and where they
lie; the worker makes the dense fields. The two workers are the two data-parallel ranks and reduce
their gradients. What the context-parallel ranks of each would compute, they compute one after the
other.

Three things follow from the layout: every example takes up a multiple of tp * 2 * cp = 8 cells, so
that each context-parallel rank gets two equal slices of every example; all shards have as many rows
of one width; and the divisor of the loss is that of the whole step, wherever a cell went.
"""

from __future__ import annotations

import pickle
import tempfile
from typing import Any

import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import torch_collate_kit as kit

LAYOUT = kit.ParallelLayout(dp=2, tp=2, cp=2)


def cells_of(cu_seq_lens: torch.Tensor, cp_rank: int) -> torch.Tensor:
    """Return the cells of a context-parallel rank: slices `r` and `2 * cp - 1 - r` of each segment.

    Causal attention costs more at the end of a segment, so a rank gets an early and a late slice.
    """
    cells = []
    for start, stop in zip(cu_seq_lens[:-1].tolist(), cu_seq_lens[1:].tolist(), strict=True):
        slices = torch.arange(start, stop).chunk(2 * LAYOUT.cp)
        cells += [slices[cp_rank], slices[2 * LAYOUT.cp - 1 - cp_rank]]
    return torch.cat(cells)


def row_loss(model: Any, row: kit.Batch) -> torch.Tensor:
    """Of one row, as the sum of what its context-parallel ranks compute."""
    logits = model(**row.model_inputs(model, labels=False)).logits[0]
    # Shifted before cells are divided, since a slice's last target is in another slice.
    targets = F.pad(row["labels"][0, 1:], (0, 1), value=-100)
    parts = []
    for cp_rank in range(LAYOUT.cp):
        cells = cells_of(row["cu_seq_lens"][0], cp_rank)
        parts.append(
            F.cross_entropy(logits[cells], targets[cells], ignore_index=-100, reduction="sum")
        )
    return torch.stack(parts).sum() / row.metadata["num_loss_tokens"]


def worker(rank: int, shards: Any, results: Any, meeting_point: str) -> None:
    """Train the rows that are sent to this data-parallel rank, until None is sent."""
    options = {"rank": rank, "world_size": LAYOUT.dp}
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", **options)
    model = tiny.make_model()
    optimizer = tiny.make_optimizer(model)
    while (message := shards.get()) is not None:
        shard: kit.Batch = pickle.loads(message)
        loss = torch.zeros(())
        for i in range(len(shard)):
            part = row_loss(model, shard[i : i + 1])
            part.backward()
            loss += part.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # a sum: each rank has divided by the whole step
        dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        results.put((rank, loss.item()))
    dist.barrier()  # a rank that leaves while gloo is in use may abort
    dist.destroy_process_group()


def main() -> None:
    examples = tiny.make_examples()
    collate = kit.PackedCollator(
        tiny.PAD,
        max_tokens=tiny.MAX_TOKENS,
        parallel=LAYOUT,
        strategy="balanced",
        fields=tiny.NUMBER,
    )
    context = mp.get_context("spawn")
    queues, results = [context.Queue() for _ in range(LAYOUT.dp)], context.Queue()
    losses, numbers = [], []
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=worker, args=(rank, queue, results, f"{folder}/meet"), daemon=True
            )
            for rank, queue in enumerate(queues)
        ]
        for process in ranks:
            process.start()
        for step in range(tiny.NUM_STEPS):
            first = step * tiny.BATCH_SIZE
            batch = collate(examples[first : first + tiny.BATCH_SIZE])
            assert all((ends % LAYOUT.align == 0).all() for ends in batch["cu_seq_lens"])
            for queue, shard in zip(queues, batch.chunk(LAYOUT.dp), strict=True):
                queue.put(pickle.dumps(shard))
            of_ranks = dict(results.get(timeout=300) for _ in ranks)
            losses.append(of_ranks[0])
            numbers.append(tiny.numbers_in(batch))
        for queue in queues:
            queue.put(None)
        for process in ranks:
            process.join()
    tiny.compare(losses, numbers)


if __name__ == "__main__":
    main()
