"""A Batch on its way out of a DataLoader worker: in shared memory, filled once, freed with it."""

from __future__ import annotations

import os
import pickle
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.batch_samples import KINDS, contents, examples, loose, storages_of
from torch_collate_kit.batch import Batch, storage
from torch_collate_kit.batch.buffer import carve, gather
from torch_collate_kit.collators import PaddedCollator
from torch_collate_kit.ragged import Ragged

ODD_TENSORS = {
    "half": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),  # 4 bytes, then a gap
    "transposed": torch.arange(6).view(2, 3).T,
    "every second": torch.arange(12.0)[::2],
    "expanded": torch.tensor([[1], [2]], dtype=torch.int16).expand(2, 4),
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
        ("spawn", "file_descriptor"),
        ("forkserver", "file_system"),
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
    before = shared_mappings()
    loader = loader_of(large, 12, strategy, num_workers=1, persistent_workers=True)
    for _ in range(2):
        batches = list(loader)
        assert shared_mappings() == before + 12
        batches[3]["x"][:] = -1
        assert [batch["x"].unique().tolist() for batch in batches] == [
            [-1 if number == 3 else number] for number in range(12)
        ]
        open_descriptors = [batch.metadata["descriptors"] for batch in batches]
        assert open_descriptors[-1] <= open_descriptors[4] + 2, "the worker keeps what it sent"
        del batches
        assert shared_mappings() == before


def test_a_batch_outlives_its_worker() -> None:
    batches = iter(loader_of(large, 8, num_workers=1, prefetch_factor=1))
    first = next(batches)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        list(batches)
    assert first["x"].unique().tolist() == [0]


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Any:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield request.param
    torch.multiprocessing.set_sharing_strategy(before)


def test_shared_memory_has_the_bytes_of_odd_tensors(strategy: str) -> None:
    fields: dict[str, Any] = dict(ODD_TENSORS)
    fields["rows"] = Ragged(np.arange(7, dtype=np.int16)[::-1].copy(), np.array([0, 2, 2, 7]))
    shared, slots = gather(fields, share=True)
    private, places = gather(fields)
    assert (shared.is_shared(), private.is_shared()) == (True, False)
    assert slots.keys() == places.keys() == fields.keys()
    for name, field in carve(shared, slots).items():
        expected = fields[name]
        if isinstance(expected, Ragged):
            assert field == expected == carve(private, places)[name]
            continue
        assert isinstance(field, torch.Tensor)
        assert field.dtype == expected.dtype
        assert torch.equal(field, expected.detach()), name
        assert field.is_contiguous()


def test_nothing_to_share_is_not_shared(strategy: str) -> None:
    buffer, slots = gather({"x": torch.zeros(0, 4)}, share=True)
    assert carve(buffer, slots)["x"].shape == (0, 4)
    assert gather({"x": torch.zeros(4, device="meta")}, share=True)[0].device.type == "meta"


def test_only_a_worker_pickles_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PaddedCollator(0)(examples())
    assert not batch.stored().__reduce__()[1][0].is_shared()
    monkeypatch.setattr(storage, "get_worker_info", object)
    assert batch.stored().__reduce__()[1][0].is_shared()
    assert contents(pickle.loads(pickle.dumps(batch))) == contents(batch)
    assert contents(pickle.loads(pickle.dumps(batch[:0]))) == contents(batch[:0])


def no_memory(_worker: int) -> None:
    def fail(size: int) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    torch.UntypedStorage._new_shared = staticmethod(fail)


def test_a_batch_that_shared_memory_cannot_hold_is_an_error_where_it_is_received() -> None:
    """It was a traceback on the worker's stderr, and a loop that waited for ever."""
    numbers = list(range(4))
    loader = DataLoader(numbers, collate_fn=large, num_workers=1, worker_init_fn=no_memory)
    with pytest.raises(RuntimeError, match="batch of 2,400,000 bytes into shared memory: unable"):
        next(iter(loader))


def test_other_errors_of_pickling_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(storage, "gather", fail)
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        pickle.dumps(loose())
