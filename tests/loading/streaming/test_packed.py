"""Packing a stream: against a plain loop, and what becomes of over-long examples."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import assert_same_batch
from tests.building import packed_collator, packed_stream
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    all_tokens,
    make_examples,
    place_of,
    plain_loop,
    tokens_of,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout


@given(
    lengths=st.lists(st.integers(1, 14), max_size=50),
    buffer_size=st.integers(4, 25),
    rows=st.integers(1, 4),
    strategy=st.sampled_from(["best_fit_decreasing", "first_fit_decreasing", "sequential"]),
    overflow=st.sampled_from(["truncate", "drop"]),
    align=st.sampled_from([1, 2]),
    most=st.sampled_from([None, 2]),
)
def test_equals_the_plain_loop(
    lengths: list[int],
    buffer_size: int,
    rows: int,
    strategy: str,
    overflow: str,
    align: int,
    most: int | None,
) -> None:
    examples = make_examples(lengths, masks=True)
    options: dict[str, Any] = {
        "max_tokens": 12,
        "strategy": strategy,
        "overflow": overflow,
        "parallel": ParallelLayout(tp=align),
        "max_sequences_per_row": most,
    }
    dataset = packed_stream(examples, tokenizer=0, buffer_size=buffer_size, rows=rows, **options)
    expected = plain_loop(examples, packed_collator(0, **options), buffer_size, rows)
    found = list(dataset)
    assert len(found) == len(expected)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)
    kept = [{"input_ids": e["input_ids"][:12]} for e in examples]
    if overflow == "drop":
        kept = [e for e, n in zip(examples, lengths, strict=True) if n <= 12]
        assert sum(b.metadata["num_dropped"] for b in found) == sum(n > 12 for n in lengths)
    assert tokens_of(found) == all_tokens(kept)
    assert all(b["cu_seq_lens"].values.max() <= 12 for b in found)


def test_batches_by_hand() -> None:
    lengths = [4, 8, 12, 5, 6, 2, 9, 3]
    dataset = packed_stream(make_examples(lengths), **SETTINGS | {"buffer_size": 6})
    # 4 8 12 5 6 2 fill four rows, levelled to 9 tokens or fewer beside the 12; 9 3 are the rest
    assert [b["sub_seq_lengths"].tolist() for b in dataset] == [
        [[12]], [[6, 2]], [[4, 5]], [[8]], [[9, 3]],
    ]  # fmt: skip
    assert [b["input_ids"].shape[1] for b in dataset] == [12, 8, 9, 8, 12]


def test_rows_are_a_multiple_of_dp() -> None:
    settings = SETTINGS | {"parallel": ParallelLayout(dp=2), "rows": 4}
    batches = list(packed_stream(EXAMPLES, **settings | {"buffer_size": 30}))
    assert {len(batch) % 2 for batch in batches} == {0}
    assert {len(batch) for batch in batches[:-1]} == {4}
    assert tokens_of(batches) == all_tokens(EXAMPLES)


def test_an_empty_stream_has_no_batches() -> None:
    assert list(packed_stream([], **SETTINGS)) == []


def test_arrays_and_tensors() -> None:
    lists = list(packed_stream(EXAMPLES, **SETTINGS))
    for convert in (np.array, torch.tensor):
        examples = [{"input_ids": convert(e["input_ids"])} for e in EXAMPLES]
        for batch, expected in zip(packed_stream(examples, **SETTINGS), lists, strict=True):
            assert_same_batch(batch, expected)


# --- over-long examples ---


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["none", "labels", "loss_mask", "num_actions"])
def test_split_pieces_are_those_of_the_collator(form: str, rows: int) -> None:
    examples = make_examples([3, 40, 5, 12, 13, 2, 6, 29, 1])
    rng = np.random.default_rng(0)
    for example in examples:
        n = len(example["input_ids"])
        if form == "labels":
            example["labels"] = [
                t + 1 if rng.random() < 0.5 else -100 for t in example["input_ids"]
            ]
        elif form != "none":
            size = n if form == "loss_mask" else int(rng.integers(0, n + 1))
            example["loss_mask"] = rng.random(size).round(2).tolist()
            if form == "num_actions":
                example["num_actions"] = size
    settings = SETTINGS | {"overflow": "split", "normalize_loss": False, "buffer_size": 4}
    dataset = packed_stream(examples, **settings, rows=rows)
    whole = packed_collator(0, max_tokens=12, overflow="split", normalize_loss=False)(examples)

    def cells(batches: list[Any]) -> list[tuple[Any, ...]]:
        """Of every token: position, label, loss weight; and how long its piece is."""
        found = []
        for batch in batches:
            weights = torch.nn.functional.pad(batch["loss_mask"], (1, 0))
            fields = (batch["input_ids"], batch["position_ids"], batch["labels"], weights)
            real = batch["attention_mask"] == 1
            found += zip(*(field[real].tolist() for field in fields), strict=True)
        return sorted(found)

    def pieces(batches: list[Any]) -> Counter[tuple[int, ...]]:
        keys = ("sub_seq_lengths", "example_starts", "num_actions")
        parts = []
        for b in batches:
            ragged = [b["sub_seq_lengths"], *(b.row_metadata[key] for key in keys[1:])]
            parts += zip(*(np.asarray(r.values).tolist() for r in ragged), strict=True)
        return Counter(parts)

    found = list(dataset)
    assert cells(found) == cells([whole])
    assert pieces(found) == pieces([whole])
    assert sum(b.metadata["num_cut"] for b in found) == 4 + 2 + 3  # pieces of 40, 13 and 29 tokens
    assert all(len(b.metadata["cut"]) == b.metadata["num_cut"] for b in found)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [1] * 13}, "example 23 of the stream has 13 tokens, more than the 12 that"),
        ({"input_ids": []}, "example 23 of the stream is empty"),
        ({"text": "hi"}, r"no input_ids in example 23 of the stream, got keys \['text'\]"),
        ("hi", "example 23 of the stream is a str; "),
        ({"input_ids": 5}, "example 23 of the stream: input_ids"),
        ({"input_ids": "text, longer than a row"}, "23 of the stream: input_ids is str; give a li"),
        ({"input_ids": [4, -1]}, "example 23 of the stream: input_ids is -1 at token 1"),
        ({"input_ids": [4, 5], "labels": [4, 5]}, r"differ in labels.*\(a batch of examples"),
    ],
)
@pytest.mark.parametrize("shard", [{}, {"dp_rank": 1, "dp_size": 2}])
def test_a_bad_example_is_named_by_its_position(
    bad: Any, message: str, shard: dict[str, int]
) -> None:
    examples: list[Any] = copy.deepcopy(EXAMPLES)
    examples[23] = bad
    with pytest.raises(DataError, match=message):
        list(packed_stream(examples, **SETTINGS, **shard))


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_batch_is_not_held_beside_the_next(
    num_shards: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    collate, given = PackedCollator.__call__, []

    def collated(collator: PackedCollator, examples: Any) -> Any:
        assert all(batch() is None for batch in given)
        return collate(collator, examples)

    monkeypatch.setattr(PackedCollator, "__call__", collated)
    for batch in packed_stream(EXAMPLES, **SETTINGS, num_shards=num_shards):
        given.append(weakref.ref(batch))
        del batch
    assert len(given) > 3


def test_an_error_of_the_source_comes_through_and_the_state_goes_on() -> None:
    class FlakyError(Exception):
        pass

    fail = True

    def source() -> Iterator[dict[str, Any]]:
        for i, example in enumerate(EXAMPLES):
            if i == 25 and fail:
                raise FlakyError("disk")
            yield example

    dataset = packed_stream(source, **SETTINGS)
    found: list[Any] = []
    with pytest.raises(FlakyError, match="disk"):
        found.extend(dataset)  # keeps what came before the error
    assert len(found) >= 3
    fail = False
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert tokens_of([*found, *dataset]) == all_tokens(EXAMPLES)


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "sequential"])
@pytest.mark.parametrize("most", [8, 14])
def test_equals_the_plain_loop_over_many_windows(strategy: str, rows: int, most: int) -> None:
    lengths = np.random.default_rng(most).integers(1, most + 1, size=500).tolist()
    examples = make_examples(lengths)
    options: dict[str, Any] = {"max_tokens": 12, "strategy": strategy, "overflow": "drop"}
    settings = {"buffer_size": 12, "rows": rows}
    dataset = packed_stream(examples, tokenizer=0, **settings, **options)
    found, begun = [], set()
    for batch in dataset:
        found.append(batch)
        begun.add(place_of(dataset)["num_read"])
    assert len(begun) >= 5
    expected = plain_loop(examples, packed_collator(0, **options), 12, rows)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)


def test_rows_do_not_come_longest_first() -> None:
    lengths = np.clip(np.random.default_rng(3).lognormal(3, 1, size=8000), 1, 200).astype(int)
    dataset = packed_stream(
        make_examples(lengths.tolist()), tokenizer=0, max_tokens=200, buffer_size=2000, rows=4
    )
    windows: list[list[Batch]] = [[]]
    for batch in dataset:
        windows[-1].append(batch)
        if place_of(dataset)["num_batches"] == 0:
            windows.append([])
    assert len(windows) >= 3
    for window in windows[:2]:
        quarter = len(window) // 4
        means = [
            np.concatenate([b["sub_seq_lengths"].values for b in part]).mean()
            for part in (window[:quarter], window[quarter:-quarter], window[-quarter:])
        ]
        assert quarter > 15
        assert max(means) < 1.25 * min(means), means  # longest first: 2 times
