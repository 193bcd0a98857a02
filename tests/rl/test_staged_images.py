"""Ranks whose parts differ in whether they have images are named when rollouts are staged."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from torch_collate_kit import RolloutCollator
from torch_collate_kit.rl import micro_batches, stage_mini_batches
from torch_collate_kit.vision import VisionLayout

QWEN = VisionLayout("qwen2_vl", image_token_id=9, patch_shape=(1, 1, 2))
IMAGE = {"pixel_values": np.ones((1, 2)), "image_grid_thw": np.array([[1, 1, 1]])}


def rollout(length: int, *, image: bool) -> dict[str, Any]:
    ids = [9, 1] if image else [1, 1]
    given = {"prompt_ids": ids, "response_ids": [2] * length, "rewards": 1.0}
    return {**given, "loss_mask": [1] * length, **(IMAGE if image else {})}


def staged(images: list[bool], lengths: list[int], dp_size: int = 2) -> Any:
    rollouts = [rollout(n, image=i) for n, i in zip(lengths, images, strict=True)]
    batch = RolloutCollator(0, vision=QWEN)(rollouts)
    return stage_mini_batches(batch, [0, len(batch)], dp_size)[0]


def test_a_rank_without_images_beside_one_with_images_is_named() -> None:
    with pytest.warns(UserWarning, match=r"ranks \[1\] have no image in a mini-batch") as found:
        staged([True, True, False, False], [1, 1, 1, 1])
    assert [warning.filename for warning in found] == [__file__], "the line that staged"


def test_micro_batches_that_differ_are_named_on_every_rank() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = staged([True, False, True, False], [8, 1, 1, 8])
    for part in parts:
        message = r"ranks \[1\] have no image in a micro-batch 0"
        with pytest.warns(UserWarning, match=message) as found:
            micro_batches(part, max_tokens=10)
        assert {warning.filename for warning in found} == {__file__}, "the line that cut"


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [8, 1, 8, 1]])
@pytest.mark.parametrize("images", [[True] * 4, [False] * 4, [True, False, True, False]])
def test_even_ranks_give_no_warning(images: list[bool], lengths: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in staged(images, lengths):
            micro_batches(part, max_tokens=10)
        staged(images, lengths, dp_size=1)
