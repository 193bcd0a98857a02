"""Where windows of steps of full rows end: at rows that are filled, whatever comes after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    ParallelLayout,
)

RNG = np.random.default_rng(0)
NEARLY = RNG.integers(997, 1001, 50)  # of 1000


def sampler_of(lengths: Any, batch_rows: int, **options: Any) -> PackedBatchSampler:
    given = {
        n: options.pop(n) for n in ("window", "tail", "shuffle", "seed", "patches") if n in options
    }
    packing = PackingOptions(**{"max_tokens": 1000, **options})
    collate = PackedCollator(0, packing=packing, normalize_loss=False)
    return PackedBatchSampler(lengths, collate, batch_rows=batch_rows, dp_rank=0, **given)


# Lengths, rows of a step, steps of an epoch, options.
FULL: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "a row each": ([1000] * 100, 1, 100, {}),
    "a row each, 2 per step": ([1000] * 100, 2, 50, {}),
    "a row each, 8 per step": ([1000] * 100, 8, 13, {}),
    "a row each, dropped tail": ([1000] * 100, 8, 12, {"tail": "drop"}),
    "a row each, joined epochs": ([1000] * 100, 8, 16, {"tail": "wrap"}),
    "a row each, many rows": ([1000] * 900, 300, 3, {"window": 1}),
    "a row each, a few of many": ([1000] * 997, 1000, 1, {"window": 1}),
    "nearly a row each": (NEARLY, 2, 25, {}),
    "half a row each": ([500] * 64, 2, 16, {}),
    "a third each, nearly": (RNG.integers(332, 334, 96), 1, 32, {}),
    "one per row": ([7] * 32, 2, 16, {"max_sequences_per_row": 1}),
    "three per row": ([7] * 96, 2, 16, {"max_sequences_per_row": 3}),
    "in order": ([1000] * 32, 2, 16, {"strategy": "sequential"}),
    "first fit": ([1000] * 32, 2, 16, {"strategy": "first_fit_decreasing"}),
    "aligned": ([997] * 32, 2, 16, {"parallel": ParallelLayout(tp=4)}),
    "fp8": ([900] * 32, 2, 16, {"parallel": ParallelLayout(fp8="nvfp4")}),
    "several segments": ([[400, 600]] * 32, 2, 16, {}),
    "several aligned segments": ([[397, 600]] * 32, 2, 16, {"parallel": ParallelLayout(cp=2)}),
    "two segments of two": ([[5, 6]] * 32, 2, 16, {"max_sequences_per_row": 2}),
    "split": ([4000, 3000] * 16, 2, 56, {"overflow": "split"}),
    "dropped between": ([1001, 1000] * 16, 2, 8, {"overflow": "drop"}),
    "images": ([10] * 32, 2, 16, {"patches": [64] * 32, "max_patches": 64}),
    "images and a dummy": (
        [500] * 32, 2, 8, {"patches": [64] * 32, "max_patches": 128, "dummy_image_tokens": 4,
                           "rows_multiple_of": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", FULL)
def test_examples_that_fill_a_row_fill_all_rows_of_every_step(case: str) -> None:
    lengths, rows, num_steps, options = FULL[case]
    sampler = sampler_of(lengths, rows, **options)
    plans = [part.plan for part in sampler]
    assert len(plans) == num_steps
    assert all(len(plan.lengths) for plan in plans)
    assert sum(plan.num_dummy_rows for plan in plans) < rows  # of the last window
    if "tail" not in options:
        tokens = sum(int(plan.lengths.sum()) + plan.num_dropped_tokens for plan in plans)
        assert tokens == np.sum(lengths)
    for step in range(num_steps):  # a state that was given always loads
        other = sampler_of(lengths, rows, **options)
        other.load_state_dict(state := sampler.state_at(0, step))
        assert other.state_dict() == state
        assert other.examples(0, step).tolist() == sampler.examples(0, step).tolist()


@pytest.mark.parametrize("num_tokens", [1000, 997, 500])
def test_rows_of_a_stream_are_as_full(num_tokens: int) -> None:
    examples = [{"input_ids": [5] * num_tokens} for _ in range(24)]
    collate = PackedCollator(0, max_tokens=1000)
    stream = PackedIterableDataset(examples, collate, batch_rows=2, buffer_size=5)
    in_rows = [len(of) for batch in stream for of in batch["sub_seq_lengths"]]
    assert in_rows == [1000 // num_tokens] * (24 // (1000 // num_tokens))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"max_sequences_per_row": 3},
    "limited, in order": {"max_sequences_per_row": 3, "strategy": "sequential"},
    "limited, first fit": {"max_sequences_per_row": 5, "strategy": "first_fit_decreasing"},
    "segments": {"max_sequences_per_row": 9},
    "segments, in order": {"max_sequences_per_row": 9, "strategy": "sequential"},
    "images": {"max_patches": 400},
    "images, dummies": {"max_patches": 400, "dummy_image_tokens": 8, "rows_multiple_of": 2},
    "images, no limit": {"dummy_image_tokens": 8, "rows_multiple_of": 2},
}


def data_of(kind: str, rng: np.random.Generator, number: int, longest: int) -> list[Any]:
    lengths = rng.integers(1, longest, number)
    if not kind.startswith("segments"):
        return [int(n) for n in lengths]
    return [[int(n)] * int(rng.integers(1, 2 + longest // 150)) for n in lengths // 8 + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_windows_do_not_depend_on_what_follows_them(kind: str) -> None:
    options = {**KINDS[kind], "window": 4, "shuffle": False}
    longest = 60 if kind.startswith("limited") else 400
    same = data_of(kind, np.random.default_rng(1), 1000, longest)
    images = np.random.default_rng(2).integers(1, 200, 1000) * (np.arange(1000) % 3 == 0)
    found = []
    for number, longest, most in ((0, 2, 1), (2000, 3, 1), (1500, 990, 399), (30, 990, 1)):
        rng = np.random.default_rng(3)
        lengths = same + data_of(kind, rng, number, longest)
        if kind.startswith("images"):
            options["patches"] = [*images.tolist(), *rng.integers(0, most, number).tolist()]
        sampler, steps, place = sampler_of(lengths, 2, **options), [], 0
        for step, part in enumerate(sampler):
            place += len(sampler.examples(0, step))
            if place > 800:
                break
            rows = part.plan.row_offsets.tolist(), part.plan.example_indices.tolist()
            steps.append((sampler.examples(0, step).tolist(), *rows))
        found.append(steps)
    assert len(found[0]) > 10
    assert all(steps == found[0] for steps in found)


def test_rows_with_images_lose_no_example() -> None:
    """Windows counted rows of other limits than they were planned with, and left rows over."""
    patches = [303, 249, 381, 62, 309] * 5
    options = {"max_tokens": 4096, "max_patches": 1000, "window": 1, "patches": patches}
    for seed in (111, *range(4)):
        layout = ParallelLayout(tp=3)
        sampler = sampler_of(
            [225, 862, 622, 783, 362] * 5, 2, balance=None, parallel=layout, seed=seed, **options
        )
        found = [i for step in range(len(sampler)) for i in sampler.examples(0, step).tolist()]
        assert sorted(found) == list(range(25))
