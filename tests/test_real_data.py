"""Chat -> pack -> train on real conversations, with a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_collate_kit import (
    ChatOptions,
    PackedCollator,
    ParallelLayout,
    tokenize_chat_dataset,
)

TOKENIZER = "tokenizers/mistral-32k-chatml"
# File, conversations taken, most tokens of a conversation, tokens a row.
FILES = {
    "gsm8k_train_2k.jsonl": (64, None, 1024),
    "gsm8k_test_300.jsonl": (64, None, 1024),
    "chat_tools_tm4_900.jsonl": (48, None, 2048),
    "chat_tools_tau_airline_128.jsonl": (8, 6144, 12288),
    "chat_long_squality_50.jsonl": (4, None, 16384),
}


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / TOKENIZER)


def tokenized(shared_data: Path, tokenizer: Any, name: str) -> list[dict[str, Any]]:
    from datasets import Dataset

    count, max_length, _ = FILES[name]
    with open(shared_data / name, encoding="utf-8") as lines:
        records = [{"messages": json.loads(line)["messages"]} for line in lines]
    if "long" in name:  # two of the shortest stories fit a row
        records.sort(key=lambda record: len(json.dumps(record)))
    records = records[:count]
    tools = shared_data / "chat_tools_tau_airline.tools.json" if "tau" in name else None
    dataset, skips = tokenize_chat_dataset(
        Dataset.from_list(records),
        tokenizer,
        ChatOptions(
            max_length=max_length,
            overflow="truncate",
            tools=tools.read_text(encoding="utf-8") if tools else None,
        ),
    )
    assert len(dataset) + skips.total() == count
    assert len(dataset) >= count // 2
    return list(dataset.with_format("numpy"))


@pytest.mark.parametrize("name", FILES)
def test_real_conversations_are_packed_without_loss(name, shared_data, tokenizer):
    data = tokenized(shared_data, tokenizer, name)
    parallel = ParallelLayout(dp=2, tp=2, cp=2)
    collate = PackedCollator(tokenizer, max_tokens=FILES[name][2], parallel=parallel)
    batch = collate(data)
    assert len(batch) % 2 == 0
    assert batch["input_ids"].shape[1] <= FILES[name][2]
    assert sorted(batch.row_metadata["example_indices"].values) == list(range(len(data)))
    rows = zip(
        batch.row_metadata["example_indices"], batch["cu_seq_lens"], batch["input_ids"], strict=True
    )
    for indices, starts, ids in rows:
        for example, start in zip(indices, starts, strict=False):
            expected = data[example]["input_ids"]
            assert np.array_equal(ids[start : start + len(expected)], expected)
            assert start % parallel.align == 0
    trained = sum(int(np.count_nonzero(example["loss_mask"][1:])) for example in data)
    assert batch.metadata["num_loss_tokens"] == trained > 0
    assert batch["loss_mask"].sum().item() == pytest.approx(1, rel=1e-4)
