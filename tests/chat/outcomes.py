"""What tokenize_chat does with a record or with all made conversations, judged by the truth."""

from __future__ import annotations

from typing import Any

from tests.chat.chats import tokenize
from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import Family
from tests.chat.truth import Case, Verdict

MODES = ("all", "last", "each")


def outcome(case: Case, mode: str, **options: Any) -> tuple[Verdict, Any]:
    """The verdict, and what was returned or raised: any exception but a DataError is wrong."""
    try:
        result = tokenize(case.record, case.tokenizer, train_on=mode, **options)
    except Exception as error:
        result = error
    return case.verdict(mode, result), result


def outcomes(
    name: str, tokenizer: Any, family: Family | None = None
) -> dict[tuple[str, str], tuple[Verdict, Any]]:
    """By conversation and mode."""
    found = {}
    for conversation, record in CONVERSATIONS.items():
        case = Case(name, tokenizer, record, other=family)
        for mode in MODES:
            found[conversation, mode] = outcome(case, mode, allow_empty=True)
    return found
