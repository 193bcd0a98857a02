"""Causal attention along the paths of rows whose segments share prefixes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_collate_kit.attention.kernels import Segments, fits_kernel, load_kernel, same_dtype


def attend_along_paths(
    path_cells: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from runs of cells to their paths: a new tensor [B, T, H, D].

    Keys and values of each path are gathered by ``path_cells``, int64 [K] over all rows, so they
    take the memory that the tokens would without shared cells. Query i of a run of n sees all but
    the last ``n - 1 - i`` of its path; with ``window`` the latest ``window`` of them.
    """
    num_rows, _, width, _ = query.shape
    query, key, value = same_dtype(query, key, value)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    key, value = (x.index_select(0, path_cells) for x in (key, value))
    kernel = load_kernel() if fits_kernel(query, value) else None
    if kernel is not None and kernel.takes_window:
        output = kernel.run(query, key, value, segments, scale, window)
    else:
        output = _by_run(query, key, value, segments, scale, window)
    return output.view(num_rows, width, *output.shape[1:])


def _by_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend run by run, with boundaries on the host."""
    sizes = [torch.diff(bounds).tolist() for bounds in segments[:2]]
    parts = zip(
        torch.split(query, sizes[0]), *(torch.split(of, sizes[1]) for of in (key, value)),
        strict=True,
    )  # fmt: skip
    return torch.cat([_lower_right(q, k, v, scale, window) for q, k, v in parts])


def _lower_right(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attend causally, [n, H, D] to [m, Hkv, D], the last query to all keys."""
    n, m = len(query), len(key)
    mask = None
    if n != m or (window is not None and window < m):
        mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
        if window is not None:
            mask = mask.triu(m - n + 1 - window)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)
