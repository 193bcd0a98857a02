"""The real conversations through train_on="each": no record lost, no turn trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.other_templates import OTHERS
from tests.chat.truth import Case
from torch_collate_kit.chat import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.errors import DataError

TEMPLATES = templates()

KINDS = ["qwen3", "gptoss", "llama3_1", "deepseek_v3_1"]
FILES = {  # how many records the slow truth is asked about, of how many that are counted
    "gsm8k_train_2k.jsonl": (12, 100),
    "chat_tools_tm4_900.jsonl": (8, 60),
    "chat_tools_tau_airline_128.jsonl": (1, 4),
    "chat_long_squality_50.jsonl": (1, 2),
}
REFUSED = {  # how many of the counted, and what all their messages say
    ("llama3_1", "chat_tools_tau_airline_128.jsonl"): (2, "content"),  # text beside a call
}


def records(folder: Path, name: str, count: int) -> list[dict[str, Any]]:
    lines = (folder / name).read_text(encoding="utf-8").splitlines()[:count]
    found: list[dict[str, Any]] = [{"messages": json.loads(line)["messages"]} for line in lines]
    if "tau" in name:
        tools = json.loads((folder / "chat_tools_tau_airline.tools.json").read_text())
        found = [{**record, "tools": tools} for record in found]
    return found


def tokenizer_of(kind: str) -> Any:
    if kind in OTHERS:
        return tokenizer_for(OTHERS[kind][0], OTHERS[kind][1].eos)
    return tokenizer_for(TEMPLATES[kind], FAMILY_OF[kind].eos)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_each(kind: str, name: str, shared_data: Path) -> None:
    judged, counted = FILES[name]
    tokenizer = tokenizer_of(kind)
    refused: list[str] = []
    for i, record in enumerate(records(shared_data, name, counted)):
        turns = sum(message["role"] == "assistant" for message in record["messages"])
        try:
            examples = tokenize_chat(record, tokenizer, ChatOptions(train_on="each"))
        except DataError as error:
            refused.append(str(error))
            continue
        runs = sum(
            now > before
            for example in examples
            for before, now in zip([0, *example["loss_mask"]], example["loss_mask"], strict=False)
        )
        assert runs == turns, i
        if i < judged:
            case = Case(kind, tokenizer, record, False, OTHERS[kind][1] if kind in OTHERS else None)
            verdict = case.verdict("each", examples)
            assert verdict.kind == "right", (i, verdict.why)
    count, word = REFUSED.get((kind, name), (0, ""))
    assert len(refused) <= count, refused
    assert all(word in message for message in refused), refused


def test_a_dataset_says_which_record_an_example_came_from(shared_data: Path) -> None:
    from datasets import Dataset

    found = records(shared_data, "chat_tools_tm4_900.jsonl", 40)
    tokenizer = tokenizer_of("qwen3")
    columns = {"messages": [json.dumps(record["messages"]) for record in found]}
    dataset = Dataset.from_dict(columns).map(lambda row: {"messages": json.loads(row["messages"])})
    examples, skipped = tokenize_chat_dataset(dataset, tokenizer, ChatOptions(train_on="each"))
    assert not skipped
    alone = [tokenize_chat(record, tokenizer, ChatOptions(train_on="each")) for record in dataset]
    indices = [i for i, examples_of in enumerate(alone) for _ in examples_of]
    assert list(examples["record_index"]) == indices
    assert set(indices) == set(range(len(found)))
    assert [row["loss_mask"] for row in examples] == [e["loss_mask"] for es in alone for e in es]
