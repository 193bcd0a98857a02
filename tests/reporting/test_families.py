"""Conversations under the chat templates of many model families: healthy data, no false alarm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.families import FAMILY_OF, Family, templates, tokenizer_for
from torch_collate_kit import ChatOptions, audit, tokenize_chat

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


def record(i: int, family: Family) -> dict[str, Any]:
    turns = [("user", f"What is {i} plus {i + 1}?"), ("assistant", f"It is {2 * i + 1}.")]
    messages = []
    for role, text in turns:
        content = [{"type": "text", "text": text}] if family.only_parts else text
        messages.append({"role": role, "content": content})
    return {"messages": messages}


def records_with_thinking(name: str) -> list[dict[str, Any]]:
    records = [record(i, FAMILY_OF[name]) for i in range(8)]
    for i, one in enumerate(records):
        one["messages"][1]["reasoning_content"] = f"I add {i} and {i + 1}."
    return records


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - THINKS))
def test_thinking_that_a_template_drops_is_refused(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)
    found = audit(records_with_thinking(name), tokenizer)["refused"]
    assert found.rows.tolist() == list(range(8))
    assert "the chat template drops its reasoning_content" in found.message


@pytest.mark.parametrize("name", sorted(THINKS))
def test_thinking_before_an_answer_is_healthy(name: str) -> None:
    """After its thinking the model of gpt-oss and Muse writes the header of an answer itself."""
    tokenizer = tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)
    report = audit(records_with_thinking(name), tokenizer)
    true = {"eos_never_trained"} if name in END_IN_THE_NEXT_TURN else set()
    assert {f.name for f in report.findings if f.severity != "note"} <= true, report


@pytest.mark.parametrize("name", sorted(OPENS_THINKING))
def test_answers_without_the_thinking_that_a_prompt_opens_are_refused(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)
    found = audit([record(i, FAMILY_OF[name]) for i in range(8)], tokenizer)["refused"]
    assert found.rows.tolist() == list(range(8))
    assert "renders what comes before this turn differently" in found.message


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - OPENS_THINKING))
def test_what_tokenize_chat_writes_is_healthy(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)
    found = [
        tokenize_chat(record(i, FAMILY_OF[name]), tokenizer, ChatOptions(train_on="last"))
        for i in range(8)
    ]
    examples = [{key: e[key] for key in ("input_ids", "loss_mask")} for e in found]
    report = audit(examples, tokenizer)
    true = TRUE | ({"eos_never_trained"} if name in END_IN_THE_NEXT_TURN else set())
    assert {f.name for f in report.findings if f.severity != "note"} <= true, report
    if FAMILY_OF[name].eos in FAMILY_OF[name].ends:
        assert "eos_does_not_end_turns" not in report.names, report
