"""Model FLOPs of a training step, and the peak of known GPUs: what MFU is made of.

MFU, model FLOPs utilization, is the work that the model asks for, over what the GPU could do in
that time: ``flops_per_step(config, lengths) / seconds / peak_flops(name)``. Forward and backward
passes count, three times the forward pass. What is computed again (gradient checkpointing) does not
count, nor do pads, nor attention between examples.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["flops_per_step", "flops_per_token", "peak_flops"]

# Dense bf16 with fp32 sums, in TFLOP/s, from NVIDIA's data sheets ("with sparsity" halved), and for
# the RTX 4090 from its Ada whitepaper. Names as torch.cuda.get_device_name() gives them; the first
# that is in the name counts.
_PEAKS = {
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,  # "NVIDIA H100 80GB HBM3" is SXM
    "A100": 312.0,
    "L40S": 362.05,
    "RTX 4090": 165.2,
}
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU that ``torch.cuda.get_device_name()`` names; None if unknown.

    A part of a GPU (MIG), and a slower GPU of a similar name, are unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3") / 1e12, peak_flops("Tesla T4")
    (989.4, None)
    """
    if " MIG " in device_name or device_name.endswith(("Laptop GPU", "RTX 4090 D")):
        return None
    for name, peak in _PEAKS.items():
        if name in device_name:
            return peak * 1e12
    return None


def flops_per_step(
    config: Any,
    lengths: npt.ArrayLike,
    *,
    num_head_tokens: int | None = None,
    num_adapter_parameters: int | None = None,
) -> float:
    """FLOPs of the forward and backward pass over examples of these true lengths.

    ``6 * matmul parameters * tokens``, and for causal attention ``12 * heads * head_dim`` for each
    layer and each pair of a token and one that it sees: ``n * (n + 1) / 2`` pairs in an example of
    n tokens, fewer with a sliding window.

    Args:
        config: of a transformers language model (dense, or a mixture of experts).
        lengths: tokens of every example, without pads, ints [N].
        num_head_tokens: tokens that pass the last layer, where a loss needs the logits of trained
            tokens only; None: all.
        num_adapter_parameters: of LoRA adapters, with all else frozen: a frozen weight has no
            gradient and costs 4 per token, in place of 6; None: all weights are trained.

    Raises:
        ValueError: a layer that is no attention (recurrent layers); adapters in a mixture of
            experts.

    >>> import transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
    ...     num_attention_heads=2)
    >>> flops_per_step(config, [3, 1])  # 6 * (4 * 8 * 8 + 3 * 8 * 16 + 8 * 10) * 4 + 12 * 8 * 7
    17952.0
    """
    lengths_N = np.asarray(lengths, dtype=np.float64)
    text = config.get_text_config()
    layers, head = flops_per_token(text)
    num_tokens = lengths_N.sum()
    linear = layers * num_tokens + head * (
        num_tokens if num_head_tokens is None else num_head_tokens
    )
    if num_adapter_parameters is not None:
        if _experts(text)[0]:
            raise ValueError(
                "the FLOPs of adapters in a mixture of experts are not known: how many tokens pass "
                "them depends on where they are; leave MFU out for this model"
            )
        linear = linear * 4 / 6 + 6 * num_adapter_parameters * num_tokens
    of_pair = 6 * text.num_attention_heads * _head_sizes(text)
    pairs = sum(count * _seen(lengths_N, window) for window, count in _windows(text).items())
    return float(linear + of_pair * pairs)


def flops_per_token(config: Any) -> tuple[float, float]:
    """FLOPs of the linear layers per token, forward and backward: of all but the head, of the head.

    >>> import transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
    ...     num_attention_heads=2)
    >>> flops_per_token(config)
    (3840.0, 480.0)
    """
    return _counted(type(config), json.dumps(config.to_dict(), sort_keys=True, default=str))


@functools.cache
def _counted(config_type: type, written: str) -> tuple[float, float]:
    """Counted on a model without memory: every matrix is one product per token.

    Of experts, a token passes those that it is routed to. Embeddings are looked up.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_type.from_dict(json.loads(written))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    output = model.get_output_embeddings().weight
    looked_up = {
        id(weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    experts, taken = _experts(config)
    layers = 0.0
    for weight in model.parameters():
        if weight.ndim < 2 or weight is output or id(weight) in looked_up:
            continue
        is_of_experts = weight.ndim == 3 and weight.shape[0] == experts
        layers += weight.numel() * (taken / experts if is_of_experts else 1)
    return 6.0 * layers, 6.0 * output.numel()


def _experts(config: Any) -> tuple[int, int]:
    """How many a layer has, and how many of them a token passes; 0 in a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((n for name in names if (n := getattr(config, name, None))), 0)
    return number, getattr(config, "num_experts_per_tok", None) or 0


def _head_sizes(config: Any) -> int:
    """Entries of a key and of a value, of one head: they differ in DeepSeek's models."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key = getattr(config, "qk_head_dim", None) or size
    return key + (getattr(config, "v_head_dim", None) or size)


def _windows(config: Any) -> dict[int | None, int]:
    """How many layers have each window; None: a token sees all before it."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return {window: config.num_hidden_layers}
    chunk = getattr(config, "attention_chunk_size", None)
    windows: dict[int | None, int] = {}
    for kind in kinds:
        known = {_FULL: None, _SLIDING: window, _CHUNKED: chunk}
        if kind not in known:
            raise ValueError(
                f"the FLOPs of a {kind!r} layer are not known, only those of {sorted(known)}; "
                "leave MFU out for this model"
            )
        windows[known[kind]] = windows.get(known[kind], 0) + 1
    return windows


def _seen(lengths_N: np.ndarray, window: int | None) -> float:
    """Pairs of a token and one that it sees, itself included."""
    cut = lengths_N if window is None else np.minimum(lengths_N, window)
    return float((cut * (cut + 1) / 2 + (lengths_N - cut) * cut).sum())
