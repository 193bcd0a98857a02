"""VisionLanguageCollator: conversations as they are, under a plan and without, and its sizes."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.building import packed_sampler
from tests.chat_images.truth import chat, image, text
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import (
    ChatOptions,
    Mixture,
    PackingOptions,
    ParallelLayout,
    PerExample,
    VisionLanguageCollator,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

QWEN = FAMILIES["qwen2_5_vl"]
Record = dict[str, Any]


def records() -> list[Record]:
    """Two images, one image and none, by turns."""
    rng, made = np.random.default_rng(0), []
    for i in range(9):
        number = (2, 1, 0)[i % 3]
        parts = [*(image() for _ in range(number)), text("What is it? " * (i % 4 + 1))]
        pictures = [draw(rng, 56 + 28 * (i % 2), 84) for _ in range(number)]
        made.append({"messages": chat(parts, "A cat."), "images": pictures})
    return made


class PlannedRecords:
    """A dataset that passes plans on."""

    def __init__(self, rows: list[Record]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        return self.rows[index]

    def __getitems__(self, plan: Any) -> Any:
        return plan.with_examples([self.rows[i] for i in plan.indices])


def under_a_plan(rank: int, without_images: int | None = None, **options: Any) -> list[Any]:
    packing = PackingOptions(200, parallel=ParallelLayout(dp=2))
    collate = VisionLanguageCollator(QWEN.processor(), packing=packing, **options)
    dataset = PlannedRecords(records())
    sizes = collate.sizes(dataset)
    sampler = packed_sampler(
        sizes.lengths,
        patches=sizes.patches,
        num_loss_tokens=sizes.num_loss_tokens,
        batch_size=6,
        packing=collate.collator.packing,
        dp_rank=rank,
        shuffle=False,
    )
    if without_images is not None:
        dataset.rows[without_images]["images"] = []
    return list(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))


def test_ranks_get_their_chunks_of_the_batch_of_a_controller() -> None:
    packing = PackingOptions(200, parallel=ParallelLayout(dp=2))
    whole = VisionLanguageCollator(QWEN.processor(), packing=packing)
    for rank in range(2):
        parts = under_a_plan(rank)
        for part, start in zip(parts, (0, 6), strict=True):
            expected = whole(records()[start : start + 6]).chunk(2)[rank]
            assert list(part) == list(expected)
            for name in expected:
                one, other = part[name], expected[name]
                if isinstance(one, Ragged):
                    assert np.array_equal(one.offsets, other.offsets), name
                    one, other = one.values, other.values
                assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), name


def test_under_a_plan_an_error_names_the_example_of_the_dataset() -> None:
    said = []
    for rank in range(2):
        try:
            under_a_plan(rank, without_images=7)
        except DataError as error:
            said.append(str(error))
    assert len(said) == 1
    assert said[0].startswith("example 7 of the dataset: the messages have 1 image parts")


def test_records_have_weights_and_declared_fields() -> None:
    fields = {"rating": PerExample(torch.float32), "name": PerExample(str)}
    given = [{**r, "weight": i / 2, "rating": i, "name": f"r{i}"} for i, r in enumerate(records())]
    collate = VisionLanguageCollator(QWEN.processor(), fields=fields, normalize_loss=False)
    batch, plain = collate(given), VisionLanguageCollator(QWEN.processor())(records())
    assert batch.row_metadata["name"] == [f"r{i}" for i in range(len(given))]
    assert batch["rating"].tolist() == [[i] for i in range(len(given))]
    weights = torch.arange(len(given))[:, None] / 2
    assert torch.equal(batch["loss_mask"], (plain["loss_mask"] != 0) * weights)
    counts = batch.row_metadata["num_trained"].values.tolist()
    assert collate.sizes(given).num_loss_tokens.tolist() == counts
    assert counts[0] == 0


def test_a_declared_field_may_be_called_like_a_weight() -> None:
    given = [{**record, "sample_weight": i / 4} for i, record in enumerate(records())]
    fields = {"sample_weight": PerExample(torch.float32)}
    batch = VisionLanguageCollator(QWEN.processor(), fields=fields)(given)
    assert batch["sample_weight"].tolist() == [[i / 4] for i in range(len(given))]
    with pytest.raises(DataError, match="has 'sample_weight', which is not read; name it weight"):
        VisionLanguageCollator(QWEN.processor())(given)


def test_sizes_read_a_dataset_in_parts() -> None:
    collate = VisionLanguageCollator(QWEN.processor())
    expected = collate.sizes(records())
    rows = records()
    for turn in (turn for record in rows for turn in record["messages"]):
        if isinstance(turn["content"], str):
            turn["content"] = [text(turn["content"])]
    for examples in (rows, datasets.Dataset.from_list(rows), PlannedRecords(records())):
        found = collate.sizes(examples)
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.patches == expected.patches
        assert found.num_loss_tokens.tolist() == expected.num_loss_tokens.tolist()
    many = [records()[2]] * 1000 + records()  # a part is 1,000 records
    assert collate.sizes(many).patches[1000:] == expected.patches
    many[1007]["images"] = []
    with pytest.raises(DataError, match="example 1007: the messages have 1 image parts"):
        collate.sizes(many)
    for wrong in (7, iter(records())):
        with pytest.raises(
            TypeError, match=r"examples is an? .*; pass a list of examples, a mapping"
        ):
            collate.sizes(wrong)  # type: ignore[arg-type]


def test_what_max_length_cuts_and_drops_is_counted() -> None:
    processor, all_records = QWEN.processor(), records()
    lengths = VisionLanguageCollator(processor).sizes(all_records).lengths
    limit = int(np.sort(lengths)[len(lengths) // 2])
    options: Any
    for options in ({}, {"max_tokens": 4 * limit, "overflow": "truncate"}):
        shorter = ChatOptions(max_length=limit, overflow="truncate")
        collate = VisionLanguageCollator(processor, **options, chat=shorter)
        batch = collate([{"messages": chat("x" * 2 * limit, "y")}, *all_records])
        cut = [i for i, length in enumerate(lengths, 1) if length > limit]
        kept = sorted(batch.row_metadata["example_indices"].values.tolist())
        dropped = sorted({*range(len(all_records) + 1)} - set(kept))
        assert 0 in dropped
        assert batch.metadata["dropped"] == tuple(dropped)
        assert batch.metadata["num_dropped"] == len(dropped)
        assert batch.metadata["cut"] == tuple(i for i in cut if i in kept)
        assert batch.metadata["num_examples"] == len(all_records) + 1
    with pytest.raises(DataError, match="example 0: nothing_left_after_truncation"):
        collate.sizes([{"messages": chat("x" * 2 * limit, "y")}])
    with pytest.raises(DataError, match="nothing is left of all 1 conversations of the batch"):
        collate([{"messages": chat("x" * 2 * limit, "y")}])


def test_conversations_and_rows_have_an_overflow_of_their_own() -> None:
    processor = FAMILIES["internvl"].processor()
    long, short = {"messages": chat("x" * 90, "y")}, {"messages": chat("x", "y")}
    (limit,) = VisionLanguageCollator(processor).sizes([short]).lengths.tolist()
    for options in ({}, {"max_tokens": 4 * limit}):
        collate = VisionLanguageCollator(processor, **options, chat=ChatOptions(max_length=limit))
        with pytest.raises(DataError, match=f"example 1: the text has .*max_length={limit}; "):
            collate([short, long])
        dropping = ChatOptions(max_length=limit, overflow="drop")
        collate = VisionLanguageCollator(processor, **options, chat=dropping)
        metadata = collate([short, long]).metadata
        assert (metadata["dropped"], metadata["cut"], metadata["num_examples"]) == ((1,), (), 2)
        declared = {"y": PerExample(torch.int64)}
        collate = VisionLanguageCollator(processor, **options, chat=dropping, fields=declared)
        with pytest.raises(DataError, match="example 2: y is 'bad'"):
            collate([long | {"y": 1}, short | {"y": 1}, short | {"y": "bad"}])
        with pytest.raises(DataError, match=r"the batch is empty \(0 examples\)"):
            collate([])
    packing = PackingOptions(limit, overflow="drop")
    collate = VisionLanguageCollator(processor, packing=packing)
    assert collate([long, short]).metadata["dropped"] == (0,)
    with pytest.raises(
        ValueError, match="overflow='drop' is for packed rows; pass max_tokens, too"
    ):
        VisionLanguageCollator(processor, overflow="drop")
    for name, value in (("train_on", "each"), ("labels", True), ("pixels", False)):
        with pytest.raises(ValueError, match=f"{name}={value!r} is not for this collator"):
            VisionLanguageCollator(processor, chat=ChatOptions(**{name: value}))
    windows = ChatOptions(max_length=limit, overflow="windows")
    with pytest.raises(ValueError, match="overflow='windows' is for text, whose segments can"):
        VisionLanguageCollator(processor, chat=windows)


def test_a_batch_says_what_came_from_which_source() -> None:
    processor = FAMILIES["internvl"].processor()
    short, long = {"messages": chat("x", "y")}, {"messages": chat("x" * 90, "y")}
    mixture = Mixture([[short] * 3, [long] * 2], names=["short", "long"])
    lengths = VisionLanguageCollator(processor).sizes([short, long]).lengths.tolist()
    dropping = ChatOptions(max_length=lengths[0], overflow="drop")
    for options, num_long in (({}, 2), ({"max_tokens": 400}, 2), ({"chat": dropping}, 0)):
        collate = VisionLanguageCollator(processor, **options)
        metadata = collate(mixture.__getitems__([4, 0, 3])).metadata
        assert metadata["source_examples"] == {"short": 1, "long": num_long}
        tokens = {"short": lengths[0], "long": num_long * lengths[1]}
        assert metadata["source_tokens"] == tokens


def test_a_patch_budget_without_a_token_budget_is_refused() -> None:
    processor = QWEN.processor()
    with pytest.raises(ValueError, match=r"max_patches=4 is for packed rows; pass max_tokens, too"):
        VisionLanguageCollator(processor, max_patches=4)
    collate = VisionLanguageCollator(processor, max_tokens=64, max_patches=16)
    packing = collate.collator.packing
    assert (packing.max_tokens, packing.max_patches) == (64, 16)
