"""Advantages against the oracle, step-wise, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from tests.rl.rollouts import OUTCOME
from torch_collate_kit import PackedCollator, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import compute_advantages, merge_steps, mini_batch_boundaries

ESTIMATORS = (*OUTCOME, "gae", "reinforce++")


@st.composite
def drawn(draw: st.DrawFn, *, steps: bool = False, holes: bool = False) -> dict[str, Any]:
    """Rows of a batch: tensors, uids, and with ``steps`` trajectories; some rows are pads."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width, num_uids = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    counts = [int(rng.integers(1, 4)) if steps else 1 for _ in range(draw(st.integers(1, 8)))]
    uids = [uid for count in counts for uid in ["abc"[rng.integers(num_uids)]] * count]
    last = [k == count - 1 for count in counts for k in range(count)]
    rows = []
    for is_last in last:
        n = int(rng.integers(1, width + 1))
        mask = np.arange(width) >= width - n
        if holes:
            mask[:-1] &= rng.integers(0, 2, width - 1) == 1
        amounts = rng.choice([0.0, 1.0, 0.1, 0.5, 3.25], width) * is_last
        rows.append((amounts * mask, mask.astype(np.int64)))
    for _ in range(draw(st.integers(0, 2))):  # pads, as pad_rows makes them, anywhere
        i = int(rng.integers(len(rows) + 1))
        rows.insert(i, (np.zeros(width), np.zeros(width, np.int64)))
        uids.insert(i, uids[0])
        last.insert(i, draw(st.booleans()))
    return {
        "rewards": torch.from_numpy(np.stack([r for r, _ in rows])),
        "mask": torch.from_numpy(np.stack([m for _, m in rows])),
        "uids": uids,
        "last": last,
        "values": torch.from_numpy(rng.normal(size=(len(rows), width))),
    }


def close(found: torch.Tensor, expected: list[list[float]]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


LONELY = st.sampled_from(["zero", "score", "raise"])


@given(batch=drawn(), estimator=st.sampled_from(OUTCOME), group_of_one=LONELY)
def test_outcomes(device: str, batch: dict[str, Any], estimator: str, group_of_one: str) -> None:
    args = batch["rewards"].to(device), batch["mask"], batch["uids"]
    options = {"estimator": estimator, "group_of_one": group_of_one}
    try:
        wanted = oracle.advantages(*(as_list(a) for a in args), **options)
    except oracle.GroupOfOneError:
        with pytest.raises(DataError, match="has only one score"):
            compute_advantages(*args, **options)
        return
    found = compute_advantages(*args, **options)
    assert found.dtype == torch.float64
    assert found.device.type == device
    close(found.cpu(), wanted)
    assert (found.cpu()[batch["mask"] == 0] == 0).all()
    all_last = compute_advantages(*args, **options, is_last_step=[True] * len(batch["uids"]))
    assert torch.equal(all_last, found)
    narrow = compute_advantages(args[0].float(), *args[1:], **options)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), found, rtol=1e-6, atol=1e-6)


def as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@given(
    batch=drawn(steps=True),
    estimator=st.sampled_from(OUTCOME),
    group_of_one=st.sampled_from(["zero", "score"]),
)
def test_steps(batch: dict[str, Any], estimator: str, group_of_one: str) -> None:
    args, last = (batch["rewards"], batch["mask"], batch["uids"]), batch["last"]
    options = {"estimator": estimator, "group_of_one": group_of_one}
    found = compute_advantages(*args, **options, is_last_step=last)
    wanted = oracle.advantages(*(as_list(a) for a in args), **options, is_last_step=last)
    close(found, wanted)
    for flags in (np.array(last), torch.tensor(last), [int(flag) for flag in last]):
        again = compute_advantages(*args, **options, is_last_step=flags)
        assert torch.equal(again, found)
    real = (batch["mask"] != 0).any(dim=1).tolist()
    assert (found[~torch.tensor(real)] == 0).all()
    advantage = 0.0
    for i in reversed(range(len(last))):  # every response token of every step has the same
        if real[i]:
            advantage = found[i, -1].item() if last[i] else advantage
            assert set(found[i][batch["mask"][i] != 0].tolist()) == {advantage}


@given(
    batch=drawn(holes=True),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.8, 0.0]),
    estimator=st.sampled_from(["gae", "gae, whitened", "reinforce++"]),
    epsilon=st.sampled_from([1e-6, 0.5]),
)
def test_token_estimators(
    device: str, batch: dict[str, Any], gamma: float, lam: float, estimator: str, epsilon: float
) -> None:
    options: dict[str, Any] = {"gamma": gamma, "lam": lam, "epsilon": epsilon}
    options["estimator"] = estimator.removesuffix(", whitened")
    if options["estimator"] == "gae":
        options |= {"values": batch["values"].to(device), "whiten": estimator != "gae"}
    args = batch["rewards"].to(device), batch["mask"], batch["uids"]
    found = compute_advantages(*args, **options, is_last_step=np.ones(len(batch["uids"]), bool))
    wanted = oracle.advantages(
        *(as_list(a) for a in args), **{key: as_list(value) for key, value in options.items()}
    )
    assert found.device.type == device
    close(found.cpu(), wanted)
    assert (found.cpu()[batch["mask"] == 0] == 0).all()


@pytest.mark.parametrize(
    ("estimator", "options"), [*((name, {}) for name in ESTIMATORS), ("gae", {"whiten": True})]
)
def test_pads_count_nowhere(estimator: str, options: dict[str, Any]) -> None:
    options = {"estimator": estimator, **options}
    torch.manual_seed(0)
    rewards, mask = torch.rand(4, 3), torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
    rewards = rewards * mask
    uids = ["a", "a", "b", "b"]
    values = torch.rand(4, 3) if estimator == "gae" else None
    found = compute_advantages(rewards, mask, uids, **options, values=values)
    junk = torch.tensor([[float("nan"), 9.0, float("inf")]])
    more = compute_advantages(
        torch.cat([junk, rewards, junk]),
        torch.cat([torch.zeros(1, 3, dtype=torch.int64), mask, torch.zeros(1, 3)]),
        ["a", *uids, "a"],
        **options,
        values=None if values is None else torch.cat([junk, values, junk]),
    )
    assert torch.equal(more[1:5], found)
    assert (more[[0, 5]] == 0).all()
    assert found.abs().sum() > 0
    only_pads = compute_advantages(
        junk, torch.zeros(1, 3), ["a"], **options, values=values if values is None else junk
    )
    assert only_pads.tolist() == [[0.0] * 3]


R, M = torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([[0, 1], [1, 1]])


NAN = torch.tensor([[0.0, 1.0], [0.0, float("nan")]])
STEPS = {"is_last_step": [False, True]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"estimator": "ppo"}, ValueError, r"estimator must be one of 'grpo', .*; got 'ppo'"),
        ({"rewards": [[1.0]]}, TypeError, r"rewards must be a tensor \[B, A\], got list"),
        ({"response_mask": M.numpy()}, TypeError, "response_mask must be a tensor .*got ndarray"),
        ({"rewards": R[0]}, ValueError, r"rewards must be \[B, A\], got shape \[2\]"),
        ({"response_mask": M[:, :1]}, ValueError, r"shape \[2, 1\], rewards has \[2, 2\]; they"),
        ({"estimator": "gae"}, ValueError, "needs values .*the critic's estimates"),
        ({"estimator": "gae", "values": R[:, :1]}, ValueError, r"values has shape \[2, 1\]"),
        ({"estimator": "gae", "values": NAN}, DataError, "row 1: the value at column 1 is nan"),
        ({"values": R}, ValueError, "read by estimator=\"gae\" only, got 'grpo'; leave it out"),
        ({"whiten": True}, ValueError, "\"gae\" only, got 'grpo'; use normalize_adv"),
        ({"whiten": 1}, TypeError, "whiten must be True or False, got 1"),
        ({"uids": ["a"]}, ValueError, "uids has 1 entries for 2 rows; give one uid per row"),
        ({"uids": None}, TypeError, "uids must be one uid per row, got None of type NoneType"),
        ({"uids": np.array(["a", None])}, DataError, "row 1: uid is None; give the id of its"),
        ({"uids": torch.tensor([1.0, float("nan")])}, DataError, "row 1: uid is nan; give"),
        ({"response_mask": M / 0}, DataError, "row 0: response_mask is nan at column 0; it must"),
        ({"response_mask": M - 1}, DataError, "row 0: response_mask is -1 at column 0; it must"),
        ({"group_of_one": "one"}, ValueError, "group_of_one must be one of 'raise', .*got 'one'"),
        ({"gamma": 1.5}, ValueError, "gamma must be from 0 to 1, got 1.5"),
        ({"lam": float("nan")}, ValueError, "lam must be from 0 to 1, got nan"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be above 0, got 0.0"),
        ({"rewards": NAN}, DataError, "row 1: the reward at column 1 is nan; rewards must be fin"),
        ({"rewards": R + 1}, DataError, "column 0 is 1.0; response_mask is 0 there, so no token"),
        ({"is_last_step": [True]}, ValueError, "is_last_step has 1 entries for 2 rows"),
        ({"is_last_step": [1, 0.5]}, DataError, "row 1: is_last_step is 0.5; it must be True or F"),
        ({"is_last_step": [True, False], "rewards": R * 0}, DataError, "row 1 .* no step follows"),
        ({**STEPS, "uids": ["a", "b"], "rewards": R * 0}, DataError, "row 0 .* 1 is of uid 'b'; t"),
        ({**STEPS, "estimator": "reinforce++"}, ValueError, "one time axis, but row 0 is not the"),
        (
            {"estimator": "maxrl", "rewards": -R},
            DataError,
            "a reward of uid 'a' is -1.0, and maxrl",
        ),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"rewards": R, "response_mask": M, "uids": ["a", "a"], "estimator": "grpo"}
    with pytest.raises(error, match=message):
        compute_advantages(**{**arguments, **changes})


# --- Which scores are compared with each other: by uid, and what a uid with one score gets


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


# --- trajectory_ids: they say which rows are the steps of one trajectory, and check is_last_step


REWARDS = torch.tensor([[0.0], [1.0], [0.0], [3.0]])
MASK = torch.ones(4, 1)


def advantages(**changes: Any) -> list[float]:
    options: dict[str, Any] = {"uids": ["a"] * 4, "estimator": "grpo_no_std", **changes}
    rewards, mask = options.pop("rewards", REWARDS), options.pop("response_mask", MASK)
    return compute_advantages(rewards, mask, options.pop("uids"), **options).flatten().tolist()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"is_last_step": [True] * 4}, DataError, "row 0 has is_last_step=True .* row 1 has traj"),
        ({"trajectory_ids": [0, 1, 0, 1]}, DataError, "id 0 of .* begins at row 0 and .* at row 2"),
        ({"trajectory_ids": [0, 0, None, 1]}, DataError, "row 2: trajectory_id is None; give the"),
        ({"is_last_step": [False, True, False, False]}, DataError, "row 3 .* not a last step, but"),
        ({"trajectory_ids": [0]}, ValueError, "trajectory_ids has 1 entries for 4 rows; give one"),
        ({"trajectory_ids": "abcd"}, TypeError, "must be one trajectory_id per row, got 'abcd'"),
        ({"trajectory_ids": [0, [0], 1, 1]}, DataError, r"row 1: trajectory_id is \[0\] \(list\)"),
    ],
)
def test_errors_of_trajectories(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        advantages(**{"rewards": REWARDS * 0, "trajectory_ids": [0, 0, 1, 1], **changes})


@given(
    counts=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), min_size=1, max_size=6),
    pads=st.lists(st.integers(0, 20), max_size=2),
    numbered=st.booleans(),
    forget=st.integers(0, 5),
)
def test_drawn_trajectories(
    counts: list[tuple[str, int]], pads: list[int], numbered: bool, forget: int
) -> None:
    """Like is_last_step; and whichever flag is wrong, it is found, wherever pads lie."""
    rows: list[tuple[str, Any, bool, float]] = []
    for number, (uid, count) in enumerate(sorted(counts)):
        of_uid = [u for u, _ in sorted(counts)[:number]].count(uid)
        for k in range(count):
            is_last = k == count - 1
            rows.append((uid, of_uid if numbered else number, is_last, number * 1.5 * is_last))
    real = [True] * len(rows)
    for pad in pads:  # as pad_rows makes them
        at = min(pad, len(rows))
        rows.insert(at, (rows[0][0], rows[0][1], True, 0.0))
        real.insert(at, False)
    uids, ids, last, scores = (list(column) for column in zip(*rows, strict=True))
    rewards, mask = torch.tensor(scores)[:, None], torch.tensor(real).long()[:, None]
    options: dict[str, Any] = {"estimator": "grpo", "group_of_one": "score"}
    found = compute_advantages(rewards, mask, uids, trajectory_ids=ids, **options)
    wanted = oracle.advantages(rewards.tolist(), mask.tolist(), uids, trajectory_ids=ids, **options)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    both = compute_advantages(rewards, mask, uids, trajectory_ids=ids, is_last_step=last, **options)
    assert torch.equal(both, found)
    places = [i for i, is_real in enumerate(real) if is_real]
    wrong = places[forget % len(places)]
    last[wrong] = not last[wrong]
    with pytest.raises(DataError, match=rf"row {wrong} (has is_last_step=|of uid .* no step foll)"):
        compute_advantages(
            rewards * 0, mask, uids, trajectory_ids=ids, is_last_step=last, **options
        )


def step(uid: str, trajectory_id: Any, prompt: list[int], last: bool) -> dict[str, Any]:
    example = {"uid": uid, "trajectory_id": trajectory_id, "is_last_step": last}
    parts = {"prompt_ids": prompt, "response_ids": [prompt[-1] + 1], "loss_mask": [1]}
    return {**example, **parts, "rewards": float(last)}


def test_merging_checks_it_too() -> None:
    """A trajectory whose prompt begins like the one before was merged into it."""
    steps = [step("a", 0, [1], True), step("a", 1, [1, 2, 3], True)]
    assert [example["trajectory_id"] for example in merge_steps(steps)] == [0, 1]
    steps[0] |= {"is_last_step": False}
    with pytest.raises(DataError, match=r"^example 0 has is_last_step=False and .* example 1 has"):
        merge_steps(steps)
    steps[1] |= {"trajectory_id": 0}
    [merged] = merge_steps(steps)
    assert merged["trajectory_id"] == 0
    assert merged["response_ids"].tolist() == [2, 3, 4]
    steps[1] |= {"trajectory_id": None}
    with pytest.raises(DataError, match="example 1: trajectory_id is None; give"):
        merge_steps(steps)
    assert len(merge_steps([{**s, "trajectory_id": None} for s in steps])) == 1  # not given
    del steps[1]["trajectory_id"]
    with pytest.raises(DataError, match="example 1 and example 0 differ in trajectory_id; every"):
        merge_steps(steps)
