"""Rows as a dataset: each piece once, joined without a new plan, in trainers as in a loop."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.building import packed_collator
from tests.ranks import FORKS
from torch_collate_kit import (
    Mixture,
    PackedCollator,
    PackedRows,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
    audit,
    packing_report,
)
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.packing import ParallelLayout

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 60, 4500)
DATA = TokenizedDataset([{"input_ids": [i % 97 + 1] * n} for i, n in enumerate(LENGTHS)])
SHORT = TokenizedDataset(
    [{"input_ids": [i + 1, *range(n)]} for i, n in enumerate((3, 9, 30, 4, 7))]
)


def pieces_of(rows: PackedRows) -> list[tuple[int, int, int]]:
    plan = rows.plan
    return list(zip(plan.example_indices, plan.starts, plan.lengths, strict=True))


def test_rows_hold_every_example_once_and_are_full() -> None:
    rows = PackedRows(DATA, packed_collator(0, max_tokens=256), seed=4)
    assert sorted(piece[0] for piece in pieces_of(rows)) == list(range(4500))
    assert rows.plan.row_tokens.max() <= 256
    assert LENGTHS.sum() / (len(rows) * 256) > 0.97
    again, other = (PackedRows(DATA, packed_collator(0, max_tokens=256), seed=s) for s in (4, 5))
    assert pieces_of(again) == pieces_of(rows) != pieces_of(other)


def test_a_batch_is_its_rows_one_after_the_other() -> None:
    collate = packed_collator(0, max_tokens=64)
    rows = PackedRows(DATA, collate)
    numbers = [7, 3, 200, 3]
    batch = collate([rows[number] for number in numbers])
    assert batch["input_ids"].shape == (4, batch["input_ids"].shape[1])
    for row, number in enumerate(numbers):
        alone = collate([rows[number]])
        width = alone["input_ids"].shape[1]
        assert batch["input_ids"][row, :width].equal(alone["input_ids"][0])
        assert not batch["input_ids"][row, width:].any()
    assert batch.num_tokens == sum(rows.plan.row_tokens[n] for n in numbers)
    loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)
    seen = sum(part.num_tokens for part in loader)
    assert seen == LENGTHS.sum()
    assert pickle.loads(pickle.dumps(rows))[3].joined is not None


@pytest.mark.parametrize("start", ["fork", FORKS], ids=["fork", "forkserver"])
def test_workers_collate_rows(start: Any) -> None:
    collate = packed_collator(0, max_tokens=64)
    rows = PackedRows(TokenizedDataset([DATA[i] for i in range(60)]), collate)
    options: dict[str, Any] = {"batch_size": 7, "collate_fn": collate}
    expected = [batch["input_ids"] for batch in DataLoader(rows, **options)]
    workers = {"num_workers": 1, "multiprocessing_context": start}
    for dataset in (rows, rows.to_datasets()):
        found = [batch["input_ids"] for batch in DataLoader(dataset, **options, **workers)]
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_a_row_says_its_examples() -> None:
    examples = [{"input_ids": [i + 1] * n} for i, n in enumerate(LENGTHS[:200])]
    collate = packed_collator(0, max_tokens=64)
    rows = PackedRows(TokenizedDataset(examples), collate)
    assert sorted(i for row in rows for i in row.examples) == list(range(200))
    for row in rows:
        ids = collate([row])["input_ids"][0].tolist()
        assert [token - 1 for token in dict.fromkeys(ids) if token] == row.examples
    assert repr(rows[2]).startswith("<row 2 of PackedRows(<TokenizedDataset of 200>, Packed")
    assert repr(rows[2]).endswith(f": {len(rows[2].examples)} pieces>")


def test_a_row_that_fails_is_left_out_and_logged() -> None:
    examples: list[dict[str, Any]] = [{"input_ids": [7] * n, "loss_mask": [1] * n} for n in LENGTHS]
    examples[140]["loss_mask"] = [1, 1, 1, 1] if LENGTHS[140] != 4 else [1]
    collate = packed_collator(0, max_tokens=64)
    rows = PackedRows(TokenizedDataset(examples), collate)
    (bad,) = (row.number for row in rows if 140 in row.examples)
    sampler = PrefetchingSampler(rows, batch_size=4)
    data = DataLoader(rows, batch_sampler=sampler, collate_fn=collate)
    with PrefetchLoader(data, on_error="skip") as loader:
        seen = sum(batch.num_tokens for batch in loader)
        (skipped,) = loader.skipped
    assert skipped.example == bad
    others = len(rows[bad].examples) - 1
    named = f"example 140 of the dataset (in row {bad} with {others} others): loss_mask"
    assert str(skipped.error).startswith(named)
    assert "a batch of" not in str(skipped.error)
    with pytest.raises(DataError, match=re.escape(named.partition(": ")[2])):
        collate([rows[0], rows[bad], rows[bad]])
    assert seen == LENGTHS.sum() - rows.plan.row_tokens[bad]


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_what_is_too_long(overflow: str, caplog: pytest.LogCaptureFixture) -> None:
    collate = packed_collator(0, max_tokens=12, overflow=overflow)
    rows = PackedRows(SHORT, collate)
    batch = collate(list(rows))
    tokens = {"split": 58, "truncate": 39, "drop": 27}[overflow]
    assert batch.num_tokens == tokens == rows.plan.lengths.sum()
    records = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    said = {
        "truncate": "PackedRows: 0 of 5 examples are dropped with 0 tokens, and 1 are cut by 19",
        "drop": "PackedRows: 1 of 5 examples are dropped with 31 tokens, and 0 are cut by 0",
    }
    assert records == ([] if overflow == "split" else [said[overflow]])


def test_a_mixture_and_a_datasets_dataset() -> None:
    mixture = Mixture([DATA, SHORT], weights=[1, 1], stop="all_exhausted", max_passes=[1, 8])
    collate = packed_collator(0, max_tokens=64)
    rows = PackedRows(mixture, collate)
    counts = np.bincount(mixture.source_of(rows.plan.example_indices))
    assert counts.tolist() == [4500, 40]
    table = rows.to_datasets()
    assert len(table) == len(rows)
    batch = collate([table[3], table[5]])
    assert batch["input_ids"].equal(collate([rows[3], rows[5]])["input_ids"])
    trainers = PackedRows(DATA, PackedCollator(0, max_tokens=64, train_all=True).for_trainer())
    inputs: Any = PackedCollator(0, max_tokens=64, train_all=True).for_trainer()
    assert inputs([trainers[0], trainers[1]])["labels"].shape[0] == 2


def test_rows_whose_format_was_changed_are_refused_by_name(tmp_path) -> None:
    """A collator took the number of the row for a token, and ``save_to_disk`` ended inside json."""
    collate = packed_collator(0, max_tokens=32)
    table = PackedRows(SHORT, collate).to_datasets()
    plain = table.with_format(None)
    reads: list[Callable[[Any], Any]] = [
        collate, TokenizedDataset, packing_report, partial(audit, tokenizer=None),
        lambda of: collate([of[0]]), lambda of: collate(of[:2]), lambda of: collate(of[:1].copy()),
    ]  # fmt: skip
    plain.save_to_disk(tmp_path / "plain")
    for given in (plain, table.with_format("torch"), datasets.load_from_disk(tmp_path / "plain")):
        for read in reads:
            with pytest.raises(DataError, match=r"input_ids.* row 0"):
                read(given)
    for given in (
        table,
        table.select([1]),
        table.shuffle(seed=0),
        pickle.loads(pickle.dumps(table)),
    ):
        with pytest.raises(
            TypeError, match=r"to_datasets\(\) has numbers of rows and cannot be sav"
        ):
            given.save_to_disk(tmp_path / "rows")
        assert len(collate([given[0]])) == 1


def test_a_fingerprint_is_of_examples_and_rows() -> None:
    """What ``datasets`` caches by it is found again, also where the rows were read meanwhile."""

    def made(data: TokenizedDataset = SHORT, max_tokens: int = 32, seed: int = 0) -> PackedRows:
        return PackedRows(data, packed_collator(0, max_tokens=max_tokens), seed=seed)

    rows, again = made(), made()
    packed_collator(0, max_tokens=32)(list(rows))
    assert rows.fingerprint() == again.fingerprint() != rows.fingerprint(1)
    tables = [of.to_datasets() for of in (rows, again)]
    assert tables[0]._fingerprint == tables[1]._fingerprint
    shuffled = [table.shuffle(seed=1)._fingerprint for table in tables]
    assert shuffled[0] == shuffled[1] != tables[0]._fingerprint
    changed = TokenizedDataset([{"input_ids": SHORT[i]["input_ids"] + 1} for i in range(5)])
    for other in (made(seed=1), made(max_tokens=40), made(changed)):
        assert other.to_datasets()._fingerprint != tables[0]._fingerprint
    state = PrefetchingSampler(rows, batch_size=1).state_at(0, 1)
    with pytest.raises(StateError, match="this sampler has"):
        PrefetchingSampler(made(max_tokens=31), batch_size=1).load_state_dict(state)


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        [3, 4],
        {},
        TypeError,
        "examples must be a TokenizedDataset or a Mixture of them, got <list of",
    ),
    (DATA, {"max_tokens": 16}, DataError, "example 0 has 51 tokens, more than the 16 that fit"),
    (
        SHORT,
        {"parallel": ParallelLayout(dp=2)},
        ValueError,
        "the trainer divides rows over its ran",
    ),
    (SHORT, {"max_tokens": 2, "overflow": "drop"}, ValueError, "all 5 examples are dropped; raise"),
]


@pytest.mark.parametrize(("examples", "options", "error", "message"), BAD)
def test_bad_arguments(
    examples: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        PackedRows(examples, packed_collator(0, **{"max_tokens": 64, **options}))


def test_rows_that_do_not_exist_or_belong_elsewhere() -> None:
    collate = packed_collator(0, max_tokens=64)
    rows, others = PackedRows(SHORT, collate), PackedRows(SHORT, collate)
    with pytest.raises(IndexError, match="row 1 does not exist: there are 1 rows"):
        rows[1]
    with pytest.raises(TypeError, match="a batch of rows must be of one PackedRows"):
        collate([rows[0], others[0]])
    with pytest.raises(ValueError, match="the batch was planned for"):
        packed_collator(0, max_tokens=80)([rows[0]])
