"""on_error="skip" where rows are planned over ranks: rows stay, without the pieces that fail."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.building import packed_sampler
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.loading import PrefetchLoader, TokenizedDataset
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.testing import batch_digest

LAYOUT = ParallelLayout(dp=2, tp=2)
COLUMNS = TokenizedDataset([{"input_ids": [7 + i] * (1 + i % 5)} for i in range(13)])
TRAINED = COLUMNS.num_loss_tokens


class Reading(Dataset):
    """Columns of which some cannot be read."""

    def __init__(self, gone: Any) -> None:
        self.gone = gone

    def __len__(self) -> int:
        return len(COLUMNS)

    def __getitems__(self, part: Any) -> Any:
        for index in part.indices:
            if index in self.gone:
                raise OSError(f"row {index}")
        return COLUMNS.__getitems__(part)


def ranks(gone: Any, *, on_error: str = "skip", **workers: Any) -> list[PrefetchLoader]:
    collate = PackedCollator(0, max_tokens=12, parallel=LAYOUT)
    made = []
    for rank in range(2):
        options = {"num_loss_tokens": TRAINED, "packing": collate.packing}
        sampler = packed_sampler(COLUMNS.lengths, batch_size=6, dp_rank=rank, **options)
        data = DataLoader(Reading(gone), batch_sampler=sampler, collate_fn=collate, **workers)
        made.append(PrefetchLoader(data, on_error=on_error))
    return made


def batches_of(loaders: list[PrefetchLoader]) -> list[list[Any]]:
    """Of each rank, those of one epoch."""
    return [list(loader) for loader in loaders]


def row_written_out(batch: Any, row: int, gone: Any) -> list[int]:
    """The cells of a planned row without some examples, by a loop."""
    cells: list[int] = []
    for example, length in zip(named(batch, row), batch["sub_seq_lengths"][row], strict=True):
        if example not in gone:
            cells += [7 + example] * int(length) + [0] * (int(length) % 2)  # tp=2: even
    return cells + [0] * (batch["input_ids"].shape[1] - len(cells))


def named(batch: Any, row: int) -> list[int]:
    """The dataset's examples in a row: their ids say which they are."""
    cells = batch["input_ids"][row]
    starts = batch["cu_seq_lens"][row][:-1] - batch["cu_seq_lens"][row][0]
    return [int(cells[i]) - 7 for i in starts.tolist() if cells[i]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_a_plan_the_rows_stay_without_the_pieces_that_fail(num_workers):
    plain = batches_of(ranks((), on_error="raise"))
    gone = {named(plain[0][0], 0)[0], named(plain[1][1], -1)[-1]}
    gone |= {i for row in range(len(plain[0][2])) for i in named(plain[0][2], row)}  # all of a rank
    found = batches_of(ranks(gone, num_workers=num_workers))
    assert [len(of) for of in found] == [len(of) for of in plain] == [3, 3]
    num_changed = 0
    for mine, planned in zip(chain(*found), chain(*plain), strict=True):
        lost = [i for row in range(len(planned)) for i in named(planned, row) if i in gone]
        assert mine.metadata.get("skipped", []) == sorted(lost)
        if not lost:
            assert batch_digest(mine) == batch_digest(planned)
            continue
        num_changed += 1
        rows = [row_written_out(planned, row, gone) for row in range(len(planned))]
        assert mine["input_ids"].tolist() == rows
        told = {k: v for k, v in mine.metadata.items() if k != "skipped"}
        assert told == planned.metadata  # what is said of the whole batch, the divisor too
        is_lost = torch.isin(planned["input_ids"], torch.tensor([7 + i for i in lost]))
        remaining = (planned["labels"] != -100) & ~is_lost
        assert int((mine["labels"] != -100).sum()) == int(remaining.sum())
        weight = 1 / planned.metadata["num_loss_tokens"]
        assert np.allclose(mine["loss_mask"].sum().item(), int(remaining.sum()) * weight)
    assert num_changed == 3
    assert (found[0][2]["labels"] == -100).all()
    assert found[0][2].metadata["num_loss_tokens"] > 0
