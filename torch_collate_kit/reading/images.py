"""Images and routes of examples: arrays checked, where a cut may be, fields of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit.batch.fields import PerImage
from torch_collate_kit.batch.storage import fresh_bytes
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Pieces
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.columns import Numbers, tensor_to_numpy
from torch_collate_kit.reading.entries import as_tensor, joined
from torch_collate_kit.reading.keys import MEDIA, VIDEOS
from torch_collate_kit.reading.source import is_sequence
from torch_collate_kit.vision.families import PIXEL_FIELDS, ImageField, num_kept
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
    """Return the expert routes of the first tokens of rollouts: uint8, or int16, -1 at holes."""
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
        is_hole = (flat == -1).all(axis=(1, 2), keepdims=True)
        bad = np.argwhere(((flat < 0) & ~is_hole) | (flat > _MOST_EXPERTS))
        if len(bad):
            i = int(np.searchsorted(np.cumsum(counts), bad[0, 0], side="right"))
            token, expert = int(bad[0, 0] - counts[:i].sum()), int(flat[tuple(bad[0])])
            found = f"has the expert {expert}; experts are 0 to {_MOST_EXPERTS}"
            if expert == -1:
                found = (
                    f"is -1 in some layers or places of token {token}; give -1 in all of them to a "
                    "token without a route"
                )
            raise DataError(f"example {i}: {name} {found}")
    few = not flat.size or 0 <= flat.min() <= flat.max() < 256
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
        own = {name: found[i] for name, found in arrays.items() if i in found}
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
                f"example {i} has {name}, which is not an image field of {layout.family_name} "
                f"models ({', '.join(fields) or 'none is known'}); {hint}"
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
            f"example {index}: {name} is a list whose parts differ in shape or are not numbers; "
            f"give {shape}"
        ) from None


_PATCHES_IN_CACHE = 128  # 0.8 MB of float32; fewer at a time take longer (measured)


@dataclass(frozen=True)
class Images:
    """Images of the examples of a batch. Legend: N examples, U images (or tiles) of one."""

    layout: VisionLayout
    input_ids: Numbers
    units: dict[int, ImageUnits]  # images per example, by the number of each example that has some
    arrays: dict[str, dict[int, np.ndarray]]  # arrays by field and example, tiles laid flat

    def with_smallest(self, input_ids: Numbers) -> Images:
        """Return the images with one more example, the smallest image, as in ``input_ids``."""
        fields, i = self.layout.smallest(), len(self.input_ids)
        arrays = {name: {**found, i: fields[name]} for name, found in self.arrays.items()}
        units = {**self.units, i: self.layout.units(fields)}
        return Images(self.layout, input_ids, units, arrays)

    @property
    def patches(self) -> list[list[int]]:
        """[N] lists: the patches of each image; tiles where images are cut up."""
        patches: list[list[int]] = [[] for _ in range(len(self.input_ids))]
        for i, unit in self.units.items():
            patches[i] = unit.patches.tolist()
        return patches

    def _ends(self, example: int) -> np.ndarray:
        """Return the token after the last placeholder of each image of an example: int64 [U]."""
        return self._places(example)[np.cumsum(self.units[example].tokens) - 1] + 1

    def _places(self, example: int) -> np.ndarray:
        """Return the tokens of an example that are placeholders: int64."""
        return np.flatnonzero(self.input_ids[example] == self.layout.image_token_id)

    def cut_before(self, example: int, limit: int) -> int:
        """Return the most tokens of an example, up to ``limit``, that end inside no image."""
        places, unit = self._places(example), self.units.get(example)
        if unit is None or not len(places) or places[-1] < limit:
            return limit
        ends = self._ends(example) if self.layout.counts_images else places[-1:] + 1
        firsts = places[np.append(0, np.cumsum(unit.tokens)[:-1])] if len(ends) > 1 else places[:1]
        kept = int(np.count_nonzero(ends <= limit))
        kept = num_kept(self.arrays, kept, of=len(unit.tokens))
        return min(limit, int(firsts[kept]))

    def cuts(self, max_tokens: int, max_patches: int | None) -> tuple[np.ndarray, list[list[int]]]:
        """Return the longest beginnings that fit a row without cutting an image."""
        lengths, patches = self.input_ids.lengths.copy(), self.patches
        for i, unit in self.units.items():
            limit = int(lengths[i])
            most = np.inf if max_patches is None else max_patches
            fit = int(np.count_nonzero(np.cumsum(unit.patches) <= most))
            if fit < len(unit.patches):
                fit = fit if self.layout.counts_images else 0
                fit = num_kept(self.arrays, fit, of=len(unit.tokens))
                limit = int(self._places(i)[int(unit.tokens[:fit].sum())])
            lengths[i] = self.cut_before(i, min(limit, max_tokens))
            whole = int(np.count_nonzero(self._ends(i) <= lengths[i]))
            patches[i] = unit.patches[:whole].tolist()
        return lengths, patches

    def kept(self, pieces: Pieces) -> np.ndarray:
        """int64 [S], how many images each piece has: the first ones of its example."""
        lengths = self.input_ids.lengths
        counts = np.zeros_like(lengths)
        for i, unit in self.units.items():
            counts[i] = len(unit.tokens)
        kept: np.ndarray = counts[pieces.examples]
        is_cut = (pieces.lengths != lengths[pieces.examples]) & (kept > 0)
        for piece in np.flatnonzero(is_cut).tolist():
            i, start = int(pieces.examples[piece]), int(pieces.starts[piece])
            stop = start + int(pieces.lengths[piece])
            if start or self.cut_before(i, stop) != stop:
                raise DataError(
                    f"example {i}: a piece of it, tokens {start} to {stop}, cuts through its "
                    'images; pass overflow="drop" or "truncate"'
                )
            kept[piece] = np.count_nonzero(self._ends(i) <= stop)
        return kept

    def _spec(self, name: str) -> PerImage:
        layout, field = self.layout, self.layout.fields[name]
        if name == "pixel_values":
            has_frames = field.per == "patch" and layout.patch_shape[1] > 1
            dtype = getattr(torch, layout.pixel_dtype)
            return PerImage(dtype, layout.patch_shape if has_frames else None)
        first = next(iter(self.arrays[name].values()), None) if field.per == "unknown" else None
        is_float = first is not None and first.dtype.kind == "f"
        return PerImage(torch.float32 if is_float else torch.int64)

    def place(self, pieces: Pieces) -> dict[str, tuple[PerImage, Tensor, Pieces]]:
        """Return by field the entries of the pieces, a copy in one pass; and which they are."""
        kept, placed = self.kept(pieces), {}
        for name in self.arrays:
            parts = self._parts(name, pieces, kept)
            lengths = np.zeros_like(kept)
            lengths[list(parts)] = [len(array) for _, array in parts.values()]
            entries = pieces._replace(starts=np.zeros_like(kept), lengths=lengths)
            placed[name] = (self._spec(name), self._column(name, list(parts.values())), entries)
        return placed

    def _parts(
        self, name: str, pieces: Pieces, kept: np.ndarray
    ) -> dict[int, tuple[int, np.ndarray]]:
        """Return the example of each piece that has a field, and its part of the array."""
        per, parts = self.layout.fields[name].per, {}
        for piece in np.flatnonzero(kept).tolist():
            i, number = int(pieces.examples[piece]), int(kept[piece])
            if (array := self.arrays[name].get(i)) is None:
                continue
            if per == "example":  # how many images are kept, not how many there were
                array = kept[piece : piece + 1]
            elif per != "unknown":
                array = array[: int(self.units[i].entries(per)[:number].sum())]
            parts[piece] = i, array
        return parts

    def _column(self, name: str, parts: Sequence[tuple[int, np.ndarray]]) -> Tensor:
        """Return parts of examples, one after the other."""
        spec, field = self._spec(name), self.layout.fields[name]
        shape = parts[0][1].shape[1:] if parts else _shape_of_none(name, field, self.layout)
        dtype = torch.bool if field.per == "tile" and field.num_dims == 3 else spec.dtype
        frames = spec.patch_shape
        if frames is not None:  # of a still image one of the equal frames is kept
            shape = (frames[0] * frames[2],)
        shape = (sum(len(part) for _, part in parts), *shape)
        column = torch.empty(shape, dtype=dtype)
        if column.nbytes:
            column = torch.from_numpy(fresh_bytes(column.nbytes)).view(dtype).view(shape)
        end = 0
        for example, array in parts:
            part = column[end : end + len(array)]
            end += len(array)
            if frames is None:
                part.copy_(as_tensor(array))
            else:
                _write_first_frames(example, array.reshape(-1, *frames), part)
        return column


def _write_first_frames(example: int, patches: np.ndarray, column: Tensor) -> None:
    """Write the first of the equal frames of patches ``[P, channels, frames, size]``."""
    channels, _, size = patches.shape[1:]
    column = column.view(-1, channels, size)
    for start in range(0, len(patches), _PATCHES_IN_CACHE):
        block = patches[start : start + _PATCHES_IN_CACHE]
        first = block[:, :, 0]
        column[start : start + len(block)].copy_(as_tensor(first))
        if not (block[:, :, 1:] == first[:, :, None]).all():
            raise DataError(
                f"example {example}: the frames of a patch of pixel_values differ, so it is no "
                "still image (or holds NaN); videos are not supported, give images"
            )


def _shape_of_none(name: str, field: ImageField, layout: VisionLayout) -> tuple[int, ...]:
    """Return the shape of one entry, where no example has an image."""
    size = layout.tile_size
    if name == "pixel_values":
        return (layout.patch_shape[0],) if field.per == "patch" else (3, size, size)
    if field.per in ("tile", "unknown"):
        return (size, size) if field.per == "tile" else (0,)
    return {"image_grid_thw": (3,), "image_sizes": (2,), "batch_num_images": ()}[name]
