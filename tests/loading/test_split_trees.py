"""Trees larger than a row, cut between their segments by samplers, rows, mixtures and streams."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.loading.seals import resealed
from tests.oracle import runs, trie
from torch_collate_kit import (
    DataError,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackedRows,
    ParallelLayout,
    PrefetchLoader,
    StateError,
    TokenizedDataset,
    unpack,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.testing import assert_exact_resume


def made_turns(count: int = 40) -> list[dict[str, Any]]:
    """Conversations of 1 to 6 turns, each with the turns before; all ids of one are its own."""
    rng, found = np.random.default_rng(3), []
    for i in range(count):
        history: list[int] = [1] * int(rng.integers(1, 6))
        segments, masks = [], []
        for _ in range(rng.integers(1, 7)):
            answer = [100 + i] * int(rng.integers(1, 5))
            segments.append([*history, int(rng.integers(2, 90)), *answer])
            masks.append([0] * (len(history) + 1) + [1] * len(answer))
            history += rng.integers(2, 90, rng.integers(0, 3)).tolist()
        found.append({"input_ids": segments, "loss_mask": masks, "weight": 1.0})
    return found


TURNS = made_turns()
EVERY = {100 + i: of["input_ids"] for i, of in enumerate(TURNS)}
NUM_TRAINED = sum(sum(map(sum, of["loss_mask"])) for of in TURNS)
MOST = 20  # cells; the longest path has fewer, and most trees have more
RUNS = {100 + i: runs(of["input_ids"], MOST) for i, of in enumerate(TURNS)}


def splitter(dp: int = 1, **options: Any) -> PackedCollator:
    given = {"max_tokens": MOST, "overflow": "split", "normalize_loss": False, **options}
    return PackedCollator(0, parallel=ParallelLayout(dp=dp), share_prefixes=True, **given)


def read_runs(batches: Iterable[Any]) -> dict[int, list[list[int]]]:
    """The segments of every conversation; checked to be in rows run by run, in trees of these."""
    found: dict[int, dict[int, list[int]]] = {}
    for batch in batches:
        placed = unpack_rows(batch)
        for row, of_row in enumerate(placed):
            expected = []
            for key, numbers in of_row:
                run = (numbers[0], numbers[-1] + 1)
                assert run in RUNS[key]
                expected.append(trie(EVERY[key][slice(*run)])[-1])
                own = found.setdefault(key, {})
                assert not own.keys() & set(numbers), "placed twice"
                own |= {number: EVERY[key][number] for number in numbers}
            assert sum(expected) == int(batch["attention_mask"][row].sum()) <= MOST
    return {key: [own[k] for k in sorted(own)] for key, own in found.items()}


def unpack_rows(batch: Batch) -> list[list[tuple[int, list[int]]]]:
    """The runs of every row: the conversation, which its own ids tell, and the segments."""
    rows = []
    for row in range(len(batch)):
        part = batch[row : row + 1]
        ids = [of.tolist() for of in unpack(part["input_ids"], part) if len(of)]
        order = np.lexsort(
            [part.row_metadata[k][0] for k in ("segment_numbers", "example_indices")]
        )
        numbers = part.row_metadata["segment_numbers"][0]
        of_row: list[tuple[int, list[int]]] = []
        for of, number in zip(ids, numbers[order].tolist(), strict=True):
            key = of[-1]
            assert of == EVERY[key][number]
            begins = any(number == first for first, _ in RUNS[key])
            if begins:
                of_row.append((key, []))
            assert of_row[-1][0] == key, "the segments of a run are apart"
            of_row[-1][1].append(number)
        rows.append(of_row)
    return rows


def read_many(parts: Iterable[Iterable[Any]]) -> dict[int, list[list[int]]]:
    return read_runs(batch for part in parts for batch in part)


@pytest.mark.parametrize("number", [{"batch_size": 40}, {"batch_size": 3}, {"batch_rows": 4}])
@pytest.mark.parametrize("kind", ["dataset", "mixture"])
def test_samplers_cut_trees_on_every_rank(number: dict[str, int], kind: str) -> None:
    parts = [TokenizedDataset(TURNS[:15]), TokenizedDataset(TURNS[15:])]
    data: Any = Mixture(parts) if kind == "mixture" else TokenizedDataset(TURNS)
    for dp in (1, 4):
        found, num_loss_tokens = [], []
        for rank in range(dp):
            collate = splitter(dp, normalize_loss=True)
            sampler = PackedBatchSampler(data, collate, dp_rank=rank, window=3, **number)
            batches = [*DataLoader(data, batch_sampler=sampler, collate_fn=collate)]
            found.append(batches)
            num_loss_tokens.append([of.metadata["num_loss_tokens"] for of in batches])
            assert any(of.metadata["cut"] for of in batches)
        read = read_many(found)
        own = sum(int(batch["labels"].ne(-100).sum()) for of_rank in found for batch in of_rank)
        if kind == "dataset" or "batch_size" in number:
            assert (read, own) == (EVERY, NUM_TRAINED)
        else:  # counted in runs, one source is exhausted before the other
            assert read.keys() <= EVERY.keys()
        assert all(of == num_loss_tokens[0] for of in num_loss_tokens)
        assert sum(num_loss_tokens[0]) == own  # each rank knows those of all


def test_rows_of_cut_trees() -> None:
    dataset, collate = TokenizedDataset(TURNS), splitter()
    rows = PackedRows(dataset, collate)
    assert read_runs(collate([rows[i]]) for i in range(len(rows))) == EVERY
    pairs = (collate([rows[i], rows[i + 1]]) for i in range(0, len(rows) - 1, 2))
    last = [collate([rows[len(rows) - 1]])] if len(rows) % 2 else []
    assert read_runs([*pairs, *last]) == EVERY
    assert rows.fingerprint() != PackedRows(dataset, splitter(max_tokens=400)).fingerprint()


@pytest.mark.parametrize("number", [{"batch_size": 8}, {"batch_rows": 4, "window": 2}])
def test_resumes_of_cut_trees_are_exact(number: dict[str, int]) -> None:
    dataset = TokenizedDataset(TURNS[:24])

    def make(dp_rank: int = 0, dp_size: int = 1) -> Any:
        collate = splitter(dp_size)
        sampler = PackedBatchSampler(dataset, collate, dp_rank=dp_rank, **number)
        return PrefetchLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))

    assert_exact_resume(make, num_steps=3, stops=[0, 1, 2], dp_sizes=[2, 1, 4])
    sampler = PackedBatchSampler(dataset, splitter(), **number)
    steps: dict[int, set[int]] = {}
    for step, part in enumerate(sampler):
        assert {*sampler.examples(0, step).tolist()} == {*part.indices}
        for example in part.indices:
            steps.setdefault(example, set()).add(step)
    assert sorted(steps) == [*range(24)]
    for example, found in steps.items():
        assert sampler.when(example, 0) == [(0, step) for step in sorted(found)]


def test_a_state_by_rows_knows_the_runs() -> None:
    state = PackedBatchSampler(TokenizedDataset(TURNS), splitter(), batch_rows=4).state_at(0, 1)
    PackedBatchSampler(TokenizedDataset(TURNS), splitter(), batch_rows=4).load_state_dict(state)
    with pytest.raises(StateError, match="runs_digest"):
        PackedBatchSampler(TokenizedDataset(TURNS), splitter(), batch_rows=4).load_state_dict(
            resealed(state, runs_digest="0" * 16)
        )
    other = PackedBatchSampler(TokenizedDataset(TURNS), splitter(overflow="drop"), batch_rows=4)
    with pytest.raises(StateError, match=r"overflow='split'.*overflow='drop'"):
        other.load_state_dict(state)


@pytest.mark.parametrize("form", ["examples", pytest.param("columns", marks=pytest.mark.release)])
def test_streams_cut_trees_and_resume_within_one(form: str) -> None:
    source: Any = TURNS if form == "examples" else TokenizedDataset(TURNS)
    for dp, every in ((1, 1), (2, 3)):
        found = []
        for rank in range(dp):

            def stream(rank: int = rank, dp: int = dp) -> PackedIterableDataset:
                return PackedIterableDataset(
                    source, splitter(dp), batch_rows=2 * dp, buffer_size=5, dp_rank=rank
                )

            batches = [*stream()]
            found.append(batches)
            ids = [of["input_ids"].tolist() for of in batches]
            for taken in range(0, len(batches), every):
                begun = stream()
                first = [*islice(iter(begun), taken)]
                resumed = stream()
                resumed.load_state_dict(begun.state_dict())
                assert [of["input_ids"].tolist() for of in [*first, *resumed]] == ids
        assert read_many(found) == EVERY


def test_a_long_path_is_left_out_of_a_stream_alone() -> None:
    long = {"input_ids": [[1, 2], [1, *[139] * 30]], "loss_mask": [[0, 1], [0, *[1] * 30]]}
    rows = [*TURNS[:10], {**long, "weight": 1.0}, *TURNS[10:]]
    for source in (rows, TokenizedDataset(rows)):
        stream = PackedIterableDataset(source, splitter(), on_error="skip")
        batches = [*stream]
        assert read_runs(batches) == EVERY
        assert [i for of in batches for i in of.metadata.get("skipped", ())] == [10]


def test_tokens_that_changed_since_they_were_planned_are_named() -> None:
    dataset, collate = TokenizedDataset(TURNS), splitter()
    cut = next(i for i, of in enumerate(RUNS.values()) if len(of) > 1)
    part = next(iter(PackedBatchSampler(dataset, collate, batch_size=40, shuffle=False)))
    moved = [[*of] for of in TURNS[cut]["input_ids"]]
    last = RUNS[100 + cut][0][1]
    moved[last - 1].append(moved[last].pop())  # over the end of the first run
    strangers = [[90 - k, *of[1:]] for k, of in enumerate(TURNS[cut]["input_ids"])]
    for changed, message in (
        (moved, f"example {cut} of the dataset has no segments from token"),
        (strangers, f"example {cut} of the dataset is a list of "),
    ):
        rows = [dict(of) for of in TURNS]
        rows[cut]["input_ids"] = changed
        rows[cut]["loss_mask"] = [[0] * (len(of) - 1) + [1] for of in changed]
        with pytest.raises(DataError, match=f"^{re.escape(message)}"):
            collate(part.with_examples(rows))
