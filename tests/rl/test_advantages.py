"""Advantages against the oracle, step-wise, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from tests.rl.rollouts import OUTCOME
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import compute_advantages

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_dtypes_graph_and_arguments(
    dtype: torch.dtype, mask_dtype: torch.dtype, estimator: str
) -> None:
    rewards, mask = torch.tensor([[0, 1], [0, 3]], dtype=dtype), M.to(mask_dtype)
    values = torch.tensor([[0.5, 1.0], [2.0, 3.0]], requires_grad=True)
    copies = [tensor.detach().clone() for tensor in (rewards, mask, values)]
    graph = rewards.clone().requires_grad_(dtype.is_floating_point)
    options = {"values": values} if estimator == "gae" else {}
    found = compute_advantages(graph, mask, ["a", "a"], estimator=estimator, **options)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not found.requires_grad
    assert found.shape == rewards.shape
    for kept, now in zip(copies, (graph, mask, values), strict=True):
        assert torch.equal(kept, now)


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
        ({"whiten": True, "estimator": "reinforce++"}, ValueError, "only, got 'reinforce"),
        ({"whiten": 1}, TypeError, "whiten must be True or False, got 1"),
        ({"uids": ["a"]}, ValueError, "uids has 1 entries for 2 rows; give one uid per row"),
        ({"uids": None}, TypeError, "uids must be one uid per row, got None of type NoneType"),
        ({"uids": "ab"}, TypeError, "got 'ab' of type str"),
        ({"uids": np.array(["a", None])}, DataError, "row 1: uid is None; give the id of its"),
        ({"uids": torch.tensor([1.0, float("nan")])}, DataError, "row 1: uid is nan; give"),
        ({"response_mask": M / 0}, DataError, "row 0: response_mask is nan at column 0; it must"),
        ({"response_mask": M / (1 - M)}, DataError, "row 0: response_mask is inf at column 1"),
        ({"response_mask": M - 1}, DataError, "row 0: response_mask is -1 at column 0; it must"),
        ({"group_of_one": "one"}, ValueError, "group_of_one must be one of 'raise', .*got 'one'"),
        ({"gamma": 1.5}, ValueError, "gamma must be from 0 to 1, got 1.5"),
        ({"lam": float("nan")}, ValueError, "lam must be from 0 to 1, got nan"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be above 0, got 0.0"),
        ({"rewards": NAN}, DataError, "row 1: the reward at column 1 is nan; rewards must be fin"),
        ({"rewards": R / 0}, DataError, "row 0: the reward at column 0 is nan"),
        ({"rewards": R + 1}, DataError, "column 0 is 1.0; response_mask is 0 there, so no token"),
        ({"is_last_step": [True]}, ValueError, "is_last_step has 1 entries for 2 rows"),
        ({"is_last_step": [1, 0.5]}, DataError, "row 1: is_last_step is 0.5; it must be True or F"),
        ({"is_last_step": "10"}, TypeError, "is_last_step must be one bool per row, got '10' of"),
        ({"is_last_step": [True, False], "rewards": R * 0}, DataError, "row 1 .* no step follows"),
        ({**STEPS, "uids": ["a", "b"], "rewards": R * 0}, DataError, "row 0 .* 1 is of uid 'b'; t"),
        ({**STEPS, "estimator": "reinforce++"}, ValueError, "one time axis, but row 0 is not the"),
        ({**STEPS, "estimator": "gae", "values": R}, ValueError, "not the last .*merge_steps, or"),
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
