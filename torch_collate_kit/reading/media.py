"""The images of examples: what a vision processor returned, checked, as columns per image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.buffer import fresh_bytes
from torch_collate_kit.batch.fields import PerImage, PerToken
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.arrays import checked_arrays
from torch_collate_kit.reading.numbers import Numbers
from torch_collate_kit.reading.spans import joined
from torch_collate_kit.vision.families import FAMILIES, ImageField
from torch_collate_kit.vision.layout import ImageUnits, VisionLayout

__all__ = [
    "IMAGES",
    "MEDIA",
    "TOKEN_TYPES",
    "ImageColumn",
    "Images",
    "read_images",
    "token_type_fields",
]

IMAGES = ("pixel_values", "image_grid_thw")
_VIDEOS = ("pixel_values_videos", "video_grid_thw")
MEDIA = tuple(dict.fromkeys([*(n for family in FAMILIES for n in family.fields), *_VIDEOS]))
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # follow from the ids
_TILED = ("pixel_values", "pixel_attention_mask")
_OPTIONAL = ("pixel_attention_mask",)  # without it a tile is seen as a whole
_SHAPES = {
    ("patch", 2): "floats [patches, patch size]",
    ("tile", 4): "floats [tiles, 3, height, width]",
    ("tile", 3): "a mask [tiles, height, width]",
    ("image", 4): "floats [images, 3, height, width]",
    ("image", 2): "integers [images, 3], or of sizes [images, 2]",
    ("example", 1): "one integer per example, the number of its images",
}


@dataclass(frozen=True)
class Images:
    """The images of the examples of a batch. Legend: N examples, U images (or tiles) of one."""

    layout: VisionLayout
    units: list[ImageUnits | None]
    """[N], None for an example without images."""
    arrays: dict[str, list[np.ndarray | None]]
    """[N] per field, tiles laid flat."""
    input_ids: Numbers

    @classmethod
    def of_none(cls, layout: VisionLayout) -> Images:
        """Of a batch without examples."""
        nothing = Ragged(np.zeros(0, dtype=np.int64), [0])
        return cls(layout, [], {name: [] for name in layout.family.fields}, nothing)

    def __len__(self) -> int:
        return sum(unit is not None for unit in self.units)

    @property
    def patches(self) -> list[list[int]]:
        """[N] lists: the patches of each image; tiles where images are cut up."""
        return [[] if unit is None else unit.patches.tolist() for unit in self.units]

    def ends(self, example: int) -> np.ndarray:
        """int64 [U], the token after the last placeholder of each image of an example."""
        unit = self.units[example]
        assert unit is not None
        return self._places(example)[np.cumsum(unit.tokens) - 1] + 1

    def _places(self, example: int) -> np.ndarray:
        """int64, the tokens of an example that are placeholders."""
        ids = self.input_ids
        row = ids[example] if isinstance(ids, Ragged) else ids.arrays[example]
        return np.flatnonzero(row == self.layout.image_token_id)

    def cut_before(self, example: int, limit: int) -> int:
        """The most tokens of an example, up to ``limit``, that end inside no image."""
        places, unit = self._places(example), self.units[example]
        if unit is None or not len(places) or places[-1] < limit:
            return limit
        ends = self.ends(example) if self.layout.counts_images else places[-1:] + 1
        firsts = places[np.append(0, np.cumsum(unit.tokens)[:-1])] if len(ends) > 1 else places[:1]
        inside = (firsts < limit) & (limit < ends)
        return int(firsts[inside][0]) if inside.any() else limit

    def kept(self, pieces: Pieces, lengths: np.ndarray) -> np.ndarray:
        """int64 [S], how many images each piece has: the first ones of its example.

        Raises:
            DataError: a piece ends inside an image, or begins after the first token of an example.
        """
        counts = np.array([0 if unit is None else len(unit.tokens) for unit in self.units])
        kept = counts[pieces.examples]
        is_cut = (pieces.lengths != lengths[pieces.examples]) & (kept > 0)
        for piece in np.flatnonzero(is_cut).tolist():
            i, start = int(pieces.examples[piece]), int(pieces.starts[piece])
            stop = start + int(pieces.lengths[piece])
            if start or self.cut_before(i, stop) != stop:
                raise DataError(
                    f"example {i}: a piece of it, tokens {start} to {stop}, cuts through its "
                    'images; pass overflow="drop" or "truncate"'
                )
            kept[piece] = np.count_nonzero(self.ends(i) <= stop)
        return kept

    def columns(self, lengths: np.ndarray) -> list[ImageColumn]:
        """One per field."""
        specs = self.layout.family.fields
        return [ImageColumn(name, field, self, lengths) for name, field in specs.items()]


@dataclass(frozen=True)
class ImageColumn:
    """A field of the vision processor; a FieldColumn of images."""

    name: str
    field: ImageField
    images: Images
    example_lengths: np.ndarray

    @property
    def spec(self) -> PerImage:
        if self.name != "pixel_values":
            return PerImage(torch.int64)
        layout = self.images.layout
        has_frames = self.field.per == "patch" and layout.patch_shape[1] > 1
        shape = layout.patch_shape if has_frames else None
        return PerImage(getattr(torch, layout.pixel_dtype), shape)

    def spans(
        self, pieces: Pieces, first_actions: np.ndarray, num_actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which entries of its example each piece holds: as of a FieldColumn."""
        kept = self.images.kept(pieces, self.example_lengths)
        numbers = np.zeros_like(kept)
        for piece in np.flatnonzero(kept).tolist():
            unit = self.images.units[pieces.examples[piece]]
            assert unit is not None
            number = int(kept[piece])
            per = {"patch": unit.patches, "tile": unit.tiles}.get(self.field.per)
            numbers[piece] = number if per is None else per[:number].sum()
            if self.field.per == "example":
                numbers[piece] = 1
        return np.zeros_like(numbers), numbers

    def place(self, pieces: Pieces, starts: np.ndarray, lengths: np.ndarray) -> Tensor:
        """The entries of these spans, in the order of the pieces: a copy, in one pass."""
        arrays = self.images.arrays[self.name]
        some = zip(pieces.examples.tolist(), lengths.tolist(), strict=True)
        chosen = [array[:n] for i, n in some if n and (array := arrays[i]) is not None]
        if self.field.per == "example":  # how many images are kept, not how many there were
            kept = self.images.kept(pieces, self.example_lengths)
            return torch.from_numpy(kept[kept > 0])
        shape = _shape_of_none(self) if not chosen else chosen[0].shape[1:]
        dtype = self.spec.dtype if self.name == "pixel_values" else torch.int64
        if self.field.kinds == "iufb":
            dtype = torch.bool
        frames = self.spec.patch_shape
        if frames is not None:  # of a still image one of the equal frames is kept
            shape = (frames[0] * frames[2],)
            chosen = [array.reshape(-1, *frames)[:, :, 0] for array in chosen]
        total = int(lengths.sum())
        column = _fresh((total, *shape), dtype)
        end = 0
        for array in chosen:
            part = column[end : end + len(array)]
            part.view(array.shape).copy_(torch.from_numpy(array))
            end += len(array)
        return column


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(fresh_bytes(size)).view(dtype).view(shape)


def _shape_of_none(column: ImageColumn) -> tuple[int, ...]:
    """Of one entry, where no example has an image."""
    layout, size = column.images.layout, column.images.layout.tile_size
    if column.name == "pixel_values":
        return (layout.patch_shape[0],) if column.field.per == "patch" else (3, size, size)
    if column.field.kinds == "iufb":
        return (size, size)
    return {"image_grid_thw": (3,), "image_sizes": (2,)}[column.name]


def token_type_fields(layout: VisionLayout | None) -> dict[str, PerToken]:
    """Token types that do not follow from the ids, but tell the prompt from the answer (PaliGemma).

    They are read of the examples.
    """
    if layout is None or layout.family.positions != "model" or not layout.family.token_types:
        return {}
    return {layout.family.token_types: PerToken(torch.int64)}


def read_images(raw: Mapping[str, Any], layout: VisionLayout, input_ids: Numbers) -> Images:
    """The images of the examples; None, or nothing at all, stands for an example without images.

    Raises:
        DataError: fields of a wrong shape, or that disagree with each other or with the number of
            placeholders among the ids.
    """
    fields, num_examples = layout.family.fields, len(input_ids)
    _refuse_other_media(raw, layout)
    given = {
        name: {
            i: entry
            for i, entry in enumerate(raw.get(name, ()))
            if entry is not None and (not hasattr(entry, "__len__") or len(entry))
        }
        for name in fields
    }
    owners = sorted({i for entries in given.values() for i in entries})
    for i in owners:
        missing = [name for name in fields if i not in given[name] and name not in _OPTIONAL]
        if missing:
            raise DataError(
                f"example {i} has {', '.join(name for name in fields if i in given[name])} and no "
                f"{', '.join(missing)}; give all that the processor returned, or none of them "
                "without an image"
            )
    arrays = {
        name: checked_arrays(
            name,
            entries,
            field.num_dims,
            field.kinds,
            _SHAPES.get((field.per, field.num_dims), "what the processor returned"),
            or_padded=field.per == "tile",
        )
        for (name, field), entries in zip(fields.items(), given.values(), strict=True)
    }
    units: list[ImageUnits | None] = [None] * num_examples
    columns: dict[str, list[np.ndarray | None]] = {name: [None] * num_examples for name in fields}
    for i in owners:
        own = {name: of[i] for name, of in arrays.items() if i in of}
        if "pixel_attention_mask" in fields and "pixel_attention_mask" not in own:
            shape = own["pixel_values"].shape
            own["pixel_attention_mask"] = np.ones((*shape[:-3], *shape[-2:]), dtype=bool)
        own, units[i] = _checked(i, own, layout)
        for name, array in own.items():
            columns[name][i] = array
    images = Images(layout, units, columns, input_ids)
    _check_placeholders(images)
    return images


def _refuse_other_media(raw: Mapping[str, Any], layout: VisionLayout) -> None:
    """They would be lost."""
    fields = layout.family.fields
    for name in (name for name in MEDIA if name in raw and name not in fields):
        i = next((i for i, entry in enumerate(raw[name]) if entry is not None), None)
        if i is not None:
            hint = (
                "videos are not supported, give images"
                if name in _VIDEOS
                else "use the processor of the model"
            )
            raise DataError(
                f"example {i} has {name}, which is no image field of {layout.family_name} models "
                f"({', '.join(fields) or 'none is known'}); {hint}"
            )


def _checked(
    index: int, fields: dict[str, np.ndarray], layout: VisionLayout
) -> tuple[dict[str, np.ndarray], ImageUnits]:
    """The fields of one example with tiles laid flat, and its images."""
    grid = fields.get("image_grid_thw")
    if grid is not None:
        _check_grid(index, grid, layout)
        _check_frames(index, fields["pixel_values"], layout)
    sizes = fields.get("image_sizes")
    if sizes is not None and (sizes.shape[1] != 2 or (sizes < 1).any()):
        raise DataError(
            f"example {index}: image_sizes is {sizes.tolist()!r:.60}; give height and width of "
            "each image, as the processor returned them"
        )
    units = None if sizes is None else layout.units(fields)
    fields = _laid_flat(fields, units)
    units = layout.units(fields) if units is None else units
    per = {"patch": units.patches.sum(), "tile": units.tiles.sum(), "image": len(units.tokens)}
    for name, array in fields.items():
        what = layout.family.fields[name].per
        if what == "example":
            if array.tolist() != [len(units.tokens)]:
                raise DataError(
                    f"example {index}: {name} is {array.tolist()}, but the example has "
                    f"{len(units.tokens)} images; give what the processor returned for it alone"
                )
        elif len(array) != per[what]:
            described = "" if grid is None else f", image_grid_thw of shape {grid.shape}"
            raise DataError(
                f"example {index}: {name} has {len(array)} {what}{'e' * (what == 'patch')}s"
                f"{described or ', the sizes of its images'} describes {per[what]}; give what the "
                "processor returned"
            )
    return fields, units


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


def _check_frames(index: int, pixels: np.ndarray, layout: VisionLayout) -> None:
    """The frames of a patch must be equal: only one of them is stored."""
    channels, num_frames, size = layout.patch_shape
    if num_frames == 1:
        return
    if pixels.shape[1] != channels * num_frames * size:
        raise DataError(
            f"example {index}: pixel_values has patches of {pixels.shape[1]} numbers, the model's "
            f"have {channels * num_frames * size}; use the processor of the model"
        )
    frames = pixels.reshape(-1, channels, num_frames, size)
    if not (frames[:, :, 1:] == frames[:, :, :1]).all():
        raise DataError(
            f"example {index}: the frames of a patch of pixel_values differ, so it is no still "
            "image (or holds NaN); videos are not supported, give images"
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
            name: _real(array, is_real) if name in _TILED else array
            for name, array in fields.items()
        }
    return fields


def _real(array: np.ndarray, is_real: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:]) if is_real.all() else array[is_real]


def _check_placeholders(images: Images) -> None:
    token, ids = images.layout.image_token_id, joined(images.input_ids)
    if token is None:
        return
    is_placeholder = ids.values == token
    before = np.append(0, np.cumsum(is_placeholder))
    found = np.diff(before[ids.offsets])
    described = np.array([0 if unit is None else unit.tokens.sum() for unit in images.units])
    wrong = np.flatnonzero(found != described)
    if len(wrong):
        i = int(wrong[0])
        unit = images.units[i]
        what = "no image" if unit is None else f"images that take {described[i]}"
        raise DataError(
            f"example {i} has {found[i]} image placeholders (token {token}) in its ids, and {what};"
            " give the ids and the image fields that the processor returned together, uncut"
        )
