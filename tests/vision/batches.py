"""Examples of every family and batches of them, and where each example lies in its batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.building import packed_collator
from tests.vision.alone import alone
from tests.vision.families import FAMILIES, Example, Part, TinyFamily
from torch_collate_kit import PaddedCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.vision import VisionLayout

MIXED: list[list[Part]] = [
    ["text", (56, 84), "text"],
    ["text"],
    ["text", (28, 28), (84, 56), "text"],  # placeholders of two images touch
    [(56, 56), "text"],  # begins with an image
    ["text", (84, 28)],  # ends with one
    ["text"],
    [(28, 84), "text", (56, 56), "text", (56, 28)],
    ["ab", (84, 84)],
]
TEXT: list[list[Part]] = [["text"], ["some more text"], ["text"]]
NOT_PACKED = ("paligemma",)
HYBRID = ("qwen3_5", "qwen4_exp")  # packed in test_hybrids.py
NOT_BATCHED = ("mllama",)
BATCHED = [name for name in FAMILIES if name not in NOT_BATCHED]
PACKED = [name for name in BATCHED if name not in (*NOT_PACKED, *HYBRID)]


def layout_of(family: TinyFamily, **options: Any) -> VisionLayout:
    return VisionLayout.of(family.processor(), family.model().config, **options)


@functools.cache
def examples_of(name: str, seed: int = 0, *, wrapped: bool = False) -> tuple[Example, ...]:
    """The mixed examples; PaliGemma's processor takes no text without an image."""
    family, rng = FAMILIES[name], np.random.default_rng(seed)
    parts = [p for p in MIXED if name != "paligemma" or p != ["text"]]
    return tuple(family.example(rng, part, wrapped=wrapped) for part in parts)


@functools.cache
def text_examples_of(name: str) -> tuple[Example, ...]:
    rng = np.random.default_rng(5)
    return tuple(FAMILIES[name].example(rng, parts) for parts in TEXT)


@functools.cache
def logits_alone(
    name: str, seed: int = 0, *, wrapped: bool = False, attention: str = "sdpa"
) -> tuple[Tensor, ...]:
    """Of every mixed example, [T, V]."""
    family = FAMILIES[name]
    model = family.model(attention)
    return tuple(
        alone(family, model, example)[0] for example in examples_of(name, seed, wrapped=wrapped)
    )


def padded(family: TinyFamily, examples: Sequence[Example], **options: Any) -> Batch:
    vision = options.pop("vision", None) or layout_of(family)
    return PaddedCollator(family.processor(), vision=vision, **options)(list(examples))


def packed(family: TinyFamily, examples: Sequence[Example], **options: Any) -> Batch:
    """In about three rows, if ``max_tokens`` is not given."""
    lengths = [len(example["input_ids"]) for example in examples]
    options.setdefault("max_tokens", max(*lengths, sum(lengths) // 3 + 24))
    vision = options.pop("vision", None) or layout_of(family)
    return packed_collator(family.processor(), vision=vision, **options)(list(examples))


def inputs_of(family: TinyFamily, batch: Batch, attention: str, **options: Any) -> dict[str, Any]:
    """What the model takes; packed images of Gemma-3 need a mask from outside."""
    if family.name == "gemma3" and "cu_seq_lens" in batch and attention in ("sdpa", "eager"):
        window = family.model().config.text_config.sliding_window
        options |= {"mask": "block", "sliding_window": window}
    return batch.model_inputs(attention, labels=False, **options)


def logits_of(family: TinyFamily, batch: Batch, attention: Any = "sdpa") -> Tensor:
    """[R, W, V]; ``attention`` "torch_varlen" is that of the text, with sdpa for the images."""
    by_part = {"text_config": "torch_varlen", "vision_config": "sdpa"}
    model = family.model(by_part if attention == "torch_varlen" else attention)
    with torch.no_grad():
        logits: Tensor = model(**inputs_of(family, batch, attention)).logits
    return logits


def cells_of(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Row, example, first cell and number of tokens of every example, as the batch says it."""
    width = batch["input_ids"].shape[1]
    for row in range(len(batch)):
        lengths = np.asarray(batch["sub_seq_lengths"][row]).tolist()
        indices = np.asarray(batch.row_metadata["example_indices"][row]).tolist()
        if "cu_seq_lens" in batch:
            starts = batch["cu_seq_lens"][row].tolist()[: len(lengths)]
        else:
            mask = batch["attention_mask"][row]
            starts = [int(mask.argmax())]
            assert int(mask.sum()) == lengths[0] <= width
        for start, index, length in zip(starts, indices, lengths, strict=True):
            yield row, index, start, length


def largest_difference(batch: Batch, logits: Tensor, expected: Sequence[Tensor]) -> float:
    """Between the logits of the batch and those of each example alone, of the largest logit."""
    worst, seen = 0.0, []
    for row, index, start, length in cells_of(batch):
        assert len(expected[index]) == length
        found = logits[row, start : start + length]
        worst = max(worst, float((found - expected[index]).abs().max()))
        seen.append(index)
    assert sorted(seen) == list(range(len(expected)))
    return worst / max(float(each.abs().max()) for each in expected)
