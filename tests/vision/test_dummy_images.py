"""The smallest image of a row that has none: a segment of its row, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.vision.oracle_images import LAYOUTS, TOKEN
from torch_collate_kit import (
    DataError,
    PackedCollator,
    ParallelLayout,
    PerExample,
    token_loss,
    unpack,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.packing import RankPlan
from torch_collate_kit.rl import from_response_values, response_values

IMAGE = {"pixel_values": np.ones((16, 6)), "image_grid_thw": [[1, 4, 4]]}


def ids_of(length: int, *, image: bool = False) -> list[int]:
    ids = list(range(70, 70 + length))
    if image:
        ids[1:5] = [TOKEN] * 4
    return ids


def examples() -> list[dict[str, Any]]:
    lengths = (12, 9, 8, 11)
    found: list[dict[str, Any]] = []
    for i, n in enumerate(lengths):
        target = {"loss_mask": [1, 0, 1], "num_actions": 3}
        found.append({"input_ids": ids_of(n, image=not i), **target, **(IMAGE if not i else {})})
    return found


def collate(examples: Any, **options: Any) -> Batch:
    options = {"max_tokens": 60, "parallel": ParallelLayout(dp=2), **options}
    batch: Batch = PackedCollator(0, vision=LAYOUTS["qwen2_vl"], **options)(examples)
    assert batch.metadata["num_dummy_images"] == 1
    return batch


def test_it_is_the_last_segment_of_its_row() -> None:
    batch = collate(examples())
    assert batch["image_grid_thw"].tolist() == [[[1, 4, 4]], [[1, 2, 2]]]
    assert batch["pixel_values"].lengths.tolist() == [16, 4]
    assert not batch["pixel_values"][1].any()
    assert batch["input_ids"][1].tolist().count(TOKEN) == 1
    place = batch["input_ids"][1].tolist().index(TOKEN)
    boundaries = batch["cu_seq_lens"][1].tolist()
    assert place == sum(batch["sub_seq_lengths"][1])
    assert boundaries[len(batch["sub_seq_lengths"][1])] == place
    assert batch["mrope_position_ids"][1, :, place].tolist() == [0, 0, 0, 0]
    assert batch["labels"][1, place] == -100
    assert batch["loss_mask"][1, place - 1] == 0


def test_it_is_no_example() -> None:
    given = examples()
    batch = collate(given)
    indices = sorted(batch.row_metadata["example_indices"].values.tolist())
    assert indices == [0, 1, 2, 3]
    assert batch.metadata["num_examples"] == 4
    assert batch.num_tokens == 40
    assert batch.metadata["num_loss_tokens"] == 8
    table = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    loss, outputs = token_loss(
        table[batch["input_ids"]], batch, num_loss_tokens=8, return_per_token_outputs=True
    )
    total = 0.0
    for i, example in enumerate(given):
        ids = torch.tensor(example["input_ids"])
        nll = functional.cross_entropy(table[ids[:-1]], ids[1:], reduction="none")[-3:]
        assert np.allclose(outputs.nll[i], nll.numpy(), atol=1e-6)
        total += float(nll[0] + nll[2])
    assert abs(float(loss) - total / 8) < 1e-6


def test_other_images_than_planned_are_refused() -> None:
    given = examples()
    collator = PackedCollator(
        0, vision=LAYOUTS["qwen2_vl"], max_tokens=60, parallel=ParallelLayout(dp=2)
    )
    lengths = [len(example["input_ids"]) for example in given]
    plan = collator.plan(lengths, [[4], [], [], []])
    with pytest.raises(DataError, match="example 0 has 16 patches of images, the plan was made fo"):
        collator(RankPlan(plan).with_examples(given))
    plan = collator.plan(lengths, [[16], [], [], []])
    batch = collator(RankPlan(plan).with_examples(given))
    assert torch.equal(batch["input_ids"], collator(given)["input_ids"])


def test_rollouts_have_no_response_there() -> None:
    rollouts = [
        {"prompt_ids": ids_of(n, image=not i), "response_ids": [80, 81], "loss_mask": [1, 1]}
        | {"rewards": float(i + 1), "uid": f"u{i}", **(IMAGE if not i else {})}
        for i, n in enumerate((12, 9, 8, 11))
    ]
    batch = collate(rollouts)
    values = response_values(batch["rewards"], batch)
    assert values == [[0.0, float(i + 1)] for i in range(4)]
    assert torch.equal(from_response_values(values, batch), batch["rewards"])
    order = batch.row_metadata["example_indices"].tolist()
    assert batch.row_metadata["uids"] == [tuple(f"u{i}" for i in row) for row in order]
    assert batch["response_mask"].sum() == 8


def test_a_batch_of_text_alone_needs_none() -> None:
    batch = PackedCollator(
        0, vision=LAYOUTS["qwen2_vl"], max_tokens=60, parallel=ParallelLayout(dp=2)
    )(examples()[1:])
    assert batch.metadata["num_dummy_images"] == 0
    assert not len(batch["pixel_values"].values)
    assert "pixel_values" not in batch.model_inputs("sdpa")


def test_with_several_segments_it_is_none_of_an_example() -> None:
    """The rows are those of the same examples of one segment, which hold the same tokens."""
    flat = [{**example, "kind": i} for i, example in enumerate(examples())]
    for example in flat:
        del example["num_actions"]
        example["loss_mask"] = [1] * len(example["input_ids"])
    pairs: list[dict[str, Any]] = []
    for first, second in (flat[:2], flat[2:]):
        pair: dict[str, Any] = {key: [first[key], second.get(key)] for key in first}
        pairs.append({**pair, "kind": first["kind"] // 2})
    options: dict[str, Any] = {"max_tokens": 24, "fields": {"kind": PerExample(torch.int64)}}
    batch = collate(pairs, **options)
    assert batch["image_grid_thw"].tolist() == [[[1, 4, 4]], [[1, 2, 2]]]
    assert batch["kind"].tolist() == [[0], [1]]
    assert batch.row_metadata["example_indices"].tolist() == [[0, 0], [1, 1]]
    assert batch.row_metadata["segment_numbers"].tolist() == [[0, 1], [0, 1]]
    assert [of.tolist() for of in unpack(batch["input_ids"], batch)] == [
        example["input_ids"] for example in flat
    ]
