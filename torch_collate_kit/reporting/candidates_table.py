"""A packing report in words: what is compared, a table of the candidates, the recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_collate_kit._reprs import plural
from torch_collate_kit.reporting.candidates import SHARED, fits_nothing

_WIDTH = 100


def _segments(data: Mapping[str, Any]) -> str:
    return f" of {data['num_segments']:,} segments" if "num_segments" in data else ""


def intro_lines(report: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return lines about the data, and about the columns of these ``names``."""
    data, options = report["data"], report["options"]
    lines = [
        f"{plural(data['num_examples'], 'example')}{_segments(data)}, {data['num_tokens']:,} "
        "tokens; median "
        f"{data['median']:,.0f}, longest {data['longest']:,}"
    ]
    batch = options["batch_size"]
    packed = "all examples together" if batch is None else f"{batch:,} examples at a time"
    lines.append(f"packed {packed}; padded in batches of {options['padded_batch_size']:,}")
    if "rank cost" in names:
        lines.append(
            f"{options['dp']} ranks; rank tokens and cost: the slowest rank of a step / the mean"
        )
    if "lost" in names:
        lines.append("dropped or cut: examples that do not fit; lost: their share of the tokens")
    elif "cut" in names:
        lines.append("cut: examples that continue in another row; no token is lost")
    if options["align"] > 1:
        lines.append(f"examples aligned to {options['align']} tokens")
    if options["row_align"] > options["align"]:
        lines.append(f"fp8: the width of rows is a multiple of {options['row_align']} cells")
    return lines


def candidates_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows, without columns that say nothing for any candidate."""
    candidates = report["candidates"]
    columns: dict[str, list[str]] = {
        "max_tokens": [str(c["max_tokens"]) for c in candidates],
        "layout": [c["strategy"] for c in candidates],
        "padding": [f"{c['padding']:.1%}" for c in candidates],
        "efficiency": [f"{c['efficiency']:.1%}" for c in candidates],
        "rows": [f"{c['num_rows']:,}" for c in candidates],
    }
    for title, name in (("dropped", "num_dropped"), ("cut", "num_cut")):
        if any(c[name] for c in candidates):
            columns[title] = [f"{c[name]:,}" for c in candidates]
    if any(c["strategy"] == SHARED for c in candidates):
        columns["tokens/cell"] = [
            f"{c['num_tokens'] / max(1, c['num_cells']):.2f}" for c in candidates
        ]
    num_tokens = report["data"]["num_tokens"]
    lost = [(c["num_dropped_tokens"] + c["num_cut_tokens"]) / num_tokens for c in candidates]
    if any(lost):
        columns["lost"] = [f"{share:.2%}" for share in lost]
    if report["options"]["dp"] > 1:
        columns["rank tokens"] = [f"{c['tokens_max_over_mean']:.2f}" for c in candidates]
        columns["rank cost"] = [f"{c['cost_max_over_mean']:.2f}" for c in candidates]
    columns["plan"] = [_time(c["plan_seconds"]) for c in candidates]
    for name in ("efficiency", "plan"):  # the former is 100% less the padding
        widths = [max(map(len, (title, *cells))) for title, cells in columns.items()]
        if sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
            del columns[name]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _time(seconds: float) -> str:
    if not seconds:
        return ""  # padded rows need no plan
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def recommendation_lines(report: Mapping[str, Any]) -> list[str]:
    """Return lines about the recommended layout, or why there is none."""
    best = report["recommended"]
    if fits_nothing(report):
        return [f"recommended: nothing; {best['reason']}"]
    first = f"recommended: max_tokens={best['max_tokens']}, {best['strategy']}"
    return [first, *(f"  {line}" for line in (best["reason"], *best["notes"]))]
