"""A Batch on its way out of a DataLoader worker: in shared memory, filled once, freed with it."""

from __future__ import annotations

import gc
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.batch_samples import KINDS, contents, examples, loose, storages_of
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PaddedCollator
from torch_collate_kit.ragged import Ragged

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
