"""Checks of rollouts: rewards of a prompt, and log-probabilities one column off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reporting.audit_words import EOS, word_tokenizer
from torch_collate_kit import audit

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
    logprobs = rollout["logprobs"]
    return rollout | {"logprobs": [0.0, *logprobs[:-1]] if by == 1 else [*logprobs[1:], 0.0]}


def serious(rollouts: list[Rollout]) -> dict[str, list[int]]:
    report = audit(rollouts, word_tokenizer())
    return {f.name: f.rows.tolist() for f in report.findings if f.severity != "note"}


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5, 6, 7], [1, 4, 6], [2, 5]])
def test_zeros_of_a_tool_one_column_off(by: int, rows: list[int]) -> None:
    rollouts = [rollout(i) for i in range(8)]
    assert serious(rollouts) == {}
    rollouts = [moved(r, by) if i in rows else r for i, r in enumerate(rollouts)]
    assert serious(rollouts) == {"logprobs_shifted": rows}
    finding = audit(rollouts, word_tokenizer())["logprobs_shifted"]
    assert f"each value is of the token {'before' if by == 1 else 'after'} it" in finding.message
    assert finding.example.startswith(f"row {rows[0]}: ")


def test_a_stop_token_that_is_not_trained_is_no_shift() -> None:
    """Weight 0 from the EOS of the call on, whose value is real; some tokens are certain."""
    rollouts = [rollout(i, tool=3) for i in range(12)]
    for i, r in enumerate(rollouts):
        r["logprobs"][2] = -0.4
        r["logprobs"][5] = 0.0 if i % 2 else -0.3
    assert serious(rollouts) == {}


@pytest.mark.parametrize("by", [1, -1])
def test_the_zero_that_fills_up_where_there_is_no_tool(by: int) -> None:
    rollouts = [rollout(i, tool=0) for i in range(8)]
    for i, r in enumerate(rollouts):
        r["response_ids"].append(31 + i)  # answers that were stopped: each ends in its own way
        r["loss_mask"].append(1)
        r["logprobs"].append(-0.2)
    assert serious(rollouts) == {}
    assert serious([moved(r, by) for r in rollouts]) == {"logprobs_shifted": list(range(8))}
    assert serious([moved(r, by) for r in rollouts[:3]]) == {}, "three rows are too few"


def test_groups_of_one_reward() -> None:
    rollouts = [rollout(i) for i in range(40)]
    for i in range(8):
        rollouts[i]["rewards"] = float(i < 4)
    report = audit(rollouts, word_tokenizer())
    assert report.ok, "two of ten groups are no alarm"
    finding = report["reward_without_variance"]
    assert finding.rows.tolist() == list(range(8))
    assert "in 2 of 10 groups (20%), which are 8 of 40 rows" in finding.message
    assert "1 have the highest of the dataset, 1 have the lowest" in finding.message
    for r in rollouts[8:]:
        r["rewards"] = 0.0
    assert serious(rollouts) == {"reward_without_variance": list(range(40))}


def test_uids_that_hide_a_group_and_uids_that_mix_prompts() -> None:
    rollouts = [rollout(i) for i in range(16)]
    for uids, found in (
        (range(16), {"uid_without_group": list(range(16))}),
        ([*range(4, 6), *[0] * 2, *[i // 4 + 9 for i in range(12)]], {"uid_without_group": [0, 1]}),
        ([0] * 16, {"uid_of_several_prompts": list(range(16))}),
        ([i // 4 if i != 5 else 3 for i in range(16)], {"uid_of_several_prompts": [5]}),
    ):
        data = [r | {"uid": f"task {uid}"} for r, uid in zip(rollouts, uids, strict=True)]
        assert serious(data) == found


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
