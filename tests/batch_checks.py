"""What every batch is checked for: the oracle's cells, the dtypes of the contract, one buffer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged

DTYPES = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "attention_mask": torch.int64,
    "loss_mask": torch.float32,
    "response_mask": torch.int64,
    "rewards": torch.float32,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
    "rollout_expert_indices": torch.int16,
    "router_padding_mask": torch.bool,
    "pixel_values": torch.float32,
    "image_grid_thw": torch.int64,
    "image_sizes": torch.int64,
    "batch_num_images": torch.int64,
    "pixel_attention_mask": torch.int64,
    "mrope_position_ids": torch.int64,
    "token_type_ids": torch.int64,
    "sub_seq_lengths": torch.int64,
    "cu_seq_lens": torch.int32,
}


def assert_equals_oracle(batch: Batch, expected: dict[str, Any]) -> None:
    """Every field and every metadata key that the oracle names, and no field besides."""
    assert set(batch) == set(expected) - {"metadata"}
    for name in batch:
        if isinstance(expected[name], torch.Tensor):
            assert torch.equal(batch[name], expected[name]), (name, batch[name], expected[name])
        else:
            assert batch[name].tolist() == expected[name], name
    for key, value in expected["metadata"].items():
        found = (batch.row_metadata if key in batch.row_metadata else batch.metadata)[key]
        if isinstance(found, Ragged):
            assert found.values.dtype in (np.int64, torch.int64), key
            found = found.tolist()
        assert found == value, (key, found, value)
        assert not isinstance(found, np.generic), f"{key} is {type(found)}, not a Python number"


def assert_contract_dtypes(batch: Batch) -> None:
    for name, field in batch.items():
        values = field.values if isinstance(field, Ragged) else field
        assert values.dtype == DTYPES[name], name


def assert_one_buffer(batch: Batch) -> None:
    """What is stored are views of one allocation, and no byte belongs to two of them."""
    pointers, spans = set(), []
    for field in batch.stored().items().values():
        values = field.values if isinstance(field, Ragged) else field
        pointers.add(values.untyped_storage().data_ptr())
        assert values.is_contiguous()
        if values.numel():
            start = values.data_ptr()
            assert (start - values.untyped_storage().data_ptr()) % 64 == 0
            spans.append((start, start + values.numel() * values.element_size()))
    assert len(pointers) == 1
    spans.sort()
    assert all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))


def assert_same_batch(batch: Batch, other: Batch) -> None:
    assert list(batch) == list(other)
    for mine, theirs in zip(
        (batch, batch.metadata, batch.row_metadata),
        (other, other.metadata, other.row_metadata),
        strict=True,
    ):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert same_value(mine[key], theirs[key]), key


def assert_round_trips(batch: Batch, cut: int) -> None:
    """Pickling gives the same batch in one buffer; so does slicing at `cut` and concatenating."""
    loaded = pickle.loads(pickle.dumps(batch))
    assert loaded == batch
    assert not loaded._made, "comparing made a dense field"
    assert_same_batch(loaded, batch)
    assert_one_buffer(loaded)
    head, tail = batch[:cut], batch[cut:]
    assert len(head) + len(tail) == len(batch)
    for part in (head, tail, batch.pad_rows(multiple_of=len(batch) + 1)):
        counts = [sum(row) for row in part.row_metadata["num_trained"].tolist()]
        if "loss_mask" in part:
            assert counts == (part["loss_mask"] != 0).sum(dim=1).tolist()
    assert_same_batch(Batch.cat([head, tail]), batch)
    assert_same_batch(Batch.cat([pickle.loads(pickle.dumps(head)), tail]), batch)


def frozen(value: Any) -> Any:
    """A deep copy to compare with later."""
    return copy.deepcopy(value)


def overwrite(given: Any) -> None:
    """Change every number of arrays and tensors in place, as a user may after collation."""
    if isinstance(given, Ragged):
        overwrite(given.values)
    elif isinstance(given, Mapping | list | tuple):
        for value in given.values() if isinstance(given, Mapping) else given:
            overwrite(value)
    elif isinstance(given, torch.Tensor):
        with torch.no_grad():
            given.copy_(given == 0)
    elif isinstance(given, np.ndarray) and given.flags.writeable and given.dtype != object:
        given[...] = given == 0


def same_value(value: Any, other: Any) -> bool:
    """Equal in type, dtype and contents, all the way down."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Ragged):
        return same_value(value.values, other.values) and value == other
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if isinstance(value, Mapping):
        return list(value) == list(other) and all(same_value(value[k], other[k]) for k in value)
    if isinstance(value, list | tuple):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(same_value(a, b) for a, b in pairs)
    return bool(value == other)
