"""Kernels of ``causal_conv1d``, ``fla`` and ``mamba_ssm`` in plain torch, token by token.

They have the names, keywords and refusals of the packages, and nothing of their speed. Where a
segment begins, the state is replaced, not multiplied by zero, so its gradient is exactly 0.0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

device_reads = [0]
"""How often boundaries were read from the device, because there was no copy in host memory."""


def _refuse(fault: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if fault:
        raise error(message)


def _check_seq_idx(seq_idx: Tensor, rows: int, tokens: int) -> None:
    _refuse(seq_idx.dtype != torch.int32, f"seq_idx must be int32, got {seq_idx.dtype}")
    fits = seq_idx.shape == (rows, tokens) and seq_idx.is_contiguous()
    _refuse(not fits, f"seq_idx must be contiguous [{rows}, {tokens}], got {list(seq_idx.shape)}")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve ``x`` [B, D, T] by channel, ``weight`` [D, width]."""
    width = weight.shape[-1]
    _refuse(not 2 <= width <= 4, f"width must be between 2 and 4, got {width}")
    _refuse(activation not in (None, "silu", "swish"), f"activation {activation}")
    _refuse(initial_states is not None or return_final_states, "states are for generation")
    taps = F.pad(x, (width - 1, 0)).unfold(-1, width, 1)
    if seq_idx is not None:
        _check_seq_idx(seq_idx, x.shape[0], x.shape[2])
        _refuse(x.stride(1) != 1, "seq_idx needs the channels last")
        of_taps = F.pad(seq_idx, (width - 1, 0), value=-1).unfold(-1, width, 1)
        taps = taps.where((of_taps == seq_idx[..., None])[:, None], 0.0)
    out = (taps.float() * weight.float()[:, None]).sum(-1)
    out = out if bias is None else out + bias.float()[:, None]
    out = out if activation is None else F.silu(out)
    if seq_idx is not None:
        out = out.where(seq_idx[:, None] >= 0, 0.0)
    return out.to(x.dtype)


def _first_tokens(num_tokens: int, rows: int, cu_seqlens: Any, cu_seqlens_cpu: Any) -> set[int]:
    """Return where segments of the one row begin; {0} of several rows."""
    if cu_seqlens is None:
        return {0}
    text = f"The batch size is expected to be 1 rather than {rows} when using `cu_seqlens`."
    _refuse(rows != 1, text, ValueError)
    device_reads[0] += cu_seqlens_cpu is None
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    _refuse(bounds != cu_seqlens.tolist() or bounds[-1] != num_tokens, f"cu_seqlens {bounds}")
    return set(bounds[:-1])


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Any:
    """Return the outputs [B, T, H, V]; ``g`` and ``beta`` are [B, T, H]."""
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, False)
    return chunk_kda(q, k, v, g[..., None], beta, *options, cu_seqlens, cu_seqlens_cpu)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Any:
    """Return the outputs [B, T, H, V]; the decay ``g`` is [B, T, H, K or 1]."""
    _refuse(use_gate_in_kernel, "the gate of this stand-in is outside the kernel")
    _refuse(initial_state is not None, "states are for generation")
    first = _first_tokens(q.shape[1], q.shape[0], cu_seqlens, cu_seqlens_cpu)
    repeats = v.shape[2] // q.shape[2]  # value heads per key head
    dtype, (q, k, v, g, beta) = q.dtype, (each.float() for each in (q, k, v, g, beta))
    q, k = (each.repeat_interleave(repeats, dim=2) for each in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state, outputs = None, []
    for t in range(q.shape[1]):
        k_t, v_t = k[:, t, :, :, None], v[:, t, :, None]
        if t in first:
            state = torch.zeros_like(k_t * v_t)
        state = state * g[:, t].exp()[..., None]
        missing = v_t - (k_t * state).sum(-2, keepdim=True)
        state = state + k_t * missing * beta[:, t, :, None, None]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, 1).to(dtype), (state if output_final_state else None)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,  # of the returned states alone
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    """Return the outputs of ``x`` [R, T, H, P] with ``B`` and ``C`` [R, T, groups, N]."""
    _refuse(initial_states is not None or return_final_states, "states are for generation")
    _refuse(z is not None or return_varlen_states, "not in this stand-in")
    rows, tokens, heads, _ = x.shape
    if seq_idx is not None:
        _check_seq_idx(seq_idx, rows, tokens)
    dtype, x, dt = x.dtype, x.float(), dt.float()
    dt = dt if dt_bias is None else dt + dt_bias.float()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (each.float().repeat_interleave(heads // each.shape[2], dim=2) for each in (B, C))
    decay, pushed = (dt * A.float()).exp(), dt[..., None] * x
    state, outputs = torch.zeros_like(pushed[:, 0, :, :, None] * B[:, 0, :, None]), []
    for t in range(tokens):
        if t and seq_idx is not None:
            goes_on = (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
            state = state.where(goes_on, 0.0)
        state = state * decay[:, t, :, None, None] + pushed[:, t, :, :, None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1))
    out = torch.stack(outputs, 1)
    return (out if D is None else out + x * D.float()[:, None]).to(dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Return the mixer's output of the projected states [R, T, ...]."""
    _refuse(norm_before_gate, "the stand-in gates before the norm")
    rows, tokens, _ = zxbcdt.shape
    heads = D.shape[0]
    inner = heads * headdim
    conv, dt_and_more = conv1d_weight.shape[0], zxbcdt.shape[-1] - heads
    z, conv_in, dt = zxbcdt.split([dt_and_more - conv, conv, heads], dim=-1)
    out = causal_conv1d_fn(
        conv_in.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation
    ).transpose(1, 2)
    x, B, C = out.split([inner, (conv - inner) // 2, (conv - inner) // 2], dim=-1)
    B, C = (each.reshape(rows, tokens, ngroups, -1) for each in (B, C))
    y = mamba_chunk_scan_combined(
        x.reshape(rows, tokens, heads, headdim),
        *(dt, A, B, C, chunk_size),
        D=D,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        initial_states=initial_states,
        return_final_states=return_final_states,
    ).reshape(rows, tokens, inner)
    y = y.float() * F.silu(z.float())
    if rmsnorm_weight is not None:
        groups = y.view(rows, tokens, ngroups, -1)
        y = F.rms_norm(groups, groups.shape[-1:], eps=rmsnorm_eps).view_as(y) * rmsnorm_weight
    y = y.to(zxbcdt.dtype)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)
