"""Images stay with their rows: taken out, joined, sharded, added, moved, pickled and sent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import assert_one_buffer, assert_same_batch, same_value
from tests.strategies import FUZZ
from tests.vision.batches import examples_of, padded
from tests.vision.families import FAMILIES
from tests.vision.oracle_images import LAYOUTS, DrawnExample, draw_example
from torch_collate_kit import PackedCollator, PaddedCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision import VisionLayout

seeds = st.integers(0, 2**32 - 1)
FAMILY_NAMES = sorted(LAYOUTS)


def drawn(rng: np.random.Generator, family: str, count: int, **options: Any) -> list[DrawnExample]:
    return [draw_example(rng, LAYOUTS[family], i, **options) for i in range(count)]


def collated(rng: np.random.Generator, family: str, kind: str) -> Batch:
    """With some rows of text alone; one shape of rows for all batches of a kind."""
    layout = LAYOUTS[family]
    examples = drawn(rng, family, int(rng.integers(2, 7)))
    examples.insert(1, draw_example(rng, layout, 50, max_images=0))
    given_ = [example.given for example in examples]
    if kind == "padded":
        return PaddedCollator(0, vision=layout, pad_to_multiple_of=128)(given_)
    collate = PackedCollator(0, vision=layout, max_tokens=128, fixed_width=True)
    return collate(given_)


def row_fields(batch: Batch, row: int) -> dict[str, Any]:
    """All of a row, its images with it."""
    return {name: batch[name][row] for name in batch}


def assert_rows(part: Batch, batch: Batch, rows: list[int]) -> None:
    """Row by row, and the same batch as if its fields had been picked one by one."""
    assert len(part) == len(rows)
    for i, row in enumerate(rows):
        assert same_value(row_fields(part, i), row_fields(batch, row)), (i, row)
    fields = list(batch.placement.vision.family.fields)
    for name in fields:  # and nothing is left over
        assert len(part.column(name)) == sum(len(batch[name][row]) for row in rows), name


@pytest.mark.parametrize("kind", ["padded", "packed"])
@FUZZ
@given(seeds, st.sampled_from(FAMILY_NAMES))
def test_rows_in_any_order_have_their_images(kind: str, seed: int, family: str) -> None:
    rng = np.random.default_rng(seed)
    batch = collated(rng, family, kind)
    count = len(batch)
    a, b = sorted(rng.integers(0, count + 1, 2).tolist())
    step = int(rng.integers(1, 4))
    assert_rows(batch[a:b], batch, list(range(a, b)))
    assert_rows(batch[a::step], batch, list(range(a, count, step)))
    chosen = rng.integers(0, count, int(rng.integers(1, 8))).tolist()
    assert_rows(batch.select(chosen), batch, chosen)
    assert_rows(batch[a:b][:1], batch, list(range(a, b))[:1])
    order = rng.permutation(count).tolist()
    parts = [batch.select([row]) for row in order]
    assert_rows(Batch.cat(parts), batch, order)
    loaded = pickle.loads(pickle.dumps(batch.select(chosen)))
    assert_rows(loaded, batch, chosen)
    assert_one_buffer(loaded)
    assert_rows(copy.deepcopy(batch), batch, [*range(count)])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_batches_with_and_without_images_are_joined(family: str) -> None:
    rng, layout = np.random.default_rng(0), LAYOUTS[family]
    one_shape: dict[str, Any] = {"max_tokens": 128, "fixed_width": True, "normalize_loss": False}
    collate = PackedCollator(0, vision=layout, **one_shape)
    examples = [draw_example(rng, layout, i, max_images=3) for i in range(6)]
    with_images = collate([example.given for example in examples])
    assert len(with_images.column("pixel_values"))
    without = collate([draw_example(rng, layout, i, max_images=0).given for i in range(3)])
    assert len(without["pixel_values"].values) == 0
    same = {key: with_images.metadata[key] for key in with_images.metadata}
    for parts in ([with_images, without], [without, with_images], [without, without]):
        joined = Batch.cat(parts, metadata=same)
        rows = [row_fields(part, i) for part in parts for i in range(len(part))]
        found = [row_fields(joined, i) for i in range(len(joined))]
        for one, other in zip(found, rows, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                if len(one[name]) or len(other[name]):
                    assert same_value(one[name], other[name]), name
        assert joined["pixel_values"].values.dtype == torch.float32
        assert_same_batch(pickle.loads(pickle.dumps(joined)), joined)


# --- bytes, devices, workers ---------------------------------------------------------------------


def image_bytes(batch: Batch) -> int:
    return batch.column("pixel_values").nbytes


def test_pixels_are_stored_once() -> None:
    """And of two equal frames one; the rest of a batch is small beside them."""
    for name, frames in (("qwen2_vl", 2), ("qwen3_vl", 2), ("gemma3", 1), ("llava_next", 1)):
        family, examples = FAMILIES[name], examples_of(name)
        batch = padded(family, examples)
        inputs = batch.model_inputs("sdpa")
        pixels = inputs["pixel_values"]
        assert image_bytes(batch) == pixels.numel() * 4 // frames
        given_ = sum(e["pixel_values"].size for e in examples if "pixel_values" in e)
        assert pixels.numel() <= given_, "padding of tiles is stored"
        assert batch.nbytes < image_bytes(batch) + 20_000
        assert len(pickle.dumps(batch)) < image_bytes(batch) + 30_000


# --- Patches of still images: one of the equal frames is stored, and the field has all of them


FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda pixels: pixels,
    "columns first": np.asfortranarray,
    "backwards": lambda pixels: np.ascontiguousarray(pixels[::-1])[::-1],
    "other byte order": lambda pixels: pixels.astype(">f4"),
    "float64": lambda pixels: pixels.astype(np.float64),
    "every other patch": lambda pixels: np.repeat(pixels, 2, axis=0)[::2],
}


def frame_layout(shape: tuple[int, int, int], dtype: str = "float32") -> VisionLayout:
    return VisionLayout(
        "qwen2_vl", image_token_id=9, merge_size=1, patch_shape=shape, pixel_dtype=dtype
    )


def still(rng: np.random.Generator, patches: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Patches [P, channels * frames * size] with equal frames."""
    channels, frames, size = shape
    one = rng.standard_normal((patches, channels, 1, size)).astype(np.float32)
    return one.repeat(frames, axis=2).reshape(patches, -1)


def of_frames(pixels: list[np.ndarray], vision: VisionLayout) -> Batch:
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
    batch = of_frames([FORMS[form](of_one) for of_one in pixels], frame_layout(shape, dtype))
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
    of_frames(pixels[:1], frame_layout(shape))
    message = "example 1: the frames of a patch of pixel_values differ, so it is no still image"
    with pytest.raises(DataError, match=message):
        of_frames(pixels, frame_layout(shape))
