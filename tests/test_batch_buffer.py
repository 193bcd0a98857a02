"""Batch: one buffer, moved, pinned, pickled and sent by one copy."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from tests.batch_samples import KINDS, contents, examples, loose, storages_of, tensors_of
from torch_collate_kit import Batch, PackedCollator, PerExample
from torch_collate_kit.collators import PaddedCollator
from torch_collate_kit.ragged import Ragged


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


FIELDS = {"domain": PerExample(torch.int64)}


def of_width(width: int) -> list[Batch]:
    """Bytes and int16s beside int64s, which end at every remainder of 8."""
    example = {"input_ids": [5] * width, "domain": 2**40}
    columns = {"ids": torch.arange(width)[:, None], "kept": torch.ones(width, 1, dtype=torch.bool)}
    return [
        PackedCollator(0, max_tokens=9, train_all=True, fields=FIELDS)([example]),
        Batch(columns),
    ]


BATCHES = {**KINDS, **{str(n): lambda n=n: of_width(n) for n in range(1, 10)}}


@pytest.mark.parametrize("name", BATCHES)
def test_every_field_can_be_saved_and_loaded(name: str) -> None:
    """It is saved with the buffer, which must hold a whole number of its entries."""
    made: Any = BATCHES[name]()
    for batch in made if isinstance(made, list) else [made]:
        for part in (batch, batch[:1], pickle.loads(pickle.dumps(batch[:1]))):
            for field in part.values():
                tensor = field.values if isinstance(field, Ragged) else field
                file = io.BytesIO()
                torch.save(tensor, file)
                file.seek(0)
                loaded = torch.load(file, weights_only=True)
                assert loaded.dtype == tensor.dtype
                assert torch.equal(loaded, tensor)


ODD_TENSORS = {
    "half": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),  # 4 bytes, then a gap
    "transposed": torch.arange(6).view(2, 3).T,
    "every second": torch.arange(12.0)[::2],
    "expanded": torch.tensor([[1], [2]], dtype=torch.int16).expand(2, 4),
    "a part": torch.arange(20)[5:9],
    "alone": torch.tensor(7, dtype=torch.int32).expand(1),
    "alone in rows": torch.tensor([[[7.0]]]).expand(1, 1, 1).as_strided((1, 1), (0, 0)),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "trained": torch.tensor([0.5, 1.5], requires_grad=True),
    "empty": torch.zeros(3, 0, dtype=torch.float64),
    "large": torch.arange(100_000),
    "bool": torch.tensor([True, False, True]),
}


def all_kinds(numbers: list[int]) -> dict[str, Batch]:
    """A batch of every kind, and one that differs from number to number."""
    made = {name: make() for name, make in KINDS.items()}
    numbered = PaddedCollator(0)(examples([numbers[0] + 1, 3, 2]))
    return made | {"loose": loose(), "numbered": numbered}


def large(numbers: list[int]) -> Batch:
    """2.4 MB, all of it the number; and how many descriptors the worker has open."""
    batch = Batch({"x": torch.full((300_000,), numbers[0])})
    batch.metadata["descriptors"] = len(os.listdir("/proc/self/fd"))
    return batch


def set_strategy(strategy: str, _worker: int) -> None:
    torch.multiprocessing.set_sharing_strategy(strategy)


def loader_of(collate: Any, count: int, strategy: str = "file_descriptor", **options: Any) -> Any:
    start = partial(set_strategy, strategy)
    numbers = list(range(count))
    return DataLoader(numbers, batch_size=1, collate_fn=collate, worker_init_fn=start, **options)


def shared_mappings() -> int:
    """Of this process: memory that torch shares, whatever the strategy."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")


@pytest.mark.parametrize(
    ("context", "strategy"),
    [
        ("fork", "file_descriptor"),
        ("fork", "file_system"),
        pytest.param("spawn", "file_descriptor", marks=pytest.mark.release),
        pytest.param("forkserver", "file_system", marks=pytest.mark.release),
    ],
)
def test_batches_arrive_as_they_were_collated(context: str, strategy: str) -> None:
    options = {"num_workers": 2, "multiprocessing_context": context}
    sent = list(loader_of(all_kinds, 4, strategy, **options))
    assert len(sent) == 4  # all of them are alive, and their workers are gone
    for number, batches in enumerate(sent):
        for name, batch in all_kinds([number]).items():
            assert contents(batches[name]) == contents(batch)
            assert len(storages_of(batches[name])) == 1
        assert batches["numbered"].column("input_ids").is_shared()


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_every_batch_has_memory_of_its_own_and_frees_it(strategy: str) -> None:
    gc.collect()  # what earlier tests left in cycles
    before = shared_mappings()
    loader = loader_of(large, 12, strategy, num_workers=1, persistent_workers=True)
    fewest_descriptors = []
    for _ in range(2):
        batches = list(loader)
        assert shared_mappings() == before + 12
        batches[3]["x"][:] = -1
        assert [batch["x"].unique().tolist() for batch in batches] == [
            [-1 if number == 3 else number] for number in range(12)
        ]
        fewest_descriptors.append(min(batch.metadata["descriptors"] for batch in batches))
        del batches
        assert shared_mappings() == before
    # a batch that is not received yet has a few; a worker that kept them would have 12 more
    assert fewest_descriptors[1] < fewest_descriptors[0] + 6, "the worker keeps what it sent"


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Any:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield request.param
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.fixture
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a DataLoader worker."""
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", object())


@pytest.mark.usefixtures("in_a_worker")
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_shared_memory_has_the_bytes_of_odd_tensors(name: str, strategy: str) -> None:
    expected = ODD_TENSORS[name]
    ragged = Ragged.from_rows([np.arange(i % 3, dtype=np.int16) for i in range(len(expected))])
    batch = Batch({name: expected, "rows": ragged})
    assert batch.stored().__reduce__()[1][0].is_shared()
    received = pickle.loads(pickle.dumps(batch))
    assert received["rows"] == ragged
    assert received[name].dtype == expected.dtype
    assert torch.equal(received[name], expected.detach())
    assert received[name].is_contiguous()


def test_only_a_worker_pickles_into_shared_memory() -> None:
    assert not PaddedCollator(0)(examples()).stored().__reduce__()[1][0].is_shared()


def no_memory(_worker: int) -> None:
    def fail(size: int) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    torch.UntypedStorage._new_shared = staticmethod(fail)


def many_rows(numbers: list[int]) -> Batch:
    """Row metadata and offsets of 4,000 rows."""
    own = {"pairs": np.arange(8000).reshape(4000, 2) + numbers[0], "scores": torch.arange(4000.0)}
    words = Ragged.from_rows([[i] * (i % 3) for i in range(4000)])
    metadata = {"history": {"losses": np.arange(300.0)}, "seed": numbers[0]}
    return Batch({"words": words}, row_metadata=own, metadata=metadata)


@pytest.mark.usefixtures("in_a_worker")
def test_large_arrays_are_in_shared_memory_and_not_in_the_message() -> None:
    """A message of more than the 64 KB of a pipe waits in the worker until it is read."""
    collated = PaddedCollator(0)(examples([3, 2] * 2000))
    for batch, limit in ((collated, 3_000), (many_rows([1]), 25_000)):  # scores are a tensor
        _, (buffer, stops, message) = batch.stored().__reduce__()
        sizes = np.diff(stops)
        assert sizes.sum() > 32_000
        assert sizes.min() >= 2048
        assert len(message) < limit
        assert buffer.nbytes >= batch.stored().nbytes + sizes.sum()
        received = pickle.loads(pickle.dumps(batch))
        assert received == batch
        assert pickle.loads(pickle.dumps(received)) == batch
        assert list(received.row_metadata) == list(batch.row_metadata)


def unpicklable(numbers: list[int]) -> Batch:
    return Batch({"x": torch.zeros(10)}, metadata={"score": lambda: numbers})


@pytest.mark.parametrize(
    ("collate", "init", "message"),
    [
        (large, no_memory, r"batch of 2,400,000 bytes: .*unable .* --shm-size"),
        (unpicklable, None, r"of 40 bytes: .*lambda.*; take what pickle"),
    ],
)
def test_what_cannot_be_sent_is_an_error_where_it_is_received(
    collate: Any, init: Any, message: str
) -> None:
    """It was a traceback on the worker's stderr, and a loop that waited for ever."""
    options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": init, "timeout": 120}
    batches = iter(DataLoader(list(range(4)), collate_fn=collate, **options))
    for _ in range(2):  # the worker goes on
        with pytest.raises(RuntimeError, match=message):
            next(batches)
