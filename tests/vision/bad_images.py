"""The table of bad images: an example of which family, and what is said of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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


GIVE_ALL = "give all that the processor returned, or none of them without an image"
TOGETHER = "give the ids and the image fields that the processor returned together, uncut"
PATCH_SHAPE = "give floats [patches, patch size]"
TILE_SHAPE = "give floats [tiles, 3, height, width]"
IMAGE_SHAPE = "give floats [images, 3, height, width]"
GRID_SHAPE = "give integers [images, 3], or of sizes [images, 2]"

# family, the example, what is said of it
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "placeholders without fields": (
        "qwen2_vl",
        example_of(4),
        f"has 4 image placeholders (token 9) in its ids, and no image; {TOGETHER}",
    ),
    "placeholders and None": (
        "gemma3",
        example_of(3, pixel_values=None),
        f"has 3 image placeholders (token 9) in its ids, and no image; {TOGETHER}",
    ),
    "fields without placeholders": (
        "qwen2_vl",
        {**QWEN, **TEXT},
        f"has 0 image placeholders (token 9) in its ids, and images that take 4; {TOGETHER}",
    ),
    "one placeholder too few": (
        "internvl",
        {**INTERNVL, **example_of(3)},
        "has 3 image placeholders (token 9) in its ids, and images that take 4",
    ),
    "one placeholder too many": (
        "llava_next",
        {**LLAVA, **example_of(25)},
        "has 25 image placeholders (token 9) in its ids, and images that take 24",
    ),
    "one image of two left out": (
        "gemma3",
        {**GEMMA, "pixel_values": TILES[:1]},
        "has 6 image placeholders (token 9) in its ids, and images that take 3",
    ),
    "a grid that is missing": (
        "qwen2_vl",
        without(QWEN, "image_grid_thw"),
        f"has pixel_values and no image_grid_thw; {GIVE_ALL}",
    ),
    "pixels that are missing": (
        "qwen2_vl",
        {**QWEN, "pixel_values": None},
        f"has image_grid_thw and no pixel_values; {GIVE_ALL}",
    ),
    "pixels that are empty": (
        "qwen2_vl",
        {**QWEN, "pixel_values": np.zeros((0, 6))},
        f"has image_grid_thw and no pixel_values; {GIVE_ALL}",
    ),
    "sizes that are missing": (
        "llava_next",
        without(LLAVA, "image_sizes"),
        f"has pixel_values and no image_sizes; {GIVE_ALL}",
    ),
    "a number of images that is missing": (
        "llava_onevision",
        without(ONEVISION, "batch_num_images"),
        f"has pixel_values, image_sizes and no batch_num_images; {GIVE_ALL}",
    ),
    "two fields that are missing": (
        "llava_onevision",
        example_of(10, pixel_values=ONEVISION["pixel_values"]),
        f"has pixel_values and no image_sizes, batch_num_images; {GIVE_ALL}",
    ),
    "a mask without pixels": (
        "idefics3",
        without(IDEFICS, "pixel_values"),
        f"has pixel_attention_mask and no pixel_values; {GIVE_ALL}",
    ),
    "a grid of more patches": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": [[1, 4, 6]]},
        "pixel_values has 16 patches, image_grid_thw of shape (1, 3) describes 24; give what the "
        "processor returned",
    ),
    "a grid that is no multiple of merge_size": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": [[1, 16, 1]]},
        "image_grid_thw has [[1, 16, 1]], whose height or width is no multiple of merge_size=2; "
        "use the processor of the model",
    ),
    "a grid with a 0": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": [[1, 4, 4], [1, 0, 4]]},
        "image_grid_thw has the size 0, and sizes are 1 or more; give what the processor returned",
    ),
    "a negative grid": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": [[1, -4, -4]]},
        "image_grid_thw has the size -4, and sizes are 1 or more",
    ),
    "a grid of two numbers": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": [[4, 4]]},
        "image_grid_thw has shape (1, 2); give [images, 3], as the processor returned it",
    ),
    "a flat grid": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": [1, 4, 4]},
        f"image_grid_thw has shape (3,) and dtype int64; {GRID_SHAPE}",
    ),
    "a float grid": (
        "qwen2_vl",
        {**QWEN, "image_grid_thw": np.array([[1.0, 4.0, 4.0]])},
        f"image_grid_thw has shape (1, 3) and dtype float64; {GRID_SHAPE}",
    ),
    "patches of another size": (
        "qwen2_vl",
        {**QWEN, "pixel_values": np.zeros((16, 8))},
        "pixel_values has patches of 8 numbers, the model's have 6; use the processor of the model",
    ),
    "frames that differ": (
        "qwen2_vl",
        {**QWEN, "pixel_values": differing()},
        "the frames of a patch of pixel_values differ, so it is no still image (or holds NaN); "
        "videos are not supported, give images",
    ),
    "patches that hold NaN": (
        "qwen2_vl",
        {**QWEN, "pixel_values": with_nan()},
        "the frames of a patch of pixel_values differ, so it is no still image (or holds NaN)",
    ),
    "a video": (
        "qwen2_vl",
        {**QWEN, "pixel_values_videos": PATCHES, "video_grid_thw": GRID},
        "has pixel_values_videos, which is no image field of qwen2_vl models (pixel_values, "
        "image_grid_thw); videos are not supported, give images",
    ),
    "the processor of another model": (
        "qwen2_vl",
        {**QWEN, "image_sizes": [[4, 4]]},
        "has image_sizes, which is no image field of qwen2_vl models (pixel_values, "
        "image_grid_thw); use the processor of the model",
    ),
    "uint8 patches": (
        "qwen2_vl",
        {**QWEN, "pixel_values": PATCHES.astype(np.uint8)},
        f"pixel_values has shape (16, 6) and dtype uint8; {PATCH_SHAPE}",
    ),
    "uint8 images": (
        "gemma3",
        {**GEMMA, "pixel_values": torch.zeros(2, 3, 2, 2, dtype=torch.uint8)},
        f"pixel_values has shape (2, 3, 2, 2) and dtype uint8; {IMAGE_SHAPE}",
    ),
    "complex tiles": (
        "internvl",
        {**INTERNVL, "pixel_values": TILES.astype(complex)},
        f"pixel_values has shape (2, 3, 2, 2) and dtype complex128; {TILE_SHAPE}",
    ),
    "one tile without its dimension": (
        "internvl",
        {**INTERNVL, "pixel_values": TILES[0]},
        f"pixel_values has shape (3, 2, 2) and dtype float64; {TILE_SHAPE}",
    ),
    "images with a batch dimension": (
        "gemma3",
        {**GEMMA, "pixel_values": TILES[None]},
        f"pixel_values has shape (1, 2, 3, 2, 2) and dtype float64; {IMAGE_SHAPE}",
    ),
    "pixels that are a number": (
        "gemma3",
        {**GEMMA, "pixel_values": 1.5},
        f"pixel_values is float; {IMAGE_SHAPE}",
    ),
    "pixels that are an array of one number": (
        "gemma3",
        {**GEMMA, "pixel_values": np.array(1.5)},
        f"pixel_values has shape () and dtype float64; {IMAGE_SHAPE}",
    ),
    "pixels that are a tensor of one number": (
        "gemma3",
        {**GEMMA, "pixel_values": torch.tensor(1.5)},
        f"pixel_values has shape () and dtype float32; {IMAGE_SHAPE}",
    ),
    "pixels that are a string": (
        "gemma3",
        {**GEMMA, "pixel_values": "image.png"},
        f"pixel_values is str; {IMAGE_SHAPE}",
    ),
    "uneven lists": (
        "gemma3",
        {**GEMMA, "pixel_values": [[1.0], [1.0, 2.0]]},
        f"pixel_values is a list whose parts differ in shape or are no numbers; {IMAGE_SHAPE}",
    ),
    "a masked array": (
        "gemma3",
        {**GEMMA, "pixel_values": np.ma.masked_array(TILES, TILES > 5)},
        "pixel_values is a masked array, whose mask would be lost; give .filled(value)",
    ),
    "pixels on the meta device": (
        "gemma3",
        {**GEMMA, "pixel_values": torch.zeros(2, 3, 2, 2, device="meta")},
        "pixel_values is a tensor of layout torch.strided on device meta; give a dense one that "
        "holds its values",
    ),
    "more images than sizes": (
        "llava_next",
        {**LLAVA, "pixel_values": np.ones((3, 3, 3, 2, 2))},
        "pixel_values has 3 images, image_sizes has 2; give what the processor returned",
    ),
    "fewer images than sizes": (
        "llava_next",
        {**LLAVA, "pixel_values": np.ones((1, 3, 3, 2, 2))},
        "pixel_values has 1 images, image_sizes has 2; give what the processor returned",
    ),
    "fewer tiles than sizes describe": (
        "llava_next",
        {**LLAVA, "pixel_values": np.ones((2, 2, 3, 2, 2))},
        "pixel_values has 4 tiles, the sizes of its images describe 5",
    ),
    "flat tiles of another number": (
        "llava_next",
        {**LLAVA, "pixel_values": np.ones((6, 3, 2, 2))},
        "pixel_values has 6 tiles, the sizes of its images describe 5",
    ),
    "a size of 0": (
        "llava_next",
        {**LLAVA, "image_sizes": [[2, 2], [0, 4]]},
        "image_sizes is [[2, 2], [0, 4]]; give height and width of each image, as the processor "
        "returned them",
    ),
    "sizes of three numbers": (
        "llava_next",
        {**LLAVA, "image_sizes": [[2, 2, 3], [2, 4, 3]]},
        "image_sizes is [[2, 2, 3], [2, 4, 3]]; give height and width of each image",
    ),
    "another number of images": (
        "llava_onevision",
        {**ONEVISION, "batch_num_images": np.array([3])},
        "batch_num_images is [3], but the example has 2 images; give what the processor returned "
        "for it alone",
    ),
    "the number of images of several examples": (
        "llava_onevision",
        {**ONEVISION, "batch_num_images": np.array([2, 1])},
        "batch_num_images is [2, 1], but the example has 2 images",
    ),
    "a number of images without its dimension": (
        "llava_onevision",
        {**ONEVISION, "batch_num_images": 2},
        "batch_num_images is int; give integers [1], how many images the example has",
    ),
    "a mask of other tiles": (
        "idefics3",
        {**IDEFICS, "pixel_attention_mask": MASK[:1]},
        "pixel_attention_mask has shape (1, 2, 2), pixel_values has (2, 3, 2, 2); give what the "
        "processor returned",
    ),
    "a padded mask of other tiles": (
        "idefics3",
        {**IDEFICS, "pixel_values": TILES[None], "pixel_attention_mask": MASK[None, :1]},
        "pixel_attention_mask has shape (1, 1, 2, 2), pixel_values has (1, 2, 3, 2, 2)",
    ),
    "a flat mask of padded tiles": (
        "idefics3",
        {**IDEFICS, "pixel_values": TILES[None]},
        "pixel_attention_mask has shape (2, 2, 2), pixel_values has (1, 2, 3, 2, 2)",
    ),
    "a mask of another size": (
        "idefics3",
        {**IDEFICS, "pixel_attention_mask": np.ones((2, 3, 3), np.int64)},
        "pixel_attention_mask has shape (2, 3, 3), pixel_values has (2, 3, 2, 2)",
    ),
}
