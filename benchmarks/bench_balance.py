"""How even the ranks of a step are, against other ways to give examples to them.

Claimed, on the real mix with 16 and 64 rows per rank and 8 to 512 ranks: the rank that costs most
at most 2% over the mean, the one with most tokens at most 3% over, no row over the limit.

    python benchmarks/bench_balance.py

A step has as many examples as fill 95% of its rows. "cost" and "tokens" are those of the busiest
rank over the mean. "computed" is what the busiest rank computes, over its share of what the
examples cost: its rows are all as wide as the widest one, and pads are computed as well. Plans are
checked: every example once. Where a way of plain Python would take minutes it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import balancers
import numpy as np
from harness import Report, Times, arguments
from row_by_row import best_fit
from samples import long_tail, real_mix

from torch_collate_kit import ModelCost, PackingOptions, ParallelLayout, pack
from torch_collate_kit.packing import PackingPlan

RANKS = (8, 64, 512)
_FILLED = 0.95
_MOST_EXAMPLES, _MOST_STEPS = 400_000, 2_000_000  # steps of differencing: examples times rows
HEADER = ["", "rows", "over the limit", "filled", "cost", "tokens", "computed", "ms"]
_LARGE = {"num_key_value_heads": 8, "head_dim": 128}
_SPARSE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, **others: object) -> SimpleNamespace:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    return SimpleNamespace(**sizes, num_attention_heads=heads, **others)


def _windows(layers: int, full_every: int) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return [kinds[(layer + 1) % full_every == 0] for layer in range(layers)]


MODELS = {
    "Qwen3-0.6B": _sizes(1024, 3072, 28, 16, **_LARGE),
    "Qwen3-8B": _sizes(4096, 12288, 36, 32, **_LARGE),
    "Qwen3-30B-A3B (128 experts)": _sizes(
        2048, 6144, 48, 32, **_SPARSE, num_key_value_heads=4, head_dim=128
    ),
    "Gemma-3-4B (5 of 6 layers: window 1,024)": _sizes(
        2560,
        10240,
        34,
        8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        layer_types=_windows(34, 6),
    ),
}


class Found(NamedTuple):
    """What a table shows of one way."""

    num_rows: int
    num_over: int
    filled: float
    cost: float
    tokens: float
    computed: float
    seconds: float

    def cells(self) -> list[str]:
        percent = [f"{100 * (x - 1):.2f}%" for x in (self.cost, self.tokens, self.computed)]
        counts = [f"{self.num_rows:,}", f"{self.num_over:,}", f"{self.filled:.1%}"]
        return [*counts, *percent, f"{1e3 * self.seconds:,.3g}"]


def found_in(
    rows: balancers.Rows, lengths: np.ndarray, cost: ModelCost, max_tokens: int, seconds: float
) -> Found:
    """Figures of a step from its rows, rank by rank."""
    flat = list(chain.from_iterable(rows))
    order = np.fromiter(chain.from_iterable(flat), np.int64)
    if not np.array_equal(np.sort(order), np.arange(len(lengths))):
        raise AssertionError("the rows are not a partition of the examples")
    ends = np.cumsum([0, *map(len, flat)])
    cells, costs = (
        np.diff(np.append(0, np.cumsum(values[order]))[ends])
        for values in (lengths, cost.language(lengths))
    )
    computed = costs + cost.language(cells.max() - cells)
    of_ranks = [x.reshape(len(rows), -1).sum(axis=1) for x in (costs, cells, computed)]
    return Found(
        num_rows=len(flat),
        num_over=int((cells > max_tokens).sum()),
        filled=cells.sum() / (len(flat) * max_tokens),
        cost=of_ranks[0].max() / of_ranks[0].mean(),
        tokens=of_ranks[1].max() / of_ranks[1].mean(),
        computed=of_ranks[2].max() / of_ranks[0].mean(),
        seconds=seconds,
    )


def rows_of(plan: PackingPlan) -> balancers.Rows:
    bins = plan.bins
    return [[bins[row] for row in plan.rank_rows(rank)] for rank in range(plan.rows_multiple_of)]


def ours(
    lengths: np.ndarray, max_tokens: int, num_ranks: int, cost: ModelCost, rounds: int
) -> Found:
    packing = PackingOptions(max_tokens, parallel=ParallelLayout(dp=num_ranks), cost=cost)
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        plan = pack(lengths, packing=packing)
        seconds.append(time.process_time() - began)
    return found_in(rows_of(plan), lengths, cost, max_tokens, Times.of(seconds).median)


def others(
    lengths: np.ndarray, max_tokens: int, num_ranks: int, cost: ModelCost, rows_per_rank: int
) -> dict[str, Found | None]:
    costs = cost.language(lengths)

    def of_best_fit(how: str) -> Callable[[], balancers.Rows]:
        return lambda: balancers.in_turn(
            best_fit(lengths.tolist(), max_tokens), costs, num_ranks, how=how
        )

    def examples() -> list[list[int]]:
        return balancers.over_ranks(costs, num_ranks)

    ways: dict[str, Callable[[], balancers.Rows] | None] = {
        "best fit, rows in turn": of_best_fit("in turn"),
        "best fit, rows by snake": of_best_fit("snake"),
        "best fit, rows greedily": of_best_fit("greedy"),
        "differencing, then best fit per rank": lambda: balancers.of_each_rank(
            examples(), lengths, max_tokens
        ),
        "differencing over ranks, then over rows": lambda: balancers.of_differencing(
            examples(), lengths, costs, max_tokens
        ),
    }
    if len(lengths) > _MOST_EXAMPLES:
        ways = dict.fromkeys(ways)
    if len(lengths) * rows_per_rank > _MOST_STEPS:
        ways["differencing over ranks, then over rows"] = None
    found: dict[str, Found | None] = {}
    for name, way in ways.items():
        began = time.process_time()
        rows = way() if way else None
        seconds = time.process_time() - began
        found[name] = rows and found_in(rows, lengths, cost, max_tokens, seconds)
    return found


def sample(folder: Path, num_tokens: float, *, longest: int) -> tuple[np.ndarray, str]:
    """About ``num_tokens`` tokens of the real mix."""
    lengths, what = real_mix(folder, 100_000, longest=longest)
    return np.resize(lengths, int(num_tokens / lengths.mean())), what


def compare(report: Report, folder: Path, rounds: int) -> list[Found]:
    """A table per size of a step; what was found of ours."""
    all_ours = []
    for rows_per_rank in (16, 64):
        for max_tokens in (4096, 16384):
            table = []
            for num_ranks in RANKS:
                num_tokens = _FILLED * rows_per_rank * num_ranks * max_tokens
                lengths, what = sample(folder, num_tokens, longest=max_tokens)
                mine = ours(lengths, max_tokens, num_ranks, ModelCost(), rounds)
                all_ours.append(mine)
                found = others(lengths, max_tokens, num_ranks, ModelCost(), rows_per_rank)
                for name, value in {"pack": mine, **found}.items():
                    cells = value.cells() if value else ["left out"] + ["-"] * (len(HEADER) - 2)
                    table.append([f"{num_ranks} ranks, {name}", *cells])
            note = f"{what}, cut at the row; CPU ms, medians of {rounds} rounds for pack, else one."
            heading = f"{rows_per_rank} rows of {max_tokens:,} tokens per rank"
            report.table(heading, HEADER, table, note)
    return all_ours


def within_the_limit(report: Report, folder: Path) -> None:
    """How many rows differencing needs so that none is over the limit."""
    table = []
    for rows_per_rank in (16, 64):
        for max_tokens in (4096, 16384):
            num_tokens = _FILLED * rows_per_rank * 8 * max_tokens
            lengths, _ = sample(folder, num_tokens, longest=max_tokens)
            costs = ModelCost().language(lengths)
            ranks = balancers.over_ranks(costs, 8)
            for more_rows in range(rows_per_rank):
                rows = balancers.of_differencing(
                    ranks, lengths, costs, max_tokens, more_rows=more_rows
                )
                found = found_in(rows, lengths, ModelCost(), max_tokens, 0)
                if not found.num_over:
                    break
            mine = pack(lengths, max_tokens, parallel=ParallelLayout(dp=8))
            counts = [f"{n:,}" for n in (mine.num_rows, found.num_rows)]
            table.append([f"{rows_per_rank} of {max_tokens:,}", *counts, f"{found.filled:.1%}"])
    note = "8 ranks; rows are added to every rank until none is over the limit."
    header = ["rows per rank", "rows of pack", "rows of differencing", "filled"]
    report.table("Differencing over ranks and rows, within the limit", header, table, note)


def few_rows(report: Report, folder: Path, rounds: int) -> None:
    """Where ranks cannot be even: a long example alone costs more than a row of short ones."""
    table = []
    for rows_per_rank in (1, 2, 4, 8):
        for mix, drawn in (
            ("real mix", real_mix(folder, 100_000, longest=8192)[0]),
            ("long tail", long_tail(100_000, longest=8192)[0]),
        ):
            lengths = np.resize(drawn, int(_FILLED * rows_per_rank * 64 * 8192 / drawn.mean()))
            mine = ours(lengths, 8192, 64, ModelCost(), rounds)
            longest = int(ModelCost().language(lengths).max())
            mean = int(ModelCost().language(lengths).sum()) / 64
            cells = [f"{rows_per_rank}, {mix}", *mine.cells(), f"{100 * longest / mean:.0f}%"]
            table.append(cells)
    note = (
        "64 ranks, rows of 8,192 tokens. The last column: what the longest example costs, in "
        "relation to the mean of a rank."
    )
    header = ["rows per rank, lengths", *HEADER[1:], "longest example"]
    report.table("Few rows per rank", header, table, note)


def models(report: Report, folder: Path, rounds: int) -> None:
    """The cost of other models than the default's."""
    table = []
    lengths, _ = sample(folder, _FILLED * 16 * 64 * 16384, longest=16384)
    for name, config in MODELS.items():
        cost = ModelCost.of(config)
        mine = ours(lengths, 16384, 64, cost, rounds)
        whole, short = (int(cost.language(np.array([n]))[0]) for n in (16384, 128))
        table.append([name, *mine.cells(), f"{whole / (128 * short):.1f}"])
    note = (
        "64 ranks, 16 rows of 16,384 tokens per rank. The last column: how many times as much a "
        "row costs with one example as with 128 of 128 tokens."
    )
    report.table("Models", ["", *HEADER[1:], "one or many"], table, note)


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    options = parser.parse_args()
    claim = (
        "On the real mix, 16 and 64 rows per rank, 8 to 512 ranks: the rank that costs most at "
        "most 2% over the mean, the one with most tokens at most 3% over, no row over the limit."
    )
    report = Report("balance", claim)
    found = compare(report, options.data, options.rounds)
    within_the_limit(report, options.data)
    few_rows(report, options.data, options.rounds)
    models(report, options.data, options.rounds)
    report.target("cost of the busiest rank", 100 * max(f.cost - 1 for f in found), "<% over", 2)
    report.target("tokens of the fullest", 100 * max(f.tokens - 1 for f in found), "<% over", 3)
    report.target("rows over the limit", sum(f.num_over for f in found), "< rows", 0)
    report.write(options.out)


if __name__ == "__main__":
    main()
