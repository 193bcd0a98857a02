"""The made conversations on templates of shapes that trl's do not have: nothing is wrong."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import tokenizer_for
from tests.chat.other_templates import OTHERS
from tests.chat.stop_templates import STOPS
from tests.chat.truth import Case, Verdict
from torch_collate_kit.chat import ChatOptions, tokenize_chat
from torch_collate_kit.errors import DataError

TEMPLATES = OTHERS | STOPS
MODES = ("all", "last", "each")
TAKEN = {  # by "all", "last" and "each", at least
    "deepseek_v3_1": (36, 38, 36),
    "llama_2": (30, 34, 30),
    "vicuna": (37, 37, 37),
    "alpaca": (37, 37, 37),
    "apertus": (34, 37, 35),
    "no second prompt": (35, 37, 35),
    "granite": (39, 39, 39),
    "laguna": (38, 38, 38),
    "qwq": (1, 2, 2),
    "two ends": (38, 38, 38),
    "merging": (36, 37, 36),
    "ascii": (0, 0, 0),
    "kimi_k3": (61, 61, 61),
    "kimi_k3, names after tags": (61, 61, 61),
    "kimi_k3, names after tags, no EOS": (0, 0, 0),
    "nameless closing tag alone": (38, 55, 38),
    "command_r7b": (59, 61, 59),
    "command_a": (35, 54, 35),
    "command_a, no prompt": (56, 60, 56),
    "mistral_v3": (52, 56, 53),
    "mistral_v7": (52, 56, 53),
    "mistral_v11": (52, 56, 53),
    "mistral_v13": (58, 60, 58),
    "mistral_v15": (58, 60, 58),
    "gpt_oss": (36, 60, 58),
    "gemma_4": (61, 61, 61),
    "two stops": (56, 57, 56),
    "a named closing tag, then EOS": (38, 38, 38),
    "header in the question": (35, 37, 35),
}
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


def verdicts(name: str) -> dict[tuple[str, str], Verdict]:
    tokenizer = tokenizer_of(name)
    found = {}
    for conversation, record in CONVERSATIONS.items():
        case = Case(name, tokenizer, record, other=TEMPLATES[name][1])
        for mode in MODES:
            try:
                result: Any = tokenize_chat(
                    case.record, tokenizer, ChatOptions(train_on=mode, allow_empty=True)
                )
            except Exception as error:
                result = error
            found[conversation, mode] = case.verdict(mode, result)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_silently_wrong(name: str) -> None:
    found = verdicts(name)
    assert not {key: verdict.why for key, verdict in found.items() if verdict.kind == "wrong"}
    taken = Counter(mode for (_, mode), verdict in found.items() if verdict.kind == "right")
    for mode, least in zip(MODES, TAKEN[name], strict=True):
        assert taken[mode] >= least, (mode, taken[mode], found[PLAIN, mode])


@pytest.mark.parametrize("name", ["command_a", "command_a, no prompt", "mistral_v7"])
def test_an_answer_to_a_message_without_a_header_is_refused(name: str) -> None:
    """The text of a question ends with the header, or with what stands for it."""
    asked = {"role": "user", "content": "zebra1"}
    for role in ("system", "assistant"):
        messages = [asked, {"role": role, "content": "rule2"}, {**asked, "role": "assistant"}]
        with pytest.raises(DataError, match=f"no header after a message of the {role}"):
            tokenize_chat({"messages": messages}, tokenizer_of(name), ChatOptions(train_on="last"))


def test_a_turn_with_its_end_inside_is_refused() -> None:
    tokenizer = tokenizer_of("nameless closing tag alone")
    for name in ("call, dict", "parallel calls", "reasoning, one turn"):
        with pytest.raises(DataError, match=r"writes '<\|close\|>', which ends this turn, inside"):
            tokenize_chat(CONVERSATIONS[name], tokenizer)
