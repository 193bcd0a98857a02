"""Images of examples: where a cut may be, and the image fields of the pieces of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.buffer import fresh_bytes
from torch_collate_kit.batch.fields import PerImage
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Pieces
from torch_collate_kit.reading.columns import Numbers
from torch_collate_kit.reading.entries import as_tensor
from torch_collate_kit.vision.families import ImageField, num_kept
from torch_collate_kit.vision.layout import ImageUnits, VisionLayout

_PATCHES_IN_CACHE = 128  # 0.8 MB of float32; fewer at a time take longer (measured)


@dataclass(frozen=True)
class Images:
    """Images of the examples of a batch. Legend: N examples, U images (or tiles) of one."""

    layout: VisionLayout
    input_ids: Numbers
    units: dict[int, ImageUnits]
    """Images per example, by the number of each example that has some."""
    arrays: dict[str, dict[int, np.ndarray]]
    """Arrays by field and example, tiles laid flat."""

    def with_smallest(self, input_ids: Numbers) -> Images:
        """Return the images with one more example, the smallest image, as in ``input_ids``."""
        fields, i = self.layout.smallest(), len(self.input_ids)
        arrays = {name: {**of, i: fields[name]} for name, of in self.arrays.items()}
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
