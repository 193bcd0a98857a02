"""A packing report as text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_collate_kit.batch.showing.tables import html_table, text_table
from torch_collate_kit.reporting.candidates import PADDED

__all__ = ["as_html", "as_text", "headline"]

_WIDTH = 100
_LEFT = ("layout",)
_Report = Mapping[str, Any]


def as_text(report: _Report) -> str:
    """Lines of at most 100 characters: the data, a table, what is recommended."""
    names, rows = _table(report)
    header, *lines = text_table(names, rows, _LEFT)
    texts = [*_intro(report, names), "", header]
    for i, (candidate, line) in enumerate(zip(report["candidates"], lines, strict=True)):
        begins_group = i > 0 and candidate["strategy"] == PADDED
        texts += ["", line] if begins_group else [line]
    return "\n".join([*texts, "", headline(report), *_recommendation(report)])


def as_html(report: _Report) -> str:
    """The same with a table; the recommended row is bold."""
    names, rows = _table(report)
    best = [report["recommended"][key] for key in ("max_tokens", "strategy")]
    found = [[c["max_tokens"], c["strategy"]] for c in report["candidates"]]
    table = html_table(names, rows, _LEFT, ["font-weight:bold" * (of == best) for of in found])
    before = "<br>".join(map(escape, _intro(report, names)))
    after = "<br>".join(map(escape, _recommendation(report)))
    return f"<div><p>{before}</p>{table}<p><b>{escape(headline(report))}</b><br>{after}</p></div>"


def headline(report: _Report) -> str:
    """What packing saves: the padding of padded rows, and of the recommended plan.

    >>> figures = {"max_tokens": 8, "strategy": "padded", "padding": 0.45}
    >>> best = {"max_tokens": 8, "strategy": "sequential", "padding": 0.021}
    >>> headline({"candidates": [figures, best], "recommended": best})
    'padding 45.0% -> 2.1% at max_tokens=8'
    """
    best = report["recommended"]
    if _fits_nothing(report):
        return f"no example fits into max_tokens={best['max_tokens']}"
    at_best = [c for c in report["candidates"] if c["max_tokens"] == best["max_tokens"]]
    padding = {candidate["strategy"]: candidate["padding"] for candidate in at_best}
    before, after = padding[PADDED], padding[best["strategy"]]
    return f"padding {before:.1%} -> {after:.1%} at max_tokens={best['max_tokens']}"


def _fits_nothing(report: _Report) -> bool:
    return all(candidate.get("num_tokens") == 0 for candidate in report["candidates"])


def _intro(report: _Report, names: Sequence[str]) -> list[str]:
    """What the data are, and what the columns of these ``names`` say."""
    data, options = report["data"], report["options"]
    lines = [
        f"{data['num_examples']:,} examples, {data['num_tokens']:,} tokens; median "
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
    if options["align"] > 1:
        lines.append(f"examples aligned to {options['align']} tokens")
    return lines


def _table(report: _Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows; a column that says nothing for any candidate is left out."""
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
    num_tokens = report["data"]["num_tokens"]
    lost = [(c["num_dropped_tokens"] + c["num_cut_tokens"]) / num_tokens for c in candidates]
    if any(lost):
        columns["lost"] = [f"{share:.2%}" for share in lost]
    if report["options"]["dp"] > 1:
        columns["rank tokens"] = [f"{c['tokens_max_over_mean']:.2f}" for c in candidates]
        columns["rank cost"] = [f"{c['cost_max_over_mean']:.2f}" for c in candidates]
    columns["plan"] = [_time(c["plan_seconds"]) for c in candidates]
    for name in ("efficiency", "plan"):  # the former is 100% less the padding
        if _width(columns) > _WIDTH:
            del columns[name]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(2 + max(map(len, (title, *cells))) for title, cells in columns.items()) - 2


def _time(seconds: float) -> str:
    if not seconds:
        return ""  # padded rows need no plan
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _recommendation(report: _Report) -> list[str]:
    best = report["recommended"]
    if _fits_nothing(report):
        return [f"recommended: nothing; {best['reason']}"]
    first = f"recommended: max_tokens={best['max_tokens']}, {best['strategy']}"
    return [first, f"  {best['reason']}", *(f"  {note}" for note in best["notes"])]
