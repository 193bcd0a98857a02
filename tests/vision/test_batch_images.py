"""Images in batches against the oracle: every layout, target form and family."""

from __future__ import annotations

import warnings
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
from tests.building import packed_collator
from tests.oracle import (
    alignment,
    packed_batch,
    packed_rollouts,
    padded_batch,
    rollout_batch,
    rows_of,
)
from tests.strategies import FUZZ
from tests.vision.oracle_images import (
    FEWER,
    LAYOUTS,
    TOKEN,
    DrawnExample,
    add_images,
    draw_example,
    packed_with_images,
    patches_of,
)
from torch_collate_kit import PackedCollator, PaddedCollator, ParallelLayout, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import RankPlan
from torch_collate_kit.rl import micro_batches, stage_mini_batches, unstage

FORMS = ("labels", "loss_mask", "weights", "num_actions", "completion_mask", "none")
PADS = (0, 3)

seeds = st.integers(0, 2**32 - 1)


def drawn_examples(
    seed: int, family: str, form: str, *, count: int | None = None
) -> tuple[np.random.Generator, list[DrawnExample]]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8)) if count is None else count
    return rng, [draw_example(rng, LAYOUTS[family], i, form) for i in range(count)]


def given_form(rng: np.random.Generator, examples: list[DrawnExample], form: str) -> Any:
    """A list, or columns."""
    given = [example.given for example in examples]
    if rng.random() < 0.7:
        return given
    names = {name for example in given for name in example}
    return {name: [example.get(name) for example in given] for name in names}


def train_all(examples: Any, form: str) -> dict[str, Any]:
    return {"train_all": True} if form == "none" else {}


@pytest.mark.parametrize("family", list(LAYOUTS))
@FEWER
@given(seeds, st.sampled_from(FORMS), st.sampled_from(("left", "right")))
def test_padded_batches(family: str, seed: int, form: str, side: Any) -> None:
    rng, examples = drawn_examples(seed, family, form)
    layout, given_ = LAYOUTS[family], given_form(rng, examples, form)
    before = frozen(given_)
    options = {"padding_side": side, "pad_to_multiple_of": int(rng.choice([1, 3, 8]))}
    pad = int(rng.choice(PADS))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = PaddedCollator(pad, vision=layout, **options, **train_all(given_, form))(given_)

    assert same_value(given_, before), "an argument was changed"
    plain = [example.plain for example in examples]
    expected = padded_batch(plain, pad_token_id=pad, **options)
    rows = [[(i, 0, len(example.ids))] for i, example in enumerate(examples)]
    assert_equals_oracle(batch, add_images(expected, examples, layout, rows, padding_side=side))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, int(rng.integers(0, len(batch) + 1)))


@pytest.mark.parametrize("family", list(LAYOUTS))
@FEWER
@given(seeds, st.sampled_from(FORMS))
def test_packed_batches(family: str, seed: int, form: str) -> None:
    rng, examples = drawn_examples(seed, family, form)
    layout, given_ = LAYOUTS[family], given_form(rng, examples, form)
    before = frozen(given_)
    sizes = {"dp": int(rng.choice([1, 2, 3])), "tp": int(rng.choice([1, 1, 4]))}
    align, _ = alignment(tp=sizes["tp"])
    lengths = [len(example.ids) for example in examples]
    longest = -(-max(lengths) // align) * align
    overflow = str(rng.choice(["raise", "drop"]))
    room = int(rng.integers(0, 2 * longest))
    if overflow == "drop":
        longest = max(align, longest - int(rng.integers(0, longest)))
    # of several ranks one may need a smallest image
    smallest = -(-layout.smallest_tokens // align) * align * (sizes["dp"] > 1)
    max_tokens = longest + room + smallest
    packing: dict[str, Any] = {"max_tokens": max_tokens, "overflow": overflow}
    packing["strategy"] = str(rng.choice(["best_fit_decreasing", "sequential", "balanced"]))
    packing["max_sequences_per_row"] = rng.choice([None, 1, 3])
    wide = bool(rng.integers(0, 2))
    parallel = ParallelLayout(**sizes)
    collate = packed_collator(
        0, vision=layout, fixed_width=wide, parallel=parallel, **packing, **train_all(given_, form)
    )
    plan = collate.plan(lengths, patches_of(examples))

    batch = collate(given_)

    assert same_value(given_, before), "an argument was changed"
    size = {"max_tokens": packing["max_tokens"], "align": align, "fixed_width": wide}
    assert_equals_oracle(batch, packed_with_images(examples, plan, layout, **size))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, int(rng.integers(0, len(batch) + 1)))


# --- where an example may be cut -----------------------------------------------------------------


def slow_cut(example: DrawnExample, family: str, limit: int) -> int:
    """The longest beginning, up to ``limit`` tokens, of whole images that may be kept."""
    ends, place = [], 0
    ids = example.ids
    for image in example.images:
        left = image["tokens"]
        while left:
            left -= ids[place] == TOKEN
            place += 1
        ends.append(place)
    for stop in range(min(limit, len(ids)), -1, -1):
        kept = sum(end <= stop for end in ends)
        if ids[:stop].count(TOKEN) != sum(image["tokens"] for image in example.images[:kept]):
            continue
        if family in ("internvl", "idefics3") and 0 < kept < len(ends):
            continue  # images are not told from tiles
        if family == "llava_onevision" and kept == 1 < len(ends):
            continue  # alone it would be taken for one that is cut into tiles
        return stop
    raise AssertionError


def check_cut(family: str, example: DrawnExample, stop: int, **packing: Any) -> None:
    """Collated whole with overflow="truncate", the example is cut at ``stop``."""
    layout = LAYOUTS[family]
    packing = {"max_tokens": len(example.ids), "overflow": "truncate"} | packing
    collate = PackedCollator(0, vision=layout, **packing)
    if not stop:
        with pytest.raises(DataError, match="example 0 begins with an image that does not fit"):
            collate([example.given])
        return
    plan = PackedCollator(0, max_tokens=stop, overflow="truncate").plan([len(example.ids)])
    size = {"pad_token_id": 0, "max_tokens": packing["max_tokens"]}
    expected = packed_batch([example.plain], plan, **size)
    expected = add_images(expected, [example], layout, [[(0, 0, stop)]])
    assert_equals_oracle(collate([example.given]), expected)


@pytest.mark.parametrize("family", list(LAYOUTS))
@FEWER
@given(seeds)
def test_truncated_examples_keep_their_first_images(family: str, seed: int) -> None:
    """Whole, with their tokens and entries; the others go."""
    _, [example] = drawn_examples(seed, family, "labels", count=1)
    for limit in range(1, len(example.ids)):
        check_cut(family, example, slow_cut(example, family, limit), max_tokens=limit)


@pytest.mark.parametrize("family", list(LAYOUTS))
@FEWER
@given(seeds)
def test_a_budget_of_patches_cuts_before_an_image(family: str, seed: int) -> None:
    """The first image over the budget goes, and all that comes after it."""
    _, [example] = drawn_examples(seed, family, "labels", count=1)
    [patches] = patches_of([example])
    first_tokens = [i for i, token in enumerate(example.ids) if token == TOKEN]
    for budget in range(1, sum(patches)):
        kept = sum(total <= budget for total in np.cumsum(patches).tolist())
        if not LAYOUTS[family].counts_images:
            kept = 0  # images are not told from tiles
        if family == "llava_onevision" and kept == 1:
            kept = 0  # alone it would be taken for one that is cut into tiles
        stop = first_tokens[sum(image["tokens"] for image in example.images[:kept])]
        check_cut(family, example, stop, max_patches=budget)


@pytest.mark.parametrize("family", list(LAYOUTS))
@FEWER
@given(seeds)
def test_patches_of_an_example_follow_from_its_fields(family: str, seed: int) -> None:
    """However its tiles are laid out and padded; no pixel is read where sizes are there."""
    _, examples = drawn_examples(seed, family, "labels")
    layout = LAYOUTS[family]
    found = [layout.patches(example.given) for example in examples]
    if layout.counts_images:
        assert found == patches_of(examples)
    else:
        assert [sum(of) for of in found] == [sum(of) for of in patches_of(examples)]


def test_an_image_is_not_cut_by_split_nor_by_a_plan_of_lengths_alone() -> None:
    layout = LAYOUTS["gemma3"]
    example = {"input_ids": [9] * 3 + [70] * 9, "pixel_values": np.zeros((1, 3, 2, 2))}
    collate = PackedCollator(0, vision=layout, max_tokens=2, overflow="truncate")
    planned = RankPlan(collate.plan([12])).with_examples([example])
    with pytest.raises(DataError, match=r"0: a piece of it, tokens 0 to 2, cuts through its imag"):
        collate(planned)
    with pytest.raises(DataError, match=r"an example with images is never split; raise max_tokens"):
        PackedCollator(0, vision=layout, max_tokens=8, overflow="split")([example])


# --- Rollouts with images: the oracle, packed rows, mini-batches, micro-batches and their order


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
