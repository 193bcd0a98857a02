"""Whether packed examples can see each other, found by changing one and watching the others."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_collate_kit.batch import Batch
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
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_RECURRENT = ("linear", "conv", "recurrent", "mamba", "ssm", "rwkv", "delta", "hybrid")
_RECURRENT_KERNELS = ("fla", "causal_conv1d")  # the packages whose kernels take cu_seq_lens
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
        ValueError: fewer than two segments; inputs that do not say where segments are.
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
        _refuse_recurrent_layers(model, inputs)
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
        inputs = batch.model_inputs(attention=_attention_name(model) or "sdpa")
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
        changed_ids = _change_tokens(model, inputs["input_ids"], segments.ids_RW == source)
        after = _logits(model, inputs | {"input_ids": changed_ids})
        # equal infinities (a masked vocabulary tail) did not move
        moved_RW = torch.where(before == after, 0, (before - after).abs()).amax(-1).float()
        moved = _largest_by_segment(moved_RW, segments)
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
                f"Likely reason: {_likely_reason(model, inputs)}"
            )


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
        output = model(**inputs)
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
    vocab_size, fixed = _vocabulary(model, ids_RW)
    changed = (ids_RW + vocab_size // 2) % vocab_size
    for _ in fixed:  # never make a placeholder: each step leaves at most one of them behind
        changed = torch.where(torch.isin(changed, fixed), (changed + 1) % vocab_size, changed)
    return torch.where(where_RW & ~torch.isin(ids_RW, fixed), changed, ids_RW)


def _vocabulary(model: nn.Module, ids_RW: Tensor) -> tuple[int, Tensor]:
    """Number of tokens, and the ids that stand for something that is not text."""
    embed = getattr(_unwrap(model), "get_input_embeddings", lambda: None)()
    size = getattr(embed, "num_embeddings", None) or int(ids_RW.max()) + 1
    names = {"image", "video", "audio", "vision", "boi", "eoi"}
    fixed = {
        value
        for config in _configs(_unwrap(model))
        for key, value in vars(config).items()
        if key.endswith(("_token_id", "_token_index"))
        and key.split("_")[0] in names
        and isinstance(value, int)
    }
    return size, torch.tensor(sorted(fixed), dtype=ids_RW.dtype, device=ids_RW.device)


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


def _refuse_recurrent_layers(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    found = sorted(
        {
            str(kind)
            for name in _LAYER_LISTS
            for kind in getattr(_text_config(model), name, None) or ()
            if any(part in str(kind).lower() for part in _RECURRENT)
        }
    )
    if not found:
        return
    way_out = "use PaddedCollator for this model"
    if inputs.get("cu_seq_lens_q") is None:
        raise IsolationError(
            f"the model has {found} layers, which carry state from one segment of a row into the "
            f"next, and no cu_seq_lens_q is passed that could stop them; {way_out}"
        )
    missing = [name for name in _RECURRENT_KERNELS if importlib.util.find_spec(name) is None]
    if missing:
        raise IsolationError(
            f"the model has {found} layers, and their plain torch versions ignore cu_seq_lens; the "
            f"kernels that take it need {missing}, not installed here; install them, or {way_out}"
        )


def _likely_reason(model: nn.Module, inputs: Mapping[str, Any]) -> str:
    attention = _attention_name(model) or "unknown"
    mask = inputs.get("attention_mask")
    by_boundaries = attention == "torch_varlen" or attention.startswith("flash")
    if mask is not None and getattr(mask, "ndim", 2) == 2:
        return (
            "a 2-D attention_mask is passed, and any 2-D mask switches packed isolation off in "
            "transformers; leave it out"
        )
    if mask is not None:
        return (
            f'the attention_mask {list(mask.shape)} itself, or attention "{attention}" misusing it'
        )
    if by_boundaries and inputs.get("cu_seq_lens_q") is None:
        return f'attention "{attention}" needs cu_seq_lens_q; pass what Batch.model_inputs() gives'
    if not by_boundaries and inputs.get("use_cache") is not False:
        return (
            "use_cache is not False (the default of the config is True), and with a cache "
            "transformers ignores restarting position_ids; pass use_cache=False"
        )
    if not by_boundaries and inputs.get("cu_seq_lens_q") is not None:
        return (
            f'attention "{attention}" ignores cu_seq_lens and position_ids do not restart with it'
        )
    return "a layer of the model mixes positions by itself; look for layers other than attention"


def _unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and its like."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def _configs(model: nn.Module) -> list[Any]:
    """The model's config and the configs nested in it (text_config, vision_config, ...)."""
    config = getattr(model, "config", None)
    found: list[Any] = [] if config is None else [config]
    for config in found:  # grows while it is read
        found += [value for value in vars(config).values() if hasattr(value, "model_type")]
    return found


def _text_config(model: nn.Module) -> Any:
    """The config of the text part: the one that sees packed rows."""
    config: Any = getattr(_unwrap(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _attention_name(model: nn.Module) -> str | None:
    return getattr(_text_config(model), "_attn_implementation", None)
