"""Forward FLOPs of the layers of a transformers model, read from its config."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def language_flops(config: Any) -> tuple[int, int, int, int]:
    """Return FLOPs per token, per token squared, the latter in windows, and a window's tokens."""
    if getattr(config, "is_heterogeneous", False):
        raise _unknown(config, "layers of different sizes")
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    slides = _size(config, "sliding_window", default=0) > 0  # all layers, as in Mistral
    slides = slides and getattr(config, "use_sliding_window", True)
    one_kind = ["sliding_attention" if slides else "full_attention"] * layers
    kinds = Counter(getattr(config, "layer_types", None) or one_kind)
    names = ("full_attention", "linear_attention", "sliding_attention", "chunked_attention")
    full, recurrent, sliding, chunked = (kinds.pop(name, 0) for name in names)
    if kinds:
        raise _unknown(config, f"layers of type {min(kinds)!r}")
    windowed, name = sliding + chunked, "sliding_window" if sliding else "attention_chunk_size"
    window = _size(config, name) if windowed else 0
    parameters, width = _attention(config, hidden)
    passed = (full + windowed) * parameters
    passed += recurrent * _recurrence(config, hidden) if recurrent else 0
    sparse, matrices = _num_sparse_layers(config, layers), _num_matrices(config)
    if sparse < layers:
        size = _size(config, "intermediate_size_mlp", "intermediate_size")
        passed += (layers - sparse) * matrices * hidden * size
    if sparse:  # the router, the experts that a token is sent to, and the shared ones
        each = _size(config, "num_experts_per_token", "num_experts_per_tok")
        is_llama4 = hasattr(config, "intermediate_size_mlp")  # it always has one shared expert
        each += 1 if is_llama4 else _size(config, *_SHARED_EXPERTS, default=0)
        experts = each * _size(config, "moe_intermediate_size", "intermediate_size")
        experts += _size(config, *_SHARED_WIDTHS, default=0)
        passed += sparse * hidden * (_size(config, *_EXPERTS) + matrices * experts)
    # of the 4 FLOPs per pair of tokens and head dimension half are causal
    return 2 * passed, full * width, windowed * width, window


def _attention(config: Any, hidden: int) -> tuple[int, int]:
    """Return the parameters of one layer's projections, and the widths of queries and values."""
    heads, latent = _size(config, "num_attention_heads"), _size(config, "kv_lora_rank", default=0)
    if latent:  # keys and values are projected down and up again (DeepSeek)
        rope, value = _size(config, "qk_rope_head_dim"), _size(config, "v_head_dim")
        key = _size(config, "qk_nope_head_dim")
        query, rank = rope + key, _size(config, "q_lora_rank", default=0)
        parameters = rank * (hidden + heads * query) if rank else hidden * heads * query
        parameters += hidden * (latent + rope + heads * value) + latent * heads * (key + value)
        return parameters, heads * (query + value)
    head_dim = _size(config, "head_dim", default=hidden // heads)
    key_heads = _size(config, "num_key_value_heads", default=heads)
    # Qwen's models with recurrent layers multiply the attention's output by a gate.
    is_hybrid = bool(_size(config, "linear_num_value_heads", default=0))
    gates = heads if is_hybrid and getattr(config, "model_type", "").startswith("qwen") else 0
    return hidden * head_dim * (2 * heads + 2 * key_heads + gates), 2 * heads * head_dim


def _recurrence(config: Any, hidden: int) -> int:
    """Return the parameters and state of one layer with the gated delta rule (Qwen3-Next)."""
    heads = _size(config, "linear_num_value_heads")
    key_dim, value_dim = (_size(config, f"linear_{name}_head_dim") for name in ("key", "value"))
    keys, values = _size(config, "linear_num_key_heads") * key_dim, heads * value_dim
    passed = hidden * (2 * keys + 3 * values + 2 * heads)
    passed += _size(config, "linear_conv_kernel_dim") * (2 * keys + values)
    return int(passed + 3 * values * key_dim)  # a token decays, corrects and reads the state


def _num_matrices(config: Any) -> int:
    """Return the matrices of an MLP: 3 with a gate, as named in the plan of its shards, or 2."""
    # configs without a plan: transformers' MLPs with SiLU have a gate, others have none
    plan = " ".join(getattr(config, "base_model_tp_plan", None) or ())
    is_gated = "gate" in plan if "mlp" in plan else getattr(config, "hidden_act", "silu") == "silu"
    return 3 if is_gated else 2


def _num_sparse_layers(config: Any, layers: int) -> int:
    """Return the number of layers that are mixtures of experts."""
    if getattr(config, "is_moe", None) is False:
        return 0
    if not _size(config, *_EXPERTS, default=0):
        for name, value in vars(config).items():
            if "num_experts" in name and value:
                raise _unknown(config, f"experts under an unknown name, {name}={value}")
        return 0
    if types := getattr(config, "mlp_layer_types", None):
        return list(types).count("sparse")
    if getattr(config, "moe_layers", None) is not None:
        return len(config.moe_layers)
    step = _size(config, "decoder_sparse_step", default=1)
    dense = getattr(config, "mlp_only_layers", None) or ()
    sparse = range(_size(config, *_FIRST_SPARSE, default=0), layers)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in sparse)


def vision_flops(config: Any) -> tuple[int, int]:
    """Return FLOPs of the vision layers per patch and per patch squared, or per tile and 0."""
    hidden = _size(config, "embed_dim", "hidden_size")
    layers = _size(config, "depth", "num_hidden_layers")
    if hasattr(config, "mlp_ratio") and not hasattr(config, "intermediate_size"):
        inner = int(hidden * config.mlp_ratio)
    else:
        is_glm = getattr(config, "model_type", "").startswith("glm4v")
        inner = _size(config, "out_hidden_size" if is_glm else "intermediate_size")
    linear = 2 * layers * hidden * (4 * hidden + _num_matrices(config) * inner)
    quadratic = 4 * layers * hidden
    patch = np.broadcast_to(_size(config, "patch_size"), 2)  # height and width
    if not hasattr(config, "spatial_merge_size"):
        tile = int((_size(config, "image_size") // patch).prod())
        return tile * (linear + quadratic * tile), 0
    window = _size(config, "window_size", default=0)
    if window:  # in pixels; outside of it only some layers attend
        windowed = 4 * hidden * (layers - len(config.fullatt_block_indexes))
        linear += windowed * int(window // patch[0]) ** 2
        quadratic -= windowed
    return linear, quadratic


def _size(config: Any, *names: str, default: int | None = None) -> Any:
    """Return the first of these numbers that the config has and that is not 0, or the default."""
    found = ((name, n) for name in names if (n := getattr(config, name, None)))
    name, value = next(found, (names[-1], default))
    if value is None:
        raise _unknown(config, f"no {name}")
    if isinstance(value, list | tuple) and name not in ("image_size", "patch_size"):
        raise _unknown(config, f"a list of {name}")
    return value


def _unknown(config: Any, what: str) -> ValueError:
    return ValueError(
        f"{type(config).__name__} has {what}, so the cost of the model is not known; give the "
        "numbers: ModelCost(language_linear=..., language_quadratic=..., ...)"
    )
