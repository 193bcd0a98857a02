"""A Mixture of streams with a schedule and max_passes, against a slow loop; resumed anywhere."""

from __future__ import annotations

import json
import logging
from collections import Counter
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.streaming.stages_oracle import StagedOrder
from tests.loading.streaming.streaming_oracle import (
    SETTINGS,
    StatefulSource,
    datasets,
    make_examples,
    plain_loop,
)
from torch_collate_kit import Mixture, PackedIterableDataset, PrefetchLoader
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import TokenizedDataset, merge_states
from torch_collate_kit.testing import assert_exact_resume, batch_digest

Examples = list[dict[str, Any]]
MIXED = ("by", "stop", "schedule", "max_passes", "names")
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)


KINDS: dict[str, Any] = {
    "lists": lambda parts: parts,
    "callables": lambda parts: [lambda part=part: iter(part) for part in parts],
    "stateful": lambda parts: [StatefulSource(part) for part in parts],
    "columns and callable": lambda parts: [TokenizedDataset(parts[0]), lambda: iter(parts[1])],
    "datasets": lambda parts: [
        datasets.Dataset.from_list(part).to_iterable_dataset(num_shards=n)
        for part, n in zip(parts, (4, 3), strict=True)
    ],
}


def sources_of(sizes: list[int], seed: int = 0, longest: int = 8) -> list[Examples]:
    """Sources whose examples have tokens of their own, and end with 1."""
    rng = np.random.default_rng(seed)
    examples = make_examples(rng.integers(1, longest + 1, size=sum(sizes)).tolist())
    examples = [{"input_ids": [*e["input_ids"][:-1], 1]} for e in examples]
    return [part.tolist() for part in np.split(np.array(examples), np.cumsum(sizes)[:-1])]


def mixed(sources: list[Any], weights: Any, **options: Any) -> PackedIterableDataset:
    settings = {name: options.pop(name) for name in MIXED if name in options}
    mixture = Mixture(sources, weights=weights, **settings)
    return packed_stream(mixture, **SETTINGS | {"tokenizer": TOKENIZER} | options)


def random_stages(
    rng: np.random.Generator, num_sources: int, num_steps: int
) -> list[tuple[int, list[int]]]:
    """Stages in which at least one source has a weight."""
    steps = sorted({0, *rng.integers(1, num_steps, size=int(rng.integers(1, 4))).tolist()})
    found = []
    for step in steps:
        weights = rng.integers(0, 5, size=num_sources)
        weights[rng.integers(num_sources)] += 1
        found.append((step, weights.tolist()))
    return found


def random_case(seed: int) -> tuple[list[Examples], dict[str, Any], dict[str, Any]]:
    """Sources, the options of their mixture, and those of the stream."""
    rng = np.random.default_rng([seed, 7])
    num_shards = int(rng.integers(1, 4))
    sizes = rng.integers(num_shards, 40, size=int(rng.integers(1, 5))).tolist()
    of_stream = {
        "num_shards": num_shards,
        "rows": int(rng.integers(1, 3)),
        "buffer_size": int(rng.integers(3, 12)),
        "strategy": str(rng.choice(["balanced", "best_fit_decreasing", "sequential"])),
    }
    of_mixture = {
        "by": str(rng.choice(["examples", "tokens"])),
        "stop": str(rng.choice(["first_exhausted", "all_exhausted"])),
        "schedule": random_stages(rng, len(sizes), int(rng.integers(2, 40)) * num_shards),
        "max_passes": None,
    }
    if of_mixture["stop"] == "all_exhausted" and rng.random() < 0.7:
        of_mixture["max_passes"] = [rng.choice([1, 2, 3, None]) for _ in sizes]
    return sources_of(sizes, seed), of_mixture, of_stream


def order_of(
    sources: list[Examples], of_mixture: dict[str, Any], of_stream: dict[str, Any], shard: int
) -> StagedOrder:
    """The slow order of one of the shards."""
    num_shards, rows = of_stream["num_shards"], of_stream["rows"]
    stages = [(Fraction(step, num_shards), weights) for step, weights in of_mixture["schedule"]]
    passes = of_mixture["max_passes"] or [None] * len(sources)
    parts = [part[shard::num_shards] for part in sources]
    return StagedOrder(parts, stages, of_mixture["by"], of_mixture["stop"], passes, rows * 12)


def check_a_case(seed: int) -> int:
    """Compare every shard with the slow loop; return the number of stages that began in it."""
    sources, of_mixture, of_stream = random_case(seed)
    dataset = mixed(KINDS["callables"](sources), None, **of_mixture, **of_stream)
    found = [(batch.metadata.pop("shard"), batch) for batch in dataset]
    num_begun = 0
    for shard in range(of_stream["num_shards"]):
        order = order_of(sources, of_mixture, of_stream, shard)
        of = dataset.collate, of_stream["buffer_size"], of_stream["rows"]
        wanted = plain_loop([], *of, order)
        mine = [batch for of, batch in found if of == shard]
        assert len(mine) == len(wanted), seed
        examples = Counter[str]()
        for batch, expected in zip(mine, wanted, strict=True):
            examples.update(batch.metadata.pop("source_examples"))
            for name in ("source_tokens", "step"):
                del batch.metadata[name]
            assert_same_batch(batch, expected)
        numbers = Counter(str(source) for source, _ in order.found)
        assert +examples == numbers, seed
        num_begun += len({stage for _, stage in order.found})
    return num_begun


def test_the_order_is_that_of_the_slow_loop() -> None:
    assert sum(map(check_a_case, range(12))) > 25


@pytest.mark.release
def test_the_order_is_that_of_the_slow_loop_in_1000_mixtures() -> None:
    assert sum(map(check_a_case, range(12, 1060))) > 3000


@pytest.mark.parametrize("by", ["tokens", pytest.param("examples", marks=pytest.mark.release)])
def test_joined_documents_have_their_stage_exactly(by: str) -> None:
    sources = sources_of([60, 40], longest=20)
    schedule = [(0, [3, 1]), (4, [0, 1]), (9, [1, 1])]
    options = {"strategy": "wrapped", "rows": 2, "schedule": schedule, "by": by}
    stages = [(Fraction(step), weights) for step, weights in schedule]
    order = StagedOrder(sources, stages, by, "first_exhausted", [None, None], 24)
    wanted: list[int] = []
    while (example := order(0, 0)) is not None:
        wanted += example["input_ids"]
    streams = KINDS["callables"](sources)
    found = [batch["input_ids"].flatten().tolist() for batch in mixed(streams, None, **options)]
    assert [token for batch in found for token in batch][: len(wanted)] == wanted
    assert [len(of) for of in found[:-1]] == [24] * (len(found) - 1)
    # of step 4 only the document that began before it is of source 0
    firsts = {token for example in sources[0] for token in example["input_ids"]} - {1}
    begun = found[4].index(1)
    assert not firsts & {token for batch in found[4:9] for token in batch[begun:]}
    assert_exact_resume(lambda: mixed(streams, None, **options), num_steps=len(found) + 2)


@pytest.mark.release
def test_a_stage_begins_at_its_step_however_full_rows_are() -> None:
    for lengths in ((7, 8), (1, 12)):  # one in a row of 12 tokens, and rows that are 98% full
        rng = np.random.default_rng(0)
        sources = [make_examples(rng.integers(*lengths, size=900).tolist()) for _ in range(2)]
        for num_shards in (1, 4):
            options = {"schedule": [(200, [0, 1])], "num_shards": num_shards, "rows": 2}
            counts = [
                [batch.metadata["source_tokens"][name] for name in "01"]
                for batch in mixed(sources, [1, 0], **options)
            ]
            assert sum(sum(of) for of in counts) > 0
            late, early = sum(of[0] for of in counts[200:]), sum(of[1] for of in counts[:200])
            of_a_step = np.mean([sum(of) for of in counts[:200]])
            assert abs(late - early) < 2 * num_shards * of_a_step
            assert late + early < 7 * num_shards * of_a_step  # a buffer is about six batches


STAGES = [(0, [3, 1]), (4, [0, 1]), (7, [1, 1]), (9, [1, 0])]
CASES = [
    ("lists", {"stop": "all_exhausted", "max_passes": [3, 2], "rows": 2}),
    ("callables", {"by": "tokens", "strategy": "sequential"}),
    ("stateful", {"by": "tokens", "stop": "all_exhausted", "max_passes": 2}),
    ("columns and callable", {"overflow": "split", "max_tokens": 5, "stop": "all_exhausted"}),
    ("datasets", {"num_shards": 2, "stop": "all_exhausted", "max_passes": [None, 1]}),
    ("lists", {"num_shards": 3, "strategy": "wrapped"}),
]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("kind", "more"), CASES, ids=str)
def test_exact_resume_at_every_batch(kind: str, more: dict[str, Any], shuffle: bool) -> None:
    parts = sources_of([15, 9])

    def make() -> PackedIterableDataset:
        options = {"buffer_size": 4, "schedule": STAGES, "shuffle": shuffle, **more}
        return mixed(KINDS[kind](parts), None, **options)

    num_steps = len(list(make())) + 3  # into the second pass
    assert_exact_resume(make, num_steps=num_steps, max_state_bytes=7000)


@pytest.mark.release
def test_exact_resume_of_random_mixtures() -> None:
    for seed in range(12):
        parts, of_mixture, of_stream = random_case(seed)
        sources = KINDS["callables"](parts)

        def make(sources: Any = sources, options: Any = of_mixture | of_stream) -> Any:
            return mixed(sources, None, **options)

        num_steps = len(list(make()))
        stops = np.random.default_rng(seed).integers(0, num_steps, size=12).tolist()
        assert_exact_resume(make, num_steps=num_steps, stops=stops, max_state_bytes=7000)


def test_a_mixture_that_has_ended_does_not_go_on_in_the_next_stage() -> None:
    ids = [1] * 12
    # when the end is found, 18 batches are packed, and by their mean all tokens fill 19.4
    long = [{"input_ids": ids[:n]} for n in [12] * 12 + [7] * 8]
    short = [{"input_ids": ids}] * 9
    options = {"stop": "all_exhausted", "schedule": [(20, [0, 1])], "buffer_size": 4}
    # all of the first source is read in 4 steps, which is known only when a fifth is asked for
    joined = {"strategy": "wrapped", "schedule": [(4, [0, 1])], "max_tokens": 12}
    for sources, weights, settings, num_batches in (
        ([long, short], [1, 0], options, 20),
        ([short[:2], short], [1, 1], joined, 4),
    ):
        dataset = mixed(sources, weights, **settings)
        assert len(list(islice(dataset, num_batches))) == num_batches
        resumed = mixed(sources, weights, **settings)
        resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
        assert list(dataset) != []
        assert list(resumed) == []
        assert len(list(mixed(sources, weights, **settings))) == num_batches


@pytest.mark.parametrize("strategy", ["balanced", "wrapped"])
def test_goes_on_with_any_ranks_and_workers(strategy: str) -> None:
    parts = sources_of([150, 90])

    def make(rank: int, dp_size: int, num_workers: int) -> PrefetchLoader:
        schedule = [
            (4 * rows // dp_size, of) for rows, of in ((0, [3, 1]), (4, [0, 1]), (9, [1, 1]))
        ]
        options = {"schedule": schedule, "stop": "all_exhausted", "max_passes": [2, 3]}
        options |= {"num_shards": 4, "strategy": strategy, "shuffle": True}
        ranks = {"dp_rank": rank, "dp_size": dp_size}
        dataset = mixed(KINDS["callables"](parts), None, **options, **ranks)
        return PrefetchLoader(DataLoader(dataset, batch_size=None, num_workers=num_workers))

    with make(0, 1, 0) as loader:
        batches = list(loader)
    whole = sorted(map(batch_digest, batches))
    assert len(whole) > 80
    with make(0, 1, 2) as loader:
        assert sorted(map(batch_digest, loader)) == whole
    found, states = [], []
    for rank in range(4):  # to the middle of a stage
        with make(rank, 4, 0) as loader:
            found += map(batch_digest, islice(loader, 5))
            states.append(json.loads(json.dumps(loader.state_dict())))
    state, states = merge_states(states), []
    for rank in (0, 1):
        with make(rank, 2, rank) as loader:
            loader.load_state_dict(state)
            found += map(batch_digest, islice(loader, 8))
            states.append(json.loads(json.dumps(loader.state_dict())))
    with make(0, 1, 0) as loader:
        loader.load_state_dict(merge_states(states))
        found += map(batch_digest, loader)
    assert sorted(found) == whole


def test_without_num_shards_a_step_is_of_the_ranks_and_workers() -> None:
    examples = [{"input_ids": [i] * 12} for i in (1, 2)]
    sources = [[example] * 60 for example in examples]
    for dp_size, num_workers in ((1, 0), (1, 2), (2, 0), (2, 2)):
        options = {"schedule": [(6, [0, 1])], "dp_size": dp_size, "buffer_size": 2, "dp_rank": 0}
        dataset = mixed(KINDS["callables"](sources), [1, 0], **options)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, collate_fn=dataset.as_is
        )
        found = [int(batch["input_ids"][0, 0]) for batch in islice(loader, 12)]
        assert found == [1] * 6 + [2] * 6


def test_a_source_is_read_max_passes_times_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = [make_examples([6] * n) for n in (60, 10)]
    options = {"stop": "all_exhausted", "names": ["web", "math"], "num_shards": 2}
    for passes, shares in ((None, [60, 60]), ([None, 2], [60, 20]), (1, [60, 10])):
        caplog.clear()
        dataset = mixed(sources, [1, 1], **options, max_passes=passes)
        for _ in range(2):  # counted in each pass
            examples = Counter[str]()
            for batch in dataset:
                examples.update(batch.metadata["source_examples"])
            assert list(examples.values()) == shares
        messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        times = passes if isinstance(passes, int) else 2
        logged = (
            f"shard 0 of source 'math' of the mixture has been read max_passes={times} times in "
            "this pass over the stream; from here on its weight goes to the others (each shard "
            "counts for itself; the first is logged)"
        )
        assert messages == ([] if passes is None else [logged])


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_passes": 1.5, "stop": "all_exhausted"},
            "max_passes=1.5 of source '0', a stream, must be a whole number: how many examples",
        ),
        (
            {"max_passes": 2},
            'max_passes= of streams counts within a pass over the mixture, and one with stop="fi',
        ),
        ({"schedule": [(5, [0, 0])]}, r"schedule\[0\] weights are all 0; at least one source"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixed(sources_of([3, 3]), [1, 1], **options)


def test_states_of_other_stages_are_refused() -> None:
    sources = sources_of([30, 19])

    def make(**options: Any) -> PackedIterableDataset:
        return mixed(sources, [3, 1], buffer_size=2, **options)

    dataset = make(schedule=[(5, [1, 2])])
    list(islice(dataset, 9))
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["stages"] == [[5, "1", "2"]]
    assert len(state["sources"]["0"]) == 3
    message = (
        r"the state is of stages=\[\[5, '1', '2'\]\], the dataset has stages=.*; stages begin "
        "after so many rows of all ranks, and a schedule counts steps of batch_rows rows: with "
        "half the rows a step, give twice the steps"
    )
    for others in ({"schedule": [(10, [1, 2])]}, {"schedule": [(5, [2, 1])]}, {}):
        with pytest.raises(StateError, match=message):
            make(**others).load_state_dict(state)
