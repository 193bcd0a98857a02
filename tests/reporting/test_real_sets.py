"""Real data sets have no errors and no warnings: an alarm there would be a false one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vision.families import FAMILIES
from torch_collate_kit import (
    ChatOptions,
    TokenizedDataset,
    audit,
    tokenize_chat,
    tokenize_chat_dataset,
)

TOKENIZER = "tokenizers/mistral-32k-chatml"
CHATS = {
    "gsm8k_train_2k.jsonl": 2000,
    "gsm8k_test_300.jsonl": 300,
    "chat_tools_tm4_900.jsonl": 900,
    "chat_tools_tau_airline_128.jsonl": 128,
    "chat_long_squality_50.jsonl": 50,
}


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / TOKENIZER)


def records(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def serious(report: Any) -> list[Any]:
    return [finding for finding in report.findings if finding.severity != "note"]


@pytest.mark.parametrize("name", CHATS)
def test_real_conversations(name: str, shared_data: Path, tokenizer: Any) -> None:
    from datasets import Dataset

    found = [{"messages": record["messages"]} for record in records(shared_data / name)]
    tools = shared_data / "chat_tools_tau_airline.tools.json" if "tau" in name else None
    dataset, _ = tokenize_chat_dataset(
        Dataset.from_list(found),
        tokenizer,
        ChatOptions(tools=tools.read_text(encoding="utf-8") if tools else None),
    )
    assert len(dataset) > 0.9 * CHATS[name]
    columns = TokenizedDataset(dataset)
    for data in (dataset, columns):
        report = audit(data, tokenizer, max_tokens=int(columns.lengths.max()))
        assert report.ok, serious(report)
    cut = audit(columns, tokenizer, max_tokens=int(np.median(columns.lengths)))
    assert not cut.ok
    assert {f.name for f in serious(cut)} <= {
        *("target_truncated", "eos_truncated", "prompt_longer_than_row", "no_trained_token"),
    }  # fmt: skip


def test_real_images(shared_data: Path) -> None:
    processor = FAMILIES["qwen2_5_vl"].processor()
    examples = [
        tokenize_chat(record, processor, ChatOptions(image_root=shared_data))
        for record in records(shared_data / "vlm_smoke_16.jsonl")
    ]
    assert any("pixel_values" in example for example in examples)
    report = audit(examples, processor)
    assert report.ok, serious(report)
