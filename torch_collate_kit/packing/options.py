"""How to pack: the cost of an example in a model, the parallel layout, and the options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from torch_collate_kit._checks import (
    checked_bool,
    checked_choice,
    checked_int,
    checked_optional_int,
    dataclass_repr,
)
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
        for coefficient in fields(self):
            name = coefficient.name
            object.__setattr__(self, name, checked_int(name, getattr(self, name), minimum=0))
        if bool(self.language_window) != bool(self.language_windowed_quadratic):
            raise ValueError(
                "language_window and language_windowed_quadratic go together, got "
                f"{self.language_window} and {self.language_windowed_quadratic}; both are 0 where "
                "all layers attend to all earlier tokens"
            )

    def __repr__(self) -> str:
        return dataclass_repr(self)

    def language(self, lengths: Ints) -> Ints:
        """Return the cost of sub-sequences of these lengths: int64, their shape.

        ValueError: their sum is more than int64 holds.
        """
        most = int(np.max(lengths, initial=0))
        rate = self.language_linear + self.language_quadratic * most
        rate += 2 * self.language_windowed_quadratic * min(most, self.language_window)
        if rate > np.iinfo(np.int64).max // max(1, int(np.sum(lengths))):
            _refuse_costs(rate, lengths)
        costs = self.language_quadratic * lengths
        costs += self.language_linear
        costs *= lengths
        if self.language_window:
            within = np.minimum(lengths, self.language_window)
            costs += self.language_windowed_quadratic * within * (2 * lengths - within)
        return costs

    def vision(self, patches_per_image: Ints) -> Ints:
        """Return the cost of images with so many patches, or tiles: int64, their shape.

        ValueError: their sum is more than int64 holds.

        >>> ModelCost(vision_linear=10, vision_quadratic=1).vision(np.array([2, 0])).tolist()
        [24, 0]
        """
        most = int(np.max(patches_per_image, initial=0))
        _refuse_costs(self.vision_linear + self.vision_quadratic * most, patches_per_image)
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


Strategy: TypeAlias = Literal[
    "best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential", "wrapped"
]
Overflow: TypeAlias = Literal["raise", "truncate", "drop", "split"]
Balance: TypeAlias = Literal["attention", "tokens"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MOST_CELLS = 2**31 - 1  # of a row: int32 counts them
FP8_TOKENS = {"tensorwise": 16, "mxfp8": 32, "nvfp4": 64, "blockwise": 128}
_NONE_MEANS = {
    "max_sequences_per_row": "no limit",
    "max_patches": "no limit",
    "rows_multiple_of": "dp",
}


def _refuse_costs(rate: int, lengths: Ints) -> None:
    """Refuse costs of at most ``rate`` per token over int64, if a larger unit is left."""
    most, total = np.iinfo(np.int64).max, rate * int(np.sum(lengths))
    too_small = -(-total // most)
    if too_small > 1 and rate // too_small >= np.max(lengths):
        raise ValueError(
            f"costs sum to up to {total:.1e}, and int64 holds {most:.1e}; give ModelCost a larger "
            f"unit: divide its numbers by {too_small} or more"
        )


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions: data, tensor, context; and the recipe of fp8, if any.

    The sizes are ints of at least 1 and are kept as Python ints. Immutable and hashable. Pipeline
    stages exchange blocks of one shape: ``PackedCollator(fixed_width=True)`` with a fixed number of
    rows.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1, or ``fp8`` is not a recipe.

    >>> ParallelLayout(tp=4).align, ParallelLayout(tp=4, cp=2).align
    (4, 16)
    >>> layout = ParallelLayout(dp=4, tp=2, cp=2, fp8="blockwise")
    >>> layout.align, layout.row_align
    (8, 512)
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    fp8: Literal["tensorwise", "mxfp8", "nvfp4", "blockwise"] | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp"):
            hint = "1 means this kind of parallelism is off"
            object.__setattr__(self, name, checked_int(name, getattr(self, name), hint=hint))
        if self.fp8 is not None and not (isinstance(self.fp8, str) and self.fp8 in FP8_TOKENS):
            raise ValueError(
                f"fp8 must be the recipe, {', '.join(map(repr, FP8_TOKENS))}, or None, got "
                f"{self.fp8!r}: a rank's tokens of a row must be a multiple of "
                f"{', '.join(map(str, FP8_TOKENS.values()))} (True padded every segment to a "
                "multiple of 16 * cp instead); choose the one that the model trains with"
            )

    def __repr__(self) -> str:
        return dataclass_repr(self)

    @property
    def align(self) -> int:
        """Number of tokens that every sub-sequence is padded to a multiple of.

        Sequence parallelism cuts a sub-sequence into ``tp`` parts, context parallelism into
        ``2 * cp``: each rank takes one chunk from either end, which balances causal attention.
        """
        return self.tp * 2 * self.cp if self.cp > 1 else self.tp

    @property
    def row_align(self) -> int:
        """Number of cells that the width of a row is a multiple of.

        fp8 kernels need a rank's tokens of a row, cut by cp and tp, to be a multiple of 16
        ("tensorwise", and rowwise), 32 ("mxfp8"), 64 ("nvfp4") or 128 ("blockwise").
        """
        if self.fp8 is None:
            return self.align
        return math.lcm(self.align, FP8_TOKENS[self.fp8] * self.cp * self.tp)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the data rank and the context rank of a process.

        Processes are counted as in a device mesh ``("dp", "cp", "tp")``: neighbours are in one
        tensor group, then in one context group, ``rank = (dp_rank * cp + cp_rank) * tp + tp_rank``.
        All ranks of a context group read the same rows, as ``dp_rank``.

        Raises:
            TypeError: the rank is not an int.
            ValueError: a rank that is not one of the ``dp * cp * tp``.

        >>> [ParallelLayout(dp=2, cp=2).place(rank) for rank in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        """
        size = self.dp * self.cp * self.tp
        if checked_int("rank", rank, minimum=0) >= size:
            raise ValueError(
                f"rank must be 0 to {size - 1}, got {rank}: the layout has dp * cp * tp = {size} "
                "ranks; pass the rank of the process, and a layout of all processes"
            )
        return divmod(rank // self.tp, self.cp)


@dataclass(frozen=True)
class PackingOptions:
    """Options of packing examples into rows, checked once; immutable and hashable.

    ``pack`` and ``PackedCollator`` accept it as ``packing=``, or its common fields as keywords.

    Raises:
        TypeError: a number that is not an int, a ``parallel`` that is not a ParallelLayout, a
            ``cost`` that is not a ModelCost.
        ValueError: an unknown choice, a number below its least value.

    >>> packing = PackingOptions(max_tokens=100, parallel=ParallelLayout(dp=2, tp=8))
    >>> packing.capacity, packing.strategy
    (96, None)
    """

    max_tokens: int
    """Cells a row may have, alignment gaps included."""
    strategy: Strategy | None = None
    """Strategy that fills rows, see ``pack``; None: "balanced" in a collator, else best fit."""
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    """Its ``dp`` divides the number of rows, ``row_align`` their width, ``align`` sub-sequences."""
    overflow: Overflow = "raise"
    """Treatment of examples longer than a row: "raise", "truncate", "drop" or "split"; of lists of
    segments "raise" or "drop"."""
    isolate: bool = True
    """Whether the documents of a row are segments of their own; False only with "wrapped"."""
    share_prefixes: bool | Literal["auto"] = False
    """Whether segments of an example share the cells of what they have in common; "auto": where
    that saves at least 13% of the cells (1.15 tokens for each)."""
    max_sequences_per_row: int | None = None
    """The most pieces a row may hold; None for no limit."""
    balance: Balance | None = "attention"
    """Quantity evened out over ranks: "attention" (cost in the language model and the vision
    tower), "tokens" (and patches), or None (row i goes to rank ``i % rows_multiple_of``).
    "sequential" keeps the order of groups of one row per rank, with None also within them."""
    max_patches: int | None = None
    """Patches of images that a row may have (tiles where images are cut into tiles); None for no
    limit."""
    cost: ModelCost = field(default_factory=ModelCost)
    """Cost of a piece and of an image, in relation to others."""
    dummy_image_tokens: int = 0
    """Tokens of the dummy image that rows without an image get on ranks that need one."""
    rows_multiple_of: int | None = None
    """Number of ranks to plan for, of which each of ``dp`` takes an equal run, so that the rows are
    the same for every ``dp`` that divides it; None: ``dp``."""

    def __post_init__(self) -> None:
        if self.strategy is not None:
            checked_choice("strategy", self.strategy, STRATEGIES)
        checked_choice("balance", self.balance, (*get_args(Balance), None))
        checked_choice("overflow", self.overflow, get_args(Overflow))
        checked_bool("isolate", self.isolate)
        if self.share_prefixes != "auto":
            checked_bool("share_prefixes", self.share_prefixes, others='"auto"')
        if not isinstance(self.parallel, ParallelLayout):
            raise TypeError(
                f"parallel must be a ParallelLayout, got {self.parallel!r}; ParallelLayout(dp=2)"
            )
        if not isinstance(self.cost, ModelCost):
            raise TypeError(
                f"cost must be a ModelCost, got {self.cost!r}; ModelCost.of(model.config)"
            )
        max_tokens = checked_int("max_tokens", self.max_tokens)
        dummy = checked_int("dummy_image_tokens", self.dummy_image_tokens, minimum=0)
        numbers: dict[str, int | None] = {"max_tokens": max_tokens, "dummy_image_tokens": dummy}
        for name, meaning in _NONE_MEANS.items():
            hint = f"None means {meaning}"
            numbers[name] = checked_optional_int(name, getattr(self, name), hint=hint)
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        if not self.capacity:
            name = "align" if self.parallel.fp8 is None else "row_align"
            raise ValueError(
                f"max_tokens must be at least {name}={self.parallel.row_align}, got {max_tokens}: "
                f"not one aligned token fits in a row; raise max_tokens or lower {name}"
            )
        if self.row_multiple % self.parallel.dp and self.parallel.dp % self.row_multiple:
            raise ValueError(
                f"rows_multiple_of must be a multiple or a divisor of dp={self.parallel.dp}, got "
                f"{self.rows_multiple_of}: every rank takes as many rows"
            )
        if self.share_prefixes and self.parallel.cp > 1:
            raise ValueError(
                f"share_prefixes={self.share_prefixes!r} makes trees of segments, and context "
                f"parallelism (cp={self.parallel.cp}) cuts segments into shards; leave one out"
            )
        if self.share_prefixes and self.overflow == "split":
            raise ValueError(
                f"share_prefixes={self.share_prefixes!r} keeps the segments of an example in one "
                "row, and overflow='split' cuts examples; split trees larger than a row when they "
                'are tokenized, and pass overflow="raise" or "drop"'
            )
        if self.strategy == "wrapped":
            self._check_wrapped()
        elif not self.isolate:
            raise ValueError(
                "isolate=False joins documents that are cut anywhere, as in pretraining; it needs "
                'strategy="wrapped"'
            )
        if self.reserved >= self.capacity:
            raise ValueError(
                f"dummy_image_tokens={dummy} leaves no room for text in a row of max_tokens="
                f"{max_tokens} (align={self.parallel.align}); raise max_tokens"
            )

    def _check_wrapped(self) -> None:
        """Check that no other option contradicts rows of documents cut at ``max_tokens``."""
        if self.parallel.align > 1:
            raise ValueError(
                f'strategy="wrapped" leaves no gaps, and align={self.parallel.align} needs one '
                "after each document; use another strategy, or a layout without tp and cp"
            )
        if rest := self.max_tokens % self.parallel.row_align:
            raise ValueError(
                f'strategy="wrapped" fills rows to max_tokens={self.max_tokens}, which is not a '
                f"multiple of row_align={self.parallel.row_align} (fp8={self.parallel.fp8!r}); "
                f"pass max_tokens={self.max_tokens - rest}"
            )
        defaults = {"overflow": "raise", "max_sequences_per_row": None, "share_prefixes": False}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f'{name}={getattr(self, name)!r} has no meaning with strategy="wrapped", which '
                    "cuts documents where a row ends; leave it out"
                )

    def __repr__(self) -> str:
        return dataclass_repr(self)

    @property
    def capacity(self) -> int:
        """Cells of a row that aligned pieces can fill: the longest piece. int32 counts them."""
        row_align = self.parallel.row_align
        return min(self.max_tokens, MOST_CELLS) // row_align * row_align

    @property
    def row_multiple(self) -> int:
        """Number that the rows are a multiple of: ``rows_multiple_of``, or else ``dp``."""
        return self.rows_multiple_of or self.parallel.dp

    @property
    def reserved(self) -> int:
        """Cells that a row without an image keeps free for a dummy image; 0 with one rank."""
        if self.row_multiple == 1:
            return 0
        return -(-self.dummy_image_tokens // self.parallel.align) * self.parallel.align

    def as_state(self) -> dict[str, Any]:
        """Return the settings that a state shares with the object it is loaded into: JSON."""
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del state["parallel"]
        layout = {name: getattr(self.parallel, name) for name in ("align", "row_align", "dp")}
        return state | layout | {"cost": self.cost.as_state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PackingOptions:
        """Return options that plan as those with this ``as_state``."""
        others = ("align", "row_align", "dp", "cost")
        given = {key: value for key, value in state.items() if key not in others}
        align, names = state["align"], {number: name for name, number in FP8_TOKENS.items()}
        per_align = state["row_align"] // max(1, align)  # with cp, `align` has a factor of 2 more
        sizes = {"tp": align} if per_align != 8 else {"cp": align // 2}
        fp8: Any = names.get(max(16, per_align)) if per_align > 1 else None
        parallel = ParallelLayout(dp=state["dp"], fp8=fp8, **sizes)
        return cls(parallel=parallel, cost=ModelCost(*state["cost"]), **given)


def common_options(packing: PackingOptions | None, **common: Any) -> PackingOptions:
    """Return ``packing``, or options made of the common fields; None means a field's default."""
    given = {name: value for name, value in common.items() if value is not None}
    if packing is None:
        if "max_tokens" not in given:
            raise TypeError(
                "max_tokens must be an int, got None of type NoneType; pass max_tokens=4096, or "
                "packing=PackingOptions(4096)"
            )
        return PackingOptions(**given)
    if not isinstance(packing, PackingOptions):
        raise TypeError(f"packing must be a PackingOptions, got {packing!r}")
    if given:
        raise TypeError(
            f"packing= and {', '.join(given)} both say how to pack; pass one of them, such as "
            "packing=dataclasses.replace(packing, ...)"
        )
    return packing
