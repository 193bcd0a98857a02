"""Segments of model inputs, by boundaries or by positions, with and without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_collate_kit.attention.packed_inputs import find_segments


def segments_of(ids: Any, **inputs: Any) -> list[list[int]]:
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    found: list[list[int]] = find_segments(
        {"input_ids": torch.tensor(ids), **tensors}
    ).ids_RW.tolist()
    return found


@pytest.mark.parametrize(
    ("positions", "segments"),
    [
        ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
        ([5, 6, 7, 0, 1], [0, 0, 0, 1, 1]),  # the row starts in the middle of a document
        ([0, 1, 5, 6], [0, 0, 1, 1]),  # a jump forward is a start as well
        ([2, 1, 0], [0, 1, 2]),
        ([3, 3], [0, 1]),
        ([0, 1, 2, 3], [0, 0, 0, 0]),  # two documents that count on are one, as in transformers
        ([7], [0]),
    ],
)
def test_a_segment_starts_where_a_position_does_not_follow(
    positions: list[int], segments: list[int]
) -> None:
    assert segments_of([[1] * len(positions)], position_ids=[positions]) == [segments]
    three = [[positions], [positions], [positions]]  # in all of them a first token has 0
    starts = [i == 0 or position == 0 for i, position in enumerate(positions)]
    of_three = [sum(starts[: i + 1]) - 1 for i in range(len(starts))]
    assert segments_of([[1] * len(positions)], position_ids=three) == [of_three]


def test_cells_without_a_token_are_in_none() -> None:
    ids, mask = [[1, 1, 1], [1, 1, 1]], [[0, 1, 1], [1, 1, 0]]
    assert segments_of(ids, position_ids=[[0, 0, 1], [0, 1, 0]], attention_mask=mask) == [
        [-1, 0, 0],
        [1, 1, -1],
    ]


def test_boundaries_that_cover_other_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="cover 5 tokens, but input_ids has 6 cells"):
        segments_of([[1, 1, 1], [1, 1, 1]], cu_seq_lens_q=[0, 2, 5])
