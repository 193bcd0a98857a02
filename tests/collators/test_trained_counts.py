"""``row_metadata["num_trained"]`` says of every part of a batch what its loss mask does."""

from __future__ import annotations

from tests.building import packed_sampler
from torch_collate_kit import PackedCollator, PackingOptions, ParallelLayout, TokenizedDataset

EXAMPLES = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1]},
    {"input_ids": [5, 6], "loss_mask": [1, 0]},  # its first token alone: nothing is trained
    {"input_ids": [9, 8, 7], "loss_mask": [0, 1, 1]},
    {"input_ids": [4, 3, 2, 1, 9], "loss_mask": [0, 0, 0, 0.5, 2]},
]


def test_the_ranks_of_a_sampler_have_the_counts_of_their_rows() -> None:
    """Those of whole batches, and of their parts, are in the fuzz of each collator."""
    data = TokenizedDataset(EXAMPLES)
    packing = PackingOptions(max_tokens=6, parallel=ParallelLayout(dp=2))
    options = {"batch_size": 4, "shuffle": False, "packing": packing}
    found: list[int] = []
    for rank in range(2):
        [part] = packed_sampler(
            data.lengths, dp_rank=rank, num_loss_tokens=data.num_loss_tokens, **options
        )
        batch = PackedCollator(0, packing=packing)(data.__getitems__(part))
        counts = batch.row_metadata["num_trained"]
        assert [sum(row) for row in counts] == (batch["loss_mask"] != 0).sum(dim=1).tolist()
        found += counts.values.tolist()
    assert sorted(found) == [0, 2, 2, 2]
