"""The made conversations on templates of shapes that trl's do not have: nothing is wrong."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.chat.chats import refused
from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import tokenizer_for
from tests.chat.other_templates import OTHERS
from tests.chat.outcomes import MODES, outcomes
from tests.chat.stop_templates import STOPS

TEMPLATES = OTHERS | STOPS
TAKEN = {  # by "all", "last" and "each", at least
    (36, 38, 36): ["deepseek_v3_1"],
    (30, 34, 30): ["llama_2"],
    (37, 37, 37): ["vicuna", "alpaca"],
    (34, 37, 35): ["apertus"],
    (35, 37, 35): ["no second prompt", "header in the question"],
    (39, 39, 39): ["granite"],
    (38, 38, 38): ["laguna", "two ends", "a named closing tag, then EOS"],
    (1, 2, 2): ["qwq"],
    (36, 37, 36): ["merging"],
    (0, 0, 0): ["ascii", "kimi_k3, names after tags, no EOS"],
    (61, 61, 61): ["kimi_k3", "kimi_k3, names after tags", "gemma_4"],
    (38, 55, 38): ["nameless closing tag alone"],
    (59, 61, 59): ["command_r7b"],
    (35, 54, 35): ["command_a"],
    (56, 60, 56): ["command_a, no prompt"],
    (52, 56, 53): ["mistral_v3", "mistral_v7", "mistral_v11"],
    (58, 60, 58): ["mistral_v13", "mistral_v15"],
    (36, 60, 58): ["gpt_oss"],
    (56, 57, 56): ["two stops"],
}  # fmt: skip
TOKENS = re.compile(r"\[/?[A-Z_]+\]")
NAMED = ("<|{}_start|>", "<|{}_end|>", "<|start_{}|>", "<|end_{}|>")


def tokenizer_of(name: str) -> Any:
    """With the tokens that the template writes in pieces, too."""
    template, family = TEMPLATES[name]
    tokenizer = tokenizer_for(template, family.eos)
    tokens = [*family.ends, *TOKENS.findall(template)]
    if name in STOPS:
        tokens += [form.format(role) for form in NAMED for role in ("user", "assistant", "system")]
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in tokens if token not in known], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_silently_wrong(name: str) -> None:
    found = outcomes(name, tokenizer_of(name), TEMPLATES[name][1])
    wrong = {key: verdict.why for key, (verdict, _) in found.items() if verdict.kind == "wrong"}
    assert not wrong
    taken = Counter(mode for (_, mode), (verdict, _) in found.items() if verdict.kind == "right")
    [least] = [counts for counts, names in TAKEN.items() if name in names]
    for mode, count in zip(MODES, least, strict=True):
        assert taken[mode] >= count, (mode, taken[mode], found[PLAIN, mode])


@pytest.mark.parametrize("name", ["command_a", "command_a, no prompt", "mistral_v7"])
def test_an_answer_to_a_message_without_a_header_is_refused(name: str) -> None:
    """The text of a question ends with the header, or with what stands for it."""
    asked = {"role": "user", "content": "zebra1"}
    for role in ("system", "assistant"):
        messages = [asked, {"role": role, "content": "rule2"}, {**asked, "role": "assistant"}]
        message = f"no header after a message of the {role}"
        refused({"messages": messages}, tokenizer_of(name), message, train_on="last")


def test_a_turn_with_its_end_inside_is_refused() -> None:
    tokenizer = tokenizer_of("nameless closing tag alone")
    for name in ("call, dict", "parallel calls", "reasoning, one turn"):
        message = r"writes '<\|close\|>', which ends this turn, inside"
        refused(CONVERSATIONS[name], tokenizer, message)
