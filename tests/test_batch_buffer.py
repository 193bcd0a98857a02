"""Batch: one buffer, moved, pinned, pickled and sent by one copy."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.batch_samples import contents, examples, loose, storages_of, tensors_of
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.ragged import Ragged

# --- one buffer ----------------------------------------------------------------------------------


def test_what_is_stored_goes_into_one_buffer(collated: Batch) -> None:
    for batch in (collated, collated[1:], loose(), loose()[1:]):
        sent = pickle.loads(pickle.dumps(batch))
        assert len(storages_of(sent)) == 1
        start = min(tensor.data_ptr() for tensor in tensors_of(sent))
        offsets = [tensor.data_ptr() - start for tensor in tensors_of(sent)]
        assert [offset % 64 for offset in offsets] == [0] * len(offsets)
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors_of(sent))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_every_dtype_and_shape_travels() -> None:
    dtypes = [torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.float64, torch.int32]
    fields: dict[str, Any] = {str(d): torch.full((3, 5), k).to(d) for k, d in enumerate(dtypes)}
    offsets = np.array([0, 2, 2, 7])
    fields["ragged"] = Ragged(torch.arange(7, dtype=torch.int16), offsets)
    fields["patches"] = Ragged(torch.arange(28.0).view(7, 4), offsets)
    fields["blocks"] = Ragged(torch.arange(42).view(7, 2, 3), offsets)
    fields["flat"] = torch.arange(3.0)
    fields["no columns"] = torch.zeros(3, 0)
    batch = Batch(fields, row_metadata={"uids": ["a", "b", "c"]})
    sent = pickle.loads(pickle.dumps(batch))
    assert sent == batch
    assert list(sent) == list(fields)
    assert {str(dtype): sent[str(dtype)].dtype for dtype in dtypes} == {str(d): d for d in dtypes}
    assert sent["blocks"][2].shape == (5, 2, 3)
    assert sent["no columns"].shape == (3, 0)
    for part, size in ((batch[1:], 5), (batch[:2], 2), (batch[1:2], 0)):
        sent = pickle.loads(pickle.dumps(part))
        assert sent == part
        assert sent["blocks"].values.shape == (size, 2, 3)
        assert len(storages_of(sent)) == 1


class _Copies(TorchFunctionMode):
    """Names the functions called that copy data (a dispatch mode would import all of dynamo)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("to", "copy_", "clone", "cat", "cpu", "contiguous", "pin_memory"):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_batch_in_one_buffer_moves_with_one_copy(collated: Batch) -> None:
    collated = pickle.loads(pickle.dumps(collated))
    with _Copies() as copies:
        moved = collated.to("meta", non_blocking=True)
    assert copies.seen == ["to"]
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert moved.metadata == collated.metadata
    assert moved["sub_seq_lengths"].lengths.tolist() == collated["sub_seq_lengths"].lengths.tolist()
    assert moved["labels"].shape == collated["labels"].shape


def test_a_batch_that_was_moved_does_not_keep_the_memory_that_it_came_from(packed: Batch) -> None:
    sent = pickle.loads(pickle.dumps(packed))
    buffer = sent._storage.buffer[0].numpy()
    for part in (sent, sent[1:]):
        moved = part.to("meta")
        for counts in moved._storage.columns.placement.segments.values():
            assert not np.shares_memory(counts.values, buffer)


def test_a_slice_and_loose_tensors_are_gathered_and_then_move_with_one_copy(packed: Batch) -> None:
    for batch in (packed[1:], loose()):
        with _Copies() as copies:
            batch.to("meta")
        assert copies.seen.count("to") == 1
    assert packed.to("cpu", non_blocking=True) is packed
    assert packed.to("meta")[1:].to("meta")["input_ids"].shape == (2, 8)  # not by the host
    gathered = packed[1:].to("cpu")
    assert contents(gathered) == contents(packed[1:])


def test_pinning_pins_the_one_buffer(packed: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    for batch in (packed, packed[1:], loose()):
        pinned.clear()
        result = batch.pin_memory()
        assert len(pinned) == 1
        assert storages_of(result) == {pinned[0].untyped_storage().data_ptr()}
        assert contents(result) == contents(batch)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_rows_of_a_pinned_batch_are_gathered_in_pinned_memory(
    packed: Batch, monkeypatch: pytest.MonkeyPatch, non_blocking: bool
) -> None:
    """A copy that is not to wait waits for pageable memory."""
    asked: list[bool] = []
    empty = torch.empty

    def counted(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    packed[1:].to("meta", non_blocking=non_blocking)
    assert not any(asked)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    packed[1:].to("meta", non_blocking=non_blocking)
    assert any(asked) == non_blocking


# --- pickling and processes ----------------------------------------------------------------------


class _CountTensors(pickle.Pickler):
    """A tensor is what crosses to another process with a handle of its own."""

    tensors = 0

    def reducer_override(self, obj: Any) -> Any:
        self.tensors += isinstance(obj, torch.Tensor)
        return NotImplemented


@pytest.mark.parametrize("index", [slice(None), slice(1, 3), slice(0, 0)])
def test_a_pickle_is_one_tensor_and_the_same_batch(collated: Batch, index: slice) -> None:
    batch = collated[index]
    file = io.BytesIO()
    pickler = _CountTensors(file)
    pickler.dump(batch)
    assert pickler.tensors == 1
    loaded = pickle.loads(file.getvalue())
    assert isinstance(loaded, Batch)
    assert contents(loaded) == contents(batch)
    assert len(storages_of(loaded)) == 1


@pytest.mark.parametrize("kind", [PackedCollator(0, max_tokens=64), PaddedCollator(0)])
def test_the_pickle_of_a_slice_holds_its_rows_alone(kind: Any) -> None:
    batch = kind(examples([64] * 200))
    batch["labels"], batch["loss_mask"]  # dense fields are made again where they are read
    row = 64 * 5  # an int32 and a bool per token
    whole, part = (len(pickle.dumps(b)) for b in (batch, batch[100:102]))
    metadata = 4 * 200 * 8  # four ragged columns, an int64 per sub-sequence of all rows
    assert 200 * row < whole < 260 * row + metadata
    assert part < 2 * row + metadata + 6000


def test_copies(collated: Batch) -> None:
    labels = collated["labels"]
    deep, shallow = copy.deepcopy(collated), copy.copy(collated)
    assert shallow["labels"] is labels
    assert contents(deep) == contents(shallow) == contents(collated)
    assert storages_of(shallow) == storages_of(collated)
    before = contents(collated)
    deep["input_ids"][:] = 1
    deep.metadata["num_loss_tokens"] = 0
    deep.row_metadata["example_indices"].values[:] = 0
    assert contents(collated) == before
    assert contents(copy.deepcopy(collated[1:])) == contents(collated[1:])


def test_accelerate_moves_it_as_a_batch(packed: Batch) -> None:
    operations = pytest.importorskip("accelerate.utils")
    moved = operations.send_to_device(packed, torch.device("meta"), non_blocking=True)
    assert isinstance(moved, Batch)
    assert moved["input_ids"].device.type == "meta"
    assert moved.metadata == packed.metadata
    assert operations.send_to_device(packed, "cpu") is packed
    assert operations.find_batch_size(packed) == 3
