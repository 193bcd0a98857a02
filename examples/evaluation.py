"""The loss of held-out conversations, also for each value of a column such as their source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from checkpoints import fail

import torch_collate_kit as kit
from torch_collate_kit.losses import sums_by


def tokenized(
    conversations: datasets.Dataset, tokenizer: Any, options: kit.ChatOptions, column: str | None
) -> datasets.Dataset:
    """Tokenize conversations one value of the column after the other, and keep it."""
    if not column or not len(conversations):
        return kit.tokenize_chat_dataset(conversations, tokenizer, options)[0]
    if column not in conversations.column_names:
        fail(f"--loss-per {column}: the data has {', '.join(conversations.column_names)}")
    values = np.array([str(value) for value in conversations[column]])
    parts = []
    for value in np.unique(values):
        chosen = conversations.select(np.flatnonzero(values == value))
        part = kit.tokenize_chat_dataset(chosen, tokenizer, options)[0]
        parts.append(part.add_column(column, [str(value)] * len(part)))
    return datasets.concatenate_datasets(parts)


def with_column(
    tokenized: datasets.Dataset, collate: Any, tokenizer: Any, column: str | None
) -> tuple[kit.TokenizedDataset, Any]:
    """Return the examples, and the collator, with the column as a field."""
    if not column:
        return kit.TokenizedDataset(tokenized), collate
    examples = kit.TokenizedDataset(tokenized, columns=["input_ids", "loss_mask", column])
    fields = {column: kit.PerExample(str)}
    if isinstance(collate, kit.PaddedCollator):
        options = {"padding_side": collate.padding_side, "fields": fields}
        return examples, kit.PaddedCollator(tokenizer, **options)
    options = {"packing": collate.packing, "fixed_width": collate.fixed_width, "fields": fields}
    return examples, kit.PackedCollator(tokenizer, **options)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # too short to be worth compiling for
def losses(
    model: Any, parts: Iterable[kit.Batch], accelerator: Accelerator, column: str | None = None
) -> dict[str, float]:
    """Return the mean over the trained tokens of all ranks, each conversation once."""
    model.eval()
    nll, num_loss_tokens = torch.zeros((), dtype=torch.float64, device=accelerator.device), 0
    kept = []
    for part in parts:
        nll += model(part, 1)
        if part.metadata["is_last_part"]:
            num_loss_tokens += part.metadata["num_loss_tokens"]
        if column:
            kept.append((-model(part, None), part))
    found = {"held_out_loss": accelerator.reduce(nll, "sum").item() / num_loss_tokens}
    if column:
        sums = sums_by([of for of, _ in kept], [part for _, part in kept], column)
        found |= {f"held_out_loss, {key}": total / (n or 1) for key, (total, n) in sums.items()}
    return found
