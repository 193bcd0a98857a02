"""Bad images: every refusal with its message, which names the example and the way out."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch_checks import frozen, same_value
from tests.vision.bad_images import BAD, GEMMA, GOOD, QWEN, TEXT, without
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


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_image_raises_and_changes_nothing(what: str) -> None:
    family, example, message = BAD[what]
    examples = [TEXT, example]
    before = frozen(examples)
    for collate in collators(LAYOUTS[family]):
        with pytest.raises(DataError) as error:
            collate(examples)
        assert str(error.value).startswith("example 1"), error.value
        assert message in str(error.value), error.value
    if not isinstance(example.get("pixel_values"), torch.Tensor | np.ma.MaskedArray):
        assert same_value(examples, before) or what == "patches that hold NaN"


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_image_of_a_rollout_raises_the_same(what: str) -> None:
    family, example, message = BAD[what]

    def rollout(example: dict[str, Any]) -> dict[str, Any]:
        fields = {k: v for k, v in example.items() if k not in ("input_ids", "labels")}
        *prompt, last = example["input_ids"]
        response = {"response_ids": [last], "loss_mask": [1], "rewards": 1.0}
        return {"prompt_ids": prompt, **response, **fields}

    with pytest.raises(DataError) as error:
        RolloutCollator(0, vision=LAYOUTS[family])([rollout(TEXT), rollout(example)])
    assert str(error.value).startswith("example 1"), error.value
    assert message in str(error.value), error.value


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava_next", "internvl"])
def test_sizes_that_differ_between_examples(family: str) -> None:
    """Only tiles of one size can be joined."""
    small = {**GOOD[family], "pixel_values": GOOD[family]["pixel_values"][..., :1]}
    names = re.escape(f"{small['pixel_values'].shape}, example 0 has")
    with pytest.raises(DataError, match=f"example 1: pixel_values has shape {names}"):
        PaddedCollator(0, vision=LAYOUTS[family])([GOOD[family], small])


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_images_for_a_plain_pad_id(collator: str) -> None:
    message = (
        "example 1 has pixel_values, and the collator does not know the images of the model; give "
        "it the processor in place of the tokenizer"
    )
    collate: Any = PaddedCollator(0) if collator == "padded" else PackedCollator(0, max_tokens=99)
    with pytest.raises(DataError) as error:
        collate([TEXT, QWEN])
    assert str(error.value) == message


def test_images_of_a_model_that_is_not_in_the_table() -> None:
    """They would be lost."""

    class Unknown:
        image_processor = SimpleNamespace()
        tokenizer = SimpleNamespace(pad_token_id=0)

    assert len(PaddedCollator(Unknown())([TEXT])) == 1
    message = "example 1 has pixel_values, which is no image field of other models (none is known)"
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


def test_layouts_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"family 'qwen' is unknown; known are qwen2_vl, .*gemma3"):
        VisionLayout("qwen", 9)
    dtypes = "pixel_dtype must be 'float32', 'bfloat16' or 'float16', got 'uint8'"
    with pytest.raises(ValueError, match=dtypes):
        VisionLayout("gemma3", 9, pixel_dtype="uint8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mllama models are not supported: a token without"):
        VisionLayout("mllama", 9)
    tokenizer = FAMILIES["gemma3"].processor().tokenizer
    message = "expected a processor with an image_processor, got .*; load it with AutoProcessor"
    with pytest.raises(TypeError, match=message):
        VisionLayout.of(tokenizer)
    with pytest.raises(
        TypeError, match=r"vision must be a VisionLayout, got str; VisionLayout\.of"
    ):
        PaddedCollator(0, vision="gemma3")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_pixel_dtype_in_any_form(given: Any) -> None:
    assert layout_of(FAMILIES["gemma3"], pixel_dtype=given).pixel_dtype == "bfloat16"
