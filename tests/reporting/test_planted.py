"""Every planted defect is found, in its rows and nowhere else; what only looks damaged is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reporting.clean_data import Clean, chat_tokenizer
from tests.reporting.planted import DEFECTS, TEMPLATES, Planted
from tests.reporting.planted_images import IMAGE_DEFECTS, clean_images, image_processor
from tests.reporting.planted_rollouts import ROLLOUT_DEFECTS, clean_rollouts
from tests.reporting.traps import PADDED, TRAPS
from torch_collate_kit import audit, tokenize_chat_dataset

NAMES = {
    "no_trained_token", "target_truncated", "prompt_longer_than_row", "eos_truncated",
    "eos_never_trained", "double_bos", "masks_all_zero", "masks_all_one",
    "template_not_prefix_stable",
    "id_out_of_vocabulary", "pad_trained", "eos_masked_as_pad", "labels_shifted", "duplicates",
    "contradictory_answers", "reward_without_variance", "logprobs_shifted",
    "placeholders_disagree_with_grids", "logprobs_constant", "logprobs_positive",
    "mask_disagrees_with_logprobs", "uid_without_group", "uid_of_several_prompts",
}  # fmt: skip
MAY_BE_NOTES = {
    "duplicates", "contradictory_answers", "reward_without_variance", "template_not_prefix_stable"
}  # fmt: skip
WITHOUT_TOKENIZER = {"labels_shifted", "no_trained_token", "masks_all_zero", "duplicates"}
LIMIT = 120  # tokens of a row; no clean record has as many


def check(planted: Planted, tokenizer: Any, **options: Any) -> None:
    """The defect is found in its rows; other errors and warnings are only what follows from it."""
    report = audit(planted.examples, tokenizer, max_tokens=planted.max_tokens, **options)
    names = set(planted.name.split())
    assert names & set(report.names), report
    for finding in report.findings:
        rows = set(finding.rows.tolist())
        if len(rows) == len(planted.examples):
            assert "other rows" not in finding.message, finding.message
        if finding.name not in names:
            assert finding.severity == "note" or finding.name in planted.also, finding
            assert finding.severity == "note" or rows <= set.union(*planted.rows or [rows])
            continue
        assert finding.severity != "note" or finding.name in MAY_BE_NOTES
        if planted.rows is not None:
            assert rows in planted.rows, (sorted(rows), planted.rows)
            numbers = re.findall(r"\d+", finding.message.replace(",", ""))
            assert str(finding.count) in numbers, finding.message
            assert finding.example, "an example in words"
    assert report.ok == all(f.severity == "note" for f in report.findings)


def test_every_finding_is_planted_here_or_in_texts() -> None:
    made = [defect(Clean.made()).name for defect in DEFECTS.values()]
    made += [defect(clean_rollouts()).name for defect in ROLLOUT_DEFECTS.values()]
    made += [defect(clean_images()).name for defect in IMAGE_DEFECTS.values()]
    assert {name for name in made if " " not in name} == NAMES


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_in_conversations(name: str) -> None:
    planted = DEFECTS[name](Clean.made())
    check(planted, planted.tokenizer)
    if planted.name in WITHOUT_TOKENIZER:
        check(planted, None)
    else:  # not all can be found, but none may raise
        audit(planted.examples, max_tokens=planted.max_tokens)


@pytest.mark.parametrize("name", ROLLOUT_DEFECTS)
def test_planted_in_rollouts(name: str) -> None:
    planted = ROLLOUT_DEFECTS[name](clean_rollouts())
    check(planted, planted.tokenizer)


@pytest.mark.parametrize("name", IMAGE_DEFECTS)
def test_planted_in_images(name: str) -> None:
    planted = IMAGE_DEFECTS[name](clean_images())
    check(planted, planted.tokenizer)


@pytest.mark.parametrize("name", TRAPS)
def test_traps_stay_silent(name: str) -> None:
    examples, tokenizer = TRAPS[name]()
    for used in (tokenizer, None):
        report = audit(examples, used, max_tokens=10_000)
        assert report.ok, report


@pytest.mark.parametrize("name", PADDED)
def test_padded_data_is_only_called_padded(name: str) -> None:
    """Its supervision is right: pads are not trained, and the end of every answer is."""
    examples, tokenizer = PADDED[name]()
    report = audit(examples, tokenizer, max_tokens=10_000)
    assert {f.name for f in report.findings if f.severity != "note"} <= {"padded_rows"}


def test_clean_images_stay_silent() -> None:
    report = audit(clean_images(), image_processor())
    assert report.ok, report


@pytest.fixture(scope="module")
def real(shared_data: Path) -> Clean:
    """120 real questions with real answers, tokenized by the package."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "mistral-32k-chatml")
    with open(shared_data / "gsm8k_test_300.jsonl", encoding="utf-8") as lines:
        records = [{"messages": json.loads(next(lines))["messages"]} for _ in range(120)]
    dataset, _ = tokenize_chat_dataset(Dataset.from_list(records), tokenizer)
    return Clean([dict(e) for e in dataset], tokenizer)


def test_ids_of_another_tokenizer(real: Clean) -> None:
    """They are all known to this one, and decode to text that it writes with other ids."""
    assert audit(real.examples, real.tokenizer, max_tokens=4096).ok
    rng, rows, examples = np.random.default_rng(0), real.rows(), list(real.examples)
    for i in rows:
        ids = rng.integers(1000, 32000, len(examples[i]["input_ids"])).tolist()
        examples[i] = examples[i] | {"input_ids": ids}
    found = set(audit(examples, real.tokenizer)["text_garbled"].rows.tolist())
    assert found <= rows
    assert len(found) >= 0.9 * len(rows), "a short row may come back by chance"


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_in_real_conversations(name: str, real: Clean) -> None:
    planted = DEFECTS[name](real)
    check(planted, planted.tokenizer)


# In chat records, which audit tokenizes with the template of the tokenizer
def record(question: str, answer: str) -> dict[str, Any]:
    turns = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def clean_records() -> list[dict[str, Any]]:
    return [record(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(30)]


IN_RECORDS: dict[str, tuple[int, Callable[[], Any], str, list[set[int]]]] = {
    "a copy": (20, lambda: clean_records()[3], "duplicates", [{3, 20}, {20}]),
    "another answer": (
        *(20, lambda: record("What is 3 plus 3?", "Seven.")),
        *("contradictory_answers", [{3, 20}, {20}]),
    ),
    "a long answer": (5, lambda: record("Why?", "Because. " * 20), "eos_truncated", [{5}]),
    "a long question": (5, lambda: record("Why? " * 40, "So."), "prompt_longer_than_row", [{5}]),
    "no answer": (
        *(7, lambda: {"messages": record("Why?", "")["messages"][:1]}),
        *("no_trained_token", [{7}]),
    ),
    "empty thinking": (
        *(8, lambda: record("Sure?", "<think>\n\n</think>\n\nYes.")),
        *("empty_thinking_trained", [{8}]),
    ),
}


@pytest.mark.parametrize("what", IN_RECORDS)
def test_planted_in_records(what: str) -> None:
    row, damaged, name, rows = IN_RECORDS[what]
    found = clean_records()
    assert audit(found, chat_tokenizer(), max_tokens=LIMIT).ok
    found[row] = damaged()
    report = audit(found, chat_tokenizer(), max_tokens=LIMIT)
    findings = {f.name: set(f.rows.tolist()) for f in report.findings}
    assert findings.get(name) in rows, report
    assert set().union(*findings.values()) <= rows[0], report


@pytest.mark.parametrize("name", TEMPLATES)
def test_unstable_templates_of_records(name: str) -> None:
    tokenizer = TEMPLATES[name](Clean.made()).tokenizer
    assert "template_not_prefix_stable" in audit(clean_records(), tokenizer).names
