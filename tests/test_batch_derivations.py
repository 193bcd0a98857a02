"""What walks, moves or compares a batch makes no dense field; a field is made when it is read."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from tests.batch_samples import KINDS, masked_examples, rollouts
from torch_collate_kit.batch import Batch, dense
from torch_collate_kit.batch import batch as batch_module
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.loading.device_copy import DeviceCopy
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
    "counts": lambda b: (b.stored().num_tokens(), b.stored().num_loss_tokens()),
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


@pytest.mark.parametrize(
    ("collate", "data", "num_workers"),
    [
        (PaddedCollator(0), masked_examples(), 0),
        (PackedCollator(0, max_tokens=8), masked_examples(), 1),
        (RolloutCollator(0), rollouts(), 0),
    ],
    ids=["padded", "packed", "rollouts"],
)
def test_a_loader_makes_none(collate: Any, data: Any, num_workers: int, made: list[str]) -> None:
    sampler = PrefetchingSampler(len(data), batch_size=2, seed=0)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers)
    with PrefetchLoader(loader, device="meta") as source:
        batches = list(source.steps(3))
    assert made == []
    for batch in loader:  # what a worker made would be here, since it is stored
        batches.append(batch)
        assert batch._made == {}
        assert batch.stored().given == {}
    assert len(batches) > 3


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
