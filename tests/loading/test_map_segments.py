"""A number for every segment of a dataset, in its order, against one segment at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import on_two_ranks
from torch_collate_kit import (
    PackedCollator,
    PackingOptions,
    PaddedCollator,
    ParallelLayout,
    TokenizedDataset,
    segment_sums,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.loading import map_segments
from torch_collate_kit.losses import trained_values


def made(count: int, *, flat: bool = False) -> list[dict[str, Any]]:
    """Examples of 1 to 3 segments, or flat ones, whose trained tokens are what is summed."""
    rng, found = np.random.default_rng(3), []
    for _ in range(count):
        ids = [rng.integers(1, 99, rng.integers(2, 9)).tolist() for _ in range(rng.integers(1, 4))]
        masks = [[0, *rng.integers(0, 2, len(of) - 1).tolist()] for of in ids]
        found.append({"input_ids": ids, "loss_mask": masks})
    first = [{key: of[0] for key, of in one.items()} for one in found]
    return first if flat else found


def trained_sums(batch: Batch) -> torch.Tensor:
    assert not torch.is_grad_enabled()
    return segment_sums(trained_values(batch["input_ids"].float(), batch), batch)


def expected(examples: list[dict[str, Any]]) -> np.ndarray:
    is_flat = not isinstance(examples[0]["input_ids"][0], list)
    found = np.full((len(examples), 1 if is_flat else 3), np.nan)
    for i, one in enumerate(examples):
        ids, masks = ([of] if is_flat else of for of in (one["input_ids"], one["loss_mask"]))
        for k, pair in enumerate(zip(ids, masks, strict=True)):
            found[i, k] = np.dot(*pair)
    return found


def collator(dp: int = 1, **options: Any) -> PackedCollator:
    layout = ParallelLayout(dp=dp, tp=2)
    packing = PackingOptions(**{"max_tokens": 32, "parallel": layout, **options})
    return PackedCollator(0, packing=packing, normalize_loss=False)


def of_rank() -> Any:
    """What a rank has: the numbers of all, those of one of dp=1, and the error of another dp."""
    torch.distributed.init_process_group("gloo")
    dataset, calls = TokenizedDataset(made(25)), []

    def counted(batch: Batch) -> torch.Tensor:
        calls.append(len(batch))
        return trained_sums(batch)

    found = map_segments(counted, dataset, collator(2), rows=2)
    alone = map_segments(trained_sums, dataset, collator())
    with pytest.raises(ValueError, match=r"rows for 4 ranks, parallel.dp, and the group has 2"):
        map_segments(trained_sums, dataset, collator(4))
    torch.distributed.destroy_process_group()
    return found, alone, calls


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("options", [{}, {"dp": 4}, {"dp": 2, "rows_multiple_of": 4}])
def test_numbers_stand_where_their_segments_do(options: dict[str, Any], flat: bool) -> None:
    examples = made(41, flat=flat)
    dataset, collate = TokenizedDataset(examples), collator(**options)
    for rows in (1, 3):
        found = map_segments(trained_sums, dataset, collate, rows=rows, device="cpu")
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, expected(examples))


def test_each_rank_runs_its_rows_and_all_have_the_numbers() -> None:
    (found, alone, calls), (also, _, others) = on_two_ranks(of_rank)
    for numbers in (found, also, alone):
        np.testing.assert_array_equal(numbers, expected(made(25)))
    assert calls == others  # as often, or a sharded model would wait forever
    assert sum(calls) <= 8, "each rank runs half of the rows"


def test_what_is_dropped_has_no_number() -> None:
    examples = made(12)
    examples[5] = {"input_ids": [[7] * 20, [8] * 20], "loss_mask": [[0] * 20] * 2}
    numbers = expected(examples)
    numbers[5] = np.nan
    found = map_segments(trained_sums, TokenizedDataset(examples), collator(overflow="drop"))
    np.testing.assert_array_equal(found, numbers)


@pytest.mark.parametrize(
    ("fn", "collate", "error", "message"),
    [
        (
            trained_sums,
            {"strategy": "wrapped"},
            ValueError,
            "has strategy='wrapped', which cuts",
        ),
        (trained_sums, {"overflow": "split"}, ValueError, "overflow='split'"),
        (trained_sums, None, TypeError, "collate must be a PackedCollator, got a PaddedCollator"),
        (lambda batch: 3.0, {}, TypeError, "fn must return a tensor, got float"),
        (
            lambda batch: torch.zeros(2, 2),
            {},
            ValueError,
            r"fn returned shape \[2, 2\] for \d segments",
        ),
    ],
)
def test_what_gives_no_number_per_segment_is_refused(
    fn: Any, collate: Any, error: type[Exception], message: str
) -> None:
    packed = collate is not None
    ids: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    how: Any = PackedCollator(ids, max_tokens=32, **collate) if packed else PaddedCollator(0)
    with pytest.raises(error, match=message):
        map_segments(fn, TokenizedDataset(made(4, flat=True)), how)
