"""The layouts of a report: what is recommended and why, shared prefixes, and steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.oracle import trie
from torch_collate_kit import (
    ModelCost,
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    TokenizedDataset,
    packing_report,
)

FULL = "the smallest of those that drop and cut nothing and leave at most 2% padding"
LEAST = "the least padding of those that drop and cut nothing"
FEWEST = FULL.replace("drop and cut nothing", "lose the fewest examples (3)")
LONG = [*[8] * 16, *[16] * 6, *[40] * 3]
MIXED = [
    *(17, 12, 19, 14, 20, 18, 10, 19, 16, 10, 8, 15, 12, 20, 9),
    *(8, 19, 7, 18, 12, 13, 18, 12, 11, 17, 17, 19, 7, 16, 13),
]
# Lengths, max_tokens to compare; the recommended one, and why
RULES: dict[str, tuple[list[int], list[int], int, str]] = {
    "the smallest": ([8] * 8, [8, 16, 32], 8, FULL),
    "that is full enough": ([*[7] * 12, 8], [8, 92, 184], 92, FULL),
    "a lost example is worse than padding": ([*[8] * 16, 16], [8, 16], 16, FULL),
    "than any padding": ([8, 8, 10], [8, 16], 16, LEAST),
    "half a point does not pay for more memory": (MIXED, [26, 41], 26, LEAST),  # 13.8%, 13.4%
    "all lose something": (LONG, [8, 16, 32], 16, FEWEST),
}


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
@pytest.mark.parametrize("name", RULES)
def test_rule(name, overflow):
    lengths, limits, max_tokens, reason = RULES[name]
    for order in (limits, limits[::-1]):
        options = {"strategies": ["best_fit_decreasing"], "overflow": overflow}
        found = packing_report(lengths, order, **options, show=False)["recommended"]
        assert (found["max_tokens"], found["reason"]) == (max_tokens, reason)


@pytest.mark.parametrize(
    ("lengths", "options", "strategy"),
    [  # the default of collators, where it has as few rows and as little padding
        ([5, 3, 9, 2], {"max_tokens": 10}, "balanced"),
        ([5, 3, 9, 2], {}, "balanced"),
        ([5, 3, 9, 2], {"max_tokens": 10, "strategies": ["balanced", "sequential"]}, "balanced"),
        (MIXED, {"max_tokens": 41, "batch_size": 8}, "balanced"),
        ([5, 3, 9, 2], {"max_tokens": 10, "strategies": "sequential"}, "sequential"),
    ],
)
def test_the_strategy_is_that_of_collators_where_it_is_as_good(lengths, options, strategy):
    found = packing_report(lengths, **options, show=False)["recommended"]["strategy"]
    assert found == strategy


def notes(lengths, limits, **options):
    return packing_report(lengths, limits, **options, show=False)["recommended"]["notes"]


def test_notes_say_what_is_lost():
    lengths = [*[8] * 97, 16]  # of 792 tokens
    smaller = "note: max_tokens=8 drops 1 example (2.02% of the tokens lost)"
    assert notes(lengths, [4, 8, 16]) == [smaller]
    assert notes([*lengths, 8], [16]) == []
    assert notes([*[7] * 96, 10, 16], [10, 16]) == [], "a smaller one that is full of padding"
    assert notes(lengths, [8]) == [
        "note: drops 1 example (2.02% of the tokens lost); a larger max_tokens keeps more"
    ]
    assert notes(lengths, [8], overflow="truncate") == [
        "note: cuts 1 example (1.01% of the tokens lost); a larger max_tokens keeps more"
    ]


@pytest.mark.parametrize(
    ("options", "cut"),
    [({"strategies": "wrapped"}, 3), ({"strategies": "balanced", "overflow": "split"}, 2)],
)
def test_examples_that_continue_in_another_row_are_not_called_lost(options, cut):
    report = packing_report([5, 12, 12, 5], 10, **options, show=False)
    best, cuts = report["recommended"], f"cuts {cut} examples where a row ends (no token lost)"
    assert best["reason"] == f"the least padding of those that cut the fewest examples ({cut})"
    assert best["notes"] == [f"note: {cuts}; a larger max_tokens cuts fewer"]
    assert "cut: examples that continue in another row; no token is lost" in repr(report)


@pytest.mark.parametrize(
    ("lengths", "align", "expected"),
    [
        ([5], 1, [6, 8, 12, 16]),
        ([1], 1, [3, 4, 6, 8]),
        ([8], 1, [6, 8, 12, 16]),
        ([9], 1, [12, 16, 24, 32]),
        ([3], 6, [6, 8]),
        ([100] * 199 + [1000], 1, [128, 256, 512, 768, 1024, 1536, 2048]),
    ],
)
def test_capacities(lengths, align, expected):
    report = packing_report(lengths, parallel=ParallelLayout(tp=align), show=False)
    found = [c["max_tokens"] for c in report["candidates"] if c["strategy"] == "padded"]
    assert found == expected


RNG = np.random.default_rng(0)


def example(num_shared: int) -> list[list[int]]:
    prompt = RNG.integers(1, 9, num_shared).tolist()
    return [prompt + RNG.integers(10, 999, 4).tolist() for _ in range(3)]


EXAMPLES: list[dict[str, Any]] = [{"input_ids": example(n)} for n in (9, 3, 12, 7, 0, 5)]


@pytest.mark.parametrize(
    "made",
    [list, lambda of: {"input_ids": [e["input_ids"] for e in of]}, Dataset.from_list,
     TokenizedDataset],
)  # fmt: skip
def test_the_row_of_shared_prefixes_is_what_the_collator_packs(made: Any) -> None:
    report = packing_report(made(EXAMPLES), 64, strategies="sequential", show=False)
    layouts = [candidate["strategy"] for candidate in report["candidates"]]
    assert layouts == ["padded", "shared_prefixes", "sequential"]
    assert report["recommended"]["strategy"] == "sequential"
    row = report["candidates"][1]
    batch = PackedCollator(0, max_tokens=64, share_prefixes=True)(EXAMPLES)
    assert row["num_rows"] == len(batch)
    assert row["num_cells"] == batch["input_ids"].numel()
    assert row["num_tokens"] == sum(len(ids) for e in EXAMPLES for ids in e["input_ids"])
    used = sum(trie(e["input_ids"])[3] for e in EXAMPLES)
    assert row["padding"] == pytest.approx(1 - used / row["num_cells"])
    lines = repr(report).splitlines()
    [line] = [line for line in lines if "shared_prefixes" in line]
    assert any("tokens/cell" in line for line in lines)
    assert f" {row['num_tokens'] / row['num_cells']:.2f} " in line
    assert "shared_prefixes" in report._repr_html_()


def test_gaps_of_alignment_are_padding_also_where_prefixes_are_shared() -> None:
    parallel = ParallelLayout(tp=4)
    report = packing_report(EXAMPLES, 64, parallel=parallel, show=False)
    batch = PackedCollator(0, max_tokens=64, parallel=parallel, share_prefixes=True)(EXAMPLES)
    used = sum(trie(e["input_ids"])[3] for e in EXAMPLES)
    [row] = [c for c in report["candidates"] if c["strategy"] == "shared_prefixes"]
    assert row["padding"] == pytest.approx(1 - used / batch["input_ids"].numel())


def test_the_price_of_one_shape_is_said() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(4.3, 0.5, 3000).astype(int) + 1, 256)
    report = packing_report(lengths, 256, strategies="balanced", show=False)
    limit = report["candidates"][1]["max_sequences_per_row"]
    limited = packing_report(
        lengths, 256, strategies="balanced", max_sequences_per_row=limit, show=False
    )
    rows = limited["candidates"][1]["num_rows"]
    assert rows > report["candidates"][1]["num_rows"]
    assert report["recommended"]["segments"].endswith(f"promises one shape, in {rows:,} rows")


def test_lengths_alone_do_not_tell_what_is_shared() -> None:
    said = "note: lengths do not show what segments share; pass the dataset to see share_prefixes"
    report = packing_report(TokenizedDataset(EXAMPLES).lengths, 64, show=False)
    assert report["recommended"]["notes"][-1] == said
    assert said in repr(report)
    assert said not in repr(packing_report(EXAMPLES, 64, show=False))


def test_no_row_where_nothing_is_shared_or_known() -> None:
    ids = [e["input_ids"] for e in EXAMPLES]
    alone = [{"input_ids": [[*map(int, RNG.integers(9, 99, 4))]]} for _ in range(3)]
    for data, options in (
        ([sum(map(len, segments)) for segments in ids], {}),
        ([{"input_ids": of} for segments in ids for of in segments], {}),
        (alone, {}),
        (EXAMPLES, {"parallel": ParallelLayout(cp=2)}),
    ):
        report = packing_report(data, 64, show=False, **options)
        assert "shared_prefixes" not in [c["strategy"] for c in report["candidates"]]
        assert "tokens/cell" not in repr(report)


COST = ModelCost(language_linear=50, language_quadratic=2)
LENGTHS = np.random.default_rng(0).integers(1, 40, 400)


def plain_figures(lengths, sampler, *, width, steps=256):
    """The figures of the first steps, with Python numbers and a loop for each."""
    sums, slowest = np.zeros(4), []
    epoch = 0
    while len(slowest) < steps:
        for step, part in zip(range(steps - len(slowest)), sampler, strict=False):
            plan, examples = part.plan, sampler.examples(epoch, step)
            dp = plan.rows_multiple_of
            of_ranks = [[] for _ in range(dp)]
            for row, pieces in enumerate(plan.bins):
                own = of_ranks[row * dp // plan.num_rows]
                own += [int(lengths[examples[piece]]) for piece in pieces]
            costs = [sum(50 * n + 2 * n * n for n in own) for own in of_ranks]
            attention = max(sum(2 * n * n for n in own) for own in of_ranks)
            tokens, num_cells = sum(map(sum, of_ranks)), plan.num_rows * (width or plan.width)
            mean = sum(costs) / dp
            sums += tokens, num_cells, num_cells / dp * 50 + attention, mean
            slowest.append(max(costs) / mean)
        epoch += 1
    return {
        "padding": 1 - sums[0] / sums[1],
        "imbalance": np.mean(slowest),
        "imbalance_99": np.quantile(slowest, 0.99),
        "time_per_token": sums[2] / sums[3],
    }


@pytest.mark.parametrize(("dp", "batch_rows", "batch_size"), [(1, 2, 5), (2, 4, None)])
def test_figures_are_those_of_plain_loops(dp, batch_rows, batch_size):
    of = {"parallel": ParallelLayout(dp=dp), "cost": COST}
    sizes = {"batch_size": batch_size, "batch_rows": batch_rows}
    report = packing_report(LENGTHS, 64, **of, **sizes, show=False)
    by_examples, by_rows = report["steps"][:2]
    if batch_size is None:
        batch_size = round(len(LENGTHS) / by_rows["num_steps"])
    assert by_examples["batch_size"] == batch_size
    assert by_examples["num_steps"] == -(-len(LENGTHS) // batch_size)
    collate = PackedCollator(0, packing=PackingOptions(64, **of), normalize_loss=False)
    for step, width, size in (
        (by_rows, 64, {"batch_rows": batch_rows}),
        (by_examples, None, {"batch_size": batch_size}),
    ):
        sampler = PackedBatchSampler(LENGTHS, collate, **size)
        assert step["num_steps"] == len(sampler)
        expected = plain_figures(LENGTHS, sampler, width=width)
        assert {key: step[key] for key in expected} == pytest.approx(expected)
    json.dumps(report)


def test_steps_are_shown_in_text_and_html():
    parallel = ParallelLayout(dp=2)
    report = packing_report(LENGTHS, 64, parallel=parallel, batch_rows=4, show=False)
    lines = repr(report).splitlines()
    [header] = [line for line in lines if "a step over 2 ranks, max_tokens=64" in line]
    assert header.split()[-5:] == ["steps", "padding", "imbalance", "99%", "time"]
    by_rows = report["steps"][1]
    [row] = [line for line in lines if line.startswith("batch_rows=4 ")]
    figures = row.split()[1:]
    assert figures[0] == str(by_rows["num_steps"])
    assert float(figures[-1]) == pytest.approx(by_rows["time_per_token"], abs=0.001)
    assert max(map(len, lines)) <= 100
    assert all(figure in report._repr_html_() for figure in figures)
    one = packing_report([7] * 9, 14, batch_rows=1, show=False)  # nothing differs, no rank waits
    assert "imbalance" not in repr(one)
    assert packing_report(LENGTHS, 64, show=False)["steps"] == []
    assert packing_report([9], 8, batch_rows=1, show=False)["steps"] == [], "nothing fits"


@pytest.mark.parametrize(
    ("batch_rows", "message"),
    [
        (0, "batch_rows must be at least 1, got 0; None compares no steps"),
        (3, r"batch_rows must be a multiple of parallel.dp=2, got 3"),
    ],
)
def test_bad_batch_rows(batch_rows, message):
    with pytest.raises(ValueError, match=message):
        packing_report([5], 8, parallel=ParallelLayout(dp=2), batch_rows=batch_rows, show=False)
