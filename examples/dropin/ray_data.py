"""For data that outgrows one machine: Ray Data tokenizes into Parquet, a packed stream trains.

    python examples/dropin/ray_data.py

Ray's workers run `tokenize_chat` on blocks of chats, wherever in a cluster they are, and write one
Parquet file per block. Training streams these files with `datasets`, which divides them over the
DataLoader workers; `datasets.distributed.split_dataset_by_node` divides them over ranks. Neither
ever holds more than a block or a buffer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import ray
import ray.data
import tiny
from pyarrow.parquet import ParquetFile

import torch_collate_kit as kit

NUM_BLOCKS = 4


class Tokenize:
    """An actor of Ray's: makes the tokenizer once, then tokenizes one chat after the other."""

    def __init__(self) -> None:
        self.tokenizer = tiny.make_tokenizer()

    def __call__(self, chat: dict[str, Any]) -> dict[str, Any]:
        return kit.tokenize_chat(chat, self.tokenizer, kit.ChatOptions(labels=True)) | {
            "number": chat["number"]
        }


def write_shards(folder: Path) -> None:
    """Tokenized chats as Parquet; those without a trained token are left out, and counted."""
    chats = ray.data.from_items(tiny.make_chats(), override_num_blocks=NUM_BLOCKS)
    tokenized = chats.map(Tokenize, compute=ray.data.ActorPoolStrategy(size=2))
    used = tokenized.filter(lambda row: row["skip_reason"] == "")
    used.select_columns(["input_ids", "labels", "number"]).write_parquet(str(folder))
    num_written = sum(ParquetFile(path).metadata.num_rows for path in folder.glob("*.parquet"))
    print(f"{num_written} of {chats.count()} chats have something to train")


def train(folder: Path) -> tuple[list[float], list[list[int]]]:
    files = sorted(map(str, folder.glob("*.parquet")))
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS, fields=tiny.NUMBER)
    stream = kit.PackedIterableDataset(
        datasets.load_dataset("parquet", data_files=files, split="train", streaming=True),
        collate,
        batch_rows=2,
        buffer_size=20,
    )
    model = tiny.make_model()
    optimizer = tiny.make_optimizer(model)
    losses, numbers = [], []
    for batch in stream:  # in a DataLoader with batch_size=None and collate_fn=stream.as_is too
        logits = model(**batch.model_inputs(model, labels=False)).logits
        loss = kit.token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        numbers.append(tiny.numbers_in(batch))
    return losses, numbers


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        ray.init(num_cpus=2, log_to_driver=False)
        write_shards(Path(name))
        ray.shutdown()
        losses, numbers = train(Path(name))
    tiny.compare(losses, numbers)
