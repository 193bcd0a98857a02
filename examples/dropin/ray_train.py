"""Ray Train on packed rows: two workers, DDP by `prepare_model`, a loader that Ray leaves alone.

    python examples/dropin/ray_train.py

`ray.train.torch.prepare_data_loader` must not touch a loader of Batches:

- It replaces the batch sampler with a DistributedSampler and takes `batch_size` from the loader,
  which is None beside a batch sampler: the collator would get one example at a time.
- With `add_dist_sampler=False` it still rebuilds every Mapping as a plain dict of all fields. The
  metadata with the divisor is gone, and the 2-D `attention_mask` is there, with which
  `model(**batch)` lets packed examples see each other.

A PackedBatchSampler is told its rank, and PrefetchLoader moves batches to the device.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import ray.train
import ray.train.torch
import tiny
import torch.distributed as dist
from torch.utils.data import DataLoader

import torch_collate_kit as kit

NUM_RANKS = 2


def make_loader(rank: int) -> kit.PrefetchLoader:
    examples = kit.TokenizedDataset(tiny.make_examples(), columns=["input_ids", "labels", "number"])
    packing = kit.PackingOptions(
        max_tokens=tiny.MAX_TOKENS, parallel=kit.ParallelLayout(dp=NUM_RANKS)
    )
    collate = kit.PackedCollator(tiny.PAD, packing=packing, fields=tiny.NUMBER)
    sampler = kit.PackedBatchSampler(examples, collate, batch_size=tiny.BATCH_SIZE, dp_rank=rank)
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
    return kit.PrefetchLoader(loader, device=ray.train.torch.get_device())


def train(config: dict[str, Any]) -> tuple[list[float], list[list[int]]]:
    """Run a worker; the return value of rank 0 is the result's return_value."""
    model = ray.train.torch.prepare_model(tiny.make_model())
    optimizer = tiny.make_optimizer(model)
    losses, numbers = [], []
    with make_loader(ray.train.get_context().get_world_rank()) as loader:
        for batch in loader:
            num_loss_tokens = batch.metadata["num_loss_tokens"]  # of all ranks
            logits = model(**batch.model_inputs(model, labels=False)).logits
            loss = kit.token_loss(logits, batch, num_loss_tokens=num_loss_tokens)
            (loss * NUM_RANKS).backward()  # DDP averages over the ranks, and the loss is a sum
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)  # only to report it
            losses.append(loss.item())
            numbers.append(tiny.numbers_in(batch))
    return losses, numbers


if __name__ == "__main__":
    ray.init(num_cpus=NUM_RANKS + 1, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train,
            scaling_config=ray.train.ScalingConfig(num_workers=NUM_RANKS),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        result = trainer.fit()
    ray.shutdown()
    tiny.compare(*result.return_value)
