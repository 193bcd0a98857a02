"""A field that was changed in place stays as it is, whatever is done with the batch.

The model is a dict of dense tensors and lists of rows, changed by the same operations.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch_checks import same_value
from tests.batch_samples import KINDS, plain
from tests.strategies import FUZZ
from torch_collate_kit import Batch, PackedCollator, RolloutCollator
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import stage_mini_batches

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


def test_rows_that_divide_already_are_returned_as_they_are(collated: Batch) -> None:
    assert collated.pad_rows(multiple_of=1) is collated
    assert collated.pad_rows(multiple_of=len(collated)) is collated


ROLLOUTS: list[dict[str, Any]] = [
    {
        "prompt_ids": [1, 2],
        "response_ids": [3] * n,
        "rewards": 1.0,
        "loss_mask": [1] * n,
        "uid": "a",
        "trajectory_id": n,
        "is_last_step": n > 1,
    }
    for n in (1, 2, 3)
]
PADDED = {"uids": "a", "trajectory_ids": 1, "is_last_step": True, "turn": 7}
PACKED = {"uids": (), "trajectory_ids": (), "is_last_step": (), "max_segment_length": 5, "turn": 7}
OF_SUB_SEQUENCES = ("example_indices", "example_starts", "num_actions", "num_trained", "stop")


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (RolloutCollator(0), PADDED),
        (PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing"), PACKED),
    ],
    ids=["padded", "packed"],
)
@pytest.mark.parametrize("by", ["pad_rows", "stage_mini_batches"])
def test_every_row_metadata_of_added_rows(collate: Any, expected: dict[str, Any], by: str) -> None:
    batch = collate(ROLLOUTS)
    batch.row_metadata["turn"] = [7] * len(batch)
    batch.row_metadata["stop"] = Ragged.from_rows([[1]] * len(batch))
    if by == "pad_rows":
        batch = batch.pad_rows(multiple_of=5)
    else:
        batch = Batch.cat(stage_mini_batches(batch, [0, len(batch)], 5)[0])
        expected = expected | {"row_indices": -1}
    added = {key: plain(value)[-1] for key, value in batch.row_metadata.items()}
    assert added == expected | {key: [] for key in OF_SUB_SEQUENCES}
    uids, flags = batch.row_metadata["uids"], batch.row_metadata["is_last_step"]
    assert {type(uid) for uid in uids} == {type(uids[0])}
    assert {type(flag) for flag in flags} == {type(flags[0])}


def test_a_router_counts_no_token_of_an_added_row() -> None:
    batch = Batch({"router_padding_mask": torch.tensor([[False, True]])}).pad_rows(multiple_of=2)
    assert batch["router_padding_mask"].tolist() == [[False, True], [True, True]]


def test_what_is_multiplied_into_a_loss_is_0_in_added_rows() -> None:
    ones, mask = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int64)
    batch = Batch(
        {
            "loss_mask": torch.ones(1, 2),
            "response_mask": mask,
            "advantages": torch.ones(1),  # one a row
            "returns": torch.ones(1, 7, dtype=torch.int64),
            "rewards": Ragged.from_rows([[1.0]]),
            "values": ones,
            "old_logprobs": ones[:, :2].to(torch.bfloat16),
            "turn": mask,  # not floating point
            "pixel_values": torch.ones(1, 3, 2),
            "inputs_embeds": torch.ones(1, 3, 2),
            "attention_mask": torch.ones(1, 3),
            "scores": torch.ones(1, 5),
            "hidden": torch.ones(1, 3, 2),
            "own": Ragged.from_rows([[1.0, 2.0]]),
            "cu_seq_lens": Ragged.from_rows([[0, 3]]),
        },
        row_metadata={"max_segment_length": [3]},
    ).pad_rows(multiple_of=3)
    repeated = ("turn", "pixel_values", "inputs_embeds", "attention_mask")
    ragged = ("rewards", "own", "cu_seq_lens")
    for name in batch.keys() - {*repeated, *ragged}:
        assert (batch[name][0] == 1).all()
        assert (batch[name][1:] == 0).all(), name
    for name in repeated:
        assert (batch[name] == 1).all(), name
    assert batch["rewards"].tolist() == [[1.0], [], []]
    assert batch["own"].tolist() == [[1.0, 2.0], [], []]
    assert batch["cu_seq_lens"].tolist() == [[0, 3]] * 3


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_an_added_row_is_a_trajectory_of_its_own(kind: Any) -> None:
    flags = kind([False, True])
    batch = Batch({"x": torch.arange(2)}, row_metadata={"is_last_step": flags}).pad_rows(
        multiple_of=4
    )
    assert plain(batch.row_metadata["is_last_step"]) == [False, True, True, True]
    assert plain(flags) == [False, True]


def test_pad_rows_errors(packed: Batch) -> None:
    for multiple_of in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {multiple_of}"):
            packed.pad_rows(multiple_of=multiple_of)
    no_rows = packed[:0]  # 0 is a multiple of everything
    assert no_rows.pad_rows(multiple_of=2) is no_rows


CHANGES = {
    "whole": lambda b: b,
    "a slice": lambda b: b[1:],
    "other rows": lambda b: b.select([1, 0, 1]),
    "joined": lambda b: Batch.cat([b[:1], b[1:]]),
    "added rows": lambda b: b.pad_rows(multiple_of=7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_per_run_is_an_index_per_token(
    kind: str, change: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 100 tokens on average are copied; the oracle has seen short ones."""
    made = []
    for short in (0, 10**9):
        monkeypatch.setattr("torch_collate_kit.batch.placement.SHORT_SPAN", short)
        made.append(dict(change(KINDS[kind]())))
    assert same_value(*made)
