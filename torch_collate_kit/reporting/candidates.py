"""The layouts and steps that a report compares, their figures, and the recommended layout."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from torch_collate_kit._checks import checked_int, plural
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.loading import PackedBatchSampler
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.atoms import Atoms, Patches
from torch_collate_kit.packing.options import Strategy
from torch_collate_kit.packing.planner import fitted, plan_rows
from torch_collate_kit.packing.rows import Ints, row_sums
from torch_collate_kit.ragged import Ragged

_Candidate: TypeAlias = Mapping[str, Any]
_STRATEGIES: tuple[Strategy, ...] = ("best_fit_decreasing", "balanced", "sequential")
PADDED, SHARED = "padded", "shared_prefixes"
_MOST_PADDING = 0.02
_NEARLY = 0.005
_MOST_BINS = 48
_WIDE = 20  # longest / shortest above which bins are equally wide on a logarithmic scale
_MOST_STEPS = 256  # that are planned
_SLACK = 1.25  # times the mean number of segments of a row: a limit that costs few cells


def capacities_to_try(lengths: Ints, row_align: int) -> list[int]:
    """Return the row lengths to try: powers of two that hold 99% of the examples and more.

    The largest is twice what holds all, and two lie between.

    >>> capacities_to_try(np.array([5, 90, 300]), 1)
    [384, 512, 768, 1024]
    """
    common, longest = (_power_of_two(int(n)) for n in (np.quantile(lengths, 0.99), lengths.max()))
    powers = [1 << n for n in range(common.bit_length() - 1, longest.bit_length() + 1)]
    between = [longest * 3 // 4, longest * 3 // 2]
    return sorted({max(n, row_align) for n in (*powers, *between)})


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below ``number``, at least 4."""
    return 1 << max(2, (number - 1).bit_length())


def packings_to_try(
    packing: PackingOptions,
    max_tokens: int | Sequence[int] | None,
    strategies: Sequence[Strategy] | None,
    lengths: Ints,
) -> list[PackingOptions]:
    """Return every ``max_tokens`` with every strategy, each once, in the order given."""
    if strategies is None:
        strategies = ["balanced"] if max_tokens is None else _STRATEGIES
    if max_tokens is None:
        max_tokens = capacities_to_try(lengths, packing.parallel.row_align)
    is_one = isinstance(max_tokens, str) or not isinstance(max_tokens, Sequence | np.ndarray)
    limits: Any = [max_tokens] if is_one else max_tokens
    names = [strategies] if isinstance(strategies, str) else strategies
    for option, given in (("max_tokens", limits), ("strategies", names)):
        if not len(given):
            raise ValueError(f"{option} is empty; give at least one")
    limits = dict.fromkeys(checked_int("max_tokens", limit) for limit in limits)
    found = []
    for limit, name in product(limits, dict.fromkeys(names)):
        overflow = "raise" if name == "wrapped" else packing.overflow  # it cuts where a row ends
        found.append(replace(packing, max_tokens=limit, strategy=name, overflow=overflow))
    return found


def candidates_of(
    atoms: Atoms,
    packings: Sequence[PackingOptions],
    batch_size: int | None,
    padded_batch_size: int,
    segments: Ragged | None = None,
    trees: tuple[Atoms, Ints] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of padded rows and of each strategy for every ``max_tokens``.

    ``segments`` are the segment lengths of every example that is a list of segments, and ``trees``
    the load with shared prefixes and its cells with a token, if segments share anything.
    """
    done: set[int] = set()
    for packing in packings:
        if packing.max_tokens not in done:
            done.add(packing.max_tokens)
            whole = packing
            if packing.strategy == "wrapped":  # whose rows have all tokens
                whole = replace(packing, strategy=None, overflow="split")
            yield _padded(atoms, whole, padded_batch_size, segments)
            if trees is not None:
                sharing = replace(packing, strategy="balanced", share_prefixes=True)
                yield _packed(trees[0], sharing, batch_size, trees[1])
        yield _packed(atoms, packing, batch_size)


def _packed(
    atoms: Atoms, packing: PackingOptions, batch_size: int | None, filled_E: Ints | None = None
) -> dict[str, Any]:
    """Pack ``batch_size`` examples at a time, or all at once: then a step is a row per rank.

    ``filled_E`` are the cells with a token of each example, by default as many as its tokens.
    """

    def per_step(per_row: Ints) -> Ints:
        per_rank = per_row.reshape(packing.row_multiple, -1)
        return per_rank.T if batch_size is None else per_rank.sum(axis=1)[None]

    sums: Counter[str] = Counter()
    tokens, costs, seconds, most = [], [], 0.0, 0
    number = len(atoms.tokens)
    for start in range(0, number, batch_size or number):
        part = atoms.alone(np.arange(start, min(start + (batch_size or number), number)))
        began = time.perf_counter()
        plan = plan_rows(part, packing)
        seconds += time.perf_counter() - began
        sums.update(
            num_rows=plan.num_rows,
            num_tokens=int(plan.lengths.sum()),
            num_cells=plan.num_rows * plan.width,
            num_filled=int(
                (plan.lengths if filled_E is None else filled_E[start + plan.atoms.examples]).sum()
            ),
            **_lost(plan),
        )
        of_pieces = plan.atoms.costs + plan.atoms.vision_costs
        sums["num_segments"] += int(plan.atoms.segments.sum())
        most = max(most, int(row_sums(plan.atoms.segments, plan.row_offsets).max(initial=0)))
        tokens.append(per_step(plan.row_tokens))
        costs.append(per_step(row_sums(of_pieces, plan.row_offsets)))
    ranks = np.concatenate(tokens), np.concatenate(costs)
    layout = SHARED if packing.share_prefixes else packing.strategy or "best_fit_decreasing"
    found = _figures(packing, layout, sums, *ranks, plan_seconds=seconds)
    largest = int(atoms.segments.max(initial=1))  # which a limit assumes of every example
    mean = found.pop("num_segments") / max(1, found["num_rows"])
    at_most = math.ceil(_SLACK * mean * largest / max(1.0, atoms.segments.mean()))
    return found | {"mean_segments": mean, "most_segments": most, "max_sequences_per_row": at_most}


def price_of_one_shape(
    best: _Candidate,
    candidates: Sequence[_Candidate],
    atoms: Atoms,
    packings: Sequence[PackingOptions],
    batch_size: int | None,
) -> str:
    """Return what the ``max_sequences_per_row`` to set adds to the recommended rows, as text."""

    def is_best(of: _Candidate) -> bool:
        return (of["max_tokens"], of["strategy"]) == (best["max_tokens"], best["strategy"])

    if best["strategy"] == "wrapped":  # which takes no limit
        return ""
    [found] = filter(is_best, candidates)
    [packing] = (p for p in packings if is_best(p.as_state()))
    limited = replace(packing, max_sequences_per_row=found["max_sequences_per_row"])
    rows = _packed(atoms, limited, batch_size)["num_rows"]
    return f", in {rows:,} rows" if rows != found["num_rows"] else ""


def _padded(
    atoms: Atoms, packing: PackingOptions, batch_size: int, segments: Ragged | None
) -> dict[str, Any]:
    """Pad the examples that ``packing`` keeps, in their order, ``batch_size`` per rank and step.

    Each segment is a row.
    """
    pieces = fitted(atoms, packing)
    kept, align = pieces.lengths, packing.parallel.row_align
    starts = first_examples = np.arange(0, len(kept), batch_size)
    vision = np.add.reduceat(pieces.atoms.vision_costs, first_examples)
    if segments is not None:
        of_kept = segments.take(pieces.example_indices)
        kept, starts = of_kept.values, of_kept.offsets[first_examples]
    rows = np.diff(starts, append=len(kept))
    widths = -(-np.maximum.reduceat(kept, starts) // align) * align
    costs = rows * packing.cost.language(widths) + vision
    sums = {
        "num_rows": len(kept),
        "num_tokens": int(kept.sum()),
        "num_filled": int(kept.sum()),
        "num_cells": int((rows * widths).sum()),
        **_lost(pieces),
    }
    num_ranks = packing.parallel.dp
    ranks = (
        np.pad(per_batch, (0, -len(starts) % num_ranks)).reshape(-1, num_ranks)
        for per_batch in (np.add.reduceat(kept, starts), costs)
    )
    return _figures(packing, PADDED, sums, *ranks)


def _lost(pieces: PackingPlan) -> dict[str, int]:
    """Return counts of dropped and cut examples and tokens."""
    return {
        "num_dropped": len(pieces.dropped),
        "num_dropped_tokens": pieces.num_dropped_tokens,
        "num_cut": len(pieces.cut),
        "num_cut_tokens": pieces.num_cut_tokens,
    }


def _figures(
    packing: PackingOptions,
    layout: str,
    sums: Mapping[str, int],
    tokens: Ints,
    costs: Ints,
    *,
    plan_seconds: float = 0.0,
) -> dict[str, Any]:
    """Return a candidate; ``sums`` are over all steps, ``tokens`` and ``costs`` [steps, ranks]."""
    sums = dict(sums)
    num_filled = sums.pop("num_filled")
    efficiency = num_filled / sums["num_cells"] if sums["num_cells"] else 1.0
    return {
        "max_tokens": packing.max_tokens,
        "strategy": layout,
        "efficiency": efficiency,
        "padding": 1.0 - efficiency,
        **sums,
        "tokens_per_rank": tokens.sum(axis=0).tolist(),
        "cost_per_rank": costs.sum(axis=0).tolist(),
        "tokens_max_over_mean": _max_over_mean(tokens),
        "cost_max_over_mean": _max_over_mean(costs),
        "plan_seconds": plan_seconds,
    }


def _max_over_mean(per_step: Ints) -> float:
    """Return the share of the slowest rank of each step, relative to the mean rank."""
    total = int(per_step.sum())
    slowest = int(per_step.max(axis=1).sum())
    return slowest * per_step.shape[1] / total if total else 1.0


def recommended(candidates: Sequence[_Candidate], num_tokens: int) -> dict[str, Any]:
    """Return the recommended ``max_tokens`` and ``strategy``, with the reason.

    ``num_tokens`` are those of all examples.
    """
    packed = [c for c in candidates if c["strategy"] not in (PADDED, SHARED)]
    if all(c["num_dropped_tokens"] >= num_tokens for c in packed):
        largest = max(packed, key=lambda candidate: candidate["max_tokens"])
        return {
            "max_tokens": largest["max_tokens"],
            "strategy": largest["strategy"],
            "reason": "no example fits, so every one is dropped; give a larger max_tokens",
            "notes": [],
        }
    fewest = min(map(_num_lost, packed))
    complete = [c for c in packed if _num_lost(c) == fewest]
    lean = [c for c in complete if c["padding"] <= _MOST_PADDING]
    limit = min(c["max_tokens"] for c in lean or _within(complete))
    best, *others = _within([c for c in complete if c["max_tokens"] == limit])
    for other in others:  # the default of collators
        if other["strategy"] == "balanced" and other["num_rows"] <= best["num_rows"]:
            best = other
    verb = "lose" if any(map(_num_lost_tokens, complete)) else "cut"
    lossless = f"{verb} the fewest examples ({fewest:,})" if fewest else "drop and cut nothing"
    reason = (
        f"the smallest of those that {lossless} and leave at most {_MOST_PADDING:.0%} padding"
        if lean
        else f"the least padding of those that {lossless}"
    )
    return {
        "max_tokens": limit,
        "strategy": best["strategy"],
        "reason": reason,
        "notes": _notes(candidates, best, num_tokens),
        "segments": f"segments per row: {best['mean_segments']:.1f}, at most "
        f"{best['most_segments']}; max_sequences_per_row={best['max_sequences_per_row']} promises "
        "one shape",
    }


def _within(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return those with the least padding, or nearly, in their order."""
    least = min(candidate["padding"] for candidate in candidates)
    return [c for c in candidates if c["padding"] <= least + _NEARLY]


def _num_lost(candidate: _Candidate) -> int:
    """Return the number of dropped and cut examples."""
    return int(candidate["num_dropped"] + candidate["num_cut"])


def _num_lost_tokens(candidate: _Candidate) -> int:
    """Return the number of lost tokens; examples that continue in another row lose none."""
    return int(candidate["num_dropped_tokens"] + candidate["num_cut_tokens"])


def _notes(candidates: Sequence[_Candidate], best: _Candidate, num_tokens: int) -> list[str]:
    """Return notes on what the best ``max_tokens`` loses, a smaller one would, or sharing saves."""
    notes = []
    if _num_lost(best):
        more = "keeps more" if _num_lost_tokens(best) else "cuts fewer"
        notes.append(f"note: {losses(best, num_tokens)}; a larger max_tokens {more}")
    # A smaller one with as little padding loses more, or it would be the best
    smaller = [
        c
        for c in candidates
        if c["strategy"] not in (PADDED, SHARED)
        and c["max_tokens"] < best["max_tokens"]
        and c["padding"] <= _MOST_PADDING
    ]
    if smaller:
        other = min(smaller, key=lambda c: (_num_lost(c), c["max_tokens"]))
        notes.append(f"note: max_tokens={other['max_tokens']} {losses(other, num_tokens)}")
    for c in candidates:
        if c["strategy"] == SHARED and c["max_tokens"] == best["max_tokens"]:
            factor = c["num_tokens"] / max(1, c["num_cells"])
            rows = plural(c["num_rows"], "row")
            notes.append(f"note: share_prefixes=True makes {rows}, of {factor:.2f} tokens per cell")
    return notes


def losses(candidate: _Candidate, num_tokens: int) -> str:
    """Describe what does not fit: "drops 3 examples (1.2% of the tokens lost)"; "" if all fits."""
    dropped, cut = candidate["num_dropped"], candidate["num_cut"]
    parts = [f"drops {plural(dropped, 'example')}"] if dropped else []
    parts += [f"cuts {plural(cut, 'example')}"] if cut else []
    if parts and not (lost := _num_lost_tokens(candidate)):
        return f"{parts[0]} where a row ends (no token lost)"
    return f"{' and '.join(parts)} ({lost / num_tokens:.2%} of the tokens lost)" if parts else ""


def headline(report: Mapping[str, Any]) -> str:
    """Return the padding of padded rows and of the recommended plan, in words."""
    best = report["recommended"]
    if fits_nothing(report):
        return f"no example fits into max_tokens={best['max_tokens']}"
    at_best = [c for c in report["candidates"] if c["max_tokens"] == best["max_tokens"]]
    padding = {candidate["strategy"]: candidate["padding"] for candidate in at_best}
    before, after = padding[PADDED], padding[best["strategy"]]
    return f"padding {before:.1%} -> {after:.1%} at max_tokens={best['max_tokens']}"


def fits_nothing(report: Mapping[str, Any]) -> bool:
    """Whether no example fits into any of the rows."""
    return all(candidate.get("num_tokens") == 0 for candidate in report["candidates"])


def histogram(lengths: Ints) -> dict[str, list[int]]:
    """Return the examples and tokens whose length is from ``edges[i]`` to below ``edges[i + 1]``.

    >>> histogram(np.array([1, 1, 3]))
    {'edges': [1, 2, 3, 4], 'examples': [2, 0, 1], 'tokens': [2, 0, 3]}
    """
    least, most = int(lengths.min()), int(lengths.max())
    count = min(_MOST_BINS, max(1, 4 * int(np.sqrt(len(lengths)))))
    if most > _WIDE * least:
        edges = np.unique(np.ceil(np.geomspace(least, most + 1, count + 1)).astype(np.int64))
    else:
        size = -(-(most + 1 - least) // count)  # the same for all, or they look uneven
        edges = np.arange(least, most + size + 1, size)
    counts = (np.histogram(lengths, edges, weights=weights)[0] for weights in (None, lengths))
    names = ("examples", "tokens")
    return {"edges": edges.tolist()} | {
        name: found.tolist() for name, found in zip(names, counts, strict=True)
    }


def steps_of(
    lengths: Any,
    patches: Patches | None,
    packing: PackingOptions,
    batch_rows: int,
    batch_size: int | None,
) -> list[dict[str, Any]]:
    """Return the figures of steps of ``batch_size`` examples and of ``batch_rows`` rows.

    Rows are filled as a collator does by default. ``batch_size`` None is the mean of the steps by
    rows.
    """
    packing = replace(packing, strategy=None)
    by_rows = _step_figures(lengths, patches, packing, "by_rows", batch_rows=batch_rows)
    if batch_size is None:
        batch_size = max(1, round(len(lengths) / by_rows["num_steps"]))
    by_examples = _step_figures(lengths, patches, packing, "by_examples", batch_size=batch_size)
    found = [by_examples, by_rows]
    is_text = patches is None and not isinstance(lengths, Ragged)
    can_be_cut = packing.parallel.align == 1 and packing.capacity == packing.max_tokens
    if is_text and can_be_cut and packing.max_sequences_per_row is None:
        wrapped = replace(packing, strategy="wrapped", overflow="raise")
        found.append(_step_figures(lengths, None, wrapped, "wrapped", batch_rows=batch_rows))
    return found


def steps_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header, and a row for each kind of step."""
    steps, options = report["steps"], report["options"]
    ranks, width = plural(options["dp"], "rank"), report["recommended"]["max_tokens"]
    columns = {
        f"a step over {ranks}, max_tokens={width}": [_name(step) for step in steps],
        "steps": [f"{step['num_steps']:,}" for step in steps],
        "padding": [f"{step['padding']:.1%}" for step in steps],
    }
    if options["dp"] > 1:
        columns["imbalance"] = [f"{step['imbalance']:.3f}" for step in steps]
        columns["99%"] = [f"{step['imbalance_99']:.3f}" for step in steps]
    columns["time"] = [f"{step['time_per_token']:.3f}" for step in steps]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def steps_legend(names: Sequence[str]) -> list[str]:
    """Return lines about the columns of these ``names``."""
    lines = ["imbalance: cost of the slowest rank / the mean; 99%: of all but the 1% worst steps"]
    return [
        *(lines if "99%" in names else []),
        "time: modelled, of a real token; 1 without padding and without waiting for a slower rank",
    ]


def _name(step: dict[str, Any]) -> str:
    if step["steps"] == "by_examples":
        return f"batch_size={step['batch_size']}"
    return f"batch_rows={step['batch_rows']}{', wrapped' * (step['steps'] == 'wrapped')}"


def _step_figures(
    lengths: Any, patches: Patches | None, packing: PackingOptions, kind: str, **number: Any
) -> dict[str, Any]:
    """Return the figures of the first steps of the epochs that a sampler makes by default."""
    ids = SimpleNamespace(pad_token_id=0, eos_token_id=0)  # "wrapped" needs an end token
    collate = PackedCollator(ids, packing=packing, normalize_loss=False)
    sampler = PackedBatchSampler(lengths, collate, dp_rank=0, patches=patches, **number)
    num_steps = sampler.count_steps()
    figures: list[tuple[float, ...]] = []
    while len(figures) < _MOST_STEPS:
        for part in islice(sampler, _MOST_STEPS - len(figures)):
            width = part.plan.width if kind == "by_examples" else packing.capacity
            figures.append(_of_step(part.plan, width))
    tokens, cells, slowest, time, ideal = np.transpose(figures)
    return {
        "steps": kind,
        **number,
        "num_steps": num_steps,
        "padding": 1 - float(tokens.sum() / cells.sum()),
        "imbalance": float(slowest.mean()),
        "imbalance_99": float(np.quantile(slowest, 0.99)),
        "time_per_token": float(time.sum() / ideal.sum()),
    }


def _of_step(plan: PackingPlan, width: int) -> tuple[float, ...]:
    """Return tokens, cells, cost of the slowest rank over the mean, time and ideal time.

    Times are in units of the cost. Pads cost as much as tokens in the linear layers.
    """
    cost, dp = plan.packing.cost, plan.rows_multiple_of
    ranks = plan.cost_per_rank + plan.vision_cost_per_rank
    cells = row_sums(plan.atoms.cells, plan.row_offsets).reshape(dp, -1).sum(axis=1)
    attention = ranks - cost.language_linear * cells
    num_cells = plan.num_rows * width
    time = num_cells // dp * cost.language_linear + attention.max()
    language = plan.atoms.costs if plan.atoms.are_lists else cost.language(plan.lengths)
    ideal = (int(language.sum()) + int(plan.atoms.vision_costs.sum())) / dp
    slowest = ranks.max() / ranks.mean() if ranks.any() else 1.0
    return int(plan.lengths.sum()), num_cells, slowest, time, ideal
