"""A Mixture of streams: one rule in every shard, against the oracle and the indexed mixture."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    SETTINGS,
    StatefulSource,
    datasets,
    make_examples,
)
from tests.oracle import mixed_order
from torch_collate_kit import (
    Mixture,
    PackedIterableDataset,
    PerExample,
    PrefetchingSampler,
    PrefetchLoader,
)
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import TokenizedDataset, merge_states
from torch_collate_kit.testing import assert_exact_resume, batch_digest

Examples = list[dict[str, Any]]


def sources_of(sizes: list[int], seed: int = 0, longest: int = 8) -> list[Examples]:
    """Sources whose examples have tokens of their own."""
    rng = np.random.default_rng(seed)
    examples = make_examples(rng.integers(1, longest + 1, size=sum(sizes)).tolist())
    return [part.tolist() for part in np.split(np.array(examples), np.cumsum(sizes)[:-1])]


def units_of(sources: list[Examples], by: str) -> list[list[int]]:
    return [[len(e["input_ids"]) if by == "tokens" else 1 for e in part] for part in sources]


def mixed(sources: list[Any], weights: list[Any], **options: Any) -> PackedIterableDataset:
    names = ("by", "stop", "names", "schedule", "max_passes")
    settings = {name: options.pop(name) for name in names if name in options}
    return packed_stream(Mixture(sources, weights=weights, **settings), **SETTINGS | options)


def entries_in(batches: Any, sources: list[Examples]) -> list[tuple[int, int]]:
    """Source and number of each example, in the order in which sequential rows keep them."""
    numbers = {e["input_ids"][0]: (i, j) for i, p in enumerate(sources) for j, e in enumerate(p)}
    tokens = [t for b in batches for t in b["input_ids"][b["attention_mask"] == 1].tolist()]
    return [numbers[token] for token in tokens if token in numbers]


def drawn(seed: int) -> tuple[list[Examples], list[list[float]], str]:
    """Sources, weights of two runs, and what is counted."""
    rng = np.random.default_rng([seed, 1])
    sizes = rng.integers(1, 40, size=int(rng.integers(1, 5))).tolist()
    weights = (rng.integers(0, 50, size=(2, len(sizes))) / 10).round(1)
    weights[:, int(rng.integers(len(sizes)))] += 0.3
    return sources_of(sizes, seed), weights.tolist(), str(rng.choice(["examples", "tokens"]))


@pytest.mark.parametrize("seed", range(25))
def test_the_order_is_that_of_the_oracle_and_of_an_indexed_mixture(seed: int) -> None:
    sources, (weights, _), by = drawn(seed)
    streams = [lambda part=part: iter(part) for part in sources]
    found = list(mixed(streams, weights, by=by, strategy="sequential", buffer_size=9))
    expected = mixed_order(units_of(sources, by), weights)
    assert entries_in(found, sources) == expected
    counts, tokens = Counter(i for i, _ in expected), Counter[int]()
    for i, number in expected:
        tokens[i] += len(sources[i][number]["input_ids"])
    for name, wanted in (("source_examples", counts), ("source_tokens", tokens)):
        total = sum((Counter(batch.metadata[name]) for batch in found), Counter[str]())
        assert total == Counter({str(i): n for i, n in wanted.items()})
    lengths = [np.array(part) for part in units_of(sources, "tokens")]
    indexed = Mixture(lengths, weights=weights, by=by)
    sampler = PrefetchingSampler(indexed, batch_size=1, shuffle=False)
    order = [int(sampler.examples(0, step)[0]) for step in range(len(expected))]
    assert order == [int(indexed.offsets[i]) + number for i, number in expected]
    assert sampler.count_steps(0) == len(expected)


@pytest.mark.parametrize("strategy", ["sequential", "wrapped"])
@pytest.mark.parametrize("seed", range(25))
def test_other_weights_apply_from_the_next_window_on(seed: int, strategy: str) -> None:
    sources, (before, after), by = drawn(seed)
    units, options = units_of(sources, by), {"strategy": strategy, "buffer_size": 5, "by": by}
    tokenizer: Any = type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": 999})
    if strategy == "wrapped":
        options["tokenizer"] = tokenizer
        for example in (example for part in sources for example in part):
            example["input_ids"] = [*example["input_ids"], 999]
        units = units_of(sources, by)
    streams = [lambda part=part: iter(part) for part in sources]
    saved = mixed(streams, before, **options)
    given = list(islice(saved, int(np.random.default_rng(seed).integers(0, 9))))
    resumed = mixed(streams, after, **options)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    num_before = len(entries_in(given, sources))
    given += resumed
    found = entries_in(given, sources)
    assert len(found) == len(set(found))
    # the entries of the window that has begun are chosen by the weights before
    for number in range(num_before + options["buffer_size"] + 1):
        first = mixed_order(units, before, most=number)
        counts = [sum(i == source for i, _ in first) for source in range(len(sources))]
        if [*first, *mixed_order(units, after, counts)] == found:
            break
    else:
        raise AssertionError("the weights did not change with the window")


def test_a_run_with_other_weights_resumes_at_every_batch(caplog: Any) -> None:
    """Also in the window of the weights before, which its state names."""
    options: dict[str, Any] = {"by": "tokens", "buffer_size": 9, "num_shards": 2}
    columns = [TokenizedDataset(part) for part in SOURCES]
    saved = mixed(columns, [3, 1], **options)
    list(islice(saved, 3))
    state = saved.state_dict()
    assert {*map(tuple, (of["weights"] for of in state["shards"].values()))} == {("3", "1")}
    assert caplog.records == []

    def resumed(state: Any, weights: Any = (1, 2)) -> PackedIterableDataset:
        dataset = mixed(columns, weights, **options)
        dataset.load_state_dict(state)
        return dataset

    running, states, digests = resumed(state), [state], []
    for batch in running:
        digests.append(batch_digest(batch))
        states.append(json.loads(json.dumps(running.state_dict())))
    assert [record.getMessage() for record in caplog.records] == [
        "the state was saved with weights=['3', '1'], the mixture has ['1', '2']: what is taken of "
        "each source is counted anew, in each shard from its next window on"
    ]
    assert all(of["weights"] == ["1", "2"] for of in states[-1]["shards"].values())
    assert len({str(of["shards"]) for of in states}) == len(digests) + 1
    for number, state in enumerate(states):
        assert [*map(batch_digest, resumed(state))] == digests[number:]


def test_a_source_without_a_weight_is_read_after_its_weight_has_come() -> None:
    first = mixed(SOURCES, [1, 0], num_shards=2)
    found = list(islice(first, 4))
    second = mixed(SOURCES, [0, 1], num_shards=2)
    second.load_state_dict(first.state_dict())
    found += second
    third = mixed(SOURCES, [1, 0], num_shards=2)
    third.load_state_dict(second.state_dict())
    found += third
    tokens = torch.cat([b["input_ids"][b["attention_mask"] == 1] for b in found]).tolist()
    assert len(set(tokens)) == len(tokens)
    assert {t for e in SOURCES[1] for t in e["input_ids"]} <= set(tokens)


def test_an_entry_that_is_due_at_the_end_of_another_source_is_given() -> None:
    sources = [make_examples([2, 2]), make_examples([9, 9, 1, 2, 2])[2:]]
    streams = [lambda part=part: iter(part) for part in sources]
    found = mixed(streams, [1, 1], by="tokens", strategy="sequential")
    # 8 is twice the end of the first source, and (2 * 3 + 2) when the last example is due
    assert entries_in(found, [[], sources[1]]) == [(1, 0), (1, 1), (1, 2)]


def test_each_source_is_shuffled_in_an_order_of_its_own() -> None:
    found = mixed(sources_of([20, 20]), [1, 1], shuffle=True, strategy="sequential")
    order = entries_in(found, sources_of([20, 20]))
    first, second = ([number for i, number in order if i == source] for source in (0, 1))
    assert sorted(first) == sorted(second) == [*range(20)]
    assert first != second


def test_weights_equal_to_the_sizes_read_each_example_once() -> None:
    sources = sources_of([30, 12, 7])
    for shuffle in (False, True):
        found = list(mixed(sources, [30, 12, 7], shuffle=shuffle))
        tokens = torch.cat([b["input_ids"][b["attention_mask"] == 1] for b in found]).tolist()
        assert sorted(tokens) == sorted(t for part in sources for e in part for t in e["input_ids"])


SOURCES = sources_of([30, 19])
KINDS: dict[str, Any] = {
    "callables": lambda parts=SOURCES: [lambda part=part: iter(part) for part in parts],
    "lists": lambda parts=SOURCES: parts,
    "stateful": lambda parts=SOURCES: [StatefulSource(part) for part in parts],
    "columns and callable": lambda parts=SOURCES: [
        TokenizedDataset(parts[0]),
        lambda: iter(parts[1]),
    ],
    "datasets": lambda parts=SOURCES: [
        datasets.Dataset.from_list(part).to_iterable_dataset(num_shards=n)
        for part, n in zip(parts, (4, 3), strict=True)
    ],
}
CASES = [
    ("callables", {}),
    ("stateful", {"by": "tokens"}),
    ("stateful", {"overflow": "split", "max_tokens": 5}),
    ("columns and callable", {"overflow": "split", "max_tokens": 5}),
    ("datasets", {"by": "tokens", "num_shards": 2}),
    ("lists", {"num_shards": 3}),
]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("kind", "more"), CASES, ids=str)
def test_exact_resume_at_every_batch(kind: str, more: dict[str, Any], shuffle: bool) -> None:
    parts = sources_of([9, 6])

    def make() -> PackedIterableDataset:  # a small buffer: the time is quadratic
        return mixed(KINDS[kind](parts), [3, 1], shuffle=shuffle, buffer_size=3, **more)

    num_steps = len(list(make())) + 3  # into the second pass
    assert_exact_resume(make, num_steps=num_steps, max_state_bytes=6000)


@pytest.mark.parametrize("kind", ["callables", "datasets"])
def test_ends_by_the_same_rule_on_any_ranks_and_workers(kind: str) -> None:
    def make(rank: int, dp_size: int, num_workers: int) -> PrefetchLoader:
        ranks = {"dp_rank": rank, "dp_size": dp_size, "num_shards": 4, "shuffle": True}
        dataset = mixed(KINDS[kind](), [2, 1], by="tokens", **ranks)
        return PrefetchLoader(DataLoader(dataset, batch_size=None, num_workers=num_workers))

    with make(0, 1, 0) as loader:
        batches = list(loader)
    whole = sorted(map(batch_digest, batches))
    tokens = sum((Counter(batch.metadata["source_tokens"]) for batch in batches), Counter[str]())
    # in each shard within half an example of its share
    assert abs(tokens["0"] - 2 * tokens["1"]) <= 4 * 3 * 8
    with make(0, 1, 2) as loader:
        assert sorted(map(batch_digest, loader)) == whole
    found, states = [], []
    for rank in (0, 1):
        with make(rank, 2, rank) as loader:
            found += map(batch_digest, islice(loader, 2))
            states.append(json.loads(json.dumps(loader.state_dict())))
    with make(0, 1, 1) as loader:
        loader.load_state_dict(merge_states(states))
        found += map(batch_digest, loader)
    assert sorted(found) == whole


class Repeated:
    """The class of docs/migration.md: a source that begins anew, and has a state."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.next, self.start = examples, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.next, self.start = self.start, 0
        while True:
            self.next += 1
            yield self.examples[(self.next - 1) % len(self.examples)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


def test_a_source_that_repeats_itself_is_read_until_the_others_end() -> None:
    stream = datasets.Dataset.from_list(SOURCES[1]).to_iterable_dataset(num_shards=2)
    for repeated in (Repeated(SOURCES[1]), stream.repeat(None)):
        found = mixed([SOURCES[0], repeated], [1, 2])
        counts = sum((Counter(b.metadata["source_examples"]) for b in found), Counter[str]())
        assert counts == {"0": 30, "1": 60}


def test_the_name_of_the_source_is_row_metadata() -> None:
    fields = {"source": PerExample(str)}
    options: dict[str, Any] = {"overflow": "split", "max_tokens": 5, "fields": fields}
    for source in ("lists", "columns and callable"):
        rows = Counter[str]()
        for batch in mixed(KINDS[source](), [1, 1], names=["web", "math"], **options):
            assert set(batch.metadata["source_examples"]) == {"web", "math"}
            for row, names in zip(batch["input_ids"], batch.row_metadata["source"], strict=True):
                starts = {token // 1000 for token in row.tolist() if token}
                assert {"math" if start > 30 else "web" for start in starts} == set(names)
                rows.update(names)
        assert min(rows["web"], rows["math"]) > 5


# --- refusals ---


def test_an_empty_source_is_an_error() -> None:
    dataset = mixed([lambda: iter(SOURCES[0]), lambda: iter([])], [1, 1])
    with pytest.raises(DataError, match=r"^source '1' of the mixture has no examples; leave"):
        list(dataset)
    few = mixed([SOURCES[0], SOURCES[1][:3]], [1, 1], num_shards=4)
    with pytest.raises(DataError, match=r"^shard 3 of source '1' of the mixture has no ex"):
        list(few)
    found = list(mixed([lambda: iter(SOURCES[0]), lambda: iter([])], [1, 0]))
    assert sum(b.metadata["source_examples"]["0"] for b in found) == 30


@pytest.mark.parametrize("wrong", [{"input_ids": []}, {"input_ids": [5, -5]}])
def test_a_wrong_example_is_named_by_its_source(wrong: dict[str, Any]) -> None:
    sources = [SOURCES[0], [*SOURCES[1][:3], wrong, *SOURCES[1][3:]]]
    with pytest.raises(DataError, match="example 3 of source 'b' of the mixture"):
        list(mixed(sources, [1, 1], names=["a", "b"]))


SPLIT = [part.to_iterable_dataset() for part in map(datasets.Dataset.from_list, SOURCES)]
NODE = pytest.importorskip("datasets.distributed").split_dataset_by_node(SPLIT[0], 0, 2)
ONCE = "of a mixture of streams: its pass ends with the first source that ends; let a source that"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"on_error": "skip"}, ValueError, "on_error='skip' names examples by their position in the s"),
    ({"weights": [0, 0]}, ValueError, "weights are all 0; at least one source must be read"),
    ({"weights": [1]}, ValueError, "weights must have one number for each of the 2 sources, got 1"),
    ({"weights": None}, ValueError, "the mixture has streams, whose sizes are not known; pass wei"),
    ({"stop": "all_exhausted"}, ValueError, f"stop='all_exhausted' {ONCE}"),
    ({"max_passes": 2}, ValueError, f"max_passes= {ONCE}"),
    ({"max_passes": [None, 2]}, ValueError, f"max_passes= {ONCE}"),
    ({"schedule": [(5, [1, 2])]}, ValueError, "schedule= of a mixture of streams: save the state"),
    ({"sources": [NODE, SPLIT[1]]}, ValueError, "source '0' of the mixture is split by node alre"),
    ({"sources": [SPLIT[0]] * 2}, ValueError, "the mixture has one stream twice, which has one p"),
    ({"sources": [iter(SOURCES[0]), []]}, TypeError, "an iterator that can be read only once"),
    ({"sources": [12, 5]}, TypeError, "stream must be an iterable of examples or a callable"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_what_a_mixture_of_streams_cannot_be(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    streams = [lambda: iter(SOURCES[0]), lambda: iter(SOURCES[1])]
    with pytest.raises(kind, match=re.escape(message)):
        mixed(**{"sources": streams, "weights": [1, 1]} | options)


def test_states_of_other_mixtures_are_refused() -> None:
    with pytest.raises(TypeError, match="the mixture has streams, so it has no length and no samp"):
        len(Mixture([SPLIT[0], SOURCES[1]], weights=[1, 1]))
    data = [TokenizedDataset(part) for part in SOURCES]
    dataset = mixed(data, [3, 1], buffer_size=2)
    list(islice(dataset, 9))
    state = json.loads(json.dumps(dataset.state_dict()))
    for sources, more, message in (
        (data[::-1], {}, "the state is of data with num_"),
        (data, {"by": "tokens"}, "the state is of data with by='examples', the source has by="),
    ):
        with pytest.raises(StateError, match=message):
            mixed(sources, [3, 1], buffer_size=2, **more).load_state_dict(state)
