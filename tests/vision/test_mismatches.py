"""Processor, config and fields that do not belong together are refused, not taken silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.vision.batches import BATCHED, examples_of, layout_of, padded
from tests.vision.families import FAMILIES, MROPE
from torch_collate_kit import PackedCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout


@pytest.mark.parametrize(
    ("processor", "config", "message"),
    [
        ("qwen2_5_vl", "internvl", "image_grid_thw, and internvl models read pixel_values; load"),
        ("llava_next", "llava_onevision", "models read pixel_values, image_sizes, batch_num_imag"),
        ("qwen2_5_vl", "qwen3_vl", "patch_size=14, the qwen3_vl config says patch_size=16; load"),
    ],
)
def test_processor_and_config_of_two_models_are_refused(
    processor: str, config: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        VisionLayout.of(FAMILIES[processor].processor(), FAMILIES[config].model().config)


def test_no_model_that_shares_a_processor_is_missing() -> None:
    """Of the transformers installed: the models of every processor class of the families."""
    processing = pytest.importorskip("transformers.models.auto.processing_auto")
    configs = pytest.importorskip("transformers.models.auto.configuration_auto")
    for family in (FAMILIES[name] for name in BATCHED):
        name = type(family.processor()).__name__
        having = [t for t, of in processing.PROCESSOR_MAPPING_NAMES.items() if of == name]
        listed = VisionLayout.of(family.processor()).shared_by or having[:1]
        existing = [t for t in listed if t in configs.CONFIG_MAPPING_NAMES]
        assert sorted(existing) == sorted(having), name


@pytest.mark.parametrize("name", MROPE)
def test_replaced_position_ids_are_not_lost(name: str) -> None:
    family, examples = FAMILIES[name], examples_of(name)
    batch = padded(family, examples)
    inputs = batch.model_inputs("sdpa")
    replaced = batch.with_fields(position_ids=batch["position_ids"] + 1)
    with pytest.raises(ValueError, match=r"were replaced, and a \w+ model gets mrope_position_ids"):
        replaced.model_inputs("sdpa")
    with pytest.raises(ValueError, match="so they would be lost"):
        replaced[1:3].model_inputs("sdpa")
    other = batch.with_fields(mrope_position_ids=batch["mrope_position_ids"] + 1)
    assert torch.equal(other.model_inputs("sdpa")["position_ids"], inputs["position_ids"] + 1)
    changed = padded(family, examples)
    changed["position_ids"][:] = 3  # in place
    with pytest.raises(ValueError, match="so they would be lost"):
        changed.model_inputs("sdpa")

    grids = batch["image_grid_thw"]
    swapped = Ragged(grids.values.flip(0), grids.offsets)
    with pytest.raises(ValueError, match="image_grid_thw was replaced, and mrope_position_ids fol"):
        batch.with_fields(image_grid_thw=swapped).model_inputs("sdpa")
    both = other.with_fields(image_grid_thw=swapped)
    assert torch.equal(both.model_inputs("sdpa")["image_grid_thw"], grids.values.flip(0))


def test_batches_of_two_models_are_not_joined() -> None:
    def of(name: str, **options: Any) -> Batch:
        [example, *_] = examples_of("qwen2_5_vl")
        layout = layout_of(FAMILIES[name], **options)
        collate = PackedCollator(0, vision=layout, max_tokens=64, fixed_width=True)
        return collate([example])

    again = {"num_examples": 2, "num_loss_tokens": 2}
    assert len(Batch.cat([of("qwen2_5_vl"), of("qwen2_5_vl")], metadata=again)) == 2
    message = r"batch 1 was collated with VisionLayout\(family_name='{}', .* batch 0 with Vision.*"
    with pytest.raises(ValueError, match=message.format("glm4v") + "the processor of one model"):
        Batch.cat([of("qwen2_5_vl"), of("glm4v")], metadata=again)
    with pytest.raises(ValueError, match=message.format("qwen2_5_vl") + "and one pixel_dtype"):
        Batch.cat([of("qwen2_5_vl"), of("qwen2_5_vl", pixel_dtype="bfloat16")], metadata=again)
