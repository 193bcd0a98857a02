"""``packing_report``: every figure against plain loops, what is printed, what is refused."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit import (
    DataError,
    ModelCost,
    PackingOptions,
    ParallelLayout,
    pack,
    packing_report,
)
from torch_collate_kit.reporting import PackingReport

COST = ModelCost(language_linear=7, language_quadratic=2)


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def cost_of(cells: int) -> int:
    return 7 * cells + 2 * cells * cells


def figures(
    rows: int, cells: int, tokens: list[list[int]], costs: list[list[int]]
) -> dict[str, Any]:
    """``tokens`` and ``costs``: a list of the ranks for every step."""
    num_tokens = sum(map(sum, tokens))
    found = {
        "num_rows": rows,
        "num_cells": cells,
        "num_tokens": num_tokens,
        "padding": 1 - num_tokens / cells,
        "efficiency": num_tokens / cells,
    }
    for name, steps in (("tokens", tokens), ("cost", costs)):
        slowest, mean = sum(map(max, steps)), sum(map(sum, steps)) / len(steps[0])
        found[f"{name}_per_rank"] = [sum(ranks) for ranks in zip(*steps, strict=True)]
        found[f"{name}_max_over_mean"] = slowest / mean if mean else 1.0
    return found


def packed_figures(
    lengths: list[int], max_tokens: int, layout: ParallelLayout, batch_size: int | None, **of: Any
) -> dict[str, Any]:
    """A step is a batch, or of data packed at once one row of every rank."""
    num_rows = cells = 0
    tokens: list[list[int]] = []
    costs: list[list[int]] = []
    size = batch_size or len(lengths)
    for start in range(0, len(lengths), size):
        packing = PackingOptions(max_tokens, parallel=layout, cost=COST, **of)
        plan = pack(lengths[start : start + size], packing=packing)
        pieces, edges = plan.lengths.tolist(), plan.row_offsets
        rows = [pieces[a:b] for a, b in pairwise(edges)]
        aligned = [[rounded_up(n, layout.align) for n in row] for row in rows]
        num_rows += len(rows)
        cells += len(rows) * max(layout.align, *map(sum, aligned))
        per_rank = len(rows) // layout.dp
        ranks = [range(r * per_rank, (r + 1) * per_rank) for r in range(layout.dp)]
        for step in [ranks] if batch_size else [[[r[i]] for r in ranks] for i in range(per_rank)]:
            tokens.append([sum(sum(rows[i]) for i in mine) for mine in step])
            costs.append([sum(cost_of(n) for i in mine for n in aligned[i]) for mine in step])
    return figures(num_rows, cells, tokens, costs)


def padded_figures(kept: list[int], layout: ParallelLayout, batch_size: int) -> dict[str, Any]:
    """``kept``: the lengths that fit, or what is left of them, in their order."""
    batches = [kept[start : start + batch_size] for start in range(0, len(kept), batch_size)]
    widths = [rounded_up(max(batch), layout.align) for batch in batches]
    tokens = [sum(batch) for batch in batches] + [0] * (-len(batches) % layout.dp)
    pairs = zip(batches, widths, strict=True)
    costs = [len(batch) * cost_of(width) for batch, width in pairs] + [0] * layout.dp
    cells = sum(len(batch) * width for batch, width in zip(batches, widths, strict=True))
    steps = range(0, len(tokens), layout.dp)
    of_ranks = ([per_batch[i : i + layout.dp] for i in steps] for per_batch in (tokens, costs))
    return figures(len(kept), cells, *of_ranks)


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


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    max_tokens=st.integers(8, 48),
    dp=st.integers(1, 4),
    tp=st.sampled_from([1, 4]),
    overflow=st.sampled_from(["drop", "truncate", "split"]),
    batch_size=st.none() | st.integers(1, 12),
    padded_batch_size=st.integers(1, 6),
    strategy=st.sampled_from(
        ["best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential"]
    ),
)
def test_figures_are_those_of_plain_loops(
    lengths, max_tokens, dp, tp, overflow, batch_size, padded_batch_size, strategy
):
    layout = ParallelLayout(dp=dp, tp=tp)
    kept, lost = what_is_left(lengths, max_tokens // tp * tp, overflow)
    report = packing_report(
        lengths,
        max_tokens,
        strategies=[strategy],
        parallel=layout,
        overflow=overflow,
        cost=COST,
        batch_size=batch_size,
        padded_batch_size=padded_batch_size,
        show=False,
    )
    padded, packed = report["candidates"]
    assert padded["strategy"] == "padded"
    assert packed["strategy"] == strategy
    assert {key: padded[key] for key in lost} == {key: packed[key] for key in lost} == lost
    if kept:
        check(padded, padded_figures(kept, layout, padded_batch_size))
    options = {"strategy": strategy, "overflow": overflow}
    check(packed, packed_figures(lengths, max_tokens, layout, batch_size, **options))


def check(candidate, expected):
    for name, figure in expected.items():
        assert candidate[name] == pytest.approx(figure), name


def test_a_report_by_hand():
    """Padded in twos: widths 5 and 9. Packed to 10: [9] and [5, 3, 2]; in order [5, 3], [9], [2]"""
    lengths = np.array([5, 3, 9, 2])
    report = packing_report(lengths, 10, padded_batch_size=2, show=False)
    assert lengths.tolist() == [5, 3, 9, 2], "nothing is changed"
    keys = ("strategy", "num_rows", "num_cells", "padding", "num_dropped")
    assert [tuple(c[key] for key in keys) for c in report["candidates"]] == [
        ("padded", 4, 28, pytest.approx(9 / 28), 0),
        ("best_fit_decreasing", 2, 20, pytest.approx(1 / 20), 0),
        ("balanced", 2, 20, pytest.approx(1 / 20), 0),
        ("sequential", 3, 27, pytest.approx(8 / 27), 0),
    ]
    assert report["data"] == {
        "num_examples": 4,
        "num_tokens": 19,
        "mean": 4.75,
        "median": 4.0,
        "longest": 9,
        "histogram": {
            "edges": [*range(2, 11)],
            "examples": [1, 1, 0, 1, 0, 0, 0, 1],
            "tokens": [2, 3, 0, 5, 0, 0, 0, 9],
        },
    }


def test_what_is_printed(capsys):
    lengths = [5, 3, 9, 2, 30]
    report = packing_report(lengths, [10, 32], strategies=["best_fit_decreasing"])
    lines = capsys.readouterr().out.splitlines()
    times = [c["plan_seconds"] for c in report["candidates"]]
    assert times[0] == times[2] == 0 < min(times[1], times[3])
    ms = [f"{1000 * seconds:.1f} ms" for seconds in times]
    ms = [text.rjust(max(map(len, ms[1::2]))) for text in ms]
    plan = "plan".rjust(2 + len(ms[0]))
    assert lines == [
        "5 examples, 49 tokens; median 5, longest 30",
        "packed all examples together; padded in batches of 8",
        "dropped or cut: examples that do not fit; lost: their share of the tokens",
        "",
        "max_tokens  layout               padding  efficiency  rows  dropped    lost" + plan,
        "        10  padded                 47.2%       52.8%     4        1  61.22%",
        f"        10  best_fit_decreasing     5.0%       95.0%     2        1  61.22%  {ms[1]}",
        "",
        "        32  padded                 67.3%       32.7%     5        0   0.00%",
        f"        32  best_fit_decreasing    23.4%       76.6%     2        0   0.00%  {ms[3]}",
        "",
        "padding 67.3% -> 23.4% at max_tokens=32",
        "recommended: max_tokens=32, best_fit_decreasing",
        "  the least padding of those that drop and cut nothing",
        "  segments per row: 2.5, at most 3; max_sequences_per_row=4 promises one shape",
    ]
    html = report._repr_html_()
    assert html.count("<tr>") == 4
    bold = html.split('<tr style="font-weight:bold">')[1].split("</tr>")[0]
    assert ">32</td>" in bold
    assert ">best_fit_decreasing</td>" in bold
    assert "padding 67.3% -&gt; 23.4% at max_tokens=32" in html


def test_lines_fit_100_characters():
    lengths = np.random.default_rng(0).integers(1, 200_000, 3_000)
    report = packing_report(
        lengths, 131_072, parallel=ParallelLayout(dp=8, tp=16), batch_size=500, show=False
    )
    lines = repr(report).splitlines()
    assert max(map(len, lines)) > 95  # the table is as wide as it gets
    assert all(len(line) <= 100 for line in lines)
    assert "8 ranks; rank tokens and cost: the slowest rank of a step / the mean" in lines
    assert "examples aligned to 16 tokens" in lines


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "recurrent_gemma"}, "recurrent_gemma"),
        ({"model_type": "lfm2", "conv_bias": True}, "lfm2"),
        ({"model_type": "lfm2", "conv_bias": False}, ""),
    ],
)
def test_a_model_that_is_wrong_padded_on_the_left_is_noted(config, family):
    of_model = SimpleNamespace(**config)
    for model in (of_model, SimpleNamespace(config=of_model)):
        report = packing_report([5, 3, 9, 2], 10, model=model, show=False)
        assert (f"on the left are wrong in {family} models; use padding_side" in str(report)) == (
            family != ""
        )
        assert max(map(len, str(report).splitlines())) <= 100


def test_a_report_is_json_and_can_be_pickled():
    lengths = torch.tensor([5, 3, 9, 2])
    report = packing_report(lengths, (np.int64(10), 20), batch_size=2, show=False)
    assert PackingReport(json.loads(json.dumps(report))) == report
    again = pickle.loads(pickle.dumps(report))
    assert isinstance(again, PackingReport)
    assert repr(again) == repr(report)


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, 8), ({"batch_size": 12}, 12), ({"batch_size": 12, "parallel": ParallelLayout(dp=4)}, 3),
     ({"batch_size": 2, "parallel": ParallelLayout(dp=4)}, 1),
     ({"batch_size": 12, "padded_batch_size": 5}, 5)],
)  # fmt: skip
def test_padded_batch_size_follows_from_the_batch_size(options, size):
    report = packing_report([5] * 20, 10, show=False, **options)
    assert report["options"]["padded_batch_size"] == size


def test_images_are_packed_by_patches_too():
    patches = [[16], [4, 4], [], []]
    options = {"patches": patches, "strategies": ["best_fit_decreasing"], "show": False}
    alone = packing_report([5, 2, 6, 3], 16, **options)["candidates"][1]
    limited = packing_report([5, 2, 6, 3], 16, max_patches=16, **options)["candidates"][1]
    assert (alone["num_rows"], limited["num_rows"]) == (1, 2)
    language = ModelCost().language(np.array([5, 2, 6, 3])).sum()
    vision = ModelCost().vision(np.array([16, 4, 4])).sum()
    assert sum(limited["cost_per_rank"]) == language + vision
    padded = packing_report([5, 2, 6, 3], 16, **options)["candidates"][0]
    assert sum(padded["cost_per_rank"]) == ModelCost().language(np.array([6] * 4)).sum() + vision


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([],), {}, DataError, r"no examples \(0 lengths\).*pass at least 1"),
        (([5, 9], 8), {"overflow": "raise"}, DataError, "example 1 has 9 tokens"),
        ((7, 8), {}, TypeError, "data is an int; pass lengths, or a list of examples"),
        (([5], []), {}, ValueError, "max_tokens is empty; give at least one"),
        (([5], "8"), {}, TypeError, "max_tokens must be an int, got '8' of type str"),
        (([5], {8, 9}), {}, TypeError, r"max_tokens must be an int, got \{8, 9\} of type set"),
        (([5], 0), {}, ValueError, "max_tokens must be at least 1, got 0"),
        (([5], 8), {"strategies": []}, ValueError, "strategies is empty; give at least one"),
        (([5], 8), {"strategies": ["best"]}, ValueError, "strategy must be one of 'best_fit_d"),
        (([5], 8), {"overflow": "cut"}, ValueError, "overflow must be one of 'raise', 'trunc"),
        (([5], 8), {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0; None"),
        (([5], 8), {"padded_batch_size": 0}, ValueError, "padded_batch_size must be at least 1"),
        (([5], 8), {"show": 1}, TypeError, "show must be True or False, got 1"),
        (([5], 8), {"patches": [1, 2]}, ValueError, "patches has 2 entries, but there are 1"),
        (([5], 8), {"parallel": 2}, TypeError, "parallel must be a ParallelLayout, got 2"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        packing_report(*arguments, **options)
