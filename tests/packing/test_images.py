"""Patches as users give them: one number per example, or one per image."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.packing.oracle_packing import pack_with
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ModelCost
from torch_collate_kit.ragged import Ragged

COST = ModelCost(vision_linear=10, vision_quadratic=1)


@pytest.mark.parametrize(
    "patches",
    [
        [[4, 2], [], [3]],
        ((4, 2), (), (3,)),
        [np.array([4, 2]), np.array([], dtype=np.int64), np.array([3], dtype=np.uint8)],
        [torch.tensor([4, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])],
        Ragged.from_rows([[4, 2], [], [3]], dtype=np.int32),
        Ragged.from_rows([[9], [4, 2], [], [3], [9]])[1:4],
        Ragged(torch.tensor([4, 2, 3]), [0, 2, 2, 3]),
    ],
)
def test_patches_of_each_image(patches: Any) -> None:
    plan = pack_with([3, 4, 5], 12, patches=patches, cost=COST, strategy="sequential")
    assert plan.bins == [[0, 1, 2]]
    assert plan.atoms.patches.tolist() == [6, 0, 3]
    assert plan.atoms.vision_costs.tolist() == [4 * 14 + 2 * 12, 0, 3 * 13]
    assert (plan.atoms.patches.dtype, plan.atoms.vision_costs.dtype) == (np.int64, np.int64)


def test_no_images_and_no_examples() -> None:
    plan = pack_with([3, 4], 8, patches=[[], []], cost=COST)
    assert (plan.atoms.patches.tolist(), plan.atoms.vision_costs.tolist()) == ([0, 0], [0, 0])
    for nothing in ([], np.zeros(0, dtype=np.int32), Ragged.from_rows([])):
        assert pack_with([], 8, patches=nothing).atoms.patches.tolist() == []


WRONG_PATCHES: list[tuple[Any, type[Exception], str]] = [
    ([[4], []], ValueError, "patches has 2 entries, but there are 3 examples; pass one int pe"),
    ([4, -1, 2], DataError, "example 1 has -1 patches, but they must be 0 to 268435455; pass"),
    ([[4], [], [3, 0]], DataError, "example 2 has an image of 0 patches, but they must be 1"),
    ([[4], [2**28], [3]], DataError, "example 1 has an image of 268435456 patches, but they m"),
    ([4.0, 1, 2], TypeError, "patches of example 0 are 4.0, neither an int nor a list of the"),
    (np.array([4.0, 1, 2]), TypeError, "patches must be integers, got dtype float64; pass one"),
    ([[4.5], [], [1]], TypeError, "patches must be integers, got dtype float64; pass one int"),
    ([True, 1, 2], TypeError, "patches of example 0 are True, neither an int nor a list of t"),
    ([[4], 3, [1]], TypeError, "patches of example 1 are 3, neither an int nor a list of the"),
    ([[4], None, [1]], TypeError, "patches of example 1 are None, neither an int nor a list"),
    ([[[4]], [[1]], [[1]]], TypeError, "patches of example 0 are [[4]], neither an int nor a"),
    (np.ones((3, 2), int), ValueError, "patches must be 1-D, got shape (3, 2); pass one int p"),
    ([np.ma.array([4]), [], [1]], TypeError, "patches are a masked array, whose mask would be"),
    (5, ValueError, "patches must be 1-D, got shape (); pass one int per example, 0 without a"),
]


@pytest.mark.parametrize(("patches", "error", "message"), WRONG_PATCHES)
def test_refuses_wrong_patches(patches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        pack_with([3, 4, 5], 8, patches=patches)
