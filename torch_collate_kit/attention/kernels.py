"""Attention within segments: torch's varlen kernel where possible, else SDPA per segment."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SegmentBounds(NamedTuple):
    """Boundaries flat over the rows, int32 [S + 1], and upper bounds of the segment lengths."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentBounds,
    *,
    path_cells: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Attend within segments, causally or to all tokens of one: a new tensor [B, T, H, D].

    ``query`` is [B, H, T, D], ``key`` and ``value`` are [B, Hkv, T, D]. With ``window`` a token
    attends to itself and the ``window - 1`` tokens before it; without ``causal`` after it, too.
    Boundaries on a CUDA device are copied to the host only if the kernel cannot be used (fp32, an
    unsupported head dimension, an old GPU); only then are they checked against the rows.

    With ``path_cells``, int64 [K] over all rows, a segment of n queries attends to keys gathered by
    them, between ``cu_k``: query i sees all but the last ``n - 1 - i``. There may be more rows of
    keys than of queries. The gathered keys take the memory that they would without shared cells.
    """
    num_rows, _, width, _ = query.shape
    if path_cells is None and len(segments.cu_q) <= num_rows:
        raise ValueError(
            f"cu_seq_lens_q has {len(segments.cu_q)} entries for {num_rows} rows: it was cut like "
            "them, as Accelerate's dispatch_batches=True does; pass dispatch_batches=False"
        )
    query, key, value = same_dtype(query, key, value)
    # [B, H, T, D] -> [B * T, H, D]: consecutive rows, as the boundaries count them
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    longest = width if path_cells is None else segments.max_k
    window = None if window is None or window >= longest else window
    kernel = load_kernel() if fits_kernel(query, value) else None
    if kernel is not None and ((window is None and path_cells is None) or kernel.takes_window):
        if path_cells is not None:
            key, value = (x.index_select(0, path_cells) for x in (key, value))
        output = kernel.run(query, key, value, segments, scale, window, causal)
    else:
        run = _one_op if torch.compiler.is_compiling() else _sdpa_by_segment
        bounds = (segments.cu_q, segments.cu_k, path_cells)
        output = run(query, key, value, *bounds, num_rows, scale, window, causal)
    return output.view(num_rows, width, *output.shape[1:])


def same_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert to one dtype: autocast's, or value's, since norms upcast only query and key."""
    device = value.device.type
    dtype = value.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


# Under torch.compile, reading the boundaries would break the graph in every layer. An operator that
# is opaque to the compiler breaks it nowhere, and new lengths cause no recompilation. The backward
# pass recomputes the forward pass, inside its own operator.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, Tensor? path_cells, "
    "SymInt num_rows, float? scale, SymInt? window, bool causal"
)


@torch.library.custom_op(
    "torch_collate_kit::segment_attention",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)
def _one_op(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return _sdpa_by_segment(query, key, value, *rest).contiguous()


@_one_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@torch.library.custom_op(
    "torch_collate_kit::segment_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
def _one_op_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    # autograd is disabled inside an operator, but torch.func still differentiates
    _, pull_back, *_ = torch.func.vjp(
        lambda q, k, v: _sdpa_by_segment(q, k, v, *rest), query, key, value
    )
    return tuple(x.contiguous() for x in pull_back(gradient))


@_one_op_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.rest = inputs[6:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return (*_one_op_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 7)


_one_op.register_autograd(_backward, setup_context=_keep_inputs)


def _segment_lengths(
    cu_q: Tensor, cu_k: Tensor, path_cells: Tensor | None, num_rows: int, width: int, num_keys: int
) -> tuple[list[int], list[int]]:
    """Return the lengths of queries and keys on the host, checked against the rows."""
    bounds: list[int] = cu_q.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if path_cells is None and cu_k is not cu_q and cu_k.tolist() != bounds:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k differ, {bounds} and {cu_k.tolist()}; pass the same"
        )
    row_bounds = range(0, num_rows * width + 1, width)
    if bounds[0] != 0 or bounds[-1] != row_bounds[-1] or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to {row_bounds[-1]} ({num_rows} rows of {width} "
            f"tokens, one after the other), got {bounds}"
        )
    missing = sorted(set(row_bounds) - set(bounds))
    if missing:
        raise ValueError(
            f"cu_seq_lens_q lacks the row boundaries {missing} of {num_rows} rows of {width} "
            f"tokens, so a segment would cross rows; got {bounds}"
        )
    of_keys = lengths
    if path_cells is not None:
        of_keys = _path_lengths(lengths, cu_k.tolist(), path_cells, num_keys)
    kept = [pair for pair in zip(lengths, of_keys, strict=True) if pair[1]]
    return [length for length, _ in kept], [length for _, length in kept]


def _path_lengths(
    lengths: list[int], bounds: list[int], path_cells: Tensor, num_keys: int
) -> list[int]:
    """Return the keys of each segment, checked against its queries and the cells."""
    of_keys = [stop - start for start, stop in pairwise(bounds)]
    fits = len(of_keys) == len(lengths) and bounds[0] == 0 and bounds[-1] == len(path_cells)
    if not fits or any(n > m for n, m in zip(lengths, of_keys, strict=True)):
        raise ValueError(
            f"cu_seq_lens_k must rise from 0 to {len(path_cells)}, the entries of path_cells, with "
            f"a path for each of the {len(lengths)} segments, at least as long; got {bounds} and "
            f"segments of {lengths}"
        )
    if len(path_cells) and not 0 <= int(path_cells.min()) <= int(path_cells.max()) < num_keys:
        raise ValueError(
            f"path_cells must be cells 0 to {num_keys - 1} of the rows, got "
            f"{int(path_cells.min())} to {int(path_cells.max())}; pass what Batch.model_inputs() "
            "returns"
        )
    return of_keys


def _sdpa_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    path_cells: Tensor | None,
    num_rows: int,
    scale: float | None,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """Attend from [N, H, D] to [N, Hkv, D], segment by segment, with boundaries on the host."""
    width = len(query) // num_rows
    lengths, of_keys = _segment_lengths(cu_q, cu_k, path_cells, num_rows, width, len(key))
    if path_cells is not None:
        key, value = (x.index_select(0, path_cells) for x in (key, value))
    per_tensor = ((query, lengths), (key, of_keys), (value, of_keys))
    if len(set(lengths)) == len(set(of_keys)) == 1:  # all as one batch: one call for all of them
        q, k, v = (x.view(len(sizes), sizes[0], *x.shape[1:]) for x, sizes in per_tensor)
        return _sdpa(q, k, v, scale, window, causal).flatten(0, 1)
    pieces = zip(*(torch.split(x, sizes) for x, sizes in per_tensor), strict=True)
    outputs = [_sdpa(q[None], k[None], v[None], scale, window, causal)[0] for q, k, v in pieces]
    return torch.cat(outputs)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, causal: bool
) -> Tensor:
    """Attend, [B, L, H, D], causally the last query to all keys, or those in its ``window``."""
    length, seen = query.shape[1], key.shape[1]
    mask = None
    if length != seen or (window is not None and window < seen):
        after = 0 if causal or window is None else window - 1
        mask = torch.ones(length, seen, dtype=torch.bool, device=query.device)
        mask = mask.tril(seen - length + after)
        if window is not None:
            mask = mask.triu(seen - length + 1 - window)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    causal = causal and mask is None
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return output.transpose(1, 2)


_LOADED: list[_Kernel] = []


def load_kernel() -> _Kernel:
    """Load the varlen kernel of torch, once."""
    if not _LOADED:  # functools.cache makes torch.compile warn, and trace import and signature
        from torch.nn.attention.varlen import varlen_attn

        _LOADED.append(_Kernel(varlen_attn))
    return _LOADED[0]


class _Kernel:
    """One signature for torch 2.10 (only is_causal), 2.11 (scale, window) and 2.12 (GQA)."""

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self._run = varlen_attn
        self._accepted = frozenset(inspect.signature(varlen_attn).parameters)
        self.takes_window = "window_size" in self._accepted

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: SegmentBounds,
        scale: float | None,
        window: int | None,
        causal: bool = True,
    ) -> Tensor:
        options: dict[str, Any] = {}
        groups = query.shape[1] // key.shape[1]
        if "enable_gqa" in self._accepted:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if "scale" in self._accepted:
            options["scale"] = scale
        elif scale is not None and not math.isclose(scale, default := query.shape[2] ** -0.5):
            query = query * (scale / default)
        if self.takes_window:  # (left, right) neighbours; must be a tuple, which torch compares
            before = -1 if window is None else window - 1
            options["window_size"] = (before, 0 if causal else before)
        else:
            options["is_causal"] = causal
        cu_q, cu_k = (cu.to(query.device, torch.int32) for cu in segments[:2])
        return self._run(query, key, value, cu_q, cu_k, *segments[2:], **options)


def fits_kernel(query: Tensor, value: Tensor) -> bool:
    """Check whether the kernel supports these inputs, by the rules in torch's source."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim == value.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
