"""Rows against each other: preference pairs, and rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from tests.reporting.clean_data import EOS, chat, serious, word_tokenizer
from tests.reporting.planted import shifted
from torch_collate_kit import ChatOptions, TokenizedDataset, audit

WORDS = word_tokenizer()
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


def put(name: str, side: int, start: int, *values: int) -> Callable[[Pair], Any]:
    return lambda row: row[name][side].__setitem__(slice(start, start + len(values)), values)


FAULTS: dict[str, tuple[list[Pair], dict[str, list[int]]]] = {
    "none": (pairs(), {}),
    "equal": (planted((3, make_equal)), {"equal_sides": [3]}),
    "prompts": (
        planted(*((i, put("input_ids", 1, 1, 19)) for i in (3, 9))),
        {"two_prompts": [3, 9]},
    ),
    "prompt trained": (planted((5, put("loss_mask", 0, 1, 1, 1))), {"prompt_trained": [5]}),
    "no target": (planted((6, put("loss_mask", 1, 0, *[0] * 9))), {"no_trained_token": [6]}),
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
    "three answers": (
        [{n: [*v, v[0]] for n, v in row.items() if n != "margin"} for row in pairs()], {}
    ),
    "labelled": (
        [{**row, "label": bool(i % 2)} for i, row in enumerate(planted((3, make_equal)))],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_rows(fault: str) -> None:
    rows, expected = FAULTS[fault]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    forms = [rows, columns, Dataset.from_list(rows)]
    if fault != "labelled":
        forms.append(TokenizedDataset(rows, columns=list(rows[0])))
    for form in forms:
        report = audit(form, WORDS)
        assert serious(report) == expected, fault
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
    for form in (RECORDS, Dataset.from_list(RECORDS)):
        assert audit(form, WORDS).names == []
    rows: list[Any] = [{**row, "margin": 1.0} for row in RECORDS]
    rows[2]["rejected"] = rows[2]["chosen"]
    rows[4]["margin"] = -1.0
    rows[6]["rejected"] = _talk()[:1]
    rows[9]["margin"] = float("nan")
    report = audit(rows, WORDS)
    assert serious(report) == {
        "equal_sides": [2],
        "wrong_margin": [4],
        "no_trained_token": [6],
        "refused": [9],
    }
    assert report.num_rows == len(rows)
    with pytest.raises(ValueError, match="train_on='each' is not for pairs"):
        audit(rows, WORDS, chat=ChatOptions(train_on="each"))


def test_labelled_records_have_one_answer_each() -> None:
    rows = [{"prompt": "w7 ", "completion": f"w{i}", "label": i % 2 == 0} for i in range(8, 30)]
    found = audit(rows, WORDS)
    assert not {"equal_sides", "two_prompts", "contradictory_answers"} & set(found.names)
    assert found.num_rows == len(rows)


Rollout = dict[str, Any]


def rollout(i: int, *, tool: int = 2, group: int | None = None) -> Rollout:
    """A call, ``tool`` tokens of a tool, and an answer; logprobs are 0.0 for the tool alone."""
    mask = [1, 1, *[0] * tool, 1, 1, 1]
    values = [-0.1 * (1 + (i + j) % 7) for j in range(len(mask))]
    return {
        "prompt_ids": [3, 7 + i // 4, 2, 4],
        "response_ids": [20 + i % 4, 9, *[30] * tool, 8 + i % 5, 21 + i % 4, EOS],
        "rewards": float(i % 2),
        "loss_mask": mask,
        "logprobs": [v * m for v, m in zip(values, mask, strict=True)],
        "uid": f"task {i // 4 if group is None else group}",
    }


def moved(rollout: Rollout, by: int) -> Rollout:
    return rollout | {"logprobs": shifted(rollout["logprobs"], by, 0.0)}


def test_a_stop_token_that_is_not_trained_is_no_shift() -> None:
    """Weight 0 from the EOS of the call on, whose value is real; some tokens are certain."""
    rollouts = [rollout(i, tool=3) for i in range(12)]
    for i, r in enumerate(rollouts):
        r["logprobs"][2] = -0.4
        r["logprobs"][5] = 0.0 if i % 2 else -0.3
    assert serious(rollouts, WORDS) == {}


@pytest.mark.parametrize("by", [1, -1])
def test_the_zero_that_fills_up_where_there_is_no_tool(by: int) -> None:
    rollouts = [rollout(i, tool=0) for i in range(8)]
    for i, r in enumerate(rollouts):
        r["response_ids"].append(31 + i)  # answers that were stopped: each ends in its own way
        r["loss_mask"].append(1)
        r["logprobs"].append(-0.2)
    assert serious(rollouts, WORDS) == {}
    report = audit([moved(r, by) for r in rollouts], WORDS)
    assert serious(report) == {"logprobs_shifted": list(range(8))}
    token = "before" if by == 1 else "after"
    assert f"value is of the token {token} it" in report["logprobs_shifted"].message
    assert serious([moved(r, by) for r in rollouts[:3]], WORDS) == {}, "three rows are too few"


def test_groups_of_one_reward() -> None:
    rollouts = [rollout(i) for i in range(40)]
    for i in range(8):
        rollouts[i]["rewards"] = float(i < 4)
    report = audit(rollouts, WORDS)
    assert report.ok, "two of ten groups are no alarm"
    finding = report["reward_without_variance"]
    assert finding.rows.tolist() == list(range(8))
    assert "in 2 of 10 groups (20%), which are 8 of 40 rows" in finding.message
    assert "1 have the highest of the dataset, 1 have the lowest" in finding.message
    for r in rollouts[8:]:
        r["rewards"] = 0.0
    assert serious(rollouts, WORDS) == {"reward_without_variance": list(range(40))}
    for r in rollouts:
        r["rewards"] = 1.0
    for rows, words in ((rollouts, "in 10 of 10 groups"), (rollouts[:4], "in 1 of 1 group (")):
        message = audit(rows, WORDS)["reward_without_variance"].message
        assert words in message
        assert "(as all of the dataset)" in message, "it is the highest and the lowest"


def test_uids_that_hide_a_group_and_uids_that_mix_prompts() -> None:
    rollouts = [rollout(i) for i in range(16)]
    for uids, found in (
        (range(16), {"uid_without_group": list(range(16))}),
        ([*range(4, 6), *[0] * 2, *[i // 4 + 9 for i in range(12)]], {"uid_without_group": [0, 1]}),
        ([0] * 16, {"uid_of_several_prompts": list(range(16))}),
        ([i // 4 if i != 5 else 3 for i in range(16)], {"uid_of_several_prompts": [5]}),
    ):
        data = [r | {"uid": f"task {uid}"} for r, uid in zip(rollouts, uids, strict=True)]
        assert serious(data, WORDS) == found


def test_the_last_step_of_a_trajectory_has_its_reward() -> None:
    steps = []
    for i in range(8):
        for step in range(2):
            row = rollout(i, group=i // 4)
            row["rewards"] = float(i % 2) if step else 0.0
            steps.append(row | {"is_last_step": bool(step)})
    assert "reward_without_variance" not in audit(steps).names
    for row in steps:
        row["rewards"] = 0.5 * row["is_last_step"]
    finding = audit(steps)["reward_without_variance"]
    assert finding.rows.tolist() == list(range(1, 16, 2))
