"""A Mixture of streams: an order by virtual time in every shard, against a slow loop."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    SETTINGS,
    StatefulSource,
    datasets,
    make_examples,
    plain_loop,
)
from torch_collate_kit import Mixture, PackedIterableDataset, PerExample, PrefetchLoader
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import TokenizedDataset, merge_states
from torch_collate_kit.testing import assert_exact_resume, batch_digest

Examples = list[dict[str, Any]]


def sources_of(sizes: list[int], seed: int = 0, longest: int = 8) -> list[Examples]:
    """Sources whose examples have tokens of their own."""
    rng = np.random.default_rng(seed)
    examples = make_examples(rng.integers(1, longest + 1, size=sum(sizes)).tolist())
    return [part.tolist() for part in np.split(np.array(examples), np.cumsum(sizes)[:-1])]


def merged(sources: list[Examples], weights: list[Any], by: str, stop: str) -> list[Any]:
    """The source whose next example's middle is due first, until the end of the share."""

    def units(example: dict[str, Any]) -> int:
        return len(example["input_ids"]) if by == "tokens" else 1

    exact = [Fraction(str(weight)) for weight in weights]
    read = [i for i, weight in enumerate(exact) if weight]
    ends = [sum(map(units, sources[i])) / exact[i] for i in read]
    end = min(ends) if stop == "first_exhausted" else max(ends)
    taken, done, found = Counter[int](), Counter[int](), []
    while True:
        following = {i: sources[i][taken[i] % len(sources[i])] for i in read}
        if stop == "first_exhausted":
            following = {i: e for i, e in following.items() if taken[i] < len(sources[i])}
        due = {i: (done[i] + Fraction(units(e), 2)) / exact[i] for i, e in following.items()}
        if not due or min(due.values()) > end:
            return found
        i = min(due, key=lambda i: (due[i], i))
        found.append((i, following[i]))
        taken[i] += 1
        done[i] += units(following[i])


def mixed(sources: list[Any], weights: list[Any], **options: Any) -> PackedIterableDataset:
    names = ("by", "stop", "names", "schedule", "max_passes")
    settings = {name: options.pop(name) for name in names if name in options}
    return packed_stream(Mixture(sources, weights=weights, **settings), **SETTINGS | options)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("by", ["examples", "tokens"])
def test_the_order_is_that_of_the_slow_loop(by: str, stop: str) -> None:
    for seed in range(8):
        rng = np.random.default_rng([seed, 1])
        sizes = rng.integers(1, 40, size=int(rng.integers(1, 5))).tolist()
        weights = [round(float(w), 1) for w in rng.integers(1, 50, size=len(sizes)) / 10]
        sources = sources_of(sizes, seed)
        streams = [lambda part=part: iter(part) for part in sources]
        dataset = mixed(streams, weights, by=by, stop=stop)
        order = merged(sources, weights, by, stop)
        wanted = plain_loop([e for _, e in order], dataset.collate, dataset.buffer_size, 1)
        found = list(dataset)
        examples, tokens = Counter[str](), Counter[str]()
        assert len(found) == len(wanted)
        for batch, expected in zip(found, wanted, strict=True):
            examples.update(batch.metadata.pop("source_examples"))
            tokens.update(batch.metadata.pop("source_tokens"))
            assert_same_batch(batch, expected)
        numbers = Counter(i for i, _ in order)
        assert list(examples.values()) == [numbers[i] for i in range(len(sizes))]
        for i, number in enumerate(tokens.values()):
            assert number == sum(len(e["input_ids"]) for of, e in order if of == i)


def test_weights_equal_to_the_sizes_read_each_example_once() -> None:
    sources = sources_of([30, 12, 7])
    for shuffle in (False, True):
        found = list(mixed(sources, [30, 12, 7], shuffle=shuffle))
        tokens = torch.cat([b["input_ids"][b["attention_mask"] == 1] for b in found]).tolist()
        assert sorted(tokens) == sorted(t for of in sources for e in of for t in e["input_ids"])


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
    ("lists", {"stop": "all_exhausted"}),
    ("stateful", {"by": "tokens"}),
    ("stateful", {"overflow": "split", "max_tokens": 5}),
    ("columns and callable", {"overflow": "split", "max_tokens": 5, "stop": "all_exhausted"}),
    ("datasets", {"by": "tokens", "stop": "all_exhausted"}),
    ("datasets", {"num_shards": 2}),
    ("lists", {"num_shards": 3, "stop": "all_exhausted", "buffer_size": 3}),
]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("kind", "more"), CASES, ids=str)
def test_exact_resume_at_every_batch(kind: str, more: dict[str, Any], shuffle: bool) -> None:
    parts, fewer = sources_of([15, 9]), {"buffer_size": 3}  # the time is quadratic

    def make() -> PackedIterableDataset:
        return mixed(KINDS[kind](parts), [3, 1], shuffle=shuffle, **fewer | more)

    num_steps = len(list(make())) + 3  # into the second pass
    assert_exact_resume(make, num_steps=num_steps, max_state_bytes=6000)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("kind", ["callables", "datasets"])
def test_ends_by_the_same_rule_on_any_ranks_and_workers(kind: str, stop: str) -> None:
    def make(rank: int, dp_size: int, num_workers: int) -> PrefetchLoader:
        ranks = {"dp_rank": rank, "dp_size": dp_size, "num_shards": 4, "shuffle": True}
        dataset = mixed(KINDS[kind](), [2, 1], by="tokens", stop=stop, **ranks)
        return PrefetchLoader(DataLoader(dataset, batch_size=None, num_workers=num_workers))

    with make(0, 1, 0) as loader:
        batches = list(loader)
    whole = sorted(map(batch_digest, batches))
    tokens = Counter[str]()
    for batch in batches:
        tokens.update(batch.metadata["source_tokens"])
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


def test_the_name_of_the_source_is_row_metadata() -> None:
    for source in ("lists", "columns and callable"):
        dataset = mixed(
            KINDS[source](),
            [1, 1],
            names=["web", "math"],
            fields={"source": PerExample(str)},
            overflow="split",
            max_tokens=5,
        )
        for batch in dataset:
            firsts = [{1000 * (i + 1) for i in range(*of)} for of in ((0, 30), (30, 49))]
            of = [
                (
                    "math"
                    if any(token - token % 1000 in firsts[1] for token in row.tolist())
                    else "web",
                )
                for row in batch["input_ids"]
            ]
            assert set(batch.metadata["source_examples"]) == {"web", "math"}
            if len(batch["sub_seq_lengths"].values) == 1:
                assert batch.row_metadata["source"] == of


# --- refusals ---


def test_an_empty_source_is_an_error() -> None:
    for stop in ("first_exhausted", "all_exhausted"):
        dataset = mixed([lambda: iter(SOURCES[0]), lambda: iter([])], [1, 1], stop=stop)
        with pytest.raises(DataError, match=r"^source '1' of the mixture has no examples; leave"):
            list(dataset)
        few = mixed([SOURCES[0], SOURCES[1][:3]], [1, 1], stop=stop, num_shards=4)
        with pytest.raises(DataError, match=r"^shard 3 of source '1' of the mixture has no ex"):
            list(few)
    found = list(mixed([lambda: iter(SOURCES[0]), lambda: iter([])], [1, 0]))
    assert sum(b.metadata["source_examples"]["0"] for b in found) == 30


def test_a_wrong_example_is_named_by_its_source() -> None:
    empty, negative = {"input_ids": []}, {"input_ids": [5, -5]}
    for wrong, message in (
        (empty, "example 3 of source 'b' of the mixture"),
        (negative, "example 3 of source 'b' of the mixture"),
    ):
        sources = [SOURCES[0], [*SOURCES[1][:3], wrong, *SOURCES[1][3:]]]
        with pytest.raises(DataError, match=message):
            list(mixed(sources, [1, 1], names=["a", "b"]))


SPLIT = [part.to_iterable_dataset() for part in map(datasets.Dataset.from_list, SOURCES)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "skip"}, "on_error='skip' names examples by their position in the stream, a"),
        ({"weights": [0, 0]}, "weights are all 0; at least one source must be read"),
        ({"weights": [1]}, "weights must have one number for each of the 2 sources, got 1"),
        ({"weights": None}, "the mixture has streams, whose sizes are not known; pass weights="),
        (
            {"weights": None, "schedule": [(5, [1, 2])]},
            "schedule begins at step 5; pass the weights before it",
        ),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    streams = [lambda: iter(SOURCES[0]), lambda: iter(SOURCES[1])]
    with pytest.raises(ValueError, match=message):
        mixed(streams, **{"weights": [1, 1]} | options)


def test_bad_sources() -> None:
    from datasets.distributed import split_dataset_by_node

    node = split_dataset_by_node(SPLIT[0], 0, 2)
    with pytest.raises(ValueError, match="source '0' of the mixture is split by node already"):
        mixed([node, SPLIT[1]], [1, 1])
    with pytest.raises(ValueError, match="the mixture has one stream twice, which has one positio"):
        mixed([SPLIT[0], SPLIT[0]], [1, 1])
    with pytest.raises(TypeError, match="an iterator that can be read only once"):
        mixed([iter(SOURCES[0]), SOURCES[1]], [1, 1])
    with pytest.raises(TypeError, match="stream must be an iterable of examples or a callable"):
        mixed([12, 5], [1, 1])
    with pytest.raises(TypeError, match="the mixture has streams, so it has no length and no samp"):
        len(Mixture([SPLIT[0], SOURCES[1]], weights=[1, 1]))


def test_states_of_other_mixtures_are_refused() -> None:
    dataset = mixed(SOURCES, [3, 1], buffer_size=2)
    list(islice(dataset, 9))
    state = json.loads(json.dumps(dataset.state_dict()))
    assert [len(of) for of in state["sources"]["0"]] == [6, 6]
    for weights, sources, message in (
        ([1, 3], SOURCES, r"weights=\['3', '1'\]"),
        ([3, 1], SOURCES[::-1], "the state is of data with num_"),
    ):
        with pytest.raises(StateError, match=message):
            mixed(sources, weights, buffer_size=2).load_state_dict(state)
