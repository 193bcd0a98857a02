"""Planted defects of images: more or fewer placeholders than the grids describe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.reporting.clean_data import Example
from tests.reporting.planted import Planted
from tests.vision.families import FAMILIES
from tests.vision.images import draw

__all__ = ["IMAGE_DEFECTS", "clean_images", "image_processor"]

_QWEN = FAMILIES["qwen2_5_vl"]
_ROWS = {1, 4, 7}


@cache
def image_processor() -> Any:
    """Qwen2.5-VL's, with the end of a turn as end of text, as its instruct models have it."""
    processor = copy.deepcopy(_QWEN.processor())
    processor.tokenizer.eos_token = "<|im_end|>"
    return processor


def clean_images(count: int = 9) -> list[Example]:
    """Questions about one or two images of several sizes."""
    processor, rng = image_processor(), np.random.default_rng(0)
    placeholder = "".join([_QWEN.wrap[0], _QWEN.placeholder, _QWEN.wrap[1]])
    examples = []
    for i in range(count):
        images = [draw(rng, 56 + 28 * (i % 3), 84) for _ in range(1 + i % 2)]
        prompt = f"<|im_start|>user\n{placeholder * len(images)}What is number {i}?<|im_end|>\n"
        found = processor(
            text=[f"{prompt}<|im_start|>assistant\nA cat, {i}.<|im_end|>\n"],
            images=[images],
            return_tensors="np",
        )
        ids = found["input_ids"][0].tolist()
        answer = processor.tokenizer(f"A cat, {i}.<|im_end|>\n")["input_ids"]
        mask = [0] * (len(ids) - len(answer)) + [1] * (len(answer) - 1) + [0]
        vision = {key: np.asarray(found[key]) for key in ("pixel_values", "image_grid_thw")}
        examples.append({"input_ids": ids, "loss_mask": mask} | vision)
    return examples


def _planted(chosen: Callable[[list[int]], list[int]]) -> Callable[[list[Example]], Planted]:
    """``chosen`` returns the places to keep, of those of the ids; a place may be there twice."""

    def made(examples: list[Example]) -> Planted:
        damaged = list(examples)
        for i in _ROWS:
            e, places = examples[i], chosen(examples[i]["input_ids"])
            damaged[i] = e | {k: [e[k][at] for at in places] for k in ("input_ids", "loss_mask")}
        return Planted("placeholders_disagree_with_grids", damaged, image_processor(), [_ROWS])

    return made


def _split(ids: list[int]) -> tuple[int, list[int]]:
    """The first placeholder, and all that is none."""
    image = _QWEN.image_token_id
    return ids.index(image), [i for i, token in enumerate(ids) if token != image]


def _images_of_another_row(examples: list[Example]) -> Planted:
    """Grids and pixels were sorted apart from the texts."""
    keys = ("pixel_values", "image_grid_thw")
    others = [*examples[1:], examples[0]]
    damaged = [e | {key: o[key] for key in keys} for e, o in zip(examples, others, strict=True)]
    cells = [
        [int((e["image_grid_thw"].prod(axis=1)).sum()) for e in of] for of in (examples, damaged)
    ]
    rows = {i for i, (a, b) in enumerate(zip(*cells, strict=True)) if a != b}
    assert len(rows) > 3, "the images are too much alike"
    return Planted("placeholders_disagree_with_grids", damaged, image_processor(), [rows])


IMAGE_DEFECTS: dict[str, Callable[[list[Example]], Planted]] = {
    "one placeholder too few": _planted(
        lambda ids: [i for i in range(len(ids)) if i != _split(ids)[0]]
    ),
    "one placeholder too many": _planted(lambda ids: sorted([*range(len(ids)), _split(ids)[0]])),
    "a placeholder that is not expanded": _planted(
        lambda ids: sorted([*_split(ids)[1], _split(ids)[0]])
    ),
    "pixels without placeholders": _planted(lambda ids: _split(ids)[1]),
    "images of another row": _images_of_another_row,
}
