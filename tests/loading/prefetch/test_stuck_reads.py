"""A stuck read holds up neither an error, nor Ctrl-C, nor the garbage collector."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.loading.hang_guard import interrupt_main_thread, our_threads
from tests.loading.prefetch import stuck_reads
from tests.loading.prefetch.toy_data import (
    EXAMPLES,
    Watched,
    expected_digests,
    make_loader,
    make_sampler,
)
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import batch_digest

MOST_SECONDS = 6.0  # one and a half, on a machine that has the time


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.loading.prefetch.stuck_reads"]
    halves = [list(stuck_reads.CASES)[half::2] for half in range(2)]  # they mostly wait
    ran = [subprocess.Popen([*command, *half], stdout=subprocess.PIPE) for half in halves]
    first, second = (json.loads(one.communicate(timeout=120)[0]) for one in ran)
    return first | second


@pytest.mark.parametrize("case", stuck_reads.CASES)
def test_a_process_ends_at_once_and_says_why(ends, case):
    seconds, said = ends[case]["seconds"], ends[case]["said"]
    assert seconds < MOST_SECONDS, said
    last = said.splitlines()[-1]
    if case.startswith("100"):
        assert last == "all were collected"
        return
    assert last == ("KeyboardInterrupt" if "ctrl-c" in case else "RuntimeError: of the body")
    abandoned = [line for line in said.splitlines() if "abandons it" in line]
    if "with" not in case:
        assert abandoned == []
        return
    assert "0 workers are left" in said
    (line,) = abandoned
    what = "it was to come from DataLoader worker 0 of 1" if "worker" in case else "the prefetch "
    assert line.startswith(
        "PrefetchLoader is closed while step 2 of epoch 0 is being built, which takes more than "
        f"0.8 s, and abandons it: {what}"
    )


def test_a_loop_that_is_left_while_a_batch_is_late_goes_on_with_it():
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate) as loader:
        found = [batch_digest(next(iter(loader)))]
        state = loader.state_dict()
        assert collate.num_begun == 2
        collate.release_later(1)
        found += [batch_digest(batch) for batch in loader.steps(7)]
        assert collate.num_begun == 8
        loader.load_state_dict(state)
        assert batch_digest(next(iter(loader))) == found[1]
    assert found == expected_digests(2)


def test_an_interrupt_where_a_batch_is_handed_over_loses_none(monkeypatch):
    collate = Watched()
    collate.gates[2] = threading.Event()
    data = DataLoader(EXAMPLES, batch_sampler=make_sampler(), collate_fn=collate)
    with PrefetchLoader(data, device="meta") as loader:
        batches = iter(loader)
        steps = [next(batches).metadata["step"]]
        with monkeypatch.context() as patch:
            patch.setattr(loader._to_device, "receive", lambda sent: interrupt_main_thread())
            with pytest.raises(KeyboardInterrupt):
                next(batches)  # the one after it is in flight, and late
        assert loader.state_dict()["sampler"]["step"] == 1
        collate.release_later(2)
        steps += [batch.metadata["step"] for batch in loader]
    assert steps == [0, 1, 2, 3]


def test_a_thread_that_was_abandoned_changes_nothing_later(said):
    gate, began = threading.Event(), threading.Event()

    def collate(examples: list[int]) -> list[int]:
        if 2 in examples:
            began.set()
            gate.wait()
        return examples

    sampler = PrefetchingSampler(6, batch_size=2, shuffle=False)
    data = DataLoader(range(6), batch_sampler=sampler, collate_fn=collate)
    loader = PrefetchLoader(data)
    batches = iter(loader)
    assert next(batches) == [0, 1]
    began.wait()
    state = loader.state_dict()
    loader.close()
    assert len([message for message in said if "abandons it" in message]) == 1
    assert loader.state_dict() == state
    (thread,) = our_threads()
    gate.set()
    thread.join()
    assert loader.state_dict() == state
    with PrefetchLoader(data) as other:
        other.load_state_dict(state)
        assert list(other) == [[2, 3], [4, 5]]
