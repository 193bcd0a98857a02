"""What ``torch.save`` writes of a field, ``torch.load`` reads: a field is a view of a buffer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.batch_samples import KINDS
from torch_collate_kit.batch import Batch, PerExample
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.ragged import Ragged

WIDTHS = range(1, 38)  # bytes and int16s beside int64s end at every remainder of 8


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_fields(fields: Mapping[str, Any]) -> None:
    values = {k: v.values if isinstance(v, Ragged) else v for k, v in fields.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    assert tensors
    for name, tensor in tensors.items():
        loaded = saved_and_loaded(tensor)
        assert loaded.dtype == tensor.dtype, name
        assert torch.equal(loaded, tensor), name


def sft_batches(width: int) -> list[Batch]:
    examples = [{"input_ids": list(range(1, n + 1))} for n in (width, 1 + width // 2, 1)]
    return [
        PaddedCollator(0)(examples),
        PaddedCollator(0, padding_side="right")(examples[:1]),
        PackedCollator(0, max_tokens=width)(examples),
        PackedCollator(0, max_tokens=2 * width + 1, fixed_width=True)(examples),
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_field_can_be_saved_and_loaded(width):
    kinds = KINDS.values() if width == 1 else ()
    for batch in (*sft_batches(width), *(make() for make in kinds)):
        check_fields(batch)
        check_fields(batch[:1])
        check_fields(batch if "rewards" in batch else batch.model_inputs("torch_varlen"))
        check_fields(pickle.loads(pickle.dumps(batch[:1])))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stored_field_is_a_view_of_a_buffer_of_any_size(width: int, num_workers: int) -> None:
    """It is saved with the buffer, which must hold a whole number of its entries."""
    example = {"input_ids": [5] * width, "domain": 2**40}
    collate = PackedCollator(
        0, max_tokens=8, train_all=True, fields={"domain": PerExample(torch.int64)}
    )
    loader = torch.utils.data.DataLoader([example], collate_fn=collate, num_workers=num_workers)
    given = Batch(
        {"ids": torch.arange(width)[:, None], "kept": torch.ones(width, 1, dtype=torch.bool)}
    )
    for batch in (*loader, given):
        sent = pickle.loads(pickle.dumps(batch)) if num_workers == 0 else batch
        check_fields({name: sent[name] for name in ("domain", "ids", "kept") if name in sent})
