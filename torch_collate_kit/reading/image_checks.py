"""What a vision processor returned for one example: shapes, and fields that must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.arrays import as_array, checked_arrays
from torch_collate_kit.vision.families import PIXEL_FIELDS, ImageField
from torch_collate_kit.vision.layout import ImageUnits, VisionLayout

__all__ = ["arrays_of", "checked_images"]

_SHAPES = {
    ("patch", 2): "floats [patches, patch size]",
    ("tile", 4): "floats [tiles, 3, height, width]",
    ("tile", 3): "a mask [tiles, height, width]",
    ("image", 4): "floats [images, 3, height, width]",
    ("image", 2): "integers [images, 3], or of sizes [images, 2]",
    ("example", 1): "integers [1], how many images the example has",
}


def arrays_of(name: str, entries: Mapping[int, Any], field: ImageField) -> dict[int, np.ndarray]:
    if field.per != "unknown":
        shape = _SHAPES[field.per, field.num_dims]
        is_tiled = field.per == "tile"
        return checked_arrays(name, entries, field.num_dims, field.kinds, shape, or_padded=is_tiled)
    what = "an array of what the processor returned"
    arrays = {i: as_array(name, i, entry, what) for i, entry in entries.items()}
    first = next(iter(arrays), 0)
    for i, array in arrays.items():
        if array.shape[1:] != arrays[first].shape[1:] or not array.ndim:
            raise DataError(
                f"example {i}: {name} has shape {array.shape}, example {first} has "
                f"{arrays[first].shape}, and the processor's family is not in the table, which "
                "would tell what its dimensions count and which of their entries are padding; "
                "declare a VisionLayout of a family in docs/vision.md, or use images of one size"
            )
    return arrays


def checked_images(
    index: int, fields: dict[str, np.ndarray], layout: VisionLayout
) -> tuple[dict[str, np.ndarray], ImageUnits]:
    """The fields of one example with tiles laid flat, and its images.

    Raises:
        DataError: fields that disagree with each other, or are not of this model.
    """
    grid = fields.get("image_grid_thw")
    if grid is not None:
        _check_grid(index, grid, layout)
        _check_patch_size(index, fields["pixel_values"], layout)
    sizes = fields.get("image_sizes")
    if sizes is not None and (sizes.shape[1] != 2 or (sizes < 1).any()):
        raise DataError(
            f"example {index}: image_sizes is {sizes.tolist()!r:.60}; give height and width of "
            "each image, as the processor returned them"
        )
    units = None if sizes is None else layout.units(fields)
    if layout.other_fields:
        return fields, layout.units(fields)
    _check_shapes(index, fields, units)
    fields = _laid_flat(fields, units)
    units = layout.units(fields) if units is None else units
    for name, array in fields.items():
        what = layout.fields[name].per
        expected = int(units.entries(what).sum())
        if what == "example":
            if array.tolist() != [len(units.tokens)]:
                raise DataError(
                    f"example {index}: {name} is {array.tolist()}, but the example has "
                    f"{len(units.tokens)} images; give what the processor returned for it alone"
                )
        elif len(array) != expected:
            described = "the sizes of its images describe"
            if grid is not None:
                described = f"image_grid_thw of shape {grid.shape} describes"
            raise DataError(
                f"example {index}: {name} has {len(array)} {what}{'e' * (what == 'patch')}s"
                f", {described} {expected}; give what the processor returned"
            )
    return fields, units


def _check_shapes(index: int, fields: dict[str, np.ndarray], units: ImageUnits | None) -> None:
    """That what is padded to the same number of tiles can be laid flat."""
    pixels, mask = fields["pixel_values"], fields.get("pixel_attention_mask")
    if mask is not None and mask.shape != (*pixels.shape[:-3], *pixels.shape[-2:]):
        raise DataError(
            f"example {index}: pixel_attention_mask has shape {mask.shape}, pixel_values has "
            f"{pixels.shape}; give what the processor returned"
        )
    if units is not None and pixels.ndim == 5 and len(pixels) != len(units.tiles):
        raise DataError(
            f"example {index}: pixel_values has {len(pixels)} images, image_sizes has "
            f"{len(units.tiles)}; give what the processor returned"
        )


def _check_grid(index: int, grid: np.ndarray, layout: VisionLayout) -> None:
    if (grid < 1).any():
        raise DataError(
            f"example {index}: image_grid_thw has the size {grid.min()}, and sizes are 1 or more; "
            "give what the processor returned"
        )
    if grid.shape[1] != 3:
        raise DataError(
            f"example {index}: image_grid_thw has shape {grid.shape}; give [images, 3], as the "
            "processor returned it"
        )
    if (grid[:, 1:] % layout.merge_size).any():
        raise DataError(
            f"example {index}: image_grid_thw has {grid.tolist()!r:.60}, whose height or width is "
            f"no multiple of merge_size={layout.merge_size}; use the processor of the model"
        )


def _check_patch_size(index: int, pixels: np.ndarray, layout: VisionLayout) -> None:
    channels, num_frames, size = layout.patch_shape
    if num_frames > 1 and pixels.shape[1] != channels * num_frames * size:
        raise DataError(
            f"example {index}: pixel_values has patches of {pixels.shape[1]} numbers, the model's "
            f"have {channels * num_frames * size}; use the processor of the model"
        )


def _laid_flat(fields: dict[str, np.ndarray], units: ImageUnits | None) -> dict[str, np.ndarray]:
    """Without the padding of images to the same number of tiles."""
    pixels, mask = fields["pixel_values"], fields.get("pixel_attention_mask")
    if pixels.ndim == 5:
        rows, columns = pixels.shape[:2]
        is_real: Any = np.ones((rows, columns), dtype=bool)
        if units is not None:  # LLaVA
            is_real = np.arange(columns) < units.tiles[:rows, None]
        elif mask is not None:
            is_real = mask.reshape(rows, columns, -1).any(axis=2)
        fields = {
            name: _real(array, is_real) if name in PIXEL_FIELDS else array
            for name, array in fields.items()
        }
    return fields


def _real(array: np.ndarray, is_real: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:]) if is_real.all() else array[is_real]
