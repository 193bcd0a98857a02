"""Bad images: every refusal with its message, which names the example and the way out."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_checks import frozen, same_value
from tests.vision.bad_images import BAD, GEMMA, GOOD, TEXT, without
from tests.vision.batches import examples_of, layout_of
from tests.vision.families import FAMILIES
from tests.vision.oracle_images import LAYOUTS
from torch_collate_kit import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision import VisionLayout


def collators(layout: VisionLayout) -> list[Any]:
    return [PaddedCollator(0, vision=layout), PackedCollator(0, vision=layout, max_tokens=99)]


@pytest.mark.parametrize("family", list(GOOD))
def test_the_good_examples_are_good(family: str) -> None:
    for collate in collators(LAYOUTS[family]):
        assert len(collate([TEXT, GOOD[family]])["pixel_values"].values)


@pytest.mark.parametrize(("family", "example", "message"), BAD)
def test_a_bad_image_raises_and_changes_nothing(
    family: str, example: dict[str, Any], message: str
) -> None:
    examples = [TEXT, example]
    before = frozen(examples)
    for collate in collators(LAYOUTS[family]):
        with pytest.raises(DataError, match=f"^example 1:? .*{re.escape(message)}"):
            collate(examples)
    pixels = example.get("pixel_values")
    if not isinstance(pixels, torch.Tensor | np.ma.MaskedArray) and "NaN" not in message:
        assert same_value(examples, before)


@pytest.mark.parametrize(("family", "example", "message"), BAD)
def test_a_bad_image_of_a_rollout_raises_the_same(
    family: str, example: dict[str, Any], message: str
) -> None:
    def rollout(example: dict[str, Any]) -> dict[str, Any]:
        fields = {k: v for k, v in example.items() if k not in ("input_ids", "labels")}
        *prompt, last = example["input_ids"]
        response = {"response_ids": [last], "loss_mask": [1], "rewards": 1.0}
        return {"prompt_ids": prompt, **response, **fields}

    with pytest.raises(DataError, match=f"^example 1:? .*{re.escape(message)}"):
        RolloutCollator(0, vision=LAYOUTS[family])([rollout(TEXT), rollout(example)])


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava_next", "internvl"])
def test_sizes_that_differ_between_examples(family: str) -> None:
    """Only tiles of one size can be joined."""
    small = {**GOOD[family], "pixel_values": GOOD[family]["pixel_values"][..., :1]}
    names = re.escape(f"{small['pixel_values'].shape}, example 0 has")
    with pytest.raises(DataError, match=f"example 1: pixel_values has shape {names}"):
        PaddedCollator(0, vision=LAYOUTS[family])([GOOD[family], small])


def test_images_of_a_model_that_is_not_in_the_table() -> None:
    """They would be lost."""

    class Unknown:
        image_processor = SimpleNamespace()
        tokenizer = SimpleNamespace(pad_token_id=0)

    assert len(PaddedCollator(Unknown())([TEXT])) == 1
    message = "example 1 has pixel_values, which is not an image field of other models (none is "
    with pytest.raises(DataError, match=re.escape(message)):
        PaddedCollator(Unknown())([TEXT, GEMMA])


def test_token_types_of_paligemma_must_be_given() -> None:
    family, [example, *_] = FAMILIES["paligemma"], examples_of("paligemma")
    collate = PaddedCollator(family.processor())
    batch = collate([example])
    assert batch["token_type_ids"].tolist() == [example["token_type_ids"]]
    with pytest.raises(DataError, match=r"example 0 has no token_type_ids, which the model reads"):
        collate([without(example, "token_type_ids")])


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: VisionLayout("qwen", 9),
            ValueError,
            "'qwen' is unknown; known families are qwen2_vl, ",
        ),
        (lambda: VisionLayout("gemma3", 9, pixel_dtype="uint8"), ValueError, "got 'uint8'"),
        (lambda: VisionLayout("mllama", 9), ValueError, "mllama models are not supported: a tok"),
        (lambda: VisionLayout.of("gemma3"), TypeError, "a processor with an image_processor, got"),
        (lambda: PaddedCollator(0, vision="gemma3"), TypeError, "must be a VisionLayout, got str"),
    ],
)
def test_layouts_that_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("given", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_pixel_dtype_in_any_form(given: Any) -> None:
    assert layout_of(FAMILIES["gemma3"], pixel_dtype=given).pixel_dtype == "bfloat16"
