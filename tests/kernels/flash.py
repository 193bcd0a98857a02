"""``flash_attn`` 2 and ``flash_attn_interface`` (3) in plain torch, segment by segment."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the attention of ``q`` [B, T, H, D] to ``k`` and ``v``, heads grouped."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"only fp16 and bf16 are supported, {name} is {tensor.dtype}")
    if q.shape[-1] % 8 or q.shape[2] % k.shape[2]:
        raise RuntimeError(f"head_dim or heads: q {list(q.shape)}, k {list(k.shape)}")
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    left, right = options.get("window_size", (-1, -1))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if options.get("causal"):
        right = 0
    seen &= distance <= left if left >= 0 else seen
    seen &= -distance <= right if right >= 0 else seen
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scale = options.get("softmax_scale")
    return F.scaled_dot_product_attention(
        q, k, v, seen, scale=scale, enable_gqa=True
    ).transpose(1, 2)  # fmt: skip


def _attend_varlen(q: Any, k: Any, v: Any, bounds: dict[str, Any], options: Any) -> Tensor:
    for side in ("q", "k"):
        cu_seqlens, longest = bounds[f"cu_seqlens_{side}"], bounds[f"max_seqlen_{side}"]
        if cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_contiguous():
            raise RuntimeError(f"cu_seqlens_{side} must be contiguous int32, {cu_seqlens.dtype}")
        if int(longest) < int(cu_seqlens.diff().max()):  # the kernel would leave queries out
            raise AssertionError(f"max_seqlen_{side}={longest} is below a segment's length")
    cuts = [bounds[f"cu_seqlens_{side}"].tolist() for side in ("q", "k", "k")]
    parts = [each.tensor_split(cut[1:-1]) for each, cut in zip((q, k, v), cuts, strict=True)]
    outputs = [_attend(*(p[None] for p in part), options)[0] for part in zip(*parts, strict=True)]
    return torch.cat(outputs)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Attend within each row of ``q`` [B, T, H, D]."""
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    return _attend(q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attend within each segment of ``q`` [T, H, D]."""
    bounds = {
        **{"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
        **{"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k},
    }
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    return _attend_varlen(q, k, v, bounds, options)


def interface_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Attend as ``flash_attn_func``; version 3 has no dropout."""
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size)


def interface_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Attend as ``flash_attn_varlen_func``; version 3 has no dropout."""
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *bounds, 0.0, softmax_scale, causal, window_size)


def unused(*_: Any, **__: Any) -> None:
    """Stand for functions of caches and padded rows, which are imported and not called."""
    raise AssertionError("packed rows have neither a cache nor a 2-D mask")
