"""Packing a stream of columns: the same batches as from the examples, one by one, without them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.worker import WorkerInfo

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.collators.test_cost import num_calls
from tests.loading.seals import resealed
from tests.loading.streaming.column_sources import FORMS, SOURCES, dataset_of, examples_of, table_of
from tests.loading.streaming.streaming_oracle import EXAMPLES, SETTINGS, moved
from torch_collate_kit.batch import Batch
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.loading.dataset.columns import ListColumn
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged


def passes(
    source: Any, worker: tuple[int, int], settings: dict[str, Any]
) -> tuple[list[Batch], list[dict[str, Any]]]:
    """Batches of a pass, and the state before the first and after each."""
    info = WorkerInfo(id=worker[0], num_workers=worker[1], seed=0, dataset=None)
    torch.utils.data._utils.worker._worker_info = info if worker[1] else None
    try:
        dataset = packed_stream(source, **settings)
        batches, states = [], [dataset.state_dict()]
        for batch in dataset:
            batches.append(batch)
            states.append(json.loads(json.dumps(dataset.state_dict())))
        for state in states[1 :: max(1, len(states) // 4)]:
            dataset = packed_stream(source, **settings)
            dataset.load_state_dict(state)
            rest = batches[states.index(state) :]
            resumed = list(dataset)
            assert len(resumed) == len(rest)
            for found, expected in zip(resumed, rest, strict=True):
                assert_same_batch(found, expected)
    finally:
        torch.utils.data._utils.worker._worker_info = None
    return batches, states


@given(
    name=st.sampled_from(list(SOURCES)),
    form=st.sampled_from(FORMS),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    buffer_size=st.integers(4, 25),
    rows=st.integers(1, 4),
    strategy=st.sampled_from(["best_fit_decreasing", "sequential", "balanced"]),
    overflow=st.sampled_from(["truncate", "drop", "split"]),
    align=st.sampled_from([1, 2, 5]),
    shard=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
    worker=st.sampled_from([(0, 0), (0, 1), (1, 2)]),
    presharded=st.booleans(),
)
def test_equals_the_examples_one_by_one(
    name: str,
    form: str,
    lengths: list[int],
    buffer_size: int,
    rows: int,
    strategy: str,
    overflow: str,
    align: int,
    shard: tuple[int, int],
    worker: tuple[int, int],
    presharded: bool,
) -> None:
    examples = examples_of(form, lengths)
    settings: dict[str, Any] = {
        "tokenizer": 0,
        "max_tokens": 13,
        "buffer_size": buffer_size,
        "rows": rows,
        "strategy": strategy,
        "overflow": overflow,
        "parallel": ParallelLayout(tp=align),
        "dp_rank": shard[0],
        "dp_size": shard[1],
        "presharded": presharded,
        "train_all": form == "none",  # one source has a column of text
    }
    expected, states = passes(examples, worker, settings)
    found, found_states = passes(SOURCES[name](examples), worker, settings)
    assert found_states == as_known(states, name)
    assert len(found) == len(expected)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)
        assert batch == wanted


def as_known(states: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What a callable makes is not looked at, so nothing is known of the data."""
    return [resealed(state, fingerprint=None) for state in states] if name == "callable" else states


@pytest.mark.parametrize(
    ("name", "form", "shard"),
    [("chunks", form, {}) for form in FORMS]
    + [(name, "last tokens", {"dp_rank": 1, "dp_size": 2}) for name in SOURCES],
)
def test_over_long_examples_at_every_stop(name: str, form: str, shard: dict[str, int]) -> None:
    """Pieces that do not fit the buffer any more wait, as the rest of an example does on resume."""
    examples = examples_of(form, [2, 23, 3, 11, 1, 10, 5, 26])
    settings = SETTINGS | {"overflow": "split", "max_tokens": 5, "buffer_size": 3}
    settings |= shard | {"strategy": "sequential"}  # a window a buffer
    expected, states = passes(examples, (0, 0), settings)
    assert sum(state["shards"][str(shard.get("dp_rank", 0))][1] > 0 for state in states) >= 5
    found, found_states = passes(SOURCES[name](examples), (0, 0), settings)
    assert found_states == as_known(states, name)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)
    for state in states[::2]:  # of the one source, loaded beside the other
        dataset = packed_stream(SOURCES[name](examples), **settings)
        dataset.load_state_dict(state)
        rest = expected[states.index(state) :]
        for batch, wanted in zip(dataset, rest, strict=True):
            assert_same_batch(batch, wanted)


# --- which sources are read as columns ---


class Doubled(TokenizedDataset):
    """Gives other rows than it holds."""

    def __getitem__(self, index: Any) -> Any:
        return {name: np.repeat(row, 2) for name, row in super().__getitem__(index).items()}


def plain() -> Any:
    return dataset_of(examples_of("loss_mask", [3, 5, 2, 4]))


@pytest.mark.parametrize(
    "source",
    [
        plain().with_format("numpy"),
        plain().with_format(None, columns=["input_ids"]),
        plain().with_transform(lambda rows: {k: [v * 2 for v in rows[k]] for k in rows}),
        Doubled(table_of(examples_of("loss_mask", [3, 5, 2]))),
        plain().to_iterable_dataset(),
        EXAMPLES,
    ],
)
def test_what_gives_something_else_is_iterated_over(source: Any) -> None:
    expected = packed_stream([dict(example) for example in source], **SETTINGS)
    found = list(packed_stream(source, **SETTINGS))
    assert found
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)


# --- what it costs ---


@pytest.mark.parametrize("overflow", ["truncate", "split"])
@pytest.mark.parametrize("num_skipped", [0, 15])
def test_rows_are_looked_at_as_late_as_one_by_one(
    overflow: str, num_skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row behind the buffer is looked at, and tokens are copied for their batch alone."""
    seen, taken = [0], [0]
    lengths_at, take = ListColumn.lengths_at, ListColumn.take

    def counted_lengths(self: ListColumn, rows: Any, named: Any) -> Any:
        seen.append(int(named.max()) + 1)
        return lengths_at(self, rows, named)

    def counted_take(self: ListColumn, *arguments: Any) -> Ragged:
        rows = take(self, *arguments)
        taken.append(len(rows.values))
        return rows

    monkeypatch.setattr(ListColumn, "lengths_at", counted_lengths)
    monkeypatch.setattr(ListColumn, "take", counted_take)
    lengths = np.random.default_rng(0).integers(1, 9, size=129).tolist()
    source = TokenizedDataset(table_of(examples_of("none", lengths)))
    dataset = packed_stream(source, **SETTINGS | {"overflow": overflow})
    dataset.load_state_dict(moved(dataset.state_dict(), num_batches=num_skipped))
    taken.clear()  # the rows of the fingerprint
    given_out = num_tokens = 0
    for batch in dataset:
        assert num_skipped or max(seen) - given_out <= 7
        given_out += batch.metadata["num_examples"]
        num_tokens += batch.num_tokens
        assert sum(taken) == num_tokens
    assert num_skipped or given_out == 129
    assert max(seen) == 129


def test_calls_do_not_grow_with_the_examples() -> None:
    """Nor those of planning, which grow with the distinct lengths."""
    counts = []
    for num_examples in (1000, 6000):
        lengths = np.resize([3, 5, 8, 2, 7], num_examples).tolist()
        table = table_of(examples_of("padding mask", lengths))
        for source in (TokenizedDataset(table), dataset_of(examples_of("last tokens", lengths))):
            dataset = packed_stream(
                source,
                tokenizer=0,
                max_tokens=num_examples // 2,
                buffer_size=num_examples,
                strategy="best_fit_decreasing",  # levelling has a loop over pieces
            )
            counts.append((num_calls(lambda d=dataset: list(d)), len(list(dataset))))
    assert counts[0][1] == counts[2][1] == counts[3][1] >= 10, "as many batches"
    assert min(calls for calls, _ in counts) > 1000, "nothing was counted"
    assert counts[2][0] < counts[0][0] + 1000, counts
    assert counts[3][0] < counts[1][0] + 1000, counts
