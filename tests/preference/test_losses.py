"""Losses of pairs: by hand, packed against each pair alone, over micro-batches and ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import NoWaiting
from tests.preference import pairs
from tests.ranks import on_two_ranks
from torch_collate_kit import ParallelLayout
from torch_collate_kit.preference import bradley_terry, dpo, kto
from torch_collate_kit.ragged import Ragged

DATA = pairs.pairs()
NOISE = 0.05


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


SUMS = torch.tensor([-4.0, -9.0, -6.0, -2.0, -3.0, -3.0], dtype=torch.float64)
REFERENCE = torch.tensor([-5.0, -6.0, -6.0, -4.0, -1.0, -5.0], dtype=torch.float64)
RATIOS = [(1, -3), (0, 2), (-2, 2)]


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("form", ["flat", "two columns", "field"])
def test_dpo_by_hand(smoothing: float, form: str) -> None:
    forms = {"flat": REFERENCE, "two columns": REFERENCE.view(3, 2)}
    forms["field"] = Ragged(REFERENCE, [0, 4, 6])
    found = dpo(SUMS, forms[form], beta=0.5, label_smoothing=smoothing)
    margins = [0.5 * (chosen - rejected) for chosen, rejected in RATIOS]
    for loss, x in zip(found.loss.tolist(), margins, strict=True):
        wrong = -smoothing * math.log(sigmoid(-x))
        assert loss == pytest.approx(-(1 - smoothing) * math.log(sigmoid(x)) + wrong)
    assert found.chosen_rewards.tolist() == [0.5, 0, -1]
    assert found.rejected_rewards.tolist() == [-1.5, 1, 1]
    assert (found.margin.tolist(), found.accuracy.tolist()) == (margins, [1, 0, 0])


@pytest.mark.parametrize("kl", [None, 0.75, torch.tensor(0.75), -2.0])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_kto_by_hand(kl: Any, dtype: torch.dtype) -> None:
    labels = torch.tensor([1, 0, 1]).to(dtype)
    sums = SUMS.clone().requires_grad_()
    found = kto(sums, REFERENCE, labels, beta=0.5, kl=kl, undesirable_weight=3.0)
    point = 1 / 3 if kl is None else max(float(kl), 0.0)  # the mean of -3, 2 and 2
    margins = [0.5 * (1 - point), 0.5 * (point - 0), 0.5 * (-2 - point)]
    losses = [w * (1 - sigmoid(x)) for w, x in zip((1, 3, 1), margins, strict=True)]
    assert found.loss.tolist() == pytest.approx(losses)
    assert found.margin.tolist() == pytest.approx(margins)
    assert found.accuracy.tolist() == [1, float(point > 0), 0]
    assert found.chosen_rewards.nanmean().item() == pytest.approx((0.5 - 1) / 2)
    assert found.rejected_rewards.isnan().tolist() == [True, False, True]
    (gradient,) = torch.autograd.grad(found.loss.sum(), sums)
    assert (gradient[1::2] == 0).all()  # the reference point has no gradient
    assert (gradient[0::2] != 0).all()


def test_bradley_terry_by_hand_and_in_fp32_for_half() -> None:
    rewards, margin = torch.tensor([2.0, 0.5, -1.0, 1.0]), torch.tensor([0.5, 0.25])
    for given, apart in ((None, [1.5, -2.0]), (margin, [1.0, -2.25])):
        found = bradley_terry(rewards.bfloat16(), given)
        assert found.loss.tolist() == pytest.approx([-math.log(sigmoid(x)) for x in apart])
        assert (found.loss.dtype, found.margin.tolist()) == (torch.float32, [1.5, -2.0])
        assert found.accuracy.tolist() == [1, 0]


@pytest.mark.parametrize("name", pairs.LOSSES)
def test_logged_values_have_no_graph_and_no_pair_has_no_loss(name: str) -> None:
    calls = {
        "dpo": lambda x: dpo(x, torch.zeros_like(x).detach()),
        "kto": lambda x: kto(x, torch.zeros_like(x).detach(), torch.ones_like(x[::2]).bool()),
        "bradley_terry": bradley_terry,
    }
    for size in (4, 0):
        found = calls[name](torch.ones(size, requires_grad=True))
        assert found.loss.requires_grad
        assert not any(of.requires_grad for of in found[1:])
        assert [of.shape for of in found] == [(size // 2,)] * 5
    with NoWaiting():
        assert all(of.is_meta for of in calls[name](torch.ones(4, device="meta")))


TWO, FOUR = torch.zeros(2), torch.zeros(4)
YES = torch.tensor([True])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dpo([0.0], TWO), TypeError, "sums must be a tensor of floats, got list"),
        (lambda: dpo(TWO.long(), TWO), TypeError, "sums must be a tensor of floats, got torch.int"),
        (lambda: dpo(torch.zeros(3), FOUR), ValueError, r"got shape \[3\]; .* whole pairs"),
        (lambda: dpo(TWO[None], TWO), ValueError, r"must be \[2P\], .* got shape \[1, 2\]"),
        (lambda: dpo(FOUR, TWO), ValueError, r"shape \[2\], sums \[4\]; .* \[4\] or \[2, 2\]"),
        (lambda: dpo(FOUR, [0.0]), TypeError, "ref_sums must be a tensor or a field .* got list"),
        (lambda: dpo(TWO, TWO, beta=0), ValueError, "beta must be above 0 and finite, got 0"),
        (lambda: dpo(TWO, TWO, beta=math.nan), ValueError, "finite, got nan"),
        (lambda: dpo(TWO, TWO, label_smoothing=0.5), ValueError, "0 to below 0.5, got 0.5"),
        (lambda: kto(FOUR, FOUR, YES), ValueError, r"shape \[1\] for 2 pairs; pass \[2\]"),
        (lambda: kto(TWO, TWO, TWO[:1]), TypeError, "the integers 0 and 1, got torch.float32"),
        (lambda: kto(TWO, TWO, torch.tensor([-1])), ValueError, "label -1 of example 0: labels"),
        (lambda: kto(TWO, TWO, ["good"]), TypeError, "labels must be a tensor .* got list"),
        (lambda: bradley_terry(TWO, TWO), ValueError, r"margin has shape \[2\] for 1 pairs"),
        (lambda: bradley_terry(TWO, TWO[:1] / 0), ValueError, "margin is nan for pair 0; it must"),
    ],
)
def test_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# --- packed ------------------------------------------------------------------------------------

CASES = [(name, NOISE) for name in pairs.LOSSES]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: pairs.expected(name, NOISE, DATA) for name in pairs.LOSSES}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert np.abs(expected["gradient"]).max() > 1e-4
    np.testing.assert_allclose(found["gradient"], expected["gradient"], rtol=0, atol=1e-9)
    assert found["per_source"].keys() == expected["per_source"].keys()
    for key, (total, count) in expected["per_source"].items():
        assert found["per_source"][key] == (pytest.approx(total, abs=1e-9), count)


@pytest.mark.parametrize(("dp", "tp", "max_tokens"), [(1, 1, 400), (1, 1, 48), (2, 4, 64)])
@pytest.mark.parametrize("name", pairs.LOSSES)
def test_packed_pairs_have_the_loss_of_each_pair_alone(
    name: str, dp: int, tp: int, max_tokens: int, alone: dict[str, Any]
) -> None:
    batch = pairs.collated(DATA, max_tokens, ParallelLayout(dp=dp, tp=tp))
    kl = alone["kto"]["kl"]
    assert_same(pairs.step(name, NOISE, batch.split(1), kl), alone[name])
    if max_tokens == 48:
        assert len(batch) > 3
        assert_same(pairs.step(name, NOISE, [batch], kl), alone[name])


def test_the_first_dpo_loss_is_log_2() -> None:
    policy, reference, score = pairs.models(0.0)
    for max_tokens in (40, 400):
        batch = pairs.collated(DATA, max_tokens, ParallelLayout())
        for part in batch.split(1):
            found = pairs.loss_of("dpo", policy, reference, score, part, 0.0)
            assert (found.loss - math.log(2)).abs().max() < 1e-12


def test_two_ranks_have_the_loss_of_one_process(alone: dict[str, Any]) -> None:
    of_ranks = on_two_ranks(pairs.on_rank, CASES, 48, alone["kto"]["kl"])
    for found in of_ranks:
        for (name, _), of_loss in zip(CASES, found, strict=True):
            assert_same(of_loss, alone[name])


@pytest.mark.parametrize("loss", ["dpo", "kto", "kto, kl of a step"])
def test_a_reference_that_requires_gradients_gets_none(loss: str) -> None:
    sums, reference, kl = (of.clone().requires_grad_() for of in (SUMS, REFERENCE, SUMS[0]))
    if loss == "dpo":
        found = dpo(sums, reference)
    else:
        labels = torch.tensor([True, False, True])
        found = kto(sums, reference, labels, kl=kl if "step" in loss else None)
    found.loss.sum().backward()
    assert (reference.grad, kl.grad) == (None, None)
    assert sums.grad.abs().sum() > 0
