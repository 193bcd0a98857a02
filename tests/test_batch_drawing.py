"""repr and _repr_html_ of a batch: what is stored, and the rows drawn, of any valid batch."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_samples import APART, KINDS, loose, masked_examples
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
