"""``packing_report`` with context ranks: pads and attention of every rank, against plain loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.reporting.report_oracle import rounded_up
from tests.strategies import FUZZ
from torch_collate_kit import PackedCollator, PackingOptions, ParallelLayout, packing_report

LAYOUTS = ("zigzag", "contiguous", "head_tail")


def work_of_ranks(batch: Any, row: int, size: int, layout: str) -> list[int]:
    """How many cells the cells of each rank attend to, one by one."""
    sums = []
    for rank in range(size):
        columns = oracle.context_cells(batch, rank, size, layout)[row]
        firsts = [max(b for b in batch["cu_seq_lens"][row].tolist() if b <= c) for c in columns]
        sums.append(sum(c - first + 1 for c, first in zip(columns, firsts, strict=True)))
    return sums


def plain_figures(examples: Any, packing: PackingOptions, batch_size: int) -> dict[str, Any]:
    """The figures of the batches that a collator makes."""
    size, align = packing.parallel.cp, packing.parallel.align
    tokens = pads = least = 0
    work: dict[str, list[list[int]]] = {layout: [] for layout in LAYOUTS}
    for start in range(0, len(examples), batch_size):
        batch = PackedCollator(0, packing=packing)(examples[start : start + batch_size])
        for row, lengths in enumerate(batch["sub_seq_lengths"].tolist()):
            for length in lengths:
                tokens += length
                pads += rounded_up(length, align) - length
                least += rounded_up(length, 2 * size) - length
            for layout, of in work.items():
                of.append(work_of_ranks(batch, row, size, layout))
    layouts = [
        {
            "layout": layout,
            "work": sum(map(max, rows)) * size / sum(map(sum, rows)),
            "worst_row": max(max(row) * size / sum(row) for row in rows),
        }
        for layout, rows in work.items()
    ]
    return {
        "cp_size": size,
        "pads": pads / tokens,
        "least_pads": least / tokens,
        "layouts": layouts,
    }


def as_example(lengths: list[int]) -> dict[str, Any]:
    """One of a segment, or of several."""
    ids = [[7] * n for n in lengths]
    return {"input_ids": ids} if len(ids) > 1 else {"input_ids": ids[0]}


@FUZZ
@given(
    num_segments=st.sampled_from((1, 1, 2)),
    data=st.data(),
    size=st.sampled_from((2, 3, 4)),
    tp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 2)),
    overflow=st.sampled_from(("drop", "split")),
    batch_size=st.sampled_from((None, 1, 3)),
    strategy=st.sampled_from(("best_fit_decreasing", "balanced", "sequential")),
)
def test_figures_are_those_of_plain_loops(
    num_segments: int,
    data: st.DataObject,
    size: int,
    tp: int,
    dp: int,
    overflow: str,
    batch_size: int | None,
    strategy: str,
) -> None:
    segments = st.lists(st.integers(1, 40), min_size=num_segments, max_size=num_segments)
    lengths = data.draw(st.lists(segments, min_size=1, max_size=8))
    layout = ParallelLayout(dp=dp, tp=tp, cp=size)
    options: dict[str, Any] = {"overflow": "drop" if num_segments > 1 else overflow}
    width = 2 * rounded_up(40, layout.align) if num_segments > 1 else 48
    examples = [as_example(of) for of in lengths]
    report = packing_report(
        examples, width, strategies=strategy, parallel=layout, batch_size=batch_size,
        show=False, **options
    )  # fmt: skip
    packing = PackingOptions(width, strategy=strategy, parallel=layout, **options)
    assert report["context"] == plain_figures(examples, packing, batch_size or len(examples))
    zigzag, *_ = report["context"]["layouts"]
    assert (zigzag["work"], zigzag["worst_row"]) == (1, 1)
    json.dumps(report)


def test_the_table_by_hand() -> None:
    """Segments of 12 and 4 cells, and of 4 and a tail of 12: keys of the 2 ranks of each row.

    contiguous: 36 and 42 + 10, 10 + 10 and 68; head_tail: 10 + 10 and 68, 10 + 42 and 10 + 26.
    """
    report = packing_report(
        [12, 4, 3], 16, strategies="best_fit_decreasing", parallel=ParallelLayout(cp=2), show=False
    )
    lines = repr(report).splitlines()
    start = lines.index("2 context ranks, max_tokens=16   work  worst row")
    assert lines[start + 1 :] == [
        "zigzag                          1.000      1.000",
        "contiguous                      1.364      1.545",
        "head_tail                       1.364      1.545",
        "work: attention of the busiest rank / the mean; in every row the others wait for it",
        "  (contiguous: where ranks exchange keys; Ulysses exchanges heads, and is even)",
        "pads of alignment to 4: 5.26% of the tokens, the least for 2 context ranks",
    ]
    html = report._repr_html_()
    assert html is not None
    assert all(text in html for text in ("2 context ranks, max_tokens=16", "1.545", "5.26%"))


def test_a_larger_alignment_is_compared_with_the_least() -> None:
    report = packing_report([12, 4, 3], 16, parallel=ParallelLayout(tp=2, cp=2), show=False)
    assert repr(report).splitlines()[-1] == (
        "pads of alignment to 8: 68.42% of the tokens; 5.26% to 4, the least for 2 context ranks"
    )


def test_there_is_no_table_without_context_ranks_or_rows() -> None:
    two = ParallelLayout(cp=2)
    for report in (packing_report([5, 3], 8, show=False),
                   packing_report([99], 8, parallel=two, show=False)):  # fmt: skip
        assert report["context"] == {}
        assert "context ranks" not in repr(report)


def test_pads_of_the_real_mix(shared_data: Path) -> None:
    lengths = np.load(shared_data / "lengths" / "mix_all.qwen.npy")
    report = packing_report(lengths, 16384, parallel=ParallelLayout(cp=8), show=False)
    least = (-lengths % 16).sum() / lengths.sum()
    assert report["context"]["pads"] == report["context"]["least_pads"] == least
    assert repr(report).splitlines()[-1].startswith("pads of alignment to 16: 1.98% of the tokens")
    zigzag, *others = report["context"]["layouts"]
    assert zigzag["work"] == zigzag["worst_row"] == 1
    assert all(1.1 < of["work"] < of["worst_row"] for of in others)
