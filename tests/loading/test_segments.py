"""Examples of several segments through datasets, samplers, rows, mixtures, streams and resumes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from torch_collate_kit import (
    DataError,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackedRows,
    PaddedCollator,
    ParallelLayout,
    PerToken,
    PrefetchLoader,
    StateError,
    TokenizedDataset,
    unpack,
)
from torch_collate_kit.batch import Batch

Pair = dict[str, Any]


def made_pairs(count: int = 60) -> list[Pair]:
    """Pairs of 1 to 3 segments; all ids of example i are 100 + i but for a prompt."""
    rng, pairs = np.random.default_rng(0), []
    for i in range(count):
        prompt = rng.integers(1, 99, rng.integers(1, 8)).tolist()
        segments = [prompt + [100 + i] * int(rng.integers(1, 6)) for _ in range(1 + i % 3)]
        masks = [[0] * len(prompt) + [1] * (len(of) - len(prompt)) for of in segments]
        pairs.append({"input_ids": segments, "loss_mask": masks, "weight": 1.0})
    return pairs


PAIRS = made_pairs()
WHOLE = {100 + i: pair["input_ids"] for i, pair in enumerate(PAIRS)}
COLUMNS = {key: [pair[key] for pair in PAIRS] for key in PAIRS[0]}
SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: PAIRS,
    "columns": lambda: COLUMNS,
    "datasets": lambda: datasets.Dataset.from_list(PAIRS),
    "mapped rows": lambda: datasets.Dataset.from_list(PAIRS[::-1]).select(range(59, -1, -1)),
    "a slice of a table": lambda: pa.Table.from_pylist([*PAIRS[:3], *PAIRS]).slice(3),
    "chunks": lambda: pa.concat_tables([pa.Table.from_pylist(p) for p in (PAIRS[:7], PAIRS[7:])]),
}  # fmt: skip


def read(batches: Iterable[Batch]) -> dict[int, list[list[int]]]:
    """The segments of every example, by its last token; checked to be neighbours in one row."""
    found: dict[int, list[list[int]]] = {}
    for batch in batches:
        numbers = [of.tolist() for of in batch.row_metadata["segment_numbers"]]
        examples = [of.tolist() for of in batch.row_metadata["example_indices"]]
        for row, of_row in enumerate(numbers):
            for place, number in enumerate(of_row):
                before = (examples[row][place - 1], of_row[place - 1]) if place else None
                assert number == 0 or before == (examples[row][place], number - 1)
        for ids in unpack(batch["input_ids"], batch):
            if len(ids):
                found.setdefault(int(ids[-1]), []).append(ids.tolist())
    return found


def joined(parts: Iterable[dict[int, list[list[int]]]]) -> dict[int, list[list[int]]]:
    whole: dict[int, list[list[int]]] = {}
    for part in parts:
        for key, segments in part.items():
            whole.setdefault(key, []).extend(segments)
    return whole


def collator(dp: int = 1, **options: Any) -> PackedCollator:
    return PackedCollator(
        0, max_tokens=64, parallel=ParallelLayout(dp=dp, tp=2), normalize_loss=False, **options
    )


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_dataset_reads_them_from_every_form(source: Callable[[], Any]) -> None:
    dataset = TokenizedDataset(source())
    assert dataset.lengths.tolist() == [[len(of) for of in pair["input_ids"]] for pair in PAIRS]
    assert dataset.num_loss_tokens.tolist() == [
        sum(sum(mask[1:]) for mask in pair["loss_mask"]) for pair in PAIRS
    ]
    assert [of.tolist() for of in dataset[7]["input_ids"]] == PAIRS[7]["input_ids"]
    assert dataset[3:5]["input_ids"].tolist() == COLUMNS["input_ids"][3:5]
    assert dataset.fingerprint() == TokenizedDataset(PAIRS).fingerprint()
    other = [*PAIRS[:-1], {**PAIRS[-1], "input_ids": [[1], *PAIRS[-1]["input_ids"][1:]]}]
    assert TokenizedDataset(other).fingerprint() != dataset.fingerprint()
    assert read([collator()(source())]) == WHOLE


@pytest.mark.parametrize("source", [*SOURCES.values()][:3], ids=[*SOURCES][:3])
def test_vectors_per_token_are_one_level_deeper(source: Callable[[], Any]) -> None:
    fields = {"teacher": PerToken(torch.int64, shape=(2,))}
    rows = [
        {
            "input_ids": pair["input_ids"],
            "loss_mask": pair["loss_mask"],
            "teacher": [[[token, token + 1] for token in of] for of in pair["input_ids"]],
        }
        for pair in PAIRS
    ]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    form: Any = {list: rows, dict: columns}.get(type(source()), datasets.Dataset.from_list(rows))
    dataset = TokenizedDataset(form, columns=[*rows[0]])
    read_alone = [dataset[i] for i in range(len(dataset))]
    for collate in (
        PackedCollator(0, max_tokens=64, fields=fields),
        PaddedCollator(0, fields=fields),
    ):
        for given in (form, dataset[: len(dataset)], read_alone):
            batch = collate(given)
            is_token = batch["attention_mask"] == 1
            expected = torch.stack([batch["input_ids"], batch["input_ids"] + 1], dim=-1)
            assert torch.equal(batch["teacher"][is_token], expected[is_token])


@pytest.mark.parametrize("number", [{"batch_size": 16}, {"batch_rows": 4, "window": 3}])
@pytest.mark.parametrize("kind", ["dataset", "mixture", "lengths"])
def test_samplers_keep_them_in_one_row_on_every_rank(number: dict[str, int], kind: str) -> None:
    parts = [TokenizedDataset(PAIRS[:20]), TokenizedDataset(PAIRS[20:])]
    dataset: Any = Mixture(parts) if kind == "mixture" else TokenizedDataset(PAIRS)
    for dp in (1, 2, 4):
        collate, found = collator(dp), []
        for rank in range(dp):
            examples = dataset.lengths if kind == "lengths" else dataset
            sampler = PackedBatchSampler(examples, collate, dp_rank=rank, **number)
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
            found.append(read(loader))
        assert joined(found) == WHOLE


def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    dataset, found = TokenizedDataset(PAIRS), []
    state = None
    for dp, steps in ((4, 2), (1, 1), (2, 100)):
        for rank in range(dp):
            collate = collator(dp)
            sampler = PackedBatchSampler(dataset, collate, batch_rows=4, window=3, dp_rank=rank)
            if state is not None:
                sampler.load_state_dict(state)
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
            with PrefetchLoader(loader) as batches:
                found.append(read(islice(batches, steps)))
                after = batches.state_dict()["sampler"] if dp < 2 or rank == dp - 1 else None
        state = after
    assert joined(found) == WHOLE


def test_rows_of_a_dataset() -> None:
    dataset, collate = TokenizedDataset(PAIRS), collator()
    rows = PackedRows(dataset, collate)
    assert joined(read([collate([rows[i]])]) for i in range(len(rows))) == WHOLE
    twice = collate([rows[0], rows[1], rows[0]])
    assert len(twice.row_metadata["segment_numbers"]) == 3


STREAMS: dict[str, Callable[[], Any]] = {
    **{name: SOURCES[name] for name in ("list", "datasets")},
    "dataset": lambda: TokenizedDataset(PAIRS),
    "callable": lambda: lambda: iter(PAIRS),
    "mixture": lambda: Mixture([PAIRS[:20], PAIRS[20:]], weights=[1, 2]),
}


@pytest.mark.parametrize("source", STREAMS.values(), ids=STREAMS)
def test_streams_and_their_resumes(source: Callable[[], Any]) -> None:
    for dp in (1, 2):
        found = []
        for rank in range(dp):

            def stream(rank: int = rank, dp: int = dp) -> PackedIterableDataset:
                return PackedIterableDataset(
                    source(), collator(dp), batch_rows=2 * dp, buffer_size=16, dp_rank=rank
                )

            batches: list[Any] = [*stream()]
            found.append(read(batches))
            begun = stream()
            first = [*islice(iter(begun), 2)]
            resumed = stream()
            resumed.load_state_dict(begun.state_dict())
            rest = [*first, *resumed]
            assert [of["input_ids"].tolist() for of in rest] == [
                of["input_ids"].tolist() for of in batches
            ]
        whole = joined(found)
        assert whole.keys() == WHOLE.keys()
        assert all(segments[: len(WHOLE[key])] == WHOLE[key] for key, segments in whole.items())


def arrow(*rows: Any) -> pa.Table:
    return pa.table({"input_ids": pa.array(rows, pa.list_(pa.list_(pa.int64())))})


def test_rows_with_a_null_that_are_not_selected_do_no_harm() -> None:
    rows = arrow([[5, 6], None], [[7, 8], [9]], None)
    dataset = TokenizedDataset(datasets.Dataset(rows).select([1, 1]))
    assert dataset.lengths.tolist() == [[2, 1], [2, 1]]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("number", [{"batch_size": 2}, {"batch_rows": 1}])
def test_a_state_is_of_the_segments_not_of_their_sums(tp: int, number: dict[str, int]) -> None:
    """Costs, which decide where rows go, are those of the segments."""
    collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(tp=tp), normalize_loss=False)
    lengths = [[3, 6], [2, 7], [4, 5]]
    state = PackedBatchSampler(lengths, collate, **number).state_dict()
    for others in ([[6, 3], *lengths[1:]], [[2, 7], *lengths[1:]], [[9], *lengths[1:]]):
        with pytest.raises(StateError, match="segments"):
            PackedBatchSampler(others, collate, **number).load_state_dict(state)


FLAT = {"input_ids": [1, 2], "loss_mask": [0, 1], "weight": 1.0}
NULL = "input_ids is null or holds a null; drop the row, or fill it in before training"
ONE = "of one where it has one segment"
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a stream of both": (
        lambda: [*PackedIterableDataset([*PAIRS[:3], FLAT], collator())],
        DataError,
        f"example 0 of the stream is a list of segments, and example 3 is not; give every example "
        f"a list, {ONE}",
    ),
    "a mixture of both": (
        lambda: PackedBatchSampler(
            Mixture([TokenizedDataset(PAIRS), TokenizedDataset([FLAT])]), collator(), batch_size=2
        ),
        ValueError,
        "examples of source '0' are lists of segments, those of source '1' are not; give every ex",
    ),
    "truncated": (
        lambda: PackedBatchSampler(
            TokenizedDataset(PAIRS), collator(overflow="truncate"), batch_size=2
        ),
        ValueError,
        "overflow='truncate' cuts examples, and these have several segments, which stay together",
    ),
    "too long": (
        lambda: PackedBatchSampler([[3, 4], [50, 20, 9]], collator(), batch_size=2),
        DataError,
        "example 1 has 3 segments of 79 tokens in all, 80 cells with align=2, more than the 64",
    ),
    "too long in a stream": (
        lambda: [*PackedIterableDataset([{"input_ids": [[5] * 40, [6] * 40]}], collator())],
        DataError,
        "example 0 of the stream has 2 segments of 80 tokens in all, 80 cells with align=2",
    ),
    "an empty segment": (
        lambda: [*PackedIterableDataset([{"input_ids": [[5, 6], []]}], collator())],
        DataError,
        "example 0 of the stream, segment 1 is empty (input_ids has 0 tokens); filter it out",
    ),
    "a segment that is a number": (
        lambda: [*PackedIterableDataset([{"input_ids": [[5, 6], 7]}], collator())],
        DataError,
        "example 0 of the stream, segment 1: input_ids is int; give a list, a 1-D ndarray or a 1-D",
    ),
    "images": (
        lambda: TokenizedDataset([{**PAIRS[1], "pixel_values": [np.ones((4, 3)), None]}]),
        DataError,
        "the source has pixel_values and examples of several segments, whose images columns do not",
    ),
    "other loss tokens": (
        lambda: PackedBatchSampler([[3, 4]], collator(), batch_size=1, num_loss_tokens=[6]),
        DataError,
        "example 0 has num_loss_tokens=6 of 7 tokens; at most all but the first (of each segment)",
    ),
    "planned without segments": (
        lambda: [
            *DataLoader(
                TokenizedDataset(PAIRS[:4]),
                batch_sampler=PackedBatchSampler(
                    [sum(map(len, pair["input_ids"])) for pair in PAIRS[:4]],
                    collator(),
                    batch_size=4,
                    shuffle=False,
                ),
                collate_fn=collator(),
            )
        ],
        DataError,
        "example 0 of the dataset is a list of segments, the plan was made for one segment; pass",
    ),
    "a null": (
        lambda: TokenizedDataset(arrow([[5, 6]], None))[1], DataError, f"row 1: {NULL}"
    ),
    "a null among lengths": (
        lambda: TokenizedDataset(arrow([[5, 6]], None)).lengths, DataError, f"row 1: {NULL}"
    ),
    "a null segment": (
        lambda: TokenizedDataset(arrow([[5, 6], [5]], [[1], None])).lengths,
        DataError,
        f"row 1: {NULL}",
    ),
    "a null segment of a stream": (
        lambda: [
            *PackedIterableDataset(TokenizedDataset(arrow([[5, 6], [5]], [[1], None])), collator())
        ],
        DataError,
        f"example 1 of the stream: {NULL}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()


def test_loss_weights_are_those_of_the_whole_step() -> None:
    dataset, total = TokenizedDataset(PAIRS), torch.zeros(())
    for rank in range(2):
        collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp=2))
        sampler = PackedBatchSampler(dataset, collate, batch_size=60, dp_rank=rank)
        for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=collate):
            total = total + batch["loss_mask"].sum()
    assert float(total) == pytest.approx(1.0, abs=1e-6)
