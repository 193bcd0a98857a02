"""Losses of pairs: by hand, packed against each pair alone, over micro-batches and ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.devices import NoWaiting
from tests.preference import pairs
from tests.ranks import on_two_ranks
from tests.tiny_models import TINY
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.losses import global_num_examples, segment_ends
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
        (
            lambda: kto(FOUR, FOUR, YES.repeat(2), kl=TWO),
            ValueError,
            r"one finite number, got \[2\]",
        ),
        (lambda: kto(TWO, TWO, YES, kl=math.nan), ValueError, "one finite number, got nan"),
        (lambda: kto(TWO, TWO, YES, desirable_weight=-1), ValueError, "desirable_weight must be"),
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


# --- DPO on random batches of pairs, made in every way, against each pair alone, in fp64


NOISE = 0.05
NUMBER = {"number": PerExample(torch.int64)}


def made_pairs(rng: np.random.Generator) -> list[dict[str, Any]]:
    found = pairs.pairs(int(rng.integers(9, 25)), int(rng.integers(2**31)))
    keys = ("input_ids", "loss_mask")
    return [{**{key: of[key] for key in keys}, "number": i} for i, of in enumerate(found)]


def collator(rng: np.random.Generator, dp: int) -> PackedCollator:
    strategy = rng.choice(["balanced", "sequential", "best_fit_decreasing", "first_fit_decreasing"])
    return PackedCollator(
        0,
        max_tokens=int(rng.integers(36, 64)),
        strategy=str(strategy),
        overflow="drop",
        parallel=ParallelLayout(dp=dp, tp=int(rng.choice([1, 2, 4]))),
        normalize_loss=False,
        fields=NUMBER,
    )


def fits_in_a_row(example: dict[str, Any], collate: PackedCollator) -> bool:
    align = collate.packing.parallel.align
    return sum(-(-len(of) // align) * align for of in example["input_ids"]) <= (
        collate.packing.capacity
    )


def of_collators(rng: np.random.Generator, data: list[Any]) -> Iterator[list[Batch]]:
    yield [collator(rng, int(rng.choice([1, 2, 4])))(data)]
    yield [PaddedCollator(0, normalize_loss=False, fields=NUMBER)(data)]


def of_samplers(rng: np.random.Generator, data: list[Any]) -> Iterator[list[Batch]]:
    """Steps of all ranks; the run goes on with another number of ranks after each."""
    dataset, state, epoch = TokenizedDataset(data, columns=[*data[0]]), None, set[int]()
    words, seed = rng.bit_generator.state, int(rng.integers(99))
    for step in range(len(data)):
        dp, found, states = int((4, 1, 2)[step % 3]), [], []
        for rank in range(dp):
            rng.bit_generator.state = words  # the same collator on every rank, in every run
            collate = collator(rng, dp)
            sampler = PackedBatchSampler(
                dataset, collate, batch_rows=4, tail="keep", window=2, dp_rank=rank, seed=seed
            )
            if state is not None:
                sampler.load_state_dict(state)
            if sampler.epoch or sampler.state_dict()["step"] == sampler.count_steps():
                fits = [i for i, of in enumerate(data) if fits_in_a_row(of, collate)]
                assert sorted(epoch) == fits, "an example was lost"
                return
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
            with PrefetchLoader(loader) as batches:
                found.append(next(iter(batches)))
                states.append(batches.state_dict()["sampler"])
        state = states[0]
        numbers = [int(i) for batch in found for i in batch["number"].values]
        assert not epoch & {*numbers}, "an example came twice"
        epoch |= {*numbers}
        yield found


def of_streams(rng: np.random.Generator, data: list[Any]) -> Iterator[list[Batch]]:
    dp, words = int(rng.choice([1, 2])), rng.bit_generator.state
    streams = []
    for rank in range(dp):
        rng.bit_generator.state = words
        collate = collator(rng, dp)
        streams.append(
            iter(
                PackedIterableDataset(
                    data, collate, batch_rows=2 * dp, buffer_size=8, dp_rank=rank, shuffle=True
                )
            )
        )
    yield from map(list, zip(*streams, strict=False))


WAYS = (of_collators, of_samplers, of_streams)


def assert_equals_pairs_alone(step: list[Batch], data: list[Any]) -> None:
    numbers = [int(i) for batch in step for i in batch["number"].values]
    if not numbers:
        return
    mean = len(numbers)
    assert global_num_examples(step) == mean or step[0].metadata["dropped"]
    policy, reference, score = pairs.models(NOISE)
    total = torch.zeros((), dtype=torch.float64)
    for batch in step:
        if not len(batch["number"].values):
            continue
        sums = pairs.sums_of(policy, batch)
        with torch.no_grad():
            of_reference = pairs.sums_of(reference, batch)
            first = dpo(of_reference, pairs.sums_of(reference, batch)).loss
        assert (first - math.log(2)).abs().max() <= 1e-12
        loss = dpo(sums, of_reference, label_smoothing=0.1).loss.sum() / mean
        loss.backward()
        total += loss.detach()
    keys = {"label": 1, "margin": 0.0, "source": "a"}
    alone = pairs.expected("dpo", NOISE, [{**data[i], **keys} for i in numbers])
    assert float(total) == pytest.approx(alone["loss"], rel=1e-9)
    gradient = pairs.gradients(policy, score).numpy()
    assert np.abs(gradient - alone["gradient"]).max() <= 1e-9 * np.abs(gradient).max()


def check(count: int) -> None:
    rng, done = np.random.default_rng(0), 0
    while done < count:
        for way in WAYS:
            data = made_pairs(rng)
            for step in islice(way(rng, data), 4):
                assert_equals_pairs_alone(step, data)
                done += len(step)


def test_packed_dpo_is_that_of_pairs_one_by_one() -> None:
    check(8)


@pytest.mark.release
def test_packed_dpo_is_that_of_pairs_one_by_one_in_a_thousand_batches() -> None:
    check(1000)


# --- Losses of packed pairs against those of TRL's trainers on padded ones, in fp32


def trainer(name: str, model: nn.Module, reference: nn.Module) -> Any:
    """TRL's trainer with what its loss reads, and nothing that its constructor makes."""
    made = object.__new__(getattr(pytest.importorskip("trl"), name))
    alone = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, num_processes=1)
    alone.gather_for_metrics = alone.gather
    vars(made).update(
        {"model": model, "ref_model": reference, "accelerator": alone, "beta": 0.1},
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        **dict.fromkeys(("aux_loss_enabled", "use_weighting", "precompute_ref_logps"), False),
        **{"ld_alpha": None, "f_divergence_type": "reverse_kl", "label_smoothing": 0.0},
        **{"loss_types": ["sigmoid"], "loss_weights": [1.0], "loss_type": "kto"},
        **{"calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.5},
        **{"_total_train_tokens": 0, "_tp_size": 1},
    )
    return made


def sides(pair: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """The prompt and both answers."""
    num_prompt = pair["loss_mask"][0].count(0)
    chosen, rejected = (ids.tolist() for ids in pair["input_ids"])
    return chosen[:num_prompt], chosen[num_prompt:], rejected[num_prompt:]


def of_trl(name: str, model: Any, reference: Any, head: nn.Linear) -> float:
    from trl.trainer import dpo_trainer, kto_trainer, reward_trainer
    from trl.trainer.utils import add_fused_lm_head

    if name == "bradley_terry":
        keys = ("chosen_ids", "rejected_ids")
        rows: list[dict[str, Any]] = [
            dict(zip(keys, map(list, pair["input_ids"]), strict=True)) | {"margin": pair["margin"]}
            for pair in DATA
        ]
        inputs = reward_trainer.DataCollatorForPreference(pad_token_id=0)(rows)

        def scored(input_ids: Any, attention_mask: Any, margin: Any, use_cache: bool) -> Any:
            hidden = model.model(input_ids, attention_mask, use_cache=use_cache)[0]
            last = attention_mask.sum(1) - 1
            return SimpleNamespace(logits=head(hidden[torch.arange(len(last)), last]))

        made = trainer("RewardTrainer", model, reference)
        return float(made.compute_loss(scored, inputs))
    for each in (model, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    if name == "dpo":
        keys = ("prompt_ids", "chosen_ids", "rejected_ids")
        rows = [dict(zip(keys, sides(pair), strict=True)) for pair in DATA]
        inputs = dpo_trainer.DataCollatorForPreference(pad_token_id=0)(rows)
        return float(trainer("DPOTrainer", model, reference)._compute_loss(model, inputs, False))
    keys = ("prompt_ids", "completion_ids", "KL_completion_ids")
    rows = [
        dict(zip(keys, sides(pair), strict=True)) | {"label": bool(pair["label"])} for pair in DATA
    ]
    inputs = kto_trainer.DataCollatorForUnpairedPreference(pad_token_id=0)(rows)
    return float(trainer("KTOTrainer", model, reference)._compute_loss(model, inputs, False))


@pytest.mark.parametrize("name", pairs.LOSSES)
def test_the_loss_is_that_of_trl(name: str) -> None:
    pytest.importorskip("trl", "1.16")  # with the parts that this test calls
    policy, reference, _ = (module.float() for module in pairs.models(0.05))
    torch.manual_seed(3)
    head = nn.Linear(TINY["hidden_size"], 1)
    batch = pairs.collated(DATA, 400, ParallelLayout())
    with torch.no_grad():
        sums, ref_sums = (pairs.sums_of(model, batch) for model in (policy, reference))
        hidden = policy.model(**batch.model_inputs("torch_varlen", labels=False))[0]
        rewards = head(hidden.flatten(0, 1)[segment_ends(batch)])[:, 0]
        margin, labels = (pairs.per_pair(batch, key) for key in ("margin", "label"))
        found = {
            "dpo": dpo(sums, ref_sums),
            "kto": kto(sums, ref_sums, labels, undesirable_weight=1.5),
            "bradley_terry": bradley_terry(rewards, margin),
        }[name].loss.mean()
        for model in (policy, reference):
            model.set_attn_implementation("sdpa")
        expected = of_trl(name, policy, reference, head)
    assert found.item() == pytest.approx(expected, rel=0, abs=1e-6)
    assert found.item() != pytest.approx(0.693147, abs=1e-3)
