"""The oracle against batches written out by hand; `P` is the pad id, `_` an ignored label."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle import alignment, example_weights, packed_batch, padded_batch, rows_of

P = 0
_ = -100


@dataclass
class HandPlan:
    example_indices: list[int]
    lengths: list[int]
    row_offsets: list[int]
    starts: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts = self.starts or [0] * len(self.lengths)


def check(batch: dict[str, Any], field_name: str, expected: list[list[float]]) -> None:
    dtype = torch.float32 if field_name == "loss_mask" else torch.int64
    assert batch[field_name].dtype == dtype
    assert batch[field_name].tolist() == expected


# --- one example ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "weights", "labels"),
    [
        ({}, [1, 1, 1, 1], [5, 6, 7, 8]),
        ({"loss_mask": [0, 1, 0, 1]}, [0, 1, 0, 1], [_, 6, _, 8]),
        ({"loss_mask": [0, 0.5, 0, 2]}, [0, 0.5, 0, 2], [_, 6, _, 8]),
        ({"loss_mask": [1, 0, 1], "num_actions": 3}, [0, 1, 0, 1], [_, 6, _, 8]),
        ({"loss_mask": [], "num_actions": 0}, [0, 0, 0, 0], [_, _, _, _]),
        ({"labels": [_, 9, _, 8]}, [0, 1, 0, 1], [_, 9, _, 8]),
        ({"assistant_masks": [0, 0, 1, 1]}, [0, 0, 1, 1], [_, _, 7, 8]),
        ({"completion_mask": [False, True, True, False]}, [0, 1, 1, 0], [_, 6, 7, _]),
    ],
)
def test_every_target_form_is_a_weight_and_a_label_a_token(
    target: dict[str, Any], weights: list[float], labels: list[int]
) -> None:
    assert example_weights({"input_ids": [5, 6, 7, 8], **target}) == (weights, labels)


@pytest.mark.parametrize(
    ("layout", "align"),
    [
        ({}, 1),
        ({"tp": 4}, 4),
        ({"cp": 2}, 4),
        ({"tp": 3, "cp": 2}, 12),
        ({"fp8": True}, 16),
        ({"tp": 3, "fp8": True}, 48),
        ({"tp": 4, "cp": 2, "fp8": True}, 32),
    ],
)
def test_alignment(layout: dict[str, Any], align: int) -> None:
    assert alignment(**layout) == align


# --- padded --------------------------------------------------------------------------------------

PAIR = [
    {"input_ids": [11, 12, 13], "loss_mask": [0, 1, 1]},
    {"input_ids": [21, 22, 23, 24, 25], "loss_mask": [0, 0, 1, 0, 1]},
]


def test_padded_left() -> None:
    batch = padded_batch(PAIR, pad_token_id=P, normalize_loss=False)
    check(batch, "input_ids", [[P, P, 11, 12, 13], [21, 22, 23, 24, 25]])
    check(batch, "attention_mask", [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    check(batch, "position_ids", [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    check(batch, "labels", [[_, _, _, 12, 13], [_, _, 23, _, 25]])
    # the second example responds from its third token on: three columns
    check(batch, "loss_mask", [[0, 1, 1], [1, 0, 1]])
    assert batch["sub_seq_lengths"] == [[3], [5]]
    assert batch["metadata"] == {
        "response_length": 3,
        "num_loss_tokens": 4,
        "loss_mask_divisor": 1,
        "num_examples": 2,
        "num_dummy_rows": 0,
        "num_tokens": 8,
        "example_indices": [[0], [1]],
        "example_starts": [[0], [0]],
        "num_actions": [[2], [3]],
        "num_trained": [[2], [2]],
        "num_dropped": 0,
        "num_cut": 0,
        "dropped": (),
        "cut": (),
    }


def test_padded_right_keeps_every_trained_cell_although_pads_stand_behind_it() -> None:
    batch = padded_batch(PAIR, pad_token_id=P, padding_side="right", normalize_loss=False)
    check(batch, "input_ids", [[11, 12, 13, P, P], [21, 22, 23, 24, 25]])
    check(batch, "attention_mask", [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    check(batch, "labels", [[_, 12, 13, _, _], [_, _, 23, _, 25]])
    # from token 12 to the end of the first row: four columns
    check(batch, "loss_mask", [[1, 1, 0, 0], [0, 1, 0, 1]])
    assert batch["metadata"]["response_length"] == 4
    assert batch["metadata"]["num_actions"] == [[2], [3]]


def test_pad_to_multiple_of_rounds_the_width_up_and_leaves_an_aligned_one() -> None:
    batch = padded_batch(PAIR, pad_token_id=P, pad_to_multiple_of=4, max_length=5)
    check(batch, "input_ids", [[P] * 5 + [11, 12, 13], [P] * 3 + [21, 22, 23, 24, 25]])
    assert batch["metadata"]["response_length"] == 3
    aligned = padded_batch(PAIR, pad_token_id=P, pad_to_multiple_of=5)
    assert aligned["input_ids"].shape == (2, 5)


def test_normalised_weights_are_float32_divisions_by_the_number_of_loss_tokens() -> None:
    examples = [{"input_ids": [1, 2, 3, 4], "loss_mask": [7, 0.1, 0, 1]}, {"input_ids": [5, 6]}]
    batch = padded_batch(examples, pad_token_id=P)
    three = np.float32(3)
    tenth, one = float(np.float32(0.1) / three), float(np.float32(1) / three)
    check(batch, "loss_mask", [[tenth, 0, one], [0, 0, one]])
    assert batch["metadata"]["num_loss_tokens"] == 3
    assert batch["metadata"]["loss_mask_divisor"] == 3


@pytest.mark.parametrize(
    ("example", "num_actions", "response_length"),
    [
        ({"input_ids": [5]}, 0, 0),  # nothing predicts an example's first token
        ({"input_ids": [5], "loss_mask": [1], "num_actions": 1}, 0, 0),
        ({"input_ids": [5, 6], "loss_mask": [1, 1], "num_actions": 2}, 1, 1),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0], "num_actions": 2}, 2, 2),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}, 0, 0),
        ({"input_ids": [5, 6, 7], "loss_mask": [1, 0, 0]}, 0, 0),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}, 2, 2),
        ({"input_ids": [5, 6, 7], "labels": [_, _, 7]}, 1, 1),
    ],
)
def test_response_length_of_one_example(
    example: dict[str, Any], num_actions: int, response_length: int
) -> None:
    batch = padded_batch([example], pad_token_id=P)
    assert batch["metadata"]["num_actions"] == [[num_actions]]
    assert batch["loss_mask"].shape == (1, response_length)


# --- packed --------------------------------------------------------------------------------------


def test_packed_rows_with_alignment_gaps_a_pad_tail_and_a_dummy_row() -> None:
    examples = [
        {"input_ids": [11, 12, 13], "loss_mask": [1, 1, 1]},
        {"input_ids": [21], "loss_mask": [1]},
        {"input_ids": [31, 32, 33, 34], "loss_mask": [1, 1], "num_actions": 2},
        {"input_ids": [41, 42], "labels": [_, 49]},
    ]
    plan = HandPlan(example_indices=[2, 0, 3, 1], lengths=[4, 3, 2, 1], row_offsets=[0, 3, 4, 4])
    batch = packed_batch(examples, plan, pad_token_id=P, max_tokens=12, align=2)
    check(
        batch,
        "input_ids",
        [[31, 32, 33, 34, 11, 12, 13, P, 41, 42], [21] + [P] * 9, [P] * 10],
    )
    check(
        batch,
        "position_ids",
        [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7], list(range(10))],
    )
    check(
        batch,
        "attention_mask",
        [[1, 1, 1, 1, 1, 1, 1, 0, 1, 1], [1] + [0] * 9, [0] * 10],
    )
    check(
        batch,
        "labels",
        [[_, _, 33, 34, _, 12, 13, _, _, 49], [_] * 10, [_] * 10],
    )
    fifth = float(np.float32(1) / np.float32(5))
    check(
        batch,
        "loss_mask",
        [[0, fifth, fifth, 0, fifth, fifth, 0, 0, fifth], [0] * 9, [0] * 9],
    )
    assert batch["sub_seq_lengths"] == [[4, 3, 2], [1], []]
    assert batch["cu_seq_lens"] == [[0, 4, 8, 10], [0, 2, 10], [0, 10]]
    assert batch["metadata"] == {
        "response_length": 9,
        "num_loss_tokens": 5,
        "loss_mask_divisor": 5,
        "num_examples": 4,
        "num_dummy_rows": 1,
        "num_tokens": 10,
        "example_indices": [[2, 0, 3], [1], []],
        "example_starts": [[0, 0, 0], [0], []],
        "num_actions": [[2, 2, 1], [0], []],
        "num_trained": [[2, 2, 1], [0], []],
        "max_segment_length": [4, 8, 10],
        "num_dropped": 0,
        "num_cut": 0,
        "dropped": (),
        "cut": (),
    }


def test_a_piece_of_a_split_example_begins_untrained_and_counts_its_own_actions() -> None:
    examples = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [1, 1, 1, 1], "num_actions": 4},
        {"input_ids": [7, 8, 9, 10, 11], "loss_mask": [0, 1, 0, 0, 1]},
    ]
    plan = HandPlan(
        example_indices=[0, 0, 1, 1],
        starts=[0, 3, 0, 3],
        lengths=[3, 3, 3, 2],
        row_offsets=[0, 1, 2, 3, 4],
        cut=[0, 1],
    )
    batch = packed_batch(
        examples, plan, pad_token_id=P, max_tokens=4, align=1, normalize_loss=False
    )
    check(batch, "input_ids", [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, P]])
    check(batch, "labels", [[_, _, 3], [_, 5, 6], [_, 8, _], [_, 11, _]])
    check(batch, "loss_mask", [[0, 1], [1, 1], [1, 0], [1, 0]])
    assert batch["metadata"]["num_actions"] == [[1], [2], [2], [1]]
    assert batch["metadata"]["num_examples"] == 2
    assert batch["metadata"]["example_starts"] == [[0], [3], [0], [3]]
    assert batch["metadata"]["num_cut"] == 2
    assert batch["metadata"]["cut"] == (0, 1)


def test_fixed_width_is_the_aligned_part_of_max_tokens() -> None:
    plan = HandPlan(example_indices=[0], lengths=[2], row_offsets=[0, 1])
    examples = [{"input_ids": [1, 2]}]
    batch = packed_batch(examples, plan, pad_token_id=P, max_tokens=7, align=2, fixed_width=True)
    check(batch, "input_ids", [[1, 2, P, P, P, P]])
    check(batch, "loss_mask", [[1, 0, 0, 0, 0]])
    assert batch["cu_seq_lens"] == [[0, 2, 6]]


def test_a_plan_without_pieces_gives_dummy_rows_of_one_alignment() -> None:
    plan = HandPlan(example_indices=[], lengths=[], row_offsets=[0, 0, 0], dropped=[0])
    batch = packed_batch([{"input_ids": [1, 2, 3]}], plan, pad_token_id=P, max_tokens=2, align=2)
    check(batch, "input_ids", [[P, P], [P, P]])
    check(batch, "position_ids", [[0, 1], [0, 1]])
    check(batch, "loss_mask", [[0], [0]])
    assert batch["cu_seq_lens"] == [[0, 2], [0, 2]]
    assert batch["metadata"]["num_dummy_rows"] == 2
    assert batch["metadata"]["num_examples"] == 1
    assert batch["metadata"]["num_dropped"] == 1
    assert batch["metadata"]["dropped"] == (0,)
    assert batch["metadata"]["num_loss_tokens"] == 0
    assert batch["metadata"]["loss_mask_divisor"] == 1


def test_rows_of_lists_the_pieces_row_by_row() -> None:
    plan = HandPlan(
        example_indices=[1, 0, 0], starts=[0, 4, 0], lengths=[3, 2, 4], row_offsets=[0, 2, 3]
    )
    assert rows_of(plan) == [[(1, 0, 3), (0, 4, 2)], [(0, 0, 4)]]
