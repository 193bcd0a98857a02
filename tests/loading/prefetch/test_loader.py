"""The same stream whatever runs ahead; exact resume; faults that surface; nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.building import packed_sampler
from tests.loading.hang_guard import (
    interrupt_main_thread,
    once_main_thread_waits,
    our_threads,
)
from tests.loading.prefetch.toy_data import (
    COLLATORS,
    EXAMPLES,
    Watched,
    digests_of,
    expected_digests,
    make_loader,
    make_sampler,
)
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.prefetch import PrefetchLoader
from torch_collate_kit.loading.prefetch.device_copy import check_recordable
from torch_collate_kit.loading.sampler import MixedSampler, PrefetchingSampler
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.testing import assert_exact_resume, batch_digest

STOPS = [KeyboardInterrupt, SystemExit]


def digests(batches: Any) -> list[str]:
    return [batch_digest(batch) for batch in batches]


# ---- one stream ----


def expected_with_reshuffle(collate: Any, tail: str) -> list[str]:
    """Three epochs; after the second batch of the second one, the rest in a new order."""
    sampler = make_sampler(tail=tail)
    first, second = list(sampler), list(sampler)[:2]
    sampler.set_epoch(1, step=2)
    sampler.reshuffle()
    return digests_of([first, [*second, *sampler], list(sampler)], collate)


class Reshuffled:
    """A loader whose consumer reshuffles on receiving the second batch of epoch 1."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.close = loader.close

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            state = self.loader.state_dict()["sampler"]
            if (state["epoch"], state["step"]) == (1, 2):
                self.loader.reshuffle()
            yield batch


@pytest.mark.parametrize(
    ("name", "tail", "setting"),
    [
        ("padded", "keep", {"prefetch": False}),
        ("padded", "wrap", {}),
        ("packed", "keep", {}),
        ("packed", "wrap", {"prefetch": False, "num_workers": 2}),
        ("packed", "keep", {"num_workers": 2}),
        ("packed", "wrap", {"num_workers": 2, "persistent_workers": True}),
    ],
)
def test_one_stream_whatever_runs_ahead(name, tail, setting):
    expected = expected_with_reshuffle(COLLATORS[name], tail)
    assert len(set(expected)) == len(expected) >= 9
    with make_loader(COLLATORS[name], tail=tail, **setting) as loader:
        source = Reshuffled(loader)
        found = [batch_digest(batch) for _ in range(3) for batch in source]
    assert found == expected


@pytest.mark.parametrize(("tail", "num_workers"), [("keep", 0), ("drop", 0), ("wrap", 2)])
def test_steps_go_on_across_epochs_and_calls(tail, num_workers):
    expected = expected_digests(3, tail=tail)
    with make_loader(tail=tail, num_workers=num_workers) as loader:
        found = digests(loader.steps(2)) + digests(loader.steps(0)) + digests(loader.steps(5))
        found += digests(loader.steps(len(expected) - 7))
    assert found == expected


def test_epochs_without_a_batch_are_passed_over():
    sampler = PrefetchingSampler(3, batch_size=7, shuffle=False, tail="wrap")
    with PrefetchLoader(DataLoader(range(3), batch_sampler=sampler)) as loader:
        assert len(loader) == 0
        assert list(loader) == []
        seen: list[int] = []
        found = [batch.tolist() for batch in loader.steps(2, on_epoch=seen.append)]
    assert found == [[0, 1, 2, 0, 1, 2, 0], [1, 2, 0, 1, 2, 0, 1]]
    assert seen == [1, 2, 3, 4]


def test_epochs_without_end_and_batch_are_an_error(monkeypatch):
    monkeypatch.setattr("torch_collate_kit.loading.prefetch.loader._MAX_EMPTY_EPOCHS", 20)
    sampler = PrefetchingSampler(1, batch_size=50, tail="wrap")
    with PrefetchLoader(DataLoader(range(1), batch_sampler=sampler)) as loader:
        batches = loader.steps(1)
        with pytest.raises(StateError, match="21 epochs in a row had no batch"):
            next(batches)


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


def test_an_iterator_of_the_callers_sampler_that_nothing_was_drawn_from_does_not_count():
    sampler = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")  # 2 and 3 steps
    with PrefetchLoader(DataLoader(range(5), batch_sampler=sampler)) as loader:
        iter(sampler)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert [batch.tolist() for batch in loader] == [[4, 0], [1, 2], [3, 4]]


def test_the_sampler_moved_under_a_loop_is_an_error():
    sampler = make_sampler()
    loader = DataLoader(EXAMPLES, batch_sampler=sampler, collate_fn=COLLATORS["packed"])
    with PrefetchLoader(loader) as loader:
        batches = iter(loader)
        next(batches)
        sampler.set_epoch(5)
        with pytest.raises(StateError, match="moved to epoch 5 while the loader read epoch 0"):
            next(batches)


@pytest.mark.parametrize("claimed", [2, 4])
def test_a_sampler_of_another_length_than_it_says(claimed):
    class Odd(PrefetchingSampler):
        def __len__(self) -> int:
            return claimed

    loader = DataLoader(range(6), batch_sampler=Odd(6, batch_size=2))
    with PrefetchLoader(loader) as loader:
        word = "more" if claimed < 3 else "fewer"
        with pytest.raises(StateError, match=f"has {claimed} steps, but the loader yields {word}"):
            list(loader)


class OwnSampler:
    """The protocol and no more: every iter() counts, also those a DataLoader makes in vain."""

    def __init__(self) -> None:
        self.epoch = self.step = 0

    def __iter__(self) -> Iterator[list[int]]:
        steps = [[10 * self.epoch + step] for step in range(self.step, 3)]
        self.epoch, self.step = self.epoch + 1, 0
        return iter(steps)

    def __len__(self) -> int:
        return 3

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        self.epoch, self.step = epoch, step

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self.epoch, self.step)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        return {"epoch": epoch + 1, "step": 0} if step == 3 else {"epoch": epoch, "step": step}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_of_ones_own(num_workers):
    def make() -> PrefetchLoader:
        loader = DataLoader(range(100), batch_sampler=OwnSampler(), num_workers=num_workers)
        return PrefetchLoader(loader)

    with make() as loader:
        assert [batch.item() for batch in loader.steps(7)] == [0, 1, 2, 10, 11, 12, 20]
        with pytest.raises(TypeError, match="OwnSampler cannot reshuffle"):
            loader.reshuffle()
    assert_exact_resume(make, num_steps=7, stops=[2] if num_workers else None)


# ---- the slot ----


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_step_is_built_while_the_one_before_trains_but_for_the_first_of_an_epoch(prefetch):
    collate = Watched()
    with make_loader(collate, prefetch=prefetch, warn_after=None) as loader:
        for number, _ in enumerate(loader.steps(8), start=1):
            expected = number + 1 if prefetch and number % 4 else number
            collate.wait_until_begun(expected)
            assert collate.num_begun == expected
            assert prefetch or our_threads() == []


def test_on_epoch_runs_at_every_epoch_while_nothing_reads_and_its_changes_are_seen():
    data = [dict(example) for example in EXAMPLES]
    collate = Watched()
    calls: list[tuple[int, int]] = []

    def change(epoch: int) -> None:
        assert not collate.is_reading
        calls.append((epoch, collate.num_begun))
        for example in data:
            example["input_ids"] = [(7 * token + epoch) % 50 for token in example["input_ids"]]

    streams = []
    for prefetch in (False, True):
        data[:] = [dict(example) for example in EXAMPLES]
        collate = Watched()
        loader = DataLoader(data, batch_sampler=make_sampler(), collate_fn=collate)
        with PrefetchLoader(loader, prefetch=prefetch) as loader:
            streams.append(digests(loader.steps(10, on_epoch=change)))
    assert calls == [(0, 0), (1, 4), (2, 8)] * 2
    assert streams[0] == streams[1]


def test_the_order_of_an_epoch_is_asked_for_after_its_hook():
    """A user's order may depend on what the hook does: it must not exist before."""
    known = [0]

    def order(epoch: int, rng: Any) -> list[int]:
        assert epoch <= known[-1]
        return [epoch % 2, 1 - epoch % 2]

    sampler = PrefetchingSampler(2, batch_size=1, order=order)
    with PrefetchLoader(DataLoader(range(2), batch_sampler=sampler)) as loader:
        found = [batch.item() for batch in loader.steps(6, on_epoch=known.append)]
    assert found == [0, 1, 1, 0, 0, 1]

    known[:] = [0]
    sampler = PrefetchingSampler(2, batch_size=1, order=order)
    with PrefetchLoader(DataLoader(range(2), batch_sampler=sampler)) as loader:
        assert len(list(loader)) == 2
        assert loader.state_dict()["sampler"]["epoch"] == loader.epoch == 1


def test_reshuffle_drains_what_is_in_flight():
    collate = Watched()
    collate.gates[2] = threading.Event()
    with make_loader(collate) as loader:
        batches = loader.steps(13)
        found = digests([next(batches), next(batches)])
        collate.wait_until_begun(3)  # of the old order
        collate.release_later(2)
        loader.reshuffle()
        assert not collate.is_reading
        assert collate.num_built == 3
        found += digests(batches)
    sampler = make_sampler()
    sampler.set_epoch(0, step=2)
    sampler.reshuffle()
    epochs = [[*list(make_sampler())[:2], *sampler], [*sampler], [*sampler], list(sampler)[:1]]
    assert found == digests_of(epochs)
    assert found[2:4] != expected_digests(1)[2:4]


@pytest.mark.parametrize("use_steps", [False, True])
def test_reshuffle_behind_the_last_batch_changes_the_next_epoch(use_steps):
    sampler = make_sampler()
    sampler.set_epoch(1)
    sampler.reshuffle()
    epochs = [list(make_sampler()), list(sampler)]
    with make_loader() as loader:
        found = []
        for number, batch in enumerate(loader.steps(8) if use_steps else loader):
            found.append(batch_digest(batch))
            if number == 3:
                loader.reshuffle()
        assert len(found) == (8 if use_steps else 4)
        found += digests(loader.steps(8 - len(found)))
    assert found == digests_of(epochs)


def test_behind_the_last_batch_the_loader_stands_at_the_next_epoch():
    expected = expected_digests(2)
    with make_loader() as loader:
        assert digests(loader.steps(4)) == expected[:4]
        assert digests(loader) == expected[4:]
        loader.set_epoch(0)
        batches = iter(loader)  # left hanging behind its last batch
        assert digests(next(batches) for _ in range(4)) == expected[:4]
        assert digests(loader) == expected[4:]


@pytest.mark.parametrize("move", ["set_epoch", "load_state_dict", "close", "a newer loop"])
def test_a_loop_is_over_when_the_loader_is_moved(move):
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate) as loader:
        batches = iter(loader)
        next(batches)
        collate.wait_until_begun(2)
        collate.release_later(1)
        if move == "set_epoch":
            loader.set_epoch(2)
        elif move == "load_state_dict":
            loader.load_state_dict(loader.state_dict())
        elif move == "close":
            loader.close()
        else:
            next(iter(loader.steps(1)))
        assert not collate.is_reading or move == "a newer loop"
        with pytest.raises(StateError, match="closed" if move == "close" else "loop .* is over"):
            next(batches)
        if move == "set_epoch":
            assert digests(loader) == expected_digests(3)[8:]


# ---- resume ----


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("padded", {}),
        ("packed", {"tail": "wrap", "prefetch": False}),
        ("packed", {"tail": "wrap"}),
        ("packed", {"num_workers": 2}),
        ("packed", {"num_workers": 2, "persistent_workers": True}),
    ],
)
def test_resumes_exactly(name, options):
    stops = [3, 4] if "num_workers" in options else None  # workers take a while to start
    found = assert_exact_resume(
        lambda: make_loader(COLLATORS[name], **options), num_steps=6 if stops else 10, stops=stops
    )
    tail = options.get("tail", "keep")
    assert found == expected_digests(4, COLLATORS[name], tail=tail)[: len(found)]


def test_resumes_exactly_around_a_reshuffle():
    found = assert_exact_resume(lambda: Reshuffled(make_loader(tail="wrap")), num_steps=9)
    assert found == expected_with_reshuffle(COLLATORS["packed"], "wrap")[:9]


def sized(length: int, batch_size: int, **options: Any) -> PrefetchLoader:
    sampler = PrefetchingSampler(length, batch_size=batch_size, **options)
    return PrefetchLoader(DataLoader(range(length), batch_sampler=sampler))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (sized(12, 4).state_dict(), "12 examples"),
        (sized(13, 2).state_dict(), "batch_size=2"),
        (sized(13, 4, dp_size=2, tail="drop").state_dict(), "tail='drop'"),
        (sized(13, 4).state_dict() | {"version": 2}, "version=2"),
        ({}, "version=None"),
        (sized(13, 4).state_dict() | {"version": True}, "version=True"),
        (None, "a state must be a mapping, got NoneType; pass what state_dict\\(\\) returned"),
        ({"version": 1, 3: None, None: 3}, "no sampler"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(state, message):
    check_refused(state, message)


def check_refused(state: Any, message: str) -> None:
    with sized(13, 4, seed=0) as loader:
        stream = [batch.tolist() for batch in loader.steps(7)]
        loader.set_epoch(0)
        batches = loader.steps(7)
        found = [next(batches).tolist()]
        before = loader.state_dict()
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        found += [batch.tolist() for batch in batches]  # the loop that was live still is
        assert found == stream


@pytest.mark.parametrize(("saved", "mine"), [(8, 16), (None, 8)])
def test_other_max_tokens_are_the_same_examples_in_other_rows_and_that_is_said(caplog, saved, mine):
    def collator(max_tokens: int | None) -> Any:
        return PaddedCollator(0) if max_tokens is None else PackedCollator(0, max_tokens=max_tokens)

    with make_loader(collator(saved)) as loader:
        next(loader.steps(1))
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["max_tokens"] == saved
    with make_loader(collator(mine)) as loader:
        loader.load_state_dict(state)
        assert digests(loader.steps(7)) == expected_digests(2, collator(mine))[1:]
        assert loader.state_dict()["max_tokens"] == mine
    assert [record.getMessage() for record in caplog.records] == [
        f"the state is of a run with max_tokens={saved}, this collator has {mine}: the same "
        "examples per step, in other rows"
    ]


def test_a_sampler_that_plans_rows_says_itself_that_they_are_others(caplog):
    def make(max_tokens: int) -> PrefetchLoader:
        lengths = [len(example["input_ids"]) for example in EXAMPLES]
        collate = PackedCollator(0, max_tokens=max_tokens)
        sampler = packed_sampler(lengths, batch_size=4, packing=collate.packing)
        data = TokenizedDataset(EXAMPLES)
        return PrefetchLoader(DataLoader(data, batch_sampler=sampler, collate_fn=collate))

    with make(8) as loader, make(16) as other:
        other.load_state_dict(loader.state_dict())
        assert next(other.steps(1)).metadata["num_examples"] == 4
    (record,) = caplog.records
    assert "max_tokens" in record.getMessage()
    assert "this collator" not in record.getMessage()


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


class Failing:
    """For worker processes: fails at the batch that holds an example."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, examples: Any) -> Any:
        if any(self.token in example["input_ids"] for example in examples):
            raise ValueError("bad batch")
        return COLLATORS["packed"](examples)


def test_an_error_of_a_worker_process_is_raised_at_its_step():
    order = list(make_sampler())
    token = EXAMPLES[order[2][0]]["input_ids"][0]
    found = []
    with make_loader(Failing(token), num_workers=2) as loader:
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
    loader = DataLoader([1], batch_sampler=PrefetchingSampler(1, 1))
    num_steps = options.get("num_steps", 1)
    options = {name: value for name, value in options.items() if name != "num_steps"}
    with pytest.raises(error, match=message):
        PrefetchLoader(**{"loader": loader, **options}).steps(num_steps)


@pytest.mark.parametrize("length", [9, 14])
def test_a_sampler_of_another_dataset_is_refused(length):
    sizes = [5, length - 5]
    samplers = [
        PrefetchingSampler(length, batch_size=4),
        MixedSampler(sizes, batch_size=4),
        packed_sampler([1] * length, batch_size=4, max_tokens=8),
    ]
    for sampler in samplers:
        with pytest.raises(ValueError, match="the sampler was built for") as caught:
            PrefetchLoader(DataLoader(EXAMPLES, batch_sampler=sampler))
        assert str(caught.value) == (
            f"the sampler was built for {length} examples, the dataset has 13; build it with the "
            "dataset that is read (one over a part of the data takes order= or torch's Subset)"
        )


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


def test_persistent_workers_of_the_caller_are_left_alone():
    plain = DataLoader(
        range(6),
        batch_sampler=PrefetchingSampler(6, batch_size=2),
        num_workers=1,
        persistent_workers=True,
    )
    assert len(list(plain)) == 3
    (worker,) = torch.multiprocessing.active_children()
    with PrefetchLoader(plain) as loader:
        assert len(list(loader)) == 3
        assert len(torch.multiprocessing.active_children()) == 2
    assert torch.multiprocessing.active_children() == [worker]
    assert len(list(plain)) == 3
    assert torch.multiprocessing.active_children() == [worker]


# ---- a device ----


@dataclass
class Holder:
    """A batch with a ``.to()`` of its own, whose tensors nobody else sees."""

    values: torch.Tensor

    def to(self, device: Any, *, non_blocking: bool = False) -> Holder:
        return Holder(self.values.to(device, non_blocking=non_blocking))


class Recording(Holder):
    def record_stream(self, stream: object) -> None:
        self.values.record_stream(stream)


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), (None, "cpu"), ("meta", "meta")])
def test_structures_of_tensors_go_to_the_device_and_the_rest_stays(device, expected):
    def collate(examples: list[int]) -> Any:
        held = Holder(torch.tensor(examples))
        return {"x": held, "y": [(COLLATORS["packed"](EXAMPLES), 3)], "name": "a"}

    loader = DataLoader(range(2), batch_sampler=PrefetchingSampler(2, 2), collate_fn=collate)
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


def test_an_object_with_tensors_that_the_loader_cannot_see_is_refused_before_it_is_copied():
    """Its memory might be given to the next batch while kernels still read it."""
    for batch in (Holder(torch.ones(2)), {"x": [torch.ones(2), (Holder(torch.ones(2)),)]}):
        with pytest.raises(TypeError) as caught:
            check_recordable(batch)
        assert str(caught.value) == (
            "the batch holds a Holder, which has .to() but is no tensor, mapping, list or tuple: "
            "which memory its copy on the CUDA device takes cannot be seen; collate into one of "
            "these, or give Holder a record_stream(stream) that calls it on each of its tensors"
        )
    nothing = {"x": Recording(torch.ones(2)), "n": 3, "s": "a", "none": None}
    check_recordable([nothing, Ragged.from_rows([torch.ones(2)]), COLLATORS["packed"](EXAMPLES)])
