"""PackedBatchSampler with images: every rank plans the same rows by patches, too."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from tests.packing.image_mixes import mix, totals
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import PackedBatchSampler
from torch_collate_kit.packing import ParallelLayout

LENGTHS, IMAGES = mix("several images", 200)
OPTIONS: dict[str, Any] = {
    "batch_size": 64,
    "max_tokens": 4096,
    "max_patches": 6000,
    "dummy_image_tokens": 3,
    "parallel": ParallelLayout(dp=4),
}


def sampler(rank: int = 0, patches: Any = IMAGES, **changes: Any) -> PackedBatchSampler:
    return packed_sampler(LENGTHS, patches=patches, dp_rank=rank, **{**OPTIONS, **changes})


def test_all_ranks_have_parts_of_the_plan_of_the_whole_batch() -> None:
    patches = totals(IMAGES)
    batches = list(zip(*(sampler(rank) for rank in range(4)), strict=True))
    assert len(batches) == 4
    read: list[int] = []
    for parts in batches:
        plan = parts[0].plan
        examples = np.concatenate([part.indices for part in parts])
        read += examples.tolist()
        assert plan.row_patches.max() <= 6000
        assert plan.row_cells.max() <= 4096
        for costs in (plan.cost_per_rank, plan.vision_cost_per_rank):
            assert len(examples) < 64 or costs.max() < 1.1 * costs.mean()
        for part in parts:
            np.testing.assert_array_equal(part.plan.example_indices, plan.example_indices)
            np.testing.assert_array_equal(part.plan.needs_dummy_image, plan.needs_dummy_image)
            assert part.patches.tolist() == patches[part.indices].tolist()
            part.check_patches(patches[part.indices])
    assert sorted(read) == list(range(200))


def test_a_state_names_the_images_and_their_budget(caplog: pytest.LogCaptureFixture) -> None:
    state = sampler().state_at(0, 2)
    layout = state["layout"]
    assert (layout["max_patches"], layout["dummy_image_tokens"]) == (6000, 3)
    assert layout["cost"] == [24576, 1, 5266, 1]
    resumed = sampler()
    resumed.load_state_dict(state)
    expected = [part.plan.bins for part in sampler()][2:]
    assert [part.plan.bins for part in resumed] == expected
    fewer = [*IMAGES[:-2], [], []]
    for patches in (fewer, None):
        with pytest.raises(StateError, match=r"^state is of patches_digest="):
            sampler(patches=patches).load_state_dict(state)
    for other, name in (
        (sampler(max_patches=7000), "max_patches 6000 -> 7000"),
        (sampler(dummy_image_tokens=4), "dummy_image_tokens 3 -> 4"),
        (sampler(patches=totals(IMAGES)), "image_costs_digest "),  # costs of one image each
    ):
        caplog.clear()
        other.load_state_dict(state)
        assert name in caplog.text


def test_an_example_that_does_not_fit_is_named_at_once() -> None:
    message = (
        "example 2 has 6001 patches of images, more than the max_patches=6000 of a row; raise "
        "max_patches, make its images smaller, or pass overflow='drop'"
    )
    patches = totals(IMAGES)
    patches[2] = 6001
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        sampler(patches=patches)
    with pytest.raises(DataError, match=r"^example 2 has 6001 patches .* is never split; raise"):
        sampler(patches=patches, overflow="split")
    with pytest.raises(DataError, match=r"^example 2 has 6001 patches .*; an image is never cut,"):
        sampler(patches=patches, overflow="truncate")
    dropped = [part.plan.dropped.tolist() for part in sampler(patches=patches, overflow="drop")]
    assert sum(map(len, dropped)) == 1


def test_loss_tokens_are_those_of_examples_that_keep_all_tokens() -> None:
    lengths, counts = [9, 4, 8], [3, 2, 1]
    options: dict[str, Any] = {
        "batch_size": 3,
        "max_tokens": 10,
        "parallel": ParallelLayout(dp=2),
        "dummy_image_tokens": 2,
        "overflow": "truncate",
    }
    message = "it is not known how many loss tokens are left of example 0, cut to 8 tokens by overf"
    with pytest.raises(ValueError, match=f"^{message}"):
        packed_sampler(lengths, patches=[0, 3, 0], num_loss_tokens=counts, **options)
    (part,) = packed_sampler(lengths, num_loss_tokens=counts, **options)
    assert part.num_loss_tokens == 6
