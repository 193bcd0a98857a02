"""Documents joined end to end and cut: collator, samplers and rows against a plain loop."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedRows,
    TokenizedDataset,
    pack,
)
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.packing import PackingOptions, ParallelLayout

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, 90, 300)
DOCUMENTS = [{"input_ids": [*RNG.integers(2, 999, n - 1).tolist(), 1]} for n in LENGTHS]
DATA = TokenizedDataset(DOCUMENTS)


def rows_by_loop(documents: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """The documents of each row, cut where it is full."""
    rows: list[list[list[int]]] = [[]]
    left = max_tokens
    for document in documents:
        while document:
            if not left:
                rows.append([])
                left = max_tokens
            rows[-1].append(document[:left])
            document = document[left:]
            left -= len(rows[-1][-1])
    return rows


def options(**more: Any) -> PackingOptions:
    return PackingOptions(**{"max_tokens": 64, "strategy": "wrapped", **more})


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 500, 99_999])
def test_a_plan_is_that_of_the_loop(max_tokens: int) -> None:
    plan = pack(LENGTHS, max_tokens, strategy="wrapped")
    ids = [list(range(n)) for n in LENGTHS]
    expected = rows_by_loop(ids, max_tokens)
    assert plan.num_rows == len(expected)
    found = [
        [
            [*range(start, start + n)]
            for start, n in zip(plan.starts[a:b], plan.lengths[a:b], strict=True)
        ]
        for a, b in zip(plan.row_offsets, plan.row_offsets[1:], strict=False)
    ]
    assert found == expected
    assert len(plan.cut) == sum(len(row) for row in expected) - 300 or max_tokens < 90
    ranks = pack(LENGTHS, max_tokens, strategy="wrapped", parallel=ParallelLayout(dp=4))
    assert ranks.num_rows == -(-len(expected) // 4) * 4
    assert sorted(ranks.row_tokens)[-len(expected) :] == sorted(plan.row_tokens)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_batch_is_that_of_the_loop(isolate: bool) -> None:
    documents = [document["input_ids"] for document in DOCUMENTS[:9]]
    batch = PackedCollator(TOKENIZER, max_tokens=32, strategy="wrapped", isolate=isolate)(
        DOCUMENTS[:9]
    )
    rows = rows_by_loop(documents, 32)
    assert len(batch) == len(rows)
    for row, pieces in enumerate(rows):
        joined = [token for piece in pieces for token in piece]
        parts = pieces if isolate else [joined]
        assert batch["input_ids"][row].tolist()[: len(joined)] == joined
        labels = [label for part in parts for label in [-100, *part[1:]]]
        assert batch["labels"][row].tolist()[: len(joined)] == labels
        positions = [i for part in parts for i in range(len(part))]
        assert batch["position_ids"][row].tolist()[: len(joined)] == positions
        assert batch["sub_seq_lengths"].tolist()[row] == [len(part) for part in parts]
    trained = sum(sum(map(len, row)) - (len(row) if isolate else 1) for row in rows)
    assert batch.metadata["num_loss_tokens"] == trained
    assert float(batch["loss_mask"].sum()) == pytest.approx(1)


def part_of_rank(dp: int, rank: int, **more: Any) -> tuple[PackedCollator, PackedBatchSampler]:
    isolate = more.pop("isolate", True)
    collate = PackedCollator(
        TOKENIZER, packing=options(isolate=isolate, parallel=ParallelLayout(dp=dp))
    )
    given = {"batch_rows": 12, "window": 3, "seed": 2, **more}
    return collate, PackedBatchSampler(DATA, collate, dp_rank=rank, **given)


def batches_of(dp: int, rank: int, state: Any = None, **more: Any) -> list[Any]:
    collate, sampler = part_of_rank(dp, rank, **more)
    if state is not None:
        sampler.load_state_dict(state)
    return [collate(DATA.__getitems__(part)) for _ in range(2 - sampler.epoch) for part in sampler]


@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("shuffle", [True, "keyed", False])
@pytest.mark.parametrize("isolate", [True, False])
def test_steps_have_every_token_once_and_go_on_anywhere(
    tail: str, shuffle: bool | str, isolate: bool
) -> None:
    more = {"tail": tail, "shuffle": shuffle, "isolate": isolate}
    _, sampler = part_of_rank(1, 0, **more)
    whole = batches_of(1, 0, **more)
    per_step = 12 * 64
    total = 2 * int(LENGTHS.sum())
    num_tokens = [int((batch["input_ids"] > 0).sum()) for batch in whole]
    full = {"keep": total, "drop": total // 2 // per_step * per_step * 2, "wrap": None}[tail]
    assert sum(num_tokens) == (full or total // per_step * per_step)
    assert tail == "keep" or set(num_tokens) == {per_step}
    num_first = len(sampler)
    state = json.loads(json.dumps(sampler.state_at(0, 4)))
    parts = [batches_of(3, rank, state, **more) for rank in range(3)]
    for expected, ranks in zip(whole[4:], zip(*parts, strict=True), strict=True):
        rows = sorted(row for batch in ranks for row in batch["input_ids"].tolist())
        assert rows == sorted(expected["input_ids"].tolist())
        assert len({batch.metadata["num_loss_tokens"] for batch in ranks}) == 1
        assert sum(float(batch["loss_mask"].sum()) for batch in ranks) == pytest.approx(1, abs=1e-4)
    for example in (3, 77, 299):
        steps = [k for k in range(num_first) if example in sampler.examples(0, k)]
        assert sampler.when(example, 0) == [(0, step) for step in steps]


def test_rows_for_trainers_are_full() -> None:
    collate = PackedCollator(TOKENIZER, max_tokens=64, strategy="wrapped")
    rows = PackedRows(DATA, collate)
    assert len(rows) == -(-int(LENGTHS.sum()) // 64)
    assert collate(list(rows)[:-1]).num_tokens == 64 * (len(rows) - 1)


def test_a_reshuffle_goes_on_from_its_state() -> None:
    (_, sampler), (_, resumed) = part_of_rank(1, 0), part_of_rank(1, 0)
    sampler.set_epoch(0, step=4)
    sampler.reshuffle()
    state = json.loads(json.dumps(sampler.state_at(0, 7)))
    resumed.load_state_dict(state)
    found = [sampler.examples(0, step).tolist() for step in (0, 7, 12)]
    assert [resumed.examples(0, step).tolist() for step in (0, 7, 12)] == found


def test_a_state_of_other_rows_is_refused() -> None:
    _, sampler = part_of_rank(1, 0)
    _, other = part_of_rank(1, 0, isolate=False)
    with pytest.raises(StateError, match="isolate=False, this sampler has isolate=True"):
        sampler.load_state_dict(other.state_at(0, 4))


def test_an_epoch_without_a_step_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="epoch 0 fills fewer than batch_rows=600 rows, and tail='"
    ):
        part_of_rank(1, 0, batch_rows=600, tail="drop")
    assert len(part_of_rank(1, 0, batch_rows=600)[1]) == 1


NO_ROOM: list[tuple[dict[str, Any], str]] = [
    (
        {"parallel": ParallelLayout(tp=2)},
        'strategy="wrapped" leaves no gaps, and align=2 needs one',
    ),
    ({"overflow": "split"}, "overflow='split' has no meaning with strategy=\"wrapped\""),
    ({"max_sequences_per_row": 3}, "max_sequences_per_row=3 has no meaning with strategy="),
    ({"strategy": None, "isolate": False}, "isolate=False joins documents that are cut anywhere"),
]


@pytest.mark.parametrize(("given", "message"), NO_ROOM)
def test_options_that_contradict_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        options(**given)


def test_a_step_of_thousands_of_epochs() -> None:
    collate = PackedCollator(TOKENIZER, max_tokens=8, strategy="wrapped", normalize_loss=False)
    sampler = PackedBatchSampler(np.array([2]), collate, batch_rows=2000, window=1, tail="wrap")
    assert sampler.examples(7999, 0).tolist() == [0] * 8000
    assert sampler.when(0, 7999) == [(7999, 0)]


def test_documents_without_an_end() -> None:
    with pytest.raises(ValueError, match=r"int has eos_token_id=None; pass a tokenizer, no pad id"):
        PackedCollator(0, max_tokens=8, strategy="wrapped")
    collate = PackedCollator(TOKENIZER, max_tokens=8, strategy="wrapped")
    with pytest.raises(
        DataError, match=r"example 1 ends with token 6, not with the end token 1 of"
    ):
        collate([{"input_ids": [5, 1]}, {"input_ids": [5, 6]}])
    examples = [{"input_ids": [5, 6, 1], "loss_mask": [1, 0], "num_actions": 2}]
    joining = PackedCollator(TOKENIZER, max_tokens=8, strategy="wrapped", isolate=False)
    with pytest.raises(
        DataError, match="the examples have num_actions, which is of a whole example"
    ):
        joining(examples)
    masked = TokenizedDataset([{"input_ids": [5, 6, 1], "loss_mask": [0, 0, 1]}] * 9)
    two = PackedCollator(TOKENIZER, packing=options(max_tokens=4, parallel=ParallelLayout(dp=2)))
    with pytest.raises(ValueError, match=r"not all tokens of example 0 are trained, and it is not"):
        PackedBatchSampler(masked, two, batch_rows=2)
