"""The attention ``torch_varlen`` of transformers models: what it takes, and what it refuses.

It reads segment boundaries instead of a mask, so nothing of size T x T is ever built for a packed
row. What it cannot compute exactly is refused with an error, never approximated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit._checks import needed_package
from torch_collate_kit.attention.kernels import Segments, attend, same_dtype

__all__ = ["register_torch_varlen"]

# transformers looks for "flash", "sdpa" and "flex_attention" inside the name; it must hold none.
_NAME = "torch_varlen"

# What transformers builds causal, sliding-window and packed masks from. A mask made of anything
# else (chunks, image blocks, a user's function) cannot be told from segment boundaries alone.
_WINDOW_PART = "sliding_window_overlay.<locals>.inner_mask"
_KNOWN_MASK_PARTS = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
    _WINDOW_PART,
}
# Some models (gpt-oss, opt, falcon in transformers 5.23) leave position_ids out of their mask.
_PROVE = (
    "and see what check_isolation says: a model whose mask does not see position_ids needs "
    'Batch.model_inputs(..., mask="block") there'
)
_UNSUPPORTED = {
    "softcap": "attention soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "cache": "a paged cache",
}


def register_torch_varlen() -> None:
    """Make ``attn_implementation="torch_varlen"`` known to transformers; calling it again is free.

    The model then takes ``cu_seq_lens_q/k`` (int32 ``[S + 1]``, flat over the rows:
    ``[0, ..., R * W]``, every row boundary among them) and ``max_length_q/k`` (Python ints; at
    least the longest segment, default the row width) beside ``input_ids`` and ``position_ids``, as
    ``Batch.model_inputs()`` gives them. On CUDA in fp16 or bf16 it runs
    ``torch.nn.attention.varlen.varlen_attn``; on CPU, in fp32, and where the kernel does not fit
    (head dimension, card), one ``scaled_dot_product_attention`` a segment, which is exact. Sliding
    windows and grouped heads work in both. Under autocast, and where query and key come wider than
    value (Qwen3's norms do that), inputs are cast to the narrower type first. Under torch.compile
    neither breaks a graph; it is broken once, where transformers asks for the mask.

    Without ``cu_seq_lens_q`` the model in eval mode runs the ``sdpa`` attention of transformers, so
    ``generate()`` works. In training that is an error.

    Raises (in the model's forward):
        ValueError: training without ``cu_seq_lens_q``; a mask or a filled cache beside it;
            boundaries that do not fit the rows; attention dropout, soft-capping, sinks, attention
            that is not causal, a mask pattern other than causal and sliding window, a model that
            reads its mask by itself; in eval mode, restarting positions that nothing isolates.

    >>> import torch, transformers
    >>> register_torch_varlen()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=2, attn_implementation="torch_varlen")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> cu_seq_lens = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> output = model(
    ...     input_ids=torch.tensor([[1, 2, 3, 4, 5]]), position_ids=torch.tensor([[0, 1, 2, 0, 1]]),
    ...     use_cache=False, cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens,
    ...     max_length_q=3, max_length_k=3)
    >>> output.logits.shape
    torch.Size([1, 5, 11])
    """
    transformers = needed_package("transformers", "register_torch_varlen")
    transformers.AttentionInterface.register(_NAME, _attention_forward)
    # A name without an entry here gets no mask at all from transformers: generate() would leak.
    transformers.AttentionMaskInterface.register(_NAME, _attention_mask)


class _MaskIsReadError(ValueError, AttributeError):
    """A model reads the mask by itself. An AttributeError too, as hasattr() expects one."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the model reads its attention mask by itself ({what}), so it does not run with "
            f'{_NAME}, which builds none; use attn_implementation="eager" or "sdpa", {_PROVE}; or '
            "use PaddedCollator"
        )


class _DeferredMask:
    """The mask transformers asks for, built only if attention turns out to run without boundaries.

    A packed row of T tokens would cost T x T cells a mask otherwise, although the varlen path never
    reads one. Not a dataclass: FSDP would take one apart and copy it. A model that computes with
    its mask in attention of its own (bloom), or looks at it (PaliGemma), is refused.
    """

    __slots__ = ("_built", "_options", "unknown_parts", "windows")

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._built: tuple[Tensor | None] | None = None
        parts = list(_mask_parts(options["mask_function"]))
        names = [getattr(part, "__qualname__", repr(part)) for part in parts]
        self.unknown_parts = sorted(set(names) - _KNOWN_MASK_PARTS)
        self.windows: set[int] = {
            inspect.getclosurevars(part).nonlocals["sliding_window"]
            for part, name in zip(parts, names, strict=True)
            if name == _WINDOW_PART
        }

    def build(self) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        if self._built is None:  # once for all layers that share it
            self._built = (sdpa_mask(**self._options),)
        return self._built[0]

    def build_from_padding(self) -> Tensor | None:
        """The mask where padding is part of it, None where there is no padding."""
        return None if self._options.get("attention_mask") is None else self.build()

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise _MaskIsReadError(getattr(function, "__name__", str(function)))

    def __getitem__(self, key: Any) -> Any:
        raise _MaskIsReadError(f"[{key}]")

    def __getattr__(self, name: str) -> Any:
        raise _MaskIsReadError(f".{name}")


def _mask_parts(mask_function: Any) -> Iterator[Any]:
    """The functions a mask function of transformers is composed of, itself included."""
    yield mask_function
    for cell in getattr(mask_function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part):
                yield from _mask_parts(part)


def _attention_mask(**options: Any) -> Any:
    """Registered mask function: what ``sdpa`` would get, deferred where boundaries may come."""
    from transformers.masking_utils import sdpa_mask

    # A static cache counts in a tensor that its update changes before attention runs: not deferred.
    offset = options.get("q_offset", 0)
    no_cache = options["q_length"] == options["kv_length"] and not isinstance(offset, Tensor)
    if no_cache:
        return _DeferredMask(options)
    return sdpa_mask(**options)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered attention: query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D]."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    _refuse_unsupported(module, dropout, causal, kwargs)
    if cu_seq_lens_q is None:
        return _masked_forward(module, query, key, value, attention_mask, scaling, kwargs)
    cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    _refuse_beside_boundaries(query, key, attention_mask, sliding_window)
    width = query.shape[2]
    segments = Segments(
        cu_seq_lens_q,
        cu_seq_lens_k,
        width if max_length_q is None else int(max_length_q),
        width if max_length_k is None else int(max_length_k),
    )
    return attend(query, key, value, segments, scale=scaling, window=sliding_window), None


def _refuse_unsupported(
    module: nn.Module, dropout: float, causal: bool, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if not causal:
        raise ValueError(
            f"{_NAME} is causal, but {name} is not; for a model with a vision tower use "
            f'attn_implementation={{"text_config": "{_NAME}", "vision_config": "sdpa"}}'
        )
    if dropout > 0:
        raise ValueError(
            f"{_NAME} has no attention dropout, but {name} asks for {dropout}; set "
            f'config.attention_dropout = 0.0, or use attn_implementation="sdpa", {_PROVE}'
        )
    for option, what in _UNSUPPORTED.items():
        if kwargs.get(option) is not None:
            raise ValueError(
                f"{_NAME} cannot do {what}, but {name} passes {option}; use "
                f'attn_implementation="eager" for this model, {_PROVE}{_window_option(module)}'
            )


def _window_option(module: nn.Module) -> str:
    config: Any = getattr(module, "config", None)
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return ""
    return f", with sliding_window={config.sliding_window} beside it"


def _refuse_beside_boundaries(
    query: Tensor, key: Tensor, attention_mask: Any, sliding_window: int | None
) -> None:
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"cu_seq_lens_q is passed with {query.shape[2]} query and {key.shape[2]} key tokens a "
            "row: the cache is not empty; pass use_cache=False for packed rows"
        )
    if isinstance(attention_mask, _DeferredMask):
        if attention_mask.unknown_parts:
            raise ValueError(
                f"{_NAME} knows causal and sliding-window attention only, but the model's mask is "
                f'built from {attention_mask.unknown_parts}; use attn_implementation="sdpa", '
                f"{_PROVE}"
            )
        if attention_mask.windows != ({sliding_window} - {None}):
            raise ValueError(
                f"the model's mask has the sliding windows {sorted(attention_mask.windows)}, but "
                f"the layer asks for sliding_window={sliding_window}; use "
                f'attn_implementation="sdpa", {_PROVE}'
            )
        attention_mask = attention_mask.build_from_padding()
    if attention_mask is not None:
        raise ValueError(
            "an attention_mask is passed beside cu_seq_lens_q (here as "
            f"{list(attention_mask.shape)}), and {_NAME} follows only one of them; leave "
            "attention_mask out: pads are a segment of their own"
        )


def _masked_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """No boundaries: the sdpa attention of transformers, for generate() and padded evaluation."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if module.training:
        raise ValueError(
            f"{_NAME} got no cu_seq_lens_q in training, so packed rows would leak; pass what "
            f'Batch.model_inputs(attention="{_NAME}") gives, or use attn_implementation="sdpa" '
            "for padded batches"
        )
    mask = attention_mask.build() if isinstance(attention_mask, _DeferredMask) else attention_mask
    if getattr(module, "layer_idx", None) in (None, 0):  # one look is enough
        _refuse_restarts(kwargs.get("position_ids"), mask)
    query, key, value = same_dtype(query, key, value)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    return output, None


def _refuse_restarts(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Positions that restart say that a row is several sequences: the mask must say so too."""
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return
    if mask is None:
        leaks = bool((torch.diff(position_ids) != 1).any())
    elif mask.shape[-2:] != (position_ids.shape[1],) * 2:  # a cache: one step of generate()
        return
    else:  # a real cell (it sees itself) where positions fall must see no cell before it
        rows, cells = torch.nonzero(torch.diff(position_ids) < 0, as_tuple=True)
        seen = mask[rows.clamp(max=len(mask) - 1), 0, cells + 1]
        seen = seen if seen.dtype == torch.bool else seen == 0
        own = seen.gather(1, cells[:, None] + 1)
        earlier = torch.arange(seen.shape[1], device=seen.device) <= cells[:, None]
        leaks = bool((seen & earlier & own).any())
    if leaks:
        raise ValueError(
            "position_ids restart inside a row, but neither cu_seq_lens_q nor a mask keeps the "
            f'segments apart; pass what Batch.model_inputs(attention="{_NAME}") gives '
            "(use_cache=False among it)"
        )
