"""What a report takes as data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_collate_kit import (
    DataError,
    PaddedCollator,
    ParallelLayout,
    TokenizedDataset,
    packing_report,
)
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

IDS = [[5, 6, 7], [8], [9, 4]]
EXAMPLES = [{"input_ids": ids, "loss_mask": [0] * len(ids)} for ids in IDS]
ROLLOUTS = [
    {"prompt_ids": [1, 2], "response_ids": [3]},
    {"prompt_ids": [4], "response_ids": []},
    {"prompt_ids": [5], "response_ids": [6]},
]


def lengths_of(data, count=3):
    """The lengths in their order: padded alone, one on each rank."""
    ranks = {"parallel": ParallelLayout(dp=count), "padded_batch_size": 1}
    report = packing_report(data, 100, **ranks, show=False)
    return report["candidates"][0]["tokens_per_rank"]


@pytest.mark.parametrize(
    "data",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], dtype=np.uint16),
        torch.tensor([3, 1, 2]),
        EXAMPLES,
        tuple(EXAMPLES),
        ROLLOUTS,
        {"input_ids": IDS},
        {"input_ids": Ragged.from_rows(IDS), "loss_mask": None},
        {key: [rollout[key] for rollout in ROLLOUTS] for key in ROLLOUTS[0]},
        Ragged.from_rows([[2, 1], [1], [1, 1]]),  # of segments, as `pack` reads it
        TokenizedDataset(EXAMPLES),
        [{"input_ids": np.array(ids)} for ids in IDS],
    ],
    ids=lambda data: type(data).__name__,
)
def test_lengths_of(data):
    assert lengths_of(data) == [3, 1, 2]


def test_lengths_of_a_dataset_in_its_order():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": IDS, "text": ["a", "b", "c"]})
    assert lengths_of(data) == [3, 1, 2]
    assert lengths_of(data.select([2, 0]), 2) == [2, 3]


def test_padded_rows_of_a_dataset_and_of_a_table():
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1]}] * 3
    padded = [*rows, {"input_ids": [5, 0], "attention_mask": [1, 0]}]
    for made in (datasets.Dataset.from_list, pa.Table.from_pylist, TokenizedDataset):
        assert lengths_of(made(rows)) == [2, 2, 2]
        with pytest.raises(DataError, match="example 3: attention_mask contains a 0"):
            packing_report(made(padded))
    left = [*rows[:1], {"input_ids": [0, 5], "attention_mask": [0, 1]}, *rows]
    with pytest.raises(DataError, match="example 1: attention_mask contains a 0"):
        packing_report(TokenizedDataset(left))
    shuffled = datasets.Dataset.from_list(padded).select([3, 0])
    with pytest.raises(DataError, match="example 0: attention_mask contains a 0"):
        packing_report(shuffled)


@pytest.fixture
def images() -> TokenizedDataset:
    """Two examples with an image of 4 and of 16 patches, and one without."""
    qwen = VisionLayout("qwen3_vl", image_token_id=9, merge_size=2)
    rows = [
        {
            "input_ids": [9] * (side * side // 4) + [5],
            "pixel_values": np.zeros((side * side, 1176), dtype=np.float32),
            "image_grid_thw": np.array([[1, side, side]]),
        }
        for side in (2, 4)
    ]
    none = {
        "pixel_values": np.zeros((0, 1176), np.float32),
        "image_grid_thw": np.zeros((0, 3), int),
    }
    return TokenizedDataset([*rows, {"input_ids": [5], **none}], train_all=True, vision=qwen)


def test_a_dataset_with_images_has_its_patches(images):
    assert (lengths_of(images), images.patches) == ([2, 5, 1], [[4], [16], []])
    limited = packing_report(images, 8, max_patches=8, show=False)
    assert [c["num_dropped"] for c in limited["candidates"]] == [1, 1, 1, 1]  # that of 16 patches
    rows = [packing_report(images, 8, max_patches=n, show=False) for n in (16, 20)]
    assert [report["candidates"][1]["num_rows"] for report in rows] == [2, 1]


def test_rows_without_an_image_keep_room_for_a_dummy_image(images):
    """The model's smallest one, which only a dataset with ``vision`` knows."""
    with_images = packing_report(images, 6, show=False)
    lengths = packing_report(images.lengths, 6, patches=images.patches, show=False)
    assert with_images["options"]["dummy_image_tokens"] == 1
    assert lengths["options"]["dummy_image_tokens"] == 0


def test_patches_that_are_given_replace_those_of_the_dataset(images):
    report = packing_report(images, 8, patches=[1, 1, 1], max_patches=8, show=False)
    assert report["candidates"][1]["num_dropped"] == 0


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], DataError, r"there are no examples \(0 lengths\)"),
        (iter([3]), TypeError, "data is a list_iterator; pass lengths, or a list of examples"),
        (b"abc", TypeError, "data is a bytes; pass"),
        ([3, 0], DataError, "example 1 has length 0"),
        ([[3], [1]], ValueError, r"lengths must be 1-D, got shape \(2, 1\)"),
        ([*EXAMPLES, {"messages": []}], DataError, r"example 3 has no input_ids, got \['messages'"),
        ([*EXAMPLES, 3], DataError, "example 3 has no input_ids, got int"),
        ({"text": ["a"]}, DataError, r"no input_ids among the columns \['text'\]; tokenize first"),
        ({"input_ids": [5, 6]}, DataError, r"the tokens of one example; pass a list: \[example\]"),
        ({"input_ids": []}, DataError, "no examples"),
        ([{"input_ids": []}], DataError, "example 0 has length 0"),
        ({"input_ids": IDS, "labels": IDS[:2]}, DataError, "column labels has 2 rows, input_ids h"),
        ({"prompt_ids": IDS, "response_ids": IDS[:2]}, DataError, "column response_ids has 2 rows"),
        (PaddedCollator(0)(EXAMPLES), TypeError, "data is a Batch, .*; pass the examples that the"),
        (
            [*EXAMPLES, {"input_ids": [5, 0], "attention_mask": [1, 0]}],
            DataError,
            "example 3: attention_mask contains a 0.*tokenize without padding",
        ),
        (
            {"input_ids": torch.ones(2, 2), "attention_mask": torch.tensor([[1, 1], [1, 0]])},
            DataError,
            "example 1: attention_mask contains a 0",
        ),
        ({"input_ids": "hello"}, DataError, "there are no examples"),
        ([{"input_ids": "hello"}], DataError, "got str; tokenize it first, or drop the example"),
        ([*EXAMPLES, {"input_ids": None}], DataError, "example 3: input_ids .*got NoneType"),
        ([{"input_ids": torch.tensor(5)}], DataError, "example 0: input_ids .*got Tensor"),
        ([{"input_ids": None}], DataError, "example 0: input_ids .*got NoneType"),
        ([{"input_ids": 5}], DataError, "example 0: input_ids must be token ids.*got int"),
        ([ROLLOUTS[0], EXAMPLES[0]], DataError, "example 1 has no prompt_ids, got .'input_ids"),
        ({"input_ids": [None, [5]]}, DataError, "example 0: input_ids .*got NoneType"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        packing_report(data)


def test_a_dataset_without_tokens_says_so():
    datasets = pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"no input_ids among the columns \['text'\]; tokenize"):
        packing_report(datasets.Dataset.from_dict({"text": ["a"]}))
