"""The check that packed examples are isolated: by changes, by gradients, and each run alone."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from threading import Timer
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_collate_kit.attention.gradients import NoGradientError, groups_of, largest_gradients
from torch_collate_kit.attention.models import (
    is_2d,
    logits_of,
    lowest_precision,
    mask_shape,
    uses_mrope,
    vocabulary,
)
from torch_collate_kit.attention.packed_inputs import (
    PackedInputs,
    RowSegments,
    find_segments,
    read_part,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.model_inputs import block_mask
from torch_collate_kit.batch.model_kind import ModelKind, config_of
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.families import attention_of, sliding_window
from torch_collate_kit.vision import VisionLayout

_logger = logging.getLogger("torch_collate_kit.attention")
_PATIENCE_SECONDS = 5.0
_SLOW = "check_isolation still runs after 5 s, on %d rows of %d cells of the batch"

# With deterministic kernels isolated logits do not move at all. These tolerances allow for rounding
# in other kernels (a mixture of experts groups its tokens differently). A leak is far larger.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Rows of another shape are rounded differently: by 5e-6, 7e-3 and 5e-2 (bfloat16) with 32 layers.
# Matrix products in TF32, which a GPU may use for float32, have the precision of float16.
_ALONE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_IMAGE_BLOCKS = (
    'pass Batch.model_inputs("sdpa", mask="block", '
    "sliding_window=model.config.text_config.sliding_window)"
)


def check_isolation(
    model: nn.Module,
    batch: Batch | Mapping[str, Any],
    *,
    vision: VisionLayout | None = None,
    tolerance: float | None = None,
) -> None:
    """Check that packed examples do not change each other's logits, and equal each run alone.

    1. The tokens of some segments, and the pixels of some images, are changed, and others must not
       move. This finds leaks by a choice, such as of experts, which has no gradient.
    2. The gradient of the logits of any segment at the embeddings and pixels of any other one must
       be exactly 0. This finds leaks that are smaller than any tolerance. Where the model has no
       such gradient, a warning says so, and the gradient is not compared.
    3. Each example is run alone, as a batch of one, and compared.

    In rows that share prefixes the branches of their trees are compared: one sees those on its path
    and no other, and each path is run alone. From a large batch a part is run that shows the same,
    in less time than a training step (docs/isolation.md); after 5 s a line is logged. In training
    mode 1 and 2 run in both modes, because some leaks exist in one mode only.

    Args:
        model: run in eval mode, and in training mode too if it is in training mode, with the same
            dropout in every run. Modes, ``requires_grad`` and random state are restored. Pass it
            before wrapping it for FSDP, since ranks may need different numbers of forward passes.
        batch: a packed :class:`Batch`, or a mapping of model inputs. Segments are read from
            ``cu_seq_lens_q``, otherwise from positions that restart. ``labels`` and cells that a
            2-D ``attention_mask`` excludes are ignored.
        vision: the ``vision`` of the collator; needed for model inputs with images. A Batch has it.
        tolerance: for logits, not for gradients: the change allowed, as a fraction of the change in
            the changed segment's own logits, and the difference from an example alone, as a
            fraction of its largest logit. The defaults follow from the lowest precision of logits,
            weights and autocast: 1e-9 and 1e-4 for float64, 1e-4 and 1e-4 for float32 (on a
            GPU 2e-2 from alone, because of TF32), 2e-3 and 2e-2 for float16, 1e-2 and 1e-1 for
            bfloat16.

    Raises:
        IsolationError: a segment changes the logits of another, or differs from a run alone; its
            own logits stay the same or are NaN; rows are padded on the left in a model for which
            that is wrong; or the model has layers that carry state and the inputs, the kernels or
            ``isolate_mixers`` to keep them apart are missing, or images are not kept apart.
        ValueError: fewer than two segments; inputs that do not define segments, or images that do
            not fit the placeholders; a 4-D mask that loses the model's sliding windows.
        TypeError: the model's output has neither ``logits`` nor last hidden states of each token.

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
            "check_isolation needs a model and a Batch or model inputs, got "
            f"{type(model).__name__} and {type(batch).__name__}"
        )
    packed = read_part(model, batch, vision)
    modes = [(module, module.training) for module in model.modules()]
    slow = Timer(_PATIENCE_SECONDS, _logger.warning, (_SLOW, *packed.segments.ids_RW.shape))
    slow.daemon = True
    slow.start()
    try:
        model.eval()
        logits = _check_leaks(model, packed, tolerance)
        _check_gradients(model, packed)
        _check_alone(model, packed, logits, tolerance)
        _set_modes(modes)
        if model.training:
            _check_leaks(model, packed, tolerance)
            _check_gradients(model, packed)
    finally:
        slow.cancel()
        _set_modes(modes)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        module.training = is_training


class _Change(NamedTuple):
    """Changed inputs of one segment, and its cells [R, W], one of which must react."""

    segment: int
    what: str
    inputs: dict[str, Tensor]
    own_RW: Tensor


def _changes(model: nn.Module, packed: PackedInputs) -> Iterator[_Change]:
    inputs, segments, images, _ = packed
    ids, of_cells = inputs["input_ids"], segments.ids_RW
    changed = _change_tokens(model, ids)
    with_text = torch.unique(of_cells[(changed != ids) & (of_cells >= 0)]).tolist()
    if not with_text:
        raise IsolationError("no token can be changed; pass a batch with text")
    if segments.sees is not None:  # gradients show what leaks from where paths divide
        with_text = sorted({*with_text} & {*segments.ends()})
    for segment in _sources(segments.rows, with_text, {len(with_text) // 2, len(with_text) - 1}):
        own = of_cells == segment
        yield _Change(segment, "its tokens", {"input_ids": torch.where(own, changed, ids)}, own)
    if images is None or not len(images.segments):
        return
    with_images = np.unique(images.segments).tolist()
    cells = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    for segment in _sources(segments.rows, with_images, {len(with_images) - 1}):
        unit = int((images.segments == segment).argmax())
        # text before an image does not see it
        own = (of_cells == segment) & (cells >= int(images.last_cells[unit]))
        what = f"the pixels of its first {images.what}"
        yield _Change(segment, what, {"pixel_values": images.changed(unit)}, own)


def _sources(rows: list[int], candidates: list[int], others: set[int]) -> list[int]:
    """Return the first candidate of each row, and those at the places ``others``."""
    first_of_row = {rows[segment]: segment for segment in reversed(candidates)}
    return sorted({*first_of_row.values(), *(candidates[place] for place in others)})


def _distance(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest difference of a logit at each token: float32 [...] of logits [..., V]."""
    # equal infinities (a masked vocabulary tail) do not differ; NaN stays NaN
    return torch.where(before == after, 0, (before - after).abs()).amax(-1).float()


@torch.no_grad()
def _check_leaks(model: nn.Module, packed: PackedInputs, tolerance: float | None) -> Tensor:
    """Return the logits of the unchanged inputs; raise if a segment leaks."""
    segments, before = packed.segments, logits_of(model, packed.inputs)
    allowed = _TOLERANCE[lowest_precision(model, before)] if tolerance is None else tolerance
    for change in _changes(model, packed):
        name = segments.name(change.segment)
        own, others = _movement(model, packed, change, before)
        if any(math.isnan(x) for x in (own, *others.values())):
            raise IsolationError(
                f"logits are NaN after changing {change.what} in {name}; check the model's weights "
                "and dtype"
            )
        if own == 0:
            raise IsolationError(
                f"changing {change.what} does not move the logits of {name} itself; check that the "
                f"model reads {next(iter(change.inputs))}"
            )
        leaks = {segment: x for segment, x in others.items() if x > allowed * own}
        if leaks:

            def still_leaks(masked: PackedInputs, change: _Change = change) -> bool:
                own, others = _movement(model, masked, change, logits_of(model, masked.inputs))
                return max(others.values()) > allowed * own

            worst = max(leaks, key=leaks.__getitem__)
            raise IsolationError(
                f"{name} leaks into {segments.name(worst)} (in "
                f"{'training' if model.training else 'eval'} mode): changing {change.what} moves "
                f"the logits there by {leaks[worst]:.3g}, its own by {own:.3g}, and {allowed:.1g} "
                f"of that is allowed; {len(leaks)} of {len(others)} other segments move. "
                f"Likely reason: {reason_of_leak(model, packed, still_leaks)}"
            )
    return before


def _check_gradients(model: nn.Module, packed: PackedInputs) -> None:
    """Raise if the logits of a segment have a gradient at the inputs of another one."""
    for targets, sources in _groups(packed.segments):
        try:
            found = largest_gradients(model, packed, targets)
        except NoGradientError as error:
            warnings.warn(
                f"check_isolation has compared logits only, with a tolerance: {error}", stacklevel=3
            )
            return
        others = torch.zeros_like(found)
        others[sources] = found[sources]
        if others.any():
            _raise_leak(model, packed, targets, int(others.argmax()))


def _groups(segments: RowSegments) -> Iterator[tuple[list[int], list[int]]]:
    """Yield groups of targets and of sources that they must not see, covering every pair."""
    every = range(len(segments.rows))
    if segments.sees is None:
        for targets in groups_of(len(every)):
            yield targets, [s for s in every if s not in targets]
        return
    for source in every:
        if targets := sorted({*every} - {*segments.seeing(source)}):
            yield targets, [source]


def _raise_leak(model: nn.Module, packed: PackedInputs, targets: list[int], source: int) -> None:
    """Raise for the segment among the targets whose logits have a gradient at the source."""
    segments = packed.segments
    while len(targets) > 1:
        half = targets[: len(targets) // 2]
        leaks = bool(largest_gradients(model, packed, half)[source])
        targets = half if leaks else targets[len(half) :]

    def still_leaks(changed: PackedInputs) -> bool:
        return bool(largest_gradients(model, changed, targets)[source])

    found = largest_gradients(model, packed, targets)
    others = [s for s in range(len(found)) if s not in segments.seen_by(targets[0])]
    num_leaks = int((found[others] != 0).sum())
    raise IsolationError(
        f"{segments.name(source)} leaks into {segments.name(targets[0])} (in "
        f"{'training' if model.training else 'eval'} mode): the logits of the latter have a "
        f"gradient of {float(found[source]):.3g} at the inputs of the former, of "
        f"{float(found[targets[0]]):.3g} at its own, and only 0 is isolated; {num_leaks} of "
        f"{len(others)} other segments leak into it. "
        f"Likely reason: {reason_of_leak(model, packed, still_leaks)}"
    )


def _movement(
    model: nn.Module, packed: PackedInputs, change: _Change, before: Tensor
) -> tuple[float, dict[int, float]]:
    """Return the largest change of a logit in the changed segment, and in each other one."""
    inputs, segments, _, _ = packed
    moved_RW = _distance(before, logits_of(model, inputs | change.inputs))
    real = segments.ids_RW >= 0
    largest = moved_RW.new_zeros(len(segments.rows))
    largest.scatter_reduce_(0, segments.ids_RW[real], moved_RW[real], "amax")
    allowed = segments.seeing(change.segment)
    others = {s: moved for s, moved in enumerate(largest.tolist()) if s not in allowed}
    return float(moved_RW[change.own_RW].max()), others


def _change_tokens(model: nn.Module, ids_RW: Tensor) -> Tensor:
    """Return another token for each cell, but for placeholders of images, audio and video."""
    vocab_size, fixed = vocabulary(model, ids_RW)
    changed = (ids_RW + vocab_size // 2) % vocab_size
    for _ in fixed:  # never create a placeholder; at most len(fixed) of their ids are consecutive
        changed = torch.where(torch.isin(changed, fixed), (changed + 1) % vocab_size, changed)
    return torch.where(torch.isin(ids_RW, fixed), ids_RW, changed)


@torch.no_grad()
def _check_alone(
    model: nn.Module, packed: PackedInputs, logits: Tensor, tolerance: float | None
) -> None:
    """Check that the packed ``logits`` [R, W, V] equal those of each segment alone."""
    segments = packed.segments
    precision = lowest_precision(model, logits)
    if precision == torch.float32 and logits.is_cuda:
        precision = torch.float16
    allowed = _ALONE[precision] if tolerance is None else tolerance
    differences: dict[int, float] = {}
    for segment in segments.ends():
        alone = logits_of(model, packed.alone(segment))[0]
        largest = float(alone.abs().nan_to_num(posinf=0).max())
        found = float(_distance(alone, logits.flatten(0, 1)[segments.cells_of(segment)]).max())
        if not found <= allowed * largest:  # NaN, too
            differences[segment] = found / largest if largest else found
    if differences:
        worst = max(differences, key=differences.__getitem__)
        raise IsolationError(
            f"{segments.name(worst)} differs from a run alone, though the others do not leak into "
            f"it: its logits differ by {differences[worst]:.3g} of the largest, and {allowed:.1g} "
            f"is allowed; {len(differences)} of {len(segments.rows)} segments differ. Likely "
            f"reason: {reason_of_difference(packed, worst)}"
        )


def reason_of_leak(
    model: nn.Module, packed: PackedInputs, leaks: Callable[[PackedInputs], bool]
) -> str:
    """Return the likely reason; ``leaks`` returns whether other inputs leak in the same way."""
    attention, mask = ModelKind.of(model).attention, packed.inputs.get("attention_mask")
    if is_2d(mask):
        return (
            "a 2-D attention_mask is passed, and any 2-D mask switches packed isolation off in "
            "transformers; leave it out"
        )
    if mask is not None:
        return (
            f'the attention_mask {mask_shape(mask)} itself, or attention "{attention}" misusing it'
        )
    return (
        _lost_boundaries(model, packed, attention)
        or _joined_images(packed)
        or _blind_mask(model, packed, leaks)
        or "a layer of the model mixes positions; look for layers other than attention"
    )


def _lost_boundaries(model: nn.Module, packed: PackedInputs, attention: str) -> str | None:
    """Return the reason, if this attention cannot find the segments in the inputs."""
    inputs, segments, _, _ = packed
    boundaries, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if attention == "torch_varlen" or attention.startswith("flash"):
        if boundaries is not None:
            return None
        return (
            f'attention "{attention}" needs cu_seq_lens_q; pass what Batch.model_inputs() returns'
        )
    if inputs.get("use_cache") is not False:
        return (
            "use_cache is not False (the default of the config is True), and with a cache "
            "transformers ignores restarting position_ids; pass use_cache=False"
        )
    if positions is not None and uses_mrope(model) and positions.shape[:-2] != (4,):
        return (
            f"position_ids are {list(positions.shape)}, and this model separates packed examples "
            f"by {[4, *inputs['input_ids'].shape]} only, with text positions that restart first; "
            "pass the processor to the collator in place of the tokenizer"
        )
    if boundaries is not None:
        unread = inputs | {"cu_seq_lens_q": None}
        if positions is None or not torch.equal(find_segments(unread).ids_RW, segments.ids_RW):
            return f'attention "{attention}" ignores cu_seq_lens, and position_ids do not restart'
    return None


def _joined_images(packed: PackedInputs) -> str | None:
    """Return the reason, if the model makes its blocks of images from the types of tokens."""
    types = "" if packed.images is None else packed.images.layout.family.token_types
    if not types or types not in packed.inputs:
        return None
    return (
        "transformers up to 5.23 treats images that touch as one block, also where one example "
        f"ends and the next begins; {_IMAGE_BLOCKS}"
    )


def _blind_mask(
    model: nn.Module, packed: PackedInputs, leaks: Callable[[PackedInputs], bool]
) -> str | None:
    """Return the reason, if a block mask stops the leak: the model's mask ignores position_ids."""
    # so do afmoe, biogpt, bloom, falcon, gpt_oss, mpt, opt and xglm in transformers 5.23
    attention = attention_of(config_of(model))
    if attention not in ("sdpa", "eager"):
        return None
    is_two_way = packed.kind is not None and packed.kind.is_two_way
    mask = block_mask(packed.segments.ids_RW, attention, two_way=is_two_way)
    masked = packed._replace(inputs=packed.inputs | {"attention_mask": mask})
    blind = "the model builds its mask without position_ids, so they do not separate examples"
    try:
        if leaks(masked):
            return None
    except IsolationError as error:
        return f"perhaps {blind}, and a block mask does not help: {error}"
    if is_two_way:
        return (
            "tokens of this model see later ones, and its mask does not see positions; pass "
            "batch.model_inputs(model), which has a two-way mask or boundaries"
        )
    window, _ = sliding_window(config_of(model))
    option = "" if window is None else f", sliding_window={window}"
    return (
        f"{blind} (gpt-oss, opt and falcon do so in transformers 5.23); a block mask keeps the "
        f'segments apart: pass Batch.model_inputs("{attention}", mask="block"{option})'
    )


def reason_of_difference(packed: PackedInputs, segment: int) -> str:
    """Return the likely reason why a segment differs from a run alone."""
    inputs, segments, images, kind = packed
    mask, given = inputs.get("attention_mask"), packed.positions_of(segment)
    if given is not None:
        if kind is None:
            own = packed.alone(segment)["position_ids"]
        else:  # as the model numbers a text alone
            own = torch.arange(given.shape[-1], device=given.device)[None] + kind.first_position
        if given.shape != own.shape:
            return (
                f"position_ids are {list(inputs['position_ids'].shape)}, but rows with images need "
                f"{[len(own), *segments.ids_RW.shape]}; pass what Batch.model_inputs() returns"
            )
        if not torch.equal(given, own):
            return (
                "its position_ids differ from those alone; pass what Batch.model_inputs() returns"
            )
    types = "" if images is None else images.layout.family.token_types
    if types and types not in inputs:
        return f"{types} is not passed; pass what Batch.model_inputs() returns"
    if types and mask is None:
        return (
            "the model makes blocks of images from positions that restart, and loses them; "
            + _IMAGE_BLOCKS
        )
    if mask is not None and not is_2d(mask):
        return f"the attention_mask {mask_shape(mask)} lets tokens see too much or too little"
    if isinstance(mask, Tensor) and is_2d(mask) and not mask[segments.rows[segment], 0]:
        return (
            "the model reads the pads on the left as tokens (so do RecurrentGemma, RWKV and xLSTM "
            'in transformers 5.23); pass padding_side="right" to PaddedCollator'
        )
    reason = (
        "a part of the model depends on the place of an example in its row, or on the length of "
        "the others"
    )
    if mask is not None:  # rows are padded already
        return f"{reason} (as RoPE that is scaled by the longest one); batch equal lengths"
    return f"{reason}; use PaddedCollator for this model"
