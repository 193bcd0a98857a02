"""Examples of every family and batches of them, and each example alone, which they must equal."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.building import packed_collator
from tests.vision.families import FAMILIES, MROPE, Example, Part, TinyFamily
from torch_collate_kit import PaddedCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.vision import VisionLayout


def alone(family: TinyFamily, model: Any, example: Example) -> tuple[Tensor, Tensor, int]:
    """Logits [T, V], the sum of the loss over the targets, and how many targets there are.

    The model makes its own positions. Where placeholders of two images touch, the M-RoPE
    models cannot, so :func:`mrope_positions` makes them.
    """
    with torch.no_grad():
        return _alone(family, model, example)


def alone_gradients(
    family: TinyFamily, examples: Sequence[Example], model: Any = None
) -> dict[str, Tensor]:
    """Gradients of the token-mean loss of all examples, summed example by example.

    ``model`` is ``family.model()`` if not given. Parameters that no example uses are left out.
    ``.grad`` of the model is not touched.
    """
    model = family.model() if model is None else model
    parameters = dict(model.named_parameters())
    totals: dict[str, Tensor] = {}
    num_loss_tokens = 0
    for example in examples:
        _, loss_sum, num_targets = _alone(family, model, example)
        num_loss_tokens += num_targets
        gradients = torch.autograd.grad(loss_sum, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                totals[name] = totals[name] + gradient if name in totals else gradient
    return {name: total / num_loss_tokens for name, total in totals.items()}


def _alone(family: TinyFamily, model: Any, example: Example) -> tuple[Tensor, Tensor, int]:
    inputs = family.model_inputs(example)
    if family.name in MROPE and placeholders_touch(family, example):
        inputs["position_ids"] = positions_alone(family, example)[:, None]
    logits = model(**inputs, use_cache=False).logits[0]
    labels = torch.tensor(example["labels"])
    loss_sum = functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
    return logits, loss_sum, int((labels[1:] != -100).sum())


def placeholders_touch(family: TinyFamily, example: Example) -> bool:
    """Whether some image's placeholders follow another's with no token between."""
    is_image = [False, *(token == family.image_token_id for token in example["input_ids"])]
    runs = sum(now and not before for before, now in itertools.pairwise(is_image))
    return runs < len(example.get("image_grid_thw", ()))


def positions_alone(family: TinyFamily, example: Example) -> Tensor:
    """Positions int64 [3, T] of an example of an M-RoPE family."""
    merge = family.spatial_merge_size
    assert merge is not None, f"{family.name} has no M-RoPE"
    grids = [tuple(grid) for grid in example.get("image_grid_thw", [])]
    return mrope_positions(example["input_ids"], family.image_token_id, grids, merge)


def mrope_positions(
    input_ids: Sequence[int], image_token_id: int, grids: Sequence[tuple[int, int, int]], merge: int
) -> Tensor:
    """Time, row and column positions of each token of one example: int64 [3, T].

    ``grids`` are the (t, h, w) of the images in patches, in the order of their placeholders;
    ``merge`` patches a side share one placeholder.

    >>> mrope_positions([5, 9, 9, 5], 9, [(1, 2, 4)], 2).tolist()  # 1 x 2 placeholders
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    positions = []
    counter = 0  # position of the next text token
    image = -1  # the image that the current placeholder belongs to
    left = 0  # placeholders of this image still to come
    start = index = rows = columns = 0
    for token in input_ids:
        if token != image_token_id:
            assert left == 0, f"text inside image {image}, {left} placeholders before its end"
            positions.append((counter, counter, counter))
            counter += 1
            continue
        if left == 0:
            image += 1
            frames, height, width = (int(n) for n in grids[image])
            rows, columns = height // merge, width // merge
            left, start, index = frames * rows * columns, counter, 0
        frame, cell = divmod(index, rows * columns)
        row, column = divmod(cell, columns)
        positions.append((start + frame, start + row, start + column))
        index, left = index + 1, left - 1
        if left == 0:
            counter = start + max(rows, columns)
    assert left == 0, f"image {image} ends {left} placeholders early"
    assert image + 1 == len(grids), f"placeholders of {image + 1} images, {len(grids)} grids"
    return torch.tensor(positions, dtype=torch.int64).T


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
HYBRID = ("qwen3_5", "qwen4_exp")  # packed with isolated mixers, or kernels
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
