"""The truth that other tests compare with: what the models' own batches give, and sensitive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vision.alone import alone
from tests.vision.families import FAMILIES, MROPE, Example, Part, TinyFamily


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> TinyFamily:
    return FAMILIES[request.param]


def logits_alone(family: TinyFamily, example: Example) -> Tensor:
    return alone(family, family.model(), example)[0]


def example_of(family: TinyFamily, parts: list[Part], seed: int = 0) -> Example:
    return family.example(np.random.default_rng(seed), parts)


def test_planted_faults_move_the_logits(family: TinyFamily) -> None:
    """One pixel, one image left out, the first token, and positions without the grid."""
    example = example_of(family, ["ab cde", (56, 84), "fghi"])
    expected = logits_alone(family, example)
    pixels = example["pixel_values"].copy()
    pixels.reshape(-1)[2000] += 4  # inside the first tile, where there are tiles
    moved = logits_alone(family, {**example, "pixel_values": pixels})
    assert (moved - expected).abs().max() > 0.05
    two = example_of(family, ["ab cde", (56, 84), (56, 84), "fghi"])
    other = example_of(family, ["zb cde", (56, 84), "fghi"])
    for wrong in (two, other):
        assert (logits_alone(family, wrong)[-1] - expected[-1]).abs().max() > 0.1
    if family.name in MROPE:
        plain: Any = torch.arange(len(example["input_ids"])).expand(3, 1, -1)
        inputs = {**family.model_inputs(example), "position_ids": plain, "use_cache": False}
        with torch.no_grad():
            assert (family.model()(**inputs).logits[0] - expected).abs().max() > 0.1
