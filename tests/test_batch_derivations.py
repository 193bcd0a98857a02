"""What walks, moves or compares a batch makes no dense field; a field is made when it is read."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from tests.batch_samples import KINDS, tensors_of
from tests.devices import NoWaiting, no_waiting
from torch_collate_kit.batch import Batch, dense
from torch_collate_kit.batch import batch as batch_module
from torch_collate_kit.loading.device_copy import DeviceCopy
from torch_collate_kit.losses import token_loss
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.testing import batch_digest


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fields that were made, in this process."""
    names: list[str] = []

    def counted(name: str, *args: Any) -> Any:
        names.append(name)
        return dense.make_field(name, *args)

    monkeypatch.setattr(batch_module, "make_field", counted)
    return names


@pytest.fixture(params=list(KINDS))
def batch(request: pytest.FixtureRequest) -> Batch:
    return KINDS[request.param]()


class FakeStream:
    """Of a device that is not there."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        pass


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The current stream; tensors that are recorded for it are in its list."""
    fake = FakeStream()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, to: to.recorded.append(self))
    return fake


def copies() -> DeviceCopy:
    copy_ = DeviceCopy(torch.device("meta"))
    copy_._stream = FakeStream()  # type: ignore[assignment]
    return copy_


SILENT: dict[str, Callable[[Batch], Any]] = {
    "repr": repr,
    "html": lambda b: b._repr_html_(),
    "len and names": lambda b: (len(b), list(b), "labels" in b, b.keys(), b.nbytes),
    "slice": lambda b: b[1:][:1],
    "step": lambda b: b[::2],
    "chunk": lambda b: b.chunk(len(b)),
    "select": lambda b: b.select([1, 0, 1]),
    "cat": lambda b: Batch.cat([b[:1], b[1:]]),
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "pickled slice": lambda b: pickle.loads(pickle.dumps(b[1:])),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "==": lambda b: (b == pickle.loads(pickle.dumps(b)), b == copy.copy(b), b[:1] == b[1:2]),
    "digest": batch_digest,
    "to": lambda b: b.to("meta"),
    "with_fields": lambda b: b.with_fields(more=torch.zeros(len(b))),
    "counts": lambda b: b.stored().num_tokens(),
    "divide_loss_mask": lambda b: Batch.of_storage(b.stored().with_divisor(3)),
}


@pytest.mark.parametrize("name", list(SILENT))
def test_no_field_is_made(batch: Batch, made: list[str], name: str) -> None:
    assert SILENT[name](batch) is not None
    assert made == []


def test_pinning_and_copying_to_a_device_make_none(
    batch: Batch, made: list[str], stream: FakeStream
) -> None:
    pinned: Any = pin_memory(batch)  # what a DataLoader calls
    copy_ = copies()
    received = copy_.receive(copy_.send(pinned))
    assert made == []
    assert len(stream.recorded) >= 3
    assert {tensor.device.type for tensor in stream.recorded} == {"meta"}
    assert received["input_ids"].device.type == "meta"
    assert made == ["input_ids"]


def test_a_field_that_was_made_is_recorded_with_what_it_is_made_of(
    batch: Batch, stream: FakeStream
) -> None:
    moved = batch.to("meta")
    ids, positions = moved["input_ids"], moved["position_ids"]
    copy_ = copies()
    assert copy_.receive(copy_.send(moved)) is moved
    recorded = {id(tensor) for tensor in stream.recorded}
    assert {id(ids), id(positions)} <= recorded
    assert {id(tensor) for tensor in moved._shared.values()} <= recorded


class Held:
    """A batch with a ``.to()`` of its own, whose tensors nobody else sees."""

    def to(self, device: object, *, non_blocking: bool = False) -> Held:
        return self


class Recording(Held):
    def record_stream(self, stream: object) -> None:
        pass


def test_an_object_whose_memory_might_be_given_to_the_next_batch_is_refused(
    stream: FakeStream,
) -> None:
    for held in (Held(), {"x": [torch.ones(2), (Held(),)]}):
        with pytest.raises(TypeError) as caught:
            copies().send(held)
        assert str(caught.value) == (
            "the batch holds a Held, which has .to() but is no tensor, mapping, list or tuple: "
            "which memory its copy on the CUDA device takes cannot be seen; collate into one of "
            "these, or give Held a record_stream(stream) that calls it on each of its tensors"
        )
    seen = {"x": Recording(), "n": 3, "s": "a", "none": None, "t": torch.ones(1)}
    copy_ = copies()
    copy_.receive(copy_.send([seen]))
    assert len(stream.recorded) == 1


@pytest.fixture
def changed(batch: Batch) -> Iterator[Batch]:
    batch["position_ids"].add_(1)
    return batch


def test_batches_with_changes_make_only_what_they_store(changed: Batch, made: list[str]) -> None:
    for name, operation in SILENT.items():
        if name != "==":
            operation(changed)
            assert made == [], name


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "loss_mask"])
def test_a_changed_field_counts_in_comparisons_and_digests(name: str, batch: Batch) -> None:
    other = copy.deepcopy(batch)
    digest = batch_digest(batch)
    assert other == batch
    before = other[name].clone()
    other[name][0, -1] += 1
    assert other != batch
    assert batch != other
    assert batch_digest(other) != digest
    other[name].copy_(before)
    assert other == batch, "the same values, stored in another form"


ATTENTIONS = ("torch_varlen", "flash_attention_2", "sdpa", "eager")
# Of rollouts the collator does not know the model, so nothing can be said of its positions.
# Shared prefixes have attentions of their own, in tests/test_trees.py.
FOR_A_MODEL = [name for name in KINDS if name not in ("rollouts", "trees")]
DEVICE = pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])


def _changed(batch: Batch) -> Batch:
    batch["input_ids"].add_(3)
    batch["loss_mask"].mul_(2)
    return batch


OPERATIONS: dict[str, Callable[[Batch], Batch]] = {
    "whole": lambda b: b,
    "slice": lambda b: b[1:],
    "step": lambda b: b[::2],
    "no row": lambda b: b[:0],
    "chunk": lambda b: b.chunk(len(b))[-1],
    "select": lambda b: b.select([len(b) - 1, 0, 0]),
    "pad_rows": lambda b: b.pad_rows(multiple_of=len(b) + 2),
    "cat": lambda b: Batch.cat([b[1:], b[:1]]),
    "with_fields": lambda b: b.with_fields(attention_mask=b["attention_mask"] * 2),
    "divided": lambda b: Batch.of_storage(b.stored().with_divisor(7)),
    "changed": lambda b: _changed(b)[1:],
}


def check_equal(found: Any, expected: Any, device: str, name: str) -> None:
    """Check shape and dtype, on the device; where it has values, these to the last bit."""
    if isinstance(expected, Ragged):
        assert found.lengths.tolist() == expected.lengths.tolist(), name
        found, expected = found.values, expected.values
    if not isinstance(expected, torch.Tensor):
        assert found == expected, name
        return
    assert found.device.type == device, name
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    if device == "cuda":
        assert torch.equal(found.cpu(), expected), name


def waits() -> dict[str, Callable[[], object]]:
    value = torch.ones(2, device="meta")
    return {
        "item": lambda: torch.ones(1).item(),
        "nonzero": lambda: torch.ones(1).nonzero(),
        "mask": lambda: torch.ones(1)[torch.ones(1) > 0],
        "to the device": lambda: torch.ones(2).to("meta"),
        "copied there": lambda: value.copy_(torch.ones(2)),
    }


@pytest.mark.parametrize("name", waits())
def test_the_mode_sees_what_waits(name: str) -> None:
    with pytest.raises(AssertionError), NoWaiting():
        waits()[name]()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
@DEVICE
def test_no_field_waits_for_the_device(device: str, kind: str, name: str) -> None:
    batch = KINDS[kind]()
    moved = batch.to(device)
    with no_waiting(device):
        found = OPERATIONS[name](moved)
        fields = dict(found)
    expected = OPERATIONS[name](batch)
    assert list(fields) == list(expected)
    for key, field in fields.items():
        check_equal(field, expected[key], device, key)
    assert {tensor.device.type for tensor in tensors_of(found)} == {device}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", FOR_A_MODEL)
@DEVICE
def test_model_inputs_and_the_loss_do_not_wait(device: str, kind: str, attention: str) -> None:
    batch = KINDS[kind]()
    moved = batch.to(device)
    logits = torch.randn(*batch["input_ids"].shape, 512, generator=torch.Generator().manual_seed(0))
    on_device = logits.to(device).requires_grad_()
    with no_waiting(device):
        inputs = moved.model_inputs(attention, labels=False)
        loss = token_loss(on_device, moved, num_loss_tokens=7)
        loss.backward()
    expected = batch.model_inputs(attention, labels=False)
    assert list(inputs) == list(expected)
    for name, value in inputs.items():
        check_equal(value, expected[name], device, name)
    if device == "cuda":
        torch.testing.assert_close(loss.cpu(), token_loss(logits, batch, num_loss_tokens=7))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_mask_is_made_on_the_device_without_waiting(attention: str) -> None:
    batch = KINDS["packed"]()
    options: dict[str, Any] = {"mask": "block", "sliding_window": 4}
    moved = batch.to("cuda")
    with no_waiting("cuda"):
        masks = moved.model_inputs(attention, **options)["attention_mask"]
    for name, mask in batch.model_inputs(attention, **options)["attention_mask"].items():
        check_equal(masks[name], mask, "cuda", name)
