"""What an example costs a model: its language layers by tokens, its vision tower by patches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import dataclass_repr

__all__ = ["ModelCost"]

_Ints = npt.NDArray[np.int64]

# The smallest attention coefficient of `of`: rounding to ints then changes a cost by 3% at most,
# and a million examples of 100,000 tokens still sum to less than 2**63.
_LEAST = 16


@dataclass(frozen=True)
class ModelCost:
    """Relative cost of examples, for balancing: ``n * (linear + quadratic * n)`` for n tokens.

    Four ints, in one unit that is proportional to forward FLOPs. The linear part follows from the
    parameters of the layers that a token passes. The quadratic part is attention: causal in the
    language model, full within one image in the vision tower. Immutable and hashable.

    The default is 28 decoder layers of hidden size h = 2048 and 24 vision layers of hidden size
    1024. Per decoder layer n tokens take ``24 * n * h^2 + 2 * n^2 * h`` FLOPs, that is
    ``n * (12h + n)`` in units of ``2h``. A wider model has a larger linear part: take
    ``ModelCost.of(model.config)``.

    Raises:
        TypeError, ValueError: a number that is not an int, or negative.

    >>> ModelCost().language(np.array([1, 24576])).tolist()
    [24577, 1207959552]
    """

    language_linear: int = 12 * 2048
    language_quadratic: int = 1
    vision_linear: int = 5266
    """Per patch, or per tile where images are cut into tiles, which are then counted as patches."""
    vision_quadratic: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = checked_int(field.name, getattr(self, field.name), minimum=0)
            object.__setattr__(self, field.name, value)

    def __repr__(self) -> str:
        return dataclass_repr(self)

    def language(self, lengths: _Ints) -> _Ints:
        """Cost of sub-sequences of these lengths in the language model: int64, their shape."""
        return lengths * (self.language_linear + self.language_quadratic * lengths)

    def vision(self, patches_per_image: _Ints) -> _Ints:
        """Cost of images of so many patches (or tiles) in the vision tower: int64, their shape.

        >>> ModelCost(vision_linear=10, vision_quadratic=1).vision(np.array([2, 0])).tolist()
        [24, 0]
        """
        return patches_per_image * (self.vision_linear + self.vision_quadratic * patches_per_image)

    @classmethod
    def of(cls, config: Any) -> ModelCost:
        """The cost of a transformers model, from its config. Without a vision config, images are 0.

        In a mixture of experts a token passes those that it is routed to. Windowed attention is
        linear in a vision tower, and counts as full in a language model. Images are counted in
        patches where the tower has a ``spatial_merge_size`` (Qwen, GLM), else in tiles of its
        ``image_size`` (InternVL, LLaVA, Idefics3, Gemma-3).

        Raises:
            ValueError: the config lacks a size that is needed; names it.

        >>> from types import SimpleNamespace
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> ModelCost.of(SimpleNamespace(intermediate_size=256, **sizes))
        ModelCost(language_linear=16384, language_quadratic=16, vision_linear=0, vision_quadratic=0)
        """
        flops = _language_flops(getattr(config, "text_config", config))
        vision = getattr(config, "vision_config", None)
        flops += (0, 0) if vision is None else _vision_flops(vision)
        unit = Fraction(_LEAST, min(n for n in flops[1::2] if n) if any(flops[1::2]) else 1)
        return cls(*(round(n * unit) for n in flops))


def _language_flops(config: Any) -> tuple[int, ...]:
    """Of all decoder layers: per token, and per token squared."""
    hidden, num_layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    attention = 2 * hidden * head_dim * (heads + key_heads)
    sparse = _num_sparse_layers(config, num_layers)
    mlp = 0
    if sparse < num_layers:
        mlp += (num_layers - sparse) * 3 * hidden * _size(config, "intermediate_size")
    if sparse:
        mlp += sparse * _parameters_of_experts(config, hidden)
    return 2 * (num_layers * attention + mlp), 2 * num_layers * heads * head_dim


_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def _num_sparse_layers(config: Any, num_layers: int) -> int:
    """The layers that are mixtures of experts."""
    if not any(getattr(config, name, None) for name in _NUM_EXPERTS):
        return 0
    step = getattr(config, "decoder_sparse_step", None) or 1
    first = getattr(config, "first_k_dense_replace", None) or 0
    dense = getattr(config, "mlp_only_layers", None) or ()
    layers = range(first, num_layers)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in layers)


def _parameters_of_experts(config: Any, hidden: int) -> int:
    """What a token passes: the router, the experts that it is sent to, and the shared ones."""
    num_experts = max(getattr(config, name, None) or 0 for name in _NUM_EXPERTS)
    size = getattr(config, "moe_intermediate_size", None) or _size(config, "intermediate_size")
    width = size * (
        _size(config, "num_experts_per_tok") + (getattr(config, "n_shared_experts", None) or 0)
    )
    width += getattr(config, "shared_expert_intermediate_size", None) or 0
    return hidden * (num_experts + 3 * width)


def _vision_flops(config: Any) -> tuple[int, ...]:
    """Of all vision layers: per patch and per patch squared, or per tile and 0."""
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


def _size(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if not value:
        raise ValueError(
            f"{type(config).__name__} has no {name}, so the cost of the model is not known; give "
            "the numbers: ModelCost(language_linear=..., language_quadratic=..., ...)"
        )
    return value
