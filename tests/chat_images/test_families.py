"""Ids, masks and fields of chats with images are those of the processor, for every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_images.truth import (
    KINDS,
    NAMES,
    assert_fields,
    chat,
    count_images,
    expected,
    image,
    random_chat,
    text,
)
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import ChatOptions, tokenize_chat
from torch_collate_kit.vision.expansion import image_processing
from torch_collate_kit.vision.images import image_files


def turns_of(messages: list[dict[str, Any]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("name", NAMES)
def test_one_image_and_several(name: str) -> None:
    rng = np.random.default_rng(1)
    images = [draw(rng, 60, 90), draw(rng, 200, 33, "L"), draw(rng, 40, 40, "RGBA")]
    messages = chat(
        [image(), text("What is it?")],
        "A cat.",
        [text("And these,"), image(), image(), text("what?")],
        "Dogs.",
    )
    family = FAMILIES[name]
    found = tokenize_chat({"messages": messages, "images": images}, family.processor())
    ids, mask, fields = expected(family, messages, images, [1, 3])
    assert found["input_ids"] == ids
    assert found["loss_mask"] == mask
    assert_fields(found, fields)
    assert (found["num_cut_tokens"], found["skip_reason"]) == (0, "")
    kept = [token for token, trained in zip(ids, mask, strict=True) if trained]
    assert family.processor().tokenizer.decode(kept) == "A cat.<|im_end|>Dogs.<|im_end|>"
    assert family.image_token_id not in kept


@settings(max_examples=150)
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.sampled_from(["all", "last", "each"]))
def test_random_chats(name: str, seed: int, train_on: Any) -> None:
    messages, images = random_chat(np.random.default_rng(seed))
    turns = turns_of(messages)
    family = FAMILIES[name]
    record = {"messages": messages, "images": images}
    found: Any = tokenize_chat(record, family.processor(), ChatOptions(train_on=train_on))
    if train_on == "each":
        [found] = found  # the template never rewrites a turn, so that one example holds all
    ids, mask, fields = expected(
        family, messages, images, turns[-1:] if train_on == "last" else turns
    )
    assert found["input_ids"] == ids
    assert found["loss_mask"] == mask
    assert_fields(found, fields)


@pytest.mark.parametrize("name", KINDS)
def test_text_only_records_have_no_vision_field(name: str) -> None:
    messages = chat("Hi.", "Hello!")
    processor = FAMILIES[name].processor()
    found = tokenize_chat({"messages": messages, "images": []}, processor)
    assert set(found) == {"input_ids", "loss_mask", "num_cut_tokens", "skip_reason"}
    processor.tokenizer.chat_template = processor.chat_template
    try:
        assert found == tokenize_chat({"messages": messages}, processor.tokenizer)
    finally:
        processor.tokenizer.chat_template = None


@pytest.mark.parametrize("name", KINDS)
def test_labels(name: str) -> None:
    messages, images = (
        chat([image(), text("What?")], "A cat."),
        [draw(np.random.default_rng(0), 60, 90)],
    )
    family = FAMILIES[name]
    record = {"messages": messages, "images": images}
    found = tokenize_chat(record, family.processor(), ChatOptions(labels=True))
    ids, mask, fields = expected(family, messages, images, [1])
    assert found["labels"] == [
        token if kept else -100 for token, kept in zip(ids, mask, strict=True)
    ]
    assert "loss_mask" not in found
    assert_fields(found, fields)


@pytest.mark.parametrize("name", KINDS)
def test_an_image_of_the_assistant_is_not_trained(name: str) -> None:
    """What the model cannot write has no loss: the placeholders and the tokens around them."""
    rng = np.random.default_rng(3)
    messages = chat("Draw a cat.", [text("Here: "), image(), text(" it is.")])
    family = FAMILIES[name]
    record = {"messages": messages, "images": [draw(rng, 60, 90)]}
    found = tokenize_chat(record, family.processor())
    pairs = zip(found["input_ids"], found["loss_mask"], strict=True)
    kept = family.processor().tokenizer.decode([token for token, trained in pairs if trained])
    line = {"internvl": "\n", "llava_next": "\n", "llava_onevision": "\n"}.get(name, "")
    assert kept == f"Here: {line} it is.<|im_end|>"


def test_images_after_the_last_trained_turn_are_left_out() -> None:
    rng = np.random.default_rng(4)
    images = [draw(rng, 60, 90), draw(rng, 30, 30)]
    messages = chat([image(), text("What?")], "A cat.", [image(), text("And this?")])
    family = FAMILIES["qwen3_vl"]
    found = tokenize_chat({"messages": messages, "images": images}, family.processor())
    ids, mask, fields = expected(family, messages, images, [1])
    assert (found["input_ids"], found["loss_mask"]) == (ids, mask)
    assert_fields(found, fields)
    assert len(fields["image_grid_thw"]) == 1 < count_images(messages)


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
    found = tokenize_chat(
        {"messages": messages, "images": images},
        family.processor(),
        ChatOptions(train_on="each", chat_template=template),
    )
    assert [len(example["image_grid_thw"]) for example in found] == [1, 2]
    both = np.concatenate([found[0]["pixel_values"], found[1]["pixel_values"][-8:]])
    assert (both == found[1]["pixel_values"]).all()
    kept = [
        family.processor().tokenizer.decode(
            [t for t, m in zip(e["input_ids"], e["loss_mask"], strict=True) if m]
        )
        for e in found
    ]
    assert kept == ["A cat.<|im_end|>", "A dog.<|im_end|>"]


def test_places_before_and_after_expansion() -> None:
    """Every character that is no placeholder is found again, and so are the edges of images."""
    processing = image_processing(FAMILIES["idefics3"].processor(), image_files(), True)
    rng = np.random.default_rng(0)
    sources = [("it", draw(rng, 30, 30)), ("it", draw(rng, 90, 60))]
    words = "ab<image><image>cd"
    found = processing.expand(words, sources)
    for place in (0, 1, 16, 17):
        assert found.text[found.moved(place)] == words[place]
    assert [found.moved(place) for place in (2, 9)] == [start for start, _ in found.spans]
    assert found.moved(16) == found.spans[1][1]
    assert found.moved(len(words)) == len(found.text)
