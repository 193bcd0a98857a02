"""Batch: a mapping, rows, and metadata beside the rows."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.batch_samples import contents, examples, loose, storages_of, tensors_of
from torch_collate_kit import PackedCollator, PaddedCollator
from torch_collate_kit.batch import Batch


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
    ("loose().chunk(0)", ValueError, "num_chunks must be at least 1, got 0"),
    ("loose().chunk(3)", ValueError, "4 rows do not divide into 3 .*pad_rows"),
    ("loose().select([4])", IndexError, r"rows \[4\] of a batch with 4 rows"),
    ("loose().select([-1])", IndexError, r"rows \[-1\] of a batch with 4 rows"),
    ("loose().select([False, True])", TypeError, "integers"),
    ("loose().select(np.array([0.9]))", TypeError, "integers"),
    ("PACKED.to(torch.float16)", TypeError, r"takes a device, got torch\.float16"),
    ("Batch.cat(PACKED, PACKED)", TypeError, r"takes a list of batches, Batch\.cat\(\[a, b\]\); g"),
    ("PACKED.with_fields(labels=PACKED['labels'] / 2)", TypeError, r"labels are torch\.float32; g"),
    ("PACKED.with_fields(labels=PACKED['labels'] > 2)", TypeError, r"labels are torch\.bool; give"),
    ("loose().chunk(True)", TypeError, "num_chunks must be an int, got True"),
    ("Batch.cat([])", ValueError, "at least one batch, got none"),
    ("Batch.cat([PACKED, Batch(X)])", ValueError, r"batch 1 has fields \['x'\], batch 0 has"),
    ("Batch.cat([PACKED, NARROW])", ValueError, r"row shape \[6\], of batch 0 \[8\].*fixed_width"),
    ("Batch.cat([Batch(X), Batch(X, metadata={'a': 1})])", ValueError, r"the metadata \['a'\]"),
    ("Batch.cat([Batch(X), Batch(X, row_metadata={'b': [1] * 3})])", ValueError,
     r"_metadata \['b'\]"),
    ("Batch.cat([PACKED, OTHER], dict.fromkeys(COUNTS, 1))", ValueError, "loss_mask_divisor"),
]  # fmt: skip
COUNTS = ("num_loss_tokens", "num_examples")


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        eval(call)


def test_keys_complete_in_a_notebook_without_making_a_field():
    batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2, 3]}])
    assert batch._ipython_key_completions_() == list(batch)  # what IPython asks for at `batch["`
    assert batch._made == {}


EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
TWO_TEXTS = PackedCollator(0, max_tokens=8)(EXAMPLES)
PAIR = [{"input_ids": [[5, 6], [5, 7]], "loss_mask": [[0, 1], [0, 1]]}]
ROWS = {
    "packed": TWO_TEXTS,
    "a slice": TWO_TEXTS[0:1],
    "sent and changed": pickle.loads(pickle.dumps(TWO_TEXTS)).with_fields(x=torch.zeros(1, 2)),
    "trees": PackedCollator(0, max_tokens=8, share_prefixes=True)(PAIR),
    "a shard": PackedCollator(0, max_tokens=8)(EXAMPLES).context_shard(0, 1),
    "built again": Batch(dict(TWO_TEXTS), row_metadata=TWO_TEXTS.row_metadata),
}


def names_of(*args: Any, **fields: Any) -> list[str]:
    return list(fields)


class Model(nn.Module):
    def forward(self, **fields: Any) -> list[str]:
        return list(fields)

    def method(self, *args: Any, **fields: Any) -> list[str]:
        return list(fields)


FORMS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda batch: names_of(**batch),
    "with a keyword": lambda batch: names_of(a=1, **batch),
    "with a keyword after": lambda batch: names_of(**batch, a=1),
    "with arguments": lambda batch: names_of(*(1, 2), **batch),
    "with two mappings": lambda batch: names_of(**{"b": 1}, **batch),
    "a module": lambda batch: Model()(**batch),
    "a method": lambda batch: Model().method(1, **batch),
    "partial": lambda batch: partial(names_of, **batch)(),
    "a type": lambda batch: dict(**batch),
    "in a list": lambda batch: [names_of(**each) for each in [batch]],
    "in a generator": lambda batch: next(names_of(**each) for each in [batch]),
}
READINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "dict with a keyword": lambda batch: dict(batch, a=1),
    "braces": lambda batch: {**batch},
    "braces in a call": lambda batch: names_of(**{**batch}),
    "dict in a call": lambda batch: names_of(**dict(batch)),
    "keys": lambda batch: list(batch.keys()),
    "keys in a call": lambda batch: names_of(*batch.keys(), a=batch.keys(), **{"b": batch.keys()}),
    "items": lambda batch: dict(batch.items()),
    "update": lambda batch: {}.update(batch),
    "a comprehension": lambda batch: {name: batch[name] for name in batch.keys()},  # noqa: SIM118
    "inputs in a call": lambda batch: Model()(**{name: batch[name] for name in batch}),
}


def check(batch: Batch) -> None:
    for name, form in FORMS.items():
        with pytest.raises(TypeError, match=r"model\(\*\*batch.model_inputs\(model\)\), or.*dict"):
            raise AssertionError(f"{name}: {form(batch)}")
    for reading in READINGS.values():
        reading(batch)


@pytest.mark.parametrize("batch", ROWS.values(), ids=ROWS)
def test_packed_rows_and_shards_are_not_unpacked_into_a_call(batch):
    check(batch)


def test_in_hot_loops_and_under_a_tracer():
    form, reading = FORMS["a function"], READINGS["braces"]
    for _ in range(3000):  # the interpreter specializes the code of both
        with pytest.raises(TypeError, match="one text"):
            form(TWO_TEXTS)
        reading(TWO_TEXTS)
    tracer = sys.gettrace()
    for switch in (sys.settrace, sys.setprofile):
        try:
            switch(lambda *_: lambda *_: None)
            check(TWO_TEXTS)
        finally:
            sys.setprofile(None)
            sys.settrace(tracer)


def test_padded_rows_are_as_they_were():
    padded = PaddedCollator(0)(EXAMPLES)
    for batch in (padded, padded[1:], Batch({"x": torch.zeros(1, 2)})):
        for form in FORMS.values():
            assert next(iter(batch)) in str(form(batch))
