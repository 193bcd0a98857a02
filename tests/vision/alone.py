"""The result that a batch must reproduce: each example alone, in a batch of 1, without a mask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.vision.families import MROPE, Example, TinyFamily


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
