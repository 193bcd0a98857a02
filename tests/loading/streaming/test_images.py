"""Streams of examples with images: rows within both budgets, exact states, what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import datasets
from tests.packing.oracle_packing import needed_dummies
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import PackedIterableDataset, TokenizedDataset
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.testing import assert_exact_resume, batch_digest
from torch_collate_kit.vision import VisionLayout

RNG = np.random.default_rng(5)
IMAGE = 7  # the placeholder
QWEN = VisionLayout("qwen2_vl", image_token_id=IMAGE, merge_size=2, patch_shape=(1, 1, 1))
SETTINGS: dict[str, Any] = {
    "tokenizer": 0,
    "vision": QWEN,
    "max_tokens": 24,
    "max_patches": 40,
    "buffer_size": 12,
    "rows": 2,
    "parallel": ParallelLayout(dp=2),
    "dummy_image_tokens": 2,
    "normalize_loss": False,
}


def with_images(ids: list[int], grids: list[list[int]]) -> dict[str, Any]:
    """The placeholders follow the first token."""
    patches = sum(t * h * w for t, h, w in grids)
    ids = [ids[0], *[IMAGE] * (patches // 4), *ids[1:]]
    images = {"image_grid_thw": np.array(grids), "pixel_values": np.ones((patches, 1))}
    return {"input_ids": ids, "labels": [-100, *ids[1:]], **images}


def make_examples(count: int = 60) -> list[dict[str, Any]]:
    """Every third one without an image, of these every second one without the key."""
    examples: list[dict[str, Any]] = []
    for i in range(count):
        ids = [1000 * (i + 1) + j for j in range(int(RNG.integers(1, 15)))]
        grids = [[1, 2, 2 * int(RNG.integers(1, 5))] for _ in range(int(RNG.integers(1, 3)))]
        if i % 3:
            examples.append(with_images(ids, grids))
        else:
            none: Any = {"image_grid_thw": None, "pixel_values": None} if i % 6 else {}
            examples.append({"input_ids": ids, "labels": [-100, *ids[1:]], **none})
    return examples


EXAMPLES = make_examples()


def patches_of(example: Any) -> list[int]:
    grids = example.get("image_grid_thw")
    return [] if grids is None else [t * h * w for t, h, w in grids]


def plans_of(stream: PackedIterableDataset) -> list[tuple[Any, list[dict[str, Any]]]]:
    """The plan of every batch, and its examples."""
    found: list[tuple[Any, list[dict[str, Any]]]] = []

    class Spy(PackedCollator):
        def __call__(self, planned: Any) -> Any:
            found.append((planned.plan, list(planned.examples)))
            return super().__call__(planned)

    stream.collate.__class__ = Spy
    list(stream)
    return found


@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "balanced", "sequential"])
def test_rows_are_within_both_budgets(strategy: str) -> None:
    plans = plans_of(packed_stream(EXAMPLES, strategy=strategy, **SETTINGS))
    read = []
    for plan, examples in plans:
        patches = [sum(patches_of(example)) for example in examples]
        read += [example["input_ids"][0] // 1000 - 1 for example in examples]
        assert plan.num_rows == 2
        assert plan.atoms.patches.tolist() == [patches[i] for i in plan.example_indices]
        assert plan.row_patches.max() <= 40
        assert (plan.row_cells <= np.where(plan.row_patches > 0, 24, 22)).all()
        assert plan.needs_dummy_image.tolist() == needed_dummies(plan.bins, patches, 2)
        assert plan.width <= 24
        costs = [sum(n * (5266 + n) for n in patches_of(examples[i])) for i in plan.example_indices]
        assert plan.atoms.vision_costs.tolist() == costs
    assert sorted(read) == list(range(60))


def test_columns_with_images_are_read_by_example() -> None:
    none = {"pixel_values": None, "image_grid_thw": None}  # Dataset.from_list asks the first row
    rows = [
        {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in (none | example).items()}
        for example in EXAMPLES
    ]
    expected = [batch_digest(batch) for batch in packed_stream(EXAMPLES, **SETTINGS)]
    for source in (datasets.Dataset.from_list(rows), rows, TokenizedDataset(EXAMPLES)):
        stream = packed_stream(source, **SETTINGS)
        assert [batch_digest(batch) for batch in stream] == expected


@pytest.mark.parametrize("overflow", ["raise", "drop", "split"])
def test_resumes_exactly_after_every_batch(overflow: str) -> None:
    long = [{"input_ids": list(range(10, 69)), "labels": [-100] * 59}] * (overflow != "raise")
    examples = EXAMPLES[:20] + long + EXAMPLES[20:]
    settings = SETTINGS | {"overflow": overflow}
    num_steps = len(list(packed_stream(examples, **settings))) + 1
    assert_exact_resume(lambda: packed_stream(examples, **settings), num_steps=num_steps)
    state = packed_stream(examples, **settings).state_dict()
    assert state["max_patches"] == 40
    other = packed_stream(examples, **settings | {"max_patches": 41})
    with pytest.raises(StateError, match=r"^the state is of max_patches=40, the dataset has max_p"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("overflow", "message"),
    [
        ("raise", "has 44 patches of images, more than the max_patches=40 of a row; raise max_p"),
        ("split", "has 44 patches of images, .*; an example with images is never split; raise m"),
        ("truncate", "has 44 patches of images, .*; an image is never cut, and lengths alone"),
    ],
)
def test_an_image_that_does_not_fit_is_named_by_its_position(overflow: str, message: str) -> None:
    wrong = with_images([1, 2], [[1, 2, 22]])
    stream = packed_stream([*EXAMPLES[:7], wrong], **SETTINGS | {"overflow": overflow})
    with pytest.raises(DataError, match=f"^example 7 of the stream {message}"):
        list(stream)


@pytest.mark.parametrize("grids", [[[1, 2]], [1, 2, 3], [[1.5, 2, 2]], [[[1, 2, 3]]]])
def test_wrong_grids_are_named_by_their_position(grids: Any) -> None:
    wrong = {**with_images([1, 2], [[1, 2, 2]]), "image_grid_thw": grids}
    with pytest.raises(DataError, match=r"^example 1 of the stream: image_grid_thw has shape "):
        list(packed_stream([EXAMPLES[0], wrong], **SETTINGS))
