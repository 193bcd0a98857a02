"""Rollouts with images: the oracle, packed rows, mini-batches, micro-batches and their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import (
    assert_contract_dtypes,
    assert_equals_oracle,
    assert_round_trips,
    frozen,
    same_value,
)
from tests.oracle import packed_rollouts, rollout_batch, rows_of
from tests.strategies import FUZZ
from tests.vision.oracle_images import (
    FEWER,
    LAYOUTS,
    TOKEN,
    DrawnExample,
    add_images,
    draw_example,
    patches_of,
)
from torch_collate_kit import PackedCollator, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.rl import micro_batches, stage_mini_batches, unstage

FAMILY_NAMES = sorted(LAYOUTS)
seeds = st.integers(0, 2**32 - 1)


def draw_rollouts(
    rng: np.random.Generator, family: str, count: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[DrawnExample]]:
    """Given, plain, and as examples; images are in prompts and in responses."""
    given_, plain, examples = [], [], []
    while len(given_) < count:
        example = draw_example(rng, LAYOUTS[family], len(given_), "none")
        ids = example.ids
        if len(ids) < 2:
            continue
        cut = int(rng.integers(1, len(ids)))
        loss_mask = rng.integers(0, 2, len(ids) - cut).tolist()
        rollout = {
            "prompt_ids": ids[:cut],
            "response_ids": ids[cut:],
            "rewards": float(rng.integers(0, 3)),
            "logprobs": [-0.5 * t for t in range(len(ids) - cut)],
        }
        images = {k: v for k, v in example.given.items() if k not in ("input_ids", "loss_mask")}
        given_.append({**rollout, "loss_mask": loss_mask, **images})
        pairs = zip(ids[cut:], loss_mask, strict=True)
        plain.append({**rollout, "loss_mask": [m * (token != TOKEN) for token, m in pairs]})
        examples.append(example)
    return given_, plain, examples


@pytest.mark.parametrize("family", FAMILY_NAMES)
@FEWER
@given(seeds)
def test_rollouts_equal_the_oracle(family: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_, plain, examples = draw_rollouts(rng, family, int(rng.integers(1, 7)))
    before, layout = frozen(given_), LAYOUTS[family]
    options = {"pad_to_multiple_of": int(rng.choice([1, 8])), "normalize_loss": bool(seed % 2)}
    batch = RolloutCollator(0, vision=layout, **options)(given_)
    assert same_value(given_, before), "an argument was changed"
    expected = rollout_batch(plain, pad_token_id=0, **options)
    rows = [[(i, 0, len(example.ids))] for i, example in enumerate(examples)]
    assert_equals_oracle(batch, add_images(expected, examples, layout, rows))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, int(rng.integers(0, len(batch) + 1)))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@FEWER
@given(seeds)
def test_packed_rollouts_equal_the_oracle(family: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_, plain, examples = draw_rollouts(rng, family, int(rng.integers(1, 7)))
    layout, lengths = LAYOUTS[family], [len(example.ids) for example in examples]
    max_tokens = max(lengths) + int(rng.integers(0, 60))
    collate = PackedCollator(0, vision=layout, max_tokens=max_tokens)
    batch = collate(given_)
    plan = collate.plan(lengths, patches_of(examples))
    expected = packed_rollouts(plain, plan, pad_token_id=0, max_tokens=max_tokens)
    assert_equals_oracle(batch, add_images(expected, examples, layout, rows_of(plan)))
    assert_contract_dtypes(batch)


# --- mini-batches and micro-batches --------------------------------------------------------------


def assert_images_of(part: Batch, row: int, batch: Batch, other: int) -> None:
    for name in batch.placement.vision.family.fields:
        assert same_value(part[name][row], batch[name][other]), name
    tokens, others = part["attention_mask"][row].bool(), batch["attention_mask"][other].bool()
    for name in ("input_ids", "position_ids", "mrope_position_ids", "token_type_ids"):
        if name in batch:
            assert torch.equal(part[name][row][..., tokens], batch[name][other][..., others]), name


@pytest.mark.parametrize("balance", [None, "tokens", "attention"])
@FUZZ
@given(seeds, st.sampled_from(FAMILY_NAMES), st.integers(1, 3))
def test_staged_rows_have_their_images(balance: Any, seed: int, family: str, dp_size: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    given_, _, _ = draw_rollouts(rng, family, count)
    batch = RolloutCollator(0, vision=LAYOUTS[family])(given_)
    middle = int(rng.integers(0, count))
    boundaries = sorted({0, middle, count})
    staged = stage_mini_batches(batch, boundaries, dp_size, balance=balance)
    micro = []
    for start, ranks in zip(boundaries[:-1], staged, strict=True):
        widest = max(int(part.metadata["row_widths"].max()) for part in ranks)
        for part in ranks:
            for i, row in enumerate(part.row_metadata["row_indices"].tolist()):
                assert_images_of(part, i, batch, row if row >= 0 else start)
            parts = micro_batches(part, max_tokens=widest * int(rng.integers(1, 4)))
            for each in parts:
                for i, row in enumerate(each.row_metadata["row_indices"].tolist()):
                    assert_images_of(each, i, batch, row if row >= 0 else start)
                inputs = each.model_inputs("sdpa", labels=False)
                pixels = sum(len(each["pixel_values"][i]) for i in range(len(each)))
                assert ("pixel_values" in inputs) == (pixels > 0)
            micro.append(parts)
    counts = [[[len(p) for p in each["pixel_values"]] for each in parts] for parts in micro]
    restored = unstage(micro, counts)
    assert restored == [len(row) for row in batch["pixel_values"]]
