"""What every rank has to compute, in the metadata of a packed batch: of all ranks, on each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.building import packed_collator, packed_sampler
from tests.vision.oracle_images import LAYOUTS, TOKEN
from torch_collate_kit import TokenizedDataset
from torch_collate_kit.packing import ModelCost, ParallelLayout
from torch_collate_kit.rl import stage_mini_batches

# n tokens cost n * (10 + n): 1, 2, 3 and 4 of them 11, 24, 39 and 56
OPTIONS: dict[str, Any] = {
    "max_tokens": 8,
    "parallel": ParallelLayout(dp=2),
    "cost": ModelCost(10, 1, vision_linear=5, vision_quadratic=1),
}
EXAMPLES = [{"input_ids": [n] * n} for n in (3, 1, 4, 2)]


def test_written_out_by_hand() -> None:
    """Rows [4, 1] and [3, 2]; the same numbers on a controller and on each rank."""
    whole = packed_collator(0, **OPTIONS)(EXAMPLES)
    assert whole["sub_seq_lengths"].tolist() == [[4, 1], [3, 2]]
    assert whole.metadata["cost_per_rank"] == (56 + 11, 39 + 24)
    dataset = TokenizedDataset(EXAMPLES)
    for rank in range(2):
        (part,) = packed_sampler(
            dataset.lengths, batch_size=4, dp_rank=rank, shuffle=False, **OPTIONS
        )
        batch = packed_collator(0, normalize_loss=False, **OPTIONS)(dataset.__getitems__(part))
        assert batch.metadata["cost_per_rank"] == (67, 63)


def test_aligned_cells_are_computed_and_a_rank_may_have_none() -> None:
    options = OPTIONS | {"parallel": ParallelLayout(dp=3, tp=2)}
    batch = packed_collator(0, **options)(EXAMPLES[:2])  # 3 and 1 tokens in 4 and 2 cells
    assert batch["sub_seq_lengths"].tolist() == [[3], [1], []]
    assert batch.metadata["cost_per_rank"] == (56, 24, 0)


def test_images_cost_the_vision_tower() -> None:
    """16 patches cost 16 * (5 + 16) = 336, once; text has no such entry."""
    image = {"pixel_values": np.ones((16, 6)), "image_grid_thw": [[1, 4, 4]]}
    examples = [{"input_ids": [70, TOKEN, TOKEN, TOKEN, TOKEN], **image}, {"input_ids": [71] * 5}]
    options = OPTIONS | {"max_tokens": 32, "train_all": True}
    batch = packed_collator(0, vision=LAYOUTS["qwen2_vl"], **options)(examples)
    assert batch.metadata["cost_per_rank"] == (75, 75)
    assert batch.metadata["vision_cost_per_rank"] == (336, 0)
    text = packed_collator(0, **options)([{"input_ids": [71] * 5}])
    assert "vision_cost_per_rank" not in text.metadata


def test_a_staged_batch_is_divided_among_other_ranks() -> None:
    whole = packed_collator(0, **OPTIONS)(EXAMPLES)
    [[part]] = stage_mini_batches(whole, [0, len(whole)], 1)
    assert "cost_per_rank" not in part.metadata
