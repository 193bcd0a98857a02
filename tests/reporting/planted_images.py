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

IMAGE_DEFECTS: dict[str, Callable[[list[Example]], Planted]] = {}
Defect = Callable[[list[Example]], Planted]
_QWEN = FAMILIES["qwen2_5_vl"]
_ROWS = {1, 4, 7}


def planted(defect: Defect) -> Defect:
    assert defect.__name__ not in IMAGE_DEFECTS, defect.__name__
    IMAGE_DEFECTS[defect.__name__] = defect
    return defect


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


def _planted(examples: list[Example], edit: Callable[[Example], Example]) -> Planted:
    damaged = [edit(e) if i in _ROWS else e for i, e in enumerate(examples)]
    return Planted("placeholders_disagree_with_grids", damaged, image_processor(), [_ROWS])


def _first_placeholder(e: Example) -> int:
    return int(e["input_ids"].index(_QWEN.image_token_id))


@planted
def one_placeholder_too_few(examples: list[Example]) -> Planted:
    def edit(e: Example) -> Example:
        at = _first_placeholder(e)
        return e | {key: e[key][:at] + e[key][at + 1 :] for key in ("input_ids", "loss_mask")}

    return _planted(examples, edit)


@planted
def one_placeholder_too_many(examples: list[Example]) -> Planted:
    def edit(e: Example) -> Example:
        at = _first_placeholder(e)
        return e | {
            key: e[key][:at] + e[key][at : at + 1] + e[key][at:]
            for key in ("input_ids", "loss_mask")
        }

    return _planted(examples, edit)


@planted
def placeholder_not_expanded(examples: list[Example]) -> Planted:
    """One token for the image, as the text has it before the processor expands it."""

    def edit(e: Example) -> Example:
        image, at = _QWEN.image_token_id, _first_placeholder(e)
        kept = [i for i, t in enumerate(e["input_ids"]) if t != image or i == at]
        return e | {key: [e[key][i] for i in kept] for key in ("input_ids", "loss_mask")}

    return _planted(examples, edit)


@planted
def images_of_another_row(examples: list[Example]) -> Planted:
    """Grids and pixels were sorted apart from the texts."""
    keys = ("pixel_values", "image_grid_thw")
    others = [{key: examples[(i + 1) % len(examples)][key] for key in keys} for i in range(9)]
    damaged = [e | others[i] for i, e in enumerate(examples)]
    rows = {i for i, e in enumerate(examples) if _cells(e) != _cells(damaged[i])}
    assert len(rows) > 3, "the images are too much alike"
    return Planted("placeholders_disagree_with_grids", damaged, image_processor(), [rows])


def _cells(e: Example) -> int:
    return int((e["image_grid_thw"].prod(axis=1) // 4).sum())


@planted
def pixels_without_placeholders(examples: list[Example]) -> Planted:
    def edit(e: Example) -> Example:
        image = _QWEN.image_token_id
        kept = [i for i, t in enumerate(e["input_ids"]) if t != image]
        return e | {key: [e[key][i] for i in kept] for key in ("input_ids", "loss_mask")}

    return _planted(examples, edit)
