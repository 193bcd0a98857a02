"""The figures of a packing report, by plain loops over the rows of the plans."""

from __future__ import annotations

from typing import Any

from torch_collate_kit import ModelCost, PackingOptions, ParallelLayout, pack


def rounded_up(number: int, multiple: int) -> int:
    while number % multiple:
        number += 1
    return number


def language_cost(cells: int, cost: ModelCost) -> int:
    return cells * cost.language_linear + cost.language_quadratic * cells * cells


def max_over_mean(steps: list[list[int]]) -> float:
    """Of what every rank has in every step."""
    slowest = mean = 0.0
    for ranks in steps:
        slowest += max(ranks)
        mean += sum(ranks) / len(ranks)
    return slowest / mean if mean else 1.0


def figures(
    rows: int, cells: int, tokens: list[list[int]], costs: list[list[int]]
) -> dict[str, Any]:
    """``tokens`` and ``costs``: a list of the ranks for every step."""
    num_tokens = sum(map(sum, tokens))
    return {
        "num_rows": rows,
        "num_cells": cells,
        "num_tokens": num_tokens,
        "padding": 1 - num_tokens / cells,
        "efficiency": num_tokens / cells,
        "tokens_per_rank": [sum(step[r] for step in tokens) for r in range(len(tokens[0]))],
        "cost_per_rank": [sum(step[r] for step in costs) for r in range(len(costs[0]))],
        "tokens_max_over_mean": max_over_mean(tokens),
        "cost_max_over_mean": max_over_mean(costs),
    }


def packed_figures(
    lengths: list[int],
    max_tokens: int,
    layout: ParallelLayout,
    batch_size: int | None,
    cost: ModelCost,
    **options: Any,
) -> dict[str, Any]:
    """A step is a batch, or of data packed at once one row of every rank."""
    rows = cells = 0
    tokens: list[list[int]] = []
    costs: list[list[int]] = []
    size = batch_size or len(lengths)
    for start in range(0, len(lengths), size):
        packing = PackingOptions(max_tokens, parallel=layout, cost=cost, **options)
        plan = pack(lengths[start : start + size], packing=packing)
        row_tokens, row_cells, row_costs = [], [], []
        pieces = plan.lengths.tolist()
        for row in range(plan.num_rows):
            inside = pieces[plan.row_offsets[row] : plan.row_offsets[row + 1]]
            taken = [rounded_up(n, layout.align) for n in inside]
            row_tokens.append(sum(inside))
            row_cells.append(sum(taken))
            row_costs.append(sum(language_cost(n, cost) for n in taken))
        rows += plan.num_rows
        cells += plan.num_rows * max(layout.align, *row_cells)
        per_rank = plan.num_rows // layout.dp
        if batch_size is None:
            for i in range(per_rank):
                tokens.append([row_tokens[r * per_rank + i] for r in range(layout.dp)])
                costs.append([row_costs[r * per_rank + i] for r in range(layout.dp)])
        else:
            own = [range(r * per_rank, (r + 1) * per_rank) for r in range(layout.dp)]
            tokens.append([sum(row_tokens[i] for i in mine) for mine in own])
            costs.append([sum(row_costs[i] for i in mine) for mine in own])
    return figures(rows, cells, tokens, costs)


def padded_figures(
    kept: list[int], layout: ParallelLayout, batch_size: int, cost: ModelCost
) -> dict[str, Any]:
    """``kept``: the lengths that fit, or what is left of them, in their order."""
    cells = 0
    tokens: list[list[int]] = []
    costs: list[list[int]] = []
    for number, start in enumerate(range(0, len(kept), batch_size)):
        batch = kept[start : start + batch_size]
        width = rounded_up(max(batch), layout.align)
        cells += len(batch) * width
        if number % layout.dp == 0:
            tokens.append([0] * layout.dp)
            costs.append([0] * layout.dp)
        tokens[-1][number % layout.dp] = sum(batch)
        costs[-1][number % layout.dp] = len(batch) * language_cost(width, cost)
    return figures(len(kept), cells, tokens, costs)


def what_is_left(
    lengths: list[int], capacity: int, overflow: str
) -> tuple[list[int], dict[str, int]]:
    """The pieces of examples that rows of ``capacity`` take, and what is lost."""
    pieces: list[int] = []
    lost = dict.fromkeys(("num_dropped", "num_dropped_tokens", "num_cut", "num_cut_tokens"), 0)
    for length in lengths:
        if length <= capacity:
            pieces.append(length)
        elif overflow == "drop":
            lost["num_dropped"] += 1
            lost["num_dropped_tokens"] += length
        elif overflow == "truncate":
            pieces.append(capacity)
            lost["num_cut"] += 1
            lost["num_cut_tokens"] += length - capacity
        else:
            lost["num_cut"] += 1
            while length > 0:
                pieces.append(min(capacity, length))
                length -= capacity
    return pieces, lost
