"""unpack: outputs per example out of rows, against a plain loop over cells."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_samples import APART, KINDS, loose
from tests.rollout_strategies import draw_batch
from tests.strategies import FUZZ
from torch_collate_kit import unpack
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.rl import stage_mini_batches


def unpacked_by_loops(values: Any, batch: Batch) -> list[list[Any]]:
    """Cell by cell: which example has it, and which of its tokens it is."""
    width = batch["input_ids"].shape[1]
    found: dict[int, dict[int, Any]] = {}
    for row in range(len(batch)):
        edges = batch["cu_seq_lens"][row].tolist() if "cu_seq_lens" in batch else [0, width]
        examples = batch.row_metadata["example_indices"][row].tolist()
        firsts = batch.row_metadata["example_starts"][row].tolist()
        for segment, (example, first) in enumerate(zip(examples, firsts, strict=True)):
            token = first
            for cell in range(edges[segment], edges[segment + 1]):
                if not batch["attention_mask"][row, cell]:
                    continue
                column = cell - (width - values.shape[1])
                if values.shape[1] == width or token > first:
                    found.setdefault(example, {})[token] = values[row, column].tolist()
                token += 1
    return [
        [value for _, value in sorted(found.get(example, {}).items())]
        for example in range(batch.metadata["num_examples"])
    ]


@pytest.mark.parametrize("kind", list(APART))
@pytest.mark.parametrize("columns", [0, 1])
def test_every_kind_of_batch(kind: str, columns: int) -> None:
    batch = KINDS[kind]().pad_rows(multiple_of=4)
    shape = batch["input_ids"].shape
    values = torch.arange(shape[0] * (shape[1] - columns) * 2).view(shape[0], -1, 2)
    expected = unpacked_by_loops(values, batch)
    assert [part.tolist() for part in unpack(values, batch)] == expected
    arrays = unpack(values.numpy(), batch)
    assert all(isinstance(part, np.ndarray) for part in arrays)
    assert [part.tolist() for part in arrays] == expected
    dense = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    assert [part.tolist() for part in unpack(values, dense)] == expected


def test_gradients_flow_and_nothing_is_shared() -> None:
    batch = PackedCollator(0, max_tokens=4)([{"input_ids": [1, 2, 3]}])
    values = torch.zeros(1, 3, requires_grad=True)
    (part,) = unpack(values, batch)
    part[:2].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1, 0]]
    with torch.no_grad():
        part.add_(1)
    assert values.tolist() == [[0, 0, 0]]
    assert [part.device.type for part in unpack(torch.zeros(1, 3, device="meta"), batch)] == [
        "meta"
    ]


@FUZZ
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    batch = draw_batch(data, "padded", "packed", "packed", "packed rollouts")
    batch = batch.pad_rows(multiple_of=data.draw(st.integers(1, 3)))
    batch = batch.select(data.draw(st.permutations(range(len(batch)))))
    values = batch["input_ids"][:, data.draw(st.integers(0, 1)) :]
    expected = unpacked_by_loops(values, batch)
    assert [part.tolist() for part in unpack(values, batch)] == expected


@pytest.mark.parametrize("kind", list(KINDS))
def test_all_rows_as_one(kind: str) -> None:
    batch = KINDS[kind]()
    values = torch.arange(2 * batch["input_ids"].numel()).view(*batch["input_ids"].shape, 2)
    expected = [part.tolist() for part in unpack(values, batch)]
    for one_row in (values.flatten(0, 1)[None], values.flatten(0, 1)[None].numpy()):
        assert [part.tolist() for part in unpack(one_row, batch)] == expected


PACKED = KINDS["packed"]()
INPUTS = PACKED.model_inputs("sdpa")
IDS = PACKED["input_ids"]
STAGED = stage_mini_batches(KINDS["rollouts"](), [0, 2, 4], 1)[1][0]
MANY = PACKED.select([0, 1, 2, 0, 1, 2])
ERRORS: list[tuple[Any, Any, type[Exception], str]] = [
    ([[1]], PACKED, TypeError, "values must be a tensor or an array, got list"),
    (IDS, IDS, TypeError, "needs the Batch that the collator returned, which says where ex"),
    (IDS, INPUTS, TypeError, "needs the Batch that the collator returned, which says where ex"),
    (IDS[:2], PACKED, ValueError, "values have shape [2, 8], the batch has 3 rows of 8 cells; giv"),
    (IDS[:, 2:], PACKED, ValueError, "values have shape [3, 6], the batch has 3"),
    (IDS.repeat(1, 2), PACKED, ValueError, "values have shape [3, 16]"),
    (IDS.view(1, -1)[:, 1:], PACKED, ValueError, "values have shape [1, 23], the batch has 3 rows"),
    (IDS[0], PACKED, ValueError, "values have shape [8]"),
    (loose()["ids"], loose(), ValueError, "without the row metadata"),
    (IDS.repeat(2, 1), MANY, ValueError, "a piece of example 0 is in the batch twice"),
    (STAGED["input_ids"], STAGED, ValueError, "is 2, so they are a part of another"),
]


@pytest.mark.parametrize(("values", "batch", "kind", "message"), ERRORS)
def test_errors(values: Any, batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        unpack(values, batch)
