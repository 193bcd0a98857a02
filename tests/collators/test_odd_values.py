"""Values that used to pass, or to crash inside NumPy: bools as ids, odd tensors, lost masks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.collators.bad_inputs import IMAGE, ROLLOUT, ROUTES
from torch_collate_kit.batch import PerToken
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

COLLATORS = {"padded": PaddedCollator(0), "packed": PackedCollator(0, max_tokens=8)}
IDS = [5, 6, 7]
collators = pytest.mark.parametrize("collate", COLLATORS.values(), ids=COLLATORS)


def message_of(collate: Any, examples: Any) -> str:
    with pytest.raises(DataError) as caught:
        collate(examples)
    return str(caught.value)


# --- tensors that hold no plain values -----------------------------------------------------------

TENSORS = {
    "nested": torch.nested.nested_tensor(
        [torch.tensor([5, 6]), torch.tensor([7])], layout=torch.jagged
    ),
    "sparse": torch.tensor([5, 6, 7]).to_sparse(),
    "csr": torch.tensor([[5.0, 6.0, 7.0]]).to_sparse_csr(),
    "meta": torch.ones(3, dtype=torch.int64, device="meta"),
    "conjugate": torch.tensor([5j, 6j, 7j]).conj(),
}
WAYS_OUT = {
    "nested": "is a nested tensor; give each example its own, as of .unbind()",
    "sparse": "is a tensor of layout torch.sparse_coo on device cpu; give a dense one",
    "csr": "is a tensor of layout torch.sparse_csr on device cpu; give a dense one",
    "meta": "is a tensor of layout torch.strided on device meta; give a dense one",
    "conjugate": "has dtype complex64",
}


@collators
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(("input_ids", "labels", "loss_mask"), TENSORS),
        *itertools.product(("attention_mask",), ("nested", "sparse", "csr", "meta")),
    ],
)
def test_odd_tensors_name_the_example(collate, kind, name):
    good = {"input_ids": IDS, name: [1, 1, 1]}
    message = message_of(collate, [good, {**good, name: TENSORS[kind]}])
    assert message.startswith(f"example 1: {name} ")
    assert WAYS_OUT[kind] in message


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_column_may_be_a_nested_tensor_of_examples(layout):
    rows = [torch.tensor([5, 6]), torch.tensor([7])]
    column = torch.nested.nested_tensor(rows, layout=layout)
    assert PaddedCollator(0)({"input_ids": column}) == PaddedCollator(0)({"input_ids": rows})


# --- NumPy's masked arrays -----------------------------------------------------------------------

MASKED = np.ma.array([5, 6, 7], mask=[False, True, False])


@collators
@pytest.mark.parametrize("name", ["input_ids", "labels", "loss_mask", "attention_mask"])
def test_masked_arrays_do_not_lose_their_mask(collate, name):
    good = {"input_ids": IDS, name: [1, 1, 1]}
    message = message_of(collate, [good, {**good, name: MASKED}])
    assert message == (
        f"example 1: {name} is a masked array, whose mask would be lost; give .compressed() or "
        ".filled(value)"
    )


MASKS = {"rollout_expert_indices": ROUTES, **IMAGE}


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("is_list", [False, True])
def test_masked_routes_and_images_are_refused(name, is_list):
    good = {**ROLLOUT, **({name: MASKS[name]} if name not in IMAGE else IMAGE)}
    masked = np.ma.masked_array(MASKS[name], mask=np.arange(np.size(MASKS[name])) == 1)
    bad = {**good, name: list(masked) if is_list else masked}
    message = message_of(RolloutCollator(0), [good, bad])
    assert message == (
        f"example 1: {name} is a masked array, whose mask would be lost; give .filled(value)"
    )


# --- weights that float32 loses ------------------------------------------------------------------


@collators
@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks", "completion_mask"])
@pytest.mark.parametrize("as_row", [list, np.array, torch.tensor])
@pytest.mark.parametrize("tiny", [1e-40, 1e-31])
def test_a_weight_that_is_lost_is_not_counted(collate, name, as_row, tiny):
    """1e-40 counted as a loss token, and was 0 as soon as it was divided by their number."""
    good = {"input_ids": IDS, name: as_row([0.0, 0.5, 1.0])}
    message = message_of(collate, [good, {"input_ids": IDS, name: as_row([0.0, tiny, 1.0])}])
    assert message.startswith(f"example 1: {name}[1] is ")
    assert message.endswith(
        "which float32 loses; a weight must be 0 or at least 1e-30: give 0 where nothing is trained"
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(
    "form",
    {
        "array": lambda labels: [[5, 6, 7], labels],
        "mixed dtypes": lambda labels: [np.array([5, 6, 7]), labels],
        "tensor": lambda labels: [torch.tensor([5, 6, 7]), torch.from_numpy(labels)],
        "column": lambda labels: Ragged.from_rows([[5, 6, 7], labels], dtype=labels.dtype),
    }.items(),
    ids=lambda form: form[0],
)
@collators
def test_an_ignored_label_stored_unsigned_is_no_token_id(collate, form, dtype):
    ids = [[5, 6, 7]] * 2
    labels = np.array([5, -100, 7]).astype(dtype)
    message = message_of(collate, {"input_ids": ids, "labels": form[1](labels)})
    assert message == (
        f"example 1: labels is {labels[1]} at token 1 in dtype {labels.dtype}, which is what -100 "
        "becomes there, so the token would be trained; store labels in a signed dtype such as int32"
    )
    labels[1] = 155
    trained = collate({"input_ids": ids, "labels": form[1](labels)})
    assert trained["labels"].flatten().tolist().count(155) == 1


@collators
@pytest.mark.parametrize("dtypes", [("i8", "u8"), ("u8", "i8"), ("i4", "u8"), ("u4", "u8", "i8")])
def test_ids_of_mixed_dtypes_do_not_become_floats(collate, dtypes):
    """NumPy joins int64 and uint64 to float64, which has 53 bits."""
    large = 2**60 + 1
    rows = [np.array([1, 2], dtype=dtype) for dtype in dtypes]
    rows[dtypes.index("u8")][1] = large
    examples = [{"input_ids": row, "labels": row, "own": row} for row in rows]
    collate = type(collate)(
        0,
        fields={"own": PerToken(torch.int64)},
        **({"max_tokens": 8} if isinstance(collate, PackedCollator) else {}),
    )
    batch = collate(examples)
    for name in ("input_ids", "labels", "own"):
        assert batch[name].max() == large, name
    rollouts = [
        {"prompt_ids": row, "response_ids": row, "rewards": 0, "loss_mask": [1, 1]} for row in rows
    ]
    assert RolloutCollator(0)(rollouts)["input_ids"][dtypes.index("u8")].tolist() == [1, large] * 2


# --- which integers int32 holds ------------------------------------------------------------------


@collators
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", ">i4", ">i8", "u1", "u4", "u8"])
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_ids_of_every_integer_dtype(dtype, num_tokens, collate):
    """In an order of rows that is not that of the examples; the largest of int32 at either end."""
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    rows = [np.full(n, largest, dtype=dtype) for n in (num_tokens, num_tokens + 5)]
    rows[0][1], rows[1][-1] = 1, 0
    collate = PackedCollator(0, max_tokens=700) if isinstance(collate, PackedCollator) else collate
    for given in (
        {
            "input_ids": Ragged(
                np.concatenate(rows, dtype=dtype), [0, len(rows[0]), 2 * num_tokens + 5]
            )
        },
        [{"input_ids": row} for row in rows],
    ):
        batch = collate(given)
        order = batch.row_metadata["example_indices"].values
        assert batch.column("input_ids").dtype == torch.int32
        expected = np.concatenate([rows[i].astype(np.int64) for i in order])
        assert batch.column("input_ids").tolist() == expected.tolist()
    if dtype[-2] == "i":
        negative = np.array([5, 6, -7], dtype=dtype)
        for given in ({"input_ids": Ragged(negative, [0, 3])}, [{"input_ids": negative}]):
            assert message_of(collate, given).startswith("example 0: input_ids is -7 at token 2;")
