"""What gives torch.compile one shape, as docs/contract.md says: not fixed_width alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.building import packed_stream
from torch_collate_kit.collators import PackedCollator

LENGTHS = np.random.default_rng(0).integers(3, 30, 400)
EXAMPLES = [{"input_ids": [1] * int(n)} for n in LENGTHS]


def shapes_of(batches: Iterable[Any]) -> set[Any]:
    return {
        tuple((name, v.shape) for name, v in batch.items() if isinstance(v, torch.Tensor))
        for batch in batches
    }


def collated(**options: Any) -> list[Any]:
    collate = PackedCollator(0, max_tokens=64, **options)
    return list(DataLoader(EXAMPLES, batch_size=16, collate_fn=collate))


def test_rows_one_by_one_have_one_shape():
    batches = collated(fixed_width=True)
    rows = [batch[i : i + 1] for batch in batches for i in range(len(batch))]
    assert len(rows) > 100
    assert len(shapes_of(rows)) == 1
    assert len(shapes_of(row.model_inputs("sdpa") for row in rows)) == 1
    assert len(shapes_of(row.model_inputs("torch_varlen") for row in rows)) > 1  # boundaries


def test_a_stream_of_one_row_a_batch_has_one_shape():
    options: dict[str, Any] = {"tokenizer": 0, "max_tokens": 64, "buffer_size": 50}
    stream = packed_stream(EXAMPLES, rows=1, fixed_width=True, **options)
    assert len(shapes_of(stream)) == 1
    too_long = [*EXAMPLES, {"input_ids": [1] * 90}]
    stream = packed_stream(too_long, rows=1, fixed_width=True, overflow="drop", **options)
    assert len(shapes_of(stream)) == 1
    last_has_fewer = packed_stream(EXAMPLES, rows=5, fixed_width=True, **options)
    assert len(shapes_of(last_has_fewer)) == 2


def test_rows_that_are_added_give_one_shape():
    batches = [batch.pad_rows(multiple_of=8) for batch in collated(fixed_width=True)]
    assert len(shapes_of(batches)) == 1
