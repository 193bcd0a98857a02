"""Real rollouts through collation, boundaries, advantages and staging, with a real tokenizer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_checks import assert_equals_oracle
from tests.oracle import packed_rollouts, rollout_batch
from torch_collate_kit import PackedCollator, RolloutCollator, rl
from torch_collate_kit.errors import DataError

TOKENIZER = "tokenizers/mistral-32k-chatml"
Rollouts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def encode(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / TOKENIZER)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def records(path: Path, count: int) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


@pytest.fixture(scope="module")
def gsm8k(shared_data: Path, encode: Any) -> Rollouts:
    """Four solutions a prompt, of every third prompt three, of every seventh one."""
    rollouts = []
    found = records(shared_data / "gsm8k_rollouts_300x4.jsonl", 60)
    for i, record in enumerate(found):
        text = record["prompt"][0]["content"]
        prompt = encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        kept = 1 if i % 7 == 6 else 3 if i % 3 == 2 else 4
        for text, reward in list(zip(record["responses"], record["rewards"], strict=True))[:kept]:
            response = encode(f"{text}<|im_end|>")
            rollouts.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": response,
                    "rewards": reward,
                    "loss_mask": [1] * len(response),
                    "logprobs": np.linspace(-2, -0.1, len(response), dtype=np.float32).tolist(),
                    "uid": record["id"],
                }
            )
    return rollouts


@pytest.fixture(scope="module")
def tau_bench(shared_data: Path, encode: Any) -> Rollouts:
    """A step for every turn of the agent: 4 tasks, 4 trials each, and a reward at their ends."""
    steps = []
    for record in records(shared_data / "chat_tools_tau_airline_128.jsonl", 16):
        ids: list[int] = []
        turns = []
        for message in record["messages"]:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            header = encode(f"<|im_start|>{message['role']}\n")
            body = encode(f"{message.get('content') or ''}{calls}<|im_end|>")
            if message["role"] == "assistant":
                turns.append({"prompt_ids": ids + header, "response_ids": body})
            ids = ids + header + body + encode("\n")
        for turn in turns:
            is_last = turn is turns[-1]
            turn["rewards"] = record["reward"] if is_last else 0.0
            turn["loss_mask"] = [1] * len(turn["response_ids"])
            turn |= {"uid": record["task_id"], "is_last_step": is_last}
        steps += turns
    return steps


def test_gsm8k_rollouts_are_collated_as_the_oracle_does(gsm8k: Rollouts) -> None:
    assert_equals_oracle(RolloutCollator(0)(gsm8k), rollout_batch(gsm8k, pad_token_id=0))
    collate = PackedCollator(0, max_tokens=1024)
    plan = collate.plan([len(r["prompt_ids"]) + len(r["response_ids"]) for r in gsm8k])
    expected = packed_rollouts(gsm8k, plan, pad_token_id=0, max_tokens=1024)
    assert_equals_oracle(collate(gsm8k), expected)


def test_gsm8k_advantages_compare_the_solutions_of_a_prompt(gsm8k: Rollouts) -> None:
    batch = RolloutCollator(0)(gsm8k)
    uids = batch.row_metadata["uids"]
    values = batch["rewards"], batch["response_mask"], uids
    with pytest.raises(DataError, match=r"has only one score .* filter such rows out"):
        rl.compute_advantages(*values, estimator="grpo")
    advantages = rl.compute_advantages(*values, estimator="grpo", group_of_one="zero")
    by_prompt: dict[str, list[float]] = {}
    for rollout in gsm8k:
        by_prompt.setdefault(rollout["uid"], []).append(rollout["rewards"])
    assert {len(rewards) for rewards in by_prompt.values()} == {1, 3, 4}
    for row, rollout in enumerate(gsm8k):
        group = by_prompt[rollout["uid"]]
        spread = stdev(group) if len(group) > 1 else 0.0
        expected = (rollout["rewards"] - mean(group)) / (spread + 1e-6)
        num_tokens = len(rollout["response_ids"])
        assert advantages[row, -num_tokens:].tolist() == pytest.approx([expected] * num_tokens)
        assert not advantages[row, :-num_tokens].any()


@pytest.mark.parametrize("name", ["gsm8k", "tau_bench"])
def test_prompts_stay_together_and_no_row_is_lost(name: str, request: Any) -> None:
    rollouts: Rollouts = request.getfixturevalue(name)
    batch = RolloutCollator(0)(rollouts)
    uids = batch.row_metadata["uids"]
    prompts = rl.prompt_boundaries(uids)
    per_mini_batch = {"gsm8k": 10, "tau_bench": 2}[name]
    boundaries = rl.mini_batch_boundaries(uids, per_mini_batch)
    assert len(boundaries) - 1 == (len(prompts) - 1) // per_mini_batch  # whatever the turns
    assert len(set(np.diff(prompts))) > 1
    for start, stop in pairwise(boundaries):
        assert len(set(uids[start:stop])) == per_mini_batch
    staged = rl.stage_mini_batches(batch, boundaries, dp_size=4, balance="tokens")
    rows = [part.row_metadata["row_indices"] for ranks in staged for part in ranks]
    assert sorted(row for part in rows for row in part if row >= 0) == list(range(len(batch)))
    for ranks, (start, stop) in zip(staged, pairwise(boundaries), strict=True):
        tokens = [int(part["attention_mask"][part["response_mask"].any(1)].sum()) for part in ranks]
        assert sum(tokens) == int(batch["attention_mask"][start:stop].sum())
        assert max(tokens) - min(tokens) < batch["input_ids"].shape[1]
    outputs = [[part["input_ids"] for part in ranks] for ranks in staged]
    assert torch.equal(rl.unstage(staged, outputs), batch["input_ids"])


def test_every_turn_of_a_tau_bench_trial_gets_its_outcome(tau_bench: Rollouts) -> None:
    batch = RolloutCollator(0)(tau_bench)
    mask, is_last = batch["response_mask"], batch.row_metadata["is_last_step"]
    advantages = rl.compute_advantages(
        batch["rewards"],
        mask,
        batch.row_metadata["uids"],
        estimator="grpo_no_std",
        is_last_step=is_last,
    )
    outcomes: dict[int, list[float]] = {}
    for step in tau_bench:
        if step["is_last_step"]:
            outcomes.setdefault(step["uid"], []).append(step["rewards"])
    assert {len(rewards) for rewards in outcomes.values()} == {4}
    assert len(tau_bench) > 4 * sum(map(len, outcomes.values()))  # many turns
    trial = dict.fromkeys(outcomes, 0)
    for row, step in enumerate(tau_bench):
        group = outcomes[step["uid"]]
        expected = group[trial[step["uid"]]] - mean(group)
        found = advantages[row][mask[row] == 1]
        assert found.tolist() == pytest.approx([expected] * len(step["response_ids"]))
        assert not advantages[row][mask[row] == 0].any()
        trial[step["uid"]] += step["is_last_step"]
    assert (advantages != 0).any()


def test_the_turns_of_a_tau_bench_trial_merge_into_one_rollout(tau_bench: Rollouts) -> None:
    merged = rl.merge_steps(tau_bench)
    assert len(merged) == sum(step["is_last_step"] for step in tau_bench) == 16
    for name in ("rewards", "loss_mask"):
        assert sum(np.sum(rollout[name]) for rollout in merged) == sum(
            np.sum(step[name]) for step in tau_bench
        )
    last = [step for step in tau_bench if step["is_last_step"]]
    for rollout, step in zip(merged, last, strict=True):
        tokens = [*rollout["prompt_ids"], *rollout["response_ids"]]
        assert tokens == [*step["prompt_ids"], *step["response_ids"]]
    one, apart = (RolloutCollator(0)(rollouts) for rollouts in (merged, tau_bench))
    assert one.metadata["num_loss_tokens"] == apart.metadata["num_loss_tokens"]
    assert one.metadata["num_tokens"] < apart.metadata["num_tokens"] / 4
