"""Trajectories whose histories are rewritten: rollouts of several segments, and their trees."""

from __future__ import annotations

import logging
import os
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.oracle import trie
from tests.rl import oracle_rl as oracle
from tests.tiny_models import VOCAB
from tests.tree_samples import exact_model, inputs_of
from torch_collate_kit import (
    Batch,
    PackedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    RolloutCollator,
    audit,
    packing_report,
    rl,
    token_logps,
    unpack,
)
from torch_collate_kit.batch.unpacking import shares_prefixes
from torch_collate_kit.errors import DataError
from torch_collate_kit.losses import global_num_examples, trained_values

CASES = 500 if "ALL_CASES" in os.environ else 16
FIELDS = {
    "margins": PerResponseToken(torch.float32, pad=-1.0, shape=(2,)),
    "message_numbers": PerToken(torch.int16),
    "difficulty": PerExample(torch.float64),
}
STEP = {"uid": "a", "is_last_step": True, "prompt_ids": [1], "response_ids": [2, 3]}
STEP |= {"loss_mask": [1, 1], "rewards": 1.0}
IMAGE = {"pixel_values": np.ones((4, 2)), "image_grid_thw": np.array([[1, 2, 2]])}
OF_SEGMENTS = ("prompt_ids", "response_ids", "loss_mask", "rewards", "logprobs")


def trajectory(rng: np.random.Generator, uid: str, number: int, most: int = 7) -> list[dict]:
    """Steps of some agents in turn: each goes on from a history, its own or rewritten."""
    vocabulary = int(rng.integers(2, VOCAB - 2))

    def drawn(count: int) -> list[int]:
        return rng.integers(1, vocabulary + 1, count).tolist()

    start = drawn(rng.integers(1, 5))
    histories, steps = [start, start[:1] + drawn(2)][: rng.integers(1, 3)], []
    for step in range(count := int(rng.integers(1, most + 1))):
        agent = int(rng.integers(len(histories)))
        prompt = histories[agent] + drawn(rng.integers(0, 3))
        if rng.random() < 0.3:  # a token is another one, or gone, or all that follows is
            place, kind = int(rng.integers(len(prompt))), rng.integers(3)
            rest = [prompt[place + 1 :], [*drawn(1), *prompt[place + 1 :]], []][kind]
            prompt = prompt[:place] + rest or prompt
        response = drawn(n := int(rng.integers(1, 5)))
        if steps and rng.random() < 0.1:
            prompt, response = steps[-1]["prompt_ids"], steps[-1]["response_ids"]
            n = len(response)
        histories[agent] = prompt + response
        if rng.random() < 0.1:
            histories.append(prompt)  # sampled once more
        total = len(prompt) + n
        step_of = {"uid": uid, "trajectory_id": number, "is_last_step": step == count - 1}
        parts = {"prompt_ids": prompt, "response_ids": response}
        weights = (rng.random(n) < 0.8) * rng.integers(1, 3, n)
        values = {
            "loss_mask": weights.astype(float).tolist(),
            "rewards": [*[0.0] * (n - 1), float(rng.integers(3))],
            "logprobs": (-rng.integers(1, 99, n) / 32).tolist(),
            "margins": [[float(len(steps)), float(i)] for i in range(n)],
            "message_numbers": [len(steps)] * total,
        }
        steps.append({**step_of, **parts, **values, "difficulty": float(step)})
    return steps


def drawn_steps(seed: int, most: int = 7) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    counts = {uid: int(rng.integers(1, 4)) for uid in "ab"}
    pairs = [(uid, number) for uid, count in counts.items() for number in range(count)]
    return [step for uid, number in pairs for step in trajectory(rng, uid, number, most)]


def tokens_of(step: dict[str, Any]) -> list[int]:
    return step["prompt_ids"] + step["response_ids"]


def of_trajectories(steps: list[dict]) -> list[list[dict]]:
    found: list[list[dict]] = [[]]
    for step in steps:
        found[-1].append(step)
        if step["is_last_step"]:
            found.append([])
    return found[:-1]


def lists(value: Any) -> Any:
    if isinstance(value, list):
        return [lists(entry) for entry in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_routes_of_branches(caplog: pytest.LogCaptureFixture) -> None:
    """Of a step's last token that of the step that read it, in the branch that goes on there."""
    one = {"uid": "a", "loss_mask": [1], "rewards": 1.0}
    tokens = [([1, 2], 3), ([1, 9], 4), ([1, 2, 3, 5], 6)]
    steps = []
    for number, (prompt, response) in enumerate(tokens):
        routes = [[[10 * number + t, 9]] for t in range(len(prompt))] + [[[0, 1]]]
        parts = {"prompt_ids": prompt, "response_ids": [response], "is_last_step": number == 2}
        steps.append({**one, **parts, "rollout_expert_indices": routes})
    with caplog.at_level(logging.INFO, "torch_collate_kit.rl"):
        [rollout] = rl.merge_steps(steps, rewritten="branch")
    assert rollout["prompt_ids"] == [[1, 2], [1, 9]]
    first, second = lists(rollout["rollout_expert_indices"])
    assert [r[0][0] for r in first] == [0, 1, 22, 23, 0]
    assert [r[0][0] for r in second] == [10, 11, 0]
    assert caplog.messages == ["break rate 50.0%: 1 of 2 later steps continue no other"]
    batch = RolloutCollator(0)([rollout])
    assert batch["rollout_expert_indices"].shape == (2, 5, 1, 2)
    assert rl.merge_steps([], rewritten="branch") == []


@pytest.mark.parametrize("given", ["list", "ndarray", "tensor", "columns"])
def test_forms_of_segments(given: str) -> None:
    """A reward of a rollout is that of its last token, an advantage that of all, others by form."""
    form = {"ndarray": np.array, "tensor": torch.tensor}.get(given, list)
    rollout = {
        "prompt_ids": [form([1, 2]), form([1])],
        "response_ids": [form([3]), form([4, 5])],
        "loss_mask": [form([1]), form([0, 1])],
        "uid": "a",
        "weight": 2.0,
    }
    forms: list[tuple[Any, list, Any, list]] = [
        (3.0, [[0, 0], [0, 3]], 0.5, [[0, 0.5], [0.5, 0.5]]),
        ([1.0, 3.0], [[0, 1], [0, 3]], [0.5, 2.0], [[0, 0.5], [2, 2]]),
        (
            [form([1.0]), form([2.0, 3.0])],
            [[0, 1], [2, 3]],
            [1, form([2.0, 3.0])],
            [[0, 1], [2, 3]],
        ),
    ]
    for rewards, wanted, advantages, of_all in forms:
        examples: Any = [{**rollout, "rewards": rewards, "advantages": advantages}]
        if given == "columns":
            examples = {key: [value] for key, value in examples[0].items()}
        batch = RolloutCollator(0)(examples)
        assert batch["rewards"].tolist() == wanted
        assert batch["advantages"].tolist() == of_all
        assert batch["loss_mask"].tolist() == [[0, 2], [0, 2]]
        assert batch.row_metadata["is_last_step"] == [False, True]
    later = {**examples[0], "is_last_step": False} if given != "columns" else None
    if later:
        last = RolloutCollator(0)([later, {**later, "is_last_step": True}])
        assert last.row_metadata["is_last_step"] == [False, False, False, True]


def test_tables_audits_and_reports_read_segments() -> None:
    """An Arrow table is the same batch; an audit sums rewards, a report counts all tokens."""
    whole = {"uid": "a", "prompt_ids": [[1, 2], [1]], "response_ids": [[3], [4, 5]]}
    whole |= {"loss_mask": [[1], [0, 1]]}
    examples = [{**whole, "rewards": rewards} for rewards in ([[1.0], [0, 0]], [[0.0], [0, 1]])]
    examples[1]["response_ids"] = [[6], [4, 7]]
    table = datasets.Dataset.from_list(examples)
    for form in (table[:], table.with_format("arrow")[:]):
        assert RolloutCollator(0)(form) == RolloutCollator(0)(examples)
    assert audit(examples).names == ["reward_without_variance"]
    examples[1]["rewards"] = [[0.0], [0, 2]]
    assert audit(examples).names == []
    data = packing_report(examples, max_tokens=16)["data"]
    assert (data["num_tokens"], data["num_segments"]) == (12, 4)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"rewritten": "tree"}, ValueError, "rewritten must be one of 'split', 'branch'"),
        ({}, {"fields": ["a"]}, TypeError, "fields must map names to PerToken"),
        ({}, {"fields": {"num_steps": PerToken(torch.int8)}}, ValueError, "'num_steps', which the"),
        ({}, {"fields": {"a": PerToken(torch.int8)}}, DataError, "example 0 has no a, which"),
        (IMAGE, {"rewritten": "branch"}, DataError, "example 0 has images, and .*'split'"),
        ({"a": [1, 2]}, {"fields": {"a": PerToken(torch.int8)}}, DataError, "a has 2 entries, the"),
        (
            {"prompt_ids": [[1]], "response_ids": [[2, 3]], "loss_mask": [[1, 1]]},
            {},
            DataError,
            "example 0 is a list of segments, as merge_steps returns; give its steps",
        ),
    ],
)
def test_what_is_not_merged(
    changes: dict, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rl.merge_steps([{**STEP, **changes}], **options)


def test_boundaries_do_not_divide_a_rollout() -> None:
    rollouts = [{**STEP, **{k: [STEP[k]] * 2 for k in ("prompt_ids", "response_ids", "loss_mask")}}]
    batch = RolloutCollator(0)(rollouts * 2)
    with pytest.raises(ValueError, match="the rows of example 0, one for each of its 2 segments,"):
        rl.stage_mini_batches(batch, [0, 1, 4], dp_size=1)


def test_ranks_are_even_in_tokens_of_all_segments() -> None:
    """The first segments alone are even if the rollouts are divided otherwise."""
    rollouts = []
    for lengths in ((14, 32), (3, 39), (11, 4), (6, 5)):
        parts = {"prompt_ids": [[1], [1]], "response_ids": [[2] * (n - 1) for n in lengths]}
        masks = [[1] * (n - 1) for n in lengths]
        rollouts.append({**STEP, **parts, "loss_mask": masks})
    [ranks] = rl.stage_mini_batches(RolloutCollator(0)(rollouts), [0, 8], 2, balance="tokens")
    owners = [{*part.row_metadata["example_indices"].values.tolist()} for part in ranks]
    assert sorted(owners, key=min) == [{0, 3}, {1, 2}]


@pytest.mark.parametrize("seed", range(CASES))
def test_branches_against_the_oracle(seed: int) -> None:
    steps = drawn_steps(seed)
    found = rl.merge_steps(steps, rewritten="branch", fields=FIELDS)
    keys = ("loss_mask", "logprobs", "rewards", "margins")
    expected = oracle.branched(steps, keys)
    for rollout, branches, own in zip(found, expected, of_trajectories(steps), strict=True):
        assert rollout["num_steps"] == len(own)
        assert [rollout[key] for key in ("uid", "trajectory_id", "is_last_step", "difficulty")] == [
            own[-1][key] for key in ("uid", "trajectory_id", "is_last_step", "difficulty")
        ]
        for key in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "rewards"):
            assert lists(rollout[key]) == [branch[key] for branch in branches]
        wanted = [[[-1.0, -1.0] if v == 0 else v for v in b["margins"]] for b in branches]
        assert lists(rollout["margins"]) == wanted
        for numbers, branch in zip(lists(rollout["message_numbers"]), branches, strict=True):
            of_steps = [steps[i] for i in branch["steps"]]
            first = [0, *(len(tokens_of(step)) for step in of_steps)]
            assert numbers == [
                n
                for step, begin in zip(of_steps, first, strict=False)
                for n in step["message_numbers"][begin:]
            ]


def trained(ids: list[int], num_prompt: int, mask: Any, logprobs: Any) -> list[tuple]:
    """What each trained token is trained on: all that it follows, itself, weight and log-prob."""
    pairs = enumerate(zip(mask, logprobs, strict=True), num_prompt)
    return [(tuple(ids[: t + 1]), w, lp) for t, (w, lp) in pairs if w]


@pytest.mark.parametrize("seed", range(CASES))
def test_laws_of_branches(seed: int) -> None:
    """Every loss token once, with its log-prob; cells are the nodes of the trie of all steps."""
    steps = drawn_steps(seed + 10**6)
    rollouts = rl.merge_steps(steps, rewritten="branch")
    cells = 0
    for rollout, own in zip(rollouts, of_trajectories(steps), strict=True):
        rows = zip(*(lists(rollout[key]) for key in OF_SEGMENTS), strict=True)
        after = [trained(p + r, len(p), m, lp) for p, r, m, _, lp in rows]
        before = [
            trained(tokens_of(s), len(s["prompt_ids"]), s["loss_mask"], s["logprobs"]) for s in own
        ]
        assert sorted(chain(*after)) == sorted(chain(*before))
        assert sum(map(np.sum, rollout["rewards"])) == sum(sum(step["rewards"]) for step in own)
        cells += trie([tokens_of(step) for step in own])[3]
    tree = PackedCollator(0, max_tokens=4096, share_prefixes=True)(rollouts)
    assert tree.metadata["step_num_filled_cells"] == cells
    padded = RolloutCollator(0)(rollouts)
    assert padded.metadata["num_loss_tokens"] == tree.metadata["num_loss_tokens"]
    assert global_num_examples(padded) == len(rollouts)
    split = rl.merge_steps(steps)
    for found, expected in zip(split, oracle.merged(steps), strict=True):
        assert all(lists(found[key]) == expected[key] for key in OF_SEGMENTS)


def flat(rollouts: list[dict]) -> list[dict]:
    """A rollout per segment."""
    return [
        {
            **{k: v for k, v in rollout.items() if k != "advantages"},
            **dict(zip(keys, row, strict=True)),
        }
        for rollout in rollouts
        for keys in [[k for k in (*OF_SEGMENTS, *FIELDS) if isinstance(rollout.get(k), list)]]
        for row in zip(*(rollout[key] for key in keys), strict=True)
    ]


@pytest.mark.parametrize("seed", range(CASES // 4))
def test_a_row_per_segment(seed: int) -> None:
    """As of a rollout per segment, but for what belongs to the whole."""
    rollouts = rl.merge_steps(drawn_steps(seed), rewritten="branch", fields=FIELDS)
    per_token = {key: FIELDS[key] for key in ("margins", "message_numbers")}
    for collator, options in ((RolloutCollator, {}), (PackedCollator, {"max_tokens": 512})):
        batch = collator(0, fields=per_token, **options)(rollouts)
        alone = collator(0, fields=per_token, **options)(flat(rollouts))
        if collator is RolloutCollator:
            tensors = [name for name in alone if name != "sub_seq_lengths"]
            assert all(torch.equal(batch[name], alone[name]) for name in tensors)
        for name in ("input_ids", "message_numbers", "labels"):
            if name in alone:
                pairs = zip(unpack(batch[name], batch), unpack(alone[name], alone), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs)
        for name in ("rewards", "rollout_logprobs"):
            assert rl.response_values(batch[name], batch) == rl.response_values(alone[name], alone)
        names = ("uids", "trajectory_ids", "is_last_step", "example_indices", "segment_numbers")
        rows = [batch.row_metadata[name] for name in names]
        rows = [list(chain(*r)) if isinstance(r[0], tuple) else r for r in rows[:3]] + [
            r.values.tolist() for r in rows[3:]
        ]
        found = sorted(zip(*rows[3:], *rows[:3], strict=True))
        assert found == [
            (i, k, r["uid"], r["trajectory_id"], k == len(r["prompt_ids"]) - 1)
            for i, r in enumerate(rollouts)
            for k in range(len(r["prompt_ids"]))
        ]


def staged_and_scored(rollouts: list[dict], **options: Any) -> tuple[Batch, np.ndarray]:
    batch = RolloutCollator(0, **options)(rollouts)
    metadata = batch.row_metadata
    advantages = rl.compute_advantages(
        batch["rewards"],
        batch["response_mask"],
        metadata["uids"],
        estimator="grpo",
        is_last_step=metadata["is_last_step"],
        trajectory_ids=metadata["trajectory_ids"],
        group_of_one="score",
    )
    boundaries = rl.mini_batch_boundaries(metadata["uids"], 1)
    advantages = rl.normalize_advantages(
        advantages, batch["loss_mask"], boundaries, reduction="token_mean"
    )
    return batch.with_fields(advantages=advantages), boundaries


@pytest.mark.parametrize("seed", range(CASES // 4))
def test_staging_keeps_rollouts_whole(seed: int) -> None:
    """Each is on one rank, each row is there once, and all comes back in order."""
    batch, boundaries = staged_and_scored(rl.merge_steps(drawn_steps(seed), rewritten="branch"))
    for balance, ranks in ((None, 2), ("tokens", 2), ("attention", 3)):
        staged = rl.stage_mini_batches(batch, boundaries, ranks, balance=balance)
        for parts in staged:
            assert len({len(part) for part in parts}) == 1
            of_ranks = [set(part.row_metadata["example_indices"].values.tolist()) for part in parts]
            assert sum(map(len, of_ranks)) == len(set.union(*of_ranks))
            assert parts[0].metadata["num_examples"] == len(set.union(*of_ranks))
        micro = [rl.micro_batches(p, max_tokens=128) for parts in staged for p in parts]
        assert all(len(of) == len(micro[i - i % ranks]) for i, of in enumerate(micro))
        values = [
            [rl.response_values(m["advantages"], m["response_mask"]) for m in of] for of in micro
        ]
        back = rl.from_response_values(rl.unstage(micro, values), batch)
        assert torch.equal(back, batch["advantages"])
        flat_micro = [m for of in micro for m in of]
        assert global_num_examples(flat_micro) == batch.metadata["num_examples"]


def clipped(model: Any, batch: Batch) -> torch.Tensor:
    """PPO's loss of a step with advantages that were divided."""
    logits = model(**inputs_of(batch, model)).logits
    old, advantages = (
        trained_values(batch[k], batch).double() for k in ("rollout_logprobs", "advantages")
    )
    ratio = (token_logps(logits, batch) - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


@pytest.mark.parametrize(("attention", "seed"), [("sdpa", 3), ("torch_varlen", 0)])
def test_gradients_are_those_of_a_sample_per_step(attention: str, seed: int) -> None:
    """In float64, over mini-batches on two ranks: a tree of branches, and each step alone."""
    steps = drawn_steps(seed, most=5)
    model = exact_model("qwen3", attention)
    rollouts, found = rl.merge_steps(steps, rewritten="branch"), []
    for examples in (rollouts, steps):
        batch, _ = staged_and_scored(examples)
        values = iter(rl.response_values(batch["advantages"], batch))
        given = []
        for example in examples:
            count = len(example["prompt_ids"]) if examples is rollouts else None
            own = next(values) if count is None else [next(values) for _ in range(count)]
            given.append({**example, "advantages": own})
        options = {"max_tokens": 512, "share_prefixes": examples is rollouts or None}
        packed = PackedCollator(0, parallel=ParallelLayout(dp=2), **options)(given)
        assert shares_prefixes(packed) == (examples is rollouts)
        model.zero_grad()
        for rows in packed.chunk(2):
            clipped(model, rows).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert max(float(g.abs().max()) for g in found[1]) > 1e-3
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max()) < 1e-10


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_off_policy_weights_are_those_of_segments(level: Any) -> None:
    """Of rows, of packed rows and of trees alike; a sequence is a segment."""
    rollouts = rl.merge_steps(drawn_steps(4), rewritten="branch")
    found = []
    for collate in (
        RolloutCollator(0),
        PackedCollator(0, max_tokens=512),
        PackedCollator(0, max_tokens=512, share_prefixes=True),
    ):
        batch = collate(rollouts)
        old, rewards = (trained_values(batch[k], batch) for k in ("rollout_logprobs", "rewards"))
        weights = rl.importance_weights(old / 2 - rewards, old, batch, level=level)
        dense = torch.zeros(batch["loss_mask"].shape)
        dense[batch["loss_mask"] != 0] = weights
        found.append(rl.response_values(dense, batch))
    assert len({w for segment in found[0] for w in segment}) > 5
    assert found[1] == found[0]
    assert found[2] == found[0]
