"""Rows of several steps planned together, so that every step is full and costs the same.

A window is the next run of the order that fits in the rows of its steps with 0.5% of the cells
left free. The free cells let pieces be levelled over the rows; rows are then dealt to the steps.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from torch_collate_kit.packing.atoms import NO_ATOMS, Atoms
from torch_collate_kit.packing.balance import assign_ranks, level_rows, weights_of
from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.planner import (
    filled_rows,
    fitted,
    has_two_budgets,
    limits_of,
    part_of,
    wrapped,
)
from torch_collate_kit.packing.rows import Ints, Limits
from torch_collate_kit.packing.strategies import num_rows_best_fit, sequential

_FILLED_PER_MILLE = 995  # at 998 levelling overflows some row, and rows keep best fit's like sizes


class WindowPlan(NamedTuple):
    """The rows of consecutive steps."""

    lengths: Ints
    """int64 [E], tokens of the examples of the window."""
    filled: PackingPlan
    """All rows of the window, for no ranks yet."""
    steps: Ints
    """int64 [steps, rows of a step], the rows of each step in ``filled``."""

    def step(self, number: int, packing: PackingOptions) -> tuple[Ints, PackingPlan]:
        """Plan one step over the ranks of ``packing``; which rows it has does not depend on them.

        Returns its examples, int64 [M] ascending numbers of the window's examples, and a plan in
        which they are numbered 0 to M - 1. Examples that are dropped are in the first step.
        """
        filled, dp = self.filled, packing.parallel.dp
        if number:
            filled = replace(filled, left_out=NO_ATOMS)
        rows = filled.rows.take(self.steps[number])
        is_in_E = np.zeros(len(self.lengths), dtype=bool)
        is_in_E[filled.atoms.examples[rows.order]] = is_in_E[filled.left_out.examples] = True
        examples = np.flatnonzero(is_in_E)
        rows = assign_ranks(rows, filled.atoms, packing, num_ranks=dp)
        plan, num_cut = part_of(filled, rows, examples), 0
        if packing.overflow == "truncate":
            is_cut_S = np.isin(plan.atoms.examples, plan.cut)
            lengths_C = self.lengths[examples[plan.atoms.examples[is_cut_S]]]
            num_cut = int((lengths_C - plan.atoms.tokens[is_cut_S]).sum())
        return examples, replace(plan, rows_multiple_of=dp, num_cut_tokens=num_cut)


def num_that_fit(
    atoms: Atoms, packing: PackingOptions, num_rows: int, *, more_follow: bool
) -> int | None:
    """Count how many of the first examples fit in ``num_rows`` rows with 0.5% of the cells free.

    At least ``num_rows`` of them do, if there are as many: best fit opens at most one row for each.
    None of them is split. None where ``more_follow`` that could count.
    """
    kept = fitted(atoms, packing).atoms
    slots = packing.max_sequences_per_row
    most = len(kept.tokens) if slots is None else _num_within_slots(kept, slots, num_rows)

    def first(number: int) -> tuple[Atoms, Limits]:  # alone, whatever follows them
        some = kept.take(np.arange(number))
        return some, limits_of(some, packing)

    some, limits = first(most)
    if packing.strategy == "sequential":
        most = _num_in_order(some, limits._replace(pieces=None), num_rows)
        number = _num_in_order(*first(most), num_rows)
    else:
        number, most = _num_in_budgets(some, limits, packing, num_rows)
        ends = np.cumsum(some.cells)
        while number > num_rows:
            surplus = _num_rows(*first(number), packing) - num_rows
            if surplus <= 0:
                break
            less = max(1, surplus * packing.capacity // 8)  # an eighth of the rows too many
            fewer = int(np.searchsorted(ends, ends[number - 1] - less))
            number = max(num_rows, min(number - 1, fewer))
    if more_follow and most == len(kept.tokens):
        return None
    return int(kept.examples[number]) if number < len(kept.tokens) else len(atoms.tokens)


def num_rows_needed(atoms: Atoms, packing: PackingOptions) -> int:
    """Count the rows that the strategy fills with these examples, none of which is split."""
    kept = fitted(atoms, packing).atoms
    return _num_rows(kept, limits_of(kept, packing), packing) if len(kept.tokens) else 0


def plan_window(
    atoms: Atoms, packing: PackingOptions, *, num_steps: int, batch_rows: int, group: int
) -> WindowPlan:
    """Plan the rows of ``num_steps`` steps, ``batch_rows`` each, which hold these examples.

    Rows are levelled. In descending order of cost, each ``group`` neighbours, for ranks to compute
    at the same time, are dealt to the steps in a snake. Then the steps are taken from both ends in
    turn, so that any run of them is close to the mean of all.
    """
    pieces = fitted(atoms, packing)
    limits = limits_of(pieces.atoms, packing)
    rows, num_rows = filled_rows(pieces.atoms, limits, packing), num_steps * batch_rows
    assert len(rows.offsets) <= num_rows + 1, "rows of no step would be lost"
    rows = level_rows(rows, pieces.atoms, limits, packing, num_rows=num_rows, num_ranks=group)
    if packing.strategy == "sequential":
        steps = np.arange(num_rows).reshape(num_steps, batch_rows)
    elif packing.balance is None:  # round robin
        steps = np.arange(num_rows).reshape(batch_rows, num_steps).T
    else:
        costs_S, image_costs_S = weights_of(pieces.atoms, packing)
        steps = _dealt(rows.totals(costs_S + image_costs_S), num_steps, group)
    return WindowPlan(atoms.tokens, pieces.in_rows(rows), steps)


def plan_wrapped(
    lengths: Ints,
    packing: PackingOptions,
    *,
    skipped: int,
    num_steps: int,
    batch_rows: int,
    group: int,
) -> WindowPlan:
    """Plan steps of documents joined end to end, without their first ``skipped`` tokens.

    ``lengths`` int64 [E] are what is read of each, the skipped tokens included.
    """
    unread_E = lengths.copy()
    unread_E[:1] -= skipped
    atoms = Atoms.of(unread_E, None, packing)
    atoms = replace(atoms, starts=np.where(atoms.examples == 0, skipped, 0))
    layout = replace(packing.parallel, dp=1)
    alone = replace(packing, parallel=layout, rows_multiple_of=num_steps * batch_rows)
    plan = replace(wrapped(atoms, alone), packing=packing)
    costs_R = plan.rows.totals(weights_of(plan.atoms, packing)[0])
    return WindowPlan(unread_E, plan, _dealt(costs_R, num_steps, group))


def _dealt(costs_R: Ints, num_steps: int, group: int) -> Ints:
    """Deal groups of rows that cost alike to the steps: int64 [steps, rows of a step]."""
    groups = np.argsort(-costs_R, kind="stable").reshape(-1, group)
    turns = np.arange(len(groups)).reshape(-1, num_steps)
    turns[1::2] = turns[1::2, ::-1].copy()
    steps = np.arange(num_steps)
    ends_first = np.argsort(np.minimum(steps, steps[::-1]), kind="stable")
    return groups[turns[:, ends_first]].transpose(1, 0, 2).reshape(num_steps, -1)


def _num_within_slots(atoms: Atoms, slots: int, num_rows: int) -> int:
    """Return how many of the first atoms fit by ``max_sequences_per_row`` alone."""
    each_S = slots // np.maximum.accumulate(atoms.segments)  # as `limits_of` has it
    return int(np.count_nonzero(np.arange(len(each_S)) < num_rows * each_S))


def _num_in_order(atoms: Atoms, limits: Limits, num_rows: int) -> int:
    offsets = sequential(atoms.sizes, limits).offsets
    return int(offsets[min(num_rows, len(offsets) - 1)])


def _num_in_budgets(
    atoms: Atoms, limits: Limits, packing: PackingOptions, num_rows: int
) -> tuple[int, int]:
    """Return how many of the first atoms fit with a margin, and how many without.

    The margin is 0.5% of the cells; none where every row has room for as many of the longest.
    """
    budgets = [(atoms.cells, packing.capacity)]
    if packing.max_patches is not None and limits.patches:
        budgets.append((atoms.patches, packing.max_patches))
    number = most = len(atoms.cells)
    for sizes_S, room in budgets:
        ends_S, full = np.append(0, np.cumsum(sizes_S)), num_rows * room
        for share in (_FILLED_PER_MILLE, 1000):
            least = min(max(room, full * share // 1000), int(ends_S[-1]))
            within = int(np.searchsorted(ends_S, least, side="right")) - 1
            number, most = min(number, within), most if share < 1000 else min(most, within)

    def overfills(each: int) -> bool:
        largest = [each * int(sizes_S[: each * num_rows].max()) for sizes_S, _ in budgets]
        largest[0] += limits.reserved if each > 1 else 0
        return any(size > room for size, (_, room) in zip(largest, budgets, strict=True))

    alike = bisect_left(range(1, most // num_rows + 1), True, key=overfills)
    return max(number, min(num_rows, len(atoms.cells)), alike * num_rows), most


def _num_rows(atoms: Atoms, limits: Limits, packing: PackingOptions) -> int:
    is_best_fit = packing.strategy in ("best_fit_decreasing", "balanced", None)
    if is_best_fit and limits.pieces is None and not has_two_budgets(atoms, limits):
        return num_rows_best_fit(atoms.cells, limits.text)
    return len(filled_rows(atoms, limits, packing).offsets) - 1
