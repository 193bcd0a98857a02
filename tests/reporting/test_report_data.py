"""What a report takes as data, and its plots against its figures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from tests.test_batch_drawing import check_a_plot, plots
from torch_collate_kit import (
    DataError,
    PaddedCollator,
    ParallelLayout,
    TokenizedDataset,
    packing_report,
)
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reporting import PackingReport
from torch_collate_kit.vision import VisionLayout

__all__ = ["plots"]  # a fixture

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
    data = Dataset.from_dict({"input_ids": IDS, "text": ["a", "b", "c"]})
    assert lengths_of(data) == [3, 1, 2]
    assert lengths_of(data.select([2, 0]), 2) == [2, 3]


def test_padded_rows_of_a_dataset_and_of_a_table():
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1]}] * 3
    padded = [*rows, {"input_ids": [5, 0], "attention_mask": [1, 0]}]
    for made in (Dataset.from_list, pa.Table.from_pylist, TokenizedDataset):
        assert lengths_of(made(rows)) == [2, 2, 2]
        with pytest.raises(DataError, match="example 3: attention_mask contains a 0"):
            packing_report(made(padded))
    left = [*rows[:1], {"input_ids": [0, 5], "attention_mask": [0, 1]}, *rows]
    with pytest.raises(DataError, match="example 1: attention_mask contains a 0"):
        packing_report(TokenizedDataset(left))
    shuffled = Dataset.from_list(padded).select([3, 0])
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
        ([3, 0], DataError, "example 1 has length 0"),
        ([[3], [1]], ValueError, r"lengths must be 1-D, got shape \(2, 1\)"),
        ([*EXAMPLES, {"messages": []}], DataError, r"example 3 has no input_ids, got \['messages'"),
        (
            Dataset.from_dict({"text": ["a"]}),
            DataError,
            r"no input_ids among the columns \['text'\]",
        ),
        ({"text": ["a"]}, DataError, r"no input_ids among the columns \['text'\]; tokenize first"),
        ({"input_ids": [5, 6]}, DataError, r"the tokens of one example; pass a list: \[example\]"),
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
        ([{"input_ids": "hello"}], DataError, "got str; tokenize it first, or drop the example"),
        ([*EXAMPLES, {"input_ids": None}], DataError, "example 3: input_ids .*got NoneType"),
        ([ROLLOUTS[0], EXAMPLES[0]], DataError, "example 1 has no prompt_ids, got .'input_ids"),
        ({"input_ids": [None, [5]]}, DataError, "example 0: input_ids .*got NoneType"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        packing_report(data)


LENGTHS = [5, 3, 9, 2, 12, 7, 7, 1]
NAMES = ("padding", "balance", "lengths")
STRATEGIES = ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential")


def report(lengths: Any = LENGTHS, **options: Any) -> PackingReport:
    return packing_report(lengths, [8, 16], show=False, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_explains_itself(name: str) -> None:
    check_a_plot(lambda **options: report().plot(name, **options))
    read = PackingReport(json.loads(json.dumps(report())))
    assert read.plot(name).get_title() == report().plot(name).get_title()


@pytest.mark.parametrize("lengths", [LENGTHS, [7], [1, 1, 500, 40, 40, 3], [*range(1, 300)]])
def test_shares_of_examples_and_tokens(lengths: list[int]) -> None:
    ax = report(lengths).plot("lengths")
    steps = {step.get_label(): step.get_data() for step in ax.patches}
    for name, weights in (("examples", [1] * len(lengths)), ("tokens", lengths)):
        edges = steps[name].edges
        expected = np.zeros(len(edges) - 1)
        for length, weight in zip(lengths, weights, strict=True):
            [inside] = np.flatnonzero((edges[:-1] < length) & (length < edges[1:]))
            expected[inside] += weight
        assert steps[name].values.tolist() == pytest.approx(100 * expected / sum(weights))
    assert ax.get_xscale() == ("log" if max(lengths) > 20 * min(lengths) else "linear")


def heights(ax: Any) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}


def test_bars_are_the_padding_of_the_candidates() -> None:
    found = report(strategies=STRATEGIES)
    ax = found.plot()
    assert [*heights(ax)] == ["padded", *STRATEGIES]
    for strategy, bars in heights(ax).items():
        candidates = [c for c in found["candidates"] if c["strategy"] == strategy]
        assert bars == pytest.approx([100 * c["padding"] for c in candidates])
    middles = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in ax.containers]
    assert np.mean(middles, axis=0).tolist() == pytest.approx(ax.get_xticks().tolist())
    assert [t.get_text() for t in ax.get_xticklabels()] == ["8\n2 dropped", "16 *"]
    assert len({bars[0].get_hatch() for bars in ax.containers}) == len(ax.containers)
    assert ax.get_title() in repr(found).splitlines()


def test_balance_of_the_layouts() -> None:
    found = report(parallel=ParallelLayout(dp=3), strategies=["sequential", "balanced"])
    ax, limit = found.plot("balance"), found["recommended"]["max_tokens"]
    candidates = [c for c in found["candidates"] if c["max_tokens"] == limit]
    for name in ("tokens", "cost"):
        over = [100 * (c[f"{name}_max_over_mean"] - 1) for c in candidates]
        assert heights(ax)[name] == pytest.approx(over)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["padded", "sequential", "balanced"]
    costs = heights(ax)["cost"]
    best = [c["strategy"] for c in candidates].index(found["recommended"]["strategy"])
    expected = f"heaviest of 3 ranks: cost {costs[0]:+.1f}% padded, {costs[best]:+.1f}% packed"
    assert (best != 0, costs[0] != costs[best], ax.get_title()) == (True, True, expected)
