"""Models in no row of the table: padded batches equal alone, or are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vision.batches import BATCHED, examples_of, largest_difference, layout_of, padded
from tests.vision.families import FAMILIES, MROPE, UNKNOWN, Example, TinyFamily
from torch_collate_kit import PackedCollator, PaddedCollator, PerToken, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

LIMIT = 1e-5  # of the largest logit
PARTS: list[list[Any]] = [
    ["text", (56, 84), "text"],
    ["text"],
    ["text", (28, 28), "ab", (84, 56), "text"],
    ["ab", (84, 84)],
]


def wrapped_examples(family: TinyFamily) -> list[Example]:
    rng = np.random.default_rng(0)
    return [family.example(rng, parts, wrapped=True) for parts in PARTS]


def as_rollout(example: Example, num_actions: int = 2) -> Example:
    """The example as prompt and response; its last tokens are text."""
    ids = example["input_ids"]
    rollout = {key: value for key, value in example.items() if key not in ("input_ids", "labels")}
    parts = {"prompt_ids": ids[:-num_actions], "response_ids": ids[-num_actions:]}
    return {**rollout, **parts, "rewards": 1.0, "loss_mask": [1] * num_actions}


@torch.no_grad()
def difference(family: TinyFamily, batch: Batch, examples: list[Example]) -> float:
    model = family.model()
    expected: list[Tensor] = [
        model(**family.model_inputs(example), use_cache=False).logits[0] for example in examples
    ]
    logits = model(**batch.model_inputs("sdpa", labels=False)).logits
    return largest_difference(batch, logits, expected)


@pytest.mark.parametrize("name", [name for name in UNKNOWN if name != "ovis2"])
def test_a_processor_alone_is_enough_to_pad(name: str) -> None:
    family, examples = UNKNOWN[name], wrapped_examples(UNKNOWN[name])
    assert difference(family, PaddedCollator(family.processor())(examples), examples) < LIMIT


@pytest.mark.parametrize("name", ["ernie4_5_vl_moe", "ovis2"])
def test_rollouts_equal_alone(name: str) -> None:
    family = UNKNOWN[name]
    examples = [
        each for each in wrapped_examples(family) if each["input_ids"][-1] > 20
    ]  # end in text
    assert len(examples) > 1
    collate = RolloutCollator(family.processor(), vision=layout_of(family))
    batch = collate([as_rollout(example) for example in examples])
    assert difference(family, batch, examples) < LIMIT


def test_a_field_per_token_that_is_missing_is_refused() -> None:
    family = UNKNOWN["ernie4_5_vl_moe"]
    layout = layout_of(family)
    examples = wrapped_examples(family)
    for field in layout.token_fields:
        for collate, rows in (
            (PaddedCollator(0, vision=layout), examples),
            (RolloutCollator(0, vision=layout), [as_rollout(each) for each in examples]),
        ):
            without = [{k: v for k, v in row.items() if k != field} for row in rows]
            with pytest.raises(DataError, match=f"example 0 has no {field}, which the model reads"):
                collate(without)
            with pytest.raises(DataError, match=f"example 1: {field} is None; give"):
                collate([rows[0], without[1]])
            short = [{**row, field: row[field][1:]} for row in rows]
            with pytest.raises(DataError, match=rf"example 0: {field} has \d+ entries, .* has \d+"):
                collate(short)
    text = [{k: v for k, v in examples[1].items() if k in ("input_ids", "labels")}]
    assert "pixel_values" not in PaddedCollator(0, vision=layout)(text).model_inputs("sdpa")


@pytest.mark.parametrize("value", [list, np.array, torch.tensor])
def test_a_field_per_token_that_no_processor_names_is_refused(value: Any) -> None:
    """Dropped without a word, it would change what the model computes: by 5.9 of ERNIE."""
    family = UNKNOWN["video_llama_3"]
    layout, examples = layout_of(family), wrapped_examples(family)
    odd = [{**each, "types": value([0] * len(each["input_ids"]))} for each in examples]
    message = r"example 0 has 'types' with one entry per token.*remove it, or declare it in fields"
    with pytest.raises(DataError, match=message):
        PaddedCollator(0, vision=layout)(odd)
    with pytest.raises(DataError, match=message):
        RolloutCollator(0, vision=layout)([as_rollout(each) for each in odd])
    declared = PaddedCollator(0, vision=layout, fields={"types": PerToken(torch.int64)})
    assert declared(odd)["types"].shape == declared(odd)["input_ids"].shape
    for other in ("a note", 3, None, {"a": 1}, ["one", "two"], [[1, 2]], np.zeros(3), 1.5):
        noted = [{**each, "note": other} for each in examples]
        assert PaddedCollator(0, vision=layout)(noted)


def test_another_placeholder_than_the_processors_needs_the_config() -> None:
    """Ovis2's processor names <image>, which no id of its output is."""
    family = UNKNOWN["ovis2"]
    assert layout_of(family).image_token_id == family.image_token_id
    message = (
        r"example 0 has 0 image placeholders \(token 5\) in its ids.*uncut, and the model's "
        r"config: vision=VisionLayout\.of\(processor, model\.config\)$"
    )
    with pytest.raises(DataError, match=message):
        PaddedCollator(family.processor())(wrapped_examples(family))


# --- Processor, config and fields that do not belong together are refused, not taken silently


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
