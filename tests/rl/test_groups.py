"""Which scores are compared with each other: by uid, and what a uid with one score gets."""

from __future__ import annotations

import pickle

import pytest
import torch

from tests.rl.rollouts import OUTCOME
from torch_collate_kit import PackedCollator, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import compute_advantages, mini_batch_boundaries


@pytest.mark.parametrize("estimator", OUTCOME)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e8])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_scores_teach_nothing(estimator: str, reward: float, size: int) -> None:
    """In float32 a mean of equal scores can be off by a bit, and that over epsilon is not small."""
    rewards = torch.tensor([[0.0, reward]] * size, dtype=torch.float32)
    mask = torch.ones(size, 2)
    found = compute_advantages(rewards, mask, ["a"] * size, estimator=estimator)
    assert found.tolist() == [[0.0, 0.0]] * size


@pytest.mark.parametrize("scores", [[1.0, -1.0], [1.0, -0.99999], [-1.0, 3.0], [0.0, 0.0, -1e-9]])
def test_maxrl_refuses_rewards_below_0_whose_mean_may_be_0(scores: list[float]) -> None:
    """Divided by a mean near 0, advantages were a million."""
    rewards = torch.tensor(scores)[:, None]
    ones, uids = torch.ones_like(rewards), ["a"] * len(scores)
    with pytest.raises(DataError, match=r"a reward of uid 'a' is -.*give it rewards of 0 or more"):
        compute_advantages(rewards, ones, uids, estimator="maxrl")
    penalized = torch.cat([rewards - 5, 5 - rewards.clamp(max=0)], 1)  # tokens below 0, no score
    found = compute_advantages(penalized, torch.ones(len(uids), 2), uids, estimator="maxrl")
    assert found.abs().max() <= 1


@pytest.mark.parametrize("estimator", OUTCOME)
def test_no_advantage_is_larger_than_its_group(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-9, 1e-6, 1.0, 1e6):
        rewards = torch.rand(64, 1, generator=generator) * scale
        rewards[torch.rand(64, 1, generator=generator) < 0.7] = 0
        found = compute_advantages(rewards, torch.ones(64, 1), [*range(8)] * 8, estimator=estimator)
        assert found.abs().max() <= 8 * max(1, scale)


def test_a_mask_that_leaves_one_score_is_named() -> None:
    rewards, mask = torch.tensor([[5.0], [1.0], [3.0], [2.0]]), torch.tensor([[1], [0], [1], [1]])
    message = "^uid 'x' has only one score, as response_mask is 0 in all of its other rows, "
    with pytest.raises(DataError, match=message):
        compute_advantages(rewards, mask, list("xxyy"), estimator="grpo")
    message = r"row 0 of uid 'x' is not a last step, but no .*\(rows whose response_mask is 0 do"
    with pytest.raises(DataError, match=message):
        compute_advantages(
            0 * rewards[:2], mask[:2], ["x"] * 2, estimator="grpo", is_last_step=[False, True]
        )


@pytest.mark.parametrize("estimator", OUTCOME)
def test_a_group_of_one_is_said(estimator: str) -> None:
    """It got 0 without a word: a rollout whose peers were filtered out taught nothing."""
    rewards, mask = torch.tensor([[5.0], [1.0], [3.0], [-2.0]]), torch.ones(4, 1)
    message = r"^uid 'x' has only one score \(as have 2 of 3 uids\), and .* \(the score itself\)$"
    with pytest.raises(DataError, match=message):
        compute_advantages(rewards, mask, list("xyyz"), estimator=estimator)
    zero, score = (
        compute_advantages(rewards, mask, list("xyyz"), estimator=estimator, group_of_one=way)
        for way in ("zero", "score")
    )
    assert zero.flatten()[[0, 3]].tolist() == [0.0, 0.0]
    assert score.flatten()[[0, 3]].tolist() == [5.0, -2.0]
    assert torch.equal(zero[1:3], score[1:3])
    alone = compute_advantages(rewards[1:3], mask[1:3], list("yy"), estimator=estimator)
    assert torch.equal(zero[1:3], alone)
    assert alone.sum() == 0
    assert alone[1] > 0


def packed_and_padded() -> tuple[Batch, Batch]:
    """Four rows of two rollouts each, and eight rows of the same."""
    rollouts = [
        {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": reward, "loss_mask": [1, 1]}
        | {"uid": "a", "trajectory_id": i}
        for i, reward in enumerate([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    ]
    return PackedCollator(0, max_tokens=8)(rollouts), RolloutCollator(0)(rollouts)


def test_rows_of_several_rollouts_are_refused() -> None:
    packed, _ = packed_and_padded()
    assert packed.row_metadata["uids"] == [("a", "a")] * 4
    sent = pickle.loads(pickle.dumps(packed))
    for batch in (packed, packed[1:3], packed.select([3, 0]), sent, Batch.cat(packed.chunk(2))):
        rewards, mask, uids = batch["rewards"], batch["response_mask"], batch.row_metadata["uids"]
        for estimator in ("grpo", "rloo", "maxrl", "reinforce++"):
            with pytest.raises(ValueError, match=r"uids\[0\] is \('a', 'a'\), of a packed row"):
                compute_advantages(rewards, mask, uids, estimator=estimator)
        with pytest.raises(ValueError, match="of a packed row, and here a row is one rollout"):
            mini_batch_boundaries(uids, 1)
    ids, names = packed.row_metadata["trajectory_ids"], list("aabb")
    with pytest.raises(ValueError, match=r"trajectory_ids\[0\] is \(\d, \d\), of a packed row"):
        compute_advantages(
            packed["rewards"], packed["response_mask"], names, estimator="grpo", trajectory_ids=ids
        )
