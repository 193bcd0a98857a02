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

from tests.batch_samples import KINDS, contents, examples, loose, plain, storages_of, tensors_of
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


@pytest.mark.parametrize("index", [0, -1, np.int64(1), True, (0, 1), [0], None, slice])
def test_a_row_number_is_refused(index: Any) -> None:
    with pytest.raises(TypeError, match=r"got .*one row is batch\[i:i \+ 1\], rows in any order"):
        loose()[index]


def test_a_field_is_no_attribute(packed: Batch) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'labels'; .* batch\[\"labels\"\]$"):
        _ = packed.labels
    with pytest.raises(AttributeError, match=r"no attribute 'label'$"):
        _ = packed.label
    assert not hasattr(packed, "labels")
    assert not hasattr(Batch.__new__(Batch), "labels")  # as while it is unpickled


def test_fields_and_row_metadata_must_agree_in_rows() -> None:
    x = torch.arange(3)
    with pytest.raises(ValueError, match="at least one field, got none"):
        Batch({})
    with pytest.raises(ValueError, match="y has 2 rows, but x has 3"):
        Batch({"x": x, "y": torch.arange(2)})
    for short in (["a"], np.array([1]), torch.tensor([1]), Ragged.from_rows([[1]])):
        with pytest.raises(ValueError, match=r"row_metadata\['u'\] has 1 rows, but x has 3"):
            Batch({"x": x}, row_metadata={"u": short})


@pytest.mark.parametrize("value", [torch.tensor(3), np.array(3), ["a"], [1, 2, 3], ("a",), "ab"])
def test_metadata_belongs_to_the_whole_batch_whatever_its_type(value: Any) -> None:
    batch = Batch({"x": torch.arange(3)}, metadata={"m": value})
    assert batch[:1].metadata["m"] is value
    assert batch.select([0]).metadata["m"] is value


@pytest.mark.parametrize("value", [torch.tensor(3), ("a", "b", "c"), "abc", {"w": [1]}, None])
def test_row_metadata_has_an_entry_per_row(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"row_metadata\['u'\] must be a list, .*goes into metadata"
    ):
        Batch({"x": torch.arange(3)}, row_metadata={"u": value})


@pytest.mark.parametrize("value", [[1, 2], np.arange(2), torch.tensor(1), None])
def test_a_field_is_a_tensor_with_rows_or_a_ragged(value: Any) -> None:
    with pytest.raises(TypeError, match="field x"):
        Batch({"x": value})


# --- rows ----------------------------------------------------------------------------------------


def test_a_slice_by_hand() -> None:
    batch = loose()[1:3]
    assert len(batch) == 2
    assert contents(batch) == {
        "rows": 2,
        "fields": {
            "ids": [[3, 4], [5, 6]],
            "rewards": [1.5, 2.5],
            "half": [[2.0], [3.0]],
            "kept": [False, True],
            "words": [[2, 3], []],
        },
        "dtypes": {
            "ids": "int64",
            "rewards": "float32",
            "half": "bfloat16",
            "kept": "bool",
            "words": "int64",
        },
        "row_metadata": {
            "uids": ["b", "c"],
            "turns": [2, 3],
            "scores": pytest.approx([0.2, 0.3]),
            "parts": [[], [1, 2]],
        },
        "metadata": {
            "step": 7,
            "name": "run",
            "limits": (1, 2, 3),
            "options": {"x": [1]},
            "nothing": None,
        },
    }


@pytest.mark.parametrize(
    "index",
    [slice(None), slice(2), slice(-1, None), slice(0, 4, 2), slice(2, 1), slice(9, 12)],
)
def test_a_slice_is_the_selection_of_its_rows(index: slice) -> None:
    rows = list(range(4))[index]
    assert contents(loose()[index]) == contents(loose().select(rows))
    assert len(loose()[index]) == len(rows)


def test_slices_and_chunks_copy_nothing_that_is_stored(collated: Batch) -> None:
    collated = pickle.loads(pickle.dumps(collated))  # in one buffer
    assert len(storages_of(collated)) == 1
    for part in (collated[1:2], collated.chunk(len(collated))[2]):
        assert storages_of(part) == storages_of(collated)
    loose_batch = loose()
    loose_batch[1:2]["ids"][:] = 9
    assert loose_batch["ids"].tolist()[1] == [9, 9]


def test_a_slice_keeps_the_divisor_of_the_whole_batch(packed: Batch) -> None:
    part = packed[1:]
    assert part.metadata["num_loss_tokens"] == packed.metadata["num_loss_tokens"] == 16
    assert part.row_metadata["example_indices"].tolist() == [[0, 1], [2, 3]]
    assert part.row_metadata["max_segment_length"] == [5, 4]
    assert part["sub_seq_lengths"].tolist() == [[5, 3], [4, 2]]


def test_values_per_example_of_a_slice_are_of_its_rows_alone(packed: Batch) -> None:
    """Whether they are stored for all rows or made for these; the contract compares the two."""
    part = packed[1:]
    for values in (*part.row_metadata.values(), *part.values()):
        if isinstance(values, Ragged):
            assert len(values.values) == values.lengths.sum()
    assert part.row_metadata["num_trained"].values.tolist() == [4, 2, 3, 1]
    assert part["sub_seq_lengths"].values.tolist() == [5, 3, 4, 2]


def test_metadata_of_a_slice_is_its_own(packed: Batch) -> None:
    packed[1:].metadata["num_loss_tokens"] = 0
    assert packed.metadata["num_loss_tokens"] == 16


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step -1; use batch\.select"):
        loose()[::-1]


def test_chunks_are_the_rows_in_order(collated: Batch) -> None:
    chunks = collated.chunk(len(collated))
    assert [len(chunk) for chunk in chunks] == [1] * len(collated)
    rebuilt = Batch.cat(chunks)
    assert contents(rebuilt) == contents(collated)
    assert contents(collated.chunk(1)[0]) == contents(collated)


@pytest.mark.parametrize("num_chunks", [0, -1, 3, 8])
def test_chunks_must_divide(num_chunks: int) -> None:
    with pytest.raises(ValueError, match=rf"4 rows do not divide into {num_chunks} .*pad_rows"):
        loose().chunk(num_chunks)


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


def test_a_selection_of_no_rows() -> None:
    assert len(loose().select([])) == 0
    assert loose().select([]).row_metadata["uids"] == []


@pytest.mark.parametrize("indices", [[4], [-1], [0, 9], [[0]]])
def test_a_selection_of_rows_that_are_not_there(indices: Any) -> None:
    with pytest.raises(IndexError, match=r"rows \[.*\] of a batch with 4 rows"):
        loose().select(indices)


@pytest.mark.parametrize("indices", [[False, True, True, False], [0.9, 1.9]])
def test_a_selection_takes_integers_only(indices: Any) -> None:
    for given_indices in (indices, np.array(indices), torch.tensor(indices)):
        with pytest.raises(TypeError, match="integers"):
            loose().select(given_indices)


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


def test_cat_needs_the_same_fields_widths_and_metadata(packed: Batch, padded: Batch) -> None:
    with pytest.raises(ValueError, match="at least one batch, got none"):
        Batch.cat([])
    with pytest.raises(ValueError, match=r"batch 1 has fields \['x'\], batch 0 has \['input_ids'"):
        Batch.cat([packed, Batch({"x": torch.arange(2)})])
    narrow = PackedCollator(0, max_tokens=6)(examples((6,)))
    with pytest.raises(
        ValueError, match=r"input_ids of batch 1 has row shape \[6\], of batch 0 \[8\].*fixed_width"
    ):
        Batch.cat([packed, narrow])
    x = {"x": torch.arange(2)}
    with pytest.raises(ValueError, match=r"only one of .*batch 2 has the metadata \['a', 'b'\]"):
        Batch.cat([Batch(x, metadata={key: 1}) for key in "aab"])
    with pytest.raises(ValueError, match=r"only one of .*batch 1 has the row_metadata \['b'\]"):
        Batch.cat([Batch(x), Batch(x, row_metadata={"b": [1, 2]})])


def test_masks_that_were_divided_by_different_numbers_are_not_joined(packed: Batch) -> None:
    other = PackedCollator(0, max_tokens=8)(examples((8,)))
    keys = ("num_loss_tokens", "loss_mask_divisor", "num_examples", "num_tokens")
    with pytest.raises(ValueError, match="loss_mask_divisor"):
        Batch.cat([packed, other], {key: packed.metadata[key] + 7 for key in keys})


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


def test_a_packed_batch_rebuilt_without_its_metadata_is_refused(packed: Batch) -> None:
    with pytest.raises(ValueError, match=r"rebuilt without its metadata.*for_trainer"):
        Batch(dict(packed.items()))


@pytest.mark.parametrize("kind", list(KINDS))
def test_counts_per_row_go_with_the_rows(kind: str) -> None:
    batch = KINDS[kind]()
    tokens = batch["attention_mask"].sum(1).tolist()
    trained = (batch["loss_mask"] != 0).sum(1).tolist()
    for rows in ([*range(len(batch))][1:], [0], [len(batch) - 1, 0]):
        for part in (batch[rows[0] : rows[0] + len(rows)], batch.select(rows)):
            found = part.row_metadata["example_indices"].tolist()
            places = [batch.row_metadata["example_indices"].tolist().index(row) for row in found]
            assert part.stored().num_tokens().tolist() == [tokens[i] for i in places]
            assert part.stored().num_loss_tokens().tolist() == [trained[i] for i in places]
            if "response_mask" in batch:
                responses = part["response_mask"].sum(1).tolist()
                assert part.stored().num_tokens("responses").tolist() == responses
    assert batch.stored().num_tokens("nothing") is None


def test_to_takes_a_device(packed: Batch) -> None:
    with pytest.raises(TypeError, match=r"takes a device, got torch\.float16"):
        packed.to(torch.float16)


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
