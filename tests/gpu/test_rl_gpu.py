"""The rl helpers on a CUDA device: the same numbers as on the host, and results that stay there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.batch_samples import rollouts, tensors_of
from tests.rl.rollouts import OUTCOME, rollout_batch
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import RolloutCollator
from torch_collate_kit.rl import (
    compute_advantages,
    normalize_advantages,
    prompt_boundaries,
    response_values,
    stage_mini_batches,
    unstage,
)

pytestmark = pytest.mark.gpu

UIDS = list("aaabbbbbc")
SHAPE = [(2 + i % 3, 1 + 5 * i % 7) for i in range(9)]


@pytest.fixture
def batch() -> Batch:
    return rollout_batch(SHAPE, UIDS, divided=True)


@pytest.mark.parametrize("estimator", [*OUTCOME, "gae", "reinforce++"])
def test_advantages(batch: Batch, estimator: str) -> None:
    rewards = batch["rewards"].abs()  # maxrl takes no others
    mask, last = batch["response_mask"], [True] * len(batch)
    values = torch.rand_like(rewards) if estimator == "gae" else None
    options: dict[str, Any] = {"estimator": estimator, "epsilon": 0.5, "group_of_one": "score"}
    on_host = compute_advantages(rewards, mask, UIDS, values=values, **options)
    for flags in (last, torch.tensor(last).cuda()):
        found = compute_advantages(
            rewards.cuda(),
            mask,  # wherever it is
            torch.tensor([ord(uid) for uid in UIDS]).cuda(),
            values=None if values is None else values.cuda(),
            is_last_step=flags,
            **options,
        )
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), on_host)
    if estimator in OUTCOME:
        assert torch.equal(found.cpu(), on_host)


def test_steps(batch: Batch) -> None:
    rewards, mask = batch["rewards"].clone(), batch["response_mask"]
    last = [i % 3 == 2 for i in range(9)]
    rewards[[not flag for flag in last]] = 0
    uids = list("aaaaaabbb")
    options: dict[str, Any] = {"estimator": "grpo", "is_last_step": last, "group_of_one": "zero"}
    on_host = compute_advantages(rewards, mask, uids, **options)
    found = compute_advantages(rewards.cuda(), mask.cuda(), uids, **options)
    assert torch.equal(found.cpu(), on_host)


@pytest.mark.parametrize("z_score", [True, False])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
def test_normalization(batch: Batch, reduction: str, z_score: bool) -> None:
    edges = prompt_boundaries(UIDS)
    options: dict[str, Any] = {"reduction": reduction, "uids": UIDS, "z_score": z_score}
    advantages, mask = batch["advantages"], batch["loss_mask"]
    on_host = normalize_advantages(advantages, mask, edges, **options)
    found = normalize_advantages(advantages.cuda(), mask, edges, **options)
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), on_host)


@pytest.mark.parametrize("balance", [None, "tokens", "attention"])
def test_staging_and_back(batch: Batch, balance: Any) -> None:
    edges = prompt_boundaries(UIDS)
    on_host = stage_mini_batches(batch, edges, 4, balance=balance)
    staged = stage_mini_batches(batch.to("cuda"), edges, 4, balance=balance)
    assert len(staged) == len(list(pairwise(edges)))
    for ranks, wanted in zip(staged, on_host, strict=True):
        for part, expected in zip(ranks, wanted, strict=True):
            assert all(field.device.type == "cuda" for field in part.values())
            assert part.to("cpu") == expected
    outputs = [[part["rollout_logprobs"] for part in ranks] for ranks in staged]
    back = unstage(staged, outputs)
    assert back.device.type == "cuda"
    assert torch.equal(back.cpu(), batch["rollout_logprobs"])
    values = response_values(back, batch["response_mask"])
    assert values == response_values(batch["rollout_logprobs"], batch["response_mask"])
    assert [len(row) for row in values] == [response for _, response in SHAPE]


@pytest.mark.parametrize("balance", [None, "tokens", "attention"])
def test_staging_of_what_a_collator_stores(balance: Any) -> None:
    batch = RolloutCollator(0, normalize_loss=True)(rollouts(images=True))
    on_host = stage_mini_batches(batch, [0, 1, 4], 2, balance=balance)
    staged = stage_mini_batches(batch.to("cuda"), [0, 1, 4], 2, balance=balance)
    for ranks, wanted in zip(staged, on_host, strict=True):
        for part, expected in zip(ranks, wanted, strict=True):
            assert {tensor.device.type for tensor in tensors_of(part)} == {"cuda"}
            assert part == expected
            assert not set(part._made) - {"sub_seq_lengths"}
            assert dict(part).keys() == dict(expected).keys()
            assert all(torch.equal(part[k].cpu(), expected[k]) for k in ("rewards", "loss_mask"))
    back = unstage(staged, [[part["rewards"] for part in ranks] for ranks in staged])
    assert torch.equal(back.cpu(), batch["rewards"])
