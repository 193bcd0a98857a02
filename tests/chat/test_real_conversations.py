"""Real conversations: the trained text is the answers, and train_on="each" loses no turn."""

from __future__ import annotations

import copy
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.chat.chats import tokenize, trained_text
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.made_templates import OTHERS
from tests.chat.truth import Case
from torch_collate_kit.errors import DataError

EVERY = bool(os.environ.get("CHECK_EVERY_CHAT"))  # else a part of each file, for time
FILES = {  # for train_on="each": how many records the slow truth judges, of how many in all; a step
    "gsm8k_train_2k.jsonl": (12, 100, 4),
    "chat_tools_tm4_900.jsonl": (8, 60, 2),
    "chat_tools_tau_airline_128.jsonl": (1, 4, 2),
    "chat_long_squality_50.jsonl": (1, 2, 7),
}


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = [{"messages": json.loads(line)["messages"]} for line in lines]
    if "tau" not in name:
        return found
    tools = json.loads((folder / "chat_tools_tau_airline.tools.json").read_text())
    return [{**record, "tools": tools} for record in found]


# ---- the shipped template, with and without generation tags


@pytest.fixture(scope="module")
def mistral(shared_data: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "mistral-32k-chatml")


def answer_text(message: dict[str, Any]) -> str:
    """What the shipped template writes for an assistant message, without the template."""
    text = message["content"] or ""
    for call in message.get("tool_calls") or []:
        function = call["function"]
        text += "\n" if text else ""
        text += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
        text += f"{function['arguments']}}}\n</tool_call>"
    return text + "<|im_end|>"


@pytest.mark.parametrize("name", FILES)
def test_the_answers_are_trained(shared_data: Path, mistral: Any, name: str) -> None:
    without_tags = copy.deepcopy(mistral)
    for tag in ("{%- generation -%}", "{%- endgeneration -%}"):
        assert tag in without_tags.chat_template
        without_tags.chat_template = without_tags.chat_template.replace(tag, "")
    for i, record in enumerate(records(shared_data, name)[:: 1 if EVERY else FILES[name][2]]):
        answers = [answer_text(m) for m in record["messages"] if m["role"] == "assistant"]
        result = tokenize(record, mistral)
        assert trained_text(result, mistral) == "".join(answers), i
        if i % 8 and not EVERY:
            continue
        last = tokenize(record, mistral, train_on="last")
        assert last["input_ids"] == result["input_ids"]
        assert trained_text(last, mistral) == answers[-1], i
        assert tokenize(record, without_tags) == result, i
        assert tokenize(record, without_tags, train_on="last") == last, i


# ---- train_on="each": no record lost, no turn trained twice

KINDS = ["qwen3", "gptoss", "llama3_1", "deepseek_v3_1"]
REFUSED = {  # how many of the counted, and what all their messages say
    ("llama3_1", "chat_tools_tau_airline_128.jsonl"): (2, "content"),  # text beside a call
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_each(kind: str, name: str, shared_data: Path) -> None:
    template, family = OTHERS.get(kind) or (templates()[kind], FAMILY_OF[kind])
    tokenizer = tokenizer_for(template, family.eos)
    judged, counted, _ = FILES[name]
    refused: list[str] = []
    for i, record in enumerate(records(shared_data, name)[:counted]):
        turns = sum(message["role"] == "assistant" for message in record["messages"])
        try:
            examples = tokenize(record, tokenizer, train_on="each")
        except DataError as error:
            refused.append(str(error))
            continue
        masks = [[0, *example["loss_mask"]] for example in examples]
        runs = sum(b > a for mask in masks for a, b in itertools.pairwise(mask))
        assert runs == turns, i
        if i < judged:
            verdict = Case(kind, tokenizer, record, False, family).verdict("each", examples)
            assert verdict.kind == "right", (i, verdict.why)
    count, word = REFUSED.get((kind, name), (0, ""))
    assert len(refused) <= count, refused
    assert all(word in message for message in refused), refused
