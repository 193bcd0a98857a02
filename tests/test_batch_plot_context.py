"""``Batch.plot(cp_size=)``: the rank painted at every cell, against the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests import oracle
from tests.batch_samples import examples
from tests.test_batch_drawing import rows_of
from tests.test_batch_plot import NAMES, check_a_plot, painted, plots
from torch_collate_kit import Batch, PackedCollator, PaddedCollator, ParallelLayout

matplotlib = pytest.importorskip("matplotlib")

__all__ = ["plots"]  # a fixture

LAYOUTS = ("zigzag", "contiguous", "head_tail")
HATCHED = {letter: NAMES[letter] for letter in ".-+"}


def packed(size: int, **options: Any) -> Batch:
    """Rows with gaps, a tail and a row of pads alone."""
    layout = ParallelLayout(dp=4, cp=size)
    return PackedCollator(0, max_tokens=48, parallel=layout, **options)(examples([21, 9, 14]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_cell_has_the_colour_of_its_rank(size: int, layout: Any) -> None:
    batch = packed(size)
    expected = [[""] * batch["input_ids"].shape[1] for _ in range(len(batch))]
    for rank in range(size):
        for row, columns in enumerate(oracle.context_cells(batch, rank, size, layout)):
            for column in columns:
                expected[row][column] = f"rank {rank}+"
    for row, letters in zip(expected, rows_of(batch), strict=True):
        row[:] = [name + HATCHED.get(of, "") for name, of in zip(row, letters, strict=True)]
    assert painted(batch.plot(cp_size=size, layout=layout)) == expected


def test_one_rank_has_all_cells_of_any_number() -> None:
    batch = PackedCollator(0, max_tokens=12)(examples([8, 3]))
    for layout in LAYOUTS:
        ax = batch.plot(cp_size=1, layout=layout)
        assert painted(ax) == [["rank 0+"] * 11]
        assert ax.get_title().endswith("over 1 context rank: attention, busiest / mean 1.000")


def test_padded_rows_are_cut_as_rows() -> None:
    batch = PaddedCollator(0, pad_to_multiple_of=4)(examples([4, 2]))
    pads, own = "padding+", "rank {}+".format
    assert painted(batch.plot(cp_size=2, layout="head_tail")) == [
        [own(0), own(1), own(1), own(0)],
        [own(0) + pads, own(1) + pads, own(1), own(0)],
    ]


def test_borders_numbers_title_and_legend_by_hand() -> None:
    """Segments of 8 and 4 cells, and 4 of pads: 26 + 10 and 42 + 10 keys of each row's halves."""
    collate = PackedCollator(0, max_tokens=12, parallel=ParallelLayout(cp=2), strategy="sequential")
    batch = collate(examples([8, 3]))
    ax = batch.plot(cp_size=2, layout="contiguous")
    assert ax.get_title() == (
        "1 row of 12 cells, contiguous over 2 context ranks: attention, busiest / mean 1.087"
    )
    (borders,) = (c for c in ax.collections if isinstance(c, matplotlib.collections.LineCollection))
    assert [line[0][0] for line in borders.get_segments()] == [0, 8, 11]
    assert {text.get_text(): text.get_position() for text in ax.texts} == {
        "0": (4, 0),
        "1": (9.5, 0),
    }
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["rank 0", "rank 1", "alignment gap"]
    check_a_plot(partial(batch.plot, cp_size=2, layout="contiguous"))
    check_a_plot(partial(packed(8).plot, cp_size=8))
    assert batch.plot(cp_size=2).get_title().endswith("busiest / mean 1.000")


def test_the_first_of_many_rows_and_some_of_many_ranks() -> None:
    layout = ParallelLayout(cp=32)
    batch = PackedCollator(0, max_tokens=64, parallel=layout)(examples([64] * 3))
    ax = batch.plot(max_rows=2, cp_size=32)
    assert ax.get_title().startswith("first 2 of 3 rows of 64 cells, zigzag over 32 context ranks")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [f"rank {rank}" for rank in range(0, 32, 2)]
    colors = {tuple(c.get_facecolor()[0]) for c in ax.collections if c.get_label()[:5] == "rank "}
    assert len(colors) == 32


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (packed(2), {"cp_size": 5}, r"segment 0 has \d+ cells, which zigzag does not divide"),
        (packed(2), {"cp_size": 0}, "cp_size must be at least 1"),
        (packed(2), {"cp_size": 2, "layout": "striped"}, "layout must be .*got 'striped'"),
        (packed(2).context_shard(0, 2), {"cp_size": 2}, "is the shard of context rank 0 of 2"),
        (PaddedCollator(0)(examples([4])), {"cp_size": 2}, "these are padded; use"),
        (Batch({"input_ids": torch.ones(1, 4)}), {"cp_size": 2}, "was built from tensors"),
    ],
)
def test_rows_that_are_not_cut(batch: Batch, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.plot(**options)
