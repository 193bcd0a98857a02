"""Gradients of logits at the inputs of other segments: exactly 0 if nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.attention.models import keep_random_state, logits_of
from torch_collate_kit.attention.packed_inputs import PackedInputs
from torch_collate_kit.batch.model_kind import unwrap
from torch_collate_kit.errors import IsolationError


class NoGradientError(IsolationError):
    """The model has no gradient that can be used, for the reason of the message."""


def groups_of(num_segments: int) -> Iterator[list[int]]:
    """Yield groups of segments, so that for any two one group has the first without the second.

    >>> list(groups_of(3))
    [[1], [0, 2], [2], [0, 1]]
    """
    for bit in range((num_segments - 1).bit_length()):
        for side in (1, 0):
            yield [segment for segment in range(num_segments) if segment >> bit & 1 == side]


def largest_gradients(model: nn.Module, packed: PackedInputs, targets: list[int]) -> Tensor:
    """Return the largest gradient of the targets' logits at each segment's inputs, float32 [S].

    The inputs are embeddings and pixels. Logits are multiplied with random numbers, and no other
    gradient is computed. Raises NoGradientError if that is not possible.
    """
    ids_RW, images = packed.segments.ids_RW, packed.images
    model = unwrap(model)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), keep_random_state():
            inputs = {  # inference tensors cannot be saved for the backward pass
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in packed.inputs.items()
            }
            pixels = inputs.get("pixel_values") if images is not None else None
            if isinstance(pixels, Tensor) and pixels.is_floating_point():
                pixels.requires_grad_()
            with _embeddings_only(model, ids_RW.shape) as embeddings:
                logits = logits_of(model, inputs)
                torch.autograd.backward(logits, _random_weights(logits, ids_RW, targets))
    except IsolationError:
        raise
    except RuntimeError as error:  # the model ran without gradients before
        raise NoGradientError(f"{type(error).__name__}: {error}") from error
    found = [(ids_RW, leaf.grad.abs().amax(-1)) for leaf in embeddings if leaf.grad is not None]
    if images is not None and pixels is not None and pixels.grad is not None:
        found.append(images.largest(pixels.grad))
    largest = torch.zeros(len(packed.segments.rows), dtype=torch.float32, device=ids_RW.device)
    for segments, values in found:
        real = segments >= 0
        largest.scatter_reduce_(0, segments[real], values[real].float(), "amax")
    if largest.isnan().any() or not largest[targets].any():
        raise NoGradientError("the gradient at its embeddings is NaN, or 0 everywhere")
    return largest


@contextmanager
def _embeddings_only(model: nn.Module, shape: torch.Size) -> Iterator[list[Tensor]]:
    """Collect embeddings of cells as leaves of the graph; parameters get no gradient."""
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(embed, nn.Module):
        raise NoGradientError(f"{type(model).__name__} has no get_input_embeddings()")
    found: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.shape[:2] != shape:
            return output
        found.append(output.detach().requires_grad_())
        return found[-1].clone()  # it may be changed in place

    # reentrant checkpointing allows no backward pass to chosen tensors, so others are frozen
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tied = (m for m in model.modules() if isinstance(m, nn.Embedding))  # T5 calls another one
    same = {embed, *(m for m in tied if m.weight is getattr(embed, "weight", None))}
    handles = [module.register_forward_hook(cut) for module in same]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.requires_grad_()


def _random_weights(logits: Tensor, ids_RW: Tensor, targets: list[int]) -> Tensor:
    """Return a random number of the cell, times one of the token, in the targets: [R, W, V]."""
    generator = torch.Generator().manual_seed(0)
    sizes = (ids_RW.numel(), logits.shape[-1])
    of_cells, of_tokens = (torch.randn(n, generator=generator).to(logits) for n in sizes)
    is_target = torch.isin(ids_RW, torch.tensor(targets, device=ids_RW.device))
    return (of_cells.view(ids_RW.shape) * is_target)[..., None] * of_tokens
