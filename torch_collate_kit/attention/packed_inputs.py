"""Model inputs of ``check_isolation``, their segments and images, and the part that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_collate_kit.attention.models import is_2d, refuse_lost_window, refuse_packed_images
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.context_shards import refuse_shard
from torch_collate_kit.batch.dense import mrope_positions
from torch_collate_kit.batch.model_kind import ModelKind, config_of
from torch_collate_kit.batch.unpacking import branches_of, shares_prefixes
from torch_collate_kit.families import length_to_check, text_config
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import PIXEL_FIELDS
from torch_collate_kit.vision.layout import ImageUnits

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_cpu")
_LENGTH = 72  # linear attention works in chunks of 64 tokens, and convolutions are narrower
_LONGEST = ("max_length_q", "max_length_k")
_OF_ROWS = ("position_ids", *BOUNDARIES, *_LONGEST)
_KNOWN = {"input_ids", "position_ids", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k", *_LONGEST}


class PackedInputs(NamedTuple):
    """Model inputs, the segment of each cell, and the images of each segment."""

    inputs: dict[str, Any]
    segments: RowSegments
    images: RowImages | None
    kind: ModelKind | None = None
    """Of a model that numbers a text alone itself, so that wrong positions are seen."""

    def alone(self, segment: int) -> dict[str, Any]:
        """Return the inputs of one segment as a batch of one, with positions of its own."""
        shape, images = self.segments.ids_RW.shape, self.images
        cells = self.segments.cells_of(segment)
        ids_T = self.inputs["input_ids"].flatten()[cells]
        alone: dict[str, Any] = {}
        for name, value in self.inputs.items():
            if self.kind is not None and name in _OF_ROWS:  # it numbers a text itself
                continue
            if name in ("attention_mask", "path_cells") or (
                images is not None and name in images.fields
            ):
                continue
            if name in BOUNDARIES:
                alone[name] = value.new_tensor([0, len(ids_T)])
                continue
            if name in ("max_length_q", "max_length_k"):
                alone[name] = len(ids_T)
                continue
            is_per_cell = isinstance(value, Tensor) and value.shape[:2] == shape
            alone[name] = value.flatten(0, 1)[cells][None] if is_per_cell else value
        if images is not None:
            alone |= images.alone(segment, ids_T, self.positions_of(segment))
        elif "position_ids" in self.inputs and self.kind is None:
            alone["position_ids"] = torch.arange(len(ids_T), device=ids_T.device)[None]
        return alone

    def positions_of(self, segment: int) -> Tensor | None:
        """Return the positions of a segment in its row: [1, T], or [3 or 4, 1, T] with images."""
        positions: Tensor | None = self.inputs.get("position_ids")
        if positions is None:
            return None
        whole = positions.expand(*positions.shape[:-2], *self.segments.ids_RW.shape)
        return whole.flatten(-2)[..., self.segments.cells_of(segment)].unsqueeze(-2)


def read_inputs(
    model: nn.Module, batch: Batch | Mapping[str, Any], vision: VisionLayout | None
) -> PackedInputs:
    """Read segments and images; refuse inputs that do not fit each other or the model."""
    if isinstance(batch, Batch):
        refuse_shard(batch.stored(), "checked alone", "pass the whole batch")
    inputs, vision = _model_inputs(model, batch, vision)
    kind = None if config_of(model) is None else ModelKind.of(model)
    if kind is not None and not (kind.is_two_way or kind.first_position or kind.num_positions):
        kind = None
    branches = isinstance(batch, Batch) and shares_prefixes(batch) and branches_of(batch)
    segments = RowSegments(*branches) if branches else find_segments(inputs)
    if kind is not None and not branches and not is_2d(inputs.get("attention_mask")):
        segments = _without_tails(model, batch, inputs, segments)
    if len(segments.rows) < 2:
        raise ValueError(
            f"the batch has {len(segments.rows)} segment(s), so nothing can leak; "
            "pass a batch with at least two packed examples"
        )
    if branches:
        return PackedInputs(inputs, segments, None)
    if len(segments.rows) > len(set(segments.rows)):
        (found := ModelKind.of(model)).refuse_packed()
        found.refuse_missing(inputs)
        refuse_packed_images(model, inputs, vision)
    mask = inputs.get("attention_mask")
    has_left_pads = isinstance(mask, Tensor) and is_2d(mask) and (mask[:, 0] == 0).any()
    if has_left_pads and config_of(model) is not None:
        ModelKind.of(model).refuse_left_padding()
    if vision is None and "pixel_values" in inputs:
        raise ValueError(
            "the inputs have pixel_values, but not the segment of each image; pass the Batch, or "
            "its inputs and vision=collator.vision"
        )
    images = None if vision is None else RowImages.of(inputs, vision, segments)
    refuse_lost_window(model, inputs, segments.ids_RW)
    return PackedInputs(inputs, segments, images, kind)


def _without_tails(
    model: nn.Module, batch: Any, inputs: Mapping[str, Any], segments: RowSegments
) -> RowSegments:
    """Return the segments that are not pads, whose positions are not those of a text."""
    pad = getattr(text_config(config_of(model)), "pad_token_id", None)
    is_text = inputs["input_ids"] != (-1 if pad is None else pad)
    if isinstance(batch, Batch) and "attention_mask" in batch:
        is_text = batch["attention_mask"] != 0
    real = torch.isin(segments.ids_RW, segments.ids_RW[is_text])
    return find_segments({**inputs, "attention_mask": real})


def _model_inputs(
    model: nn.Module, batch: Batch | Mapping[str, Any], vision: VisionLayout | None
) -> tuple[dict[str, Any], VisionLayout | None]:
    if vision is not None and not isinstance(vision, VisionLayout):
        raise TypeError(
            f"vision must be a VisionLayout, got {type(vision).__name__}; pass collator.vision"
        )
    if isinstance(batch, Batch):
        inputs = batch.model_inputs(model, labels=False)
        vision = batch.placement.vision if vision is None and batch.placement else vision
    else:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if "path_cells" in inputs:
            raise ValueError(
                "the inputs have path_cells, of segments that share prefixes (share_prefixes), and "
                "do not say which segments these are; pass the Batch"
            )
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(
            f"input_ids must be a tensor [rows, width], got inputs {sorted(inputs)}; pass a Batch"
        )
    return inputs, vision


class RowSegments(NamedTuple):
    """The segment of each cell [R, W], -1 where none is, and the row of each segment.

    Of rows that share prefixes segments are the branches of their trees.
    """

    ids_RW: Tensor
    rows: list[int]
    sees: np.ndarray | None = None
    """bool [S, S], whether a segment sees another, or itself; None: only itself."""
    names: list[str] | None = None  # names of the segments of a part in the whole batch

    def name(self, segment: int) -> str:
        """Return the name of a segment for messages."""
        if self.names is not None:
            return self.names[segment]
        row = self.rows[segment]
        number = segment - self.rows.index(row)
        if self.sees is None:
            return f"row {row} segment {number}"
        first = int((self.ids_RW[row] == segment).int().argmax())
        return f"row {row} branch {number} (from cell {first})"

    def seen_by(self, segment: int) -> list[int]:
        """Return the segments that one may see, itself too, in the order of their tokens."""
        return [segment] if self.sees is None else np.flatnonzero(self.sees[segment]).tolist()

    def seeing(self, segment: int) -> list[int]:
        """Return the segments that may see one, itself too."""
        return [segment] if self.sees is None else np.flatnonzero(self.sees[:, segment]).tolist()

    def ends(self) -> list[int]:
        """Return the segments that no other segment sees: the leaves of a tree."""
        return [s for s in range(len(self.rows)) if len(self.seeing(s)) == 1]

    def cells_of(self, segment: int) -> Tensor:
        """Return the cells of the tokens that a segment sees, int64 [T], over all rows."""
        flat = self.ids_RW.flatten()
        return torch.cat([torch.nonzero(flat == s).flatten() for s in self.seen_by(segment)])


def find_segments(inputs: Mapping[str, Any]) -> RowSegments:
    """Find segments by ``cu_seq_lens_q``, else by positions, without cells of 0 in a 2-D mask."""
    ids = inputs["input_ids"]
    cu_seq_lens, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if cu_seq_lens is not None:
        lengths = torch.diff(cu_seq_lens.long())
    elif positions is not None:
        lengths = _lengths_from_positions(positions, len(ids))
    else:
        raise ValueError(
            "neither cu_seq_lens_q nor position_ids is passed, so the segments are unknown; pass "
            "what Batch.model_inputs() returns"
        )
    if int(lengths.sum()) != ids.numel():
        raise ValueError(
            f"the segments cover {int(lengths.sum())} tokens, but input_ids has {ids.numel()} "
            f"cells ({list(ids.shape)}); cu_seq_lens_q must be flat over the rows"
        )
    cells = torch.repeat_interleave(lengths).view(ids.shape).to(ids.device)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        cells = cells.masked_fill(mask == 0, -1)
    # renumbered from 0, without segments that are empty or all padding, which is -1
    found, dense = torch.unique(cells, return_inverse=True)
    dense = dense - int(found[0] < 0)
    row_of = dense.new_zeros(int(dense.max()) + 1)
    rows, columns = torch.nonzero(dense >= 0, as_tuple=True)
    row_of[dense[rows, columns]] = rows
    return RowSegments(dense, row_of.tolist())


def _lengths_from_positions(positions: Tensor, num_rows: int) -> Tensor:
    """Return lengths from positions [R, W], [1, W], [4, R, W] (text first) or [3, R, W]."""
    if positions.ndim == 3 and len(positions) == 3:
        # time, height and width: images repeat and skip positions, only a first token has 0 in all
        is_first = (positions == 0).all(0)
    else:  # as transformers sees it: a segment that counts on from the one before is part of it
        of_text = positions.flatten(0, -2)[:num_rows].expand(num_rows, -1)
        is_first = torch.diff(of_text, dim=1, prepend=of_text[:, :1]) != 1
    is_first[:, 0] = True
    starts = torch.nonzero(is_first.flatten()).flatten()
    return torch.diff(torch.cat([starts, starts.new_full((1,), is_first.numel())]))


@dataclass(frozen=True)
class RowImages:
    """The images of model inputs, in order: U images, or tiles where only tiles are known."""

    layout: VisionLayout
    fields: dict[str, Tensor]  # the fields of the family's processor, with tiles laid flat
    units: ImageUnits
    segments: np.ndarray  # the segment of each, int64 [U]
    last_cells: np.ndarray
    """The cell of the last placeholder of each, counted over all rows, int64 [U]."""

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], layout: VisionLayout, segments: RowSegments
    ) -> RowImages:
        """Read the images of model inputs and check them against the placeholders."""
        fields = {name: inputs[name] for name in layout.family.fields if name in inputs}
        if layout.family.joins_tiles:
            fields = {name: values.flatten(0, 1) for name, values in fields.items()}
        units = layout.units(
            {  # of pixels only their number counts
                name: np.empty(len(values)) if name in PIXEL_FIELDS else values.cpu().numpy()
                for name, values in fields.items()
            }
        )
        is_placeholder = _is_image(inputs["input_ids"], layout).flatten()
        cells = torch.nonzero(is_placeholder).flatten().cpu().numpy()
        ends = np.cumsum(units.tokens)
        for name, values in fields.items():
            per = layout.family.fields[name].per
            expected = int(units.entries(per).sum())
            if per != "example" and len(values) != expected:
                raise ValueError(
                    f"{name} has {len(values)} {per} entries, but the images described are "
                    f"{expected}; pass what Batch.model_inputs() returns"
                )
        if units.tokens.sum() != len(cells):
            raise ValueError(
                f"input_ids has {len(cells)} image placeholders (token {layout.image_token_id}), "
                f"but the images need {units.tokens.sum()}; pass exactly the images of the rows"
            )
        of_cells = segments.ids_RW.flatten().cpu().numpy()[cells]
        first, last = of_cells[ends - units.tokens], of_cells[ends - 1]
        if (first != last).any():
            u = int(np.flatnonzero(first != last)[0])
            raise ValueError(
                f"image {u} has {units.tokens[u]} placeholders, which lie in "
                f"{segments.name(first[u])} and {segments.name(last[u])}; pass images in the order "
                "of their placeholders, row by row"
            )
        return cls(layout, fields, units, last, cells[ends - 1])

    @property
    def what(self) -> str:
        """The word for an entry in messages."""
        return "image" if self.layout.counts_images else "image tile"

    def changed(self, unit: int) -> Tensor:
        """Return a copy of ``pixel_values`` with every number of one image changed by 2."""
        pixels = self.fields["pixel_values"].clone()
        own = pixels[self._range("pixel_values", unit, unit + 1)]
        own.copy_(torch.where(own > 0, own - 2, own + 2))
        return pixels[None] if self.layout.family.joins_tiles else pixels

    def largest(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the segment and the largest absolute value of each entry of ``pixel_values``."""
        values = values.flatten(0, 1) if self.layout.family.joins_tiles else values
        per = self.layout.family.fields["pixel_values"].per
        segments = torch.from_numpy(np.repeat(self.segments, self.units.entries(per)))
        return segments.to(values.device), values.abs().flatten(1).amax(1)

    def _of_segment(self, segment: int) -> dict[str, Tensor]:
        """Return the fields of the images of one segment; none if it has no images."""
        own = np.flatnonzero(self.segments == segment)
        fields: dict[str, Tensor] = {}
        if not len(own):
            return fields
        for name, values in self.fields.items():
            if self.layout.family.fields[name].per == "example":
                fields[name] = values.new_tensor([len(own)])
                continue
            cut = values[self._range(name, int(own[0]), int(own[-1]) + 1)]
            fields[name] = cut[None] if self.layout.family.joins_tiles else cut
        return fields

    def alone(self, segment: int, ids_T: Tensor, given: Tensor | None) -> dict[str, Tensor]:
        """Return images, positions and token types of a segment alone; ``given`` in its row."""
        images = self._of_segment(segment)
        is_placeholder = _is_image(ids_T, self.layout)
        own = torch.arange(len(ids_T), device=ids_T.device)[None]
        if self.layout.has_mrope:
            three = own.expand(3, -1)
            if images:
                grids, length = images["image_grid_thw"], ids_T.new_tensor([len(ids_T)])
                three = mrope_positions(is_placeholder, grids, length, self.layout.merge_size)
            own = torch.cat([own, three])[:, None]
            if images and given is not None and given.shape == own.shape:
                # pads that align a segment continue to count in all four
                is_after = is_placeholder.int().flip(0).cumsum(0).flip(0) == 0
                own = torch.where(is_after & (given == given[:1]).all(0), given, own)
        inputs = {**images, "position_ids": own}
        if types := self.layout.family.token_types:
            inputs[types] = is_placeholder.long()[None]
        return inputs

    def _range(self, name: str, first: int, last: int) -> slice:
        """Return the entries of images ``first`` to ``last`` - 1 in a field."""
        counts = self.units.entries(self.layout.family.fields[name].per)
        return slice(int(counts[:first].sum()), int(counts[:last].sum()))


def _is_image(ids: Tensor, layout: VisionLayout) -> Tensor:
    """Return which ids are placeholders of images: bool."""
    token = layout.image_token_id
    return torch.zeros_like(ids, dtype=torch.bool) if token is None else torch.eq(ids, token)


def read_part(
    model: nn.Module, batch: Batch | Mapping[str, Any], vision: VisionLayout | None
) -> PackedInputs:
    """Return the inputs of two rows, with two or three short segments each, that show the same.

    Two, since attention may separate the segments of one row, and not those of more. Rows with
    images or shared prefixes, padded rows, and those of models for which every length counts are
    chosen, and not cut. Inputs that are not as the kit makes them are whole.
    """
    packed = read_inputs(model, batch, vision)
    inputs, segments, images, _ = packed
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
    names = [
        segments.name(s) for row in rows for s, other in enumerate(segments.rows) if other == row
    ]
    return found._replace(segments=found.segments._replace(names=names))


def _counts_from_0(packed: PackedInputs) -> bool:
    """Return whether positions [R, W] begin at 0 in every segment, as alone."""
    ids, positions = packed.segments.ids_RW, packed.inputs.get("position_ids")
    if positions is None or positions.shape != ids.shape or packed.segments.sees is not None:
        return True
    cells, real = torch.arange(ids.numel(), device=ids.device).view(ids.shape), ids >= 0
    firsts = cells.new_full((len(packed.segments.rows),), ids.numel())
    firsts.scatter_reduce_(0, ids[real], cells[real], "amin")
    first = 0 if packed.kind is None else packed.kind.first_position
    return torch.equal(positions[real], cells[real] - firsts[ids[real]] + first)


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
    inputs, segments, _, kind = packed
    flat, number = segments.ids_RW.flatten(), 3 if length <= 4 * _LENGTH else 2
    found: list[dict[int, Tensor]] = []
    for row in rows:
        own = {
            s: (flat == s).nonzero()[:, 0] for s, other in enumerate(segments.rows) if other == row
        }
        longest = max(own, key=lambda s: len(own[s]))
        others = [s for s in own if s != longest][: number - 1]
        kept = {s: own[s][:_LENGTH] for s in others}
        rest = max(length, 3 * _LENGTH - sum(map(len, kept.values())))
        found.append(dict(sorted((kept | {longest: own[longest][:rest]}).items())))
    width = min(sum(map(len, cells.values())) for cells in found)
    for cells in found:
        while sum(map(len, cells.values())) > width:
            longest = max(cells, key=lambda s: len(cells[s]))
            cells[longest] = cells[longest][:-1]
    lengths = [len(cells) for row_cells in found for cells in row_cells.values()]
    cells_RW = torch.stack([torch.cat([*cells.values()]) for cells in found])
    numbers = torch.arange(len(lengths), device=flat.device)
    part = RowSegments(
        numbers.repeat_interleave(torch.tensor(lengths, device=flat.device)).view(cells_RW.shape),
        [row for row, cells in enumerate(found) for _ in cells],
        names=[segments.name(s) for cells in found for s in cells],
    )
    cut = {name: _value(name, value, lengths, cells_RW, segments) for name, value in inputs.items()}
    return PackedInputs(cut, part, None, kind)


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
