"""max_length cuts before an image or after it, never through one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.chats import tokenize
from tests.chat_images.truth import (
    KINDS,
    assert_fields,
    expected,
    fields_of,
    ids_of,
    random_chat,
    rendered,
    turns_of,
)
from tests.vision.families import FAMILIES, TinyFamily


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


@settings(max_examples=2 * settings().max_examples)
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
