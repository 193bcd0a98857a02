"""Every planted defect is found, in its rows and nowhere else; what only looks damaged is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reporting import planted_rows, planted_tokens, planted_turns
from tests.reporting.clean_data import Clean, as_form, with_target
from tests.reporting.planted import DEFECTS, Planted
from tests.reporting.planted_images import IMAGE_DEFECTS, clean_images, image_processor
from tests.reporting.planted_rollouts import ROLLOUT_DEFECTS, clean_rollouts
from tests.reporting.traps import PADDED, TRAPS
from torch_collate_kit import audit, tokenize_chat_dataset

NAMES = {
    "no_trained_token", "target_truncated", "prompt_longer_than_row", "eos_truncated",
    "eos_never_trained", "double_bos", "masks_all_zero", "masks_all_one",
    "generation_prompt_trained", "empty_thinking_trained", "template_not_prefix_stable",
    "id_out_of_vocabulary", "pad_trained", "eos_masked_as_pad", "labels_shifted", "duplicates",
    "contradictory_answers", "reward_without_variance", "logprobs_shifted",
    "placeholders_disagree_with_grids", "logprobs_constant", "logprobs_positive",
    "mask_disagrees_with_logprobs", "uid_without_group", "uid_of_several_prompts",
}  # fmt: skip
MAY_BE_NOTES = {
    "duplicates", "contradictory_answers", "reward_without_variance", "template_not_prefix_stable"
}  # fmt: skip
WITH_MASKS = [
    name
    for name, defect in DEFECTS.items()
    if {"loss_mask"} == defect(Clean.made()).examples[0].keys() - {"input_ids", "id"}
]
FORMS = ("columns", "Dataset", "TokenizedDataset")
IN_TWO_FORMS = [(n, form) for i, n in enumerate(DEFECTS) for form in ("list", FORMS[i % 3])]
SILENT_WITHOUT_TOKENIZER = {"labels_shifted", "no_trained_token", "masks_all_zero", "duplicates"}


def check(report: Any, planted: Planted) -> None:
    """The defect is found in its rows; other errors and warnings are only what follows from it."""
    names = set(planted.name.split(" | "))
    assert names & set(report.names), report
    for finding in report.findings:
        rows = set(np.asarray(finding.rows).tolist())
        if len(rows) == len(planted.examples):
            assert "other rows" not in finding.message, finding.message
        if finding.name in names:
            assert_is_the_defect(finding, rows, planted)
        elif finding.severity != "note":
            assert finding.name in planted.also, finding
            assert planted.rows is None or rows <= set.union(*planted.rows), finding
    serious = {f.name for f in report.findings if f.severity != "note"}
    assert report.ok == (not serious)


def assert_is_the_defect(finding: Any, rows: set[int], planted: Planted) -> None:
    assert finding.severity in ("error", "warning", "note")
    assert finding.severity != "note" or finding.name in MAY_BE_NOTES
    if planted.rows is None:
        return
    assert rows in planted.rows, (sorted(rows), planted.rows)
    assert np.asarray(finding.rows).dtype == np.int64
    assert finding.count > 0
    numbers = re.findall(r"\d+", finding.message.replace(",", ""))
    assert str(finding.count) in numbers, finding.message
    assert finding.example, "an example in words"


def test_every_finding_is_planted() -> None:
    homes = {module.__name__ for module in (planted_rows, planted_tokens, planted_turns)}
    assert homes <= {defect.__module__ for defect in DEFECTS.values()}
    made = {defect(Clean.made()).name for defect in DEFECTS.values()}
    made |= {defect(clean_rollouts()).name for defect in ROLLOUT_DEFECTS.values()}
    made |= {defect(clean_images()).name for defect in IMAGE_DEFECTS.values()}
    assert {name for name in made if "|" not in name} == NAMES
    assert len(DEFECTS) + len(ROLLOUT_DEFECTS) + len(IMAGE_DEFECTS) >= 35


@pytest.mark.parametrize("name", DEFECTS)
def test_damaged_rows_are_damaged(name: str) -> None:
    """The truth is true: each row that is named differs from the clean one, and no other does."""
    clean = Clean.made()
    planted = DEFECTS[name](clean)
    if planted.rows is None:
        assert planted.tokenizer.chat_template != clean.tokenizer.chat_template
        return
    form = next(key for key in planted.examples[0] if key not in ("input_ids", "id"))
    form = "num_actions" if "num_actions" in planted.examples[0] else form
    of_turns = DEFECTS[name].__module__ == planted_turns.__name__
    whole = planted_turns.of_three_turns(clean) if of_turns else clean.examples
    before = [with_target(e, form) for e in whole]
    pairs = enumerate(zip(before, planted.examples, strict=True))
    changed = {i for i, (a, b) in pairs if any(a[key] != b[key] for key in a)}
    assert planted.rows[-1] <= changed
    if name not in ("double_bos_in_some_rows", "pads_before_the_prompt_in_labels"):  # one each
        assert changed <= planted.rows[0]


@pytest.mark.parametrize(("name", "form"), IN_TWO_FORMS)
def test_planted_in_conversations(name: str, form: str) -> None:
    planted = DEFECTS[name](Clean.made())
    data = as_form(planted.examples, form)
    check(audit(data, planted.tokenizer, max_tokens=planted.max_tokens), planted)


@pytest.mark.parametrize("target", ["labels", "assistant_masks", "completion_mask"])
@pytest.mark.parametrize("name", WITH_MASKS)
def test_planted_under_every_form_of_target(name: str, target: str) -> None:
    planted = DEFECTS[name](Clean.made())
    examples = [with_target(e, target) for e in planted.examples]
    report = audit(examples, planted.tokenizer, max_tokens=planted.max_tokens)
    check(report, replace(planted, examples=examples))


@pytest.mark.parametrize("form", ["list", "columns", "Dataset"])
@pytest.mark.parametrize("name", ROLLOUT_DEFECTS)
def test_planted_in_rollouts(name: str, form: str) -> None:
    planted = ROLLOUT_DEFECTS[name](clean_rollouts())
    check(audit(as_form(planted.examples, form), planted.tokenizer), planted)


@pytest.mark.parametrize("name", IMAGE_DEFECTS)
def test_planted_in_images(name: str) -> None:
    planted = IMAGE_DEFECTS[name](clean_images())
    check(audit(planted.examples, planted.tokenizer), planted)


@pytest.mark.parametrize("name", DEFECTS)
def test_found_without_a_tokenizer_where_none_is_needed(name: str) -> None:
    planted = DEFECTS[name](Clean.made())
    if planted.name in SILENT_WITHOUT_TOKENIZER:
        check(audit(planted.examples), planted)
    else:  # not all can be found, but none may raise
        audit(planted.examples, max_tokens=planted.max_tokens)


@pytest.mark.parametrize("name", TRAPS)
def test_traps_stay_silent(name: str) -> None:
    examples, tokenizer = TRAPS[name]()
    for used in (tokenizer, None):
        for max_tokens in (None, 10_000):
            report = audit(examples, used, max_tokens=max_tokens)
            assert report.ok, report.findings
            assert all(f.severity == "note" for f in report.findings), report.findings


@pytest.mark.parametrize("name", PADDED)
def test_padded_data_is_only_called_padded(name: str) -> None:
    """Its supervision is right: pads are not trained, and the end of every answer is."""
    examples, tokenizer = PADDED[name]()
    report = audit(examples, tokenizer, max_tokens=10_000)
    assert {f.name for f in report.findings if f.severity != "note"} <= {"padded_rows"}


def test_clean_images_stay_silent() -> None:
    report = audit(clean_images(), image_processor())
    assert report.ok, report.findings


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


def test_real_conversations_stay_silent(real: Clean) -> None:
    report = audit(real.examples, real.tokenizer, max_tokens=4096)
    assert report.ok, report.findings


def test_ids_of_another_tokenizer(real: Clean) -> None:
    """They are all known to this one, and decode to text that it writes with other ids."""
    rng, rows = np.random.default_rng(0), real.rows()
    examples = [
        e | {"input_ids": rng.integers(1000, 32000, len(e["input_ids"])).tolist()}
        if i in rows
        else e
        for i, e in enumerate(real.examples)
    ]
    found = set(audit(examples, real.tokenizer)["text_garbled"].rows.tolist())
    assert found <= rows
    assert len(found) >= 0.9 * len(rows), "a short row may come back by chance"


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_in_real_conversations(name: str, real: Clean) -> None:
    planted = DEFECTS[name](real)
    check(audit(planted.examples, planted.tokenizer, max_tokens=planted.max_tokens), planted)
