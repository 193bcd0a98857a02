"""A field that was changed in place stays as it is, whatever is done with the batch.

The model is a dict of dense tensors and lists of rows, changed by the same operations.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch_samples import KINDS
from tests.strategies import FUZZ
from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged

Model = dict[str, Any]  # tensors [R, ...], or a list of tensors, one per row


def model_of(batch: Batch) -> Model:
    """Of another batch of the same examples, so that nothing is shared with the one tested."""
    return {
        name: [torch.as_tensor(row).clone() for row in field]
        if isinstance(field, Ragged)
        else field.clone()
        for name, field in batch.items()
    }


def check(batch: Batch, model: Model, order: Any = None) -> None:
    assert list(batch) == list(model)
    for name in order or model:
        field, wanted = batch[name], model[name]
        if isinstance(field, Ragged):
            assert [torch.as_tensor(row).tolist() for row in field] == [r.tolist() for r in wanted]
        else:
            assert field.dtype == wanted.dtype, name
            assert torch.equal(field, wanted), (name, field, wanted)


def rows_of(model: Model, rows: list[int]) -> Model:
    return {
        name: [of[i].clone() for i in rows] if isinstance(of, list) else of[rows]
        for name, of in model.items()
    }


def joined(first: Model, second: Model) -> Model:
    return {
        name: of + second[name] if isinstance(of, list) else torch.cat([of, second[name]])
        for name, of in first.items()
    }


PADS: dict[str, Any] = {"labels": -100, "router_padding_mask": True}
EMPTY = ("loss_mask", "response_mask", "rewards", "advantages", "rollout_logprobs", "reference")


def padded(model: Model, multiple_of: int) -> Model:
    count = len(model["input_ids"])
    model = rows_of(model, [*range(count), *([0] * (-count % multiple_of))])
    for name, of in model.items():
        if name in ("sub_seq_lengths", "domain"):
            of[count:] = [row[:0] for row in of[count:]]
        elif name in PADS or name in EMPTY:
            of[count:] = PADS.get(name, 0)
        elif name == "rollout_expert_indices":
            of[count:] = torch.arange(of.shape[-1], dtype=of.dtype)
    return model


def change(field: Any, wanted: Any, number: int) -> None:
    """The same change of a field in place and of its model."""
    if isinstance(field, Ragged):
        field.values.add_(number)
        for row in wanted:
            row.add_(number)
    elif field.dtype == torch.bool:
        field.logical_not_()
        wanted.logical_not_()
    elif field.numel():
        for tensor in (field, wanted):
            tensor.view(len(tensor), -1)[number % len(tensor), ::2] += number


@pytest.mark.parametrize("kind", KINDS)
def test_added_rows_of_every_kind(kind: str) -> None:
    """The fuzz below seldom adds rows to a batch of each."""
    check(KINDS[kind]().pad_rows(multiple_of=7), padded(model_of(KINDS[kind]()), 7))


@settings(FUZZ, max_examples=2 * settings().max_examples)
@given(data=st.data(), kind=st.sampled_from(list(KINDS)), inference=st.booleans())
def test_random_changes_and_operations(data: Any, kind: str, inference: bool) -> None:
    batch, model = KINDS[kind](), model_of(KINDS[kind]())
    with torch.inference_mode(inference):
        for _ in range(data.draw(st.integers(1, 6))):
            for name in data.draw(st.lists(st.sampled_from(list(model)), max_size=2)):
                if name == "cu_seq_lens":  # boundaries are read, not written
                    continue
                change(batch[name], model[name], data.draw(st.integers(1, 3)))
            count = len(batch)
            operation = data.draw(
                st.sampled_from(
                    ["slice", "select", "cat", "pad", "to", "pickle", "with", "deep", "copy", "pin"]
                )
            )
            if operation == "slice" and count > 1:
                index = slice(data.draw(st.integers(0, 1)), None, data.draw(st.integers(1, 2)))
                batch, model = batch[index], rows_of(model, list(range(count))[index])
            elif operation == "select":
                rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
                batch, model = batch.select(rows), rows_of(model, rows)
            elif operation == "cat" and count < 30:
                metadata = {"num_loss_tokens": 1}
                batch = Batch.cat([batch[1:], batch], metadata)
                model = joined(rows_of(model, list(range(1, count))), model)
            elif operation == "pad":
                batch, model = batch.pad_rows(multiple_of=4), padded(model, 4)
            elif operation == "to":
                batch = batch.to("cpu")
            elif operation == "pickle":
                batch = pickle.loads(pickle.dumps(batch))
            elif operation == "with":
                new = torch.full_like(model["attention_mask"], 7)
                batch = batch.with_fields(attention_mask=new)
                model = {**model, "attention_mask": new.clone()}
            elif operation == "deep":
                before, batch = batch, copy.deepcopy(batch)
                change(before["input_ids"], before["input_ids"].clone(), 5)
            elif operation == "copy":
                batch = copy.copy(batch)
        check(batch, model, data.draw(st.permutations(list(model))))
