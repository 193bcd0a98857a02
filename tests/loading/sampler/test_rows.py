"""Steps of full rows: the runs of the loops, each example once, the same rows on any ranks."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from tests.loading.sampler.rows_oracle import windows
from tests.loading.seals import resealed
from torch_collate_kit import PackedBatchSampler, PackedCollator, TokenizedDataset
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout

ROWS = 12


def sampler_of(lengths: Any, dp: int = 4, rank: int = 0, **options: Any) -> PackedBatchSampler:
    given = {"batch_rows": ROWS, "seed": 1, "normalize_loss": False, **options}
    return packed_sampler(lengths, dp_rank=rank, parallel=ParallelLayout(dp=dp), **given)


def random_case(seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(8, 400))
    lengths = rng.geometric(1 / rng.integers(2, 300), size=rng.integers(1, 900))
    options: dict[str, Any] = {"max_tokens": capacity, "window": int(rng.integers(1, 6))}
    options["strategy"] = ["balanced", "sequential", "best_fit_decreasing"][seed % 3]
    options["overflow"] = ["split", "drop", "truncate", "raise"][seed % 4]
    options["shuffle"] = [True, "keyed", False][int(rng.integers(3))]
    if options["overflow"] == "raise":
        lengths = np.minimum(lengths, capacity)
    lengths[0] = min(lengths[0], capacity)  # one that is not dropped
    if seed % 5 == 0:
        lengths = np.full_like(lengths, capacity // 2 + 1)  # no two share a row
    if seed % 7 == 0 and options["overflow"] == "raise":
        options["patches"] = rng.integers(0, 20, size=len(lengths)) * (
            rng.random(len(lengths)) < 0.3
        )
        options["max_patches"] = 40
    return lengths, options


def rows_of(parts: list[Any]) -> list[list[tuple[int, int, int]]]:
    """The rows of all ranks: (example, first token, tokens) of each piece."""
    rows = []
    for part in parts:
        examples, starts, lengths, offsets = part.pieces
        indices = np.array(part.indices, dtype=np.int64)[examples]
        pieces = np.stack([indices, starts, lengths], axis=1).tolist()
        rows += [sorted(map(tuple, pieces[a:b])) for a, b in pairwise(offsets)]
    return sorted(rows)


def seeds(number: int, before_a_release: int) -> list[Any]:
    more = range(number, before_a_release)
    return [*range(number), *(pytest.param(n, marks=pytest.mark.release) for n in more)]


@pytest.mark.parametrize("seed", seeds(16, 40))
def test_each_example_comes_once_and_no_row_is_too_long(seed: int) -> None:
    lengths, options = random_case(seed)
    sampler = sampler_of(lengths, **options)
    num_steps, steps = len(sampler), list(sampler)
    assert len(steps) == num_steps > 0
    found: list[int] = []
    lost = 0
    for step, part in enumerate(steps):
        plan = part.plan
        assert plan.num_rows == ROWS
        assert plan.row_cells.max() <= options["max_tokens"]
        assert plan.row_patches.max(initial=0) <= options.get("max_patches", 0)
        lost += plan.num_cut_tokens + plan.num_dropped_tokens
        found += sampler.examples(0, step).tolist()
    kept = sum(int(part.plan.lengths.sum()) for part in steps)
    assert kept + lost == lengths.sum()
    assert sorted(set(found)) == list(range(len(lengths)))
    assert options["overflow"] == "split" or len(found) == len(lengths)
    for example in found[:: len(found) // 3 + 1]:
        expected = [(0, k) for k in range(len(steps)) if example in sampler.examples(0, k)]
        assert sampler.when(example, 0) == expected


@pytest.mark.parametrize("seed", seeds(10, 20))
def test_windows_are_those_of_the_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity, window = int(rng.integers(8, 200)), int(rng.integers(1, 4))
    lengths = np.minimum(rng.geometric(1 / rng.integers(2, 90), size=400), capacity)
    sampler = sampler_of(lengths, max_tokens=capacity, window=window, shuffle=False)
    stops = windows(lengths.tolist(), window * ROWS, capacity)
    found = [sampler.examples(0, step) for step in range(len(sampler))]
    for number, stop in enumerate(stops):
        start = stops[number - 1] if number else 0
        steps = (
            found[number * window :] if stop == len(lengths) else found[number * window :][:window]
        )
        assert sorted(np.concatenate(steps).tolist()) == list(range(start, stop))


@pytest.mark.parametrize("seed", seeds(10, 25))
@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
def test_a_run_goes_on_anywhere_with_the_same_rows(seed: int, tail: str) -> None:
    lengths, options = random_case(seed)
    options["tail"] = tail
    first = sampler_of(lengths, **options)
    rng = np.random.default_rng(seed)
    ranks = [sampler_of(lengths, rank=rank, **options) for rank in range(4)]
    epochs = [list(zip(*ranks, strict=True)) for _ in range(2)]
    for dp in (1, 3, 12):
        epoch = int(rng.integers(2))
        if not epochs[epoch]:
            continue
        step = int(rng.integers(len(epochs[epoch])))
        state = json.loads(json.dumps(first.state_at(epoch, step)))
        others = [sampler_of(lengths, dp, rank, **options) for rank in range(dp)]
        for other in others:
            other.load_state_dict(state)
        for expected, parts in zip(epochs[epoch][step:], zip(*others, strict=True), strict=True):
            assert rows_of(list(parts)) == rows_of(list(expected))
        others[0].set_epoch(epoch, step=step)
        assert others[0].state_dict() == resealed(state, layout={"dp": dp})


@pytest.mark.parametrize("shuffle", [True, "keyed", False])
def test_joined_epochs_begin_where_the_last_one_ended(shuffle: Any) -> None:
    """After n epochs each example came n times, and those read ahead once more."""
    lengths = np.random.default_rng(2).integers(1, 60, 300)
    options = {"max_tokens": 64, "window": 3, "tail": "wrap", "shuffle": shuffle}
    sampler, jumping = sampler_of(lengths, **options), sampler_of(lengths, **options)
    counts = np.zeros(300, dtype=np.int64)
    for epoch in range(4):
        steps = [sampler.examples(epoch, step) for step in range(sampler.count_steps(epoch))]
        counts += np.bincount(np.concatenate(steps), minlength=300)
        assert {*counts.tolist()} == {epoch + 1, epoch + 2}, "some examples are read ahead"
    assert np.array_equal(jumping.examples(3, 0), sampler.examples(3, 0))


def test_steps_are_full_and_even() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5, 1, 20_000).astype(int) + 2, 4096)
    sampler = sampler_of(lengths, dp=8, batch_rows=16, max_tokens=4096)
    plans = [part.plan for part in sampler][:-8]
    full = np.array([plan.lengths.sum() for plan in plans]) / (16 * 4096)
    uneven = [plan.cost_per_rank.max() / plan.cost_per_rank.mean() for plan in plans]
    assert full.mean() > 0.993
    assert full.min() > 0.97
    assert np.mean(uneven) < 1.01
    assert max(uneven) < 1.06


def test_a_reshuffle_begins_after_the_window() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 700)
    sampler, plain = (sampler_of(lengths, max_tokens=64, window=3) for _ in range(2))
    sampler.set_epoch(0, step=4)
    sampler.reshuffle()
    assert len(sampler.state_dict()["reshuffles"]) == 1
    steps = [sampler.examples(0, step) for step in range(len(sampler))]
    assert all(np.array_equal(steps[k], plain.examples(0, k)) for k in range(6))
    assert not np.array_equal(steps[6], plain.examples(0, 6))
    assert sorted(np.concatenate(steps).tolist()) == list(range(700))
    resumed = sampler_of(lengths, max_tokens=64, window=3)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_at(0, 7))))
    assert np.array_equal(resumed.examples(0, 9), steps[9])


@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("at", [1, 4, 6, 11, 13])
def test_a_reshuffle_leaves_the_steps_before_it_as_they_were(tail: str, at: int) -> None:
    """A window is found from more examples than fit, which the reshuffle may have changed."""
    lengths = np.random.default_rng(at).integers(1, 50, 160)
    options: dict[str, Any] = {"max_tokens": 50, "window": 4, "batch_rows": 4, "tail": tail}
    plain, sampler = sampler_of(lengths, **options), sampler_of(lengths, **options)
    for _ in range(2):  # the second in the window of the first
        sampler.set_epoch(0, step=at)
        sampler.reshuffle()
        state = json.loads(json.dumps(sampler.state_at(0, at)))
        whole = sampler_of(lengths, **options)
        whole.load_state_dict(state)
        stop = min(-(-at // 4) * 4, len(plain))
        for step in range(stop):
            assert np.array_equal(whole.examples(0, step), plain.examples(0, step)), step
        if tail == "keep":
            steps = [whole.examples(0, step) for step in range(whole.count_steps(0))]
            assert sorted(np.concatenate(steps).tolist()) == list(range(160))


def test_loss_tokens_of_a_step_are_those_of_all_ranks() -> None:
    rows = TokenizedDataset([{"input_ids": [7] * n} for n in (9, 3, 8, 2, 5, 7)])
    collate = PackedCollator(0, max_tokens=16, parallel=ParallelLayout(dp=2))
    parts = [next(iter(PackedBatchSampler(rows, collate, batch_rows=4, dp_rank=r))) for r in (0, 1)]
    assert [part.num_loss_tokens for part in parts] == [28, 28]
    batches = [collate(rows.__getitems__(part)) for part in parts]
    assert sum(float(batch["loss_mask"].sum()) for batch in batches) == pytest.approx(1)


BAD = [
    ({"batch_rows": 6}, ValueError, "batch_rows must be a multiple of parallel.dp=4, got 6; it"),
    ({"rows_multiple_of": 8}, ValueError, "batch_rows must be a multiple of rows_multiple_of=8, "),
    ({"batch_size": 8}, TypeError, "pass one of batch_size, the examples of a step, and batch_ro"),
    ({"batch_rows": None}, TypeError, "pass one of batch_size, the examples of a step, and batch"),
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    (
        {"tail": "drop"},
        ValueError,
        "epoch 0 fills fewer than batch_rows=12 rows, and tail='drop' l",
    ),
    ({"lengths": []}, ValueError, "examples must be at least 1, got 0; an empty dataset has no ba"),
    ({"max_tokens": 2}, DataError, "example 0 has 3 tokens, more than the 2 that fit in a row"),
    ({"max_tokens": 2, "overflow": "drop"}, ValueError, "all 4 examples are longer than max_toke"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        sampler_of(**{"lengths": [3, 4, 5, 6], "max_tokens": 16, **options})


@pytest.mark.parametrize("seed", range(3))
def test_the_first_step_of_a_window_costs_as_much_as_the_others(seed: int) -> None:
    """Rows are dealt in a snake: dealt in one direction, it has 1.13 to 1.16 times the mean."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(5, 1.2, 4000)), 4, 1024).astype(int)
    collate = PackedCollator(0, max_tokens=1024)
    sampler = PackedBatchSampler(lengths, collate, batch_rows=4, seed=seed)
    costs = np.array([(lengths[step.indices] ** 2.0).sum() for step in sampler])
    windows = costs[: len(costs) // 8 * 8].reshape(-1, 8)
    assert 0.95 < (windows[:, 0] / windows.mean(1)).mean() < 1.05
