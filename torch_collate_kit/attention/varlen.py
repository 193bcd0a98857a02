"""The attention implementation ``torch_varlen``, which reads segment boundaries, not a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit._checks import needed_package
from torch_collate_kit.attention.context import gathered
from torch_collate_kit.attention.kernels import SegmentBounds, attend, load_kernel, same_dtype
from torch_collate_kit.batch.model_kind import config_of
from torch_collate_kit.families import sliding_window

# transformers looks for "flash", "sdpa" and "flex_attention" in the name; it must contain none.
_NAME = "torch_varlen"

# The functions from which transformers builds causal, two-way, sliding-window and packed masks. A
# mask with other parts (chunks, image blocks, a user's function) does not follow from boundaries.
_INNER = ".<locals>.inner_mask"
_WINDOW_PARTS = {  # 1: it does not count the token itself
    "sliding_window_overlay" + _INNER: 0,
    "sliding_window_bidirectional_overlay" + _INNER: 1,
    "_bidirectional_window_overlay" + _INNER: 0,  # Gemma-3
}
_TWO_WAY_PARTS = {"bidirectional_mask_function", "Gemma3TextModel.forward.<locals>.<lambda>"}
_TWO_WAY_PARTS |= {*_WINDOW_PARTS} - {"sliding_window_overlay" + _INNER}
_KNOWN_MASK_PARTS = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "or_masks.<locals>.or_mask",
    "packed_sequence_mask_function" + _INNER,
    "remap_positions_for_packed_sequence" + _INNER,
    *_TWO_WAY_PARTS,
    *_WINDOW_PARTS,
}
# Some models (gpt-oss, opt, falcon in transformers 5.23) build their mask without position_ids.
_PROVE = (
    "and run check_isolation: a model whose mask ignores position_ids also needs "
    'Batch.model_inputs(..., mask="block")'
)
_UNSUPPORTED = {
    "softcap": "attention soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "cache": "a paged cache",
}


def register_torch_varlen() -> None:
    """Register ``attn_implementation="torch_varlen"`` with transformers; may be called repeatedly.

    The model then accepts what ``Batch.model_inputs()`` returns: ``cu_seq_lens_q/k``, int32
    ``[S + 1]``, flat over the rows, ``[0, ..., R * W]``, with all row boundaries; and
    ``max_length_q/k``, Python ints, at least the longest segment (the row width by default). Of
    rows that share prefixes also ``path_cells``, int64 ``[K]``: the cells, counted over all rows,
    that each segment sees, itself at their end; ``cu_seq_lens_k`` then bounds these. Of context
    shards ``path_cells`` are those of all ranks of ``context_group``.
    Nothing of size T x T is built, and anything that it cannot compute exactly is refused.

    On CUDA in fp16 or bf16 it runs ``torch.nn.attention.varlen.varlen_attn``. On CPU, in fp32, and
    with a head dimension or GPU that the kernel does not support, it runs
    ``scaled_dot_product_attention`` per segment, which is exact. Both support sliding windows and
    grouped heads. Without ``cu_seq_lens_q`` a model in eval mode runs the ``sdpa`` attention of
    transformers, so that ``generate()`` works; in training mode that is an error.

    Raises:
        ImportError: transformers is not installed.
        ValueError: in the model's forward: training without ``cu_seq_lens_q``; a mask or a filled
            cache in addition to it; boundaries that do not fit the rows; attention other than
            causal or two-way with or without windows (dropout, soft-capping, sinks, other masks); a
            model that reads the mask itself; restarting positions without boundaries or a mask.

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
    if torch.cuda.is_available():  # not in the first step of a model that is compiled
        load_kernel()
    # A name without an entry here gets no mask at all from transformers: generate() would leak.
    transformers.AttentionMaskInterface.register(_NAME, _attention_mask)


class _MaskIsReadError(ValueError, AttributeError):
    """A model reads the mask itself. Also an AttributeError, because hasattr() expects one."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the model reads its attention mask itself ({what}), so it does not run with "
            f'{_NAME}, which builds none; use attn_implementation="eager" or "sdpa", {_PROVE}; or '
            "use PaddedCollator"
        )


class _DeferredMask:
    """The mask of transformers, built only if attention runs without boundaries.

    It is not a dataclass, which FSDP would take apart and copy. A model that reads its mask itself
    (bloom, PaliGemma) is refused.
    """

    __slots__ = ("_built", "_options", "has_padding", "is_two_way", "unknown_parts", "windows")

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.has_padding = options.get("attention_mask") is not None
        self._built: tuple[Tensor | None] | None = None
        functions = list(_mask_parts(options["mask_function"]))
        parts = [(_name_of(part), part) for part in functions]
        self.unknown_parts = sorted({name for name, _ in parts} - _KNOWN_MASK_PARTS)
        self.is_two_way = any(name in _TWO_WAY_PARTS for name, _ in parts)
        self.windows: set[int] = {
            part.__closure__[0].cell_contents + _WINDOW_PARTS[name]
            for name, part in parts
            if name in _WINDOW_PARTS
        }

    def build(self) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        if self._built is None:  # once for all layers that share it
            self._built = (sdpa_mask(**self._options),)
        return self._built[0]

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise _MaskIsReadError(getattr(function, "__name__", str(function)))

    def __getitem__(self, key: Any) -> Any:
        raise _MaskIsReadError(f"[{key}]")

    def __getattr__(self, name: str) -> Any:
        raise _MaskIsReadError(f".{name}")


def _mask_parts(mask_function: Any) -> Iterator[Any]:
    """Yield all functions that a mask function of transformers is composed of, and itself."""
    yield mask_function
    for cell in getattr(mask_function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part):
                yield from _mask_parts(part)


def _name_of(part: Any) -> str:
    """Return a function's qualified name, which torch 2.14 compiles from its code alone."""
    name: Any = getattr(getattr(part, "__code__", None), "co_qualname", None)  # from Python 3.11 on
    return getattr(part, "__qualname__", type(part).__name__) if name is None else name


def _attention_mask(**options: Any) -> Any:
    """Make the mask of ``sdpa``, deferred if there may be boundaries."""
    from transformers.masking_utils import sdpa_mask

    # The offset of a static cache is a tensor that changes before attention runs.
    is_static = isinstance(options.get("q_offset"), Tensor)
    if options["q_length"] == options["kv_length"] and not is_static:
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
    path_cells: Tensor | None = None,
    context_group: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from query [B, H, T, D] to key and value [B, Hkv, T, D]: [B, T, H, D]."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = causal and not getattr(attention_mask, "is_two_way", False)
    _refuse_unsupported(module, dropout, causal, kwargs)
    if cu_seq_lens_q is None:  # generate(), or padded evaluation
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mask = _mask_without_boundaries(module, attention_mask, kwargs.get("position_ids"))
        heads = same_dtype(query, key, value)
        options = {"scaling": scaling, "is_causal": causal, **kwargs}
        return sdpa_attention_forward(module, *heads, mask, **options)[0], None
    cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    _refuse_beside_boundaries(query, key, attention_mask, sliding_window)
    if getattr(attention_mask, "is_two_way", False):  # flash attention counts other windows
        sliding_window = next(iter(attention_mask.windows), None)
    width = query.shape[2]
    segments = SegmentBounds(
        cu_seq_lens_q,
        cu_seq_lens_k,
        width if max_length_q is None else int(max_length_q),
        width if max_length_k is None else int(max_length_k),
    )
    if context_group is not None:
        query, key, value = gathered(query, key, value, context_group)
    options = {"path_cells": path_cells, "window": sliding_window, "causal": causal}
    return attend(query, key, value, segments, scale=scaling, **options), None


def _refuse_unsupported(
    module: nn.Module, dropout: float, causal: bool, kwargs: dict[str, Any]
) -> None:
    name, config = type(module).__name__, config_of(module)
    if not causal and hasattr(config, "patch_size"):  # it would get the boundaries of the text
        raise ValueError(
            f"{_NAME} is for text, but {name} attends to patches of an image; use "
            f'attn_implementation={{"text_config": "{_NAME}", "vision_config": "sdpa"}}'
        )
    if dropout > 0:
        options = ("attention_probs_dropout_prob", "attention_dropout")
        raise ValueError(
            f"{_NAME} has no attention dropout, but {name} asks for {dropout}; set "
            f"config.{options[not hasattr(config, options[0])]} = 0.0, or use "
            f'attn_implementation="sdpa", {_PROVE}'
        )
    for option, what in _UNSUPPORTED.items():
        if kwargs.get(option) is not None:
            window, _ = sliding_window(config)
            also = "" if window is None else f" and sliding_window={window}"
            raise ValueError(
                f"{_NAME} cannot do {what}, but {name} passes {option}; use "
                f'attn_implementation="eager" for this model, {_PROVE}{also}'
            )


def _refuse_beside_boundaries(
    query: Tensor, key: Tensor, attention_mask: Any, sliding_window: int | None
) -> None:
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"cu_seq_lens_q is passed with {query.shape[2]} query and {key.shape[2]} key tokens "
            "per row: the cache is not empty; pass use_cache=False for packed rows"
        )
    if isinstance(attention_mask, _DeferredMask):
        if attention_mask.unknown_parts:
            raise ValueError(
                f"{_NAME} does causal, two-way and sliding-window attention, but the model's mask "
                f'is built from {attention_mask.unknown_parts}; use attn_implementation="sdpa", '
                f"{_PROVE}"
            )
        windows, wanted = attention_mask.windows, {sliding_window} - {None}
        fits = len(windows) == len(wanted) if attention_mask.is_two_way else windows == wanted
        if not fits:
            raise ValueError(
                f"the model's mask has the sliding windows {sorted(windows)}, but "
                f"the layer asks for sliding_window={sliding_window}; use "
                f'attn_implementation="sdpa", {_PROVE}'
            )
        attention_mask = attention_mask.build() if attention_mask.has_padding else None
    if attention_mask is not None:
        raise ValueError(
            "an attention_mask is passed in addition to cu_seq_lens_q (its shape is "
            f"{list(attention_mask.shape)}), but {_NAME} uses only one of them; remove "
            "attention_mask: pads are a segment of their own"
        )


def _mask_without_boundaries(
    module: nn.Module, attention_mask: Any, position_ids: Tensor | None
) -> Tensor | None:
    if module.training:
        raise ValueError(
            f"{_NAME} got no cu_seq_lens_q in training, so packed rows would leak; pass what "
            f'Batch.model_inputs("{_NAME}") returns, or use attn_implementation="sdpa" '
            "for padded batches"
        )
    mask = attention_mask.build() if isinstance(attention_mask, _DeferredMask) else attention_mask
    if getattr(module, "layer_idx", None) in (None, 0):  # checking one layer is enough
        _refuse_restarts(position_ids, mask)
    return mask


def _refuse_restarts(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Refuse positions that restart, unless the mask separates the sequences of a row."""
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return
    if mask is None:
        leaks = bool((torch.diff(position_ids) != 1).any())
    elif mask.shape[-2:] != (position_ids.shape[1],) * 2:  # a cache: one step of generate()
        return
    else:  # where positions decrease, a real cell (it sees itself) must not see any cell before it
        rows, cells = torch.nonzero(torch.diff(position_ids) < 0, as_tuple=True)
        seen = mask[rows.clamp(max=len(mask) - 1), 0, cells + 1]
        seen = seen if seen.dtype == torch.bool else seen == 0
        own = seen.gather(1, cells[:, None] + 1)
        earlier = torch.arange(seen.shape[1], device=seen.device) <= cells[:, None]
        leaks = bool((seen & earlier & own).any())
    if leaks:
        raise ValueError(
            "position_ids restart inside a row, but neither cu_seq_lens_q nor a mask separates the "
            f'segments; pass what Batch.model_inputs("{_NAME}") returns, '
            "which includes use_cache=False"
        )
