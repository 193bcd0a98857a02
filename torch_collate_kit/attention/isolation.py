"""Whether packed examples can see each other: change one, and compare the logits of the others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_collate_kit.attention.models import (
    attention_name,
    refuse_recurrent_layers,
    sliding_window,
    vocabulary,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.model_inputs import block_mask
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.segments import (
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    segment_ids_from_lengths,
)

__all__ = ["check_isolation"]

# With deterministic kernels isolated logits do not move at all. These tolerances allow for rounding
# in other kernels (a mixture of experts groups its tokens differently). A leak is far larger.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_isolation(
    model: nn.Module, batch: Batch | Mapping[str, Any], *, tolerance: float | None = None
) -> None:
    """Change the tokens of one segment; raise if the logits of another segment change.

    The first segment of each row, the middle segment and the last segment are changed, one at a
    time. A call takes about ``rows + 3`` forward passes without gradients, and twice as many in
    training mode, because some leaks exist in one mode only. One or two rows are enough.

    Args:
        model: run in eval mode, and also in training mode if it is in that, with the same dropout
            in every run. Modes and random state are restored. Pass it before wrapping it for FSDP,
            since ranks may need different numbers of forward passes.
        batch: a packed :class:`Batch`, or a mapping of model inputs. Segments are read from
            ``cu_seq_lens_q``, otherwise from positions that restart. ``labels`` and cells that a
            2-D ``attention_mask`` excludes are ignored.
        tolerance: the change allowed, as a fraction of the change in the changed segment's own
            logits. The default follows from the lowest precision of logits, weights and autocast:
            1e-9 for float64, 1e-4 for float32, 2e-3 for float16, 1e-2 for bfloat16.

    Raises:
        IsolationError: a segment changes the logits of another; a changed segment's own logits stay
            the same or are NaN; or the model has recurrent, convolution or linear-attention layers
            without kernels that take ``cu_seq_lens``.
        ValueError: fewer than two segments; inputs that do not define segments; a 4-D mask that
            loses the model's sliding windows.
        TypeError: the model's output has no ``logits``.

    >>> import transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=2, attn_implementation="sdpa")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]),
    ...           "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> check_isolation(model, inputs | {"use_cache": False})
    >>> check_isolation(model, inputs)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    torch_collate_kit.errors.IsolationError: row 0 segment 0 leaks into row 0 segment 1 ...
    ... pass use_cache=False
    """
    if not isinstance(model, nn.Module) or not isinstance(batch, Mapping):
        raise TypeError(
            "check_isolation takes a model and a Batch or model inputs, got "
            f"{type(model).__name__} and {type(batch).__name__}"
        )
    if isinstance(batch, Batch):
        inputs = batch.model_inputs(attention=attention_name(model) or "sdpa", labels=False)
    else:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(
            "input_ids must be a tensor [rows, width], because its tokens are changed one segment "
            f"at a time; got inputs {sorted(inputs)}"
        )
    segments = _find_segments(inputs)
    if len(segments.rows) < 2:
        raise ValueError(
            f"the batch has {len(segments.rows)} segment(s), so nothing can leak; "
            "pass a batch with at least two packed examples"
        )
    if len(segments.rows) > len(set(segments.rows)):
        refuse_recurrent_layers(model, inputs)
    _refuse_lost_window(model, inputs, segments)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        _check_mode(model, inputs, segments, tolerance)
    finally:
        for module, was_training in modes:
            module.training = was_training
    if model.training:
        _check_mode(model, inputs, segments, tolerance)


class _Segments(NamedTuple):
    """The segment of each cell [R, W], and the row of each segment."""

    ids_RW: Tensor
    rows: list[int]

    def name(self, segment: int) -> str:
        row = self.rows[segment]
        return f"row {row} segment {segment - self.rows.index(row)}"


def _find_segments(inputs: Mapping[str, Any]) -> _Segments:
    ids = inputs["input_ids"]
    cu_seq_lens, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if cu_seq_lens is not None:
        lengths = lengths_from_cu_seqlens(cu_seq_lens)
    elif positions is not None:
        # [4, R, W] is the form with a text row first; [3, R, W] has only image positions
        of_text = positions.flatten(0, -2)[: len(ids)].expand(len(ids), -1)
        lengths = torch.cat([lengths_from_position_ids(row) for row in of_text])
    else:
        raise ValueError(
            "neither cu_seq_lens_q nor position_ids is passed, so neither this check nor the model "
            "knows the segments; pass what Batch.model_inputs() returns"
        )
    if int(lengths.sum()) != ids.numel():
        raise ValueError(
            f"the segments cover {int(lengths.sum())} tokens, but input_ids has {ids.numel()} "
            f"cells ({list(ids.shape)}); cu_seq_lens_q must be flat over the rows"
        )
    cells = segment_ids_from_lengths(lengths).view(ids.shape).to(ids.device)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        cells = cells.masked_fill(mask == 0, -1)
    # renumbered from 0, without segments that are empty or all padding, which is -1
    found, dense = torch.unique(cells, return_inverse=True)
    dense = dense - int(found[0] < 0)
    row_of = dense.new_zeros(int(dense.max()) + 1)
    rows, columns = torch.nonzero(dense >= 0, as_tuple=True)
    row_of[dense[rows, columns]] = rows
    return _Segments(dense, row_of.tolist())


@torch.no_grad()
def _check_mode(
    model: nn.Module, inputs: dict[str, Any], segments: _Segments, tolerance: float | None
) -> None:
    before = _logits(model, inputs)
    allowed = _default_tolerance(model, before) if tolerance is None else tolerance
    sources = {segments.rows.index(row) for row in set(segments.rows)}
    for source in sorted(sources | {len(segments.rows) // 2, len(segments.rows) - 1}):
        moved = _movement(model, inputs, segments, source, before)
        if any(math.isnan(x) for x in moved.values()):
            raise IsolationError(
                f"logits are NaN, so nothing can be shown; changed {segments.name(source)}; check "
                "the model's weights and dtype"
            )
        own = moved.pop(source)
        if own == 0:
            raise IsolationError(
                f"changing all tokens of {segments.name(source)} does not move its own logits, so "
                "nothing can be shown; check that the model reads input_ids"
            )
        leaks = {segment: x for segment, x in moved.items() if x > allowed * own}
        if leaks:
            worst = max(leaks, key=leaks.__getitem__)
            raise IsolationError(
                f"{segments.name(source)} leaks into {segments.name(worst)} (in "
                f"{'training' if model.training else 'eval'} mode): changing its tokens moves the "
                f"logits there by {leaks[worst]:.3g}, its own by {own:.3g}, and {allowed:.1g} of "
                f"that is allowed; {len(leaks)} of {len(moved)} other segments move. "
                f"Likely reason: {_likely_reason(model, inputs, segments, source, allowed)}"
            )


def _movement(
    model: nn.Module, inputs: dict[str, Any], segments: _Segments, source: int, before: Tensor
) -> dict[int, float]:
    """The largest change of a logit in each segment when the tokens of ``source`` change.

    NaN where a logit is NaN.
    """
    changed_ids = _change_tokens(model, inputs["input_ids"], segments.ids_RW == source)
    after = _logits(model, inputs | {"input_ids": changed_ids})
    # equal infinities (a masked vocabulary tail) did not move
    moved_RW = torch.where(before == after, 0, (before - after).abs()).amax(-1).float()
    real = segments.ids_RW >= 0
    largest = moved_RW.new_zeros(len(segments.rows))
    largest.scatter_reduce_(0, segments.ids_RW[real], moved_RW[real], "amax")
    return dict(enumerate(largest.tolist()))


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Logits [R, W, V]. The random state is restored, so dropout is the same in every call."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        # reentrant checkpointing warns that no input requires a gradient, which is intended here
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        try:
            output = model(**inputs)
        except Exception as error:
            mask = inputs.get("attention_mask")
            if mask is None or getattr(mask, "ndim", 4) == 2:
                raise
            hint = "2-D masks only, use PaddedCollator, since nothing separates packed rows then"
            if isinstance(mask, Mapping):
                hint = "no dict of masks, leave sliding_window out"
            raise IsolationError(
                f"the model fails with the attention_mask {_shape(mask)} "
                f"({type(error).__name__}: {error}); if it takes {hint}"
            ) from error
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__} without logits; pass the model with its "
            "language-model head"
        )
    if logits.shape[:-1] != inputs["input_ids"].shape:
        raise ValueError(
            f"logits are {list(logits.shape)} for input_ids {list(inputs['input_ids'].shape)}; "
            "isolation needs one position for every token (no logits_to_keep)"
        )
    return logits


def _change_tokens(model: nn.Module, ids_RW: Tensor, where_RW: Tensor) -> Tensor:
    """Another token in each chosen cell, except in placeholders of images, audio and video."""
    vocab_size, fixed = vocabulary(model, ids_RW)
    changed = (ids_RW + vocab_size // 2) % vocab_size
    for _ in fixed:  # never create a placeholder; at most len(fixed) of their ids are consecutive
        changed = torch.where(torch.isin(changed, fixed), (changed + 1) % vocab_size, changed)
    return torch.where(where_RW & ~torch.isin(ids_RW, fixed), changed, ids_RW)


def _default_tolerance(model: nn.Module, logits: Tensor) -> float:
    dtypes = {logits.dtype} | {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in dtypes)


def _refuse_lost_window(model: nn.Module, inputs: Mapping[str, Any], segments: _Segments) -> None:
    """Refuse a 4-D mask without the sliding window: it replaces the mask of every layer."""
    mask = inputs.get("attention_mask")
    window, all_slide = sliding_window(model)
    if window is None or not isinstance(mask, Tensor) or mask.ndim != 4:
        return
    longest = int(torch.bincount(segments.ids_RW[segments.ids_RW >= 0]).max())
    seen = mask if mask.dtype == torch.bool else mask >= 0
    if longest > window and not (all_slide and not seen.tril(-window).any()):
        raise ValueError(
            f"the attention_mask {_shape(mask)} replaces the masks of all layers, so the sliding "
            f"window of {window} tokens is lost in segments of up to {longest}; leave it out, or, "
            "where the model's mask does not see position_ids, pass "
            f'Batch.model_inputs(..., mask="block", sliding_window={window})'
        )


def _shape(mask: Any) -> str:
    return f"dict of {sorted(mask)}" if isinstance(mask, Mapping) else str(list(mask.shape))


def _likely_reason(
    model: nn.Module, inputs: dict[str, Any], segments: _Segments, source: int, allowed: float
) -> str:
    attention, mask = attention_name(model) or "unknown", inputs.get("attention_mask")
    boundaries = inputs.get("cu_seq_lens_q")
    if mask is not None and getattr(mask, "ndim", 4) == 2:
        return (
            "a 2-D attention_mask is passed, and any 2-D mask switches packed isolation off in "
            "transformers; leave it out"
        )
    if mask is not None:
        return f'the attention_mask {_shape(mask)} itself, or attention "{attention}" misusing it'
    if attention == "torch_varlen" or attention.startswith("flash"):
        if boundaries is None:
            return (
                f'attention "{attention}" needs cu_seq_lens_q; pass what Batch.model_inputs() '
                "returns"
            )
    elif inputs.get("use_cache") is not False:
        return (
            "use_cache is not False (the default of the config is True), and with a cache "
            "transformers ignores restarting position_ids; pass use_cache=False"
        )
    elif boundaries is not None:
        by_positions = {k: v for k, v in inputs.items() if k in ("input_ids", "position_ids")}
        if len(by_positions) < 2 or not torch.equal(
            _find_segments(by_positions).ids_RW, segments.ids_RW
        ):
            return (
                f'attention "{attention}" ignores cu_seq_lens and position_ids do not restart with '
                "it"
            )
    return _blind_mask(model, inputs, segments, source, allowed) or (
        "a layer of the model mixes positions; look for layers other than attention"
    )


def _blind_mask(
    model: nn.Module, inputs: dict[str, Any], segments: _Segments, source: int, allowed: float
) -> str | None:
    """The reason, if a block mask stops the leak: the model's own mask ignores position_ids.

    In transformers 5.23 that is so in afmoe, biogpt, bloom, falcon, gpt_oss, mpt, opt and xglm.
    """
    attention = attention_name(model)
    if attention not in ("sdpa", "eager"):
        return None
    masked = inputs | {"attention_mask": block_mask(segments.ids_RW, attention)}
    blind = "the model builds its mask without position_ids, so they do not separate examples"
    try:
        moved = _movement(model, masked, segments, source, _logits(model, masked))
    except IsolationError as error:
        return f"perhaps {blind}, and a block mask does not help: {error}"
    own = moved.pop(source)
    if max(moved.values()) > allowed * own:
        return None
    window, _ = sliding_window(model)
    option = "" if window is None else f", sliding_window={window}"
    return (
        f"{blind} (gpt-oss, opt and falcon do so in transformers 5.23); a block mask keeps the "
        f'segments apart: pass Batch.model_inputs("{attention}", mask="block"{option})'
    )
