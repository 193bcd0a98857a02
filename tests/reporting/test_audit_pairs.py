"""Preference pairs, planted with one fault at a time, in lists, columns and Arrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from tests.reporting.audit_words import chat, word_tokenizer
from torch_collate_kit import ChatOptions, TokenizedDataset, audit

Pair = dict[str, Any]


def pairs(number: int = 24) -> list[Pair]:
    """Return clean pairs, in half of which the chosen answer is the longer one."""
    found = []
    for i in range(number):
        answers = [10 + i % 20, 11, 12][: 2 + i % 2], [11, 10 + i % 20, 13][: 3 - i % 2]
        sides = [chat([7 + i % 24, 31 + i // 24], answer) for answer in answers]
        row: Pair = {name: [one[name] for one in sides] for name in sides[0]}
        found.append({**row, "margin": 0.5 + i})
    return found


def planted(*changes: tuple[int, Callable[[Pair], Any]], number: int = 24) -> list[Pair]:
    rows = pairs(number)
    for i, change in changes:
        change(rows[i])
    return rows


def make_equal(row: Pair) -> None:
    for name in ("input_ids", "loss_mask"):
        row[name][1] = list(row[name][0])


def change_prompt(row: Pair) -> None:
    row["input_ids"][1][1] = 19


def train_prompt(row: Pair) -> None:
    row["loss_mask"][0][1:3] = [1, 1]


def train_nothing(row: Pair) -> None:
    row["loss_mask"][1] = [0] * len(row["loss_mask"][1])


FAULTS: dict[str, tuple[list[Pair], dict[str, list[int]]]] = {
    "none": (pairs(), {}),
    "equal": (planted((3, make_equal)), {"equal_sides": [3]}),
    "prompts": (planted((3, change_prompt), (9, change_prompt)), {"two_prompts": [3, 9]}),
    "prompt trained": (planted((5, train_prompt)), {"prompt_trained": [5]}),
    "no target": (planted((6, train_nothing)), {"no_trained_token": [6]}),
    "margin": (planted((7, lambda row: row.update(margin=-0.1))), {"wrong_margin": [7]}),
    "scores": (
        [
            {**row, "score_chosen": 2.0, "score_rejected": 3.0 if i == 8 else 1.0}
            for i, row in enumerate(pairs())
        ],
        {"wrong_margin": [8]},
    ),
    "copies": ([*pairs(), pairs()[2]], {"duplicates": [2, 24]}),
    "longer": (pairs(48)[1::2], {"sides_told_by_length": list(range(24))}),
    "shorter": (pairs(44)[::2], {"sides_told_by_length": list(range(22))}),
    "few": (pairs(20)[1::2], {}),
    "labelled": (
        [{**row, "label": bool(i % 2)} for i, row in enumerate(planted((3, make_equal)))],
        {},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_rows(fault: str) -> None:
    rows, expected = FAULTS[fault]
    tokenizer = word_tokenizer()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    forms = [rows, columns, Dataset.from_list(rows)]
    if fault != "labelled":
        forms.append(TokenizedDataset(rows, columns=list(rows[0])))
    for form in forms:
        report = audit(form, tokenizer)
        found = {f.name: f.rows.tolist() for f in report.findings if f.severity != "note"}
        assert found == expected, fault
        assert report.num_rows == len(rows)
        assert report.num_tokens == sum(len(ids) for row in rows for ids in row["input_ids"])


def test_messages_say_how_many_and_show_an_answer() -> None:
    report = audit(planted((3, make_equal), (4, lambda row: row.update(margin=-1.0))))
    assert report["equal_sides"].message.startswith("1 of 24 rows have the same chosen and")
    assert report["wrong_margin"].example.startswith("row 4, segment 0: ")
    longer = audit(FAULTS["longer"][0])["sides_told_by_length"].message
    assert longer.startswith("24 of 24 rows choose the longer answer")
    assert "choose the shorter" in audit(FAULTS["shorter"][0])["sides_told_by_length"].message


def test_prompts_that_are_trained_are_found_without_a_tokenizer() -> None:
    rows = [{**row, "loss_mask": [[1] * len(ids) for ids in row["input_ids"]]} for row in pairs()]
    assert audit(rows).names == ["shared_prompt_trained"]
    rewards = [{"input_ids": row["input_ids"]} for row in pairs()]
    assert audit(rewards, train_all=True).names == []


def _talk(*answers: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * 2
    return [
        {"role": role, "content": of} for role, of in zip(roles, ("w1 w2", *answers), strict=False)
    ]


RECORDS = [
    {
        "chosen": _talk(f"w{i} w4" + " w5" * (i % 2)),
        "rejected": _talk(f"w5 w{i}" + " w6" * (1 - i % 2)),
    }
    for i in range(7, 31)
]


def test_records_of_pairs_are_tokenized_and_named() -> None:
    tokenizer = word_tokenizer()
    for form in (RECORDS, Dataset.from_list(RECORDS)):
        assert audit(form, tokenizer).names == []
    rows: list[Any] = [{**row, "margin": 1.0} for row in RECORDS]
    rows[2]["rejected"] = rows[2]["chosen"]
    rows[4]["margin"] = -1.0
    rows[6]["rejected"] = _talk()[:1]
    rows[9]["margin"] = float("nan")
    report = audit(rows, tokenizer)
    found = {f.name: f.rows.tolist() for f in report.findings if f.severity != "note"}
    assert found == {
        "equal_sides": [2],
        "wrong_margin": [4],
        "no_trained_token": [6],
        "refused": [9],
    }
    assert report.num_rows == len(rows)
    with pytest.raises(ValueError, match="train_on='each' is not for pairs"):
        audit(rows, tokenizer, chat=ChatOptions(train_on="each"))


def test_labelled_records_have_one_answer_each() -> None:
    rows = [{"prompt": "w7 ", "completion": f"w{i}", "label": i % 2 == 0} for i in range(8, 30)]
    found = audit(rows, word_tokenizer())
    assert not {"equal_sides", "two_prompts", "contradictory_answers"} & set(found.names)
    assert found.num_rows == len(rows)


def test_three_answers_are_no_pairs() -> None:
    rows = [{n: [*v, v[0]] for n, v in row.items() if n != "margin"} for row in pairs()]
    assert audit(rows).names == []
