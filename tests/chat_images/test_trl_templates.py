"""The chat templates of trl for models that read images: the ids are those of the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.chat.chats import tokenize, trained_text
from tests.chat.families import templates
from tests.chat_images.truth import chat, fields_of, ids_of, image, rendered, text
from tests.vision import processors
from tests.vision.families import FAMILIES
from tests.vision.images import draw

# What ends a turn, and must be one token; each has a copy for training.
ENDS = {
    "qwen2_5_vl": "<|im_end|>",
    "qwen3_vl": "<|im_end|>",
    "idefics3": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llava_next": "</s>",
    "gemma3": "<end_of_turn>",
}
CASES = {name + copy: (name, end) for name, end in ENDS.items() for copy in ("", "_training")}


def processor_for(template: str) -> Any:
    family, end = CASES[template]
    make = {"qwen2_5_vl": processors.qwen2, "qwen3_vl": processors.qwen3}.get(family)
    processor = (make or getattr(processors, family))()
    processor.tokenizer.add_special_tokens({"eos_token": end})
    processor.tokenizer.add_tokens(["<start_of_turn>"], special_tokens=True)
    processor.chat_template = templates()[template]
    return processor


@pytest.mark.parametrize("template", CASES)
@pytest.mark.parametrize("pixels", [True, False])
def test_ids_fields_and_trained_text(template: str, pixels: bool) -> None:
    rng = np.random.default_rng(0)
    images = [draw(rng, 60, 90), draw(rng, 90, 30), draw(rng, 40, 40)]
    both = [text("And these: "), image(), text(" and "), image()]
    messages = chat([image(), text("What is it?")], [text("A cat.")], both, [text("Two dogs.")])
    processor = processor_for(template)
    record = {"messages": messages, "images": images}
    found = tokenize(record, processor, pixels=pixels)
    ids = ids_of(processor, rendered(processor, messages), images)
    assert found["input_ids"] == ids[: len(found["input_ids"])]
    rest = processor.tokenizer.decode(ids[len(found["input_ids"]) :])
    assert not rest.strip()  # a line end after the last turn may be left out
    kept = trained_text(found, processor.tokenizer).split(CASES[template][1])
    assert [words.strip() for words in kept] == ["A cat.", "Two dogs.", ""]
    if pixels:
        wanted = fields_of(FAMILIES[CASES[template][0]], images)
        assert (found["pixel_values"] == wanted["pixel_values"]).all()
    else:
        assert "pixel_values" not in found


# These put thinking before an answer, so that one turn is what they train in one example.
THINKING = ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"]
THINKING += [f"{name}_training" for name in THINKING]


@pytest.mark.parametrize("template", THINKING)
def test_templates_with_thinking(template: str) -> None:
    rng = np.random.default_rng(0)
    images = [draw(rng, 60, 90), draw(rng, 90, 30)]
    messages = chat([image(), text("And "), image(), text("?")], [text("A cat.")])
    processor = processors.qwen3()
    processor.tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    processor.chat_template = templates()[template]
    found = tokenize({"messages": messages, "images": images}, processor)
    ids = ids_of(processor, rendered(processor, messages), images)
    assert found["input_ids"] == ids[: len(found["input_ids"])]
    kept = trained_text(found, processor.tokenizer)
    assert kept.endswith("A cat.<|im_end|>")
    assert "image_pad" not in kept


def test_every_template_for_images_is_here() -> None:
    """The others are of models that are in no row of the table of families."""
    found = {name for name, source in templates().items() if "image" in source}
    others = ("diffusion_gemma", "gemma4", "lfm2", "muse_glimmer")
    assert found - set(CASES) - set(THINKING) == {n for n in found if n.startswith(others)}
