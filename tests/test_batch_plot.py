"""``Batch.plot``: what is painted at every cell, against the dense fields."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_samples import APART, KINDS, examples, masked_examples
from tests.test_batch_drawing import rows_of
from torch_collate_kit import Batch, PackedCollator, PaddedCollator

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

__all__ = ["check_a_plot", "plots"]

BATCHES = APART | {
    "fixed width": lambda: PackedCollator(0, max_tokens=30, fixed_width=True)(masked_examples()),
    "split": lambda: PackedCollator(0, max_tokens=4, overflow="split")(masked_examples()),
    "added": lambda: KINDS["aligned"]().pad_rows(multiple_of=3),
}
NAMES = {".": "padding+", "-": "alignment gap+", "+": "filler, of no example+"}
NAMES |= {"#": "not trained+image+"}


@pytest.fixture(autouse=True)
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Close every figure; no plot is shown, and matplotlib's settings stay as they were."""

    def shown(*_: object, **__: object) -> None:
        raise AssertionError("a plot was shown")

    monkeypatch.setattr(plt, "show", shown)
    before = dict(matplotlib.rcParams)
    yield
    plt.close("all")
    assert dict(matplotlib.rcParams) == before


def check_a_plot(draw: Any) -> None:
    """It explains itself, nothing is drawn over the legend or cut off, and ``ax`` is used."""
    ax = draw()
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    outside = [text.get_window_extent() for text in (ax.xaxis.label, *ax.get_xticklabels())]
    assert not any(legend.overlaps(box) for box in (*outside, ax.get_window_extent()))
    texts = [ax.title, ax.xaxis.label, ax.yaxis.label]
    assert all(text.get_text() for text in texts)
    for box in (legend, *(text.get_window_extent() for text in texts)):
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= ax.figure.bbox.x1
        assert box.y1 <= ax.figure.bbox.y1
    figure, (left, right) = plt.subplots(1, 2)
    before = plt.get_fignums()
    assert draw(ax=right) is right
    assert plt.get_fignums() == before  # no other figure
    assert not left.has_data()
    figure.savefig(io.BytesIO())


def painted(ax: Any) -> list[list[str]]:
    """What is painted at the middle of every cell, [R, W]: names joined by "+"."""
    width, num_rows = int(ax.get_xlim()[1]), round(ax.get_ylim()[0] + 0.5)
    found = np.full((num_rows, width), "", dtype=object)
    for collection in ax.collections:
        if isinstance(collection, matplotlib.collections.PolyCollection):
            for path in collection.get_paths():
                (left, top), (right, bottom) = path.vertices[0], path.vertices[2]
                assert (top + bottom) / 2 == round(top + 0.4)
                found[round(top + 0.4), round(left) : round(right)] += collection.get_label() + "+"
    return found.tolist()


@pytest.mark.parametrize("name", BATCHES)
def test_every_cell_is_painted_once_for_what_it_is(name: str) -> None:
    batch = BATCHES[name]()
    names = [[NAMES.get(cell, "trained+") for cell in row] for row in rows_of(batch)]
    for row, found in zip(rows_of(batch), names, strict=True):
        found[:] = ["not trained+" if c.islower() else f for c, f in zip(row, found, strict=True)]
    assert painted(batch.plot()) == names


def test_borders_numbers_and_legend_by_hand() -> None:
    """Rows [7 | 1 pad], [5 + 3], [4 + 2 | 2 pads] of examples 4; 0, 1; 2, 3."""
    check_a_plot(PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing")(examples()).plot)
    ax = PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing")(examples()).plot()
    kind = matplotlib.collections.LineCollection
    (borders,) = (c for c in ax.collections if isinstance(c, kind))
    lines = [(x, round((top + bottom) / 2)) for (x, top), (_, bottom) in borders.get_segments()]
    assert lines == [(0, 0), (7, 0), (0, 1), (5, 1), (0, 2), (4, 2), (6, 2)]
    places = {text.get_text(): text.get_position() for text in ax.texts}
    assert places == {"4": (3.5, 0), "0": (2.5, 1), "1": (6.5, 1), "2": (2, 2), "3": (5, 2)}
    assert ax.get_title() == "3 rows of 8 cells: 21 tokens, 12.5% padding, 16 trained"
    assert ax.yaxis_inverted()  # row 0 is at the top
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["dark: trained", "light: not trained", "padding"]


def test_of_many_rows_the_first_are_drawn() -> None:
    batch = PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing")(examples([8] * 200))
    ax = batch.plot()
    assert ax.get_title().startswith("first 40 of 200 rows of 8 cells: 320 tokens")
    assert len(painted(ax)) == 40
    all_rows = batch.plot(max_rows=200)
    assert all_rows.get_title().startswith("200 rows of 8 cells: 1,600 tokens")
    assert (len(all_rows.texts), len(all_rows.get_yticks())) == (0, 20)


def test_fields_that_were_changed_or_given_are_drawn() -> None:
    batch = PaddedCollator(0)(examples([3, 2]))
    batch["loss_mask"][:] = 0
    assert batch.plot().get_title().endswith("0 trained")
    ids, mask = torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    labels = torch.tensor([[-100, 2, -100], [-100, -100, 5]])
    batch = Batch({"input_ids": ids, "attention_mask": mask, "labels": labels})
    dark, light = "trained+", "not trained+"
    assert painted(batch.plot()) == [[light, dark, "padding+"], [light, light, dark]]
    unknown = Batch({"input_ids": torch.tensor([[1, 2]])}).plot()
    assert unknown.get_title() == "1 row of 2 cells: 2 tokens, 0.0% padding"
    assert [text.get_text() for text in unknown.get_legend().get_texts()] == ["light: tokens"]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"no input_ids \[R, W\] in host memory"):
        Batch({"x": torch.zeros(2)}).plot()
    with pytest.raises(ValueError, match=r"has 0 rows of .*nothing to draw"):
        PaddedCollator(0)(examples())[:0].plot()
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        PaddedCollator(0)(examples()).plot(max_rows=0)
