"""Multimodal rotary positions: where a token lies in time, height and width.

Source: P. Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any
Resolution" (2024), section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mrope_positions"]


def mrope_positions(
    is_image_T: Tensor, grids_N3: Tensor, lengths_S: Tensor, merge_size: int
) -> Tensor:
    """int64 [3, T], positions of the tokens of all examples, each from 0 on.

    Args:
        is_image_T: bool, where a token is the placeholder of an image.
        grids_N3: the images in order, in patches: frames, height and width.
        lengths_S: tokens of each example, 0 allowed.
        merge_size: patches a side that become one token.

    A counter gives a text token its three positions and goes up by 1. An image of ``H * W`` tokens
    takes the counter ``s`` at its first token: there the positions are ``s`` plus frame, row and
    column, and after it the counter is ``s + max(H, W)``. Waits for no device.

    >>> is_image = torch.tensor([False, True, True, False])
    >>> mrope_positions(is_image, torch.tensor([[1, 2, 4]]), torch.tensor([4]), 2).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    grids = grids_N3.long()
    height, width = grids[:, 1] // merge_size, grids[:, 2] // merge_size
    ends = torch.cumsum(grids[:, 0] * height * width, 0)  # placeholders up to the end of each
    number = torch.cumsum(is_image_T, 0) - 1  # of the placeholder, over all images
    image = torch.searchsorted(ends, number, right=True).clamp_(max=len(grids) - 1)
    inside = number - (ends - grids[:, 0] * height * width)[image]  # its place in its image
    largest, columns = torch.maximum(height, width)[image], width[image]
    is_later = is_image_T & (inside > 0)
    steps = torch.where(is_image_T, largest * ~is_later, 1)
    counter = torch.cumsum(steps, 0) - steps
    lengths = lengths_S.long()
    first = torch.cumsum(lengths, 0) - lengths
    padded = torch.cat([counter, counter.new_zeros(1)])  # an example without tokens may be last
    counter -= torch.repeat_interleave(padded[first], lengths, output_size=len(counter))
    counter -= largest * is_later  # s, which later tokens of an image share with its first
    inside = torch.where(is_image_T, inside, 0)
    of_frame = height[image] * columns
    in_frame = inside % of_frame
    offsets = (inside // of_frame, in_frame // columns, in_frame % columns)
    return torch.stack([counter + offset for offset in offsets])
