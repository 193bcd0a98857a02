"""Packing a stream: against a plain loop, stopped at every step, and what it holds in memory."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import assert_same_batch
from tests.building import packed_collator, packed_stream
from tests.loading.streaming.step_figures import figures, steps_of
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    Counted,
    StatefulSource,
    all_tokens,
    make_examples,
    moved,
    place_of,
    plain_loop,
    tokens_of,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import PackedIterableDataset
from torch_collate_kit.packing import ParallelLayout, pack
from torch_collate_kit.testing import assert_exact_resume


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


CASES: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, 1) for name in SOURCES),
    ("stateful", {"rows": 3, "buffer_size": 16}, 1),
    ("stateful", {"dp_rank": 1, "dp_size": 2}, 1),
    ("stateful", {"overflow": "split", "max_tokens": 5}, 1),
    ("stateful", {"overflow": "drop", "max_tokens": 5}, 1),
    ("stateful", {"buffer_size": 1}, 1),
    ("stateful", {"buffer_size": 1000}, 1),
    ("list", {"buffer_size": 4}, 3),  # many windows
    ("list", {"buffer_size": 12, "rows": 3}, 3),  # batches often end in what was held back
    ("list", {"buffer_size": 12, "rows": 3, "overflow": "split", "max_tokens": 7}, 3),
]


@pytest.mark.parametrize(("name", "more", "times"), CASES, ids=str)
def test_exact_resume(name: str, more: dict[str, Any], times: int) -> None:
    def make() -> PackedIterableDataset:
        source = EXAMPLES * times if times > 1 else SOURCES[name]()
        return packed_stream(source, **SETTINGS | more)

    batches = list(make())
    if "dp_rank" not in more and more.get("overflow") != "drop":
        assert tokens_of(batches) == all_tokens(EXAMPLES * times)
    assert_exact_resume(
        make,
        num_steps=len(batches) + 3,  # into the second pass
        stops=range(len(batches)) if (name, times) == ("list", 1) else range(0, len(batches), 5),
        max_state_bytes=2000,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "sequential"}, {"rows": 3, "max_tokens": 8, "buffer_size": 12}],
)
def test_resume_reads_at_most_one_window_again(settings: dict[str, Any]) -> None:
    options = SETTINGS | settings
    examples = EXAMPLES * 4
    dataset = packed_stream(StatefulSource(examples), **options)
    most, places = 0, set()
    for _ in dataset:
        source = StatefulSource(examples)
        resumed = packed_stream(source, **options)
        resumed.load_state_dict(dataset.state_dict())
        next(iter(resumed), None)
        most = max(most, source.num_reads)
        places.add(place_of(dataset)["num_read"])
    assert options["buffer_size"] // 2 < most <= options["buffer_size"]
    assert len(places) >= 3
    assert place_of(dataset)["num_read"] == len(examples)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pass_ends_behind_the_last_example(rows: int) -> None:
    for num_examples in range(0, len(EXAMPLES), 3):
        settings = SETTINGS | {"rows": rows}
        dataset = packed_stream(EXAMPLES[:num_examples], **settings)
        found = list(dataset)
        state = dataset.state_dict()
        assert place_of(dataset)["num_read"] == num_examples
        assert place_of(dataset)["num_batches"] == 0
        dataset.load_state_dict(state)
        assert found or not num_examples
        assert list(dataset) == []


@pytest.mark.parametrize("num_shards", [None, 1])
@pytest.mark.parametrize("edited", ["the state given", "the state returned"])
def test_a_state_that_is_edited_does_not_move_the_stream(
    edited: str, num_shards: int | None
) -> None:
    def stream() -> PackedIterableDataset:
        source = StatefulSource(EXAMPLES)
        options = SETTINGS | {"num_shards": num_shards, "strategy": "sequential"}
        return packed_stream((lambda: source) if num_shards else source, **options)

    saved, resumed = stream(), stream()
    batches = iter(saved)
    list(islice(batches, 9))
    given = saved.state_dict()
    resumed.load_state_dict(given)
    before = copy.deepcopy(given)
    set_to_zero(given if edited == "the state given" else resumed.state_dict())
    assert resumed.state_dict() == before
    set_to_zero(saved.state_dict())
    assert saved.state_dict() == before, "in the middle of a pass"
    for batch, wanted in zip(resumed, batches, strict=True):
        assert_same_batch(batch, wanted)


def set_to_zero(state: Any) -> None:
    """All numbers of a state, however deep they lie."""
    entries = list(state.items() if isinstance(state, dict) else enumerate(state))
    for key, value in entries:
        if isinstance(value, dict | list):
            set_to_zero(value)
        elif isinstance(value, int):
            state[key] = 0


@pytest.mark.parametrize("num_skipped", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_never_holds_more_than_the_buffer(num_skipped: int, shuffle: bool) -> None:
    """Shuffled, not more than a block beside it."""
    source = Counted(EXAMPLES * 3)
    dataset = packed_stream(source, **SETTINGS, shuffle=shuffle)
    dataset.load_state_dict(moved(dataset.state_dict(), num_batches=num_skipped))
    gc.disable()
    try:
        given_out = 0
        for batch in dataset:
            given_out += batch.metadata["num_examples"]
            assert num_skipped or shuffle or source.num_made - given_out <= 7
            assert len(source.alive) <= 7 * (1 + shuffle)
    finally:
        gc.enable()
    assert given_out == 3 * len(EXAMPLES) or num_skipped
    assert 7 <= source.most <= 7 * (1 + shuffle) + 1  # the one that was read just now


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
