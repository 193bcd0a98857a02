"""Patches of still images: one of the equal frames is stored, and the field has all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import FUZZ
from torch_collate_kit import PaddedCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision import VisionLayout

FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda pixels: pixels,
    "columns first": np.asfortranarray,
    "backwards": lambda pixels: np.ascontiguousarray(pixels[::-1])[::-1],
    "other byte order": lambda pixels: pixels.astype(">f4"),
    "float64": lambda pixels: pixels.astype(np.float64),
    "every other patch": lambda pixels: np.repeat(pixels, 2, axis=0)[::2],
}


def layout(shape: tuple[int, int, int], dtype: str = "float32") -> VisionLayout:
    return VisionLayout(
        "qwen2_vl", image_token_id=9, merge_size=1, patch_shape=shape, pixel_dtype=dtype
    )


def still(rng: np.random.Generator, patches: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Patches [P, channels * frames * size] with equal frames."""
    channels, frames, size = shape
    one = rng.standard_normal((patches, channels, 1, size)).astype(np.float32)
    return one.repeat(frames, axis=2).reshape(patches, -1)


def collated(pixels: list[np.ndarray], vision: VisionLayout) -> Batch:
    """Each is one image, one patch high."""
    return PaddedCollator(0, vision=vision)(
        [
            {
                "input_ids": [9] * len(of_one) + [70],
                "pixel_values": of_one,
                "image_grid_thw": [[1, 1, len(of_one)]],
            }
            for of_one in pixels
        ]
    )


@FUZZ
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([1, 2, 127, 128, 129, 256, 300]), min_size=1, max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_frames(
    seed: int, counts: list[int], shape: tuple[int, int, int], form: str, dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    pixels = [still(rng, count, shape) for count in counts]
    batch = collated([FORMS[form](of_one) for of_one in pixels], layout(shape, dtype))
    expected = torch.cat([torch.from_numpy(of_one) for of_one in pixels]).to(getattr(torch, dtype))
    field, column = batch["pixel_values"].values, batch.column("pixel_values")
    assert field.dtype == column.dtype == expected.dtype
    assert torch.equal(field, expected)
    first = expected.view(-1, *shape)[:, :, 0]
    assert torch.equal(column, first.reshape(len(expected), -1))


@pytest.mark.parametrize("patch", [0, 127, 128, 299])
@pytest.mark.parametrize("value", [7.0, float("nan")])
@pytest.mark.parametrize("place", [1, 2, 21, 23])
def test_frames_that_differ(patch: int, value: float, place: int) -> None:
    """In any patch, channel and frame: videos are refused, and numbers that are not finite."""
    shape, rng = (2, 3, 4), np.random.default_rng(0)
    pixels = [still(rng, 300, shape) for _ in range(2)]
    pixels[1][patch, place] = value
    collated(pixels[:1], layout(shape))
    message = "example 1: the frames of a patch of pixel_values differ, so it is no still image"
    with pytest.raises(DataError, match=message):
        collated(pixels, layout(shape))
