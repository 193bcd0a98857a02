"""Memory that is used again, and never while anything looks at it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from torch_collate_kit import _host_memory
from torch_collate_kit._host_memory import host_array, host_bytes
from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged

BIG = 1 << 20


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_host_memory, "_kept", {})
    yield
    gc.collect()


def addresses() -> list[int]:
    return [block.ctypes.data for block in _host_memory._kept.values()]


def test_memory_is_used_again_when_it_is_let_go():
    first = host_bytes(BIG)
    address = first.data_ptr()
    assert address % 64 == 0
    assert addresses() == []
    del first
    assert len(addresses()) == 1
    assert host_bytes(BIG - 1000).data_ptr() == address
    assert len(addresses()) == 1


def test_not_for_what_is_much_smaller_or_larger():
    address = (kept := host_bytes(BIG)).data_ptr()
    del kept
    others = [host_bytes(BIG // 2), host_bytes(BIG * 2)]
    assert address not in [other.data_ptr() for other in others]
    assert host_bytes(int(BIG * 0.8)).data_ptr() == address


LOOKS = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[5:9],
    "another dtype": lambda t: t.view(torch.int64)[3:],
    "an array": lambda t: t.numpy(),
    "an array of an array": lambda t: t.numpy()[8:].view(np.int64)[2:].reshape(-1, 1)[1:],
    "a storage": lambda t: t.untyped_storage(),
    "a ragged field": lambda t: Ragged(t.view(torch.int64), [0, 3])[0],
    "a batch of a batch": lambda t: Batch({"x": t.view(-1, 64)})[2:4]["x"],
    "a memoryview": lambda t: memoryview(t.numpy()[7:]),
}


@pytest.mark.parametrize("look", LOOKS)
def test_not_while_something_looks_at_it(look):
    tensor = host_bytes(BIG)
    tensor.fill_(7)
    mine = LOOKS[look](tensor)
    before = bytes(tensor.numpy()[:4096])
    del tensor
    gc.collect()
    assert addresses() == []
    new = host_bytes(BIG)
    new.fill_(9)
    if isinstance(mine, torch.Tensor):
        assert bytes(mine.reshape(-1).view(torch.uint8).numpy()[:4]) == before[:4]
    del mine
    gc.collect()
    assert len(addresses()) == 1


def test_arrays_are_the_same():
    array = host_array(BIG // 8, np.int64)
    array[:] = 5
    mine = array[1:].view(np.int32)[::2]
    del array
    gc.collect()
    assert addresses() == []
    host_array(BIG // 8, np.int64).fill(6)
    assert (mine == 5).all()
    del mine
    assert len(addresses()) >= 1


def test_what_is_kept_is_bounded():
    blocks = [host_bytes(BIG * (1 + i % 3)) for i in range(20)]
    blocks.clear()
    sizes = [block.nbytes for block in _host_memory._kept.values()]
    assert len(sizes) >= 2
    assert sum(sizes) <= 3 * max(sizes) <= 3 * 1.2 * 3 * BIG


def test_the_oldest_are_dropped_first():
    blocks = [host_bytes(BIG) for _ in range(4)]
    pointers = [block.data_ptr() for block in blocks]
    while blocks:
        del blocks[0]
    kept = [pointer for pointer in pointers if any(0 <= pointer - a < 64 for a in addresses())]
    assert kept == pointers[1:]


def test_the_smallest_that_fits_is_used():
    large, small = host_bytes(int(1.2 * BIG)), host_bytes(BIG)
    address = small.data_ptr()
    del large, small
    assert len(addresses()) == 2
    assert host_bytes(BIG - 1000).data_ptr() == address


def test_small_blocks_are_not_kept():
    del (small := [host_bytes(1000)])[:]
    assert small == []
    assert addresses() == []
    assert len(host_bytes(0)) == 0
    assert len(host_array(0, np.int64)) == 0


def test_threads_never_share_a_block():
    errors: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        held: list[np.ndarray] = []
        for turn in range(300):
            array = host_array(int(rng.integers(BIG // 8, BIG // 4)), np.int64)
            array.fill(1000 * number + turn)
            held.append(array)
            if len(held) > 3:
                old = held.pop(0)
                if not (old == 1000 * number + turn - 3).all():
                    errors.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
