"""Lightning on packed rows: the loader's position is in Lightning's own checkpoint.

    python examples/dropin/lightning_fit.py
    torchrun --standalone --nproc_per_node 2 examples/dropin/lightning_fit.py

A PrefetchLoader has `state_dict` and `load_state_dict`, so Lightning saves it with its loops and
loads it before the first batch. Below, a run saves a checkpoint in the middle of an epoch and goes
on; a second run, with everything made anew, resumes from it. Both must agree to the last bit.

A step is one Batch here, and its metadata has the divisor. `accumulate_grad_batches=2` would take
the mean of two means: to save memory, loop over the rows of a Batch as ddp.py does, with
`automatic_optimization = False`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import lightning
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import torch_collate_kit as kit

SAVE_AFTER = 7  # of the 20 steps of the epoch
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class PackedTraining(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.make_model()
        self.losses: list[float] = []
        self.numbers: list[list[int]] = []

    def train_dataloader(self) -> kit.PrefetchLoader:
        examples = kit.TokenizedDataset(
            tiny.make_examples(), columns=["input_ids", "labels", "number"]
        )
        packing = kit.PackingOptions(
            max_tokens=tiny.MAX_TOKENS, parallel=kit.ParallelLayout(dp=self.trainer.world_size)
        )
        collate = kit.PackedCollator(tiny.PAD, packing=packing, fields=tiny.NUMBER)
        sampler = kit.PackedBatchSampler(
            examples, collate, batch_size=tiny.BATCH_SIZE, dp_rank=self.trainer.global_rank
        )
        loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
        self.loader = kit.PrefetchLoader(loader)  # Lightning moves a Batch to its device
        return self.loader

    def training_step(self, batch: kit.Batch, _: int) -> torch.Tensor:
        num_loss_tokens = batch.metadata["num_loss_tokens"]  # of all ranks
        logits = self.model(**batch.model_inputs(self.model, labels=False)).logits
        loss = kit.token_loss(logits, batch, num_loss_tokens=num_loss_tokens)
        total = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum")
        self.losses.append(float(total))
        self.numbers.append(tiny.numbers_in(batch))
        return loss * self.trainer.world_size  # DDP averages over the ranks, and the loss is a sum

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiny.make_optimizer(self.model)

    def teardown(self, stage: str) -> None:
        self.loader.close()


def train(folder: str, resume_from: Path | None = None) -> tuple[PackedTraining, Path]:
    """Return the trained module, and the folder of its checkpoints on rank 0."""
    training = PackedTraining()
    checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVE_AFTER, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        max_steps=tiny.NUM_STEPS,
        callbacks=[checkpoints],
        use_distributed_sampler=False,  # it would replace ours, which knows its rank
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(training, ckpt_path=resume_from)
    return training, Path(checkpoints.dirpath)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        whole, saved_in = train(folder)
        rest, _ = train(folder, saved_in / f"step={SAVE_AFTER}.ckpt")
    if (rest.losses, rest.numbers) != (whole.losses[SAVE_AFTER:], whole.numbers[SAVE_AFTER:]):
        raise SystemExit("the resumed run differs from the one that was not stopped")
    print(f"resumed after step {SAVE_AFTER}: the other {len(rest.losses)} steps are the same")
    if whole.global_rank == 0:
        tiny.compare(whole.losses, whole.numbers)
