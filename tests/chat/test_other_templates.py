"""The made conversations on templates of shapes that trl's do not have: nothing is wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import tokenizer_for
from tests.chat.other_templates import OTHERS
from tests.chat.truth import Case, Verdict
from torch_collate_kit.chat import tokenize_chat

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
}


def verdicts(name: str) -> dict[tuple[str, str], Verdict]:
    template, family = OTHERS[name]
    tokenizer = tokenizer_for(template, family.eos)
    ends = [end for end in family.ends if end not in tokenizer.get_vocab()]
    tokenizer.add_tokens(ends, special_tokens=True)
    found = {}
    for conversation, record in CONVERSATIONS.items():
        case = Case(name, tokenizer, record, other=family)
        for mode in MODES:
            try:
                result: Any = tokenize_chat(case.record, tokenizer, train_on=mode, allow_empty=True)
            except Exception as error:
                result = error
            found[conversation, mode] = case.verdict(mode, result)
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_silently_wrong(name: str) -> None:
    found = verdicts(name)
    assert not {key: verdict.why for key, verdict in found.items() if verdict.kind == "wrong"}
    taken = Counter(mode for (_, mode), verdict in found.items() if verdict.kind == "right")
    for mode, least in zip(MODES, TAKEN[name], strict=True):
        assert taken[mode] >= least, (mode, taken[mode], found[PLAIN, mode])
