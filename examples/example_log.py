"""The loss of each conversation in each step: a table of the run, and the worst of an epoch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

import torch_collate_kit as kit
from torch_collate_kit.losses import example_losses, trained_values

_NUM_WORST = 10


class ExampleLog:
    """The table `examples.jsonl`, a line per step, for `--log-examples`.

    A line has the epoch, and lists of the step's conversations over all ranks: their indices in the
    data, the sums of their losses, and their trained tokens.
    """

    def __init__(self, examples: Any, tokenizer: Any, args: Any) -> None:
        self.examples, self.tokenizer, self.args = examples, tokenizer, args
        self.path = args.output_dir / "examples.jsonl"
        self.kept: list[tuple[torch.Tensor, kit.Batch]] = []  # of this step
        self.epoch = None
        if args.rank == 0:  # a step after the checkpoint comes again
            old = self.path.read_text().splitlines() if args.resume and self.path.exists() else []
            kept = [line for line in old if json.loads(line)["step"] <= args.first_step]
            self.path.write_text("".join(f"{line}\n" for line in kept))

    def loss(self, model: Any, part: kit.Batch) -> torch.Tensor:
        """Return the loss that the model would, and keep that of each of its conversations."""
        logps = model(part, None)
        self.kept.append((kit.segment_sums(-logps.detach(), part), part))  # waits for nothing
        weights = trained_values(part["loss_mask"], part)
        weights = weights * part.metadata.get("loss_mask_divisor", 1)
        return -(logps * weights).sum() / max(part.metadata["num_loss_tokens"], 1)

    def step(self, done: int, batch: kit.Batch) -> None:
        """Write the conversations of a step that is done; print the worst of an epoch before it."""
        if self.epoch not in (None, batch.metadata["epoch"]):
            self.print_worst()
        self.epoch = batch.metadata["epoch"]
        sums, parts = zip(*self.kept, strict=True)
        self.kept.clear()
        table = example_losses(sums, parts, sampler=self.args.sampler)
        if self.args.rank == 0:
            columns = {name: column.tolist() for name, column in table.items()}
            with self.path.open("a") as file:
                file.write(json.dumps({"step": done, "epoch": self.epoch, **columns}) + "\n")

    def print_worst(self) -> None:
        """Print the conversations of the epoch with the highest mean loss, with their text."""
        if self.args.rank != 0 or self.epoch is None:
            return
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        of_epoch = [line for line in lines if line["epoch"] == self.epoch]
        names = ("example", "loss", "tokens")
        example, loss, tokens = (np.concatenate([of[name] for of in of_epoch]) for name in names)
        means = loss / np.maximum(tokens, 1)
        print(f"the highest losses of epoch {self.epoch}:")
        for i in np.argsort(-means, kind="stable")[:_NUM_WORST].tolist():
            text = self.text(int(example[i]))
            print(f"  {means[i]:.2f} in {int(tokens[i])} tokens, example {int(example[i])}: {text}")

    def text(self, number: int) -> str:
        """Return the beginning of a conversation on one line, or of its last context."""
        ids = self.examples[number]["input_ids"]
        return repr(self.tokenizer.decode(ids[-1] if np.ndim(ids[0]) else ids))[:300]
