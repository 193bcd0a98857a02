"""Packing a stream: what it holds in memory, and how full its rows are next to offline packing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.building import packed_stream
from tests.loading.streaming.step_figures import figures, steps_of
from tests.loading.streaming.streaming_oracle import EXAMPLES, SETTINGS, moved
from torch_collate_kit.packing import pack


@pytest.mark.parametrize("num_skipped", [0, 2])
def test_never_holds_more_than_the_buffer(num_skipped: int) -> None:
    class Example(dict[str, Any]):
        __hash__ = object.__hash__

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    num_made = most = 0

    def source() -> Iterator[Example]:
        nonlocal num_made, most
        for example in EXAMPLES * 3:
            made = Example(example)
            alive.add(made)
            num_made += 1
            most = max(most, len(alive))
            yield made

    dataset = packed_stream(source, **SETTINGS)
    dataset.load_state_dict(moved(dataset.state_dict(), num_batches=num_skipped))
    gc.disable()
    try:
        given_out = 0
        for batch in dataset:
            given_out += batch.metadata["num_examples"]
            assert num_skipped or num_made - given_out <= 7
            assert len(alive) <= 7
    finally:
        gc.enable()
    assert given_out == 3 * len(EXAMPLES) or num_skipped
    assert 7 <= most <= 7 + 1  # the one that was read just now


def stream_efficiency(lengths: np.ndarray, max_tokens: int, **settings: Any) -> tuple[float, float]:
    """True tokens over cells of rows that are all max_tokens wide: of the stream, and offline."""
    tokens = np.arange(int(lengths.max()), dtype=np.int32)
    source = [{"input_ids": tokens[:n]} for n in lengths.tolist()]
    dataset = packed_stream(
        source, tokenizer=0, max_tokens=max_tokens, overflow="truncate", **settings
    )
    num_rows = num_tokens = 0
    for batch in dataset:
        num_rows += len(batch)
        num_tokens += batch.num_tokens
    plan = pack(lengths, max_tokens, overflow="truncate")
    assert num_tokens == np.minimum(lengths, max_tokens).sum()
    return num_tokens / (num_rows * max_tokens), num_tokens / (plan.num_rows * max_tokens)


@pytest.mark.parametrize(
    ("name", "max_tokens"),
    [
        ("gsm8k_train", 2048),
        ("taskmaster4_all", 4096),
        ("mix_all", 16384),
        ("tau_airline_all", 8192),
    ],
)
def test_within_one_percent_of_offline_on_real_lengths(
    shared_data: Path, name: str, max_tokens: int
) -> None:
    lengths = np.load(shared_data / "lengths" / f"{name}.qwen.npy")[:6000]
    buffer_size = 4000 if max_tokens == 16384 else 1000  # a window has several steps of such rows
    stream, offline = stream_efficiency(lengths, max_tokens, buffer_size=buffer_size, rows=4)
    assert offline - stream <= 0.01, (stream, offline)


def test_steps_over_ranks_are_full_and_as_even_as_chance_has_it(shared_data: Path) -> None:
    lengths = np.load(shared_data / "lengths" / "mix_all.qwen.npy")[:6000]
    steps = steps_of(lengths[lengths <= 8192], 4, 2, 8192, num_passes=1)
    found = figures(steps, 8192)
    assert found["steps"] > 20
    assert found["full"] > 0.98
    assert 1 < found["imbalance"] < 1.15
