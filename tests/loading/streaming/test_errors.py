"""Packing a stream: wrong states and wrong arguments are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.building import packed_stream
from tests.loading.seals import resealed
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    all_tokens,
    make_examples,
    moved,
    tokens_of,
)
from torch_collate_kit.errors import StateError
from torch_collate_kit.packing import ParallelLayout

split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 13}, "state is of max_tokens=12, the dataset has max_tokens=13; resume"),
        ({"buffer_size": 8}, "buffer_size=7, the dataset has buffer_size=8"),
        ({"rows": 2}, "rows_per_rank=1, the dataset has rows_per_rank=2; batch_rows / parallel"),
        ({"parallel": ParallelLayout(tp=2)}, "align=1, the dataset has align=2"),
        ({"dp_size": 2}, "dp_size=1, the dataset has dp_size=2"),
        ({"presharded": True}, "presharded=False, the dataset has presharded=True"),
        ({"tokenizer": 7}, "pad_token_id=0, the dataset has pad_token_id=7"),
        ({"balance": "tokens"}, "balance='attention', the dataset has balance='tokens'"),
        ({"train_all": True}, "train_all=False, the dataset has train_all=True"),
        ({"fixed_width": True}, "fixed_width=False, the dataset has fixed_width=True"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str) -> None:
    dataset = packed_stream(EXAMPLES, **SETTINGS)
    next(iter(dataset))
    other = packed_stream(EXAMPLES, **SETTINGS | change)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == before
    assert tokens_of(list(other)) == all_tokens(EXAMPLES[:: change.get("dp_size", 1)])


def test_a_state_of_a_longer_or_another_stream_is_refused() -> None:
    dataset = packed_stream(EXAMPLES, **SETTINGS)
    state = dataset.state_dict()
    shorter = packed_stream(EXAMPLES[:9], **SETTINGS)
    shorter.load_state_dict(resealed(moved(state, num_read=20), fingerprint=None))
    with pytest.raises(StateError, match="after example 20 of the stream, which has 9; the source"):
        next(iter(shorter))
    dataset.load_state_dict(moved(state, num_batches=80))
    with pytest.raises(StateError, match=r"is 80 batches after example 0 .* at most 3 follow now"):
        next(iter(dataset))
    dataset.load_state_dict(moved(state, num_read=len(EXAMPLES), num_batches=1))
    with pytest.raises(StateError, match=r"is 1 batches after example 43 .* at most 1 follow now"):
        next(iter(dataset))
    dataset.load_state_dict(moved(state, source={"next": 20}))
    with pytest.raises(
        StateError, match="holds a state of the source, but this source cannot load one"
    ):
        next(iter(dataset))


def as_list(examples: list[dict[str, Any]]) -> Any:
    return examples


SPLIT = SETTINGS | {"overflow": "split", "max_tokens": 5, "parallel": ParallelLayout(tp=2)}
LONG = make_examples([7, 8, 9, 3])  # pieces of 4 tokens


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"source": iter(EXAMPLES)}, TypeError, "stream is a list_iterator, an iterator that can"),
        ({"source": 5}, TypeError, "stream must be an iterable of examples or a callable .* got"),
        ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
        ({"rows": 0}, ValueError, "batch_rows must be at least 1, got 0"),
        ({"rows": 9}, ValueError, "buffer_size must be at least 9, the rows of a batch, got 7"),
        ({"dp_rank": 2, "dp_size": 2}, ValueError, r"dp_rank must be below parallel\.dp=2, got 2"),
        ({"tokenizer": None}, TypeError, "tokenizer must be an int pad id or have .pad_token_id"),
        ({"max_length": 5}, TypeError, "got an unexpected keyword argument .max_length."),
        (
            {"parallel": ParallelLayout(dp=2), "rows": 3},
            ValueError,
            r"batch_rows must be a multiple of parallel\.dp=2, got 3",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    source = arguments.get("source", EXAMPLES)
    rest = {key: value for key, value in arguments.items() if key != "source"}
    with pytest.raises(kind, match=message):
        packed_stream(source, **SETTINGS | rest)


def test_a_source_is_not_split_twice() -> None:
    stream = split_dataset_by_node(SOURCES["shards"](), 1, 2)
    with pytest.raises(
        ValueError, match=r"already \(rank 1 of 2\) .* again by parallel\.dp=2; pass"
    ):
        packed_stream(stream, **SETTINGS, dp_rank=1, dp_size=2)
    with pytest.raises(ValueError, match=r"already \(rank 1 of 2\)"):
        next(iter(packed_stream(lambda: stream, **SETTINGS, dp_size=2)))
    with pytest.raises(TypeError, match="the callable source returned an int; it must return"):
        next(iter(packed_stream(lambda: 5, **SETTINGS)))


def test_rows_for_more_ranks_are_refused_where_each_plans_its_own() -> None:
    with pytest.raises(ValueError, match=r"^rows_multiple_of=4 levels rows that ranks plan tog"):
        packed_stream(EXAMPLES, **SETTINGS, dp_size=2, rows_multiple_of=4)
    whole = packed_stream(
        EXAMPLES, **SETTINGS, dp_size=2, rows_multiple_of=4, dp_rank="all", rows=2
    )
    assert tokens_of(list(whole)) == all_tokens(EXAMPLES)
