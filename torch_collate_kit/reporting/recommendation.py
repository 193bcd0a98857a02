"""Which ``max_tokens`` to try, and which to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.packing.rows import Ints
from torch_collate_kit.reporting.candidates import PADDED

__all__ = ["capacities_to_try", "recommended"]

_MOST_PADDING = 0.02
_NEARLY = 0.005


def capacities_to_try(lengths: Ints, align: int) -> list[int]:
    """Powers of two, from what holds 99% of the examples to twice what holds all, and two between.

    >>> capacities_to_try(np.array([5, 90, 300]), 1)
    [384, 512, 768, 1024]
    """
    common, longest = (_power_of_two(int(n)) for n in (np.quantile(lengths, 0.99), lengths.max()))
    powers = [1 << n for n in range(common.bit_length() - 1, longest.bit_length() + 1)]
    between = [longest * 3 // 4, longest * 3 // 2]
    return sorted({max(n, align) for n in (*powers, *between)})


def _power_of_two(number: int) -> int:
    """The smallest that is not below ``number``, at least 4."""
    return 1 << max(2, (number - 1).bit_length())


def recommended(candidates: Sequence[Mapping[str, Any]], num_tokens: int) -> dict[str, Any]:
    """The recommended ``max_tokens`` and ``strategy``, with the reason; see ``packing_report``.

    ``num_tokens`` are those of all examples.
    """
    packed = [c for c in candidates if c["strategy"] != PADDED]
    if all(c["num_dropped_tokens"] >= num_tokens for c in packed):
        return _nothing_fits(packed)
    fewest = min(map(_num_lost, packed))
    complete = [c for c in packed if _num_lost(c) == fewest]
    lean = [c for c in complete if c["padding"] <= _MOST_PADDING]
    limit = min(c["max_tokens"] for c in lean or _within(complete))
    best = _within([c for c in complete if c["max_tokens"] == limit])[0]
    lossless = "drop and cut nothing" if not fewest else f"lose the fewest examples ({fewest:,})"
    reason = (
        f"the smallest of those that {lossless} and leave at most {_MOST_PADDING:.0%} padding"
        if lean
        else f"the least padding of those that {lossless}"
    )
    return {
        "max_tokens": limit,
        "strategy": best["strategy"],
        "reason": reason,
        "notes": _notes(packed, best, num_tokens),
    }


def _nothing_fits(packed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest ``max_tokens`` that was tried, as there is nothing to choose by."""
    largest = max(packed, key=lambda candidate: candidate["max_tokens"])
    return {
        "max_tokens": largest["max_tokens"],
        "strategy": largest["strategy"],
        "reason": "no example fits, so every one is dropped; give a larger max_tokens",
        "notes": [],
    }


def _within(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with the least padding, or nearly; in their order."""
    least = min(candidate["padding"] for candidate in candidates)
    return [c for c in candidates if c["padding"] <= least + _NEARLY]


def _num_lost(candidate: Mapping[str, Any]) -> int:
    """Examples that are not in the rows as they were."""
    return int(candidate["num_dropped"] + candidate["num_cut"])


def _notes(
    packed: Sequence[Mapping[str, Any]], best: Mapping[str, Any], num_tokens: int
) -> list[str]:
    """What the recommended ``max_tokens`` loses, and what the smallest of the next best would."""
    notes = []
    if _num_lost(best):
        notes.append(f"note: {_losses(best, num_tokens)}; a larger max_tokens keeps more")
    smaller = [
        candidate
        for candidate in packed
        if candidate["max_tokens"] < best["max_tokens"]
        and candidate["padding"] <= _MOST_PADDING  # so it loses more, or it would be the best
    ]
    if smaller:
        other = min(smaller, key=lambda candidate: (_num_lost(candidate), candidate["max_tokens"]))
        notes.append(f"note: max_tokens={other['max_tokens']} {_losses(other, num_tokens)}")
    return notes


def _losses(candidate: Mapping[str, Any], num_tokens: int) -> str:
    """What does not fit, such as "drops 3 examples (1.2% of the tokens)"."""
    dropped, cut = candidate["num_dropped"], candidate["num_cut"]
    parts = [f"drops {plural(dropped, 'example')}"] if dropped else []
    parts += [f"cuts {plural(cut, 'example')}"] if cut else []
    share = (candidate["num_dropped_tokens"] + candidate["num_cut_tokens"]) / num_tokens
    return f"{' and '.join(parts)} ({share:.2%} of the tokens lost)"
