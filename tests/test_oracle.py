"""The oracle against batches written by hand, and faults planted in batches of every kind.

`P` is the pad id, `_` an ignored label.
"""

from __future__ import annotations

import pytest

from tests.batch_checks import assert_equals_oracle
from tests.oracle import packed_batch, padded_batch
from torch_collate_kit import PackedCollator, PaddedCollator, pack

P = 0
_ = -100


PAIR = [
    {"input_ids": [11, 12, 13], "loss_mask": [0, 1, 1]},
    {"input_ids": [21, 22, 23, 24, 25], "loss_mask": [0, 0, 1, 0, 1]},
]


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
