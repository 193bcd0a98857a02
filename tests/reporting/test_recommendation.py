"""Which max_tokens is recommended, and why."""

from __future__ import annotations

import numpy as np
import pytest

from torch_collate_kit.reporting.candidates import capacities_to_try, recommended


def candidate(max_tokens, padding, *, strategy="sequential", dropped=0, cut=0):
    return {
        "max_tokens": max_tokens,
        "strategy": strategy,
        "padding": padding,
        "num_dropped": dropped,
        "num_dropped_tokens": 10 * dropped,
        "num_cut": cut,
        "num_cut_tokens": cut,
    }


FULL = "the smallest of those that drop and cut nothing and leave at most 2% padding"
LEAST = "the least padding of those that drop and cut nothing"
FEWEST = FULL.replace("drop and cut nothing", "lose the fewest examples (3)")
# max_tokens, padding, dropped and cut of each candidate; the recommended one, and why
RULES: dict[str, tuple[list[tuple[int, float, int, int]], int, str]] = {
    "the smallest": ([(8, 0.02, 0, 0), (16, 0.01, 0, 0), (32, 0.0, 0, 0)], 8, FULL),
    "that is full enough": ([(8, 0.03, 0, 0), (16, 0.019, 0, 0), (32, 0.0, 0, 0)], 16, FULL),
    "a lost example is worse than padding": ([(8, 0.0, 1, 0), (16, 0.02, 0, 0)], 16, FULL),
    "than any padding": ([(8, 0.0, 1, 0), (16, 0.4, 0, 0)], 16, LEAST),
    "a cut one too": ([(8, 0.0, 0, 1), (16, 0.4, 0, 0)], 16, LEAST),
    "half a point does not pay for twice the memory": (
        [(8, 0.3, 0, 0), (16, 0.1, 0, 0), (32, 0.096, 0, 0), (64, 0.2, 0, 0)], 16, LEAST
    ),
    "all lose something": ([(8, 0.0, 9, 0), (16, 0.0, 3, 0), (32, 0.01, 0, 3)], 16, FEWEST),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    figures, max_tokens, reason = RULES[name]
    candidates = [candidate(n, p, dropped=lost, cut=cut) for n, p, lost, cut in figures]
    candidates.append(candidate(4, 0.0, strategy="padded"))  # never recommended
    for order in (candidates, candidates[::-1]):
        found = recommended(order, 1000)
        assert (found["max_tokens"], found["reason"]) == (max_tokens, reason)


def test_notes_say_what_is_lost():
    smaller = [candidate(4, 0.0, dropped=30), candidate(8, 0.01, dropped=1, cut=2)]
    also = candidate(9, 0.0, dropped=1, cut=2)  # loses as much, and takes more memory
    assert recommended([also, *smaller, candidate(16, 0.0)], 1000)["notes"] == [
        "note: max_tokens=8 drops 1 example and cuts 2 examples (1.20% of the tokens lost)"
    ]
    assert recommended(smaller[:1], 1000)["notes"] == [
        "note: drops 30 examples (30.00% of the tokens lost); a larger max_tokens keeps more"
    ]
    assert recommended([candidate(16, 0.0)], 1000)["notes"] == []
    full_of_padding = candidate(4, 0.3, dropped=1)
    assert recommended([full_of_padding, candidate(16, 0.0)], 1000)["notes"] == []


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
    assert capacities_to_try(np.array(lengths), align) == expected
