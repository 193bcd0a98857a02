"""Forward FLOPs of the layers of a transformers model, read from its config."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["LanguageFlops", "language_flops", "vision_flops"]

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_WINDOWED = ("sliding_attention", "chunked_attention")
# MLPs of two matrices, which no size in a config tells; all others have a gate, and three.
_WITHOUT_GATE = {"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon"}
_WITHOUT_GATE |= {"phi", "starcoder2"}


class LanguageFlops(NamedTuple):
    """FLOPs of all decoder layers, per token, per token squared, and the latter in windows."""

    linear: int
    quadratic: int
    windowed: int
    window: int
    """Tokens of the window; 0 without one."""


def language_flops(config: Any) -> LanguageFlops:
    """Count the decoder layers that ``config``, of a text model, describes."""
    if getattr(config, "is_heterogeneous", False):
        raise _unknown(config, "layers of different sizes")
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    parameters, width = _attention(config, hidden)
    recurrent, windowed, window = _kinds_of_layers(config, layers)
    passed = (layers - recurrent) * parameters
    passed += recurrent * _recurrence(config, hidden) if recurrent else 0
    sparse = _num_sparse_layers(config, layers)
    if sparse < layers:
        size = _size(config, "intermediate_size_mlp", "intermediate_size")
        matrices = 2 if getattr(config, "model_type", "") in _WITHOUT_GATE else 3
        passed += (layers - sparse) * matrices * hidden * size
    if sparse:  # the router, the experts that a token is sent to, and the shared ones
        size = _size(config, "moe_intermediate_size", "intermediate_size")
        has_one = hasattr(config, "intermediate_size_mlp")  # Llama 4: one shared expert, always
        each = _size(config, "num_experts_per_token", "num_experts_per_tok")
        experts = size * (each + (1 if has_one else _size(config, *_SHARED_EXPERTS, default=0)))
        experts += _size(config, *_SHARED_WIDTH, default=0)
        passed += sparse * hidden * (_size(config, *_EXPERTS, default=0) + 3 * experts)
    # Of the 4 FLOPs per pair of tokens and head dimension half are causal.
    full = layers - recurrent - windowed
    return LanguageFlops(2 * passed, full * width, windowed * width, window)


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
    projections = hidden * (2 * keys + 3 * values + 2 * heads)
    convolution = _size(config, "linear_conv_kernel_dim") * (2 * keys + values)
    # A token decays, corrects and reads the state, key_dim x value_dim per head.
    return int(projections + convolution + 3 * heads * key_dim * value_dim)


def _kinds_of_layers(config: Any, layers: int) -> tuple[int, int, int]:
    """Count the recurrent layers and those with a window; its tokens, 0 without."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "linear_attention", *_WINDOWED})
        if unknown:
            raise _unknown(config, f"layers of type {unknown[0]!r}")
        recurrent, windowed = types.count("linear_attention"), sum(t in _WINDOWED for t in types)
        name = "sliding_window" if "sliding_attention" in types else "attention_chunk_size"
        return recurrent, windowed, _size(config, name) if windowed else 0
    window = _size(config, "sliding_window", default=0)  # of all layers, as in Mistral
    is_used = window > 0 and getattr(config, "use_sliding_window", True)
    return 0, *((layers, window) if is_used else (0, 0))


def _num_sparse_layers(config: Any, layers: int) -> int:
    """Count the layers that are mixtures of experts."""
    if getattr(config, "is_moe", None) is False:
        return 0
    if not _size(config, *_EXPERTS, default=0):
        for name, value in vars(config).items():
            if "num_experts" in name and value:
                raise _unknown(config, f"experts under an unknown name, {name}={value}")
        return 0
    if types := getattr(config, "mlp_layer_types", None):
        return sum(kind == "sparse" for kind in types)
    if getattr(config, "moe_layers", None) is not None:
        return len(config.moe_layers)
    step = _size(config, "decoder_sparse_step", default=1)
    dense = getattr(config, "mlp_only_layers", None) or ()
    sparse = range(_size(config, *_FIRST_SPARSE, default=0), layers)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in sparse)


def vision_flops(config: Any) -> tuple[int, int]:
    """Count the vision layers: FLOPs per patch and per patch squared, or per tile and 0."""
    hidden = _size(config, "embed_dim", "hidden_size")
    layers = _size(config, "depth", "num_hidden_layers")
    if hasattr(config, "mlp_ratio") and not hasattr(config, "intermediate_size"):
        mlp = 2 * hidden * int(hidden * config.mlp_ratio)
    else:
        is_glm = getattr(config, "model_type", "").startswith("glm4v")
        matrices = 3 if getattr(config, "hidden_act", "") == "silu" else 2
        mlp = (
            matrices * hidden * _size(config, "out_hidden_size" if is_glm else "intermediate_size")
        )
    linear, quadratic = 2 * layers * (4 * hidden * hidden + mlp), 4 * layers * hidden
    height, width = _pair(_size(config, "patch_size"))
    if not hasattr(config, "spatial_merge_size"):
        tile_height, tile_width = _pair(_size(config, "image_size"))
        tile = (tile_height // height) * (tile_width // width)
        return tile * (linear + quadratic * tile), 0
    window = _size(config, "window_size", default=0)
    if window:  # in pixels; outside of it only some layers attend
        windowed = 4 * hidden * (layers - len(config.fullatt_block_indexes))
        linear, quadratic = linear + windowed * (window // height) ** 2, quadratic - windowed
    return linear, quadratic


def _pair(size: Any) -> tuple[int, int]:
    """Return height and width of a size that is one number, or both."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


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
