"""Packing a stream of columns: the same batches as from the examples, one by one, without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from tests.batch_checks import assert_same_batch
from tests.collators.test_cost import num_calls
from tests.loading.streaming_oracle import EXAMPLES, SETTINGS, datasets, make_examples
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import TokenizedDataset, streaming
from torch_collate_kit.loading._dataset_columns import ListColumn
from torch_collate_kit.loading._stream import Columns, Place, Stream
from torch_collate_kit.loading.streaming import PackedIterableDataset
from torch_collate_kit.packing import ParallelLayout, pack
from torch_collate_kit.ragged import Ragged

pa = pytest.importorskip("pyarrow")
FORMS = ("none", "loss_mask", "bools", "weights", "last tokens", "labels", "padding mask")


def examples_of(form: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Arrays, with a target in every form."""
    rng = np.random.default_rng(len(lengths))
    examples: list[dict[str, Any]] = []
    for example in make_examples(lengths):
        ids = np.array(example["input_ids"], dtype=np.int32)
        n = len(ids)
        made: dict[str, Any] = {"input_ids": ids}
        if form == "last tokens":
            made["num_actions"] = int(rng.integers(0, n + 1))
            made["loss_mask"] = rng.integers(0, 2, made["num_actions"]).astype(np.int8)
        elif form == "labels":
            made["labels"] = np.where(rng.random(n) < 0.5, ids, -100)
        elif form == "bools":
            made["completion_mask"] = rng.random(n) < 0.5
        elif form == "weights":
            made["loss_mask"] = rng.random(n).astype(np.float32)
        elif form == "padding mask":
            made["attention_mask"] = np.ones(n, dtype=np.int8)
        if form in ("loss_mask", "padding mask"):
            made["loss_mask"] = rng.integers(0, 2, n).astype(np.int8)
        examples.append(made)
    return examples


def table_of(examples: list[dict[str, Any]], *, num_chunks: int = 1) -> Any:
    ragged = {
        name: [e[name] for e in examples] for name in (examples[0] if examples else ("input_ids",))
    }
    columns = {}
    for name, rows in ragged.items():
        kind = None if name == "num_actions" else pa.list_(pa.int32())
        if kind is not None and rows and len(flat := np.concatenate(rows)):
            kind = pa.list_(pa.from_numpy_dtype(flat.dtype))
        parts = np.array_split(np.arange(len(rows)), num_chunks)
        chunks = [pa.array([rows[i] for i in part], type=kind or pa.int64()) for part in parts]
        columns[name] = pa.chunked_array(chunks)
    return pa.table(columns)


def permuted(examples: list[dict[str, Any]]) -> Any:
    """A datasets.Dataset whose rows lie in another order than they are given in."""
    order = np.random.default_rng(1).permutation(len(examples))
    mixed = datasets.Dataset(
        datasets.table.InMemoryTable(table_of([examples[i] for i in order] or examples))
    )
    return mixed.select(np.argsort(order)) if len(examples) else mixed


def dataset_of(examples: list[dict[str, Any]]) -> Any:
    return datasets.Dataset(datasets.table.InMemoryTable(table_of(examples)))


SOURCES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "table": lambda examples: TokenizedDataset(table_of(examples)),
    "chunks": lambda examples: TokenizedDataset(table_of(examples, num_chunks=3)),
    "dataset": dataset_of,
    "permuted": permuted,
    "with text": lambda examples: dataset_of(examples).add_column("text", ["x"] * len(examples)),
    "callable": lambda examples: lambda: TokenizedDataset(table_of(examples)),
}


def passes(
    source: Any, worker: tuple[int, int], settings: dict[str, Any]
) -> tuple[list[Batch], list[dict[str, Any]]]:
    """Batches of a pass, and the state before the first and after each."""
    info = WorkerInfo(id=worker[0], num_workers=worker[1], seed=0, dataset=None)
    torch.utils.data._utils.worker._worker_info = info if worker[1] else None
    try:
        dataset = PackedIterableDataset(source, **settings)
        batches, states = [], [dataset.state_dict()]
        for batch in dataset:
            batches.append(batch)
            states.append(json.loads(json.dumps(dataset.state_dict())))
        for state in states[1 :: max(1, len(states) // 4)]:
            dataset = PackedIterableDataset(source, **settings)
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
    rows_per_batch=st.integers(1, 4),
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
    rows_per_batch: int,
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
        "rows_per_batch": rows_per_batch,
        "strategy": strategy,
        "overflow": overflow,
        "parallel": ParallelLayout(tp=align),
        "rank": shard[0],
        "world_size": shard[1],
        "presharded": presharded,
    }
    expected, states = passes(examples, worker, settings)
    found, found_states = passes(SOURCES[name](examples), worker, settings)
    assert found_states == states
    assert len(found) == len(expected)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)
        assert batch == wanted


@pytest.mark.parametrize(
    ("name", "form"),
    [("chunks", form) for form in FORMS] + [(name, "last tokens") for name in SOURCES],
)
@pytest.mark.parametrize("shard", [{}, {"rank": 1, "world_size": 2}])
def test_over_long_examples_at_every_stop(name: str, form: str, shard: dict[str, int]) -> None:
    """Pieces that do not fit the buffer any more wait, as the rest of an example does on resume."""
    examples = examples_of(form, [2, 23, 3, 11, 1, 10, 5, 26])
    settings = SETTINGS | {"overflow": "split", "max_tokens": 5, "buffer_size": 3}
    settings |= shard | {"strategy": "sequential"}  # a window a buffer
    expected, states = passes(examples, (0, 0), settings)
    assert sum(state["start"] > 0 for state in states) >= 5
    found, found_states = passes(SOURCES[name](examples), (0, 0), settings)
    assert found_states == states
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)
    for state in states[::2]:  # of the one source, loaded beside the other
        dataset = PackedIterableDataset(SOURCES[name](examples), **settings)
        dataset.load_state_dict(state)
        rest = expected[states.index(state) :]
        for batch, wanted in zip(dataset, rest, strict=True):
            assert_same_batch(batch, wanted)


def test_batches_by_hand() -> None:
    rows = pa.array([[1, 2], [3, 4, 5, 6, 7], [8]], type=pa.list_(pa.int32()))
    table = pa.table(
        {"input_ids": rows, "num_actions": [1, 3, 0], "loss_mask": [[1], [0, 1, 1], []]}
    )
    dataset = PackedIterableDataset(
        TokenizedDataset(table), tokenizer=0, max_tokens=3, overflow="split", buffer_size=4
    )
    batches = list(dataset)
    assert [b["input_ids"].tolist() for b in batches] == [[[1, 2, 8]], [[3, 4, 5]], [[6, 7]]]
    assert [b["labels"].tolist() for b in batches] == [
        [[-100, 2, -100]], [[-100, -100, -100]], [[-100, 7]],
    ]  # fmt: skip
    assert [b.metadata["num_actions"].tolist() for b in batches] == [[[1, 0]], [[1]], [[1]]]
    assert batches[2].metadata["example_starts"].tolist() == [[3]]


# --- which sources are read as columns ---


class Doubled(TokenizedDataset):
    """Gives other rows than it holds."""

    def __getitem__(self, index: Any) -> Any:
        return {name: np.repeat(row, 2) for name, row in super().__getitem__(index).items()}


def plain() -> Any:
    return dataset_of(examples_of("loss_mask", [3, 5, 2, 4]))


@pytest.mark.parametrize("name", SOURCES)
def test_columns_are_read_as_columns(name: str) -> None:
    source = SOURCES[name](examples_of("loss_mask", [3, 5, 2, 4]))
    found = Stream(source, 1, 2, presharded=False).read(Place(1))
    assert isinstance(found, Columns)
    assert found.positions == range(1, 4, 2)


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
    assert not isinstance(Stream(source, 0, 1, presharded=False).read(Place()), Columns)
    expected = PackedIterableDataset([dict(example) for example in source], **SETTINGS)
    found = list(PackedIterableDataset(source, **SETTINGS))
    assert found
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_batch(batch, wanted)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"input_ids": [[1, 2]], "loss_masks": [[1, 1]]}, "'loss_masks' looks like one; rename it"),
        ({"text": ["a"]}, r"no input_ids in example 0 of the stream, got keys \['text'\]"),
        ({"input_ids": ["a b"]}, "example 0 of the stream: input_ids is str; give a list"),
        ({"input_ids": [[1.5, 2.0]]}, r"example 0 of the stream: input_ids\[0\] is 1.5 \(float\)"),
        ({"input_ids": [7]}, "example 0 of the stream: input_ids"),
        ({"input_ids": [[1, 2]], "labels": [3]}, "example 0 of the stream: labels is int"),
        (
            {"input_ids": [[1, 2]], "loss_mask": [[1]], "num_actions": [[1]]},
            r"example 0 of the stream: num_actions is \[1\]",
        ),
        (
            {"input_ids": [[1, 2]], "loss_mask": [[1]], "num_actions": [1.0]},
            "example 0 of the stream: num_actions is 1.0",
        ),
    ],
)
def test_columns_that_no_collator_takes(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(PackedIterableDataset(datasets.Dataset.from_dict(rows), **SETTINGS))


# --- wrong rows ---


def with_bad_row(kind: str) -> Any:
    """43 rows, of which 23 and 37 are wrong."""
    rows: list[Any] = [example["input_ids"] for example in EXAMPLES]
    weights: list[Any] = [[1.0] * len(row) for row in rows]
    for bad in (23, 37):
        if kind == "null row":
            rows[bad] = None
        elif kind == "null weights":
            weights[bad] = None
        elif kind == "a null":
            rows[bad] = [None] * len(rows[bad])
        elif kind == "empty":
            rows[bad], weights[bad] = [], []
        elif kind == "negative":
            rows[bad] = [-5] * len(rows[bad])
        elif kind == "nan":
            weights[bad] = [float("nan")] * len(rows[bad])
        elif kind == "lengths":
            weights[bad] = [1.0] * (len(rows[bad]) + 1)
        elif kind == "long":
            rows[bad], weights[bad] = [1] * 30, [1.0] * 30
        elif kind == "long lengths":
            rows[bad], weights[bad] = [1] * 30, [1.0] * 31
    return pa.table({"input_ids": rows, "loss_mask": weights})


@pytest.mark.parametrize(
    ("kind", "overflow", "message"),
    [
        ("null row", "raise", "example 23 of the stream: input_ids is null or holds a null; drop"),
        ("null row", "split", "example 23 of the stream: input_ids is null or holds a null; drop"),
        ("null weights", "raise", "example 23 of the stream: loss_mask is null or holds a null"),
        ("a null", "raise", "example 23 of the stream: input_ids is null or holds a null"),
        ("empty", "raise", "example 23 of the stream is empty"),
        ("empty", "split", "example 23 of the stream is empty"),
        ("negative", "raise", "example 23 of the stream: input_ids is -5 at token 0"),
        ("nan", "raise", "example 23 of the stream.*nan"),
        ("lengths", "raise", r"example 23 of the stream: loss_mask has \d entries, input_ids has"),
        ("lengths", "split", r"example 23 of the stream: loss_mask has \d entries, input_ids has"),
        ("long", "raise", "example 23 of the stream has 30 tokens, more than the 12 that fit"),
        ("long lengths", "split", "example 23 of the stream: loss_mask has 31 entries, input_ids"),
    ],
)
@pytest.mark.parametrize("shard", [{}, {"rank": 1, "world_size": 2}])
def test_a_wrong_row_is_named_by_its_position(
    kind: str, overflow: str, message: str, shard: dict[str, int]
) -> None:
    table = with_bad_row(kind)
    settings = SETTINGS | shard | {"overflow": overflow, "buffer_size": 20}
    num_given_out = []
    for source in (
        datasets.Dataset(datasets.table.InMemoryTable(table)),
        TokenizedDataset(table),
        table.to_pylist(),
    ):
        found: list[Any] = []
        pattern = "23 of the stream" if isinstance(source, list) else message
        with pytest.raises(DataError, match=pattern):
            found.extend(PackedIterableDataset(source, **settings))
        num_given_out.append(len(found))
    assert num_given_out[0] == num_given_out[1] >= num_given_out[2]  # no earlier than one by one


@pytest.mark.parametrize("buffer_size", range(1, 9))
@pytest.mark.parametrize("bad", [None, [], [1] * 13])
def test_a_wrong_row_behind_what_is_needed_waits(buffer_size: int, bad: Any) -> None:
    """As many batches come before the error as from the examples, whatever they are split into."""
    rows = [[1] * 5, [2] * 26, [3] * 4, [4] * 17, [5] * 30, [6] * 2, bad, [7]]
    masks = [row if row is None else row + [1] * (len(row) == 13) for row in rows]
    table = pa.table({"input_ids": rows, "labels": masks})
    settings = SETTINGS | {"overflow": "split", "max_tokens": 6, "buffer_size": buffer_size}
    counts = []
    for source in (TokenizedDataset(table), table.to_pylist()):
        found: list[Any] = []
        with pytest.raises(DataError, match="example 6 of the stream"):
            found.extend(PackedIterableDataset(source, **settings))
        counts.append(len(found))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [[1] * 26, [2] * 5]}, "labels has 5 entries, input_ids has 4 tokens"),
        ({"loss_mask": [[1] * 26, [2] * 2]}, "loss_mask has 2 entries, input_ids has 4 tokens"),
        (
            {"loss_mask": [[1] * 26, [1] * 2], "num_actions": [26, 3]},
            "loss_mask has 2 entries, num_actions=3",
        ),
    ],
)
def test_a_wrong_row_beside_a_piece_is_not_cut_to_fit(
    columns: dict[str, Any], message: str
) -> None:
    table = pa.table({"input_ids": [[1] * 26, [2] * 4], **columns})
    settings = SETTINGS | {"overflow": "split", "max_tokens": 6}
    with pytest.raises(DataError, match=f"example 1 of the stream: {message}"):
        list(PackedIterableDataset(TokenizedDataset(table), **settings))


@pytest.mark.parametrize("name", SOURCES)
def test_wrong_states_are_refused(name: str) -> None:
    source = SOURCES[name](examples_of("none", [3, 5, 2, 4]))
    dataset = PackedIterableDataset(source, **SETTINGS)
    state = dataset.state_dict()
    dataset.load_state_dict(state | {"num_read": 5})
    with pytest.raises(StateError, match="after example 5 of the stream, which has 4; the source"):
        next(iter(dataset))
    dataset.load_state_dict(state | {"source": {"next": 2}})
    with pytest.raises(StateError, match="holds a state of the source, but this source takes none"):
        next(iter(dataset))
    dataset.load_state_dict(state | {"num_read": 4})
    assert list(dataset) == []


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
        taken.append(len(rows.flat_values))
        return rows

    monkeypatch.setattr(ListColumn, "lengths_at", counted_lengths)
    monkeypatch.setattr(ListColumn, "take", counted_take)
    lengths = np.random.default_rng(0).integers(1, 9, size=129).tolist()
    source = TokenizedDataset(table_of(examples_of("none", lengths)))
    dataset = PackedIterableDataset(source, **SETTINGS | {"overflow": overflow})
    dataset.load_state_dict(dataset.state_dict() | {"num_batches": num_skipped})
    given_out = num_tokens = 0
    for batch in dataset:
        assert num_skipped or max(seen) - given_out <= 7
        given_out += batch.metadata["num_examples"]
        num_tokens += batch.metadata["num_tokens"]
        assert sum(taken) == num_tokens
    assert num_skipped or given_out == 129
    assert max(seen) == 129


def test_windows_are_planned_by_the_compiled_loop_if_the_collator_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    asked = []

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append(options["compiled"])
        return pack(*arguments, **options)

    monkeypatch.setattr(streaming, "pack", noted)
    source = TokenizedDataset(table_of(examples_of("loss_mask", [3, 5, 2, 4] * 5)))
    batches = [
        list(PackedIterableDataset(source, **SETTINGS, compiled=compiled))
        for compiled in (False, True)
    ]
    assert set(asked[: len(asked) // 2]) == {False}
    assert set(asked[len(asked) // 2 :]) == {True}
    for batch, wanted in zip(*batches, strict=True):
        assert_same_batch(batch, wanted)


def test_calls_do_not_grow_with_the_examples() -> None:
    """Nor those of planning, which grow with the distinct lengths."""
    counts = []
    for num_examples in (1000, 6000):
        lengths = np.resize([3, 5, 8, 2, 7], num_examples).tolist()
        table = table_of(examples_of("padding mask", lengths))
        for source in (TokenizedDataset(table), dataset_of(examples_of("last tokens", lengths))):
            dataset = PackedIterableDataset(
                source, tokenizer=0, max_tokens=num_examples // 2, buffer_size=num_examples
            )
            counts.append((num_calls(lambda d=dataset: list(d)), len(list(dataset))))
    assert counts[0][1] == counts[2][1] == counts[3][1] >= 10, "as many batches"
    assert min(calls for calls, _ in counts) > 1000, "nothing was counted"
    assert counts[2][0] < counts[0][0] + 1000, counts
    assert counts[3][0] < counts[1][0] + 1000, counts


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "callable"])
def test_in_a_data_loader(name: str, num_workers: int) -> None:
    examples = examples_of("loss_mask", [len(e["input_ids"]) for e in EXAMPLES])
    found = []
    for source in (examples, SOURCES[name](examples)):
        dataset = PackedIterableDataset(source, **SETTINGS)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, collate_fn=dataset.as_is
        )
        found.append(list(loader))
    for batch, wanted in zip(*found, strict=True):
        assert_same_batch(batch, wanted)
