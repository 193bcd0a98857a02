"""What ``Batch.model_inputs`` may be asked for, and the masks that it makes for some models.

Most models of transformers see from positions that restart where a packed example begins. Some
build their mask without looking at them, and need it from outside.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_collate_kit.ragged import Ragged
from torch_collate_kit.segments import check_boundaries

__all__ = [
    "block_mask",
    "flat_cu_seq_lens",
    "is_varlen",
    "refuse_unknown_mask",
    "segments_of_cells",
]

_MASK_ATTENTION = ("sdpa", "eager", "flex_attention")
_TAKES_4D_MASK = ("sdpa", "eager")


def is_varlen(attention: Any) -> bool:
    """Whether this attention reads boundaries; an unknown one is refused."""
    if attention == "torch_varlen" or _is_flash_attention(attention):
        return True
    if attention not in _MASK_ATTENTION:
        known = ", ".join(("torch_varlen", "flash_attention_2", *_MASK_ATTENTION))
        raise ValueError(f"attention={attention!r} is unknown; use one of {known}")
    return False


def _is_flash_attention(name: Any) -> bool:
    """transformers' own names, and kernels of the hub such as "kernels-community/flash-attn2"."""
    text = str(name)
    return text.startswith("flash_attention_") or ("/" in text and "flash" in text)


def refuse_unknown_mask(attention: str, mask: Any, sliding_window: Any) -> None:
    if mask not in (None, "block"):
        raise ValueError(f'mask={mask!r} is unknown; use "block", or None for no mask')
    if mask is not None and attention not in _TAKES_4D_MASK:
        raise ValueError(
            f'mask="block" is for attention "sdpa" and "eager", got {attention!r}; '
            "attention that reads boundaries needs no mask, flex_attention takes none of this kind"
        )
    if sliding_window is None:
        return
    if mask is None:
        raise ValueError(
            f'sliding_window={sliding_window} without mask="block"; a model that makes its own '
            "masks knows its window"
        )
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int):
        raise TypeError(
            f"sliding_window must be an int, got {type(sliding_window).__name__}; pass "
            "model.config.sliding_window, None for a model without windows"
        )
    if sliding_window < 1:
        raise ValueError(
            f"sliding_window must be at least 1, got {sliding_window}; it counts the token itself"
        )


def flat_cu_seq_lens(rows: Ragged, width: int) -> Tensor:
    """Boundaries [0, ..., R * W] over all rows, without reading the device."""
    check_boundaries(len(rows) * width)
    values = torch.as_tensor(rows.values)
    parts = [row[1:] + i * width for i, row in enumerate(rows)]
    return torch.cat([values.new_zeros(1), *parts])


def segments_of_cells(cu_seq_lens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Which segment every cell lies in: int64 [R, W], from boundaries [S + 1] flat over the rows.

    >>> segments_of_cells(torch.tensor([0, 2, 3, 6]), (2, 3)).tolist()
    [[0, 0, 1], [2, 2, 2]]
    """
    cells = torch.arange(shape[0] * shape[1], device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return torch.searchsorted(cu_seq_lens[1:], cells, right=True).view(shape)


def block_mask(
    segments_RW: Tensor, attention: str, *, window: int | None = None
) -> Tensor | dict[str, Tensor]:
    """[R, 1, W, W]: a cell sees itself and the cells before it in its segment.

    Bool (True: seen) for "sdpa". For "eager", which adds it to the scores, 0 and -inf in bfloat16,
    which every wider dtype takes over exactly. With ``window`` a dict of two, named as
    ``config.layer_types`` names layers.

    >>> block_mask(torch.tensor([[0, 0, 1]]), "sdpa")[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    seen = (segments_RW[:, :, None] == segments_RW[:, None, :]).tril()[:, None]
    full = seen if attention == "sdpa" else _additive(seen)
    if window is None:
        return full
    near = seen.triu(1 - window)
    return {
        "full_attention": full,
        "sliding_attention": near if attention == "sdpa" else _additive(near),
    }


def _additive(seen: Tensor) -> Tensor:
    zeros = torch.zeros(seen.shape, dtype=torch.bfloat16, device=seen.device)
    return zeros.masked_fill_(~seen, -math.inf)
