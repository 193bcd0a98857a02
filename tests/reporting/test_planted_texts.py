"""Damage of many kinds in a few of many rows: it is found, in these rows and in no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reporting.clean_data import Example
from tests.reporting.planted_texts import TEXTS, conversations, encoded, moved, tool_tokenizer
from torch_collate_kit import audit

NUM_ROWS = 100
Edit = Callable[[str, Any], Example]
MOVED: dict[str, tuple[str, Edit]] = {
    f"mask moved by {by}": ("mask_shifted", lambda text, t, by=by: moved(encoded(text, t), by))
    for by in (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
}
KINDS: dict[str, tuple[str, Edit]] = {
    name: (names, lambda text, tokenizer, edit=edit: encoded(edit(text), tokenizer))
    for name, (names, edit) in TEXTS.items()
} | MOVED
# What may be meant, or has no contrast, where all rows have it: no alarm. Of all else there is one.
SILENT_EVERYWHERE = {
    "first token untrained", "five tokens untrained", "only the end trained", "a hole",
    "many holes", "last words untrained",
    "end of the question trained", "text after the end", "end twice", "end thrice",
    "line break trained", "another EOS after the end", "no header", "no header in the last turn",
    "unknown role", "header as text", "no template", "header twice",
    "no line after the header", "space after the header", "question without its end",
    "end in a question", "turn in a question", "other control token in a question",
    "BOS in a question", "BOS before an answer", "trained BOS before an answer", "start cut off",
    "question end twice", "answer cut", "thinking not closed", "thinking closed only",
    "call without a brace", "call with a comma", "call in Python", "call not closed",
    "replacement characters",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tool_tokenizer()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return conversations(NUM_ROWS)


@pytest.fixture(scope="module")
def clean(texts: list[str], tokenizer: Any) -> list[Example]:
    return [encoded(text, tokenizer) for text in texts]


def serious(report: Any) -> dict[str, set[int]]:
    return {f.name: set(f.rows.tolist()) for f in report.findings if f.severity != "note"}


def test_clean_conversations_stay_silent(clean: list[Example], tokenizer: Any) -> None:
    assert not audit(clean, tokenizer, max_tokens=10_000).findings
    assert len(KINDS) >= 60


@pytest.mark.parametrize("step", [100, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_damaged_rows(
    kind: str, step: int, texts: list[str], clean: list[Example], tokenizer: Any
) -> None:
    names, edit = KINDS[kind]
    rows = set(range(3, NUM_ROWS, step))
    examples = [edit(texts[i], tokenizer) if i in rows else e for i, e in enumerate(clean)]
    assert all(examples[i] != clean[i] for i in rows)
    found = serious(audit(examples, tokenizer))
    assert rows in [found.get(name) for name in names.split()], found
    assert set().union(*found.values()) == rows, found


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_rows_do(kind: str, texts: list[str], tokenizer: Any) -> None:
    _, edit = KINDS[kind]
    found = serious(audit([edit(text, tokenizer) for text in texts], tokenizer))
    assert bool(found) != (kind in SILENT_EVERYWHERE), found
