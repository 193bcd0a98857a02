"""Epochs that are too long for ``len()`` to wait: an estimate, while a thread counts the steps."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.building import packed_sampler
from torch_collate_kit import Mixture, PackedBatchSampler, PrefetchLoader, TokenizedDataset
from torch_collate_kit.loading.sampler import long_epochs

LENGTHS = np.random.default_rng(0).integers(1, 60, 9_000)


def sampler_of(lengths: Any = LENGTHS, **options: Any) -> PackedBatchSampler:
    given = {"max_tokens": 100, "batch_rows": 2, "normalize_loss": False, **options}
    return packed_sampler(lengths, **given)


@pytest.fixture(autouse=True)
def _lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_epochs, "MOST_COUNTED_AT_ONCE", 1_000)


def wait_for(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < end, "the thread does not end"
        time.sleep(0.005)


def backwards(epoch: int, rng: np.random.Generator) -> np.ndarray:
    return np.argsort(LENGTHS)[::-2]


MIXED = Mixture([LENGTHS[:7_000], LENGTHS[7_000:]], weights=[5, 3], by="tokens")
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "kept": (LENGTHS, {}),
    "dropped": (LENGTHS, {"tail": "drop"}),
    "wrapped around": (LENGTHS, {"tail": "wrap"}),
    "keyed": (LENGTHS, {"shuffle": "keyed"}),
    "in pieces": (LENGTHS, {"max_tokens": 40, "overflow": "split"}),
    "in the user's order": (LENGTHS, {"order": backwards}),
    "mixed": (MIXED, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_estimate_until_a_thread_has_counted(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    lengths, options = CASES[case]
    expected = sum(1 for _ in sampler_of(lengths, **options))
    sampler = sampler_of(lengths, **options)
    assert not sampler.is_length_exact
    estimate = len(sampler)
    assert estimate == pytest.approx(expected, rel=0.04)
    assert len(sampler) in (estimate, expected)
    [record] = [of for of in caplog.records if of.levelno == logging.WARNING]
    assert f"about {estimate} steps: its " in record.getMessage()
    assert "count_steps() waits for the exact number" in record.getMessage()
    assert sampler.count_steps() == expected
    wait_for(lambda: sampler.is_length_exact)
    assert len(sampler) == expected


def test_steps_and_states_are_the_same_while_a_thread_counts() -> None:
    sampler, plain = sampler_of(shuffle="keyed"), sampler_of(shuffle="keyed")
    len(sampler)
    for step, (part, expected) in enumerate(zip(sampler, plain, strict=True), start=1):
        assert part.indices == expected.indices
        if step % 100 == 0:
            assert sampler.state_at(0, step) == plain.state_at(0, step)
    resumed = sampler_of(shuffle="keyed")
    len(resumed)
    resumed.load_state_dict(sampler.state_at(0, 700))
    assert not resumed.is_length_exact
    assert resumed.count_steps() == plain.count_steps(0)
    assert np.array_equal(resumed.examples(0, 700), plain.examples(0, 700))


def test_a_copy_counts_for_itself_and_a_thread_ends_with_its_sampler() -> None:
    sampler = sampler_of()
    len(sampler)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert len(other) > 0
        assert other.count_steps() == sampler.count_steps()
    wait_for(lambda: sampler.is_length_exact)
    threads = threading.active_count()
    long = sampler_of(np.tile(LENGTHS, 30))
    len(long)
    del long
    gc.collect()
    wait_for(lambda: threading.active_count() <= threads)


def test_a_loader_does_not_count_and_reads_the_whole_epoch() -> None:
    lengths = LENGTHS[:1_500]
    data = TokenizedDataset([{"input_ids": [1] * n} for n in lengths])
    sampler = sampler_of(lengths)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=sampler._collate)
    expected = sampler_of(lengths).count_steps()
    with PrefetchLoader(loader) as batches:
        running = iter(batches)
        next(running)
        assert sampler._budget not in long_epochs._running, "nobody asked for the length"
        assert len(batches) == pytest.approx(expected, rel=0.05)
        assert 1 + sum(1 for _ in running) == expected
        assert batches.state_dict()["sampler"]["epoch"] == 1
        assert sum(1 for _ in batches) == sampler_of(lengths).count_steps(1)


def test_what_is_counted_at_once(caplog: pytest.LogCaptureFixture) -> None:
    for sampler in (sampler_of(LENGTHS[:900]), sampler_of(batch_rows=None, batch_size=9)):
        assert sampler.is_length_exact
        assert len(sampler) == sum(1 for _ in sampler)
    assert not caplog.records
