"""Which images belong to which segment of model inputs, and a change of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.attention.row_segments import RowSegments
from torch_collate_kit.batch.dense import mrope_positions
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import PIXEL_FIELDS
from torch_collate_kit.vision.layout import ImageUnits

__all__ = ["RowImages", "is_image"]


@dataclass(frozen=True)
class RowImages:
    """The images of model inputs, in order. U images, or tiles where images cannot be told apart.

    ``fields`` are those of the family's processor, with tiles laid flat.
    """

    layout: VisionLayout
    fields: dict[str, Tensor]
    units: ImageUnits
    segments: np.ndarray
    """int64 [U], the segment of each."""
    last_cells: np.ndarray
    """int64 [U], the cell of its last placeholder, counted over all rows."""

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], layout: VisionLayout, segments: RowSegments
    ) -> RowImages:
        """The images of model inputs; there may be none.

        Raises:
            ValueError: images that do not fit the placeholders in ``input_ids``.
        """
        fields = {name: inputs[name] for name in layout.family.fields if name in inputs}
        if layout.family.joins_tiles:
            fields = {name: values.flatten(0, 1) for name, values in fields.items()}
        units = _units(layout, fields)
        is_placeholder = is_image(inputs["input_ids"], layout).flatten()
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
                f"but the images passed take {units.tokens.sum()}; pass all images of the rows, "
                "and no others"
            )
        of_cells = segments.ids_RW.flatten().cpu().numpy()[cells]
        first, last = of_cells[ends - units.tokens], of_cells[ends - 1]
        if (first != last).any():
            u = int(np.flatnonzero(first != last)[0])
            raise ValueError(
                f"image {u} takes {units.tokens[u]} placeholders, which lie in "
                f"{segments.name(first[u])} and {segments.name(last[u])}; images must be in the "
                "order of their placeholders, row by row"
            )
        return cls(layout, fields, units, last, cells[ends - 1])

    @property
    def what(self) -> str:
        return "image" if self.layout.counts_images else "image tile"

    def changed(self, unit: int) -> Tensor:
        """``pixel_values`` in which every number of one image has changed by 2: a copy."""
        pixels = self.fields["pixel_values"].clone()
        own = pixels[self._range("pixel_values", unit, unit + 1)]
        own.copy_(torch.where(own > 0, own - 2, own + 2))
        return pixels[None] if self.layout.family.joins_tiles else pixels

    def of_segment(self, segment: int) -> dict[str, Tensor]:
        """The fields of the images of one segment; none if it has no images."""
        own = np.flatnonzero(self.segments == segment)
        if not len(own):
            return {}
        fields = {}
        for name, values in self.fields.items():
            if self.layout.family.fields[name].per == "example":
                fields[name] = values.new_tensor([len(own)])
                continue
            cut = values[self._range(name, int(own[0]), int(own[-1]) + 1)]
            fields[name] = cut[None] if self.layout.family.joins_tiles else cut
        return fields

    def token_inputs(self, ids_T: Tensor, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Positions of one example as a batch of one, and the types of its tokens.

        ``images`` are its fields, as :meth:`of_segment` returns them.
        """
        is_placeholder = is_image(ids_T, self.layout)
        positions = torch.arange(len(ids_T), device=ids_T.device)[None]
        inputs = {"position_ids": positions}
        if self.layout.has_mrope:
            three = positions.expand(3, -1)
            if images:
                grids, length = images["image_grid_thw"], ids_T.new_tensor([len(ids_T)])
                three = mrope_positions(is_placeholder, grids, length, self.layout.merge_size)
            inputs["position_ids"] = torch.cat([positions, three])[:, None]
        if types := self.layout.family.token_types:
            inputs[types] = is_placeholder.long()[None]
        return inputs

    def _range(self, name: str, first: int, last: int) -> slice:
        """The entries of images ``first`` to ``last`` - 1 in a field."""
        counts = self.units.entries(self.layout.family.fields[name].per)
        return slice(int(counts[:first].sum()), int(counts[:last].sum()))


def is_image(ids: Tensor, layout: VisionLayout) -> Tensor:
    """Where ids are placeholders of images, bool."""
    token = layout.image_token_id
    return torch.zeros_like(ids, dtype=torch.bool) if token is None else torch.eq(ids, token)


def _units(layout: VisionLayout, fields: Mapping[str, Tensor]) -> ImageUnits:
    known = {  # of pixels only their number counts
        name: np.empty(len(values)) if name in PIXEL_FIELDS else values.cpu().numpy()
        for name, values in fields.items()
    }
    if "batch_num_images" not in known:
        return layout.units(known)
    counts = known["batch_num_images"]  # several images of an example are not cut into tiles
    sizes = np.split(known["image_sizes"], np.cumsum(counts)[:-1])
    parts = [
        layout.units({"image_sizes": of_example, "batch_num_images": count[None]})
        for of_example, count in zip(sizes, counts, strict=True)
    ]
    return ImageUnits(*(np.concatenate(of) for of in zip(*parts, strict=True)))
