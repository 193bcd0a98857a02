"""Entries that are arrays of several dimensions, checked: expert routes, and what images are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.columns import Numbers, tensor_to_numpy
from torch_collate_kit.reading.entries import joined
from torch_collate_kit.reading.images import Images
from torch_collate_kit.reading.keys import MEDIA, VIDEOS
from torch_collate_kit.reading.source import is_sequence
from torch_collate_kit.vision.families import PIXEL_FIELDS, ImageField
from torch_collate_kit.vision.layout import ImageUnits, VisionLayout, is_no_image

_OPTIONAL = ("pixel_attention_mask",)  # without it a tile is seen as a whole
_MOST_EXPERTS = np.iinfo(np.int16).max
_SHAPES = {
    ("patch", 2): "floats [patches, patch size]",
    ("tile", 4): "floats [tiles, 3, height, width]",
    ("tile", 3): "a mask [tiles, height, width]",
    ("image", 4): "floats [images, 3, height, width]",
    ("image", 2): "integers [images, 3], or of sizes [images, 2]",
    ("example", 1): "integers [1], how many images the example has",
}


def route_column(column: Any, lengths: np.ndarray) -> Ragged:
    """Return the expert routes of the first tokens of rollouts: uint8 or int16."""
    name = "rollout_expert_indices"
    shape = "integers [tokens, layers, top_k], an array [0, layers, top_k] where there are none"
    arrays = list(_arrays(name, dict(enumerate(column)), 3, "iu", shape).values())
    if not all(arrays[0].shape[1:]):
        raise DataError(
            f"example 0: {name} has shape {arrays[0].shape}, so no layers or no experts; leave "
            "it out of every example"
        )
    counts = np.array([len(array) for array in arrays], dtype=np.int64)
    too_many = np.flatnonzero(counts > lengths)
    if len(too_many):
        i = int(too_many[0])
        raise DataError(
            f"example {i}: {name} has {counts[i]} tokens, the rollout has {lengths[i]}; give "
            "routes for all of them, or for the first ones"
        )
    flat = np.concatenate(arrays)
    if flat.size and not (flat.min() >= 0 and flat.max() <= _MOST_EXPERTS):
        bad = np.argwhere((flat < 0) | (flat > _MOST_EXPERTS))[0]
        i = int(np.searchsorted(np.cumsum(counts), bad[0], side="right"))
        raise DataError(
            f"example {i}: {name} has the expert {int(flat[tuple(bad)])}; experts are 0 to "
            f"{_MOST_EXPERTS}"
        )
    few = not flat.size or flat.max() < 256
    return Ragged.from_lengths(flat.astype(np.uint8 if few else np.int16), counts)


def read_images(raw: Mapping[str, Any], layout: VisionLayout, input_ids: Numbers) -> Images:
    """Return the images of examples, of which None, or no entry, stands for no image."""
    fields = layout.fields
    _refuse_other_media(raw, layout)
    given = {
        name: {i: entry for i, entry in enumerate(raw.get(name, ())) if not is_no_image(entry)}
        for name in fields
    }
    needed = () if layout.other_fields else [name for name in fields if name not in _OPTIONAL]
    owners = sorted({i for entries in given.values() for i in entries})
    for i in owners:
        if missing := [name for name in needed if i not in given[name]]:
            raise DataError(
                f"example {i} has {', '.join(name for name in fields if i in given[name])} and no "
                f"{', '.join(missing)}; give all that the processor returned, or none of them "
                "without an image"
            )
    arrays = {name: _image_arrays(name, given[name], field) for name, field in fields.items()}
    units: dict[int, ImageUnits] = {}
    for i in owners:
        own = {name: of[i] for name, of in arrays.items() if i in of}
        if not layout.other_fields:  # of which nothing is known
            own = _laid_flat(i, own, layout)
        units[i] = layout.units(own)
        for name, array in own.items():
            arrays[name][i] = array
            if not layout.other_fields:
                _check_number(i, name, array, layout.fields[name].per, units[i], own)
    images = Images(layout, input_ids, units, arrays)
    _check_placeholders(images)
    return images


def _refuse_other_media(raw: Mapping[str, Any], layout: VisionLayout) -> None:
    """Refuse image and video fields that the model does not have: they would be lost."""
    fields = layout.fields
    for name in (name for name in MEDIA if name in raw and name not in fields):
        i = next((i for i, entry in enumerate(raw[name]) if entry is not None), None)
        if i is not None:
            hint = (
                "videos are not supported, give images"
                if name in VIDEOS
                else "use the processor of the model"
            )
            raise DataError(
                f"example {i} has {name}, which is no image field of {layout.family_name} models "
                f"({', '.join(fields) or 'none is known'}); {hint}"
            )


def _image_arrays(
    name: str, entries: Mapping[int, Any], field: ImageField
) -> dict[int, np.ndarray]:
    """Return an image field as arrays by example, of any dimensions if the family is unknown."""
    if field.per != "unknown":
        shape = _SHAPES[field.per, field.num_dims]
        is_tiled = field.per == "tile"
        return _arrays(name, entries, field.num_dims, field.kinds, shape, or_padded=is_tiled)
    what = "an array of what the processor returned"
    arrays = {i: _as_array(name, i, entry, what) for i, entry in entries.items()}
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


def _laid_flat(i: int, own: dict[str, np.ndarray], layout: VisionLayout) -> dict[str, np.ndarray]:
    """Return the fields of an example, checked, without padding to the same number of tiles."""
    pixels, sizes = own["pixel_values"], own.get("image_sizes")
    if "image_grid_thw" in own:
        _check_grid(i, own["image_grid_thw"], pixels, layout)
    if sizes is not None and (sizes.shape[1] != 2 or (sizes < 1).any()):
        raise DataError(
            f"example {i}: image_sizes is {sizes.tolist()!r:.60}; give height and width of each "
            "image, as the processor returned them"
        )
    mask_shape = (*pixels.shape[:-3], *pixels.shape[-2:])
    mask = own.get("pixel_attention_mask")
    if mask is None and "pixel_attention_mask" in layout.fields:
        mask = own["pixel_attention_mask"] = np.ones(mask_shape, dtype=bool)
    if mask is not None and mask.shape != mask_shape:
        raise _unlike(
            i, f"pixel_attention_mask has shape {mask.shape}, pixel_values has {pixels.shape}"
        )
    if pixels.ndim != 5:
        return own
    rows, columns = pixels.shape[:2]
    is_real: Any = np.ones((rows, columns), dtype=bool)
    if sizes is not None:  # LLaVA
        tiles = layout.units(own).tiles
        if rows != len(tiles):
            raise _unlike(i, f"pixel_values has {rows} images, image_sizes has {len(tiles)}")
        is_real = np.arange(columns) < tiles[:, None]
    elif mask is not None:
        is_real = mask.reshape(rows, columns, -1).any(axis=2)
    for name in own.keys() & {*PIXEL_FIELDS}:
        array = own[name]
        whole = array.reshape(-1, *array.shape[2:])
        own[name] = whole if is_real.all() else whole[is_real.ravel()]
    return own


def _check_grid(i: int, grid: np.ndarray, pixels: np.ndarray, layout: VisionLayout) -> None:
    if (grid < 1).any():
        raise _unlike(i, f"image_grid_thw has the size {grid.min()}, and sizes are 1 or more")
    if grid.shape[1] != 3:
        raise _unlike(i, f"image_grid_thw has shape {grid.shape}, not [images, 3]")
    way_out = "use the processor of the model"
    if (grid[:, 1:] % layout.merge_size).any():
        raise DataError(
            f"example {i}: image_grid_thw has {grid.tolist()!r:.60}, whose height or width is "
            f"no multiple of merge_size={layout.merge_size}; {way_out}"
        )
    channels, num_frames, size = layout.patch_shape
    if num_frames > 1 and pixels.shape[1] != channels * num_frames * size:
        raise DataError(
            f"example {i}: pixel_values has patches of {pixels.shape[1]} numbers, the model's "
            f"have {channels * num_frames * size}; {way_out}"
        )


def _check_number(
    i: int, name: str, array: np.ndarray, per: str, units: ImageUnits, own: Mapping[str, np.ndarray]
) -> None:
    """Check that a field has an entry for each patch, tile or image of the example."""
    if per == "example":
        if array.tolist() != [len(units.tokens)]:
            raise DataError(
                f"example {i}: {name} is {array.tolist()}, but the example has "
                f"{len(units.tokens)} images; give what the processor returned for it alone"
            )
    elif len(array) != (expected := int(units.entries(per).sum())):
        by = "the sizes of its images describe"
        if "image_grid_thw" in own:
            by = f"image_grid_thw of shape {own['image_grid_thw'].shape} describes"
        plural = "es" if per == "patch" else "s"
        raise _unlike(i, f"{name} has {len(array)} {per}{plural}, {by} {expected}")


def _unlike(i: int, found: str) -> DataError:
    """Return the error for fields that do not fit each other."""
    return DataError(f"example {i}: {found}; give what the processor returned")


def _check_placeholders(images: Images) -> None:
    token, ids = images.layout.image_token_id, joined(images.input_ids)
    if token is None:
        return
    is_placeholder = ids.values == token
    before = np.append(0, np.cumsum(is_placeholder))
    found = np.diff(before[ids.offsets])
    described = np.zeros_like(found)
    for i, unit in images.units.items():
        described[i] = unit.tokens.sum()
    if images.layout.other_fields:  # how many an image takes is not known
        found = np.minimum(found, 1)
    wrong = np.flatnonzero(found != described)
    if len(wrong):
        i = int(wrong[0])
        what = f"images that take {described[i]}" if i in images.units else "no image"
        hint = ""
        if images.layout.other_fields:  # whose processors may name another token than the ids have
            hint = ", and the model's config: vision=VisionLayout.of(processor, model.config)"
        raise DataError(
            f"example {i} has {found[i]} image placeholders (token {token}) in its ids, and {what};"
            f" give the ids and the image fields that the processor returned together, uncut{hint}"
        )


def _arrays(
    name: str,
    entries: Mapping[int, Any],
    num_dims: int,
    kinds: str,
    shape: str,
    *,
    or_padded: bool = False,
) -> dict[int, np.ndarray]:
    """Return entries by example as arrays of that many dimensions and one of these kinds."""
    arrays: dict[int, np.ndarray] = {}
    for i, entry in entries.items():
        array = _as_array(name, i, entry, shape)
        if array.ndim not in (num_dims, num_dims + or_padded) or array.dtype.kind not in kinds:
            raise DataError(
                f"example {i}: {name} has shape {array.shape} and dtype {array.dtype}; give {shape}"
            )
        arrays[i] = array
        first, other = next(iter(arrays.items()))
        skipped = 1 - num_dims  # but for a dimension of padding
        if array.shape[array.ndim + skipped :] != other.shape[other.ndim + skipped :]:
            raise DataError(
                f"example {i}: {name} has shape {array.shape}, example {first} has {other.shape}; "
                "only the first dimension may differ"
            )
    return arrays


def _as_array(name: str, index: int, entry: Any, shape: str) -> np.ndarray:
    parts = list(entry) if is_sequence(entry) else [entry]
    for j, part in enumerate(parts):
        if isinstance(part, Tensor):
            parts[j] = tensor_to_numpy(name, index, part)
        elif isinstance(part, MaskedArray):
            raise DataError(
                f"example {index}: {name} is a masked array, whose mask would be lost; give "
                ".filled(value)"
            )
    if isinstance(entry, np.ndarray | Tensor):
        return parts[0]
    if not is_sequence(entry):
        kind = "None" if entry is None else type(entry).__name__
        raise DataError(f"example {index}: {name} is {kind}; give {shape}")
    try:
        return np.asarray(parts)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"example {index}: {name} is a list whose parts differ in shape or are no numbers; "
            f"give {shape}"
        ) from None
