"""``packing_report``: the rows that padding and packing make of a dataset, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from torch_collate_kit._checks import (
    checked_bool,
    checked_choice,
    checked_int,
    checked_optional_int,
    plural,
)
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    html_table,
    legend_below,
    matplotlib_module,
    text_table,
    tint,
)
from torch_collate_kit.families import family_of, left_padding_fault
from torch_collate_kit.packing import ModelCost, PackingOptions, ParallelLayout
from torch_collate_kit.packing.atoms import Atoms, Patches, checked_sizes
from torch_collate_kit.packing.options import Balance, Overflow, Strategy
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reporting.candidates import (
    PADDED,
    SHARED,
    candidates_of,
    fits_nothing,
    headline,
    histogram,
    losses,
    packings_to_try,
    price_of_one_shape,
    recommended,
    steps_legend,
    steps_of,
    steps_table,
)
from torch_collate_kit.reporting.lengths import data_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST = 1 << 62
_LEFT = ("layout",)
_KEYS = {"data", "options", "candidates", "recommended"}
_WIDTH = 100
Plot: TypeAlias = Literal["padding", "balance", "lengths"]
_MOST_TICKS = 32

# light to dark, and a hatch of its own for each
_LOOKS: dict[str, dict[str, Any]] = {
    PADDED: {"facecolor": "#E4E4E4", "hatch": "////"},
    "best_fit_decreasing": {"facecolor": COLORS["blue"], "hatch": ""},
    "first_fit_decreasing": {"facecolor": COLORS["purple"], "hatch": "xx"},
    "balanced": {"facecolor": COLORS["green"], "hatch": ".."},
    "sequential": {"facecolor": tint(COLORS["orange"], 0.7), "hatch": "\\\\\\\\"},
    "wrapped": {"facecolor": tint(COLORS["sky"], 0.4), "hatch": "--"},
    SHARED: {"facecolor": tint(COLORS["purple"], 0.4), "hatch": "++"},
    "tokens": {"facecolor": tint(COLORS["sky"], 0.6), "hatch": ""},
    "cost": {"facecolor": COLORS["blue"], "hatch": ""},
}


class PackingReport(dict[str, Any]):
    """The result of ``packing_report``: a dict for ``json.dumps`` that prints as a table.

    - ``"data"``: ``num_examples``, ``num_tokens``, ``mean``, ``median``, ``longest`` (and
      ``num_segments`` if examples are lists of them) and a
      ``histogram`` of lengths;
    - ``"options"``: the options of the plans;
    - ``"candidates"``: a dict for each ``max_tokens`` and strategy, padded rows first, then, if
      segments begin alike, those of "shared_prefixes";
    - ``"recommended"``: ``max_tokens``, ``strategy``, the ``reason``, ``segments``, and ``notes``;
    - ``"steps"``: with ``batch_rows``, a dict for steps "by_examples", "by_rows" and "wrapped".

    A candidate has ``max_tokens``, ``strategy``, ``efficiency`` and ``padding`` (shares of the
    cells), ``num_rows``, ``num_tokens``, ``num_cells``, ``num_dropped``, ``num_dropped_tokens``,
    ``num_cut``, ``num_cut_tokens``, ``tokens_per_rank``, ``cost_per_rank``,
    ``tokens_max_over_mean``, ``cost_max_over_mean`` and ``plan_seconds``; packed ones
    ``mean_segments`` and ``most_segments`` of a row, and the ``max_sequences_per_row`` to set for
    one shape. Steps have ``num_steps``,
    ``padding``, ``imbalance``, ``imbalance_99`` and ``time_per_token``.

    >>> report = packing_report([5, 3, 9, 2], 10, show=False)
    >>> [(c["strategy"], c["num_rows"]) for c in report["candidates"]]
    [('padded', 4), ('best_fit_decreasing', 2), ('balanced', 2), ('sequential', 3)]
    """

    def plot(self, what: Plot = "padding", *, ax: Axes | None = None) -> Axes:
        """Draw one of three plots with matplotlib, on ``ax`` or a new figure.

        Args:
            what: "padding", of every candidate, with what it loses; "balance", how much more than
                the mean the heaviest rank of a step has, for which the others wait; "lengths", the
                share of examples and of tokens by length.
            ax: axes to draw on; by default those of a new figure.

        Returns the axes. Nothing is shown: call ``plt.show()``, or
        ``report.plot().figure.savefig("padding.png")``.

        Raises:
            ValueError: another plot.
            ImportError: matplotlib is not installed.

        >>> packing_report([5, 3, 9, 2], 20, show=False).plot().get_title()
        'padding 47.2% -> 0.0% at max_tokens=20'
        """
        checked_choice("what", what, tuple(PLOTS))
        return PLOTS[what](self, ax)

    def __repr__(self) -> str:
        """Return the data, a table and the recommendation, in lines of at most 100 characters."""
        if not self.keys() >= _KEYS:
            return super().__repr__()
        names, rows = candidates_table(self)
        header, *lines = text_table(names, rows, _LEFT)
        texts = [*intro_lines(self, names), "", header]
        for i, (candidate, line) in enumerate(zip(self["candidates"], lines, strict=True)):
            begins_group = i > 0 and candidate["strategy"] == PADDED
            texts += ["", line] if begins_group else [line]
        texts += ["", headline(self), *recommendation_lines(self)]
        if self.get("steps"):
            names, rows = steps_table(self)
            texts += ["", *text_table(names, rows, names[:1]), *steps_legend(names)]
        return "\n".join(texts)

    def _repr_html_(self) -> str | None:
        """Return the report as an HTML table, the recommended layout in bold."""
        if not self.keys() >= _KEYS:
            return None
        names, rows = candidates_table(self)
        best = [self["recommended"][key] for key in ("max_tokens", "strategy")]
        found = [[c["max_tokens"], c["strategy"]] for c in self["candidates"]]
        table = html_table(names, rows, _LEFT, ["font-weight:bold" * (of == best) for of in found])
        before = "<br>".join(map(escape, intro_lines(self, names)))
        after = "<br>".join(map(escape, recommendation_lines(self)))
        html = f"<p>{before}</p>{table}<p><b>{escape(headline(self))}</b><br>{after}</p>"
        if self.get("steps"):
            names, rows = steps_table(self)
            table = html_table(names, rows, names[:1], [""] * len(rows))
            html += f"<br>{table}<p>{'<br>'.join(map(escape, steps_legend(names)))}</p>"
        return f"<div>{html}</div>"


def packing_report(
    data: Any,
    max_tokens: int | Sequence[int] | None = None,
    *,
    strategies: Sequence[Strategy] | None = None,
    parallel: ParallelLayout | None = None,
    overflow: Overflow = "drop",
    balance: Balance | None = "attention",
    cost: ModelCost | None = None,
    max_sequences_per_row: int | None = None,
    patches: Patches | None = None,
    max_patches: int | None = None,
    batch_size: int | None = None,
    batch_rows: int | None = None,
    padded_batch_size: int | None = None,
    model: Any = None,
    show: bool = True,
) -> PackingReport:
    """Compare padded rows with packed ones on your data, and recommend a ``max_tokens``.

    Recommended is the smallest ``max_tokens`` of those that drop and cut the fewest examples and
    leave at most 2% padding; if they all leave more, the smallest within half a point of the least.
    The strategy is the first one within half a point of the least padding, or "balanced", the
    default of collators, where that has as few rows.

    Args:
        data: lengths, a TokenizedDataset, a datasets.Dataset, the path of an Arrow or Parquet file,
            or examples or columns with ``input_ids`` (or rollouts).
        max_tokens: one or several. None tries powers of two, and a few numbers between them, from
            the one that holds 99 of 100 examples to twice the one that holds all.
        strategies: of ``pack``. None: best fit, balanced and sequential, but balanced alone if
            ``max_tokens`` is None.
        parallel: the layout; its ``dp`` ranks share rows.
        overflow: for examples longer than a row: "drop" and "truncate" count what is lost, "split"
            counts the examples it cuts, "raise" raises.
        balance: as for ``pack``.
        cost: as for ``pack``; language and vision together.
        max_sequences_per_row: as for ``pack``.
        patches: as for ``pack``; by default those of a TokenizedDataset with ``vision``.
        max_patches: as for ``pack``.
        batch_size: examples that are packed together, over all ranks. None: all at once, as if they
            had been packed before training.
        batch_rows: rows of a step over all ranks. A second table then compares steps by examples,
            by rows and wrapped, at the recommended ``max_tokens``.
        padded_batch_size: examples that a rank pads together. None: ``batch_size`` divided by the
            ranks, or 8.
        model: the model or its config. A note says if rows padded on the left are wrong in it.
        show: print the report.

    Padded rows are as wide as the longest example of their batch, in the order of the data, and
    hold the same examples as packed rows. ``max_over_mean`` compares the slowest rank of a step to
    the mean rank; a step is a batch, or one row per rank where all data is packed at once.

    Raises:
        DataError: no examples; a length below 1; a padded example; columns of different lengths;
            an example that does not fit, as ``pack`` says.
        TypeError, ValueError: a wrong option.

    >>> report = packing_report([5, 3, 9, 2], [10, 20], show=False)
    >>> best = report["recommended"]
    >>> best["max_tokens"], best["strategy"]
    (20, 'balanced')
    >>> best["reason"]
    'the smallest of those that drop and cut nothing and leave at most 2% padding'
    """
    found = data_lengths(data)
    packing = PackingOptions(
        max_tokens=_LARGEST,  # replaced below
        parallel=ParallelLayout() if parallel is None else parallel,
        overflow=overflow,
        balance=balance,
        cost=ModelCost() if cost is None else cost,
        max_sequences_per_row=max_sequences_per_row,
        max_patches=max_patches,
        dummy_image_tokens=found.dummy_image_tokens,
    )
    patches = found.patches if patches is None else patches
    sizes, offsets = checked_sizes(found.lengths)
    atoms = Atoms.of(sizes, offsets, packing, patches)
    packings = packings_to_try(packing, max_tokens, strategies, atoms.tokens)
    batch_size = checked_optional_int("batch_size", batch_size, hint="None packs all at once")
    usual = 8 if batch_size is None else max(1, batch_size // packing.parallel.dp)
    padded = usual if padded_batch_size is None else padded_batch_size
    padded = checked_int("padded_batch_size", padded)
    checked_bool("show", show)
    batch_rows = checked_optional_int("batch_rows", batch_rows, hint="None compares no steps")
    segments = found.lengths if isinstance(found.lengths, Ragged) else None
    trees: tuple[Atoms, np.ndarray] | None = None
    can_share = packing.parallel.cp == 1 and overflow in ("drop", "raise")
    if can_share and found.shared is not None and found.shared.any():
        sharing = replace(packing, share_prefixes=True)
        own = np.add.reduceat(sizes - found.shared, np.asarray(offsets)[:-1])
        trees = Atoms.of(sizes, offsets, sharing, depths=found.shared), own
    report = _report(atoms, packings, batch_size, padded, segments, trees)
    if segments is not None and found.shared is None:
        report["recommended"]["notes"].append(
            "note: lengths do not show what segments share; pass the dataset to see share_prefixes"
        )
    config = getattr(model, "config", model)
    if fault := left_padding_fault(config):
        report["recommended"]["notes"] += [
            f"note: rows padded on the left are wrong in {family_of(config).name} models; use "
            'padding_side="right":',
            f"  {fault}",
        ]
    best = report["recommended"]
    packing = replace(packing, max_tokens=best["max_tokens"])
    if batch_rows is not None and not fits_nothing(report):
        report["steps"] = steps_of(found.lengths, patches, packing, batch_rows, batch_size)
    if show:
        print(report)
    return report


def _report(
    atoms: Atoms,
    packings: Sequence[PackingOptions],
    batch_size: int | None,
    padded_batch_size: int,
    segments: Ragged | None,
    trees: tuple[Atoms, np.ndarray] | None,
) -> PackingReport:
    found = candidates_of(atoms, packings, batch_size, padded_batch_size, segments, trees)
    candidates = list(found)
    lengths, num_tokens = atoms.tokens, int(atoms.tokens.sum())
    best = recommended(candidates, num_tokens)
    if "segments" in best:
        best["segments"] += price_of_one_shape(best, candidates, atoms, packings, batch_size)
    options = packings[0].as_state()
    del options["max_tokens"], options["strategy"]
    return PackingReport(
        data={
            "num_examples": len(lengths),
            "num_tokens": num_tokens,
            "mean": num_tokens / len(lengths),
            "median": float(np.median(lengths)),
            "longest": int(lengths.max()),
            "histogram": histogram(lengths),
            **({} if segments is None else {"num_segments": len(segments.values)}),
        },
        options={**options, "batch_size": batch_size, "padded_batch_size": padded_batch_size},
        candidates=candidates,
        recommended=best,
        steps=[],
    )


def intro_lines(report: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return lines about the data, and about the columns of these ``names``."""
    data, options = report["data"], report["options"]
    segments = f" of {data['num_segments']:,} segments" if "num_segments" in data else ""
    batch = options["batch_size"]
    packed = "all examples together" if batch is None else f"{batch:,} examples at a time"
    lines = [
        f"{plural(data['num_examples'], 'example')}{segments}, {data['num_tokens']:,} tokens; "
        f"median {data['median']:,.0f}, longest {data['longest']:,}",
        f"packed {packed}; padded in batches of {options['padded_batch_size']:,}",
    ]
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
    """Return lines about the recommended layout, or why nothing is recommended."""
    best = report["recommended"]
    if fits_nothing(report):
        return [f"recommended: nothing; {best['reason']}"]
    first = f"recommended: max_tokens={best['max_tokens']}, {best['strategy']}"
    return [first, *(f"  {line}" for line in (best["reason"], best["segments"], *best["notes"]))]


def _draw_padding(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw the padding of every candidate, grouped by ``max_tokens``; the best has a star."""
    candidates = report["candidates"]
    ax = axes_for(ax, min(16.0, 4.5 + 0.5 * len(candidates)), 4.2)
    percent: dict[str, list[float]] = {c["strategy"]: [] for c in candidates}
    ticks = []
    for candidate in candidates:
        percent[candidate["strategy"]].append(100 * candidate["padding"])
        if candidate["strategy"] == PADDED:
            is_best = candidate["max_tokens"] == report["recommended"]["max_tokens"]
            lost = ((candidate[f"num_{word}"], word) for word in ("dropped", "cut"))
            lines = (f"{number:,} {word}" for number, word in lost if number)
            ticks.append("\n".join([f"{candidate['max_tokens']:,}{' *' * is_best}", *lines]))
    _grouped_bars(ax, percent, ticks, inches=0.75)
    ax.set(
        ylim=(0, max(1.0, 115 * max(c["padding"] for c in candidates))),
        xlabel="max_tokens (* recommended), and what is lost",
        ylabel="padding (% of the cells)",
        title=headline(report),
    )
    return ax


def _draw_balance(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw how far the heaviest rank of a step is above the mean, at the best ``max_tokens``."""
    best, ranks = report["recommended"], report["options"]["dp"]
    limit = best["max_tokens"]
    found = {c["strategy"]: c for c in report["candidates"] if c["max_tokens"] == limit}
    ax = axes_for(ax, 3.5 + 1.2 * len(found), 4.0)
    percent = {
        name: [100 * (c[f"{name}_max_over_mean"] - 1) for c in found.values()]
        for name in ("tokens", "cost")
    }
    _grouped_bars(ax, percent, [name.replace("_", "\n") for name in found], inches=0.95)
    costs = dict(zip(found, percent["cost"], strict=True))
    ax.set(
        ylim=(0, max(1.0, 1.2 * max(max(heights) for heights in percent.values()))),
        xlabel=f"layout, at max_tokens={limit}",
        ylabel="heaviest rank of a step, over the mean (%)",
        title=(
            f"heaviest of {plural(ranks, 'rank')}: cost {costs[PADDED]:+.1f}% padded, "
            f"{costs[best['strategy']]:+.1f}% packed"
        ),
    )
    return ax


def _grouped_bars(
    ax: Axes, groups: Mapping[str, Sequence[float]], ticks: Sequence[str], *, inches: float
) -> None:
    """Draw a bar of each group around each tick, and a legend below."""
    size = 0.84 / len(groups)
    handles = []
    for i, (name, heights) in enumerate(groups.items()):
        places = np.arange(len(heights)) + (i - (len(groups) - 1) / 2) * size
        bars = ax.bar(places, heights, size, label=name, edgecolor="black", **_LOOKS[name])
        ax.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7, padding=1)
        handles.append(bars)
    step = -(-len(ticks) // _MOST_TICKS)
    ax.set_xticks(range(0, len(ticks), step), ticks[::step])
    legend_below(ax, handles, inches=inches)


def _draw_lengths(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw the share of examples and of tokens by length, and the best ``max_tokens``."""
    data, best = report["data"], report["recommended"]["max_tokens"]
    edges = np.array(data["histogram"]["edges"])
    ax = axes_for(ax, 8.0, 4.2)
    shares = [
        100 * np.array(data["histogram"][name]) / data[f"num_{name}"]
        for name in ("examples", "tokens")
    ]
    blue: dict[str, Any] = {"facecolor": tint(COLORS["blue"], 0.5), "edgecolor": COLORS["blue"]}
    ax.stairs(shares[0], edges - 0.5, label="examples", fill=True, **blue)
    ax.stairs(shares[1], edges - 0.5, label="tokens", color="black", linewidth=1.8)
    [candidate, *_] = [c for c in report["candidates"] if c["max_tokens"] == best]
    lost = losses(candidate, data["num_tokens"])
    text = f"max_tokens={best} {lost}" if lost else f"max_tokens={best}: all examples fit"
    ax.axvline(best, color=COLORS["vermillion"], linestyle="--", linewidth=2, label=text)
    ticker = matplotlib_module("ticker")
    if len(np.unique(np.diff(edges))) > 1:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=12))
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        ax.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set(
        ylim=(0, None),
        xlabel="length of the example (tokens)",
        ylabel="share in the bin (%)",
        title=(
            f"{plural(data['num_examples'], 'example')}, {plural(data['num_tokens'], 'token')}: "
            f"median {data['median']:,.0f}, longest {data['longest']:,}"
        ),
    )
    legend_below(ax, ax.get_legend_handles_labels()[0])
    return ax


PLOTS = {"padding": _draw_padding, "balance": _draw_balance, "lengths": _draw_lengths}
