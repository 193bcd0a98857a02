"""Forward FLOPs of the layers of a transformers model, read from its config."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["LanguageFlops", "language_flops", "vision_flops"]

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_WINDOWED = ("sliding_attention", "chunked_attention")
# Their MLP has two matrices; all others multiply by a gate and have three.
_WITHOUT_GATE = frozenset(
    ("apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi")
) | {"starcoder2"}
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")  # the output is multiplied by a gate for each head_dim
_OF_ALL_LAYERS = ("intermediate_size", "intermediate_size_mlp", "num_attention_heads")
_ADVICE = (
    "so the cost of the model is not known; give the numbers: "
    "ModelCost(language_linear=..., language_quadratic=..., ...)"
)


class LanguageFlops(NamedTuple):
    """Of all decoder layers."""

    linear: int
    """Per token."""
    quadratic: int
    """Per token squared, in layers that attend to all earlier tokens."""
    windowed: int
    """The same in layers with a window, where the sequence is no longer than that."""
    window: int
    """Tokens of the window; 0 without one."""


def language_flops(config: Any) -> LanguageFlops:
    """Of the decoder layers that ``config``, of a text model, describes.

    Raises:
        ValueError: the config lacks a size that is needed, or has layers of an unknown kind.
    """
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(f"{type(config).__name__} has layers of different sizes, {_ADVICE}")
    hidden, num_layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    parameters, width = _attention(config, hidden)
    recurrent, windowed, window = _kinds_of_layers(config, num_layers)
    attending = num_layers - recurrent
    attention = attending * parameters
    if recurrent:
        attention += recurrent * _parameters_of_recurrence(config, hidden)
    sparse = _num_sparse_layers(config, num_layers)
    mlp = 0
    if sparse < num_layers:
        size = getattr(config, "intermediate_size_mlp", None) or _size(config, "intermediate_size")
        matrices = 2 if getattr(config, "model_type", "") in _WITHOUT_GATE else 3
        mlp += (num_layers - sparse) * matrices * hidden * size
    if sparse:
        mlp += sparse * _parameters_of_experts(config, hidden)
    # Of the 4 FLOPs per pair of tokens and head dimension half are causal.
    return LanguageFlops(
        linear=2 * (attention + mlp),
        quadratic=(attending - windowed) * width,
        windowed=windowed * width,
        window=window,
    )


def _attention(config: Any, hidden: int) -> tuple[int, int]:
    """Of one layer: parameters of its projections, and the widths of all queries and values."""
    heads = _size(config, "num_attention_heads")
    if getattr(config, "kv_lora_rank", None):
        return _latent_attention(config, hidden, heads)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    gates = heads if getattr(config, "model_type", "").startswith(_GATED_ATTENTION) else 0
    return hidden * head_dim * (2 * heads + 2 * key_heads + gates), 2 * heads * head_dim


def _latent_attention(config: Any, hidden: int, heads: int) -> tuple[int, int]:
    """As ``_attention``, where keys and values are projected down and up again (DeepSeek)."""
    rope, latent = _size(config, "qk_rope_head_dim"), config.kv_lora_rank
    no_rope, value = _size(config, "qk_nope_head_dim"), _size(config, "v_head_dim")
    query = rope + no_rope
    rank = getattr(config, "q_lora_rank", None)
    parameters = rank * (hidden + heads * query) if rank else hidden * heads * query
    parameters += hidden * (latent + rope) + latent * heads * (no_rope + value)
    return parameters + heads * value * hidden, heads * (query + value)


def _parameters_of_recurrence(config: Any, hidden: int) -> int:
    """Of one layer with the gated delta rule (Qwen3-Next, Qwen3.5), its state included.

    Each token passes the state, key_dim x value_dim per head, three times: it decays and corrects
    it, and reads from it.
    """
    heads = _size(config, "linear_num_value_heads")
    key_dim, value_dim = (_size(config, f"linear_{name}_head_dim") for name in ("key", "value"))
    keys, values = _size(config, "linear_num_key_heads") * key_dim, heads * value_dim
    projections = hidden * (2 * keys + 3 * values + 2 * heads)
    convolution = _size(config, "linear_conv_kernel_dim") * (2 * keys + values)
    return int(projections + convolution + 3 * heads * key_dim * value_dim)


def _kinds_of_layers(config: Any, num_layers: int) -> tuple[int, int, int]:
    """How many layers are recurrent, how many attend to a window, and its tokens (0 without)."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return 0, *_windows_without_types(config, num_layers)
    unknown = sorted(set(types) - {"full_attention", "linear_attention", *_WINDOWED})
    if unknown:
        raise ValueError(f"{type(config).__name__} has layers of type {unknown[0]!r}, {_ADVICE}")
    recurrent = sum(kind == "linear_attention" for kind in types)
    windowed = sum(kind in _WINDOWED for kind in types)
    if not windowed:
        return recurrent, 0, 0
    name = "sliding_window" if "sliding_attention" in types else "attention_chunk_size"
    return recurrent, windowed, _size(config, name)


def _windows_without_types(config: Any, num_layers: int) -> tuple[int, int]:
    """As ``_kinds_of_layers``, of a config that does not list its layers: Mistral, Phi-3, Mixtral,
    and those of older releases of transformers.
    """
    window = getattr(config, "sliding_window", None) or 0
    is_used = getattr(config, "use_sliding_window", None)
    if is_used is False or window <= 0:
        return 0, 0
    number = num_layers
    if is_used:
        number -= min(getattr(config, "max_window_layers", None) or 0, num_layers)
    elif getattr(config, "sliding_window_pattern", None):
        number -= num_layers // int(config.sliding_window_pattern)
    return (number, window) if number else (0, 0)


def _num_sparse_layers(config: Any, num_layers: int) -> int:
    """The layers that are mixtures of experts."""
    if getattr(config, "is_moe", None) is False:
        return 0
    if not _first(config, _NUM_EXPERTS):
        _check_no_experts(config)
        return 0
    for name, kind in (("mlp_layer_types", "sparse"), ("layers_block_type", "moe")):
        types = getattr(config, name, None)
        if types:
            return sum(each == kind for each in types)
    given = getattr(config, "moe_layers", None)
    if given is not None:
        return len(given)
    step = getattr(config, "decoder_sparse_step", None) or 1
    first = _first(config, _FIRST_SPARSE)
    dense = getattr(config, "mlp_only_layers", None) or ()
    layers = range(first, num_layers)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in layers)


def _check_no_experts(config: Any) -> None:
    """Raises ValueError if there are experts under another name."""
    for name, value in vars(config).items():
        if "num_experts" in name and value:
            raise ValueError(
                f"{type(config).__name__} has experts under an unknown name, {name}={value}, "
                f"{_ADVICE}"
            )


def _parameters_of_experts(config: Any, hidden: int) -> int:
    """What a token passes: the router, the experts that it is sent to, and the shared ones."""
    size = getattr(config, "moe_intermediate_size", None) or _size(config, "intermediate_size")
    shared = _first(config, _SHARED_EXPERTS)
    if getattr(config, "model_type", "") == "llama4_text":
        shared = 1
    name = next((name for name in _EXPERTS_PER_TOKEN if hasattr(config, name)), "")
    width = size * (_size(config, name or _EXPERTS_PER_TOKEN[0]) + shared)
    width += _first(config, _SHARED_WIDTH)
    return hidden * (_first(config, _NUM_EXPERTS) + 3 * width)


def vision_flops(config: Any) -> tuple[int, int]:
    """Of all vision layers: per patch and per patch squared, or per tile and 0.

    Raises:
        ValueError: the config lacks a size that is needed.
    """
    kind = getattr(config, "model_type", "")
    hidden = getattr(config, "embed_dim", None) or _size(config, "hidden_size")
    num_layers = getattr(config, "depth", None) or _size(config, "num_hidden_layers")
    if hasattr(config, "mlp_ratio") and not hasattr(config, "intermediate_size"):
        mlp = 2 * hidden * int(hidden * config.mlp_ratio)
    elif kind.startswith("glm4v"):
        mlp = 3 * hidden * _size(config, "out_hidden_size")
    else:
        is_gated = kind.startswith("qwen2_5_vl")
        mlp = (3 if is_gated else 2) * hidden * _size(config, "intermediate_size")
    linear, quadratic = 2 * num_layers * (4 * hidden * hidden + mlp), 4 * num_layers * hidden
    if not hasattr(config, "spatial_merge_size"):
        height, width = _pair(_size(config, "image_size"))
        patch_height, patch_width = _pair(_size(config, "patch_size"))
        tile = (height // patch_height) * (width // patch_width)
        return tile * (linear + quadratic * tile), 0
    window_size = getattr(config, "window_size", None)
    if window_size:  # in pixels; outside of it only some layers attend
        windowed = num_layers - len(config.fullatt_block_indexes)
        window = (window_size // _pair(config.patch_size)[0]) ** 2
        linear += 4 * windowed * hidden * window
        quadratic -= 4 * windowed * hidden
    return linear, quadratic


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of a size that is one number, or both."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The number that the config has under one of these names; 0 if it has none."""
    return next((int(n) for name in names if (n := getattr(config, name, None))), 0)


def _size(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if not value:
        raise ValueError(f"{type(config).__name__} has no {name}, {_ADVICE}")
    if isinstance(value, list | tuple) and name in _OF_ALL_LAYERS:
        raise ValueError(f"{type(config).__name__} has a list of {name}, {_ADVICE}")
    return value
