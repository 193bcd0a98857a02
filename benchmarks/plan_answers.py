"""Answers about plans: steps, ranks and states, which need no GPU and no model."""

from __future__ import annotations

from collections.abc import Callable

from figures import MISSING, Results, cell, duration


def _balance(r: Results) -> dict[str, str]:
    rows, few = "16 rows of 16,384 tokens per rank", "Few rows per rank"
    over_rows = "8 ranks, differencing over ranks, then over rows"

    def over(way: str) -> str:
        tokens, cost, computed = (
            cell(r, rows, f"512 ranks, {way}", column) for column in ("tokens", "cost", "computed")
        )
        return f"{tokens} more tokens, {cost} more to compute, {computed} with pads"

    return {
        "How even are 512 ranks with 16 rows each?": f"the busiest has {over('pack')}",
        "And if full rows are dealt in turn?": over("best fit, rows in turn"),
        "And if Karmarkar-Karp gives examples to ranks?": over(
            "differencing, then best fit per rank"
        ),
        "And if it makes the rows, too?": (
            f"on 8 ranks {cell(r, rows, over_rows, 'cost')} more to compute, but "
            f"{cell(r, rows, over_rows, 'over the limit')} of {cell(r, rows, over_rows, 'rows')} "
            "rows are over the limit"
        ),
        "And with few rows per rank?": (
            f"{cell(r, few, '1, real mix', 'cost')} with one row of 8,192 tokens, where the "
            f"longest example alone costs {cell(r, few, '1, real mix', 'longest example')} of the "
            f"mean; {cell(r, few, '4, real mix', 'cost')} with four rows"
        ),
    }


def _elastic(r: Results) -> dict[str, str]:
    step, lost = "Finding a step", r.get("most lost", {})
    most = [f"{lost[n]:.1f}%" if n in lost else MISSING for n in ("4096", "8192")]
    known, keyed = (
        [duration(cell(r, step, row, name)) for name in ("first step of an epoch", "any other")]
        for row in ("shuffle=True", "shuffle='keyed'")
    )
    return {
        "What do the same rows on any number of ranks cost?": (
            f"at most {most[0]} of their fill (examples up to half a row; up to {most[1]} where "
            "one fills a row)"
        ),
        "How long does it take to find a step of the past?": (
            f"{known[1]}, and {known[0]} for the first of an epoch, which makes its order; "
            f"with a keyed order {keyed[0]}"
        ),
        "How large is a state?": f"{cell(r, step, 'shuffle=True', 'bytes')} bytes",
    }


def _scale(r: Results) -> dict[str, str]:
    step, order = "Planning a step", "An order"
    ranks = [duration(cell(r, step, number, "median")) for number in ("8", "512")]
    begin = "CPU ms to the first batch"
    firsts = [duration(cell(r, order, n, begin)) for n in ("1,000,000", "100,000,000")]
    state = cell(r, order, "100,000,000", "bytes of a state")
    memory = cell(r, "A TokenizedDataset", "1,000,000", "MB of memory")
    return {
        "How long does a rank plan a step of 512 ranks?": f"{ranks[1]} (of 8 ranks: {ranks[0]})",
        "How even are 512 ranks?": (
            f"the busiest has {cell(r, step, '512', 'tokens')} more tokens and "
            f"{cell(r, step, '512', 'cost')} more to compute than the mean, its rows are "
            f"{cell(r, step, '512', 'filled')} full"
        ),
        "What does a large dataset cost in a process?": (
            f"1,000,000 examples in an Arrow file take {memory} MB of memory"
        ),
        "How long does resuming in the middle of an epoch take?": (
            f"{firsts[0]} to the first batch with 1,000,000 examples, {firsts[1]} with "
            f"100,000,000; the state has {state} bytes"
        ),
    }


def _steps(r: Results) -> dict[str, str]:
    rows, plans = "Steps of the real mix", "Planning"

    def figures(row: str) -> str:
        full, slowest, time = (cell(r, rows, row, of) for of in ("full", "imbalance", "time"))
        return f"{full} full, the slowest rank {slowest} of the mean, {time} times the ideal time"

    return {
        "How full and even is a step of two rows on each of 8 ranks?": figures("8 x 2 rows"),
        "And a step of 256 examples?": figures("8 ranks, 256 examples"),
        "And of a mixture by tokens?": (
            f"{cell(r, 'Mixtures', '70 / 30', 'full')} full, "
            f"{cell(r, 'Mixtures', '70 / 30', 'imbalance')}; shares within "
            f"{cell(r, 'Mixtures', '70 / 30', 'any 100 steps')} in any 100 steps"
        ),
        "How long does planning a step take?": (
            f"{cell(r, plans, '1,000,000', 'later, mean')} of a million examples; all of them "
            f"{cell(r, 'Beside other packers', 'batch_rows=16', 'plan')}"
        ),
    }


def _vision_plan(r: Results) -> dict[str, str]:
    heading, patches = "1,024 examples, half images", "16,384"
    cells = {c: cell(r, heading, patches, c) for c in
             ("language max/mean", "vision max/mean", "by tokens alone", "fill", "ms")}  # fmt: skip
    return {
        "How even are 8 ranks?": (
            f"the heaviest has {cells['language max/mean']} times the mean cost of the language "
            f"model, {cells['vision max/mean']} of the vision tower; balanced by tokens alone "
            f"{cells['by tokens alone']}"
        ),
        "How full are rows in the budget that binds?": cells["fill"],
        "How long does a plan of 1,024 examples take?": f"{cells['ms']} ms",
    }


PLAN_ANSWERS: dict[str, Callable[[Results], dict[str, str]]] = {
    "balance": _balance,
    "elastic": _elastic,
    "scale": _scale,
    "steps": _steps,
    "vision_plan": _vision_plan,
}
