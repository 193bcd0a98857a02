"""What only a CUDA device shows: pinning, copies that do not wait, and reads that would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.losses import global_num_loss_tokens, token_loss
from torch_collate_kit.ragged import Ragged

pytestmark = pytest.mark.gpu

ATTENTIONS = ("torch_varlen", "flash_attention_2", "flash_attention_3", "sdpa", "eager")
COLLATORS = [PackedCollator(0, max_tokens=64), PaddedCollator(0)]


def examples(count: int = 12) -> list[dict[str, Any]]:
    lengths = [5 + 7 * i % 40 for i in range(count)]
    return [{"input_ids": [1 + (i + t) % 30 for t in range(n)]} for i, n in enumerate(lengths)]


@pytest.fixture(params=COLLATORS, ids=["packed", "padded"])
def collate(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _HostToDevice(TorchDispatchMode):
    """Counts copies from the host to the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = args[0] if func._schema.name == "aten::_to_copy" else args[1]
            self.count += source.device.type == "cpu" and result.device.type == "cuda"
        return result


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    return [field.values if isinstance(field, Ragged) else field for field in batch.values()]


def storages_of(batch: Batch) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}


def check_equal(batch: Batch, expected: Batch) -> None:
    assert list(batch) == list(expected)
    assert batch.metadata == expected.metadata
    for name, field in batch.items():
        if isinstance(field, Ragged):
            assert field == expected[name], name
        else:
            assert torch.equal(field.cpu(), expected[name].cpu()), name


def test_the_detector_detects() -> None:
    value = torch.ones(1, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


def test_pinning_pins_the_one_buffer(collate: Any) -> None:
    batch = collate(examples())
    for given in (batch, batch[1:]):
        pinned = given.pin_memory()
        assert len(storages_of(pinned)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(pinned))
        check_equal(pinned, given)
    assert not batch["input_ids"].is_pinned()


def test_a_pinned_batch_moves_with_one_copy_and_does_not_wait(collate: Any) -> None:
    batch = collate(examples()).pin_memory()
    with no_waiting(), _HostToDevice() as copies:
        moved = batch.to("cuda", non_blocking=True)
    assert copies.count == 1
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"cuda"}
    assert len(storages_of(moved)) == 1
    check_equal(moved, batch)
    check_equal(moved.to("cpu"), batch)
    assert moved.to("cuda") is moved


def test_a_slice_moves_with_one_copy(collate: Any) -> None:
    batch = collate(examples())
    with _HostToDevice() as copies:
        moved = batch[1:].to("cuda")
    assert copies.count == 1
    check_equal(moved, batch[1:])


def test_a_slice_of_a_pinned_batch_does_not_wait(collate: Any) -> None:
    part = collate(examples()).pin_memory()[1:]
    assert part._in_one_buffer()["input_ids"].is_pinned()
    with no_waiting():
        part.to("cuda", non_blocking=True)


def test_a_slice_on_the_device_stays_there(collate: Any) -> None:
    moved = collate(examples()).to("cuda")
    with no_waiting(), _HostToDevice() as copies:
        part = moved[1:].to("cuda")
    assert copies.count == 0
    check_equal(part, moved[1:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_model_inputs_do_not_wait(collate: Any, attention: str) -> None:
    batch = collate(examples())
    moved = batch.to("cuda")
    for rows in (slice(None), slice(1, None), slice(0, 1)):
        with no_waiting():
            inputs = moved[rows].model_inputs(attention)
        expected = batch[rows].model_inputs(attention)
        assert list(inputs) == list(expected)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                assert value.device.type == "cuda"
                assert torch.equal(value.cpu(), expected[name]), name
            else:
                assert value == expected[name]


def test_slices_and_shapes_do_not_wait(collate: Any) -> None:
    moved = collate(examples()).to("cuda")
    with no_waiting():
        for part in moved.chunk(len(moved)):
            assert len(part) == 1
            assert part["sub_seq_lengths"].lengths.sum() >= 1
        repr(moved)


def test_the_loss_does_not_wait_and_is_the_one_of_the_host(collate: Any) -> None:
    batch = collate(examples())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*batch["labels"].shape, 32, generator=generator)
    expected, outputs = token_loss(logits, batch, num_loss_tokens=9, return_per_token_outputs=True)
    moved = batch.to("cuda")
    on_device = logits.cuda().requires_grad_()
    total = torch.tensor(9, device="cuda")
    for denominator in (9, total):
        with no_waiting():
            loss = token_loss(on_device, moved, num_loss_tokens=denominator)
            loss.backward()
        assert loss.device.type == "cuda"
        torch.testing.assert_close(loss.cpu(), expected)
    on, moved_outputs = token_loss(
        on_device, moved, num_loss_tokens=9, return_per_token_outputs=True
    )
    torch.testing.assert_close(on.cpu(), expected)
    assert moved_outputs.example_indices.tolist() == outputs.example_indices.tolist()
    for values, other in zip(moved_outputs.nll, outputs.nll, strict=True):
        assert values.tolist() == pytest.approx(other.tolist(), rel=1e-5)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataloader_pins_the_whole_batch(collate: Any, num_workers: int) -> None:
    loader = DataLoader(
        examples(24),
        batch_size=12,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=True,
    )
    batches = list(loader)
    assert len(batches) == 2
    for i, batch in enumerate(batches):
        assert isinstance(batch, Batch)
        assert len(storages_of(batch)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(batch))
        check_equal(batch, collate(examples(24)[12 * i : 12 * i + 12]))
        with no_waiting(), _HostToDevice() as copies:
            batch.to("cuda", non_blocking=True)
        assert copies.count == 1


def test_a_copy_on_another_stream_arrives_whole(collate: Any) -> None:
    batch = collate(examples(200)).pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = batch.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    check_equal(moved, batch)


def test_ragged_values_move_and_offsets_stay() -> None:
    ragged = Ragged.from_rows([[1, 2], [], [3]]).to("cuda")
    assert ragged.values.device.type == "cuda"
    with no_waiting():
        assert ragged.lengths.tolist() == [2, 0, 1]
        assert [len(row) for row in ragged] == [2, 0, 1]
    assert ragged.take([2, 0]).tolist() == [[3], [1, 2]]
    assert ragged == Ragged.from_rows([[1, 2], [], [3]])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_mask_is_made_on_the_device_without_waiting(attention: str) -> None:
    batch = PackedCollator(0, max_tokens=64)(examples())
    options: dict[str, Any] = {"mask": "block", "sliding_window": 4}
    expected = batch.model_inputs(attention, **options)["attention_mask"]
    on_device = batch.to("cuda")
    with no_waiting():
        masks = on_device.model_inputs(attention, **options)["attention_mask"]
    for name, mask in masks.items():
        assert mask.is_cuda
        assert torch.equal(mask.cpu(), expected[name])


def test_loss_tokens_are_counted_without_waiting() -> None:
    batch = PackedCollator(0, max_tokens=64)(examples())
    micro_batches = [batch[i : i + 1].to("cuda") for i in range(len(batch))]
    with no_waiting():
        number = global_num_loss_tokens(micro_batches)
    assert number.item() == batch.metadata["num_loss_tokens"]
