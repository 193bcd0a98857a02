"""Packages of CUDA kernels that look installed in this process; plain torch is behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

# --- ``flash_attn`` 2 and ``flash_attn_interface`` (3) in plain torch, segment by segment


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


# --- Kernels of ``causal_conv1d``, ``fla`` and ``mamba_ssm`` in plain torch, token by token


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


# --- packages that look installed

_MODULES: dict[str, dict[str, Any]] = {
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "fla.ops.kda": {"chunk_kda": chunk_kda},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
    "flash_attn": {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": unused,
    },
    "flash_attn.bert_padding": {"pad_input": unused, "unpad_input": unused},
    "flash_attn_interface": {
        "flash_attn_func": interface_func,
        "flash_attn_varlen_func": interface_varlen_func,
        "flash_attn_with_kvcache": unused,
    },
}
_DISTRIBUTIONS = {  # name: version, module
    "causal-conv1d": ("1.7.0", "causal_conv1d"),
    "flash-linear-attention": ("0.6.0", "fla"),
    "mamba-ssm": ("2.3.2", "mamba_ssm"),
    "flash-attn": ("2.8.3", "flash_attn"),
    "flash-attn-3": ("3.0.0", "flash_attn_interface"),
}


class _Distribution(Distribution):
    def __init__(self, name: str, version: str, module: str) -> None:
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self._texts = {"METADATA": head, "top_level.txt": module}

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder(DistributionFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        wanted = getattr(context, "name", None)
        for name, (version, module) in _DISTRIBUTIONS.items():
            if wanted is None or wanted.replace("_", "-") == name:
                yield _Distribution(name, version, module)


def install() -> None:
    """Make the packages importable; before transformers is imported, which binds them then."""
    assert "transformers" not in sys.modules, "call install() before transformers is imported"
    for path, functions in _MODULES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__spec__ = ModuleSpec(name, None, is_package=True)
                module.__path__ = []
                sys.modules[name] = module
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(sys.modules[path]).update(functions)
    sys.meta_path.insert(0, _Finder())


def claim_cuda() -> None:
    """Let transformers find the CUDA device that it demands of FlashAttention, from now on."""
    from transformers.utils import import_utils

    with mock.patch("torch.cuda.is_available", return_value=True):
        import_utils.is_torch_cuda_available.cache_clear()
        checks = [getattr(import_utils, f"is_flash_attn_{version}_available") for version in (2, 3)]
        for check in checks:
            check.cache_clear()
            assert check(), check
