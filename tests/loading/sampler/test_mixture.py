"""Mixtures: the order of the loops, shares, stages and caps, and the same at every position."""

from __future__ import annotations

import itertools
import json
import re
import time
import timeit
from types import SimpleNamespace

import numpy as np
import pytest

from tests.building import mixed_sampler, packed_collator
from tests.loading.sampler.mixture_oracle import Mixed
from torch_collate_kit import (
    DataError,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PaddedCollator,
    PerExample,
    PrefetchingSampler,
    TokenizedDataset,
)
from torch_collate_kit.loading import mixed_order
from torch_collate_kit.loading.orders import epoch_order

WEIGHTS = [[0.5, 0.3, 0.2], [1, 1, 1], [90, 9, 1], [0.333, 0.123456, 7], [2, 0, 1], [4, 40, 1]]
LENGTHS = [[5, 9, 2, 40], [3] * 7, [1, 30, 1, 30, 8]]


def epochs_of(sampler, num_epochs):
    return [[int(i) for batch in sampler for i in batch] for _ in range(num_epochs)]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("by", ["examples", "tokens"])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("limited", [False, True])
def test_the_order_is_that_of_the_loops(weights, by, stop, limited):
    sources = [np.array(lengths) for lengths in LENGTHS]
    passes = [3, 2.5, None] if limited else None
    mixture = Mixture(sources, weights=weights, by=by, stop=stop, max_passes=passes)
    limits = [12, 17, None] if limited else None
    oracle = Mixed(LENGTHS, by, stop, limits, seed=3)
    sampler = PrefetchingSampler(mixture, batch_size=1, seed=3)
    expected = [[index for _, index in oracle.epoch([(0, weights)])] for _ in range(2)]
    assert epochs_of(sampler, 2) == expected
    long = PrefetchingSampler(mixture, batch_size=7, seed=3, tail="wrap")
    whole = [*expected[0], *expected[1]]
    found = epochs_of(long, 2)
    assert [*found[0], *found[1]] == whole[: len(whole) // 7 * 7]


@pytest.mark.parametrize("case", range(40))
def test_stages_begin_at_their_amounts(case):
    """Any sources, weights, amounts and passes; then any epoch and place, from its state alone."""
    rng = np.random.default_rng(case)
    lengths = [rng.integers(1, 30, int(n)).tolist() for n in rng.integers(1, 25, 3)]
    by, stop = str(rng.choice(["examples", "tokens"])), ["first", "all"][case % 2] + "_exhausted"
    longest = 40 if by == "examples" else 600
    amounts = np.unique(rng.integers(1, longest, int(rng.integers(1, 5)))).tolist()
    weights = rng.integers(0, 5, (len(amounts) + 1, 3))
    weights[:, 0] += 1
    schedule = list(zip([0, *amounts], weights.tolist(), strict=True))
    passes = [None, [4, 2.5, None], 3][case % 3]
    given = [None] * 3 if passes is None else [passes] * 3 if passes == 3 else passes
    limits = [n and int(n * len(of)) for n, of in zip(given, lengths, strict=True)]
    arrays = [np.array(of) for of in lengths]
    mixture = Mixture(arrays, schedule=schedule, by=by, stop=stop, max_passes=passes)
    oracle = Mixed(lengths, by, stop, limits, seed=1)
    expected = [[index for _, index in oracle.epoch(schedule)] for _ in range(3)]
    sampler = PrefetchingSampler(mixture, batch_size=3, seed=1)
    for epoch, indices in enumerate(expected):
        steps = [indices[i : i + 3] for i in range(0, len(indices), 3)]
        assert sampler.count_steps(epoch) == len(steps)
        for step in rng.integers(0, max(1, len(steps)), 4 if steps else 0).tolist():
            again = PrefetchingSampler(mixture, batch_size=3, seed=1)
            again.load_state_dict(sampler.state_at(epoch, step))
            assert list(again) == steps[step:]
    assert any(expected)


def test_a_stage_begins_by_hand():
    sources = [np.array([4, 4, 4, 4, 4]), np.array([2, 2, 2, 2, 2])]

    def order(schedule, by):
        mixture = Mixture(sources, schedule=schedule, by=by, stop="all_exhausted")
        return PrefetchingSampler(mixture, batch_size=99, shuffle=False).examples(0, 0).tolist()

    only_first = [(0, [1, 0]), (3, [0, 1])]
    assert order(only_first, "examples")[:5] == [0, 1, 2, 5, 6], "after 3 examples"
    assert order(only_first, "tokens")[:4] == [0, 5, 6, 7], "0 has 4 tokens, at least 3"
    assert order([(0, [1, 0]), (8, [0, 1])], "tokens")[:3] == [0, 1, 5], "8 is reached"
    later = [(0, [1, 0]), (3, [1, 1]), (4, [0, 1])]
    assert order(later, "tokens")[:2] == [0, 5], "two stages at one example: the last one's weights"
    assert order([(0, [1, 1]), (40, [0, 1])], "tokens") == order([(0, [1, 1])], "tokens")


def test_an_epoch_that_does_not_fit_into_memory_is_refused_with_its_size():
    words = r"about 5e\+08 entries with weights \['1', '1/1000000'\].*more than 268,435,456 is not"
    mixture = Mixture([500, 500], weights=[1, 1e-6], stop="all_exhausted")
    with pytest.raises(ValueError, match=words):
        PrefetchingSampler(mixture, batch_size=4)
    short = Mixture([500, 500], schedule=[(0, [1, 1e-6]), (50, [1, 1])], stop="all_exhausted")
    assert len(PrefetchingSampler(short, batch_size=4)) == 250 + 13


def test_written_out_by_hand():
    even = Mixture([3, 2], weights=[1, 1])
    sampler = PrefetchingSampler(even, batch_size=2, shuffle=False)
    assert epochs_of(sampler, 2) == [[0, 3, 1, 4], [2, 3, 0, 4]], "source 0 goes on"
    twice = Mixture([np.array([10, 10]), np.array([5, 5])], weights=[1, 1], by="tokens")
    sampler = PrefetchingSampler(twice, batch_size=3, shuffle=False)
    assert next(iter(sampler)) == [2, 0, 3], "due at 2.5, at 5 and at 7.5 tokens of both"
    whole = PrefetchingSampler(Mixture([3, 2]), batch_size=1)
    assert sorted(epochs_of(whole, 1)[0]) == [0, 1, 2, 3, 4], "weights by size: each once"


@pytest.mark.parametrize("seed", range(6))
def test_every_run_of_steps_has_its_share(seed):
    rng = np.random.default_rng(seed)
    num_sources = int(rng.integers(2, 12))
    weights = np.round(rng.dirichlet(np.full(num_sources, 0.5)) + 1e-3, 4)
    sizes = rng.integers(500, 900, num_sources).tolist()
    sampler = mixed_sampler(sizes, batch_size=1, weights=weights)
    found = np.array([sampler.examples(0, step)[0] for step in range(500)])
    sources = np.searchsorted(np.cumsum(sizes), found, side="right")
    counts = np.cumsum(sources[:, None] == np.arange(num_sources), axis=0)
    shares = np.arange(1, 501)[:, None] * (weights / weights.sum())
    assert np.abs(counts - shares).max() <= num_sources / 2


CASES = {
    "examples": {"weights": [0.5, 0.3, 0.2]},
    "tokens": {"by": "tokens", "weights": [1, 2, 3]},
    "all": {"stop": "all_exhausted", "by": "tokens", "max_passes": [2, None, 5]},
    "schedule": {"schedule": [(0, [1, 1, 1]), (6, [2, 1, 1])], "stop": "all_exhausted"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tail", ["keep", "wrap", "drop"])
@pytest.mark.parametrize("shuffle", [True, "keyed", False])
def test_resume_at_every_step(case, tail, shuffle):
    def make():
        sources = [np.array(lengths) for lengths in LENGTHS]
        options = {"tail": tail, "shuffle": shuffle, "seed": 2}
        return mixed_sampler(sources, batch_size=3, **CASES[case], **options)

    running = make()
    whole = [list(running), list(running)]
    for epoch in range(2):
        for step in range(len(whole[epoch]) + 1):
            state = json.loads(json.dumps(running.state_at(epoch, step)))
            resumed, jumped = make(), make()
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state == make().state_at(epoch, step)
            jumped.set_epoch(epoch, step=step)
            for sampler in (resumed, jumped):
                rest = [batch for _ in range(2 - sampler.epoch) for batch in sampler]
                assert rest == [*whole[epoch][step:], *(b for of in whole[epoch + 1 :] for b in of)]


def test_by_rows_a_mixture_is_full_and_has_its_shares():
    rng = np.random.default_rng(0)
    sources = [rng.integers(2, 60, 4000), rng.integers(100, 400, 1500)]
    collate = packed_collator(0, max_tokens=512, normalize_loss=False)
    half = 50 * 8 * 512
    for schedule in ([(0, [7, 3])], [(0, [7, 3]), (half, [4, 6])]):
        mixture = Mixture(sources, schedule=schedule, by="tokens", stop="all_exhausted")
        sampler = PackedBatchSampler(mixture, collate, batch_rows=8, seed=4)
        tokens, steps = np.zeros((100, 2)), np.arange(100)
        for step in range(100):
            found = sampler.examples(0, step)
            of_source = mixture.source_of(found)
            tokens[step] = np.bincount(of_source, mixture.lengths[found], minlength=2)
        assert tokens.sum() / (100 * 8 * 512) > 0.985
        for chosen, weights in ((steps < 45, schedule[0][1]), (steps > 55, schedule[-1][1])):
            shares = tokens[chosen].sum(axis=0) / tokens[chosen].sum()
            assert abs(shares[0] - weights[0] / 10) < 0.01
        state = json.loads(json.dumps(sampler.state_at(0, 53)))
        resumed = PackedBatchSampler(mixture, collate, batch_rows=8, seed=4)
        resumed.load_state_dict(state)
        for step in (53, 60, 77):
            assert resumed.examples(0, step).tolist() == sampler.examples(0, step).tolist()


@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
def test_by_rows_a_schedule_is_the_same_however_a_step_is_reached(tail):
    lengths = [np.random.default_rng(s).integers(1, 30, 60) for s in (0, 1)]
    schedule = [(0, [4, 1]), (300, [1, 1]), (800, [1, 9])]
    mixture = Mixture(lengths, schedule=schedule, stop="all_exhausted", by="tokens")
    collate = packed_collator(0, max_tokens=40, normalize_loss=False)

    def make():
        return PackedBatchSampler(mixture, collate, batch_rows=4, window=3, tail=tail)

    served, running = [], make()
    for epoch in range(2):
        served += [(epoch, step, part) for step, part in enumerate(running)]
    assert len(served) > 20
    examples = {(epoch, step): running.examples(epoch, step).tolist() for epoch, step, _ in served}
    for epoch, step, part in served[::5]:
        jumped = make()
        jumped.set_epoch(epoch, step=step)
        assert next(iter(jumped)).indices == part.indices
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(running.state_at(epoch, step))))
        assert next(iter(resumed)).indices == part.indices
        for before in range(step):
            assert resumed.examples(epoch, before).tolist() == examples[epoch, before]


def test_what_was_read_oftener_goes_on_alone_after_the_others_are_used_up():
    mixture = Mixture([20, 2], weights=[4, 1], stop="all_exhausted", max_passes=[1, None])
    sampler = PrefetchingSampler(mixture, batch_size=2)
    counts = [mixture.source_counts(np.concatenate(list(sampler))) for _ in range(3)]
    assert counts == [{"0": 20, "1": 5}, {"0": 0, "1": 1}, {"0": 0, "1": 2}]
    mixture = Mixture([20, 2], weights=[4, 1], stop="all_exhausted", max_passes=[1, 3.5])
    found = epochs_of(PrefetchingSampler(mixture, batch_size=2), 3)
    assert list(map(len, found)) == [25, 1, 1], "one more pass at a time, not all that are left"


TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=9)
ENDINGS = {
    "indices": lambda data, tail: PrefetchingSampler(data, batch_size=3, tail=tail),
    "examples": lambda data, tail: PackedBatchSampler(
        data, PackedCollator(0, max_tokens=8), batch_size=3, tail=tail
    ),
    "rows": lambda data, tail: PackedBatchSampler(
        data, PackedCollator(0, max_tokens=8), batch_rows=2, window=2, tail=tail
    ),
    "wrapped": lambda data, tail: PackedBatchSampler(
        data,
        PackedCollator(TOKENIZER, max_tokens=8, strategy="wrapped"),
        batch_rows=2,
        window=2,
        tail=tail,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("tail", ["wrap", "drop", "keep"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_passes": 1},  # with "wrapped" all steps are full: 64 tokens
        {"max_passes": [2, 1], "stop": "all_exhausted", "by": "tokens"},
        {"max_passes": 1.5, "schedule": [(0, [1, 1]), (6, [1, 3])]},
        {"max_passes": [1.1, None], "weights": [10, 1]},  # an epoch without a full step
    ],
)
def test_a_mixture_ends_with_its_passes_and_every_state_loads(name, tail, options):
    sources = [np.array([5, 3, 4, 2, 6, 7, 3, 2]), np.array([8, 8, 4, 4, 5, 3])]
    data, ended = Mixture(sources, **options), "has no example left|leaves no step"
    sampler, states, batches = ENDINGS[name](data, tail), [], []

    def read(sampler):
        try:
            return [getattr(batch, "indices", batch) for batch in sampler]
        except ValueError as error:
            if re.search(ended, str(error)):
                return None
            raise

    for epoch in range(4):
        if (steps := read(sampler)) is None:
            break
        batches += steps
        states.append((sampler.state_at(epoch, len(steps)), len(batches)))
    assert states
    assert [] not in batches
    for state, done in states:
        resumed, rest = ENDINGS[name](data, tail), []
        resumed.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(state["epoch"], 4):
            rest += read(resumed) or []
        assert rest == batches[done:]
    if None not in data.max_passes and name != "wrapped":  # whose documents are in several steps
        counts = np.bincount(np.concatenate(batches), minlength=14)
        assert (counts[:8] <= np.ceil(float(data.max_passes[0]))).all()


def test_a_jump_over_many_epochs_is_many_short_jumps(monkeypatch):
    calls, made = [], mixed_order.epoch_order
    monkeypatch.setattr(mixed_order, "epoch_order", lambda *of: calls.append(of) or made(*of))
    lengths = np.array([5, 3, 4, 2, 6, 7, 3, 2] * 3)
    mixture = Mixture([lengths, lengths[:9]], weights=[0.1, 1], by="tokens")
    for make, data in itertools.product(ENDINGS.values(), (lengths, mixture)):
        walked, jumped = make(data, "wrap"), make(data, "wrap")
        for epoch in range(0, 401, 200):
            state = walked.state_at(epoch, 0)
        calls.clear()
        assert jumped.state_at(400, 0) == state
        assert len(calls) <= 400 * 20, "not the passes by which a source lags behind its epochs"
        assert jumped.count_steps(400) == walked.count_steps(400)
        assert jumped.when(3, 400) == walked.when(3, 400)
        assert len(getattr(jumped._budget, "_windows", ())) <= 3


def test_many_short_passes_cost_what_drawing_them_costs():
    mixture = Mixture([5, 5], weights=[1e-4, 1], stop="all_exhausted")

    def draw():
        return [epoch_order(5, False, (0, 1, i)).take(0, 5) for i in range(10000)]

    def count():
        return len(PrefetchingSampler(mixture, batch_size=2, shuffle=False))

    counted, drawn = (
        min(timeit.repeat(call, number=1, timer=time.process_time)) for call in (count, draw)
    )
    assert counted < 4 * drawn


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_rows": 2, "window": 2}])
def test_the_last_state_of_an_epoch_does_not_read_the_order_of_the_next(options):
    orders, collate = {0: range(12)}, PackedCollator(0, max_tokens=8)

    def make():
        lengths = np.full(12, 4)
        order = lambda epoch, rng: orders[epoch]  # noqa: E731
        return PackedBatchSampler(lengths, collate, order=order, tail="drop", **options)

    sampler = make()
    state = sampler.state_at(0, sum(1 for _ in sampler))
    assert (state["epoch"], state["step"]) == (1, 0)
    orders[1] = [3]  # fewer than a step has
    resumed = make()
    resumed.load_state_dict(state)
    assert len(resumed) == 0
    for begin in (iter, lambda of: of.set_epoch(1)):
        with pytest.raises(ValueError, match="leaves no step"):
            begin(resumed)


def test_it_is_a_dataset_of_its_sources_end_to_end():
    sources = [TokenizedDataset([{"input_ids": [i, n]} for i in range(n)]) for n in (3, 2)]
    mixture = Mixture(sources, names=["web", "math"])
    examples = mixture.__getitems__([4, 0, 2])
    assert [e["input_ids"].tolist() for e in examples] == [[1, 2], [0, 3], [2, 3]]
    assert [e["source"] for e in examples] == ["math", "web", "web"]
    assert mixture[3]["input_ids"].tolist() == [0, 2]
    assert mixture.source_counts([4, 0, 2]) == {"web": 2, "math": 1}
    fields = {"source": PerExample(str)}
    collate = PaddedCollator(0, fields=fields, train_all=True)
    assert collate(examples).row_metadata["source"] == ["math", "web", "web"]
    packed = PackedCollator(0, max_tokens=8, fields=fields, train_all=True)
    sampler = PackedBatchSampler(mixture, packed, batch_size=2, shuffle=False)
    rows = [packed(mixture.__getitems__(indices)).row_metadata for indices in sampler]
    assert [row["source"] for row in rows] == [[("web", "math")], [("web", "math")], [("web",)]]


@pytest.mark.parametrize("by_rows", [None, "balanced", "wrapped"])
def test_a_source_that_reaches_its_passes_is_logged_once_in_an_epoch(by_rows, caplog):
    lengths = np.random.default_rng(3).integers(1, 9, 60)
    options = {"max_passes": [3, 2, None], "stop": "all_exhausted", "by": "tokens"}
    sources, names = [lengths[:6], lengths[6:11], lengths[11:]], ["math", "code", "web"]
    mixture = Mixture(sources, weights=[1, 2, 2], **options, names=names)
    if by_rows is None:
        sampler, window = PrefetchingSampler(mixture, batch_size=4), 1
    else:
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
        collate = PackedCollator(tokenizer, max_tokens=16, strategy=by_rows, normalize_loss=False)
        sampler, window = PackedBatchSampler(mixture, collate, batch_rows=1, window=3), 3
    expected = {}
    for step in range(len(sampler)):
        for source in mixture.source_of(sampler.examples(0, step)):
            expected[source] = step // window * window
    assert not caplog.records
    list(sampler)
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"epoch 0, step {expected[source]}: source {names[source]!r} has been read "
        f"max_passes={passes} times; from here on its weight goes to the others"
        for source, passes in enumerate([3, 2])
    )
    caplog.clear()
    following = iter(sampler)
    next(following), next(following)
    assert {of.getMessage()[:16] for of in caplog.records} == {"epoch 1, step 0:"}
    assert len(caplog.records) == 2


BAD = [
    (([],), {}, ValueError, "sources must be a sequence of at least one dataset or number"),
    (([3, 0],), {}, ValueError, "sources[1] must be at least 1, got 0"),
    (([3, 2],), {"weights": [1]}, ValueError, "weights must have one number for each of the 2 so"),
    (([3, 2],), {"weights": [0, 0]}, ValueError, "weights are all 0; at least one source must be"),
    (([3, 2],), {"weights": [1, -1]}, ValueError, "weights[1] must be a finite number of at leas"),
    (([3, 2],), {"weights": [1e308, 1e308]}, ValueError, "weights are too large or too far apart"),
    (([3, 2],), {"schedule": [(0, [1, 1e-310])]}, ValueError, "schedule[0] weights are too large "),
    (([3, 2],), {"weights": [1, "1"]}, ValueError, "weights[1] must be a finite number of at lea"),
    (([3, 2],), {"by": "tokens"}, ValueError, "the length of every example is needed, and source"),
    (
        ([[3, 2]],),
        {"by": "tokens"},
        ValueError,
        "pass np.array(source) if the numbers in this list",
    ),
    (
        ([[{}]],),
        {"by": "tokens"},
        ValueError,
        "sources[0] has no lengths; pass TokenizedDataset(so",
    ),
    (
        ({"web": [3, 2]},),
        {},
        TypeError,
        "a source is a str, got sources=a dict; pass a list of data",
    ),
    (
        ([{}],),
        {},
        TypeError,
        "a source is a dict, got sources=a list; pass a list of datasets, of a",
    ),
    (([3, 2],), {"stop": "first"}, ValueError, "stop must be one of 'first_exhausted', 'all_exha"),
    (([3, 2],), {"names": [1, 2]}, ValueError, "names must be 2 different strings, one for each"),
    (([3, 2],), {"names": ["a", "a"]}, ValueError, "names must be 2 different strings, one for e"),
    (([3, 2],), {"max_passes": 0}, ValueError, "max_passes of source 0 must be a number above 0"),
    (([3, 9],), {"max_passes": 0.3}, ValueError, "max_passes=0.3 of source 0 is less than one of "),
    (
        ([3, 2],),
        {"schedule": [(2, [0, 0])], "weights": [1, 1]},
        ValueError,
        "schedule[0] weights ar",
    ),
    (([3, 2],), {"max_passes": [1]}, ValueError, "max_passes must be a number, or one for each o"),
    (([3, 2],), {"schedule": [(2, [1, 1])]}, ValueError, "schedule begins at 2; pass the weights"),
    (
        ([3, 2],),
        {"schedule": [3]},
        TypeError,
        "schedule[0] must be a pair (amount, weights), got 3",
    ),
    (
        ([3, 2],),
        {"schedule": [(0, [1, 1]), (0, [1, 2])]},
        ValueError,
        "schedule[1] begins at 0, not after 0, where the stage before it begins",
    ),
    (
        ([3, 2],),
        {"schedule": [(0, [1, 1])], "weights": [1, 1]},
        ValueError,
        "schedule begins at 0, and weights= says so too; pass one",
    ),
    (([3, np.array([1.5])],), {"by": "tokens"}, ValueError, "the length of every example is nee"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), BAD)
def test_bad_arguments(args, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Mixture(*args, **options)


def test_what_a_mixture_cannot_do():
    mixture = Mixture([3, 2])
    with pytest.raises(ValueError, match="a Mixture has an order of its own"):
        PrefetchingSampler(mixture, batch_size=2, order=lambda epoch, rng: [0])
    with pytest.raises(ValueError, match="a Mixture cannot be reshuffled"):
        PrefetchingSampler(mixture, batch_size=2).reshuffle()
    with pytest.raises(TypeError, match=r"source '0' of the mixture is 3, which has no examples"):
        mixture[0]
    with pytest.raises(IndexError, match="index 5 is outside the mixture, which has 5 examples"):
        mixture[5]
    capped = PrefetchingSampler(Mixture([3, 2], max_passes=1), batch_size=2)
    assert len([*iter(capped)]) == 3
    assert len(capped) == 0
    with pytest.raises(ValueError, match="epoch 1 of the mixture has no example left"):
        iter(capped)
    with pytest.raises((ValueError, DataError), match="lengths of sources"):
        Mixture([np.array([0, 1])], by="tokens")
