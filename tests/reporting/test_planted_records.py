"""Defects planted in chat records, which audit tokenizes with the template of the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest

from tests.reporting import planted_rows
from tests.reporting.clean_data import Clean, chat_tokenizer
from torch_collate_kit import audit

Records = list[dict[str, Any]]
LIMIT = 120  # tokens of a row; no clean record has as many
TEMPLATES = {
    name: defect
    for name, defect in vars(planted_rows).items()
    if name.startswith("template_") and callable(defect)
}


def record(question: str, answer: str) -> dict[str, Any]:
    turns = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def clean_records() -> Records:
    return [record(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(30)]


PLANTED: dict[str, tuple[Callable[[Records], Any], str, list[set[int]]]] = {
    "one record twice": (
        lambda found: found.__setitem__(20, found[3]),
        "duplicates",
        [{3, 20}, {20}],
    ),
    "another answer to a question": (
        lambda found: found.__setitem__(20, record("What is 3 plus 3?", "Seven.")),
        "contradictory_answers",
        [{3, 20}, {20}],
    ),
    "a long answer": (
        lambda found: found.__setitem__(5, record("Why?", "Because. " * 20)),
        "eos_truncated",
        [{5}],
    ),
    "a long question": (
        lambda found: found.__setitem__(5, record("Why? " * 40, "So.")),
        "prompt_longer_than_row",
        [{5}],
    ),
    "no answer": (
        lambda found: found[7]["messages"].pop(),
        "no_trained_token",
        [{7}],
    ),
    "empty thinking": (
        lambda found: found.__setitem__(8, record("Sure?", "<think>\n\n</think>\n\nYes.")),
        "empty_thinking_trained",
        [{8}],
    ),
}


@pytest.mark.parametrize("form", ["list", "Dataset"])
@pytest.mark.parametrize("what", PLANTED)
def test_planted_in_records(what: str, form: str) -> None:
    plant, name, rows = PLANTED[what]
    found = clean_records()
    plant(found)
    data = datasets.Dataset.from_list(found) if form == "Dataset" else found
    report = audit(data, chat_tokenizer(), max_tokens=LIMIT)
    findings = {f.name: set(f.rows.tolist()) for f in report.findings}
    assert findings.get(name) in rows, report
    assert set().union(*findings.values()) <= rows[0], report


@pytest.mark.parametrize("name", TEMPLATES)
def test_unstable_templates_of_records(name: str) -> None:
    tokenizer = TEMPLATES[name](Clean.made()).tokenizer
    assert "template_not_prefix_stable" in audit(clean_records(), tokenizer).names


@pytest.mark.parametrize("form", ["list", "Dataset"])
def test_clean_records_stay_silent(form: str) -> None:
    found = clean_records()
    data = datasets.Dataset.from_list(found) if form == "Dataset" else found
    report = audit(data, chat_tokenizer(), max_tokens=LIMIT)
    assert report.ok, report
