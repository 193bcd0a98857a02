"""Real records with real files: RGB, grey and RGBA, several images, and one without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.chat_images.truth import KINDS, assert_fields, expected
from tests.vision.families import FAMILIES
from torch_collate_kit import tokenize_chat


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
        turns = [i for i, m in enumerate(record["messages"]) if m["role"] == "assistant"]
        ids, mask, fields = expected(family, record["messages"], images, turns)
        in_memory = {**record, "images": images}
        of_files = tokenize_chat(record, processor=processor, image_root=shared_data)
        for found in (of_files, tokenize_chat(in_memory, processor=processor)):
            assert (found["input_ids"], found["loss_mask"]) == (ids, mask)
            assert_fields(found, fields)
        small = tokenize_chat(record, processor=processor, image_root=shared_data, pixels=False)
        assert (small["input_ids"], small["loss_mask"]) == (ids, mask)
    assert modes == {"RGB", "L", "RGBA"}
    assert counts == {0, 1, 2, 3}
