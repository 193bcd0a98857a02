"""Every check of audit by rows written out by hand: what it finds, and when it is silent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reporting.audit_words import BOS, TEMPLATE, chat, rows_like, word_tokenizer
from torch_collate_kit import audit
from torch_collate_kit.reporting import AuditReport, Finding
from torch_collate_kit.reporting.audit.auditing import CHECKS

Row = dict[str, Any]
MASKED = [3, 7, 8, 2, 4, 20, 9, 2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def found(report: AuditReport) -> dict[str, list[int]]:
    """The rows of each error and warning."""
    serious = [f for f in report.findings if f.severity != "note"]
    assert report.ok == (not serious)
    return {finding.name: finding.rows.tolist() for finding in serious}


def with_mask(mask: list[int], ids: list[int] = MASKED) -> Row:
    return {"input_ids": ids, "loss_mask": mask}


def labels_of(row: Row) -> Row:
    pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
    return {"input_ids": row["input_ids"], "labels": [t if m else -100 for t, m in pairs]}


def test_rows_with_nothing_wrong(tokenizer: Any) -> None:
    report = audit(rows_like(), tokenizer, max_tokens=100)
    assert (report.ok, report.findings, report.not_checked) == (True, [], {})
    assert (report.num_rows, report.num_tokens) == (6, 48)


# The rows stand at the end of six clean ones; the name, and which of them.
ONE_ROW: dict[str, tuple[Row, set[str]]] = {
    "all trained": (with_mask([1] * 8), {"masks_all_one"}),
    "all but the first": (with_mask([0] + [1] * 7), {"masks_all_one"}),
    "the question": (with_mask([0, 1, 1, 1, 1, 1, 1, 1, 1], [1, *MASKED]), {"masks_all_one"}),
    "EOS missing": (chat([7], [22, 9], eos=False), {"eos_truncated"}),
    "an empty thought": (chat([7], [5, 6, 22]), {"empty_thinking_trained"}),
    "a full thought": (chat([7], [5, 30, 6, 22]), set()),
    "an empty thought in the prompt": (
        with_mask([0] * 6 + [1, 1], [3, 7, 2, 4, 5, 6, 20, 2]),
        set(),
    ),
    "one token late": (
        with_mask([0, 0, 0, 0, 0, 0, 1, 1, 1], [*MASKED, 9]),
        {"mask_shifted"},
    ),
    "one token early": (
        with_mask([0, 0, 0, 0, 1, 1, 1, 0]),
        {"mask_shifted", "generation_prompt_trained", "eos_not_trained"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_among_clean_ones(name: str, tokenizer: Any) -> None:
    row, names = ONE_ROW[name]
    clean = [chat([10 + i, 8], [25 + i, 9]) for i in range(6)]
    report = audit([*clean, row], tokenizer)
    assert found(report) == {name: [6] for name in names}
    for finding in report.findings:
        if finding.severity != "note":
            assert finding.count == 1
            assert "1 of 7 rows" in finding.message
            assert finding.example.startswith("row 6: ")
            assert "\u27e6" in finding.example


def test_the_example_is_decoded_and_the_place_is_marked(tokenizer: Any) -> None:
    rows = [*rows_like(2), with_mask([0, 0, 0, 0, 1, 1, 1, 1])]
    finding = audit(rows, tokenizer)["generation_prompt_trained"]
    assert finding.example == "row 2: <user> w7 w8 <eos> \u27e6<assistant>\u27e7 w20 w9 <eos>"
    without = audit([*rows_like(2), with_mask([0] * 8)])["no_trained_token"]
    assert without.example == "row 2: \u27e63 7 8 2 4 20 9 2\u27e7"


def test_ends_that_may_be_missing_on_purpose_are_a_warning(tokenizer: Any) -> None:
    texts = [{"input_ids": [7 + i, 8, 9]} for i in range(3)]
    classes = [{"input_ids": [7 + i, 8, 30], "labels": [-100, -100, 30]} for i in range(3)]
    for rows, words in (
        (texts, "in 3 of 3 rows that are trained as a whole, .*unless a text continues"),
        (classes, "in 3 of 3 rows with a single trained token, .*right if the token is a class"),
    ):
        finding = audit(rows, tokenizer)["eos_never_trained"]
        assert finding.severity == "warning"
        assert re.search(words, finding.message)


def test_what_a_terminal_would_obey_is_escaped(tokenizer: Any) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["\x1b[31mred\x07"], special_tokens=True)
    rows = [*rows_like(2), with_mask([0] * 8, [3, 7, 8, 2, 4, 40, 9, 2])]
    text = str(audit(rows, tokenizer))
    assert "\\x1b[31mred\\x07" in text
    assert "\x1b" not in text
    odd = {"messages": [{"role": "\x1b[31m", "content": "w7"}]}
    assert "\x1b" not in str(audit([odd], tokenizer))


def test_the_next_question_ends_an_answer_where_the_template_writes_nothing_else() -> None:
    tokenizer = word_tokenizer(TEMPLATE.replace(" <eos> ", " "))
    rows = [{"input_ids": [3, 7 + i, 4, 20 + i, 3], "loss_mask": [0, 0, 0, 1, 1]} for i in range(4)]
    report = audit(rows, tokenizer)
    assert report.ok, report
    assert "eos_does_not_end_turns" in report.names
    for row in rows:
        row["loss_mask"][-1] = 0
    assert found(audit(rows, tokenizer)) == {"eos_never_trained": [0, 1, 2, 3]}


@pytest.mark.parametrize("wrong", [30, 156, 65436, 4294967196])
def test_labels_of_which_some_are_other_ids(wrong: int) -> None:
    rows = [labels_of(row) for row in rows_like()]
    for i in (1, 4):
        rows[i]["labels"][-2] = wrong
    report = audit(rows)
    assert found(report) == {"labels_not_input_ids": [1, 4]}
    message = report["labels_not_input_ids"].message
    assert message.startswith("2 labels of 2 of 6 rows are other ids")
    assert ("-100 was stored unsigned" in message) == (wrong != 30)


def test_bos_in_some_rows(tokenizer: Any) -> None:
    rows = [
        {"input_ids": [BOS, *r["input_ids"]], "loss_mask": [0, *r["loss_mask"]]}
        for r in rows_like()
    ]
    report = audit([*rows, chat([30], [31])], tokenizer)
    assert report.ok
    assert report["bos_in_some_rows"].rows.tolist() == [6]


def test_a_report_prints_and_is_json(tokenizer: Any) -> None:
    report = audit([*rows_like(2), {**chat([30], [31]), "loss_mask": [0] * 6}], tokenizer)
    assert str(report) == (
        "audit of 3 rows (22 tokens): 1 warning\n\n"
        "warning: no_trained_token\n"
        "  1 of 3 rows have no trained token: they take time and teach nothing; drop them, or "
        "correct their loss target\n"
        "  row 2\n"
        "  row 2: \u27e6<user> w30 <eos> <assistant> w31 <eos>\u27e7\n\n"
        "not checked\n"
        "  without max_tokens=: target_truncated, prompt_longer_than_row"
    )
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["ok"], told["num_rows"], told["num_tokens"]) == (False, 3, 22)
    [finding] = told["findings"]
    assert (finding["name"], finding["severity"], finding["rows"]) == (
        "no_trained_token",
        "warning",
        [2],
    )
    assert finding["count"] == 1
    html = report._repr_html_()
    assert ">no_trained_token</td>" in html
    assert "&lt;user&gt; w30" in html, "what rows hold is escaped"


def test_errors_come_first_and_rows_are_int64(tokenizer: Any) -> None:
    rows = [*rows_like(), *rows_like(1), with_mask([0] * 5 + [1] * 3, [3, 7, 41, 2, 4, 20, 9, 2])]
    report = audit(rows, tokenizer)
    assert report.names == ["id_out_of_vocabulary", "duplicates"]
    assert all(finding.rows.dtype == np.int64 for finding in report.findings)
    with pytest.raises(KeyError, match=r"'pad_trained' was not found; found were \['id_out"):
        report["pad_trained"]


def test_many_rows_are_cut_short_in_print() -> None:
    text = str(Finding("duplicates", "warning", "20 rows", np.arange(20)))
    assert text.endswith("rows 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)")


def test_every_finding_is_on_the_page_with_its_severity() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit_checks.md").read_text(encoding="utf-8")
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = {name.strip("| `"): severity for name, severity, *_ in cells}
    assert listed == {check.name: check.severity for check in CHECKS}
