"""The checks of audit, by rows written out by hand and against plain loops on drawn rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.reporting.clean_data import (
    ASSISTANT,
    BOS,
    EOS,
    PAD,
    TEMPLATE,
    USER,
    as_labels,
    chat,
    rows_like,
    serious,
    word_tokenizer,
)
from tests.strategies import FUZZ
from torch_collate_kit import audit
from torch_collate_kit.reporting import Finding
from torch_collate_kit.reporting.audit.auditing import CHECKS

Row = dict[str, Any]
MASKED = [3, 7, 8, 2, 4, 20, 9, 2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def with_mask(mask: list[int], ids: list[int] = MASKED) -> Row:
    return {"input_ids": ids, "loss_mask": mask}


def test_rows_with_nothing_wrong(tokenizer: Any) -> None:
    report = audit(rows_like(), tokenizer, max_tokens=100)
    assert (report.ok, report.findings, report.not_checked) == (True, [], {})
    assert (report.num_rows, report.num_tokens) == (6, 48)


@pytest.mark.parametrize(
    ("mask", "ids"), [([1] * 8, MASKED), ([0] + [1] * 7, MASKED), ([0] + [1] * 8, [BOS, *MASKED])]
)
def test_one_row_that_trains_all_among_clean_ones(
    mask: list[int], ids: list[int], tokenizer: Any
) -> None:
    clean = [chat([10 + i, 8], [25 + i, 9]) for i in range(6)]
    report = audit([*clean, with_mask(mask, ids)], tokenizer)
    assert serious(report) == {"masks_all_one": [6]}
    finding = report["masks_all_one"]
    assert (finding.count, "1 of 7 rows" in finding.message) == (1, True)
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
    assert serious(rows, tokenizer) == {"eos_never_trained": [0, 1, 2, 3]}


@pytest.mark.parametrize("wrong", [30, 156, 65436, 4294967196])
def test_labels_of_which_some_are_other_ids(wrong: int) -> None:
    rows = [as_labels(row) for row in rows_like()]
    for i in (1, 4):
        rows[i]["labels"][-2] = wrong
    report = audit(rows)
    assert serious(report) == {"labels_not_input_ids": [1, 4]}
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
    shown = tuple(finding[key] for key in ("name", "severity", "rows", "count"))
    assert shown == ("no_trained_token", "warning", [2], 1)
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


TOKENIZERS = {pad: word_tokenizer(pad=pad) for pad in ("<pad>", "<eos>")}
TOKEN = st.sampled_from([PAD, BOS, EOS, EOS, 3, ASSISTANT, 7, 8, 9, 45])


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Short rows of few different tokens, so that all defects are frequent."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        if found and draw(st.integers(0, 4)) == 0:
            found.append(dict(draw(st.sampled_from(found))))
            continue
        ids = draw(st.lists(TOKEN, min_size=1, max_size=10))
        prompt = draw(st.integers(0, len(ids)))
        mask = [0] * prompt + [1] * (len(ids) - prompt)
        if draw(st.booleans()):
            mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        found.append({"input_ids": ids, "loss_mask": mask})
    return found


def trained(row: Row) -> list[int]:
    """Places, without the first token, which nothing predicts."""
    return [i for i, kept in enumerate(row["loss_mask"]) if kept and i > 0]


def trains_header(row: Row) -> bool:
    kept, ids = trained(row), row["input_ids"]
    is_full = len(kept) == len(ids) - 1 > 0
    return not is_full and any(ids[i] == ASSISTANT for i in kept)


def trains_pad(row: Row, pad: int) -> bool:
    ids = row["input_ids"]
    if pad != EOS:
        return any(ids[i] == pad for i in trained(row))
    first = len(ids)
    while first > 0 and ids[first - 1] == pad:
        first -= 1
    return any(i > first for i in trained(row))


def is_padded(row: Row, pad: int) -> bool:
    ids, kept = row["input_ids"], trained(row)
    if len(ids) < 3:
        return False
    return (ids[:2] == [pad, pad] and 1 not in kept) or (
        ids[-2:] == [pad, pad] and len(ids) - 1 not in kept
    )


def ends_question(ids: list[int], i: int) -> bool:
    """Whether the last header, or end, before the end at ``i`` is the header of the user."""
    return next((t for t in reversed(ids[:i]) if t in (USER, ASSISTANT, EOS)), None) == USER


def misses_end(row: Row) -> bool:
    ids, kept = row["input_ids"], trained(row)
    return any(
        ids[i] == EOS and ids[i - 1] != EOS and i - 1 in kept and i not in kept
        for i in range(1, len(ids))
        if not ends_question(ids, i)
    )


def cut_of(row: Row, limit: int) -> str | None:
    """What is lost of the target, by the name of its finding."""
    kept = trained(row)
    if not kept or len(row["input_ids"]) <= limit or kept[-1] < limit:
        return None
    return "prompt_longer_than_row" if kept[0] >= limit else "target_truncated"


def expected(data: list[Row], pad: int, limit: int) -> dict[str, list[int]]:
    """Rows by finding, for the checks that look at one row at a time."""
    some = any(map(trained, data))
    by_row: dict[str, Any] = {
        "no_trained_token": lambda row: some and not trained(row),
        "masks_all_zero": lambda row: not some,
        "generation_prompt_trained": trains_header,
        "double_bos": lambda row: row["input_ids"][:2] == [BOS, BOS],
        "id_out_of_vocabulary": lambda row: max(row["input_ids"]) >= 40,
        "pad_trained": lambda row: trains_pad(row, pad),
        "padded_rows": lambda row: is_padded(row, pad),
        "target_truncated": lambda row: cut_of(row, limit) == "target_truncated",
        "prompt_longer_than_row": lambda row: cut_of(row, limit) == "prompt_longer_than_row",
        "duplicates": lambda row: sum(row["input_ids"] == o["input_ids"] for o in data) > 1,
    }
    any_end = any(row["input_ids"][i] == EOS for row in data for i in trained(row))
    by_row["eos_masked_as_pad"] = lambda row: pad == EOS and misses_end(row)
    by_row["eos_not_trained"] = lambda row: pad != EOS and any_end and misses_end(row)
    by_row["eos_never_trained"] = lambda row: not any_end and bool(trained(row))
    return {name: [i for i, row in enumerate(data) if of(row)] for name, of in by_row.items()}


@given(rows(), st.sampled_from(["<pad>", "<eos>"]), st.integers(1, 9), st.booleans())
@settings(FUZZ)
def test_rows_are_those_that_a_loop_finds(
    data: list[Row], pad: str, limit: int, in_labels: bool
) -> None:
    tokenizer, pad_id = TOKENIZERS[pad], PAD if pad == "<pad>" else EOS
    examples = [as_labels(row) for row in data] if in_labels else data
    report = audit(examples, tokenizer, max_tokens=limit)
    truth = expected(data, pad_id, limit)
    found = {f.name: f.rows.tolist() for f in report.findings}
    shifted = found.get("mask_shifted", [])  # whose ends are not named again
    for of in (truth, found):
        for name in of.keys() & {"eos_masked_as_pad", "eos_not_trained", "eos_never_trained"}:
            of[name] = [row for row in of[name] if row not in shifted]
    assert {name: found.get(name, []) for name in truth} == truth
    for finding in report.findings:
        if finding.count:
            assert finding.example.startswith(f"row {finding.rows[0]}: "), finding
