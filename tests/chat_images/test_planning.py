"""Ids, masks and fields are those of the processor, also cut by max_length, and without pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from tests.chat.chats import tokenize, trained_text
from tests.chat_images.truth import (
    KINDS,
    assert_fields,
    assert_right,
    chat,
    expected,
    fields_of,
    ids_of,
    image,
    question,
    random_chat,
    rendered,
    text,
    turns_of,
)
from tests.vision import processors
from tests.vision.families import FAMILIES, TinyFamily
from tests.vision.images import draw
from torch_collate_kit import DataError
from torch_collate_kit.vision import VisionLayout, image_grid


@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.sampled_from(["all", "last", "each"]))
def test_random_chats(name: str, seed: int, train_on: Any) -> None:
    messages, images = random_chat(np.random.default_rng(seed))
    turns = turns_of(messages)[-1:] if train_on == "last" else turns_of(messages)
    assert_right(FAMILIES[name], messages, images, turns, train_on=train_on)


@pytest.mark.parametrize("name", KINDS)
def test_text_only_records_have_no_vision_field(name: str) -> None:
    messages = chat("Hi.", "Hello!")
    processor = FAMILIES[name].processor()
    found = tokenize({"messages": messages, "images": []}, processor)
    assert set(found) == {"input_ids", "loss_mask", "num_cut_tokens", "skip_reason"}
    processor.tokenizer.chat_template = processor.chat_template
    try:
        assert found == tokenize({"messages": messages}, processor.tokenizer)
    finally:
        processor.tokenizer.chat_template = None


@pytest.mark.parametrize("name", KINDS)
def test_labels(name: str) -> None:
    record = question(draw(np.random.default_rng(0), 60, 90))
    found = tokenize(record, FAMILIES[name].processor(), labels=True)
    ids, mask, fields = expected(FAMILIES[name], record["messages"], record["images"], [1])
    assert found["labels"] == [i if kept else -100 for i, kept in zip(ids, mask, strict=True)]
    assert "loss_mask" not in found
    assert_fields(found, fields)


@pytest.mark.parametrize("name", KINDS)
def test_an_image_of_the_assistant_is_not_trained(name: str) -> None:
    """What the model cannot write has no loss: the placeholders and the tokens around them."""
    messages = chat("Draw a cat.", [text("Here: "), image(), text(" it is.")])
    record = {"messages": messages, "images": [draw(np.random.default_rng(3), 60, 90)]}
    processor = FAMILIES[name].processor()
    line = {"internvl": "\n", "llava_next": "\n", "llava_onevision": "\n"}.get(name, "")
    kept = trained_text(tokenize(record, processor), processor.tokenizer)
    assert kept == f"Here: {line} it is.<|im_end|>"


def test_images_after_the_last_trained_turn_are_left_out() -> None:
    rng = np.random.default_rng(4)
    images = [draw(rng, 60, 90), draw(rng, 30, 30)]
    messages = chat([image(), text("What?")], "A cat.", [image(), text("And this?")])
    found = assert_right(FAMILIES["qwen3_vl"], messages, images, [1])
    assert len(found["image_grid_thw"]) == 1


def test_each_with_a_template_that_rewrites_turns_gives_each_example_its_images() -> None:
    """Earlier answers are dropped, so that no two turns share an example."""
    family = FAMILIES["qwen3_vl"]
    template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
        "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rng = np.random.default_rng(5)
    images = [draw(rng, 60, 90), draw(rng, 32, 64)]
    messages = chat([image(), text("What?")], "A cat.", [text("And this?"), image()], "A dog.")
    record = {"messages": messages, "images": images}
    found = tokenize(record, family.processor(), train_on="each", chat_template=template)
    assert [len(example["image_grid_thw"]) for example in found] == [1, 2]
    both = np.concatenate([found[0]["pixel_values"], found[1]["pixel_values"][-8:]])
    assert (both == found[1]["pixel_values"]).all()
    kept = [trained_text(example, family.processor().tokenizer) for example in found]
    assert kept == ["A cat.<|im_end|>", "A dog.<|im_end|>"]


def cut(record: Any, family: TinyFamily, limit: int, **options: Any) -> dict[str, Any]:
    options |= {"max_length": limit, "overflow": "truncate"}
    found: dict[str, Any] = tokenize(record, family.processor(), **options)
    return found


def bounds(family: TinyFamily, messages: Any, images: list[Any]) -> list[tuple[int, int]]:
    """First token and last + 1 of each image with what opens and closes it, text by text."""
    processor = family.processor()
    opening, closing = family.wrap if "\n" not in family.wrap else ("", "")
    whole = opening + family.placeholder + closing
    *texts, _ = rendered(processor, messages).split(whole)
    found, end = [], 0
    several = family.name == "llava_onevision" and len(images) > 1  # these are not cut into tiles
    for words, picture in zip(texts, images, strict=True):
        start = end + len(ids_of(processor, words, []))
        if several:
            end = start + processor.num_image_tokens + 1
        else:
            end = start + len(ids_of(processor, whole, [picture]))
        found.append((start, end))
    return found


def longest(family: TinyFamily, places: list[tuple[int, int]], limit: int) -> tuple[int, int]:
    """The most tokens under the limit that end in no image, and the images in them."""
    for count in range(limit, -1, -1):
        whole = sum(end <= count for _, end in places)
        begun = sum(start < count for start, _ in places)
        alone = family.name == "llava_onevision" and whole == 1 < len(places)
        if whole == begun and not alone:
            return count, whole
    raise AssertionError("zero tokens always fit")


@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.floats(0, 1.1))
def test_the_longest_beginning_that_cuts_no_image(name: str, seed: int, share: float) -> None:
    messages, images = random_chat(np.random.default_rng(seed))
    family = FAMILIES[name]
    ids, mask, _ = expected(family, messages, images, turns_of(messages))
    limit = max(2, int(share * len(ids)))
    kept, whole = longest(family, bounds(family, messages, images), min(limit, len(ids)))
    record = {"messages": messages, "images": images}
    found = cut(record, family, limit)
    small = cut(record, family, limit, pixels=False)
    assert small["input_ids"] == found["input_ids"]
    if not any(mask[1:kept]):
        assert found["skip_reason"] == "nothing_left_after_truncation"
        assert_fields(found, {})
        return
    assert (found["input_ids"], found["loss_mask"]) == (ids[:kept], mask[:kept])
    assert found["num_cut_tokens"] == len(ids) - kept
    assert_fields(found, fields_of(family, images[:whole]))


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


@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_random_chats_without_pixels(name: str, seed: int) -> None:
    messages, images = random_chat(np.random.default_rng(seed))
    check({"messages": messages, "images": images}, FAMILIES[name].processor())


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
