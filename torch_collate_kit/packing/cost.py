"""Cost of an example in a model: language layers by tokens, vision tower by patches; FLOPs."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import dataclass_repr
from torch_collate_kit.packing.rows import Ints

# The smallest attention coefficient of `of`: rounding to ints then changes a cost by 3% at most,
# and a million examples of 100,000 tokens still sum to less than 2**63.
_LEAST = 16


@dataclass(frozen=True)
class ModelCost:
    """Relative cost of examples, for balancing: ``n * (linear + quadratic * n)`` for n tokens.

    Ints, in one unit that is proportional to forward FLOPs. The linear part follows from the
    parameters of the layers that a token passes. The quadratic part is attention: causal in the
    language model, full within one image in the vision tower. Layers in which a token attends to a
    window of earlier ones add ``windowed_quadratic * m * (2 * n - m)``, where m is n or the window,
    whichever is less. Immutable and hashable.

    The default is 28 decoder layers of hidden size h = 2048 and 24 vision layers of hidden size
    1024. Per decoder layer n tokens take ``24 * n * h^2 + 2 * n^2 * h`` FLOPs, that is
    ``n * (12h + n)`` in units of ``2h``. A wider model has a larger linear part: take
    ``ModelCost.of(model.config)``.

    Raises:
        TypeError, ValueError: a number that is not an int, or negative; a window without
            ``language_windowed_quadratic``, or that without a window.

    >>> ModelCost().language(np.array([1, 24576])).tolist()
    [24577, 1207959552]
    >>> window = ModelCost(0, 0, language_windowed_quadratic=1, language_window=4)
    >>> window.language(np.array([3, 4, 5, 100])).tolist()
    [9, 16, 24, 784]
    """

    language_linear: int = 12 * 2048
    language_quadratic: int = 1
    vision_linear: int = 5266
    """Per patch, or per tile where images are cut into tiles, which are then counted as patches."""
    vision_quadratic: int = 1
    language_windowed_quadratic: int = 0
    """Attention in the layers with a window."""
    language_window: int = 0
    """Tokens that one attends to in these layers, itself included; 0 without such layers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = checked_int(field.name, getattr(self, field.name), minimum=0)
            object.__setattr__(self, field.name, value)
        if bool(self.language_window) != bool(self.language_windowed_quadratic):
            raise ValueError(
                "language_window and language_windowed_quadratic go together, got "
                f"{self.language_window} and {self.language_windowed_quadratic}; both are 0 where "
                "all layers attend to all earlier tokens"
            )

    def __repr__(self) -> str:
        return dataclass_repr(self)

    def language(self, lengths: Ints) -> Ints:
        """Return the cost of sub-sequences of these lengths: int64, their shape."""
        costs = self.language_quadratic * lengths
        costs += self.language_linear
        costs *= lengths
        if self.language_window:
            within = np.minimum(lengths, self.language_window)
            costs += self.language_windowed_quadratic * within * (2 * lengths - within)
        return costs

    def vision(self, patches_per_image: Ints) -> Ints:
        """Return the cost of images with so many patches, or tiles: int64, their shape.

        >>> ModelCost(vision_linear=10, vision_quadratic=1).vision(np.array([2, 0])).tolist()
        [24, 0]
        """
        return patches_per_image * (self.vision_linear + self.vision_quadratic * patches_per_image)

    @classmethod
    def of(cls, config: Any) -> ModelCost:
        """Read the cost of a transformers model from its config; without a tower, images cost 0.

        A token passes the experts that it is routed to, and the shared ones. Layers with a window
        are counted with it, chunks as windows, latent attention with its projections, the gated
        delta rule (Qwen3-Next, Qwen3.5) as linear. Images are counted in patches where the tower
        has a ``spatial_merge_size`` (Qwen, GLM), else in tiles of its ``image_size``.

        Raises:
            ValueError: the config lacks a size that is needed, or has layers of another kind or of
                different sizes; names what.

        >>> from types import SimpleNamespace
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> ModelCost.of(SimpleNamespace(intermediate_size=256, **sizes))
        ModelCost(language_linear=16384, language_quadratic=16, vision_linear=0, vision_quadratic=0)
        """
        text, vision = getattr(config, "text_config", None), getattr(config, "vision_config", None)
        linear, quadratic, windowed, window = layer_flops(text or config)
        images = (0, 0) if vision is None else image_flops(vision)
        squared = [n for n in (quadratic, windowed, images[1]) if n]
        unit = Fraction(_LEAST, min(squared, default=_LEAST))
        numbers = [round(n * unit) for n in (linear, quadratic, *images, windowed)]
        return cls(*[*numbers, window])

    def as_state(self) -> list[int]:
        """Return the numbers for a state; those of the window only if there is one."""
        numbers = list(astuple(self))
        return numbers if self.language_window else numbers[:4]


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
