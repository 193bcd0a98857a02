"""The part of packed inputs that shows whether segments are apart: few rows, short segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.attention.models import is_2d
from torch_collate_kit.attention.packed_inputs import (
    BOUNDARIES,
    PackedInputs,
    RowSegments,
    read_inputs,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.model_kind import config_of
from torch_collate_kit.families import length_to_check
from torch_collate_kit.vision import VisionLayout

_LENGTH = 72  # linear attention works in chunks of 64 tokens, and convolutions are narrower
_LONGEST = ("max_length_q", "max_length_k")
_KNOWN = {"input_ids", "position_ids", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k", *_LONGEST}


def read_part(
    model: nn.Module, batch: Batch | Mapping[str, Any], vision: VisionLayout | None
) -> PackedInputs:
    """Return inputs of two rows, of two or three short segments each: what shows the same.

    Two, since attention may tell the segments of one row apart, and not those of more. Rows with
    images or shared prefixes, padded rows, and those of models for which every length counts are
    chosen, and not cut. Inputs that are not as the kit makes them are whole.
    """
    packed = read_inputs(model, batch, vision)
    inputs, segments, images = packed
    num_rows, mask = len(segments.ids_RW), inputs.get("attention_mask")
    if segments.ids_RW.numel() <= 6 * _LENGTH or not _counts_from_0(packed):
        return packed
    lengths = torch.bincount(segments.ids_RW[segments.ids_RW >= 0]).tolist()
    length = length_to_check(config_of(model), _LENGTH, max(lengths))
    rows = _rows(packed, lengths, length or _LENGTH)
    can_cut = length is not None and images is None and segments.sees is None and not is_2d(mask)
    if can_cut and (isinstance(batch, Batch) or _is_known(inputs, max(lengths))):
        return _cut(packed, rows, length or _LENGTH)
    if not isinstance(batch, Batch) or len(batch) != num_rows or len(rows) == num_rows:
        return packed
    found = read_inputs(model, batch.select(rows), vision)
    names = [segments.name(s) for row in rows for s, of in enumerate(segments.rows) if of == row]
    return found._replace(segments=found.segments._replace(names=names))


def _counts_from_0(packed: PackedInputs) -> bool:
    """Return whether positions [R, W] begin at 0 in every segment, as alone."""
    ids, positions = packed.segments.ids_RW, packed.inputs.get("position_ids")
    if positions is None or positions.shape != ids.shape or packed.segments.sees is not None:
        return True
    cells, real = torch.arange(ids.numel(), device=ids.device).view(ids.shape), ids >= 0
    firsts = cells.new_full((len(packed.segments.rows),), ids.numel())
    firsts.scatter_reduce_(0, ids[real], cells[real], "amin")
    return torch.equal(positions[real], cells[real] - firsts[ids[real]])


def _is_known(inputs: Mapping[str, Any], longest: int) -> bool:
    """Return whether model inputs hold only what follows from their segments."""
    values = [inputs[name] for name in ("input_ids", "position_ids") if name in inputs]
    bounds = [inputs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in inputs]
    numbers = [inputs.get(name, longest) == longest for name in _LONGEST]
    equal = [torch.equal(bounds[0], each) for each in bounds]
    return inputs.keys() <= _KNOWN and values[0].shape == values[-1].shape and all(numbers + equal)


def _rows(packed: PackedInputs, lengths: list[int], length: int) -> list[int]:
    """Return two rows: with images, several segments, a long one; of padded rows both ends."""
    segments, images = packed.segments, packed.images
    numbers, longest = Counter(segments.rows), dict.fromkeys(segments.rows, 0)
    for row, number in zip(segments.rows, lengths, strict=True):
        longest[row] = max(longest[row], number)
    if images is None and len(segments.rows) == len(numbers):  # one segment a row
        best = sorted(numbers, key=longest.__getitem__)
        return sorted({best[0], best[-1]})
    shown = set() if images is None else {segments.rows[s] for s in images.segments}
    return sorted(
        sorted(
            numbers, key=lambda r: (r not in shown, numbers[r] < 2, -min(longest[r], length), r)
        )[:2]
    )


def _cut(packed: PackedInputs, rows: list[int], length: int) -> PackedInputs:
    """Return some segments of the rows, from their beginnings, in rows of one width."""
    inputs, segments, _ = packed
    flat, number = segments.ids_RW.flatten(), 3 if length <= 4 * _LENGTH else 2
    found: list[dict[int, Tensor]] = []
    for row in rows:
        own = {s: (flat == s).nonzero()[:, 0] for s, of in enumerate(segments.rows) if of == row}
        longest = max(own, key=lambda s: len(own[s]))
        others = [s for s in own if s != longest][: number - 1]
        kept = {s: own[s][:_LENGTH] for s in others}
        rest = max(length, 3 * _LENGTH - sum(map(len, kept.values())))
        found.append(dict(sorted((kept | {longest: own[longest][:rest]}).items())))
    width = min(sum(map(len, of.values())) for of in found)
    for of in found:
        while sum(map(len, of.values())) > width:
            longest = max(of, key=lambda s: len(of[s]))
            of[longest] = of[longest][:-1]
    lengths = [len(cells) for of in found for cells in of.values()]
    cells_RW = torch.stack([torch.cat([*of.values()]) for of in found])
    numbers = torch.arange(len(lengths), device=flat.device)
    part = RowSegments(
        numbers.repeat_interleave(torch.tensor(lengths, device=flat.device)).view(cells_RW.shape),
        [row for row, of in enumerate(found) for _ in of],
        names=[segments.name(s) for of in found for s in of],
    )
    cut = {name: _value(name, of, lengths, cells_RW, segments) for name, of in inputs.items()}
    return PackedInputs(cut, part, None)


def _value(
    name: str, value: Any, lengths: list[int], cells_RW: Tensor, segments: RowSegments
) -> Any:
    """Return a model input at the cells: per cell, a mask, boundaries, or for the whole batch."""
    shape = segments.ids_RW.shape
    if name in BOUNDARIES:
        return value.new_tensor([0, *accumulate(lengths)])
    if name in _LONGEST:
        return max(lengths)
    if isinstance(value, Mapping):
        return {k: _value(name, mask, lengths, cells_RW, segments) for k, mask in value.items()}
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask":  # [R, 1, W, W]
        return torch.stack(
            [value[c[0] // shape[1]][:, c % shape[1]][..., c % shape[1]] for c in cells_RW]
        )
    if value.shape[-2:] == shape:
        return value.flatten(-2)[..., cells_RW]
    return value.flatten(0, 1)[cells_RW] if value.shape[:2] == shape else value
