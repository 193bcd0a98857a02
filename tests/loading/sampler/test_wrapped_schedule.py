"""A schedule of a Mixture under strategy="wrapped": stages, windows and positions by loops."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.loading.sampler.mixture_oracle import Mixed
from tests.loading.seals import resealed
from torch_collate_kit import (
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    ParallelLayout,
    PrefetchingSampler,
)

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)
ROW = 16
Rows = list[tuple[tuple[int, int], ...]]


def drawn(seed: int) -> dict[str, Any]:
    """A mixture of three sources, its schedule, and how steps are cut from it."""
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([9, 40, 150]))  # above a step
    by = str(rng.choice(["examples", "tokens"]))
    amounts = rng.integers(1, 40 if by == "examples" else 1500, int(rng.integers(1, 4)))
    amounts = np.unique(amounts).tolist()
    weights = [rng.integers(1, 9, 3).tolist() for _ in range(len(amounts) + 1)]
    case = {
        "sources": [rng.integers(1, longest, int(n)) for n in rng.integers(20, 60, 3)],
        "schedule": list(zip([0, *amounts], weights, strict=True)),
        "by": by,
        "stop": str(rng.choice(["first_exhausted", "all_exhausted"])),
        "passes": [None, [4, None, None], [2, 2.5, 1]][int(rng.choice(3, p=[0.6, 0.2, 0.2]))],
        "batch_rows": int(rng.choice([2, 4, 6])),
        "window": int(rng.integers(1, 6)),
        "tail": str(rng.choice(["keep", "drop", "wrap"])),
        "seed": int(rng.integers(99)),
    }
    if case["passes"] and case["tail"] == "drop":
        case["tail"] = "keep"  # what is left for an epoch may fill no step
    return case


def documents_of(case: dict[str, Any], num_epochs: int) -> list[list[int]]:
    """The documents of each epoch."""
    sources = [of.tolist() for of in case["sources"]]
    passes = case["passes"] or [None] * 3
    limits = [n and int(n * len(of)) for n, of in zip(passes, sources, strict=True)]
    mixed = Mixed(sources, case["by"], case["stop"], limits, seed=case["seed"])
    return [[index for _, index in mixed.epoch(case["schedule"])] for _ in range(num_epochs)]


def windows_of(case: dict[str, Any], num_epochs: int) -> list[tuple[int, int, list[Rows]]]:
    """(epoch, first step, the rows of its steps in stream order) of each window; rows as tokens."""
    lengths, per_step, found = np.concatenate(case["sources"]), case["batch_rows"] * ROW, []
    rest: list[tuple[int, int]] = []
    for epoch, documents in enumerate(documents_of(case, num_epochs)):
        tokens = rest + [(i, at) for i in documents for at in range(lengths[i])]
        full = len(tokens) // per_step * per_step
        rest = tokens[full:] if case["tail"] == "wrap" else []
        tokens = tokens if case["tail"] == "keep" else tokens[:full]
        steps = [tokens[i : i + per_step] for i in range(0, len(tokens), per_step)]
        first = 0
        for step in range(1, len(steps) + 1):
            if step == len(steps) or step - first == case["window"]:
                joined = [token for of in steps[first:step] for token in of]
                rows = [tuple(joined[i : i + ROW]) for i in range(0, len(joined), ROW)]
                found.append((epoch, first, rows))
                first = step
    return found


def made(case: dict[str, Any], dp: int = 1, rank: int = 0) -> PackedBatchSampler:
    mixture = Mixture(
        case["sources"],
        schedule=case["schedule"],
        max_passes=case["passes"],
        **{name: case[name] for name in ("by", "stop")},
    )
    collate = PackedCollator(
        TOKENIZER,
        max_tokens=ROW,
        strategy="wrapped",
        normalize_loss=False,
        parallel=ParallelLayout(dp=dp),
    )
    order = {name: case[name] for name in ("batch_rows", "window", "tail", "seed")}
    return PackedBatchSampler(mixture, collate, dp_rank=rank, **order)


def rows_of(part: Any) -> Rows:
    """The rows that a rank reads, as tokens (document, place in it)."""
    examples, starts, lengths, offsets = part.pieces
    documents = np.array(part.indices)[examples]
    pieces = [
        [(int(i), at) for at in range(start, start + n)]
        for i, start, n in zip(documents, starts, lengths, strict=True)
    ]
    rows = [pieces[a:b] for a, b in pairwise(offsets)]
    return [tuple(token for piece in row for token in piece) for row in rows if row]


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.release) for seed in range(8, 300))]


@pytest.mark.parametrize("seed", SEEDS)
def test_stages_windows_and_positions_are_those_of_the_loops(seed: int) -> None:
    case = drawn(seed)
    running = made(case)
    num_epochs = sum(map(bool, documents_of(case, 2)))  # 1 if all passes are used up in the first
    served = {
        (epoch, step): rows_of(part)
        for epoch in range(num_epochs)
        for step, part in enumerate(running)
    }
    places = sorted(served)
    left = iter(places)
    for epoch, first, rows in windows_of(case, num_epochs):
        found: Rows = []
        while len(found) < len(rows):
            at = next(left)
            assert found or at == (epoch, first)
            found += served[at]
        assert sorted(found) == sorted(rows)
    assert next(left, None) is None
    rng = np.random.default_rng(seed)
    for place in rng.integers(0, len(places), 3).tolist():
        check_position(case, running, served, *places[place])


def check_position(
    case: dict[str, Any],
    running: PackedBatchSampler,
    served: dict[tuple[int, int], Rows],
    epoch: int,
    step: int,
) -> None:
    """Two ranks resumed there, a jump there, and what is known of other steps."""
    state = json.loads(json.dumps(running.state_at(epoch, step)))
    ranks, jumped = [made(case, 2, rank) for rank in (0, 1)], made(case)
    for sampler in ranks:
        sampler.load_state_dict(state)
    rows = [row for sampler in ranks for row in rows_of(next(iter(sampler)))]
    assert sorted(rows) == sorted(served[epoch, step])
    jumped.set_epoch(epoch, step=step)
    assert (
        jumped.state_dict() == state == resealed(ranks[0].state_at(epoch, step), layout={"dp": 1})
    )
    assert rows_of(next(iter(jumped))) == served[epoch, step]
    documents = {at: {i for row in of for i, _ in row} for at, of in served.items()}
    for at in {(0, 0), (epoch, 0), (epoch, step)} & served.keys():
        assert set(ranks[1].examples(*at).tolist()) == documents[at]
    document = min(documents[epoch, step])
    having = [at for at in sorted(served) if at[0] == epoch and document in documents[at]]
    assert made(case).when(document, epoch) == having


@pytest.mark.parametrize("tail", ["keep", "wrap"])
def test_a_jump_finds_the_epochs_before(tail: str) -> None:
    case = {**drawn(0), "passes": None, "by": "examples", "stop": "all_exhausted", "tail": tail}
    case["schedule"] = [(0, [8, 1, 1]), (10, [1, 8, 1]), (25, [1, 1, 8])]
    mixture = Mixture(case["sources"], schedule=case["schedule"], stop="all_exhausted")
    for make in (
        lambda: made(case),
        lambda: PrefetchingSampler(mixture, batch_size=5, tail=tail),
    ):
        jumped, stepwise = make(), make()
        for epoch in range(3):
            stepwise.count_steps(epoch)
        assert jumped.examples(3, 1).tolist() == stepwise.examples(3, 1).tolist()
