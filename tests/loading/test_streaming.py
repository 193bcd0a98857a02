"""Packing a stream: against a plain loop, over ranks and workers, stopped at every step."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from tests.batch_checks import assert_same_batch
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading._stream import Place
from torch_collate_kit.loading._window import Entry, Windows
from torch_collate_kit.loading.streaming import PackedIterableDataset
from torch_collate_kit.packing import ParallelLayout, pack
from torch_collate_kit.testing import assert_exact_resume

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
SETTINGS: dict[str, Any] = {"tokenizer": 0, "max_tokens": 12, "buffer_size": 7}


def make_examples(lengths: list[int], *, masks: bool = False) -> list[dict[str, Any]]:
    """Example i has the tokens 1000 * (i + 1), 1000 * (i + 1) + 1, ..."""
    examples = [
        {"input_ids": [1000 * (i + 1) + j for j in range(n)]} for i, n in enumerate(lengths)
    ]
    if masks:  # of every third token
        examples = [e | {"loss_mask": [int(t % 3 == 0) for t in e["input_ids"]]} for e in examples]
    return examples


LENGTHS = np.random.default_rng(0).integers(1, 9, size=43).tolist()
EXAMPLES = make_examples(LENGTHS)


class StatefulSource:
    """A list that can be put back to a place, and counts how often it was read."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples, self.start, self.next, self.num_reads = examples, 0, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.next, self.start = self.start, 0
        while self.next < len(self.examples):
            self.next += 1
            self.num_reads += 1
            yield self.examples[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


def tokens_of(batches: list[Any]) -> list[int]:
    """All real tokens, sorted."""
    real = [batch["input_ids"][batch["attention_mask"] == 1] for batch in batches]
    return sorted(torch.cat(real).tolist()) if real else []


def all_tokens(examples: list[dict[str, Any]]) -> list[int]:
    return sorted(token for example in examples for token in example["input_ids"])


# --- the rule, in a plain loop ---


def plain_loop(
    examples: list[dict[str, Any]], collator: PackedCollator, buffer_size: int, rows_per_batch: int
) -> list[Batch]:
    """Give out full rows while a window of eight buffers lasts, then a beginning of the buffer."""
    limit, align = collator.max_tokens, collator.parallel.align
    settings: dict[str, Any] = {
        "strategy": collator.strategy,
        "align": align,
        "overflow": collator.overflow,
        "max_sequences_per_row": collator.max_sequences_per_row,
    }
    batches: list[Batch] = []
    unread, buffer, held_back, num_read = list(range(len(examples))), [], set(), 0
    num_buffers = 1 if collator.strategy == "sequential" else 8

    def rows_of(waiting: list[int]) -> list[list[int]]:
        plan = pack([len(examples[i]["input_ids"]) for i in waiting], limit, **settings)
        return [[waiting[j] for j in row] for row in plan.bins if row]

    def percent_free(row: list[int]) -> int:
        lengths = [min(len(examples[i]["input_ids"]), limit) for i in row]
        return (limit - sum(-(-n // align) * align for n in lengths)) * 100 // limit

    def give(rows: list[list[int]], among: list[int]) -> None:
        kept = {i for row in rows_of(among) for i in row}
        lost = [i for i in among if i not in kept]
        rows.sort(key=lambda row: row[0])
        for i in range(0, max(1, len(rows)), rows_per_batch):
            members = sum(rows[i : i + rows_per_batch], lost if i == 0 else [])
            batches.append(collator([examples[j] for j in sorted(members)]))
            buffer[:] = [j for j in buffer if j not in members]

    def full_rows() -> list[list[int]]:
        rows = sorted(rows_of(buffer), key=lambda row: (percent_free(row), row[0]))
        for most in range(rows_per_batch, len(rows) - rows_per_batch + 1, rows_per_batch):
            if 3 * sum(map(len, rows[:most])) >= sum(map(len, rows)):
                return rows[:most]
        return []

    def beginning() -> list[int]:
        num_rows = len(rows_of(buffer))
        for fewer in range(len(buffer) - 1, 0, -1):
            made = len(rows_of(buffer[:fewer]))
            if 0 < made < num_rows and made % rows_per_batch == 0:
                return buffer[:fewer]
        return list(buffer)

    while unread or buffer:
        while unread and len(buffer) < buffer_size:
            buffer.append(unread.pop(0))
            num_read += 1
        is_full = len(buffer) == buffer_size  # there may be more
        if is_full and num_read <= (num_buffers - 1) * buffer_size and (rows := full_rows()):
            give(rows, buffer)
            held_back = set(buffer)
        else:
            given = beginning() if is_full else list(buffer)
            give(rows_of(given), given)
            if not buffer or given[-1] not in held_back:
                held_back, num_read = set(), len(buffer)
    return batches


@given(
    lengths=st.lists(st.integers(1, 14), max_size=50),
    buffer_size=st.integers(4, 25),
    rows_per_batch=st.integers(1, 4),
    strategy=st.sampled_from(["best_fit_decreasing", "first_fit_decreasing", "sequential"]),
    overflow=st.sampled_from(["truncate", "drop"]),
    align=st.sampled_from([1, 2]),
    most=st.sampled_from([None, 2]),
)
def test_equals_the_plain_loop(
    lengths: list[int],
    buffer_size: int,
    rows_per_batch: int,
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
    dataset = PackedIterableDataset(
        examples, tokenizer=0, buffer_size=buffer_size, rows_per_batch=rows_per_batch, **options
    )
    expected = plain_loop(examples, PackedCollator(0, **options), buffer_size, rows_per_batch)
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


@pytest.mark.parametrize("rows_per_batch", [1, 3, 6])
@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "sequential"])
@pytest.mark.parametrize("most", [8, 14])
def test_equals_the_plain_loop_over_many_windows(
    strategy: str, rows_per_batch: int, most: int
) -> None:
    lengths = np.random.default_rng(most).integers(1, most + 1, size=500).tolist()
    examples = make_examples(lengths)
    options: dict[str, Any] = {"max_tokens": 12, "strategy": strategy, "overflow": "drop"}
    settings = {"buffer_size": 12, "rows_per_batch": rows_per_batch}
    dataset = PackedIterableDataset(examples, tokenizer=0, **settings, **options)
    found, begun = [], set()
    for batch in dataset:
        found.append(batch)
        begun.add(dataset.state_dict()["num_read"])
    assert len(begun) >= 5
    expected = plain_loop(examples, PackedCollator(0, **options), **settings)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)


def test_batches_by_hand() -> None:
    lengths = [4, 8, 12, 5, 6, 2, 9, 3]
    dataset = PackedIterableDataset(make_examples(lengths), **SETTINGS | {"buffer_size": 6})
    # 4 8 12 5 6 2: the row 8 4 is full and a third of the examples. 12 5 6 2 9 3: so is the 12, but
    # it takes 9 3 too to make a third. Then 5 6 2 are the rest.
    assert [b["sub_seq_lengths"].tolist() for b in dataset] == [
        [[8, 4]], [[12]], [[9, 3]], [[6, 5]], [[2]],
    ]  # fmt: skip
    assert [b["input_ids"].shape[1] for b in dataset] == [12, 12, 12, 11, 2]


@pytest.mark.parametrize("rows_per_batch", [1, 2, 4, 8])
@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "balanced"])
def test_every_batch_but_the_last_is_whole(rows_per_batch: int, strategy: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, size=700).tolist()
    dataset = PackedIterableDataset(
        make_examples(lengths),
        tokenizer=0,
        max_tokens=100,
        buffer_size=64,
        rows_per_batch=rows_per_batch,
        strategy=strategy,
    )
    sizes = [len(batch) for batch in dataset]
    assert set(sizes[:-1]) == {rows_per_batch}
    assert 1 <= sizes[-1] <= rows_per_batch


def test_rows_are_a_multiple_of_dp() -> None:
    settings = SETTINGS | {"parallel": ParallelLayout(dp=2), "rows_per_batch": 4}
    batches = list(PackedIterableDataset(EXAMPLES, **settings | {"buffer_size": 30}))
    assert {len(batch) % 2 for batch in batches} == {0}
    assert {len(batch) for batch in batches[:-1]} == {4}
    assert tokens_of(batches) == all_tokens(EXAMPLES)


def test_a_buffer_of_less_than_a_batch_gives_what_it_has() -> None:
    examples = make_examples([1] * 20)
    dataset = PackedIterableDataset(examples, **SETTINGS | {"rows_per_batch": 3})
    assert [b["sub_seq_lengths"].tolist() for b in dataset] == [[[1] * 7], [[1] * 7], [[1] * 6]]


def test_rows_do_not_come_longest_first() -> None:
    lengths = np.clip(np.random.default_rng(3).lognormal(3, 1, size=8000), 1, 200).astype(int)
    dataset = PackedIterableDataset(
        make_examples(lengths.tolist()),
        tokenizer=0,
        max_tokens=200,
        buffer_size=500,
        rows_per_batch=4,
    )
    windows: list[list[Batch]] = [[]]
    for batch in dataset:
        windows[-1].append(batch)
        if dataset.state_dict()["num_batches"] == 0:
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


def test_an_empty_stream_has_no_batches() -> None:
    assert list(PackedIterableDataset([], **SETTINGS)) == []


def test_arrays_tensors_and_model_inputs() -> None:
    lists = list(PackedIterableDataset(EXAMPLES, **SETTINGS))
    for convert in (np.array, torch.tensor):
        examples = [{"input_ids": convert(e["input_ids"])} for e in EXAMPLES]
        for batch, expected in zip(PackedIterableDataset(examples, **SETTINGS), lists, strict=True):
            assert_same_batch(batch, expected)
    plain = list(PackedIterableDataset(EXAMPLES, **SETTINGS, model_inputs=True))
    assert torch.equal(plain[3]["position_ids"], lists[3]["position_ids"])
    assert plain[3]["use_cache"] is False


# --- over-long examples ---


@pytest.mark.parametrize("rows_per_batch", [1, 3])
@pytest.mark.parametrize("form", ["none", "labels", "loss_mask", "num_actions"])
def test_split_pieces_are_those_of_the_collator(form: str, rows_per_batch: int) -> None:
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
    dataset = PackedIterableDataset(examples, **settings, rows_per_batch=rows_per_batch)
    whole = PackedCollator(0, max_tokens=12, overflow="split", normalize_loss=False)(examples)

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
            ragged = [b["sub_seq_lengths"], *(b.metadata[key] for key in keys[1:])]
            parts += zip(*(np.asarray(r.values).tolist() for r in ragged), strict=True)
        return Counter(parts)

    found = list(dataset)
    assert cells(found) == cells([whole])
    assert pieces(found) == pieces([whole])
    assert sum(b.metadata["num_cut"] for b in found) == 4 + 2 + 3  # pieces of 40, 13 and 29 tokens
    assert all(len(b.metadata["cut"]) == b.metadata["num_cut"] for b in found)


def test_dropped_examples_alone_make_one_dummy_row() -> None:
    dataset = PackedIterableDataset(make_examples([13, 20]), **SETTINGS, overflow="drop")
    (batch,) = dataset
    assert (batch.metadata["num_dropped"], batch.metadata["num_dummy_rows"]) == (2, 1)
    assert not batch["loss_mask"].any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [1] * 13}, "example 23 of the stream has 13 tokens, more than the 12 that"),
        ({"input_ids": []}, "example 23 of the stream is empty"),
        ({"text": "hi"}, r"no input_ids in example 23 of the stream, got keys \['text'\]"),
        ("hi", "example 23 of the stream is a str; an example is a mapping"),
        ({"input_ids": 5}, "example 23 of the stream: input_ids"),
        ({"input_ids": [4, -1]}, "example 23 of the stream: input_ids is -1 at token 1"),
        (
            {"input_ids": [4, 5], "labels": [4, 5]},
            r"differ in labels.*\(a batch of examples \[.*23.*\] of the stream\)",
        ),
    ],
)
@pytest.mark.parametrize("shard", [{}, {"rank": 1, "world_size": 2}])
def test_a_bad_example_is_named_by_its_position(
    bad: Any, message: str, shard: dict[str, int]
) -> None:
    examples: list[Any] = copy.deepcopy(EXAMPLES)
    examples[23] = bad
    with pytest.raises(DataError, match=message):
        list(PackedIterableDataset(examples, **SETTINGS, **shard))


def test_a_bad_over_long_example_is_named_before_it_is_split() -> None:
    examples = [*EXAMPLES[:5], {"input_ids": [1] * 30, "labels": [1] * 31}]
    with pytest.raises(DataError, match="example 5 of the stream: labels has 31 entries"):
        list(PackedIterableDataset(examples, **SETTINGS, overflow="split"))


def test_an_error_of_the_source_comes_through_and_the_state_goes_on() -> None:
    class FlakyError(Exception):
        pass

    fail = True

    def source() -> Iterator[dict[str, Any]]:
        for i, example in enumerate(EXAMPLES):
            if i == 25 and fail:
                raise FlakyError("disk")
            yield example

    dataset = PackedIterableDataset(source, **SETTINGS)
    found: list[Any] = []
    with pytest.raises(FlakyError, match="disk"):
        found.extend(dataset)  # keeps what came before the error
    assert len(found) >= 3
    fail = False
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert tokens_of([*found, *dataset]) == all_tokens(EXAMPLES)


# --- memory and efficiency ---


@pytest.mark.parametrize("num_skipped", [0, 15])
def test_never_holds_more_than_the_buffer(num_skipped: int) -> None:
    class Example(dict):  # type: ignore[type-arg]
        pass

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    Example.__hash__ = object.__hash__  # type: ignore[assignment, method-assign]
    num_made = most = 0

    def source() -> Iterator[Example]:
        nonlocal num_made, most
        for example in EXAMPLES * 3:
            made = Example(example)
            alive.add(made)
            num_made += 1
            most = max(most, len(alive))
            yield made

    dataset = PackedIterableDataset(source, **SETTINGS)
    dataset.load_state_dict(dataset.state_dict() | {"num_batches": num_skipped})
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
    dataset = PackedIterableDataset(
        source, tokenizer=0, max_tokens=max_tokens, overflow="truncate", **settings
    )
    num_rows = num_tokens = 0
    for batch in dataset:
        num_rows += len(batch)
        num_tokens += batch.metadata["num_tokens"]
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
    stream, offline = stream_efficiency(lengths, max_tokens, buffer_size=1000, rows_per_batch=4)
    assert offline - stream <= 0.01, (stream, offline)


@pytest.mark.parametrize("rows_per_batch", [1, 8])
@pytest.mark.parametrize("kind", ["lognormal", "exponential", "half a row"])
def test_within_one_percent_of_offline_on_synthetic_lengths(kind: str, rows_per_batch: int) -> None:
    rng = np.random.default_rng(0)
    lengths = {
        "lognormal": np.clip(rng.lognormal(3.4, 1, 4000), 1, 512),
        "exponential": 1 + np.clip(rng.exponential(37, 4000), 0, 511),
        "half a row": rng.integers(150, 350, 2000),
    }[kind].astype(np.int64)
    settings = {"buffer_size": 1000, "rows_per_batch": rows_per_batch}
    stream, offline = stream_efficiency(lengths, 512, **settings)
    assert offline - stream <= 0.01, (stream, offline)


@pytest.mark.parametrize(
    ("max_tokens", "rows_per_batch", "seed"), [(200, 32, 0), (512, 16, 1), (2048, 8, 2)]
)
def test_within_one_percent_of_offline_on_lengths_spread_evenly(
    max_tokens: int, rows_per_batch: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, max_tokens + 1, 8000)
    settings = {"buffer_size": 1000, "rows_per_batch": rows_per_batch}
    stream, offline = stream_efficiency(lengths, max_tokens, **settings)
    assert offline - stream <= 0.01, (stream, offline)


# --- ranks and workers ---


def shard_by_generator(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from EXAMPLES[shard::6]


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: EXAMPLES,
    "callable": lambda: lambda: iter(EXAMPLES),
    "stateful": lambda: StatefulSource(EXAMPLES),
    "map-style": lambda: datasets.Dataset.from_list(EXAMPLES),
    "one shard": lambda: datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(),
    "shards": lambda: datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=4),
    "odd shards": lambda: datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=3),
    "generator": lambda: datasets.IterableDataset.from_generator(
        shard_by_generator, gen_kwargs={"shards": list(range(6))}
    ),
    "mapped": lambda: (
        datasets.Dataset.from_list(EXAMPLES)
        .to_iterable_dataset(num_shards=3)
        .map(
            lambda e: {"input_ids": [[*ids] for ids in e["input_ids"]]}, batched=True, batch_size=5
        )
        .filter(lambda e: e["input_ids"][0] >= 0)
    ),
    "shuffled": lambda: (
        datasets.Dataset.from_list(EXAMPLES)
        .to_iterable_dataset(num_shards=3)
        .shuffle(seed=1, buffer_size=10)
    ),
}
STREAMS = ("one shard", "shards", "odd shards", "generator", "mapped", "shuffled")


def in_worker(
    monkeypatch: pytest.MonkeyPatch, dataset: PackedIterableDataset, worker: int, num_workers: int
) -> list[Any]:
    """What a DataLoader worker would iterate over, without the fork."""
    info = WorkerInfo(id=worker, num_workers=num_workers, seed=0, dataset=dataset)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
    batches = list(dataset)
    monkeypatch.undo()
    return batches


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("split", "name"),
    [("by the dataset", name) for name in SOURCES] + [("by node", name) for name in STREAMS],
)
def test_ranks_and_workers_lose_nothing(
    name: str, split: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for world_size in (1, 2, 4):
        found = []
        for rank in range(world_size):
            for worker in range(max(1, num_workers)):
                if split == "by node":
                    source = split_dataset_by_node(SOURCES[name](), rank, world_size)
                    dataset = PackedIterableDataset(source, **SETTINGS)
                else:
                    shard = {"rank": rank, "world_size": world_size}
                    dataset = PackedIterableDataset(SOURCES[name](), **SETTINGS, **shard)
                if num_workers:
                    found += in_worker(monkeypatch, dataset, worker, num_workers)
                else:
                    found += list(dataset)
        assert tokens_of(found) == all_tokens(EXAMPLES), world_size


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("name", ["list", "odd shards"])
def test_a_data_loader_passes_everything_through(name: str, num_workers: int) -> None:
    found = []
    for rank in range(2):
        dataset = PackedIterableDataset(SOURCES[name](), **SETTINGS, rank=rank, world_size=2)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, collate_fn=dataset.as_is
        )
        found += list(loader)
    assert tokens_of(found) == all_tokens(EXAMPLES)
    assert all(isinstance(batch, Batch) and len(batch) == 1 for batch in found)
    assert sum(batch.metadata["num_examples"] for batch in found) == len(EXAMPLES)


def test_every_rank_gets_every_world_size_th_example() -> None:
    dataset = PackedIterableDataset(EXAMPLES, **SETTINGS, rank=2, world_size=4)
    assert tokens_of(list(dataset)) == all_tokens(EXAMPLES[2::4])


def test_a_presharded_source_is_not_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = EXAMPLES[1::2]
    dataset = PackedIterableDataset(mine, **SETTINGS, rank=1, world_size=2, presharded=True)
    assert tokens_of(list(dataset)) == all_tokens(mine)
    found = []
    for worker in range(2):  # a callable that iterates over a stream, which looks at the worker
        source = lambda: (example for example in SOURCES["shards"]())  # noqa: E731
        dataset = PackedIterableDataset(source, **SETTINGS, presharded=True)
        found += in_worker(monkeypatch, dataset, worker, 2)
    assert tokens_of(found) == all_tokens(EXAMPLES)


def test_each_iter_is_a_pass_of_its_own() -> None:
    for name in SOURCES:
        dataset = PackedIterableDataset(SOURCES[name](), **SETTINGS)
        first = tokens_of(list(dataset))
        next(iter(dataset))  # broken off
        assert tokens_of(list(dataset)) == first == all_tokens(EXAMPLES), name


# --- state ---


@pytest.mark.parametrize("name", SOURCES)
def test_exact_resume(name: str) -> None:
    num_batches = len(list(PackedIterableDataset(SOURCES[name](), **SETTINGS)))
    assert num_batches > 12
    assert_exact_resume(
        lambda: PackedIterableDataset(SOURCES[name](), **SETTINGS),
        num_steps=num_batches + 3,  # into the second pass
        stops=range(num_batches) if name == "list" else range(0, num_batches, 4),
        max_state_bytes=2000,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"rows_per_batch": 3, "buffer_size": 16},
        {"rank": 1, "world_size": 2},
        {"overflow": "split", "max_tokens": 5},
        {"overflow": "drop", "max_tokens": 5},
        {"buffer_size": 1},
        {"buffer_size": 1000},
    ],
)
def test_exact_resume_with(settings: dict[str, Any]) -> None:
    def make() -> PackedIterableDataset:
        return PackedIterableDataset(StatefulSource(EXAMPLES[:25]), **SETTINGS | settings)

    assert_exact_resume(make, num_steps=len(list(make())), max_state_bytes=1000)


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer_size": 4},
        {"buffer_size": 9, "rows_per_batch": 2},
        {"buffer_size": 12, "rows_per_batch": 3},  # whole batches often end in what was held back
        {"buffer_size": 12, "rows_per_batch": 3, "overflow": "split", "max_tokens": 7},
    ],
)
def test_exact_resume_over_many_windows(settings: dict[str, Any]) -> None:
    def make() -> PackedIterableDataset:
        return PackedIterableDataset(StatefulSource(EXAMPLES * 5), **SETTINGS | settings)

    num_batches = len(list(make()))
    assert tokens_of(list(make())) == all_tokens(EXAMPLES * 5)
    assert_exact_resume(make, num_steps=num_batches, stops=range(0, num_batches, 7))


def test_exact_resume_between_the_pieces_of_an_example() -> None:
    settings = SETTINGS | {"overflow": "split", "max_tokens": 5, "buffer_size": 3}

    def make() -> PackedIterableDataset:
        return PackedIterableDataset(StatefulSource(make_examples([2, 43, 3, 31])), **settings)

    assert tokens_of(list(make())) == all_tokens(make_examples([2, 43, 3, 31]))
    assert_exact_resume(make, num_steps=len(list(make())))


def test_exact_resume_after_a_resume() -> None:
    expected, found = list(PackedIterableDataset(EXAMPLES, **SETTINGS)), []
    state = PackedIterableDataset(EXAMPLES, **SETTINGS).state_dict()
    for _ in expected:  # a new process for every batch
        dataset = PackedIterableDataset(EXAMPLES, **SETTINGS)
        dataset.load_state_dict(state)
        found.append(next(iter(dataset)))
        state = json.loads(json.dumps(dataset.state_dict()))
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)


@pytest.mark.parametrize(
    ("settings", "num_buffers"),
    [
        ({}, 8),
        ({"strategy": "sequential"}, 1),
        ({"rows_per_batch": 3, "max_tokens": 8, "buffer_size": 12}, 8),
    ],
)
def test_resume_reads_at_most_one_window_again(settings: dict[str, Any], num_buffers: int) -> None:
    options = SETTINGS | settings
    examples = EXAMPLES * 7
    dataset = PackedIterableDataset(StatefulSource(examples), **options)
    most, places = 0, set()
    for _ in dataset:
        source = StatefulSource(examples)
        resumed = PackedIterableDataset(source, **options)
        resumed.load_state_dict(dataset.state_dict())
        next(iter(resumed), None)
        most = max(most, source.num_reads)
        places.add(dataset.state_dict()["num_read"])
    assert (num_buffers - 2) * options["buffer_size"] < most
    assert most <= num_buffers * options["buffer_size"]
    assert len(places) >= 3
    assert dataset.state_dict()["num_read"] == len(examples)


def test_a_window_ends_behind_all_that_was_held_back() -> None:
    settings = {"rows_per_batch": 1, "buffer_size": 10, "num_buffers": 8}
    windows = Windows(iter([]), lambda lengths: pack(lengths, 12), **settings)
    entry = Entry({}, 0, 0, False, 1, Place(9))
    windows._buffer, windows._num_broken = [entry] * 10, 6
    assert windows._window_behind(4) is None
    assert windows._window_behind(3) == Place(9)  # 2 of the 6 were left


@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_a_pass_ends_behind_the_last_example(rows_per_batch: int) -> None:
    for num_examples in range(len(EXAMPLES)):
        settings = SETTINGS | {"rows_per_batch": rows_per_batch}
        dataset = PackedIterableDataset(EXAMPLES[:num_examples], **settings)
        found = list(dataset)
        state = dataset.state_dict()
        assert (state["num_read"], state["num_batches"]) == (num_examples, 0)
        dataset.load_state_dict(state)
        assert found or not num_examples
        assert list(dataset) == []


def test_state_is_small_and_is_not_moved_by_saving() -> None:
    dataset = PackedIterableDataset(EXAMPLES, **SETTINGS)
    batches = iter(dataset)
    next(batches), next(batches)
    state = dataset.state_dict()
    state["num_batches"] = 99
    assert dataset.state_dict()["num_batches"] != 99
    assert len(json.dumps(dataset.state_dict())) < 400
    loaded = PackedIterableDataset(EXAMPLES, **SETTINGS)
    loaded.load_state_dict(dataset.state_dict())
    assert loaded.state_dict() == dataset.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 13}, "state is of max_tokens=12, the dataset has max_tokens=13; resume"),
        ({"buffer_size": 8}, "buffer_size=7, the dataset has buffer_size=8"),
        ({"rows_per_batch": 2}, "rows_per_batch=1, the dataset has rows_per_batch=2"),
        (
            {"strategy": "sequential"},
            "strategy='best_fit_decreasing', the dataset has strategy='seq",
        ),
        ({"overflow": "drop"}, "overflow='raise', the dataset has overflow='drop'"),
        ({"parallel": ParallelLayout(tp=2)}, "align=1, the dataset has align=2"),
        ({"max_sequences_per_row": 3}, "max_sequences_per_row=None, the dataset has"),
        ({"world_size": 2}, "world_size=1, the dataset has world_size=2"),
        ({"presharded": True}, "presharded=False, the dataset has presharded=True"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str) -> None:
    dataset = PackedIterableDataset(EXAMPLES, **SETTINGS)
    next(iter(dataset))
    other = PackedIterableDataset(EXAMPLES, **SETTINGS | change)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == before
    assert tokens_of(list(other)) == all_tokens(EXAMPLES[:: change.get("world_size", 1)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 1}, "the state has version 1, this one reads version 2"),
        ({"num_read": -1}, r"num_read, start, num_batches are \[-1, 0, 0\]; it is damaged"),
        ({"num_batches": True}, "are .*True.*; it is damaged"),
        ({"rank": 1}, "rank=1, the dataset has rank=0"),
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any], message: str) -> None:
    dataset = PackedIterableDataset(EXAMPLES, **SETTINGS)
    with pytest.raises(StateError, match=message):
        dataset.load_state_dict(dataset.state_dict() | damage)
    with pytest.raises(StateError, match="the state has version None"):
        dataset.load_state_dict([])  # type: ignore[arg-type]
    assert dataset.state_dict()["num_read"] == 0


def test_a_state_of_a_longer_or_another_stream_is_refused() -> None:
    dataset = PackedIterableDataset(EXAMPLES, **SETTINGS)
    state = dataset.state_dict()
    shorter = PackedIterableDataset(EXAMPLES[:9], **SETTINGS)
    shorter.load_state_dict(state | {"num_read": 20})
    with pytest.raises(StateError, match="after example 20 of the stream, which has 9; the source"):
        next(iter(shorter))
    dataset.load_state_dict(state | {"num_batches": 80})
    with pytest.raises(
        StateError, match=r"is 80 batches after example 0 .* at most \d\d follow now"
    ):
        next(iter(dataset))
    dataset.load_state_dict(state | {"num_read": len(EXAMPLES), "num_batches": 1})
    with pytest.raises(StateError, match=r"is 1 batches after example 43 .* at most 1 follow now"):
        next(iter(dataset))
    dataset.load_state_dict(state | {"source": {"next": 20}})
    with pytest.raises(StateError, match="holds a state of the source, but this source takes none"):
        next(iter(dataset))


def test_the_epoch_of_the_source_must_agree() -> None:
    stream = SOURCES["shuffled"]()
    stream.set_epoch(3)
    dataset = PackedIterableDataset(stream, **SETTINGS)
    batches = iter(dataset)
    next(batches)
    state, expected = dataset.state_dict(), next(batches)
    resumed = PackedIterableDataset(fresh := SOURCES["shuffled"](), **SETTINGS)
    with pytest.raises(StateError, match="epoch=3, the dataset has epoch=0"):
        resumed.load_state_dict(state)
    fresh.set_epoch(3)
    resumed.load_state_dict(state)
    assert_same_batch(next(iter(resumed)), expected)


def test_the_rank_of_a_source_split_by_node_must_agree() -> None:
    parts = [
        PackedIterableDataset(split_dataset_by_node(SOURCES["shards"](), rank, 2), **SETTINGS)
        for rank in range(2)
    ]
    with pytest.raises(StateError, match="rank=0, the dataset has rank=1"):
        parts[1].load_state_dict(parts[0].state_dict())


def test_a_state_taken_without_workers_is_refused_in_a_worker() -> None:
    dataset = PackedIterableDataset(EXAMPLES, **SETTINGS)
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(StateError, match="num_workers=0, the dataset has num_workers=1"):
        list(DataLoader(dataset, batch_size=None, num_workers=1))


@pytest.mark.parametrize("name", ["list", "shards", "mapped"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_exact_resume_in_a_stateful_data_loader(name: str, num_workers: int) -> None:
    reason = "torchdata is not installed (pip install torchdata==0.11.0)"
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)

    def make() -> Any:
        source = SOURCES[name]()
        dataset = PackedIterableDataset(source, **SETTINGS | {"buffer_size": 12})
        return stateful.StatefulDataLoader(
            dataset, batch_size=None, num_workers=num_workers, collate_fn=dataset.as_is
        )

    expected, states = [], []
    for batch in (loader := make()):
        expected.append(batch)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert tokens_of(expected) == all_tokens(EXAMPLES)
    every = range(0, len(expected), 1 if name == "list" else 7)
    for stop in every if not num_workers else (0, 1, 8, len(expected) - 2):
        resumed = make()
        resumed.load_state_dict(states[stop])
        rest = list(resumed)
        assert len(rest) == len(expected) - stop - 1 or stop == len(expected) - 1
        for batch, wanted in zip(rest, expected[stop + 1 :], strict=False):
            assert_same_batch(batch, wanted)


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"source": iter(EXAMPLES)},
            TypeError,
            "source is a list_iterator, an iterator that can be",
        ),
        (
            {"source": 5},
            TypeError,
            "source must be an iterable of examples or a callable .* got int",
        ),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
        ({"buffer_size": 2.5}, TypeError, "buffer_size must be an int, got 2.5"),
        ({"rows_per_batch": 0}, ValueError, "rows_per_batch must be at least 1, got 0"),
        ({"rows_per_batch": 9}, ValueError, "buffer_size must be at least rows_per_batch=9, got 7"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"presharded": 1}, TypeError, "presharded must be True or False, got 1"),
        ({"tokenizer": None}, TypeError, "tokenizer must be an int pad id or have .pad_token_id"),
        ({"overflow": "cut"}, ValueError, "overflow must be one of .*; got 'cut'"),
        ({"max_length": 5}, TypeError, "unexpected keyword argument 'max_length'"),
        (
            {"parallel": ParallelLayout(dp=2), "rows_per_batch": 3},
            ValueError,
            "rows_per_batch must be a multiple of dp=2, got 3",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    source = arguments.get("source", EXAMPLES)
    rest = {key: value for key, value in arguments.items() if key != "source"}
    with pytest.raises(kind, match=message):
        PackedIterableDataset(source, **SETTINGS | rest)


def test_a_source_is_not_split_twice() -> None:
    stream = split_dataset_by_node(SOURCES["shards"](), 1, 2)
    with pytest.raises(
        ValueError, match=r"already \(rank 1 of 2\) .* again by world_size=2; leave"
    ):
        PackedIterableDataset(stream, **SETTINGS, rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"already \(rank 1 of 2\)"):
        next(iter(PackedIterableDataset(lambda: stream, **SETTINGS, world_size=2)))
    with pytest.raises(TypeError, match="the callable source returned a int; it must return"):
        next(iter(PackedIterableDataset(lambda: 5, **SETTINGS)))  # type: ignore[arg-type, return-value]


def test_pickles_into_spawned_workers() -> None:
    dataset = PackedIterableDataset(SOURCES["shards"](), **SETTINGS)
    next(iter(dataset))
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied.state_dict() == dataset.state_dict()
    assert tokens_of(list(copied)) == all_tokens(EXAMPLES)
