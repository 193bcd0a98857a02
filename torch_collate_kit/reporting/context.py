"""Context parallelism of packed rows: pads of alignment, and how even attention is over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.context import LAYOUTS, attention_work, busiest_over_mean
from torch_collate_kit.packing.pieces import Load
from torch_collate_kit.packing.planner import plan_rows
from torch_collate_kit.packing.rows import Ints, row_sums
from torch_collate_kit.ragged import Ragged


def context_of(
    lengths: Ints,
    load: Load | None,
    packing: PackingOptions,
    batch_size: int | None,
    segments: Ragged | None,
) -> dict[str, Any]:
    """Return the pads of alignment and the work of the context ranks in each layout.

    Rows are those of ``packing``, planned ``batch_size`` examples at a time. ``segments`` are the
    lengths of those of every example, if examples are lists of them.
    """
    size, num_tokens, num_pads, least = packing.parallel.cp, 0, 0, 0
    found: dict[str, list[np.ndarray]] = {layout: [] for layout in LAYOUTS}
    for start in range(0, len(lengths), batch_size or len(lengths)):
        batch = np.arange(start, min(start + (batch_size or len(lengths)), len(lengths)))
        plan = plan_rows(lengths[batch], packing, None if load is None else load.take(batch))
        tokens, counts = plan.lengths, np.ones(len(plan.lengths), dtype=np.int64)
        if segments is not None:
            of_pieces = segments.take(batch[plan.example_indices])
            tokens, counts = of_pieces.values, of_pieces.lengths
        cells = _rounded_up(tokens, plan.align)
        num_tokens += int(tokens.sum())
        num_pads += int((cells - tokens).sum())
        least += int((_rounded_up(tokens, 2 * size) - tokens).sum())
        bounds = _bounds(plan, cells, counts)
        for layout, of in found.items():
            of.append(attention_work(bounds, plan.num_rows, size, layout))
    return {
        "cp_size": size,
        "pads": num_pads / max(1, num_tokens),
        "least_pads": least / max(1, num_tokens),
        "layouts": [_figures(layout, np.concatenate(of)) for layout, of in found.items()],
    }


def _rounded_up(tokens: Ints, multiple: int) -> Ints:
    return -(-tokens // multiple) * multiple


def _bounds(plan: PackingPlan, cells: Ints, counts: Ints) -> Ints:
    """Return the boundaries of segments flat over the rows, as those of the batch; int64 [S + 1].

    ``cells`` are those of the segments, ``counts`` the segments of each piece. A pad tail is a
    segment.
    """
    per_row = row_sums(counts, plan.row_offsets)
    tails = plan.width - row_sums(cells, np.append(0, np.cumsum(per_row)))
    sizes = np.insert(cells, np.cumsum(per_row), tails)
    return np.append(0, np.cumsum(sizes[sizes > 0]))


def _figures(layout: str, work: np.ndarray) -> dict[str, Any]:
    """Return the busiest rank over the mean, of each row: of all together, and the worst."""
    of_rows = work.max(axis=1) * work.shape[1] / work.sum(axis=1)
    return {
        "layout": layout,
        "work": busiest_over_mean(work),
        "worst_row": float(of_rows.max()),
    }


def context_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header, and a row for each layout."""
    width = report["recommended"]["max_tokens"]
    header = [
        f"{report['context']['cp_size']} context ranks, max_tokens={width}",
        "work",
        "worst row",
    ]
    rows = [
        [of["layout"], f"{of['work']:.3f}", f"{of['worst_row']:.3f}"]
        for of in report["context"]["layouts"]
    ]
    return header, rows


def context_legend(report: Mapping[str, Any]) -> list[str]:
    """Return lines about the columns, and the pads of alignment."""
    found, options = report["context"], report["options"]
    pads = f"pads of alignment to {options['align']}: {found['pads']:.2%} of the tokens"
    needed = 2 * found["cp_size"]
    least = ", the least for"
    if options["align"] > needed:
        least = f"; {found['least_pads']:.2%} to {needed}, the least for"
    return [
        "work: attention of the busiest rank / the mean; in every row the others wait for it",
        "  (contiguous: where ranks exchange keys; Ulysses exchanges heads, and is even)",
        f"{pads}{least} {found['cp_size']} context ranks",
    ]
