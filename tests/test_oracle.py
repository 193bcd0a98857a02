"""The oracle against batches written by hand, and faults planted in batches of every kind.

`P` is the pad id, `_` an ignored label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_checks import assert_equals_oracle
from tests.oracle import packed_batch, padded_batch
from torch_collate_kit import PackedCollator, PaddedCollator, pack

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


PAIR = [
    {"input_ids": [11, 12, 13], "loss_mask": [0, 1, 1]},
    {"input_ids": [21, 22, 23, 24, 25], "loss_mask": [0, 0, 1, 0, 1]},
]


def test_padded_by_hand() -> None:
    batch = padded_batch(PAIR, pad_token_id=P, normalize_loss=False)
    check(batch, "input_ids", [[P, P, 11, 12, 13], [21, 22, 23, 24, 25]])
    check(batch, "attention_mask", [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    check(batch, "position_ids", [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    check(batch, "labels", [[_, _, _, 12, 13], [_, _, 23, _, 25]])
    # the second example responds from its third token on: three columns
    check(batch, "loss_mask", [[0, 1, 1], [1, 0, 1]])
    assert batch["metadata"]["num_actions"] == [[2], [3]]
    right = padded_batch(PAIR, pad_token_id=P, padding_side="right", normalize_loss=False)
    check(right, "labels", [[_, 12, 13, _, _], [_, _, 23, _, 25]])
    check(right, "loss_mask", [[1, 1, 0, 0], [0, 1, 0, 1]])  # from token 12 to the row's end


def test_packed_by_hand() -> None:
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
    assert batch["metadata"]["num_trained"] == [[2, 2, 1], [0], []]
    assert batch["metadata"]["max_segment_length"] == [4, 8, 10]
    assert batch["metadata"]["num_dummy_rows"] == 1


def test_pieces_by_hand() -> None:
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


# --- faults that the comparison with the oracle must see


KINDS = {
    "padded": lambda: (PaddedCollator(P)(PAIR), padded_batch(PAIR, pad_token_id=P)),
    "packed": lambda: (
        PackedCollator(P, max_tokens=9)(PAIR),
        packed_batch(PAIR, pack([3, 5], 9), pad_token_id=P, max_tokens=9, align=1),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_any_field_is_seen(kind: str) -> None:
    batch, expected = KINDS[kind]()
    assert_equals_oracle(batch, expected)
    ragged = ("sub_seq_lengths", "cu_seq_lens")
    changed = {name: batch[name].clone() for name in batch if name not in ragged}
    for name, cells in changed.items():
        cells.view(-1)[-1] += 1
        with pytest.raises(AssertionError):
            assert_equals_oracle(batch.with_fields(**{name: cells}), expected)
    for name in expected["metadata"]:
        other = expected | {"metadata": expected["metadata"] | {name: "another"}}
        with pytest.raises(AssertionError):
            assert_equals_oracle(batch, other)
