"""Steps of training side by side: by examples, by rows, and of documents joined end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._reprs import plural
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.loading import PackedBatchSampler
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.atoms import Atoms, Patches, checked_sizes
from torch_collate_kit.packing.rows import Ints, row_sums
from torch_collate_kit.ragged import Ragged

_MOST_STEPS = 256  # that are planned


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
    by_rows = _figures(lengths, patches, packing, "by_rows", batch_rows=batch_rows)
    if batch_size is None:
        batch_size = max(1, round(len(lengths) / by_rows["num_steps"]))
    found = [_figures(lengths, patches, packing, "by_examples", batch_size=batch_size), by_rows]
    is_text = patches is None and not isinstance(lengths, Ragged)
    can_be_cut = packing.parallel.align == 1 and packing.capacity == packing.max_tokens
    if is_text and can_be_cut and packing.max_sequences_per_row is None:
        wrapped = replace(packing, strategy="wrapped", overflow="raise")
        found.append(_figures(lengths, None, wrapped, "wrapped", batch_rows=batch_rows))
    return found


def steps_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header, and a row for each kind of step."""
    steps, options = report["steps"], report["options"]
    ranks, width = plural(options["dp"], "rank"), report["recommended"]["max_tokens"]
    columns = {
        f"a step over {ranks}, max_tokens={width}": [_name(of) for of in steps],
        "steps": [f"{of['num_steps']:,}" for of in steps],
        "padding": [f"{of['padding']:.1%}" for of in steps],
    }
    if options["dp"] > 1:
        columns["imbalance"] = [f"{of['imbalance']:.3f}" for of in steps]
        columns["99%"] = [f"{of['imbalance_99']:.3f}" for of in steps]
    columns["unlike"] = [f"{of['unlikeness']:.1f}" if of["unlikeness"] else "-" for of in steps]
    columns["time"] = [f"{of['time_per_token']:.3f}" for of in steps]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def steps_legend(names: Sequence[str]) -> list[str]:
    """Return lines about the columns of these ``names``."""
    lines = ["imbalance: cost of the slowest rank / the mean; 99%: of all but the 1% worst steps"]
    return [
        *(lines if "99%" in names else []),
        "unlike: how much steps differ in the lengths of their examples, 1 as drawn at random",
        "time: modelled, of a real token; 1 without padding and without waiting for a slower rank",
    ]


def _name(of: dict[str, Any]) -> str:
    if of["steps"] == "by_examples":
        return f"batch_size={of['batch_size']}"
    return f"batch_rows={of['batch_rows']}{', wrapped' * (of['steps'] == 'wrapped')}"


def _figures(
    lengths: Any, patches: Patches | None, packing: PackingOptions, kind: str, **number: Any
) -> dict[str, Any]:
    """Return the figures of the first steps of the epochs that a sampler makes by default."""
    ids = SimpleNamespace(pad_token_id=0, eos_token_id=0)  # "wrapped" needs an end token
    collate = PackedCollator(ids, packing=packing, normalize_loss=False)
    sampler = PackedBatchSampler(lengths, collate, dp_rank=0, patches=patches, **number)
    num_steps, epoch = sampler.count_steps(), 0
    lengths = Atoms.of(*checked_sizes(lengths), packing).tokens
    figures: list[tuple[float, ...]] = []
    drawn: list[tuple[Ints, Ints]] = []
    while len(figures) < _MOST_STEPS:
        for step, part in enumerate(islice(sampler, _MOST_STEPS - len(figures))):
            plan = part.plan
            width = plan.width if kind == "by_examples" else packing.capacity
            sizes = lengths[sampler.examples(epoch, step)[plan.example_indices]]
            drawn.append((sizes, plan.lengths))
            figures.append((*_of_step(plan, width), _token_mean(np.log2(sizes), plan.lengths)))
        epoch += 1
    tokens, cells, slowest, time, ideal, means = np.transpose(figures)
    sizes, placed = (np.concatenate(of) for of in zip(*drawn, strict=True))
    return {
        "steps": kind,
        **number,
        "num_steps": num_steps,
        "padding": 1 - float(tokens.sum() / cells.sum()),
        "imbalance": float(slowest.mean()),
        "imbalance_99": float(np.quantile(slowest, 0.99)),
        "unlikeness": _unlikeness(means, sizes, placed, lengths),
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


def _token_mean(values: npt.NDArray[np.float64], lengths: Ints) -> float:
    return float(np.average(values, weights=lengths)) if len(lengths) else 0.0


def _unlikeness(
    means: npt.NDArray[np.float64], sizes: Ints, tokens: Ints, lengths: Ints
) -> float | None:
    """Return the variance of the steps' ``means`` over that of as many examples drawn at random.

    ``sizes`` and ``tokens`` int64 [S], those of the example and those placed, of every piece.
    """
    logs, per_step = np.log2(sizes), tokens.sum() / len(means)
    spread = _token_mean(sizes * (logs - _token_mean(logs, tokens)) ** 2, tokens)
    chance = spread / max(1, per_step) * (1 - per_step / lengths.sum())  # none is drawn twice
    return float(means.var() / chance) if chance > 1e-9 else None
