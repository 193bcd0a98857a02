"""Rows that fill up a batch: they run like row 0, and nothing of them is trained or counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_samples import contents, plain
from torch_collate_kit import PackedCollator, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import stage_mini_batches


def test_rows_that_divide_already_are_returned_as_they_are(collated: Batch) -> None:
    assert collated.pad_rows(multiple_of=1) is collated
    assert collated.pad_rows(multiple_of=len(collated)) is collated


def test_an_added_row_runs_like_row_0_and_trains_nothing(packed: Batch) -> None:
    before = contents(packed)
    batch = packed.pad_rows(multiple_of=5)
    assert len(batch) == 5
    assert contents(batch[:3])["fields"] == before["fields"]
    for name in ("input_ids", "position_ids", "attention_mask"):
        assert batch[name][3:].tolist() == [packed[name][0].tolist()] * 2
    assert batch["cu_seq_lens"].tolist()[3:] == [[0, 7, 8]] * 2
    assert (batch["labels"][3:] == -100).all()
    assert (batch["loss_mask"][3:] == 0).all()
    assert batch["sub_seq_lengths"].tolist() == [[7], [5, 3], [4, 2], [], []]
    assert batch.row_metadata["example_indices"].tolist() == [[4], [0, 1], [2, 3], [], []]
    assert batch.row_metadata["num_actions"].tolist()[3:] == [[], []]
    assert batch.row_metadata["max_segment_length"] == [7, 5, 4, 7, 7]
    assert batch.metadata["num_dummy_rows"] == 2
    assert batch.metadata["num_loss_tokens"] == 16
    assert batch.pad_rows(multiple_of=2).metadata["num_dummy_rows"] == 3
    assert contents(packed) == before


ROLLOUTS: list[dict[str, Any]] = [
    {
        "prompt_ids": [1, 2],
        "response_ids": [3] * n,
        "rewards": 1.0,
        "loss_mask": [1] * n,
        "uid": "a",
        "trajectory_id": n,
        "is_last_step": n > 1,
    }
    for n in (1, 2, 3)
]
PADDED = {"uids": "a", "trajectory_ids": 1, "is_last_step": True, "turn": 7}
PACKED = {"uids": (), "trajectory_ids": (), "is_last_step": (), "max_segment_length": 5, "turn": 7}
OF_SUB_SEQUENCES = ("example_indices", "example_starts", "num_actions", "num_trained", "stop")


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (RolloutCollator(0), PADDED),
        (PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing"), PACKED),
    ],
    ids=["padded", "packed"],
)
@pytest.mark.parametrize("by", ["pad_rows", "stage_mini_batches"])
def test_every_row_metadata_of_added_rows(collate: Any, expected: dict[str, Any], by: str) -> None:
    batch = collate(ROLLOUTS)
    batch.row_metadata["turn"] = [7] * len(batch)
    batch.row_metadata["stop"] = Ragged.from_rows([[1]] * len(batch))
    if by == "pad_rows":
        batch = batch.pad_rows(multiple_of=5)
    else:
        batch = Batch.cat(stage_mini_batches(batch, [0, len(batch)], 5)[0])
        expected = expected | {"row_indices": -1}
    added = {key: plain(value)[-1] for key, value in batch.row_metadata.items()}
    assert added == expected | {key: [] for key in OF_SUB_SEQUENCES}
    uids, flags = batch.row_metadata["uids"], batch.row_metadata["is_last_step"]
    assert {type(uid) for uid in uids} == {type(uids[0])}
    assert {type(flag) for flag in flags} == {type(flags[0])}


def test_a_router_counts_no_token_of_an_added_row() -> None:
    batch = Batch({"router_padding_mask": torch.tensor([[False, True]])}).pad_rows(multiple_of=2)
    assert batch["router_padding_mask"].tolist() == [[False, True], [True, True]]


def test_what_is_multiplied_into_a_loss_is_0_in_added_rows() -> None:
    ones, mask = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int64)
    batch = Batch(
        {
            "loss_mask": torch.ones(1, 2),
            "response_mask": mask,
            "advantages": torch.ones(1),  # one a row
            "returns": torch.ones(1, 7, dtype=torch.int64),
            "rewards": Ragged.from_rows([[1.0]]),
            "values": ones,
            "old_logprobs": ones[:, :2].to(torch.bfloat16),
            "turn": mask,  # not floating point
            "pixel_values": torch.ones(1, 3, 2),
            "inputs_embeds": torch.ones(1, 3, 2),
            "attention_mask": torch.ones(1, 3),
            "scores": torch.ones(1, 5),
            "hidden": torch.ones(1, 3, 2),
            "own": Ragged.from_rows([[1.0, 2.0]]),
            "cu_seq_lens": Ragged.from_rows([[0, 3]]),
        },
        row_metadata={"max_segment_length": [3]},
    ).pad_rows(multiple_of=3)
    repeated = ("turn", "pixel_values", "inputs_embeds", "attention_mask")
    ragged = ("rewards", "own", "cu_seq_lens")
    for name in batch.keys() - {*repeated, *ragged}:
        assert (batch[name][0] == 1).all()
        assert (batch[name][1:] == 0).all(), name
    for name in repeated:
        assert (batch[name] == 1).all(), name
    assert batch["rewards"].tolist() == [[1.0], [], []]
    assert batch["own"].tolist() == [[1.0, 2.0], [], []]
    assert batch["cu_seq_lens"].tolist() == [[0, 3]] * 3


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_an_added_row_is_a_trajectory_of_its_own(kind: Any) -> None:
    flags = kind([False, True])
    batch = Batch({"x": torch.arange(2)}, row_metadata={"is_last_step": flags}).pad_rows(
        multiple_of=4
    )
    assert plain(batch.row_metadata["is_last_step"]) == [False, True, True, True]
    assert plain(flags) == [False, True]


def test_pad_rows_errors(packed: Batch) -> None:
    for multiple_of in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {multiple_of}"):
            packed.pad_rows(multiple_of=multiple_of)
    no_rows = packed[:0]  # 0 is a multiple of everything
    assert no_rows.pad_rows(multiple_of=2) is no_rows
