"""Whether packed examples can see each other, found by changing one and watching the others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

# Isolated logits do not move at all with deterministic kernels; what is allowed here is rounding of
# kernels that are not (a mixture of experts groups its tokens anew). A leak is far above it.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
_MASK_PADDING = -1  # segment id of cells that a 2-D attention mask takes out


def check_isolation(
    model: nn.Module, batch: Batch | Mapping[str, Any], *, tolerance: float | None = None
) -> None:
    """Change the tokens of one segment; raise unless the logits of all others stay where they are.

    ``batch`` is a packed :class:`Batch`, which is asked for the inputs of the model's own attention
    implementation, or a plain mapping of model inputs, which reaches the model as it is but for
    ``labels`` (no loss is needed). Segments are read from ``cu_seq_lens_q``, else from positions
    that restart; cells that a 2-D ``attention_mask`` takes out are not looked at. The first segment
    of every row, the one in the middle and the last are changed, one at a time. So a call costs
    about ``rows + 3`` forward passes without gradients, and twice that for a model in training
    mode, because some leaks exist in only one mode. A row or two are enough.

    The model is run in eval mode, and also in training mode where it is in that now, there with the
    same dropout in each run. Modes and random state are put back. Run it on the model before it is
    wrapped for FSDP: ranks may need different numbers of passes.

    ``tolerance`` is the movement allowed, as a fraction of the movement of the changed segment's
    own logits. The default follows the least precise of logits, weights and autocast: 1e-9 in
    float64, 1e-4 in float32, 2e-3 in float16, 1e-2 in bfloat16.

    Raises:
        IsolationError: a segment moves another one's logits; a changed segment's own logits do not
            move, or logits are NaN, so that nothing is shown; the model has recurrent, convolution
            or linear-attention layers without kernels that take ``cu_seq_lens``.
        ValueError: fewer than two segments; inputs that do not say where segments are; a 4-D mask
            in which the model's sliding windows are lost.
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
    inputs = _model_inputs(model, batch)
    segments = _find_segments(inputs)
    if len(segments.rows) < 2:
        raise ValueError(
            f"the batch has {len(segments.rows)} segment(s), so there is nothing to leak into; "
            "pass a batch with at least two packed examples"
        )
    if len(segments.rows) > len(set(segments.rows)):
        refuse_recurrent_layers(model, inputs)
    _refuse_lost_window(model, inputs, segments)
    for training in (False, True) if model.training else (False,):
        with _mode(model, training=training), torch.no_grad():
            _check_one_mode(model, inputs, segments, tolerance)


class _Segments(NamedTuple):
    """Which segment every cell belongs to [R, W], and the row of every segment."""

    ids_RW: Tensor
    rows: list[int]

    def name(self, segment: int) -> str:
        row = self.rows[segment]
        return f"row {row} segment {segment - self.rows.index(row)}"


def _model_inputs(model: nn.Module, batch: Batch | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(batch, Batch):
        inputs = batch.model_inputs(attention=attention_name(model) or "sdpa")
    else:
        inputs = dict(batch)
    inputs.pop("labels", None)
    if not isinstance(inputs.get("input_ids"), Tensor) or inputs["input_ids"].ndim != 2:
        raise ValueError(
            "input_ids must be a tensor [rows, width], because its tokens are changed one segment "
            f"at a time; got inputs {sorted(inputs)}"
        )
    return inputs


def _find_segments(inputs: Mapping[str, Any]) -> _Segments:
    ids = inputs["input_ids"]
    cu_seq_lens, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if cu_seq_lens is not None:
        lengths = lengths_from_cu_seqlens(cu_seq_lens)
    elif positions is not None:
        # [4, R, W] is the form with a text row first; [3, R, W] has only image positions
        rows = positions.flatten(0, -2)[: len(ids)].expand(len(ids), -1)
        lengths = torch.cat([lengths_from_position_ids(row) for row in rows])
    else:
        raise ValueError(
            "neither cu_seq_lens_q nor position_ids is passed, so nothing tells the segments (nor "
            "tells the model); pass what Batch.model_inputs() gives"
        )
    if int(lengths.sum()) != ids.numel():
        raise ValueError(
            f"the segments cover {int(lengths.sum())} tokens, but input_ids has {ids.numel()} "
            f"cells ({list(ids.shape)}); cu_seq_lens_q must be flat over the rows"
        )
    cells = segment_ids_from_lengths(lengths).view(ids.shape).to(ids.device)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        cells = cells.masked_fill(mask == 0, _MASK_PADDING)
    # numbered again from 0: empty segments and those that are all padding are gone
    real, dense = torch.unique(cells, return_inverse=True)
    dense = dense - int((real == _MASK_PADDING).any())
    num_segments = int(dense.max()) + 1
    rows_R1 = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)
    first_row = rows_R1.new_zeros(num_segments)
    first_row[dense[dense >= 0]] = rows_R1[dense >= 0]
    return _Segments(dense, first_row.tolist())


def _check_one_mode(
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
                "that the others stay shows nothing; check that the model reads input_ids"
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
    """How far the logits of every segment move when the tokens of ``source`` change."""
    changed_ids = _change_tokens(model, inputs["input_ids"], segments.ids_RW == source)
    after = _logits(model, inputs | {"input_ids": changed_ids})
    # equal infinities (a masked vocabulary tail) did not move
    moved_RW = torch.where(before == after, 0, (before - after).abs()).amax(-1).float()
    return _largest_by_segment(moved_RW, segments)


def _largest_by_segment(values_RW: Tensor, segments: _Segments) -> dict[int, float]:
    """The largest value in the cells of each segment; NaN where one is NaN."""
    largest = values_RW.new_zeros(len(segments.rows))
    real = segments.ids_RW >= 0
    largest.scatter_reduce_(0, segments.ids_RW[real], values_RW[real], "amax")
    return dict(enumerate(largest.tolist()))


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Logits [R, W, V]; the random state is put back, so dropout is the same in every call."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        # reentrant checkpointing warns that nothing here wants a gradient, which is so
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        try:
            output = model(**inputs)
        except Exception as error:
            mask = inputs.get("attention_mask")
            if mask is None or getattr(mask, "ndim", 4) == 2:
                raise
            what = "no dict of masks" if isinstance(mask, Mapping) else "2-D masks only"
            way_out = (
                "leave sliding_window out"
                if isinstance(mask, Mapping)
                else "use PaddedCollator, since nothing separates packed rows then"
            )
            raise IsolationError(
                f"the model fails with the attention_mask {_shape(mask)} "
                f"({type(error).__name__}: {error}); if it takes {what}, {way_out}"
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
    """Another token in every chosen cell, but for placeholders of images, audio and video."""
    vocab_size, fixed = vocabulary(model, ids_RW)
    changed = (ids_RW + vocab_size // 2) % vocab_size
    for _ in fixed:  # never make a placeholder: each step leaves at most one of them behind
        changed = torch.where(torch.isin(changed, fixed), (changed + 1) % vocab_size, changed)
    return torch.where(where_RW & ~torch.isin(ids_RW, fixed), changed, ids_RW)


def _default_tolerance(model: nn.Module, logits: Tensor) -> float:
    dtypes = {logits.dtype} | {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in dtypes)


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Eval mode for all modules, or the modes as they are; put back one by one afterwards."""
    before = [(module, module.training) for module in model.modules()]
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def _refuse_lost_window(model: nn.Module, inputs: Mapping[str, Any], segments: _Segments) -> None:
    """A 4-D mask reaches every layer as it is, those with a sliding window too."""
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
    attention = attention_name(model) or "unknown"
    mask = inputs.get("attention_mask")
    by_boundaries = attention == "torch_varlen" or attention.startswith("flash")
    if mask is not None and getattr(mask, "ndim", 4) == 2:
        return (
            "a 2-D attention_mask is passed, and any 2-D mask switches packed isolation off in "
            "transformers; leave it out"
        )
    if mask is not None:
        return f'the attention_mask {_shape(mask)} itself, or attention "{attention}" misusing it'
    if by_boundaries and inputs.get("cu_seq_lens_q") is None:
        return f'attention "{attention}" needs cu_seq_lens_q; pass what Batch.model_inputs() gives'
    if not by_boundaries and inputs.get("use_cache") is not False:
        return (
            "use_cache is not False (the default of the config is True), and with a cache "
            "transformers ignores restarting position_ids; pass use_cache=False"
        )
    if inputs.get("cu_seq_lens_q") is not None and not by_boundaries:
        by_positions = {k: v for k, v in inputs.items() if k in ("input_ids", "position_ids")}
        if len(by_positions) < 2 or not torch.equal(
            _find_segments(by_positions).ids_RW, segments.ids_RW
        ):
            return (
                f'attention "{attention}" ignores cu_seq_lens and position_ids do not restart with '
                "it"
            )
    return _blind_mask(model, inputs, segments, source, allowed) or (
        "a layer of the model mixes positions by itself; look for layers other than attention"
    )


def _blind_mask(
    model: nn.Module, inputs: dict[str, Any], segments: _Segments, source: int, allowed: float
) -> str | None:
    """The reason where a block mask stops the leak: the model's own does not see positions.

    In transformers 5.23 so do afmoe, biogpt, bloom, falcon, gpt_oss, mpt, opt, xglm.
    """
    attention = attention_name(model)
    if attention not in ("sdpa", "eager"):
        return None
    masked = inputs | {"attention_mask": block_mask(segments.ids_RW, attention)}
    blind = "the model builds its mask without position_ids, which then separate nothing"
    try:
        moved = _movement(model, masked, segments, source, _logits(model, masked))
    except IsolationError as error:
        return f"perhaps {blind}, and a block mask is no way out: {error}"
    own = moved.pop(source)
    if max(moved.values()) > allowed * own:
        return None
    window, _ = sliding_window(model)
    option = "" if window is None else f", sliding_window={window}"
    return (
        f"{blind} (gpt-oss, opt and falcon do so in transformers 5.23); a block mask keeps the "
        f'segments apart: pass Batch.model_inputs("{attention}", mask="block"{option})'
    )
