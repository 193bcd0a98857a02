"""Logits, loss and gradients of every batch are those of each example alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vision.batches import (
    BATCHED,
    HYBRID,
    PACKED,
    alone,
    alone_gradients,
    examples_of,
    inputs_of,
    largest_difference,
    layout_of,
    logits_alone,
    logits_of,
    packed,
    padded,
    text_examples_of,
)
from tests.vision.families import FAMILIES, TinyFamily
from torch_collate_kit import (
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    VisionLanguageCollator,
    check_isolation,
    isolate_mixers,
    token_loss,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.vision import VisionLayout

# Of the largest logit. One machine rounds otherwise than another (up to 1.5e-6 here); a wrong image
# or position moves logits by a tenth of it or more.
LIMIT = 1e-5

VARLEN = [name for name in PACKED if name != "gemma3"]  # see test_gemma3_needs_its_mask


@pytest.fixture(params=BATCHED)
def family(request: pytest.FixtureRequest) -> TinyFamily:
    return FAMILIES[request.param]


@pytest.fixture(params=PACKED)
def packable(request: pytest.FixtureRequest) -> TinyFamily:
    return FAMILIES[request.param]


def check(family: TinyFamily, batch: Batch) -> None:
    difference = largest_difference(batch, logits_of(family, batch), logits_alone(family.name))
    assert difference < LIMIT, f"{family.name}: {difference}"


# --- logits --------------------------------------------------------------------------------------


def test_a_padded_batch_equals_alone(family: TinyFamily) -> None:
    batch = padded(family, examples_of(family.name), pad_to_multiple_of=8)
    assert not batch["attention_mask"].all()
    check(family, batch)


def test_packed_rows_equal_alone(packable: TinyFamily) -> None:
    batch = packed(packable, examples_of(packable.name))
    assert len(batch) > 1
    assert max(len(row) for row in batch["sub_seq_lengths"].tolist()) > 1
    check(packable, batch)


def test_aligned_rows_with_gaps_and_several_ranks_equal_alone(packable: TinyFamily) -> None:
    parallel = ParallelLayout(dp=2, tp=4)
    batch = packed(packable, examples_of(packable.name), parallel=parallel, fixed_width=True)
    lengths = [length for row in batch["sub_seq_lengths"].tolist() for length in row]
    assert any(length % 4 for length in lengths), "no gap"
    check(packable, batch)


# --- loss and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "left") for name in BATCHED),
        *((name, "packed") for name in PACKED),
        *((name, "torch_varlen") for name in VARLEN),
    ],
)
def test_loss_and_gradients_equal_those_of_the_examples(name: str, kind: str) -> None:
    family = FAMILIES[name]
    examples = list(examples_of(family.name))
    batch = padded(family, examples) if kind == "left" else packed(family, examples)
    attention = "torch_varlen" if kind == "torch_varlen" else "sdpa"
    by_part = {"text_config": "torch_varlen", "vision_config": "sdpa"}
    model = family.model(by_part if attention == "torch_varlen" else "sdpa")
    each = [alone(family, family.model(), example)[1:] for example in examples]
    loss_sums, counts = zip(*each, strict=True)
    assert batch.metadata["num_loss_tokens"] == sum(counts)

    logits = model(**inputs_of(family, batch, attention)).logits
    loss = token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])

    assert abs(loss.item() - float(sum(loss_sums)) / sum(counts)) < 1e-5
    expected = alone_gradients(family, examples)
    assert max(float(g.abs().max()) for g in expected.values()) > 0.1
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    found = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() < 1e-4, name


# --- what is given, and what is refused ----------------------------------------------------------


def test_two_images_in_each_others_place_are_seen(packable: TinyFamily) -> None:
    """The limit tells images apart."""
    rng = np.random.default_rng(3)
    examples = [packable.example(rng, ["text", (56, 56), "text"]) for _ in range(2)]
    pixels = [example["pixel_values"] for example in examples]
    assert pixels[0].shape == pixels[1].shape
    batch = packed(packable, examples)
    expected = [alone(packable, packable.model(), example)[0] for example in examples]
    assert largest_difference(batch, logits_of(packable, batch), expected) < LIMIT
    swapped = [{**e, "pixel_values": p} for e, p in zip(examples, pixels[::-1], strict=True)]
    assert largest_difference(batch, logits_of(packable, packed(packable, swapped)), expected) > 0.1


@pytest.mark.parametrize("name", [name for name in BATCHED if name != "qwen2_5_vl"])
def test_a_processor_in_place_of_the_tokenizer_is_enough(name: str) -> None:
    """To pad for every model that has it, and to pack where only one has it."""
    family, examples = FAMILIES[name], list(examples_of(name))
    processor = family.processor()
    found = PaddedCollator(processor)(examples).model_inputs("sdpa")
    expected = padded(family, examples).model_inputs("sdpa")
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key
    shared_by = VisionLayout.of(processor).shared_by
    if shared_by:
        assert name in shared_by
        message = f"processor is that of several: {', '.join(shared_by)}; pass the model's config"
        for vision in (None, VisionLayout.of(processor)):
            with pytest.raises(ValueError, match=message):
                PackedCollator(processor, max_tokens=400, vision=vision)
        with pytest.raises(ValueError, match=message):
            VisionLanguageCollator(processor, max_tokens=400)
        if name in PACKED:
            config = family.model().config
            assert VisionLanguageCollator(processor, config=config, max_tokens=400).collator
    if name in PACKED:
        vision = layout_of(family) if shared_by else None
        batch = PackedCollator(processor, max_tokens=400, vision=vision)(examples)
        assert batch == packed(family, examples, max_tokens=400)
        assert batch.placement.vision == layout_of(family)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pixels_in_half_are_what_the_model_would_cast_them_to(
    family: TinyFamily, dtype: str
) -> None:
    examples, half = examples_of(family.name), getattr(torch, dtype)
    batch = padded(family, examples)
    narrow = padded(family, examples, vision=layout_of(family, pixel_dtype=dtype))
    found, expected = narrow["pixel_values"].values, batch["pixel_values"].values
    assert (found.dtype, expected.dtype) == (half, torch.float32)
    assert torch.equal(found, expected.to(half))
    assert narrow.nbytes < 0.6 * batch.nbytes
    inputs = inputs_of(family, batch, "sdpa")
    cast = {**inputs, "pixel_values": inputs["pixel_values"].to(half)}
    with torch.no_grad():
        assert torch.equal(logits_of(family, narrow), family.model()(**cast).logits)


REFUSED = {
    "paligemma": "examples of paligemma models are not packed: it treats the prefixes",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_pack_is_refused_with_the_reason(name: str) -> None:
    family = FAMILIES[name]
    with pytest.raises(ValueError, match=REFUSED[name]) as error:
        PackedCollator(family.processor(), max_tokens=64, vision=layout_of(family))
    assert str(error.value).endswith("; use PaddedCollator")


@pytest.mark.parametrize("attention", ["sdpa", "eager", "torch_varlen"])
def test_gemma3_needs_its_mask(attention: str) -> None:
    family = FAMILIES["gemma3"]
    batch = packed(family, examples_of("gemma3"))
    with pytest.raises(ValueError, match=r'packed images attend within themselves.*mask="block"'):
        batch.model_inputs(attention)
    text = packed(family, text_examples_of("gemma3"))
    assert "attention_mask" not in text.model_inputs(attention)
    assert padded(family, examples_of("gemma3")).model_inputs(attention)


def test_a_smallest_image_for_a_rank_without_one_changes_nothing(packable: TinyFamily) -> None:
    rng = np.random.default_rng(4)
    text = [packable.example(rng, ["text", "text", "text"]) for _ in range(3)]
    examples = [packable.example(rng, ["text", (56, 84)]), *text]
    batch = packed(packable, examples, max_tokens=400, parallel=ParallelLayout(dp=2))
    assert batch.metadata["num_dummy_images"] == 1
    assert [len(part.column("pixel_values")) > 0 for part in batch.chunk(2)] == [True, True]
    each = [alone(packable, packable.model(), example) for example in examples]
    expected = [logits for logits, _, _ in each]
    assert largest_difference(batch, logits_of(packable, batch), expected) < LIMIT
    assert batch.metadata["num_loss_tokens"] == sum(count for _, _, count in each)


# --- Vision models whose text model is a hybrid: packed with images, against alone


LIMIT = 1e-5  # of the largest logit, as in test_parity.py


@pytest.fixture(params=HYBRID)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def isolated(name: str) -> Any:
    model = copy.deepcopy(FAMILIES[name].model())
    isolate_mixers(model)
    return model


def pack(name: str) -> Batch:
    batch = packed(FAMILIES[name], examples_of(name))
    assert len(batch) > 1
    assert max(len(row) for row in batch["sub_seq_lengths"].tolist()) > 1
    return batch


def test_packed_rows_with_images_equal_alone(name: str) -> None:
    batch, model = pack(name), isolated(name)
    inputs = batch.model_inputs(model, labels=False)
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    assert largest_difference(batch, logits, logits_alone(name)) < LIMIT
    check_isolation(model, batch)


def test_without_isolation_they_are_refused_or_get_what_the_kernels_read() -> None:
    batch = pack("qwen3_5")
    rows, width = batch["input_ids"].shape
    inputs = batch.model_inputs(FAMILIES["qwen3_5"].model(), labels=False)
    for key in ("input_ids", "seq_idx"):
        assert inputs[key].shape == (1, rows * width), key
    of_rows = batch["mrope_position_ids"]  # [R, 4, W]
    assert inputs["position_ids"].shape == (4, 1, rows * width)
    for row in range(rows):
        cells = slice(row * width, (row + 1) * width)
        assert torch.equal(inputs["position_ids"][:, 0, cells], of_rows[row])
    for images in ("pixel_values", "image_grid_thw"):
        assert torch.equal(inputs[images], batch[images].values)
    with pytest.raises(IsolationError, match="in qwen4_exp models: its dilated convolutions"):
        pack("qwen4_exp").model_inputs(FAMILIES["qwen4_exp"].model())
