"""Ids, masks and fields of chats with images are those of the processor, for every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.chats import tokenize, trained_text
from tests.chat_images.truth import (
    KINDS,
    assert_fields,
    assert_right,
    chat,
    expected,
    image,
    question,
    random_chat,
    text,
    turns_of,
)
from tests.vision.families import FAMILIES
from tests.vision.images import draw


@settings(max_examples=2 * settings().max_examples)
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
