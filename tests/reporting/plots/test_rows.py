"""``plot_rows``: what is painted at every cell, against the dense fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb

from tests.batch_samples import VISION, examples, image_examples, masked_examples, rollouts
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    RolloutCollator,
    plot_rows,
)

ALIGNED = ParallelLayout(tp=4)
BATCHES = {
    "packed": lambda: PackedCollator(0, max_tokens=8)(masked_examples()),
    "aligned": lambda: PackedCollator(0, max_tokens=16, parallel=ALIGNED)(masked_examples()),
    "fixed width": lambda: PackedCollator(0, max_tokens=30, fixed_width=True)(masked_examples()),
    "split": lambda: PackedCollator(0, max_tokens=4, overflow="split")(masked_examples()),
    "left": lambda: PaddedCollator(0)(masked_examples()),
    "right": lambda: PaddedCollator(0, padding_side="right")(masked_examples("labels")),
    "rollouts": lambda: RolloutCollator(0)(rollouts()),
    "packed rollouts": lambda: PackedCollator(0, max_tokens=12)(rollouts()),
    "added rows": lambda: PackedCollator(0, max_tokens=8)(masked_examples()).pad_rows(
        multiple_of=4
    ),
    "images": lambda: PackedCollator(0, max_tokens=16, vision=VISION)(image_examples()),
    "padded images": lambda: PaddedCollator(0, vision=VISION)(image_examples()),
    "dummy images": lambda: PackedCollator(
        0, max_tokens=10, vision=VISION, parallel=ParallelLayout(dp=4)
    )(image_examples()),
    "one row": lambda: PaddedCollator(0)(examples([3])),
}


def painted(ax) -> np.ndarray:
    """What is painted at the middle of every cell, [R, W]: names joined by "+"."""
    width, num_rows = int(ax.get_xlim()[1]), round(ax.get_ylim()[0] + 0.5)
    found = np.full((num_rows, width), "", dtype=object)
    for collection in ax.collections:
        if isinstance(collection, PolyCollection):
            for path in collection.get_paths():
                (left, top), (right, bottom) = path.vertices[0], path.vertices[2]
                assert (top + bottom) / 2 == round(top + 0.4)
                found[round(top + 0.4), round(left) : round(right)] += collection.get_label() + "+"
    return found


def expected(batch: Batch) -> list[list[str]]:
    """From the dense fields, cell by cell."""
    ids, mask, weights = (batch[k] for k in ("input_ids", "attention_mask", "loss_mask"))
    num_rows, width = ids.shape
    rows = []
    for row in range(num_rows):
        row_lengths = batch["sub_seq_lengths"][row].tolist()
        boundaries = batch["cu_seq_lens"][row].tolist() if "cu_seq_lens" in batch else [0, width]
        cells = []
        for cell in range(width):
            column = cell - width + weights.shape[1]
            is_trained = column >= 0 and bool(weights[row, column] != 0)
            segment = sum(cell >= boundary for boundary in boundaries[1:])
            if mask[row, cell] and segment >= len(row_lengths):
                cells.append("filler, of no example+")
            elif mask[row, cell]:
                is_image = VISION.image_token_id == ids[row, cell] and batch.placement.vision
                name = "trained+" if is_trained else "not trained+"
                cells.append(name + ("image+" if is_image else ""))
            elif "cu_seq_lens" in batch and cell < last_segment(batch, row):
                cells.append("alignment gap+")
            else:
                cells.append("padding+")
        rows.append(cells)
    return rows


def last_segment(batch: Batch, row: int) -> int:
    """Where the pads at the end of a packed row begin."""
    boundaries = batch["cu_seq_lens"][row].tolist()
    has_tail = not batch["attention_mask"][row, boundaries[-2]]
    return boundaries[-2] if has_tail else boundaries[-1]


@pytest.mark.parametrize("name", BATCHES)
def test_every_cell_is_painted_once_for_what_it_is(name):
    batch = BATCHES[name]()
    found = painted(plot_rows(batch)).tolist()
    assert found == expected(batch)


def test_the_samples_have_everything():
    kinds = {cell for make in BATCHES.values() for row in expected(make()) for cell in row}
    names = ("trained", "not trained", "padding", "alignment gap", "filler, of no example")
    assert kinds == {*(f"{name}+" for name in names), "not trained+image+"}


def test_borders_and_numbers_by_hand():
    """Rows [7 | 1 pad], [5 + 3], [4 + 2 | 2 pads] of examples 4; 0, 1; 2, 3."""
    ax = plot_rows(PackedCollator(0, max_tokens=8)(examples()))
    (borders,) = (c for c in ax.collections if isinstance(c, LineCollection))
    lines = [(x, round((top + bottom) / 2)) for (x, top), (_, bottom) in borders.get_segments()]
    assert lines == [(0, 0), (7, 0), (0, 1), (5, 1), (0, 2), (4, 2), (6, 2)]
    numbers = {(text.get_text(), *text.get_position()) for text in ax.texts}
    assert numbers == {
        ("4", 3.5, 0),
        ("0", 2.5, 1),
        ("1", 6.5, 1),
        ("2", 2.0, 2),
        ("3", 5.0, 2),
    }
    assert ax.get_title() == "3 rows of 8 cells: 21 tokens, 12.5% padding, 16 trained"
    assert ax.get_xlabel() == "position in the row (cells); numbers are those of the examples"
    assert ax.get_yticks().tolist() == [0, 1, 2]
    assert ax.yaxis_inverted()  # row 0 is at the top
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["dark: trained", "light: not trained", "padding"]


def test_padded_rows_are_numbered_by_row_and_pieces_by_their_example():
    assert [t.get_text() for t in plot_rows(PaddedCollator(0)(examples())).texts] == list("01234")
    split = PackedCollator(0, max_tokens=4, overflow="split")(examples([6, 1]))
    numbers = sorted(text.get_text() for text in plot_rows(split).texts)
    assert numbers == ["0", "0", "1"]


def test_examples_of_unknown_numbers_have_none():
    batch = PackedCollator(0, max_tokens=8)(examples())
    batch.row_metadata["example_indices"] = [[4], [0, 1], [2, 3]]
    assert len(plot_rows(batch).texts) == 0
    del batch.row_metadata["example_indices"]
    assert [text.get_text() for text in plot_rows(batch).texts] == list("01122")


def test_narrow_blocks_have_no_number():
    batch = PackedCollator(0, max_tokens=400)(examples([390, 9, 1]))
    assert [text.get_text() for text in plot_rows(batch).texts] == ["0"]


def test_blocks_narrower_than_a_line_have_none():
    ax = plot_rows(PackedCollator(0, max_tokens=2000)(examples([1970, 4, 26])))
    (borders,) = (c for c in ax.collections if isinstance(c, LineCollection))
    assert [x for ((x, _), _) in borders.get_segments()] == [0, 1970]


def luminance(color) -> float:
    red, green, blue = to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_trained_is_told_from_untrained_in_grey_and_neighbours_by_colour():
    ax = plot_rows(PackedCollator(0, max_tokens=40)(masked_examples()))
    shades = {"trained": [], "not trained": []}
    for collection in ax.collections:
        if collection.get_label() in shades:
            shades[collection.get_label()].append(collection.get_facecolor()[0][:3])
    assert len(shades["trained"]) == len(shades["not trained"]) == 4  # of 5 examples in a row
    dark, light = ([luminance(color) for color in colors] for colors in shades.values())
    assert max(dark) + 0.15 < min(light)
    assert len({tuple(color) for color in shades["trained"]}) == 4


def test_large_batches_are_cut_and_say_so():
    batch = PackedCollator(0, max_tokens=8)(examples([8] * 200))
    ax = plot_rows(batch)
    assert ax.get_title().startswith("first 40 of 200 rows of 8 cells: 320 tokens")
    assert painted(ax).shape == (40, 8)
    all_rows = plot_rows(batch, max_rows=200)
    assert all_rows.get_title().startswith("200 rows of 8 cells: 1,600 tokens")
    assert len(all_rows.texts) == 0
    assert len(all_rows.get_yticks()) == 20
    assert plot_rows(batch[150:], max_rows=1).get_title().startswith("first 1 of 50 rows")


def test_fields_that_were_changed_are_drawn():
    batch = PaddedCollator(0)(examples([3, 2]))
    batch["loss_mask"][:] = 0
    assert plot_rows(batch).get_title().endswith("0 trained")


def test_a_batch_built_by_hand():
    batch = Batch(
        {
            "input_ids": torch.tensor([[1, 2, 0], [3, 4, 5]]),
            "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
            "labels": torch.tensor([[-100, 2, -100], [-100, -100, 5]]),
        }
    )
    dark, light = "trained+", "not trained+"
    assert painted(plot_rows(batch)).tolist() == [[light, dark, "padding+"], [light, light, dark]]
    unknown = plot_rows(Batch({"input_ids": torch.tensor([[1, 2]])}))
    assert unknown.get_title() == "1 row of 2 cells: 2 tokens, 0.0% padding"
    assert [text.get_text() for text in unknown.get_legend().get_texts()] == ["light: tokens"]


@pytest.mark.parametrize(
    ("batch", "options", "error", "message"),
    [
        ({"input_ids": [[5]]}, {}, TypeError, "draws a Batch, got dict; pass what a collator"),
        (Batch({"x": torch.zeros(2)}), {}, ValueError, r"no input_ids \[R, W\] in host memory"),
        (PaddedCollator(0)(examples())[:0], {}, ValueError, "has 0 rows of .*nothing to draw"),
        (PaddedCollator(0)(examples()), {"max_rows": 0}, ValueError, "max_rows must be at least 1"),
    ],
)
def test_bad_arguments(batch, options, error, message):
    with pytest.raises(error, match=message):
        plot_rows(batch, **options)
