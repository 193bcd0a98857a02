"""Bad images: every refusal with its message, which names the example and the way out."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_checks import frozen, same_value
from tests.vision.batches import examples_of, layout_of
from tests.vision.families import FAMILIES
from tests.vision.oracle_images import LAYOUTS
from torch_collate_kit import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision import VisionLayout

TEXT = {"input_ids": [70, 71], "labels": [70, 71]}


def example_of(count: int, **fields: Any) -> dict[str, Any]:
    """With that many placeholders."""
    ids = [70, *[9] * count, 71]
    return {"input_ids": ids, "labels": ids, **fields}


def frames(values: Any) -> np.ndarray:
    """Patches of two equal frames: 3 channels of one pixel."""
    return np.repeat(np.asarray(values, np.float32).reshape(-1, 3, 1, 1), 2, axis=2).reshape(-1, 6)


PATCHES = frames(np.arange(48))  # of 16 patches, 4 placeholders
GRID = np.array([[1, 4, 4]])
QWEN = example_of(4, pixel_values=PATCHES, image_grid_thw=GRID)
TILES = np.arange(24.0).reshape(2, 3, 2, 2)
INTERNVL = example_of(4, pixel_values=TILES)
GEMMA = example_of(6, pixel_values=TILES)
MASK = np.ones((2, 2, 2), np.int64)
IDEFICS = example_of(4, pixel_values=TILES, pixel_attention_mask=MASK)
TWO_SIZES = np.array([[2, 2], [2, 4]])
LLAVA = example_of(24, pixel_values=np.ones((2, 3, 3, 2, 2)), image_sizes=TWO_SIZES)
ONEVISION = example_of(
    10,
    pixel_values=np.ones((2, 1, 3, 2, 2)),
    image_sizes=TWO_SIZES,
    batch_num_images=np.array([2]),
)
GOOD = {
    "qwen2_vl": QWEN,
    "internvl": INTERNVL,
    "gemma3": GEMMA,
    "idefics3": IDEFICS,
    "llava_next": LLAVA,
    "llava_onevision": ONEVISION,
}


def without(example: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in example.items() if key != name}


def differing() -> np.ndarray:
    patches = PATCHES.copy()
    patches[3, 1] += 1
    return patches


def with_nan() -> np.ndarray:
    patches = PATCHES.copy()
    patches[3] = np.nan
    return patches


# family, the example, the beginning of the message after the name of the example
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_vl", example_of(4), "has 4 image placeholders (token 9) in its ids, and no image"),
    ("gemma3", example_of(3, pixel_values=None), "has 3 image placeholders (token 9) in its ids,"),
    ("qwen2_vl", {**QWEN, **TEXT}, "has 0 image placeholders (token 9) in its ids, and images"),
    ("qwen2_vl", without(QWEN, "image_grid_thw"),
     "has pixel_values and no image_grid_thw; give all that the processor returned, or none"),
    ("llava_onevision", without(ONEVISION, "batch_num_images"),
     "has pixel_values, image_sizes and no batch_num_images"),
    ("qwen2_vl", {**QWEN, "image_grid_thw": [[1, 4, 6]]},
     "pixel_values has 16 patches, image_grid_thw of shape (1, 3) describes 24"),
    ("qwen2_vl", {**QWEN, "image_grid_thw": [[1, 16, 1]]},
     "image_grid_thw has [[1, 16, 1]], whose height or width is no multiple of merge_size=2"),
    ("qwen2_vl", {**QWEN, "image_grid_thw": [[1, 4, 4], [1, 0, 4]]},
     "image_grid_thw has the size 0, and sizes are 1 or more; give what the processor returned"),
    ("qwen2_vl", {**QWEN, "image_grid_thw": [[4, 4]]},
     "image_grid_thw has shape (1, 2), not [images, 3]; give what the processor returned"),
    ("qwen2_vl", {**QWEN, "image_grid_thw": np.array([[1.0, 4.0, 4.0]])},
     "image_grid_thw has shape (1, 3) and dtype float64"),
    ("qwen2_vl", {**QWEN, "pixel_values": np.zeros((16, 8))},
     "pixel_values has patches of 8 numbers, the model's have 6"),
    ("qwen2_vl", {**QWEN, "pixel_values": differing()},
     "the frames of a patch of pixel_values differ, so it is no still image (or holds NaN)"),
    ("qwen2_vl", {**QWEN, "pixel_values": with_nan()},
     "the frames of a patch of pixel_values differ, so it is no still image (or holds NaN)"),
    ("qwen2_vl", {**QWEN, "pixel_values_videos": PATCHES, "video_grid_thw": GRID},
     "has pixel_values_videos, which is not an image field of qwen2_vl models (pixel_values,"),
    ("qwen2_vl", {**QWEN, "pixel_values": PATCHES.astype(np.uint8)},
     "pixel_values has shape (16, 6) and dtype uint8; give floats [patches, patch size]"),
    ("internvl", {**INTERNVL, "pixel_values": TILES[0]},
     "pixel_values has shape (3, 2, 2) and dtype float64"),
    ("gemma3", {**GEMMA, "pixel_values": TILES[None]},
     "pixel_values has shape (1, 2, 3, 2, 2) and dtype float64"),
    ("gemma3", {**GEMMA, "pixel_values": "image.png"},
     "pixel_values is str; give floats [images, 3, height, width]"),
    ("gemma3", {**GEMMA, "pixel_values": [[1.0], [1.0, 2.0]]},
     "pixel_values is a list whose parts differ in shape or are not numbers"),
    ("gemma3", {**GEMMA, "pixel_values": np.ma.masked_array(TILES, TILES > 5)},
     "pixel_values is a masked array, whose mask would be lost; give .filled(value)"),
    ("gemma3", {**GEMMA, "pixel_values": torch.zeros(2, 3, 2, 2, device="meta")},
     "pixel_values is a tensor of layout torch.strided on device meta"),
    ("llava_next", {**LLAVA, "pixel_values": np.ones((3, 3, 3, 2, 2))},
     "pixel_values has 3 images, image_sizes has 2; give what the processor returned"),
    ("llava_next", {**LLAVA, "pixel_values": np.ones((2, 2, 3, 2, 2))},
     "pixel_values has 4 tiles, the sizes of its images describe 5"),
    ("llava_next", {**LLAVA, "image_sizes": [[2, 2], [0, 4]]},
     "image_sizes is [[2, 2], [0, 4]]; give height and width of each image, as the processor"),
    ("llava_onevision", {**ONEVISION, "batch_num_images": np.array([3])},
     "batch_num_images is [3], but the example has 2 images"),
    ("idefics3", {**IDEFICS, "pixel_attention_mask": MASK[:1]},
     "pixel_attention_mask has shape (1, 2, 2), pixel_values has (2, 3, 2, 2)"),
    ("idefics3", {**IDEFICS, "pixel_values": TILES[None], "pixel_attention_mask": MASK[None, :1]},
     "pixel_attention_mask has shape (1, 1, 2, 2), pixel_values has (1, 2, 3, 2, 2)"),
]  # fmt: skip


def collators(layout: VisionLayout) -> list[Any]:
    return [PaddedCollator(0, vision=layout), PackedCollator(0, vision=layout, max_tokens=99)]


@pytest.mark.parametrize("family", list(GOOD))
def test_the_good_examples_are_good(family: str) -> None:
    for collate in collators(LAYOUTS[family]):
        assert len(collate([TEXT, GOOD[family]])["pixel_values"].values)


@pytest.mark.parametrize(("family", "example", "message"), BAD)
def test_a_bad_image_raises_and_changes_nothing(
    family: str, example: dict[str, Any], message: str
) -> None:
    examples = [TEXT, example]
    before = frozen(examples)
    for collate in collators(LAYOUTS[family]):
        with pytest.raises(DataError, match=f"^example 1:? .*{re.escape(message)}"):
            collate(examples)
    pixels = example.get("pixel_values")
    if not isinstance(pixels, torch.Tensor | np.ma.MaskedArray) and "NaN" not in message:
        assert same_value(examples, before)


@pytest.mark.parametrize(("family", "example", "message"), BAD)
def test_a_bad_image_of_a_rollout_raises_the_same(
    family: str, example: dict[str, Any], message: str
) -> None:
    def rollout(example: dict[str, Any]) -> dict[str, Any]:
        fields = {k: v for k, v in example.items() if k not in ("input_ids", "labels")}
        *prompt, last = example["input_ids"]
        response = {"response_ids": [last], "loss_mask": [1], "rewards": 1.0}
        return {"prompt_ids": prompt, **response, **fields}

    with pytest.raises(DataError, match=f"^example 1:? .*{re.escape(message)}"):
        RolloutCollator(0, vision=LAYOUTS[family])([rollout(TEXT), rollout(example)])


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava_next", "internvl"])
def test_sizes_that_differ_between_examples(family: str) -> None:
    """Only tiles of one size can be joined."""
    small = {**GOOD[family], "pixel_values": GOOD[family]["pixel_values"][..., :1]}
    names = re.escape(f"{small['pixel_values'].shape}, example 0 has")
    with pytest.raises(DataError, match=f"example 1: pixel_values has shape {names}"):
        PaddedCollator(0, vision=LAYOUTS[family])([GOOD[family], small])


def test_images_of_a_model_that_is_not_in_the_table() -> None:
    """They would be lost."""

    class Unknown:
        image_processor = SimpleNamespace()
        tokenizer = SimpleNamespace(pad_token_id=0)

    assert len(PaddedCollator(Unknown())([TEXT])) == 1
    message = "example 1 has pixel_values, which is not an image field of other models (none is "
    with pytest.raises(DataError, match=re.escape(message)):
        PaddedCollator(Unknown())([TEXT, GEMMA])


def test_token_types_of_paligemma_must_be_given() -> None:
    family, [example, *_] = FAMILIES["paligemma"], examples_of("paligemma")
    collate = PaddedCollator(family.processor())
    batch = collate([example])
    assert batch["token_type_ids"].tolist() == [example["token_type_ids"]]
    with pytest.raises(DataError, match=r"example 0 has no token_type_ids, which the model reads"):
        collate([without(example, "token_type_ids")])


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: VisionLayout("qwen", 9),
            ValueError,
            "'qwen' is unknown; known families are qwen2_vl, ",
        ),
        (lambda: VisionLayout("gemma3", 9, pixel_dtype="uint8"), ValueError, "got 'uint8'"),
        (lambda: VisionLayout("mllama", 9), ValueError, "mllama models are not supported: a tok"),
        (lambda: VisionLayout.of("gemma3"), TypeError, "a processor with an image_processor, got"),
        (lambda: PaddedCollator(0, vision="gemma3"), TypeError, "must be a VisionLayout, got str"),
    ],
)
def test_layouts_that_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("given", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_pixel_dtype_in_any_form(given: Any) -> None:
    assert layout_of(FAMILIES["gemma3"], pixel_dtype=given).pixel_dtype == "bfloat16"
