"""Which max_tokens is recommended, and why."""

from __future__ import annotations

import pytest

from torch_collate_kit import ParallelLayout, packing_report

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
