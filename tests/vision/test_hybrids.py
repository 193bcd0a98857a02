"""Vision models whose text model is a hybrid: packed with images, against alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vision.batches import (
    HYBRID,
    examples_of,
    largest_difference,
    logits_alone,
    packed,
)
from tests.vision.families import FAMILIES
from torch_collate_kit import check_isolation, isolate_mixers
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import IsolationError

LIMIT = 1e-5  # of the largest logit, as in test_parity.py


@pytest.fixture(params=HYBRID)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def isolated(name: str) -> Any:
    model = copy.deepcopy(FAMILIES[name].model())
    isolate_mixers(model)
    return model


def pack(name: str) -> Batch:
    batch = packed(FAMILIES[name], examples_of(name))
    assert len(batch) > 1
    assert max(len(row) for row in batch["sub_seq_lengths"].tolist()) > 1
    return batch


def test_packed_rows_with_images_equal_alone(name: str) -> None:
    batch, model = pack(name), isolated(name)
    inputs = batch.model_inputs(model, labels=False)
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    assert largest_difference(batch, logits, logits_alone(name)) < LIMIT
    check_isolation(model, batch)


def test_without_isolation_they_are_refused_or_get_what_the_kernels_read() -> None:
    batch = pack("qwen3_5")
    rows, width = batch["input_ids"].shape
    inputs = batch.model_inputs(FAMILIES["qwen3_5"].model(), labels=False)
    for key in ("input_ids", "seq_idx"):
        assert inputs[key].shape == (1, rows * width), key
    of_rows = batch["mrope_position_ids"]  # [R, 4, W]
    assert inputs["position_ids"].shape == (4, 1, rows * width)
    for row in range(rows):
        cells = slice(row * width, (row + 1) * width)
        assert torch.equal(inputs["position_ids"][:, 0, cells], of_rows[row])
    for images in ("pixel_values", "image_grid_thw"):
        assert torch.equal(inputs[images], batch[images].values)
    with pytest.raises(IsolationError, match="in qwen4_exp models: its dilated convolutions"):
        pack("qwen4_exp").model_inputs(FAMILIES["qwen4_exp"].model())
