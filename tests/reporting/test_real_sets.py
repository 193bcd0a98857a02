"""No false alarm: real data sets, and conversations under the templates of many model families."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.reporting.clean_data import serious
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
    "gsm8k_test_300.jsonl": 300,
    "gsm8k_train_2k.jsonl": 2000,
    "chat_tools_tau_airline_128.jsonl": 128,
    "chat_tools_tm4_900.jsonl": 900,
    "chat_long_squality_50.jsonl": 50,
}


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / TOKENIZER)


def records(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", CHATS)
def test_real_conversations(name: str, shared_data: Path, tokenizer: Any) -> None:
    from datasets import Dataset

    most = None if "ALL_CASES" in os.environ else 300
    found = [{"messages": record["messages"]} for record in records(shared_data / name)[:most]]
    tools = shared_data / "chat_tools_tau_airline.tools.json" if "tau" in name else None
    dataset, _ = tokenize_chat_dataset(
        Dataset.from_list(found),
        tokenizer,
        ChatOptions(tools=tools.read_text(encoding="utf-8") if tools else None),
    )
    assert len(dataset) > 0.9 * min(CHATS[name], most or CHATS[name])
    columns = TokenizedDataset(dataset)
    assert not serious(columns, tokenizer, max_tokens=int(columns.lengths.max()))
    cut = serious(columns, tokenizer, max_tokens=int(np.median(columns.lengths)))
    assert cut
    truncated = {"target_truncated", "eos_truncated", "prompt_longer_than_row"}
    assert cut.keys() <= truncated | {"no_trained_token"}


def test_real_images(shared_data: Path) -> None:
    processor = FAMILIES["qwen2_5_vl"].processor()
    examples = [
        tokenize_chat(record, processor, ChatOptions(image_root=shared_data))
        for record in records(shared_data / "vlm_smoke_16.jsonl")
    ]
    assert any("pixel_values" in example for example in examples)
    assert not serious(examples, processor)


TEMPLATES = {name: text for name, text in templates().items() if name in FAMILY_OF}
TRUE = {"template_not_prefix_stable", "empty_thinking_trained"}  # of some templates they are
END_IN_THE_NEXT_TURN = {"glm4moe"}  # an answer at the end of a conversation has no end
WRITES_THINKING = (
    *("diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "muse", "nemotron"),
    *("qwen3_5", "qwen3_6", "qwen3_8"),
)  # fmt: skip
THINKS = {name for name in TEMPLATES if name.startswith(WRITES_THINKING)}
THINKS |= {"qwen3", "qwen3_training"}
OPENS_THINKING = {name for name in TEMPLATES if name.startswith("deepseek")}  # and drops it later


def made(name: str, *, thinks: bool = False) -> tuple[list[dict[str, Any]], Any]:
    """Eight records of one turn for a family, and its tokenizer."""
    family, rows = FAMILY_OF[name], []
    for i in range(8):
        texts = (f"What is {i} plus {i + 1}?", f"It is {2 * i + 1}.")
        contents = ([{"type": "text", "text": t}] if family.only_parts else t for t in texts)
        pairs = zip(("user", "assistant"), contents, strict=True)
        messages: list[dict[str, Any]] = [{"role": role, "content": of} for role, of in pairs]
        if thinks:
            messages[1]["reasoning_content"] = f"I add {i} and {i + 1}."
        rows.append({"messages": messages})
    return rows, tokenizer_for(TEMPLATES[name], family.eos)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - THINKS))
def test_thinking_that_a_template_drops_is_refused(name: str) -> None:
    found = audit(*made(name, thinks=True))["refused"]
    assert found.rows.tolist() == list(range(8))
    assert "the chat template drops its reasoning_content" in found.message


@pytest.mark.parametrize("name", sorted(THINKS))
def test_thinking_before_an_answer_is_healthy(name: str) -> None:
    """After its thinking the model of gpt-oss and Muse writes the header of an answer itself."""
    true = {"eos_never_trained"} if name in END_IN_THE_NEXT_TURN else set()
    assert serious(*made(name, thinks=True)).keys() <= true


@pytest.mark.parametrize("name", sorted(OPENS_THINKING))
def test_answers_without_the_thinking_that_a_prompt_opens_are_refused(name: str) -> None:
    found = audit(*made(name))["refused"]
    assert found.rows.tolist() == list(range(8))
    assert "renders what comes before this turn differently" in found.message


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - OPENS_THINKING))
def test_what_tokenize_chat_writes_is_healthy(name: str) -> None:
    records, tokenizer = made(name)
    found = [tokenize_chat(of, tokenizer, ChatOptions(train_on="last")) for of in records]
    examples = [{key: e[key] for key in ("input_ids", "loss_mask")} for e in found]
    report = audit(examples, tokenizer)
    true = TRUE | ({"eos_never_trained"} if name in END_IN_THE_NEXT_TURN else set())
    assert serious(report).keys() <= true, report
    if FAMILY_OF[name].eos in FAMILY_OF[name].ends:
        assert "eos_does_not_end_turns" not in report.names, report
