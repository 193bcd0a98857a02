"""Forward FLOPs of the layers of a transformers model, read from its config."""

from __future__ import annotations

from typing import Any

import numpy as np

_KINDS = ["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def layer_flops(config: Any) -> tuple[int, int, int, int]:
    """Return FLOPs per token, per causal pair of tokens, of these in windows; a window's tokens."""
    if getattr(config, "is_heterogeneous", False):
        raise _unknown(config, "layers of different sizes")
    hidden = _size(config, "embed_dim", "hidden_size")
    layers = _size(config, "depth", "num_hidden_layers")
    slides = _size(config, "sliding_window", default=0) > 0  # all layers, as in Mistral
    slides = slides and getattr(config, "use_sliding_window", True)
    kinds = list(getattr(config, "layer_types", None) or [_KINDS[slides]] * layers)
    if others := {*kinds}.difference(_KINDS):
        raise _unknown(config, f"layers of type {min(others)!r}")
    full, sliding, chunked, recurrent = map(kinds.count, _KINDS)
    windowed, name = sliding + chunked, "sliding_window" if sliding else "attention_chunk_size"
    parameters, width = _attention(config, hidden)
    passed = (full + windowed) * parameters + _mlps(config, hidden, layers)
    passed += recurrent * _recurrence(config, hidden) if recurrent else 0
    # of the 4 FLOPs per pair of tokens and head dimension half are causal
    return 2 * passed, full * width, windowed * width, _size(config, name) if windowed else 0


def _attention(config: Any, hidden: int) -> tuple[int, int]:
    """Return the parameters of one layer's projections, and the widths of queries and values."""
    heads = _size(config, "num_heads", "num_attention_heads")
    if latent := _size(config, "kv_lora_rank", default=0):  # keys and values go down and up again
        rope, value = _size(config, "qk_rope_head_dim"), heads * _size(config, "v_head_dim")
        keys, rank = heads * _size(config, "qk_nope_head_dim"), getattr(config, "q_lora_rank", 0)
        queries = heads * rope + keys
        passed = rank * (hidden + queries) if rank else hidden * queries
        return passed + hidden * (latent + rope + value) + latent * (keys + value), queries + value
    width = heads * _size(config, "head_dim", default=hidden // heads)
    key_heads = _size(config, "num_key_value_heads", default=heads)
    # Qwen's models with recurrent layers multiply the attention's output by a gate.
    is_gated = hasattr(config, "linear_num_value_heads") and config.model_type.startswith("qwen")
    return hidden * width * (2 * heads + 2 * key_heads + is_gated * heads) // heads, 2 * width


def _recurrence(config: Any, hidden: int) -> int:
    """Return the parameters and state of one layer with the gated delta rule (Qwen3-Next)."""
    heads, key_dim = _size(config, "linear_num_value_heads"), _size(config, "linear_key_head_dim")
    keys = _size(config, "linear_num_key_heads") * key_dim
    values = heads * _size(config, "linear_value_head_dim")
    convolved = _size(config, "linear_conv_kernel_dim") * (2 * keys + values)
    # a token decays, corrects and reads the state
    return int(hidden * (2 * keys + 3 * values + 2 * heads) + convolved + 3 * values * key_dim)


def _mlps(config: Any, hidden: int, layers: int) -> int:
    """Return the parameters of MLPs and routers that a token passes, of all layers."""
    # configs without a plan of shards: transformers' MLPs with SiLU have a gate, others have none
    plan = " ".join(getattr(config, "base_model_tp_plan", None) or ())
    is_gated = "gate" in plan if "mlp" in plan else getattr(config, "hidden_act", "silu") == "silu"
    matrices, sparse = 3 if is_gated else 2, _num_sparse_layers(config, layers)
    total = 0
    if sparse < layers:
        is_glm = getattr(config, "model_type", "").startswith("glm4v") and hasattr(config, "depth")
        names = ("intermediate_size_mlp", "out_hidden_size" if is_glm else "intermediate_size")
        by_ratio = int(hidden * _size(config, "mlp_ratio", default=0)) or None
        total += (layers - sparse) * matrices * _size(config, *names, default=by_ratio)
    if sparse:
        width = _size(config, "moe_intermediate_size", "intermediate_size")
        given = {name: n for name, n in vars(config).items() if "shared" in name and n}
        shared = [n for name, n in given.items() if name.endswith("intermediate_size")]
        shared += [n * width for name, n in given.items() if name.endswith("experts")]
        shared += [width * hasattr(config, "intermediate_size_mlp")]  # Llama 4 always has one
        inner = _size(config, "num_experts_per_tok") * width + shared[0]
        total += sparse * (_size(config, *_EXPERTS) + matrices * inner)
    return hidden * total


def _num_sparse_layers(config: Any, layers: int) -> int:
    """Return the number of layers that are mixtures of experts."""
    named = [f"{name}={n}" for name, n in vars(config).items() if "num_experts" in name and n]
    experts = _size(config, *_EXPERTS, default=0)
    if getattr(config, "is_moe", None) is False or not (experts or named):
        return 0
    if not experts:
        raise _unknown(config, f"experts under an unknown name, {named[0]}")
    if types := getattr(config, "mlp_layer_types", None):
        return list(types).count("sparse")
    if getattr(config, "moe_layers", None) is not None:
        return len(config.moe_layers)
    step = _size(config, "decoder_sparse_step", default=1)
    dense = getattr(config, "mlp_only_layers", None) or ()
    sparse = range(_size(config, *_FIRST_SPARSE, default=0), layers)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in sparse)


def image_flops(config: Any) -> tuple[int, int]:
    """Return FLOPs of the vision layers per patch and per patch squared, or per tile and 0."""
    linear, quadratic, _, _ = layer_flops(config)
    quadratic *= 2  # not causal
    patch = np.broadcast_to(_size(config, "patch_size"), 2)  # height and width
    if not hasattr(config, "spatial_merge_size"):
        tile = int((_size(config, "image_size") // patch).prod())
        return tile * (linear + quadratic * tile), 0
    if window := _size(config, "window_size", default=0):  # in pixels; some layers are full
        full = quadratic * len(config.fullatt_block_indexes) // config.depth
        linear, quadratic = linear + (quadratic - full) * int(window // patch[0]) ** 2, full
    return linear, quadratic


def _size(config: Any, *names: str, default: int | None = None) -> Any:
    """Return the first of these numbers that the config has and that is not 0, or the default."""
    found = ((name, n) for name in names if (n := getattr(config, name, None)))
    name, value = next(found, (names[-1], default))
    is_list = isinstance(value, list | tuple) and name not in ("image_size", "patch_size")
    if is_list or value is None:
        raise _unknown(config, f"a list of {name}" if is_list else f"no {name}")
    return value


def _unknown(config: Any, what: str) -> ValueError:
    return ValueError(
        f"{type(config).__name__} has {what}, so the cost of the model is not known; give the "
        "numbers: ModelCost(language_linear=..., language_quadratic=..., ...)"
    )
