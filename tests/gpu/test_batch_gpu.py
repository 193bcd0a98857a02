"""What only a CUDA device shows: pinning, copies that do not wait, and reads that would."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.batch_samples import KINDS, storages_of, tensors_of
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.losses import global_num_loss_tokens, token_loss
from torch_collate_kit.ragged import Ragged

pytestmark = pytest.mark.gpu

ATTENTIONS = ("torch_varlen", "flash_attention_2", "flash_attention_3", "sdpa", "eager")
COLLATORS = {"packed": PackedCollator(0, max_tokens=64), "padded": PaddedCollator(0)}
BATCHES: dict[str, Callable[[], Batch]] = {
    **KINDS,
    "longer packed": lambda: COLLATORS["packed"](examples()),
    "longer padded": lambda: COLLATORS["padded"](examples()),
}
# Of the other the collator does not know the model, so nothing can be said of its positions.
# Shared prefixes have attentions of their own, in tests/test_trees.py.
FOR_A_MODEL = [name for name in BATCHES if name not in ("rollouts", "trees")]


def examples(count: int = 12) -> list[dict[str, Any]]:
    lengths = [5 + 7 * i % 40 for i in range(count)]
    return [{"input_ids": [1 + (i + t) % 30 for t in range(n)]} for i, n in enumerate(lengths)]


@pytest.fixture(params=list(COLLATORS))
def collate(request: pytest.FixtureRequest) -> Any:
    return COLLATORS[request.param]


@pytest.fixture(params=list(BATCHES))
def batch(request: pytest.FixtureRequest) -> Batch:
    return BATCHES[request.param]()


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


def check_equal(batch: Batch, expected: Batch) -> None:
    """The same fields: dtypes and values to the last bit, wherever the two are."""
    assert list(batch) == list(expected)
    assert batch.metadata == expected.metadata
    assert batch.row_metadata.keys() == expected.row_metadata.keys()
    for name, field in batch.items():
        if isinstance(field, Ragged):
            assert field.values.dtype == expected[name].values.dtype, name
            assert field == expected[name], name
        else:
            assert field.dtype == expected[name].dtype, name
            assert torch.equal(field.cpu(), expected[name].cpu()), name


def test_the_detector_detects() -> None:
    value = torch.ones(1, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


# --- fields --------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Batch], Batch]] = {
    "whole": lambda b: b,
    "slice": lambda b: b[1:],
    "step": lambda b: b[::2],
    "first row": lambda b: b[:1],
    "no row": lambda b: b[:0],
    "chunk": lambda b: b.chunk(len(b))[-1],
    "select": lambda b: b.select([len(b) - 1, 0, 0]),
    "pad_rows": lambda b: b.pad_rows(multiple_of=len(b) + 2),
    "cat": lambda b: Batch.cat([b[1:], b[:1]]),
    "with_fields": lambda b: b.with_fields(attention_mask=b["attention_mask"] * 2),
    "divided": lambda b: Batch.of_storage(b.stored().with_divisor(7)),
    "changed": lambda b: _changed(b)[1:],
}


def _changed(batch: Batch) -> Batch:
    batch["input_ids"].add_(3)
    batch["loss_mask"].mul_(2)
    return batch


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_field_is_that_of_the_host_and_nothing_waits(batch: Batch, name: str) -> None:
    moved = batch.to("cuda")
    with no_waiting():
        found = OPERATIONS[name](moved)
        fields = dict(found)
    values = [field.values if isinstance(field, Ragged) else field for field in fields.values()]
    assert {value.device.type for value in values} == {"cuda"}
    expected = OPERATIONS[name](batch)
    check_equal(found, expected)
    check_equal(found.to("cpu"), expected)


def test_each_field_can_be_the_first_one_that_is_made(batch: Batch) -> None:
    for name in batch:
        moved = batch.to("cuda")
        with no_waiting():
            field = moved[name]
        expected = batch[name]
        if isinstance(field, Ragged):
            assert field == expected, name
        else:
            assert torch.equal(field.cpu(), expected), name


def test_what_is_said_of_a_batch_does_not_wait(batch: Batch) -> None:
    moved = batch.to("cuda")
    with no_waiting():
        for shown in (repr, Batch._repr_html_):  # as on a device that cannot be read
            expected = shown(batch.to("meta")).replace("on meta", "on cuda:0").split()
            assert shown(moved).split() == expected
        assert moved.nbytes == batch.nbytes
        assert list(moved) == list(batch)
        assert moved.stored().num_tokens().tolist() == batch.stored().num_tokens().tolist()
        assert (
            moved["sub_seq_lengths"].lengths.tolist() == batch["sub_seq_lengths"].lengths.tolist()
        )
        moved.record_stream(torch.cuda.current_stream())
    assert moved._made.keys() == {"sub_seq_lengths"}


def test_the_memory_of_a_batch_is_that_of_what_it_stores() -> None:
    batch = COLLATORS["packed"](examples(4000))
    assert batch.nbytes < 7 * batch.num_tokens
    COLLATORS["packed"](examples(2)).to("cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    moved = batch.to("cuda")
    stored = torch.cuda.memory_allocated() - before
    assert batch.nbytes <= stored <= batch.nbytes + 64 * len(tensors_of(batch)) + 512
    fields = moved["input_ids"].nbytes + moved["labels"].nbytes
    assert torch.cuda.memory_allocated() - before >= stored + fields
    del moved
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# --- moving --------------------------------------------------------------------------------------


def test_pinning_pins_the_one_buffer(batch: Batch) -> None:
    for given in (batch, batch[1:]):
        pinned = given.pin_memory()
        assert len(storages_of(pinned)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(pinned) if tensor.numel())
        check_equal(pinned, given)
    assert not batch.column("input_ids").is_pinned()
    moved = batch.to("cuda")
    assert moved.pin_memory() is moved


def test_a_pinned_batch_moves_with_one_copy_and_does_not_wait(batch: Batch) -> None:
    pinned = batch.pin_memory()
    with no_waiting(), _HostToDevice() as copies:
        moved = pinned.to("cuda", non_blocking=True)
    assert copies.count == 1
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"cuda"}
    assert len(storages_of(moved)) == 1
    check_equal(moved, batch)
    check_equal(moved.to("cpu"), batch)
    assert moved.to("cuda") is moved


def test_a_slice_moves_with_one_copy(batch: Batch) -> None:
    with _HostToDevice() as copies:
        moved = batch[1:].to("cuda")
    assert copies.count == 1
    check_equal(moved, batch[1:])


def test_a_slice_of_a_pinned_batch_is_moved_from_pinned_memory(batch: Batch) -> None:
    part = batch.pin_memory()[1:]
    sources: list[bool] = []
    to = torch.Tensor.to

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sources.append(self.is_pinned())
        return to(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, no_waiting():
        patch.setattr(torch.Tensor, "to", watched)
        moved = part.to("cuda", non_blocking=True)
    assert sources == [True]
    check_equal(moved, batch[1:])


def test_a_slice_on_the_device_stays_there(batch: Batch) -> None:
    moved = batch.to("cuda")
    with no_waiting(), _HostToDevice() as copies:
        part = moved[1:].to("cuda")
    assert copies.count == 0
    check_equal(part, moved[1:])


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
        assert not batch._made
        assert len(storages_of(batch)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(batch))
        with no_waiting(), _HostToDevice() as copies:
            moved = batch.to("cuda", non_blocking=True)
        assert copies.count == 1
        check_equal(moved, collate(examples(24)[12 * i : 12 * i + 12]))


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
        taken = ragged.take([2, 0])
    assert taken.tolist() == [[3], [1, 2]]
    assert ragged == Ragged.from_rows([[1, 2], [], [3]])


# --- what a model and its loss read --------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("batch", FOR_A_MODEL, indirect=True)
def test_model_inputs_do_not_wait(batch: Batch, attention: str) -> None:
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_mask_is_made_on_the_device_without_waiting(attention: str) -> None:
    batch = COLLATORS["packed"](examples())
    options: dict[str, Any] = {"mask": "block", "sliding_window": 4}
    expected = batch.model_inputs(attention, **options)["attention_mask"]
    on_device = batch.to("cuda")
    with no_waiting():
        masks = on_device.model_inputs(attention, **options)["attention_mask"]
    for name, mask in masks.items():
        assert mask.is_cuda
        assert torch.equal(mask.cpu(), expected[name])


def test_the_loss_does_not_wait_and_is_the_one_of_the_host(batch: Batch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*batch["input_ids"].shape, 512, generator=generator)
    options: dict[str, Any] = {"return_per_token_outputs": True}
    expected, outputs = token_loss(logits, batch, num_loss_tokens=9, **options)
    on_device = logits.cuda().requires_grad_()
    total = torch.tensor(9, device="cuda")
    for denominator in (9, total):
        moved = batch.to("cuda")  # nothing of it was made
        with no_waiting():
            loss = token_loss(on_device, moved, num_loss_tokens=denominator)
            loss.backward()
        assert loss.device.type == "cuda"
        torch.testing.assert_close(loss.cpu(), expected)
    on, moved_outputs = token_loss(on_device, moved, num_loss_tokens=total, **options)
    assert torch.equal(on, loss)
    assert moved_outputs.example_indices.tolist() == outputs.example_indices.tolist()
    for values, other in zip(moved_outputs.nll, outputs.nll, strict=True):
        assert values.tolist() == pytest.approx(other.tolist(), rel=1e-5)
    labels = batch.to("cuda")["labels"] if "labels" in batch else None
    if labels is not None:
        with no_waiting():
            token_loss(on_device, labels, num_loss_tokens=9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_taken_logits_give_the_loss_and_gradient_of_all_of_them(dtype: torch.dtype) -> None:
    batch = BATCHES["packed"]().to("cuda")
    logits = torch.randn(*batch["input_ids"].shape, 512, device="cuda").to(dtype).requires_grad_()
    taken = token_loss(logits, batch, num_loss_tokens=9)
    dense = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    whole = token_loss(logits, dense, num_loss_tokens=9)
    assert torch.equal(taken, whole)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (taken, whole)]
    assert torch.equal(*gradients)


def test_the_memory_of_the_loss_follows_from_the_response_tokens() -> None:
    example = {"input_ids": list(range(1024)), "loss_mask": [0] * 922 + [1] * 102}
    batch = PackedCollator(0, max_tokens=1024)([example] * 4).to("cuda")
    vocabulary = 32_768
    logits = torch.randn(4, 1024, vocabulary, device="cuda", dtype=torch.bfloat16)
    logits.requires_grad_()
    token_loss(logits, batch, num_loss_tokens=408).backward()  # fields and kernels are there
    logits.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = token_loss(logits, batch, num_loss_tokens=408)
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    in_fp32, mebibyte = 4 * 408 * vocabulary, 2**20
    assert in_fp32 <= kept <= in_fp32 + 2 * mebibyte
    assert peak <= logits.nbytes + 4 * in_fp32 + 4 * mebibyte  # the gradient, and a tenth of fp32


def test_loss_tokens_are_counted_without_waiting() -> None:
    batch = COLLATORS["packed"](examples())
    micro_batches = [batch[i : i + 1].to("cuda") for i in range(len(batch))]
    with no_waiting():
        number = global_num_loss_tokens(micro_batches)
    assert number.item() == batch.metadata["num_loss_tokens"]
