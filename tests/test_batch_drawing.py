"""repr, _repr_html_ and plot of a batch: what is stored, and every cell for what it is."""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_samples import APART, KINDS, examples, loose, masked_examples
from tests.rollout_strategies import draw_batch
from tests.strategies import FUZZ
from tests.vision import test_dummy_images as dummies
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import stage_mini_batches


def rows_of(batch: Batch) -> list[str]:
    """The drawn rows of its repr."""
    return re.findall(r"\|(.*)\|", repr(batch))


def title(batch: Batch) -> str:
    """The repr in one line, of which the title is the beginning."""
    return " ".join(repr(batch).split())


def drawn_by_loops(batch: Batch, *, image: int | None = None) -> list[str]:
    """The same from the dense fields, for rows that are not wider than the page."""
    rows, before = [], 0
    width = batch["input_ids"].shape[1]
    for row in range(len(batch)):
        count = len(batch.row_metadata["example_indices"][row])
        edges = batch["cu_seq_lens"][row].tolist() if "cu_seq_lens" in batch else [0, width]
        weights = [0.0] * width
        found = batch["loss_mask"][row].tolist()
        weights[width - len(found) :] = found
        text = ""
        for cell in range(width):
            segment = sum(edge <= cell for edge in edges) - 1
            inside = range(edges[segment], edges[segment + 1])
            is_token = bool(batch["attention_mask"][row, cell])
            in_use = any(batch["attention_mask"][row, other] for other in inside)
            if not is_token:
                text += "-" if in_use and "cu_seq_lens" in batch else "."
            elif segment >= count:
                text += "+"
            elif batch["input_ids"][row, cell] == image:
                text += "#"
            else:
                letter = chr(ord("a") + (before + segment) % 26)
                text += letter.upper() if weights[cell] else letter
        rows.append(text)
        before += count
    return rows


def test_a_packed_batch() -> None:
    assert repr(
        PackedCollator(9, max_tokens=8, strategy="best_fit_decreasing")(masked_examples())
    ) == (
        "Batch of 3 packed rows, 8 wide: 5 examples, 21 tokens (88% of the cells), 12\n"
        "    trained\n"
        "  row 0 |aAAaAAa.|\n"
        "  row 1 |bBbBBcCC|\n"
        "  row 2 |ddDDeE..|\n"
        "  letters: examples, upper case where trained; . padding\n"
        "  stored: input_ids int32 [21], loss_weights float32 [21] (264 bytes)\n"
        "  made when read: position_ids, attention_mask, labels, loss_mask,\n"
        "    sub_seq_lengths, cu_seq_lens"
    )


def test_a_batch_built_from_tensors() -> None:
    assert repr(loose()) == (
        "Batch of 4 rows, built from tensors\n"
        "  fields: ids int64 [4, 2], rewards float32 [4], half bfloat16 [4, 1], kept bool\n"
        "    [4], words Ragged(4 rows, 6 values, int64)"
    )


@pytest.mark.parametrize("kind", list(APART))
def test_rows_are_drawn(kind: str) -> None:
    batch = KINDS[kind]()
    image = 7 if "images" in kind and kind != "rollouts" else None
    expected = drawn_by_loops(batch, image=image)
    assert rows_of(batch) == expected
    built = Batch(dict(batch), row_metadata=batch.row_metadata)
    assert rows_of(built) == drawn_by_loops(batch), "images are not known there"
    tail = batch[1:]
    assert rows_of(tail) == drawn_by_loops(tail, image=image)
    assert rows_of(batch.pad_rows(multiple_of=7))[len(batch) :] != []


def test_added_rows_and_dummy_images_are_told_from_examples() -> None:
    batch = KINDS["aligned"]().pad_rows(multiple_of=3)
    assert rows_of(batch)[2] == "+++++---+++++++-"
    assert "+ filler, of no example" in repr(batch)
    assert "5 examples, 21 tokens (44% of the cells)" in repr(batch)
    pads = PackedCollator(0, max_tokens=4, parallel=ParallelLayout(dp=3))([{"input_ids": [1, 2]}])
    assert rows_of(pads) == ["aA", "..", ".."]
    assert rows_of(dummies.collate(dummies.examples())) == [
        "a####aaaaAaAbbbbbBbB.",
        "ccccccccCcCddddddDdD+",
    ]
    staged = stage_mini_batches(KINDS["rollouts"](), [0, 1, 4], 2, balance="tokens")
    drawn = [rows_of(rank) for rank in staged[1]]
    assert sum("+" in row for rows in drawn for row in rows) == 1
    assert sorted(map(len, drawn)) == [2, 2]


def test_a_split_example_is_counted_once() -> None:
    batch = PackedCollator(0, max_tokens=4, overflow="split")([{"input_ids": [1] * 6}])
    assert repr(batch).startswith("Batch of 2 packed rows, 4 wide: 1 example in 2 pieces, 6 tokens")
    assert rows_of(batch) == ["aAAA", "bB.."]


def test_a_wide_row_has_a_letter_for_many_cells() -> None:
    lengths = (100, 40, 50)
    examples = [{"input_ids": [1] * n, "loss_mask": [0] * 20 + [1] * (n - 20)} for n in lengths]
    collate = PackedCollator(0, max_tokens=256, strategy="sequential", fixed_width=True)
    assert rows_of(collate(examples)) == [
        "aaaaaAAAAAAAAAAAAAAAAAAAAbbbbbBBBBBcccccCCCCCCC" + "." * 17
    ]
    assert "1 letter = 4 cells" in repr(collate(examples))
    assert max(map(len, repr(collate(examples)).splitlines())) <= 80


def test_only_the_first_rows_are_drawn() -> None:
    batch = PaddedCollator(0)([{"input_ids": [1] * (1 + i % 3)} for i in range(1200)])
    assert rows_of(batch) == ["..a", ".bB", "cCC", "..d", ".eE", "fFF", "..g", ".hH"]
    assert "\n  ... 1,192 more rows\n" in repr(batch)
    assert "... 1,192 more rows" in batch._repr_html_()
    assert "\n  ... 1 more row\n" in repr(batch[:9])
    assert "... 1 more row<" in batch[:9]._repr_html_()


def test_on_a_device_nothing_is_read() -> None:
    batch = KINDS["packed"]()
    moved = batch.to("meta")
    assert rows_of(moved) == [row.lower() for row in rows_of(batch)]
    assert title(moved).startswith(
        "Batch of 3 packed rows, 8 wide, on meta: 5 examples, 21 tokens (88% of the cells) row 0"
    )
    assert 'letters: examples; . padding; batch.to("cpu") shows what is trained' in repr(moved)
    assert "not trained" not in moved._repr_html_()
    assert "on meta, built from tensors" in repr(loose().to("meta"))


DENSE: dict[str, dict[str, Any]] = {
    "ids of one dimension": {"input_ids": torch.arange(3)},
    "no width": {"input_ids": torch.zeros(3, 0, dtype=torch.int64)},
    "a mask of another shape": {"input_ids": torch.ones(3, 4), "attention_mask": torch.ones(3, 9)},
    "a loss mask of rows": {"input_ids": torch.ones(3, 4), "loss_mask": torch.ones(3)},
    "a wide loss mask": {"input_ids": torch.ones(3, 4), "loss_mask": torch.ones(3, 9)},
    "a mask that needs a gradient": {
        "input_ids": torch.ones(3, 4),
        "loss_mask": torch.ones(3, 3, requires_grad=True),
    },
    "ragged ids": {"input_ids": Ragged.from_rows([[1], [2, 3], []])},
    "arrays": {"input_ids": torch.ones(3, 4), "words": Ragged(np.arange(3), np.arange(4))},
    "ragged labels": {"input_ids": torch.ones(3, 4), "labels": Ragged.from_rows([[1], [], []])},
}


@pytest.mark.parametrize("name", list(DENSE))
def test_any_fields_have_a_repr(name: str) -> None:
    batch = Batch(DENSE[name])
    assert repr(batch).startswith("Batch of 3 rows, built from tensors")
    check_html(batch)
    packed = {**DENSE[name], "cu_seq_lens": Ragged.from_rows([[0, 2, 4], [], [9, 1]])}
    assert repr(Batch(packed, row_metadata={"max_segment_length": [2, 2, 2]}))


def check_html(batch: Batch) -> None:
    tags = [*ElementTree.fromstring(batch._repr_html_()).iter()]  # which are closed in order
    assert {tag.tag for tag in tags} <= {"div", "b", "code", "span", "details", "summary"}
    found = (re.match(r"width:([\d.e-]+)%;", tag.get("style", "")) for tag in tags)
    widths = [float(width[1]) for width in found if width]
    num_rows = min(8, len(batch)) if widths else 0
    assert sum(width for width in widths if width != 100) <= 100.1 * num_rows


@FUZZ
@given(st.data())
def test_every_batch_has_a_repr(data: st.DataObject) -> None:
    batch = draw_batch(data, "padded", "packed", "rollouts", "packed rollouts")
    batch = batch.pad_rows(multiple_of=data.draw(st.integers(1, 3)))
    batch = batch[data.draw(st.integers(0, len(batch) - 1)) :][:8]
    assert batch._made == {}
    found = rows_of(batch)
    check_html(batch)
    assert batch._made == {}
    assert max(map(len, repr(batch).splitlines())) <= 80
    assert len(found) == len(batch)
    if batch["input_ids"].shape[1] <= 70:
        assert found == drawn_by_loops(batch)


matplotlib.use("Agg")


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


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: Batch({"x": torch.zeros(2)}).plot(), r"no input_ids \[R, W\] in host memory"),
        (lambda: PaddedCollator(0)(examples())[:0].plot(), r"has 0 rows of .*nothing to draw"),
        (lambda: PaddedCollator(0)(examples()).plot(max_rows=0), "max_rows must be at least 1"),
    ],
)
def test_what_cannot_be_plotted_is_refused(draw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()
