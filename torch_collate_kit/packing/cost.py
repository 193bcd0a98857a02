"""Cost of an example in a model: language layers by tokens, vision tower by patches."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import dataclass_repr
from torch_collate_kit.packing.model_flops import image_flops, layer_flops
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
