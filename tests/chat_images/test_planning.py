"""pixels=False: the same ids and masks from the headers of files, and what a planner needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from tests.chat.chats import tokenize
from tests.chat_images.truth import KINDS, assert_fields, chat, image, question, random_chat, text
from tests.vision import processors
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import DataError
from torch_collate_kit.vision import VisionLayout, image_grid

BIG = {"pixel_values", "pixel_attention_mask"}


def check(record: Any, processor: Any, **options: Any) -> None:
    whole = tokenize(record, processor, **options)
    small = tokenize(record, processor, pixels=False, **options)
    fields = {name: value for name, value in whole.items() if isinstance(value, np.ndarray)}
    for name in ("input_ids", "loss_mask", "num_cut_tokens", "skip_reason"):
        assert small[name] == whole[name]
    if not fields:
        assert_fields(small, {})
        return
    layout = VisionLayout.of(processor)
    found = {name: value for name, value in small.items() if isinstance(value, np.ndarray)}
    assert not BIG & set(found)
    for count, wanted in zip(layout.units(found), layout.units(fields), strict=True):
        assert count.tolist() == wanted.tolist()
    tokens = sum(token == layout.image_token_id for token in small["input_ids"])
    assert layout.units(found).tokens.sum() == tokens
    assert_fields(
        {name: value for name, value in small.items() if name != "num_tiles"},
        {name: value for name, value in fields.items() if name not in BIG},
    )


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_random_chats(name: str, seed: int) -> None:
    messages, images = random_chat(np.random.default_rng(seed))
    check({"messages": messages, "images": images}, FAMILIES[name].processor())


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(KINDS), st.integers(1, 400), st.integers(1, 400))
def test_every_size(name: str, height: int, width: int) -> None:
    """Or both refuse it: an image that is 200 times as long as it is wide, for Qwen."""
    picture = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    record, processor = question(picture), FAMILIES[name].processor()
    try:
        check(record, processor)
    except DataError:
        for pixels in (True, False):
            with pytest.raises(DataError, match=f"refuses the images of {height} x {width} pixels"):
                tokenize(record, processor, pixels=pixels)


def test_num_tiles_is_per_image() -> None:
    rng = np.random.default_rng(0)
    images = [draw(rng, 30, 30), draw(rng, 56, 120)]
    record = {"messages": chat([image(), text("and"), image()], "Yes."), "images": images}
    found = tokenize(record, FAMILIES["internvl"].processor(), pixels=False)
    assert found["num_tiles"].tolist() == [1, 3]
    assert found["num_tiles"].dtype == np.int64


def test_gemma_with_crops_is_processed_and_its_pixels_dropped() -> None:
    """Nothing tells the number of crops from the size; its units are the same as with pixels."""
    processor = processors.gemma3()
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    if not hasattr(processor, "images_kwargs"):
        pytest.skip("a processor of this transformers cannot be told to crop by default")
    processor.images_kwargs = {**processor.images_kwargs, **crops}
    rng = np.random.default_rng(0)
    images = [draw(rng, 60, 180), draw(rng, 50, 50)]
    record = {"messages": chat([image(), text("and"), image()], "Yes."), "images": images}
    whole = tokenize(record, processor)
    assert len(whole["pixel_values"]) == 5  # 1 + 3 crops, and 1
    small = tokenize(record, processor, pixels=False)
    assert small["num_tiles"].tolist() == [4, 1]
    check(record, processor)
    messages = chat([image(), text("What?")], "A cat.", [image()], "A dog.")
    both = {"messages": messages, "images": images}
    ids = tokenize(both, processor)["input_ids"]
    kept = set()
    for limit in (len(ids) - 12, len(ids) - 40, len(ids)):
        options: Any = {"max_length": limit, "overflow": "truncate"}
        found = tokenize(both, processor, **options)
        kept.add(len(found["pixel_values"]))
        check(both, processor, **options)
    assert kept == {4, 5}


def test_image_grid_at_the_real_sizes() -> None:
    """Patches of the default settings, where images of several thousand pixels are scaled down."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rng = np.random.default_rng(0)
    for name, images in (
        ("qwen2_vl", Qwen2VLImageProcessorPil()),
        ("qwen3_vl", Qwen2VLImageProcessorPil(patch_size=16)),
        ("glm4v", Glm4vImageProcessorPil()),
    ):
        processor = processors.qwen2() if name == "qwen2_vl" else FAMILIES[name].make_processor()
        processor.image_processor = images
        for height, width in rng.integers(20, 5000, (100, 2)).tolist():
            if max(height, width) > 150 * min(height, width):
                continue
            picture = Image.new("1", (width, height))
            patches = images.get_number_of_image_patches(height, width)
            assert image_grid(picture, processor).prod() == patches


def test_image_grid_without_resizing() -> None:
    processor = processors.qwen3()
    processor.image_processor.do_resize = False
    assert image_grid(Image.new("RGB", (320, 160)), processor).tolist() == [1, 10, 20]
    assert image_grid(Image.new("RGB", (320, 160)), processors.qwen3()).prod() <= 64


def test_settings_of_the_processor_come_before_those_of_its_image_processor() -> None:
    """InternVL's cuts images into tiles, whatever its image processor would do alone."""
    processor = processors.internvl()
    processor.image_processor.crop_to_patches = False
    picture = draw(np.random.default_rng(0), 56, 120)
    assert tokenize(question(picture), processor)["pixel_values"].shape[0] == 3
    check(question(picture), processor)


def test_image_grid_refuses_what_the_processor_refuses() -> None:
    processor = FAMILIES["qwen3_vl"].processor()
    with pytest.raises(DataError, match="the processor refuses 1 x 300 pixels: absolute aspect"):
        image_grid(Image.new("RGB", (300, 1)), processor)
    with pytest.raises(ValueError, match="Gemma3Processor makes no image_grid_thw; image_grid is"):
        image_grid(Image.new("RGB", (30, 30)), FAMILIES["gemma3"].processor())


def test_no_pixel_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose pixels are cut off: only their headers are read."""
    rng = np.random.default_rng(0)
    names = ["a.jpg", "b.png", "c.webp", "d.gif", "e.bmp", "f.png"]
    for name in names:
        early = PngInfo()
        early.add_text("Software", "a camera")  # a text before the pixels
        options = {"pnginfo": early} if name == "f.png" else {}
        draw(rng, 100, 150).save(tmp_path / name, **options)
    monkeypatch.setattr(ImageFile.ImageFile, "load", _fail)
    processor = FAMILIES["qwen3_vl"].processor()
    for name in names:
        record = question(str(tmp_path / name))
        found = tokenize(record, processor, pixels=False)
        assert found["image_grid_thw"].tolist() == [[1, 6, 10]]
        with pytest.raises(DataError, match="decoded"):
            tokenize(record, processor)


def _fail(self: Any) -> None:
    raise RuntimeError("decoded")
