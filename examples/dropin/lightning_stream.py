"""Lightning on a packed stream: a loader with a length, so that its saved position is exact.

    python examples/dropin/lightning_stream.py

Of a loader without a length Lightning fetches one batch ahead, to see whether an epoch ends. Its
checkpoint then has the position after the batch that was not trained yet, and a resumed run leaves
that batch out. `Steps` gives the stream a length, the steps of the run, and goes on across passes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import lightning
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import torch_collate_kit as kit

SAVE_AFTER = 7  # steps


class Steps:
    """The batches of so many steps; Lightning saves and loads its state with the loops."""

    def __init__(self, loader: kit.PrefetchLoader, num_steps: int) -> None:
        self.loader, self.num_steps = loader, num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[kit.Batch]:
        return self.loader.steps(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class PackedTraining(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.make_model()
        self.losses: list[float] = []
        self.numbers: list[list[int]] = []

    def training_step(self, batch: kit.Batch, _: int) -> torch.Tensor:
        logits = self.model(**batch.model_inputs(self.model, labels=False)).logits
        loss = kit.token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
        self.losses.append(loss.item())
        self.numbers.append(tiny.numbers_in(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiny.make_optimizer(self.model)


def make_loader() -> kit.PrefetchLoader:
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS, fields=tiny.NUMBER)
    stream = kit.PackedIterableDataset(
        tiny.make_examples(),
        collate,
        batch_rows=2,
        buffer_size=20,
    )
    loader = DataLoader(stream, batch_size=None, collate_fn=stream.as_is)
    return kit.PrefetchLoader(loader)


def train(folder: str, resume_from: str | None = None) -> PackedTraining:
    training = PackedTraining()
    checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVE_AFTER, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=tiny.NUM_STEPS,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with make_loader() as loader:
        trainer.fit(training, Steps(loader, tiny.NUM_STEPS), ckpt_path=resume_from)
    return training


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder)
        rest = train(folder, f"{folder}/step={SAVE_AFTER}.ckpt")
    if (rest.losses, rest.numbers) != (whole.losses[SAVE_AFTER:], whole.numbers[SAVE_AFTER:]):
        raise SystemExit("the resumed run differs from the one that was not stopped")
    print(f"resumed after step {SAVE_AFTER}: the other {len(rest.losses)} steps are the same")
    tiny.compare(whole.losses, whole.numbers)
