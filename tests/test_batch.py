"""Batch: a mapping, rows, and metadata beside the rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_samples import (
    contents,
    examples,
    loose,
    plain,
    storages_of,
    tensors_of,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.ragged import Ragged

# --- a mapping -----------------------------------------------------------------------------------


def test_it_is_a_mapping_of_fields(packed: Batch) -> None:
    assert isinstance(packed, Mapping)
    names = ["input_ids", "position_ids", "attention_mask", "labels", "loss_mask"]
    assert list(packed) == [*names, "sub_seq_lengths", "cu_seq_lens"]
    assert len(packed) == 3
    assert "input_ids" in packed
    assert "pixel_values" not in packed
    assert packed.get("pixel_values") is None
    plain_dict = {**packed}
    assert list(plain_dict) == list(packed)
    assert plain_dict["labels"] is packed["labels"]
    assert dict(packed.items()).keys() == plain_dict.keys()
    with pytest.raises(KeyError, match="pixel_values"):
        packed["pixel_values"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(packed)


def test_the_arguments_are_not_kept_as_containers() -> None:
    fields, metadata = {"x": torch.arange(2)}, {"uids": ["a", "b"]}
    batch = Batch(fields, row_metadata=metadata, metadata=metadata)
    fields["y"], metadata["n"] = torch.arange(9), 1
    assert list(batch) == ["x"]
    assert list(batch.metadata) == list(batch.row_metadata) == ["uids"]


# --- rows ----------------------------------------------------------------------------------------


def test_slices_and_chunks_copy_nothing_that_is_stored(collated: Batch) -> None:
    collated = pickle.loads(pickle.dumps(collated))  # in one buffer
    assert len(storages_of(collated)) == 1
    for part in (collated[1:2], collated.chunk(len(collated))[2]):
        assert storages_of(part) == storages_of(collated)
    loose_batch = loose()
    loose_batch[1:2]["ids"][:] = 9
    assert loose_batch["ids"].tolist()[1] == [9, 9]


@pytest.mark.parametrize("indices", [[2, 0, 2], np.array([2, 0, 2]), torch.tensor([2, 0, 2])])
def test_a_selection_is_a_copy_in_the_named_order(indices: Any) -> None:
    batch = loose()
    picked = batch.select(indices)
    assert picked["ids"].tolist() == [[5, 6], [1, 2], [5, 6]]
    assert picked["words"].tolist() == [[], [1], []]
    assert picked.row_metadata["uids"] == ["c", "a", "c"]
    assert picked.row_metadata["turns"].tolist() == [3, 1, 3]
    assert picked.row_metadata["scores"].tolist() == pytest.approx([0.3, 0.1, 0.3])
    assert picked.row_metadata["parts"].tolist() == [[1, 2], [0], [1, 2]]
    assert picked.metadata["limits"] == (1, 2, 3)
    for tensor in tensors_of(picked):
        tensor[:] = 0
    picked.row_metadata["turns"][:] = 0
    assert contents(batch) == contents(loose())


# --- cat -----------------------------------------------------------------------------------------


def test_cat_is_a_copy_of_all_rows() -> None:
    batch = loose()
    whole = Batch.cat([batch[2:], batch[:0], batch[:1], batch.select([1])])
    assert contents(whole) == contents(batch.select([2, 3, 0, 1]))
    for tensor in tensors_of(whole):
        tensor[:] = 0
    assert contents(batch) == contents(loose())
    assert contents(Batch.cat([batch])) == contents(batch)


def test_metadata_of_the_batches_must_agree_or_be_given(packed: Batch) -> None:
    other = copy.deepcopy(packed)
    other.metadata["num_loss_tokens"] = 3
    with pytest.raises(
        ValueError, match=r"metadata\['num_loss_tokens'\] is 16.* 3.*pass metadata="
    ):
        Batch.cat([packed, other])
    whole = Batch.cat([packed, other], {"num_loss_tokens": 19, "new": "x"})
    assert whole.metadata["num_loss_tokens"] == 19
    assert whole.metadata["new"] == "x"
    assert whole.row_metadata["max_segment_length"] == [7, 5, 4, 7, 5, 4]
    assert packed.metadata["num_loss_tokens"] == 16


def _as_rows(batch: Batch) -> list[tuple[Any, ...]]:
    columns = [plain(batch[name]) for name in ("x", "r")]
    columns += [plain(batch.row_metadata[name]) for name in ("list", "array", "ragged")]
    return list(zip(*columns, strict=True))


@given(st.data())
def test_fields_and_metadata_stay_together(data: Any) -> None:
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    rows = [(10 * i, [10 * i + j for j in range(n)]) for i, n in enumerate(counts)]
    ragged = Ragged.from_rows([r for _, r in rows], dtype=np.int64)
    batch = Batch(
        {"x": torch.tensor([x for x, _ in rows]), "r": ragged.to("cpu")},
        row_metadata={
            "list": [x for x, _ in rows],
            "array": np.array([x for x, _ in rows]),
            "ragged": ragged,
        },
    )
    expected = _as_rows(batch)
    assert [(row[0], row[1]) for row in expected] == rows
    for _ in range(data.draw(st.integers(1, 4))):
        operation = data.draw(st.sampled_from(["slice", "select", "cat", "pickle", "deepcopy"]))
        if operation == "slice":
            bounds = st.none() | st.integers(-6, 6)
            index = slice(data.draw(bounds), data.draw(bounds), data.draw(st.integers(1, 2)))
            batch, expected = batch[index], expected[index]
        elif operation == "select" and expected:
            indices = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5))
            batch, expected = batch.select(indices), [expected[i] for i in indices]
        elif operation == "cat":
            batch, expected = Batch.cat([batch[1:], batch]), expected[1:] + expected
        elif operation == "pickle":
            batch = pickle.loads(pickle.dumps(batch))
        elif operation == "deepcopy":
            batch = copy.deepcopy(batch)
        assert len(batch) == len(expected)
        assert _as_rows(batch) == expected


@pytest.mark.parametrize("kind", [PackedCollator(0, max_tokens=8), PaddedCollator(0)])
def test_batches_collated_apart_are_not_joined_by_chance(kind: Any) -> None:
    """Their counts agree here, so nothing else would tell that N is not that of the whole."""
    a, b = (kind([{"input_ids": ids}, {"input_ids": [8, 9]}]) for ids in ([1, 2, 3], [4, 5, 6]))
    with pytest.raises(ValueError, match=r"batches 0 and 1 both have an example \d: they were"):
        Batch.cat([a, b])
    joined = Batch.cat([a, b], {"num_loss_tokens": 6})
    assert joined.metadata["num_loss_tokens"] == 6
    assert len(Batch.cat([a[:1], a[1:]])) == len(a)


def test_rows_with_pieces_of_one_example_are_joined() -> None:
    split = PackedCollator(0, max_tokens=4, overflow="split")([{"input_ids": [1, 2, 3, 4, 5, 6]}])
    assert len(split) == 2
    assert Batch.cat([split[:1], split[1:]]) == split


def test_batches_that_differ_in_metadata_alone_are_not_equal(collated: Batch) -> None:
    assert copy.copy(collated) == collated
    for kind in ("row_metadata", "metadata"):
        other = copy.copy(collated)
        getattr(other, kind)["more"] = [0] * len(other)
        assert other != collated, kind
        same = copy.copy(collated)
        getattr(same, kind)["more"] = [1] * len(same)
        assert other != same, kind
        getattr(same, kind)["more"] = [0] * len(same)
        assert other == same, kind


def test_with_fields_adds_and_replaces_without_a_copy() -> None:
    batch = Batch(
        {"a": torch.zeros(3, 2), "b": torch.ones(3)}, row_metadata={"uids": ["x", "y", "z"]}
    )
    c = torch.arange(3)
    changed = batch.with_fields(c=c, b=torch.zeros(3))
    assert list(changed) == ["a", "b", "c"]
    assert changed["a"] is batch["a"]
    assert changed["c"] is c
    assert batch["b"].sum() == 3
    assert list(batch) == ["a", "b"]
    assert changed.row_metadata == batch.row_metadata
    assert changed.row_metadata is not batch.row_metadata
    with pytest.raises(ValueError, match="c has 2 rows, but a has 3"):
        batch.with_fields(c=torch.zeros(2))


@pytest.mark.parametrize("make", [PaddedCollator(0), PackedCollator(0, max_tokens=4)])
def test_split_knows_the_divisor_of_the_step_and_the_last_part(make: Any) -> None:
    batch = make([{"input_ids": [i + 5] * 3} for i in range(5)])
    parts = batch.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [part.metadata["is_last_part"] for part in parts] == [False, False, True]
    assert {part.metadata["num_loss_tokens"] for part in parts} == {10}
    assert "is_last_part" not in batch.metadata
    assert Batch.cat(parts) == batch
    chosen = batch.split([[4, 0], [2]])
    assert [part["input_ids"].tolist() for part in chosen] == [
        batch.select(rows)["input_ids"].tolist() for rows in ([4, 0], [2])
    ]
    assert [part.metadata["is_last_part"] for part in chosen] == [False, True]
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        batch.split(0)


# --- errors --------------------------------------------------------------------------------------

X, PACKED = (
    {"x": torch.arange(3)},
    PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing")(examples()),
)
NARROW = PackedCollator(0, max_tokens=6)(examples((6,)))
OTHER = PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing")(examples((8,)))
ERRORS: list[tuple[str, type[Exception], str]] = [
    *[
        (f"loose()[{i}]", TypeError, r"got .*batch\[i:i \+ 1\]")
        for i in ("0", "True", "[0]", "None")
    ],
    ("PACKED.labels", AttributeError, r"no attribute 'labels'; .*\[\"labels\"\]$"),
    ("PACKED.label", AttributeError, r"no attribute 'label'$"),
    ("Batch({})", ValueError, "at least one field, got none"),
    ("Batch({**X, 'y': torch.arange(2)})", ValueError, "y has 2 rows, but x has 3"),
    ("Batch(X, row_metadata={'u': ['a']})", ValueError, r"\['u'\] has 1 rows, but x has 3"),
    ("Batch(X, row_metadata={'u': np.array([1])})", ValueError, "has 1 rows, but x has 3"),
    ("Batch(X, row_metadata={'u': torch.tensor(3)})", TypeError, "a list, .*goes into metadata"),
    ("Batch(X, row_metadata={'u': ('a', 'b', 'c')})", TypeError, "a list, .*goes into metadata"),
    ("Batch({'x': [1, 2]})", TypeError, "field x"),
    ("Batch({'x': torch.tensor(1)})", TypeError, "field x"),
    ("Batch(dict(PACKED.items()))", ValueError, "rebuilt without its metadata"),
    ("loose()[::-1]", ValueError, r"step -1; use batch\.select"),
    ("loose().chunk(0)", ValueError, "4 rows do not divide into 0 .*pad_rows"),
    ("loose().chunk(3)", ValueError, "4 rows do not divide into 3 .*pad_rows"),
    ("loose().select([4])", IndexError, r"rows \[4\] of a batch with 4 rows"),
    ("loose().select([-1])", IndexError, r"rows \[-1\] of a batch with 4 rows"),
    ("loose().select([False, True])", TypeError, "integers"),
    ("loose().select(np.array([0.9]))", TypeError, "integers"),
    ("PACKED.to(torch.float16)", TypeError, r"takes a device, got torch\.float16"),
    ("Batch.cat([])", ValueError, "at least one batch, got none"),
    ("Batch.cat([PACKED, Batch(X)])", ValueError, r"batch 1 has fields \['x'\], batch 0 has"),
    ("Batch.cat([PACKED, NARROW])", ValueError, r"row shape \[6\], of batch 0 \[8\].*fixed_width"),
    ("Batch.cat([Batch(X), Batch(X, metadata={'a': 1})])", ValueError, r"the metadata \['a'\]"),
    (
        "Batch.cat([Batch(X), Batch(X, row_metadata={'b': [1] * 3})])",
        ValueError,
        r"_metadata \['b'\]",
    ),
    ("Batch.cat([PACKED, OTHER], dict.fromkeys(COUNTS, 1))", ValueError, "loss_mask_divisor"),
]
COUNTS = ("num_loss_tokens", "num_examples")


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        eval(call)


def test_keys_complete_in_a_notebook_without_making_a_field():
    batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2, 3]}])
    assert batch._ipython_key_completions_() == list(batch)  # what IPython asks for at `batch["`
    assert batch._made == {}
