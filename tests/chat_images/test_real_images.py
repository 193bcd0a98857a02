"""Real records with real files: RGB, grey and RGBA, several images, and one without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.chat.chats import tokenize, trained_text
from tests.chat_images.truth import KINDS, assert_fields, expected, ids_of, turns_of
from tests.vision.families import FAMILIES


@pytest.fixture(scope="module")
def records(shared_data: Path) -> list[dict[str, Any]]:
    lines = (shared_data / "vlm_smoke_16.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", KINDS)
def test_files_and_images_in_memory(
    name: str, records: list[dict[str, Any]], shared_data: Path
) -> None:
    family = FAMILIES[name]
    processor = family.processor()
    modes, counts = set(), set()
    for record in records:
        images = [Image.open(shared_data / path) for path in record["images"]]
        modes |= {picture.mode for picture in images}
        counts.add(len(images))
        messages = record["messages"]
        ids, mask, fields = expected(family, messages, images, turns_of(messages))
        in_memory = {**record, "images": images}
        of_files = tokenize(record, processor, image_root=shared_data)
        for found in (of_files, tokenize(in_memory, processor)):
            assert (found["input_ids"], found["loss_mask"]) == (ids, mask)
            assert_fields(found, fields)
        small = tokenize(record, processor, image_root=shared_data, pixels=False)
        assert (small["input_ids"], small["loss_mask"]) == (ids, mask)
    assert modes == {"RGB", "L", "RGBA"}
    assert counts == {0, 1, 2, 3}


def test_a_real_tokenizer(records: list[dict[str, Any]], shared_data: Path) -> None:
    """Tokens of several characters, and a template of its own: the ids are the processor's."""
    processor = FAMILIES["llava_next"].make_processor()
    folder = shared_data / "tokenizers" / "mistral-32k-chatml"
    processor.tokenizer = AutoTokenizer.from_pretrained(folder)
    processor.image_token_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    processor.chat_template = None  # that of the tokenizer
    for record in records:
        images = [Image.open(shared_data / path) for path in record["images"]]
        words = processor.tokenizer.apply_chat_template(record["messages"], tokenize=False)
        ids = ids_of(processor, words, images)
        found = tokenize(record, processor, image_root=shared_data)
        length = len(found["input_ids"])
        assert found["input_ids"] == ids[:length]
        assert not processor.decode(ids[length:]).strip()
        kept = trained_text(found, processor.tokenizer)
        answers = [m["content"][0]["text"] for m in record["messages"] if m["role"] == "assistant"]
        assert [words.strip() for words in kept.split("<|im_end|>")] == [*answers, ""]
