"""Examples that share prefixes, through datasets, samplers, rows, mixtures, streams and resumes."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.loading.seals import resealed
from tests.loading.test_segments import PAIRS, SOURCES, STREAMS, WHOLE, joined, read
from tests.oracle import trie
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
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.testing import assert_exact_resume

TRIES = [trie(pair["input_ids"]) for pair in PAIRS]
CELLS = [num_cells for *_, num_cells in TRIES]
STRANGERS = [
    {"input_ids": [[2 * i, 5], [2 * i + 1, 5]], "loss_mask": [[0, 1]] * 2} for i in range(9)
]
FIRST = next(i for i, num_cells in enumerate(CELLS) if num_cells > 8)
FACTOR = f"{sum(sum(map(len, pair['input_ids'])) for pair in PAIRS) / sum(CELLS):.2f}"


def collator(dp: int = 1, **options: Any) -> PackedCollator:
    options = {"share_prefixes": True, "max_tokens": 48, "normalize_loss": False, **options}
    return PackedCollator(0, parallel=ParallelLayout(dp=dp, tp=options.pop("tp", 2)), **options)


def assert_in_trees(batches: Iterable[Any], align: int = 2, most: int = 48) -> list[Batch]:
    """Every row has the cells of its trees and no others, each aligned as a whole."""
    batches = list(batches)
    for batch in batches:
        for ids, is_real in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            own = [100 + i for i in range(len(PAIRS)) if (ids == 100 + i).any()]
            assert int(is_real.sum()) == sum(CELLS[i - 100] for i in own)
            aligned = sum(-(-CELLS[i - 100] // align) * align for i in own)
            assert aligned <= len(ids) <= most
    return batches


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_dataset_knows_what_segments_share(
    source: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [depths for _, depths, *_ in TRIES]
    for tokens in (2**22, 40, 1):  # at a time; the last is one row
        monkeypatch.setattr("torch_collate_kit.loading.dataset.tokenized._TOKENS_AT_A_TIME", tokens)
        dataset = TokenizedDataset(source())
        shared = dataset.shared_lengths
        assert shared is not None
        assert shared.tolist() == expected
        assert shared.values.dtype == np.int64
    again = dataset.shared_lengths
    assert again is not None
    assert again.values is shared.values, "computed twice"
    assert pickle.loads(pickle.dumps(dataset)).shared_lengths.tolist() == expected
    assert len(pickle.dumps(dataset)) == len(pickle.dumps(TokenizedDataset(source())))


def test_rows_without_segments_share_nothing() -> None:
    rows = [{"input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]} for i in range(8)]
    dataset = TokenizedDataset(rows)
    assert dataset.shared_lengths is None
    assert Mixture([dataset, dataset]).shared_lengths is None
    plain = {"share_prefixes": False}
    sources: list[Any] = [dataset, Mixture([dataset])]
    for data in sources:
        for options in ({"batch_size": 5}, {"batch_rows": 1, "window": 2}):
            ids = [
                [
                    batch["input_ids"].tolist()
                    for batch in DataLoader(
                        data,
                        batch_sampler=PackedBatchSampler(data, collate, **options),
                        collate_fn=collate,
                    )
                ]
                for collate in (collator(), collator(**plain))
            ]
            assert ids[0] == ids[1]
    streams = [[*PackedIterableDataset(rows, collator(**of))] for of in ({}, plain)]
    assert [of["input_ids"].tolist() for of in streams[0]] == [
        of["input_ids"].tolist() for of in streams[1]
    ]


@pytest.mark.parametrize("number", [{"batch_size": 16}, {"batch_size": 3}, {"batch_rows": 4}])
@pytest.mark.parametrize("kind", ["dataset", "mixture"])
@pytest.mark.parametrize("tp", [1, 8])
def test_samplers_plan_rows_of_trees_on_every_rank(
    number: dict[str, int], kind: str, tp: int
) -> None:
    parts = [TokenizedDataset(PAIRS[:20]), TokenizedDataset(PAIRS[20:])]
    data: Any = Mixture(parts) if kind == "mixture" else TokenizedDataset(PAIRS)
    for dp in (1, 4):
        collate, found = collator(dp, tp=tp), []
        for rank in range(dp):
            sampler = PackedBatchSampler(data, collate, dp_rank=rank, window=3, **number)
            loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
            found.append(read(assert_in_trees(loader, tp)))
        assert joined(found) == WHOLE


def test_the_last_window_has_no_more_steps_than_its_cells_need() -> None:
    pairs = [{"input_ids": [[*range(22), i], [*range(22), i, i]]} for i in range(100, 108)]
    sampler = PackedBatchSampler(TokenizedDataset(pairs), collator(), batch_rows=4, window=1)
    assert len(sampler) == 1  # two trees of 24 cells fill a row of 48; of 47 tokens it would be two


def test_rows_of_a_dataset() -> None:
    dataset, collate = TokenizedDataset(PAIRS), collator()
    rows = PackedRows(dataset, collate)
    batches = assert_in_trees(collate([rows[i]]) for i in range(len(rows)))
    assert joined(map(read, [[batch] for batch in batches])) == WHOLE
    plain = PackedRows(dataset, collator(share_prefixes=False))
    assert len(rows) < len(plain)
    assert rows.fingerprint() != plain.fingerprint()
    twice = collate([rows[0], rows[1], rows[0]])
    assert torch.equal(twice["input_ids"][0], twice["input_ids"][2])


@pytest.mark.parametrize(("pairs", "shares"), [(PAIRS, True), (STRANGERS, False)])
def test_auto_is_decided_once_for_all_examples(
    pairs: list[Any], shares: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_collate_kit.packing")
    dataset, like = TokenizedDataset(pairs), collator(share_prefixes=shares)
    collate = collator(share_prefixes="auto")

    def of_rows(of: PackedCollator) -> list[Batch]:
        rows = PackedRows(dataset, of)
        return [of([rows[i]]) for i in range(len(rows))]

    for make in (
        of_rows,
        lambda of: [
            *DataLoader(
                dataset,
                batch_sampler=PackedBatchSampler(dataset, of, batch_size=2),
                collate_fn=of,
            )
        ],
    ):
        caplog.clear()
        batches = make(collate)
        said = f"{FACTOR} tokens for each cell, at least" if shares else "1.00 tokens for each cell"
        assert len(caplog.messages) == 1
        assert said in caplog.messages[0]
        assert [of["input_ids"].tolist() for of in batches] == [
            of["input_ids"].tolist() for of in make(like)
        ]


def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    dataset, found = TokenizedDataset(PAIRS), []
    state: Any = None
    for dp, steps in ((4, 1), (1, 1), (2, 100)):
        for rank in range(dp):
            collate = collator(dp)
            sampler = PackedBatchSampler(dataset, collate, batch_rows=4, window=3, dp_rank=rank)
            if state is not None:
                sampler.load_state_dict(state)
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
            with PrefetchLoader(loader) as batches:
                found.append(read(assert_in_trees(islice(batches, steps))))
                after = batches.state_dict()["sampler"]
        state = after
    assert joined(found) == WHOLE


@pytest.mark.parametrize("number", [{"batch_size": 8}, {"batch_rows": 4, "window": 2}])
def test_resumes_are_exact_and_lineage_is_right(number: dict[str, int]) -> None:
    dataset = TokenizedDataset(PAIRS[:24])

    def make(dp_rank: int = 0, dp_size: int = 1) -> Any:
        collate = collator(dp_size)
        sampler = PackedBatchSampler(dataset, collate, dp_rank=dp_rank, **number)
        return PrefetchLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))

    assert_exact_resume(make, num_steps=5, stops=[0, 2, 3], dp_sizes=[2, 1, 4])
    sampler = PackedBatchSampler(dataset, collator(), **number)
    for step, part in enumerate(sampler):
        assert sorted(sampler.examples(0, step).tolist()) == sorted(part.indices)


def state_of(number: dict[str, int], data: Any = None, **options: Any) -> PackedBatchSampler:
    dataset = data or TokenizedDataset(PAIRS)
    return PackedBatchSampler(dataset, collator(**options), **number)


def test_states_know_whether_prefixes_are_shared(caplog: pytest.LogCaptureFixture) -> None:
    by_rows, by_examples = {"batch_rows": 4}, {"batch_size": 8}
    state = state_of(by_rows).state_at(0, 1)
    with pytest.raises(StateError, match=r"share_prefixes=True.*share_prefixes=False"):
        state_of(by_rows, share_prefixes=False).load_state_dict(state)
    swapped = [dict(pair) for pair in PAIRS]  # the same lengths and sampled rows, other trees
    last = [[*of] for of in PAIRS[58]["input_ids"]]
    last[1][0] = 99 - last[1][0]
    swapped[58]["input_ids"] = last
    with pytest.raises(StateError, match="trees_digest"):
        state_of(by_rows, TokenizedDataset(swapped)).load_state_dict(
            resealed(state, fingerprint=TokenizedDataset(swapped).fingerprint())
        )
    sampler = state_of(by_examples, share_prefixes=False)
    sampler.load_state_dict(state_of(by_examples, tp=4).state_at(0, 1))  # packed anew
    assert "share_prefixes True -> False" in caplog.text
    assert "other rows" in caplog.text


def test_the_last_row_is_full_of_cells_not_of_tokens() -> None:
    """32 tokens in the 20 cells of two rows: no second step is made of them."""
    ids = [[[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], [[1, 2, 3], [1, 2, 4]]]
    trees = [{"input_ids": of, "loss_mask": [[1] * len(of[0])] * 2} for of in ids * 2]
    collate, dataset = collator(max_tokens=10, tp=1), TokenizedDataset(trees)
    sampler = PackedBatchSampler(dataset, collate, batch_rows=2, window=1, tail="keep")
    [batch] = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    assert (batch.num_tokens, batch["input_ids"].shape) == (32, (2, 10))


def test_other_trees_than_were_planned_are_named() -> None:
    collate, dataset = collator(), TokenizedDataset(PAIRS)
    part = next(iter(PackedBatchSampler(dataset, collate, batch_size=len(PAIRS), shuffle=False)))
    changed = [dict(pair) for pair in PAIRS]
    ids = changed[FIRST]["input_ids"]
    changed[FIRST]["input_ids"] = [[90 - k, *segment[1:]] for k, segment in enumerate(ids)]
    message = f"example {FIRST} of the dataset is a list of {len(ids)} segments in "
    with pytest.raises(DataError, match=f"^{message}"):
        collate(part.with_examples(changed))


def test_what_sharing_drops_is_not_dropped_otherwise() -> None:
    options = {"max_tokens": 16, "overflow": "drop", "tp": 1}
    state = state_of({"batch_size": 8}, **options).state_at(0, 1)
    with pytest.raises(StateError, match="share_prefixes=True, this sampler has max_tokens=16"):
        state_of({"batch_size": 8}, **options, share_prefixes=False).load_state_dict(state)


@pytest.mark.parametrize("source", STREAMS.values(), ids=STREAMS)
def test_streams_and_their_resumes(source: Callable[[], Any]) -> None:
    for dp in (1, 2):
        found = []
        for rank in range(dp):

            def stream(rank: int = rank, dp: int = dp) -> PackedIterableDataset:
                return PackedIterableDataset(
                    source(), collator(dp), batch_rows=2 * dp, buffer_size=16, dp_rank=rank
                )

            batches: list[Any] = assert_in_trees(stream())
            found.append(read(batches))
            begun = stream()
            first = [*islice(iter(begun), 2)]
            resumed = stream()
            resumed.load_state_dict(begun.state_dict())
            assert [of["input_ids"].tolist() for of in [*first, *resumed]] == [
                of["input_ids"].tolist() for of in batches
            ]
        whole = joined(found)
        assert whole.keys() == WHOLE.keys()
        assert all(segments[: len(WHOLE[key])] == WHOLE[key] for key, segments in whole.items())


def over_plan(sampled: PackedCollator, collate: PackedCollator) -> list[Any]:
    dataset = TokenizedDataset(PAIRS)
    sampler = PackedBatchSampler(dataset, sampled, batch_size=4)
    return [*DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)]


BARE = "share_prefixes=True depends on the tokens of the segments, and lengths do not tell how many"
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "bare lengths": (
        lambda: PackedBatchSampler([[3, 4]], collator(), batch_size=2), ValueError, BARE,
    ),
    "a mixture of lengths": (
        lambda: PackedBatchSampler(Mixture([np.array([3, 4])]), collator(), batch_size=2),
        ValueError,
        BARE,
    ),
    "auto in a stream": (
        lambda: PackedIterableDataset(PAIRS, collator(share_prefixes="auto")),
        ValueError,
        'share_prefixes="auto" weighs all examples, which a stream does not know; pass True or',
    ),
    "a plan that shares, a collator that does not": (
        lambda: over_plan(collator(), collator(share_prefixes=False)),
        ValueError,
        "the batch was planned for {'max_tokens': 48, 'align': 2, 'rows_multiple_of': 1, "
        "'share_prefixes': True}, this collator has {",
    ),
    "a plan that does not, a collator that does": (
        lambda: over_plan(collator(share_prefixes=False), collator()),
        ValueError,
        "the batch was planned for {'max_tokens': 48, 'align': 2, 'rows_multiple_of': 1, "
        "'share_prefixes': False}, this collator has {",
    ),
    "too large": (
        lambda: PackedBatchSampler(
            TokenizedDataset(PAIRS), collator(max_tokens=8), batch_size=2
        ),
        DataError,
        f"example {FIRST} has {len(PAIRS[FIRST]['input_ids'])} segments of ",
    ),
    "too large in a stream": (
        lambda: [*PackedIterableDataset([{"input_ids": [[5] * 40, [6] * 40]}], collator())],
        DataError,
        "example 0 of the stream has 2 segments of 80 tokens in all, 80 cells with align=2",
    ),
    "no ids in a stream": (
        lambda: [*PackedIterableDataset([{"input_ids": [[5, 6], [1.5, 6]]}], collator())],
        DataError,
        "example 0 of the stream",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("number", [{"batch_size": 16}, {"batch_rows": 4, "window": 3}])
def test_wrong_examples_are_left_out_alone(number: dict[str, int]) -> None:
    wrong = [dict(pair) for pair in PAIRS]
    wrong[7]["loss_mask"] = [of[:-1] for of in wrong[7]["loss_mask"]]
    wrong[20]["input_ids"] = [[-5, *of[1:]] for of in wrong[20]["input_ids"]]
    left = {key: segments for key, segments in WHOLE.items() if key not in (107, 120)}
    dataset, found = TokenizedDataset(wrong), []
    for rank in range(2):
        collate = collator(2)
        sampler = PackedBatchSampler(dataset, collate, dp_rank=rank, **number)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        with PrefetchLoader(loader, on_error="skip") as batches:
            found.append(read(assert_in_trees(batches)))
    assert joined(found) == left
    for source in (wrong, dataset):
        stream = PackedIterableDataset(source, collator(), on_error="skip")
        assert read(assert_in_trees(stream)) == left
