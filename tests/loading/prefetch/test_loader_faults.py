"""Faults surface at their step, nothing is left behind; batches are named, and go to a device."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.building import mixed_sampler, packed_sampler
from tests.loading.hang_guard import interrupt_main_thread, once_main_thread_waits, our_threads
from tests.loading.prefetch.toy_data import (
    COLLATORS,
    EXAMPLES,
    OwnSampler,
    Watched,
    digests,
    expected_digests,
    make_loader,
    make_sampler,
)
from torch_collate_kit import PackedCollator, ParallelLayout
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import PackedIterableDataset, PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import batch_digest

# ---- faults ----


@pytest.mark.parametrize(("failing", "prefetch"), [(0, True), (2, True), (3, False), (7, True)])
def test_an_error_is_raised_at_its_step_and_the_step_can_be_tried_again(failing, prefetch):
    collate = Watched()
    collate.errors[failing] = ValueError("bad batch")
    found = []
    with make_loader(collate, prefetch=prefetch) as loader:
        with pytest.raises(ValueError, match="bad batch") as caught:
            found.extend(batch_digest(batch) for batch in loader.steps(8))
        assert "_explode" in [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert len(found) == failing
        assert our_threads() == []
        assert loader.epoch == failing // 4
        found += digests(loader.steps(8 - failing))
    assert found == expected_digests(2)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("of_stream", [False, True])
def test_stop_iteration_of_a_collate_function_ends_no_epoch(num_workers: int, of_stream: bool):
    def collate(batch: Any) -> Any:
        return next(iter([])) if counted.append(0) or len(counted) > 1 else batch

    counted: list[int] = []
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": num_workers}
    if of_stream:
        stream = PackedIterableDataset(EXAMPLES, PackedCollator(0, max_tokens=64), buffer_size=2)
        loader = DataLoader(stream, batch_size=None, **options)
    else:
        sampler: Any = PrefetchingSampler(len(EXAMPLES), batch_size=2)
        loader = DataLoader(EXAMPLES, batch_sampler=sampler, **options)
    with PrefetchLoader(loader) as batches, pytest.raises(RuntimeError, match="StopIteration"):
        list(batches)


def test_an_error_of_a_worker_process_is_raised_at_its_step():
    bad = EXAMPLES[list(make_sampler())[2][0]]

    def collate(examples: Any) -> Any:  # in a process that was forked
        if bad in examples:
            raise ValueError("bad batch")
        return COLLATORS["packed"](examples)

    found = []
    with make_loader(collate, num_workers=2) as loader:
        stream = (batch_digest(batch) for batch in loader)
        with pytest.raises(ValueError, match=r"(?s)Original Traceback.*bad batch") as caught:
            found.extend(stream)
        assert caught.tb is not None  # it keeps the DataLoader's iterator, but no processes
        assert torch.multiprocessing.active_children() == []
    assert found == expected_digests(1)[:2]


@pytest.mark.parametrize(
    ("stop", "how"),
    [
        (KeyboardInterrupt, "next batch"),
        (SystemExit, "break and close"),
        (KeyboardInterrupt, "break and next loop"),
        (SystemExit, "body"),
        (ValueError, "body"),  # the body's own error wins
    ],
)
def test_interrupts_of_the_thread_are_never_swallowed(stop, how):
    collate = Watched()
    collate.errors[1] = stop()
    loader = make_loader(collate)

    def train() -> None:
        with loader:
            for _ in loader:
                collate.failed.wait()
                if how == "body":
                    raise RuntimeError("of the body")
                if how != "next batch":
                    break
            if how == "break and next loop":
                next(iter(loader))
                pytest.fail("the loop went on")

    with pytest.raises(RuntimeError if stop is ValueError else stop) as caught:
        train()
    if how == "body" and stop is not ValueError:
        assert isinstance(caught.value.__context__, RuntimeError)
    assert our_threads() == []


@pytest.mark.parametrize("where", ["waiting", "training"])
def test_ctrl_c_surfaces_and_nothing_hangs_and_nothing_is_lost(where):
    collate = Watched()
    collate.gates[2] = threading.Event()
    found = []
    with make_loader(collate) as loader:
        batches = loader.steps(6)

        def train() -> None:
            for batch in batches:
                found.append(batch_digest(batch))
                if len(found) == 2:
                    collate.wait_until_begun(3)
                    if where == "waiting":  # in the next turn of the loop
                        once_main_thread_waits(interrupt_and_open)
                    else:
                        collate.release_later(2)
                        interrupt_main_thread()

        def interrupt_and_open() -> None:
            interrupt_main_thread()
            time.sleep(0.1)  # leaving the loop waits longer
            collate.gates[2].set()

        with pytest.raises(KeyboardInterrupt):
            train()
        batches.close()
        assert not collate.is_reading
        assert our_threads() == []
        found += digests(loader.steps(4))
    assert found == expected_digests(2)[:6]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prefetch": 0}, TypeError, "prefetch must be True or False, got 0"),
        ({"loader": DataLoader([1, 2])}, TypeError, "batch_sampler=BatchSampler cannot be resumed"),
        ({"loader": [1, 2]}, TypeError, "a list"),
        ({"num_steps": -1}, ValueError, "num_steps must be at least 0, got -1"),
        ({"num_steps": True}, TypeError, "num_steps must be an int, got True of type bool"),
    ],
)
def test_bad_arguments(options, error, message):
    loader = DataLoader([1], batch_sampler=PrefetchingSampler(1, batch_size=1))
    num_steps = options.get("num_steps", 1)
    options = {name: value for name, value in options.items() if name != "num_steps"}
    with pytest.raises(error, match=message):
        PrefetchLoader(**{"loader": loader, **options}).steps(num_steps)


@pytest.mark.parametrize("length", [9, 14])
def test_a_sampler_of_another_dataset_is_refused(length):
    sizes = [5, length - 5]
    samplers = [
        PrefetchingSampler(length, batch_size=4),
        mixed_sampler(sizes, batch_size=4),
        packed_sampler([1] * length, batch_size=4, max_tokens=8),
    ]
    for sampler in samplers:
        message = f"^the sampler was built for {length} examples, the dataset has 13; build it with"
        with pytest.raises(ValueError, match=message):
            PrefetchLoader(DataLoader(EXAMPLES, batch_sampler=sampler))


# ---- what is left behind ----


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_loaders_leave_nothing():
    def open_and_leave(number: int) -> None:
        loader = make_loader(list)
        next(loader.steps(2))
        if number % 2:
            loader.close()

    for number in range(10):
        open_and_leave(number)
    gc.collect()
    before = threading.active_count(), num_open_files(), len(gc.get_objects())
    for number in range(40):
        open_and_leave(number)
    for thread in our_threads():  # of the last loader that was dropped: on its way out
        thread.join()
    gc.collect()
    assert threading.active_count() == before[0]
    assert num_open_files() == before[1]
    assert len(gc.get_objects()) < before[2] + 40


# ---- a device ----


@dataclass
class Holder:
    """A batch with a ``.to()`` of its own, whose tensors nobody else sees."""

    values: torch.Tensor

    def to(self, device: Any, *, non_blocking: bool = False) -> Holder:
        return Holder(self.values.to(device, non_blocking=non_blocking))


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), (None, "cpu"), ("meta", "meta")])
def test_structures_of_tensors_go_to_the_device_and_the_rest_stays(device, expected):
    def collate(examples: list[int]) -> Any:
        held = Holder(torch.tensor(examples))
        return {"x": held, "y": [(COLLATORS["packed"](EXAMPLES), 3)], "name": "a"}

    sampler = PrefetchingSampler(2, batch_size=2)
    loader = DataLoader(range(2), batch_sampler=sampler, collate_fn=collate)
    with PrefetchLoader(loader, device=device) as loader:
        (batch,) = loader
    assert batch["x"].values.device.type == batch["y"][0][0]["input_ids"].device.type == expected
    assert (batch["y"][0][1], batch["name"]) == (3, "a")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "mps", "no_such"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_named_when_the_loader_is_made(device):
    data = DataLoader(EXAMPLES, batch_sampler=make_sampler(), collate_fn=COLLATORS["packed"])
    message = f"^device={device!r} cannot be used here: .*; leave device out, or name one that"
    with pytest.raises(ValueError, match=message):
        PrefetchLoader(data, device=device)


TWO_RANKS = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp=2))
EMPTY: dict[str, Callable[[], Any]] = {
    "a sampler": lambda: DataLoader(EXAMPLES, batch_sampler=OwnSampler(0)),
    "a list": lambda: of_stream([]),
    "an iterator": lambda: of_stream(lambda: iter(()), shuffle=True),
    "workers": lambda: of_stream([], num_workers=1),
    "a rank": lambda: of_stream(EXAMPLES[:1], dp_rank=1, batch_rows=2),
    "shards of a rank": lambda: of_stream(EXAMPLES[:2], dp_rank=1, batch_rows=2, num_shards=4),
    "files of a rank": lambda: of_stream(
        lambda shard: iter(EXAMPLES[:1] if not shard else ()),
        dp_rank=1, batch_rows=2, num_shards=2, presharded=True,
    ),
}  # fmt: skip


def of_stream(source: Any, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    stream = PackedIterableDataset(source, TWO_RANKS, buffer_size=4, **options)
    as_is = stream.as_is
    return DataLoader(stream, batch_size=None, collate_fn=as_is, num_workers=num_workers)


@pytest.mark.parametrize("kind", EMPTY)
def test_steps_of_an_empty_share_are_an_error_after_one_pass(kind):
    epochs: list[int] = []
    with PrefetchLoader(EMPTY[kind]()) as loader:
        assert list(loader) == []
        loader.set_epoch(3)
        with pytest.raises(StateError, match="epoch 3 has no batch here"):
            next(loader.steps(1, epochs.append))
    assert epochs == [3]


def test_epochs_whose_examples_are_carried_over_are_no_error():
    sampler = PrefetchingSampler(1, batch_size=5, tail="wrap")
    with PrefetchLoader(DataLoader(range(1), batch_sampler=sampler)) as loader:
        assert [batch.tolist() for batch in loader.steps(2)] == [[0] * 5] * 2
        assert loader.epoch == 9


def test_the_sampler_of_the_caller_may_be_moved_between_epochs():
    expected = expected_digests(3)
    sampler = make_sampler()
    source = DataLoader(EXAMPLES, batch_sampler=sampler, collate_fn=COLLATORS["packed"])
    with PrefetchLoader(source) as loader:
        sampler.set_epoch(2)
        assert digests(loader) == expected[8:]
        sampler.set_epoch(0)
        assert digests(loader) == expected[:4]
    assert source.batch_sampler is sampler


def test_persistent_workers_of_the_caller_are_left_alone():
    sampler = PrefetchingSampler(6, batch_size=2)
    plain = DataLoader(range(6), batch_sampler=sampler, num_workers=1, persistent_workers=True)
    assert len(list(plain)) == 3
    (worker,) = torch.multiprocessing.active_children()
    with PrefetchLoader(plain) as loader:
        assert len(list(loader)) == 3
        assert len(torch.multiprocessing.active_children()) == 2
    assert torch.multiprocessing.active_children() == [worker]
    assert len(list(plain)) == 3
    assert torch.multiprocessing.active_children() == [worker]


# ---- names ----


def names(batch: Any) -> tuple[int, int]:
    return batch.metadata["epoch"], batch.metadata["step"]


def test_steps_count_from_the_beginning_of_the_epoch_after_a_jump_a_resume_and_a_reshuffle():
    with make_loader() as loader:
        assert [names(batch) for batch in loader.steps(2)] == [(0, 0), (0, 1)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.reshuffle()
        assert [names(batch) for batch in loader] == [(0, 2), (0, 3)]
        loader.set_epoch(5)
        assert names(next(loader.steps(1))) == (5, 0)
        loader.load_state_dict(state)
        assert names(next(loader.steps(1))) == (0, 2)


def test_a_batch_of_a_wrapped_tail_is_named_by_the_epoch_it_ends_in():
    with make_loader(tail="wrap", batch_size=8) as loader:  # of 13 examples
        assert [names(batch) for batch in loader.steps(4)] == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_a_batch_that_the_collate_function_keeps_is_not_changed():
    kept = COLLATORS["packed"](EXAMPLES[:2])
    kept.metadata["step"] = "mine"
    before = dict(kept.metadata)
    with make_loader(lambda examples: kept) as loader:
        first, second = list(loader)[:2]
    assert (names(first), names(second)) == ((0, 0), (0, 1))  # the loader's, not the function's
    assert kept.metadata == before
    assert kept.column("input_ids").data_ptr() == first.column("input_ids").data_ptr()


@pytest.mark.parametrize("batch", [{"x": 1.0}, [1], (COLLATORS["packed"](EXAMPLES),)])
def test_what_is_not_a_batch_is_left_alone(batch):
    with make_loader(lambda examples: batch) as loader:
        assert next(loader.steps(1)) is batch
