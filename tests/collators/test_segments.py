"""Examples of several segments: both collators against the oracle, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.batch_checks import (
    assert_equals_oracle,
    assert_round_trips,
    assert_same_batch,
    frozen,
    same_value,
)
from tests.building import packed_collator
from tests.oracle import packed_segments, padded_segments
from tests.strategies import FUZZ, MANY, DrawnBatch, batches, packed_options
from torch_collate_kit import (
    DataError,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerToken,
    unpack,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Nested, Ragged

_NOT_OF_SEGMENTS = ("weight", "text")


def grouped(drawn: DrawnBatch, counts: list[int]) -> tuple[list[list[dict[str, Any]]], Any]:
    """The drawn examples as segments of fewer: plain ones, and as they are given."""
    offsets = np.cumsum([0, *counts])
    spans = [slice(start, stop) for start, stop in itertools.pairwise(offsets)]
    plain = [drawn.plain[span] for span in spans]
    for example in plain:
        for segment in example:  # one weight for all segments of an example
            if "weight" in segment:
                segment["weight"] = example[0]["weight"]
    if isinstance(drawn.given, list):
        examples = []
        for span in spans:
            parts = drawn.given[span]
            example = {key: [part[key] for part in parts] for key in parts[0]}
            examples.append({k: v[0] if k in _NOT_OF_SEGMENTS else v for k, v in example.items()})
        return plain, examples
    columns: dict[str, Any] = {}
    for key, column in drawn.given.items():
        if key == "weight":
            columns[key] = [example[0]["weight"] for example in plain]
        elif key == "num_actions":
            columns[key] = [[int(part["num_actions"]) for part in of] for of in plain]
        else:
            columns[key] = Nested(column, offsets)
    return plain, columns


@st.composite
def segmented(draw: st.DrawFn) -> tuple[list[list[dict[str, Any]]], Any]:
    drawn = draw(batches())
    counts, left = [], len(drawn.plain)
    while left:
        counts.append(draw(st.integers(1, min(3, left))))
        left -= counts[-1]
    assume(isinstance(drawn.given, list) is False or len({*map(frozenset, drawn.given)}) == 1)
    return grouped(drawn, counts)


def lengths_of(examples: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [[len(segment["input_ids"]) for segment in example] for example in examples]


@MANY
@given(data=st.data())
def test_packed_rows_equal_the_oracle(data: st.DataObject) -> None:
    plain, nested = data.draw(segmented())
    sizes = lengths_of(plain)
    options = data.draw(packed_options([*map(sum, sizes)]))
    if options.collator["overflow"] in ("truncate", "split"):
        options.collator["overflow"] = "drop"
    collator = packed_collator(0, parallel=ParallelLayout(**options.layout), **options.collator)
    plan_of = collator.plan
    before = frozen(nested)
    fits = [_cells(of, options.align) <= collator.packing.capacity for of in sizes]
    most = options.collator["max_sequences_per_row"]
    fits = [fit and (most is None or len(of) <= most) for fit, of in zip(fits, sizes, strict=True)]
    if options.collator["overflow"] == "raise" and not all(fits):
        with pytest.raises(DataError, match=rf"^example {fits.index(False)} has \d+ segment"):
            collator(nested)
        return

    batch = collator(nested)

    assert same_value(nested, before), "an argument was changed"
    assert batch.metadata["dropped"] == tuple(i for i, fit in enumerate(fits) if not fit)
    expected = packed_segments(
        plain,
        plan_of(sizes),
        pad_token_id=0,
        max_tokens=options.collator["max_tokens"],
        align=options.align,
        row_align=options.row_align,
        fixed_width=options.collator["fixed_width"],
        normalize_loss=options.collator["normalize_loss"],
    )
    assert_equals_oracle(batch, expected)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))
    for lengths in batch["sub_seq_lengths"].tolist():
        assert _cells(lengths, options.align) <= options.collator["max_tokens"]
        assert most is None or len(lengths) <= most


def _cells(lengths: list[int], align: int) -> int:
    return sum(-(-length // align) * align for length in lengths)


@FUZZ
@given(st.data())
def test_padded_rows_equal_the_oracle(data: st.DataObject) -> None:
    plain, nested = data.draw(segmented())
    sizes = [*map(sum, lengths_of(plain))]
    options = {
        "padding_side": data.draw(st.sampled_from(("left", "right"))),
        "pad_to_multiple_of": data.draw(st.sampled_from((None, 8))),
        "normalize_loss": data.draw(st.booleans()),
    }
    max_length = data.draw(st.sampled_from((None, min(sizes), max(sizes))))
    overflow = "raise" if max_length is None else "drop"
    batch = PaddedCollator(0, max_length=max_length, overflow=overflow, **options)(nested)
    expected = padded_segments(
        plain, pad_token_id=0, max_length=max_length, overflow=overflow, **options
    )
    assert_equals_oracle(batch, expected)
    ids = [*unpack(batch["input_ids"], batch)]
    flat = [(i, of["input_ids"]) for i, example in enumerate(plain) for of in example]
    assert [of.tolist() for of in ids] == [
        [] if i in batch.metadata["dropped"] else given for i, given in flat
    ]


FIELDS = {
    "margin": PerExample(torch.float32),
    "name": PerExample(str),
    "kind": PerToken(torch.int64, pad=-1),
}
PAIRS: list[dict[str, Any]] = [
    {
        "input_ids": [[5, 6, 7 + i], [5, 6, 17 + i, 18]],
        "loss_mask": [[0, 0, 1], [0, 0, 1, 1]],
        "kind": [[1, 2, 3], [4, 5, 6, 7]],
        "margin": i / 2,
        "name": f"pair {i}",
    }
    for i in range(4)
]


def test_values_of_examples_stand_once_and_those_of_tokens_per_segment() -> None:
    batch = PackedCollator(0, max_tokens=14, fields=FIELDS)(PAIRS)
    assert sorted(itertools.chain(*batch["margin"].tolist())) == [0.0, 0.5, 1.0, 1.5]
    for row in range(len(batch)):
        examples = batch.row_metadata["example_indices"][row].tolist()
        assert list(batch.row_metadata["name"][row]) == [
            f"pair {i}" for i in dict.fromkeys(examples)
        ]
        assert batch["margin"][row].tolist() == [i / 2 for i in dict.fromkeys(examples)]
    assert [of.tolist() for of in unpack(batch["kind"], batch)] == 4 * [[1, 2, 3], [4, 5, 6, 7]]
    padded = PaddedCollator(0, fields=FIELDS)(PAIRS)
    assert padded["margin"].tolist() == [[0.0], [], [0.5], [], [1.0], [], [1.5], []]
    assert padded.row_metadata["name"][:3] == [("pair 0",), (), ("pair 1",)]
    assert padded["kind"][1].tolist() == [4, 5, 6, 7]


def test_it_is_explained_and_shown_by_example_and_segment() -> None:
    batch = PackedCollator(0, max_tokens=14, fields=FIELDS)(PAIRS[:1])
    assert "1 example in 2 segments" in repr(batch)
    shown = batch.explain(0)
    assert shown.columns["example"] == [0] * 7
    assert shown.columns["part"] == [0] * 3 + [1] * 4
    assert shown.columns["margin"] == [0.0] * 7
    assert shown.columns["name"] == ["pair 0"] * 7
    assert PaddedCollator(0)(PAIRS).explain(3).columns["part"] == [1] * 4


CUTS: dict[str, Callable[[Batch], Any]] = {
    "chunk": lambda batch: batch.chunk(8),
    "slice": lambda batch: batch[1:],
    "end of a slice": lambda batch: batch[:3],
    "split": lambda batch: batch.split(3),
    "rows of split": lambda batch: batch.split([[0, 1], [2]]),
    "select": lambda batch: batch.select([1, 0]),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_padded_rows_are_cut_only_between_examples(cut: Callable[[Batch], Any]) -> None:
    batch = PaddedCollator(0, fields=FIELDS)(PAIRS)
    with pytest.raises(ValueError, match=r"one for each of its 2 segments, would be divided"):
        cut(batch)
    for parts in (batch.chunk(2), batch.split(2), [batch[:4], batch[4:]]):
        assert_same_batch(Batch.cat(parts), batch)
    padded = batch.pad_rows(multiple_of=16)
    assert len(padded) == 16
    for name in batch:
        assert same_value(padded[:8][name], batch[name]), name


def test_one_segment_each_is_what_an_example_without_a_list_is() -> None:
    flat = [{"input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]} for i in range(5)]
    nested = [{key: [value] for key, value in example.items()} for example in flat]
    collate = PackedCollator(0, max_tokens=8)
    one, other = collate(flat), collate(nested)
    for name in one:
        assert same_value(one[name], other[name]), name
    assert isinstance(other.row_metadata["segment_numbers"], Ragged)
