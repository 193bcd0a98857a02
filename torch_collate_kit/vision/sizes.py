"""Fields of images from their sizes alone, without reading pixels."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.families import vision_family_of
from torch_collate_kit.vision.images import image_files
from torch_collate_kit.vision.layout import VisionLayout


def image_grid(image: Any, processor: Any) -> npt.NDArray[np.int64]:
    """Return the ``image_grid_thw`` row of an image: frames, patches down and across; int64 [3].

    Reads only the header of a file. ``image`` is a path, bytes, a data URI, a PIL image, or the
    dict of a ``datasets.Image`` column. Qwen-VL and GLM-V models have grids; an image has as many
    patches as the product, and that divided by ``merge_size`` squared tokens.

    Raises:
        DataError: no readable image, or one that the processor refuses.
        ValueError: the processor makes no grids.
        ImportError: Pillow is not installed.

    >>> image_grid("photo.jpg", processor=None)
    Traceback (most recent call last):
    ValueError: NoneType makes no image_grid_thw; image_grid is for processors of Qwen-VL and GLM-V
    """
    if not vision_family_of(processor).has_grids:
        raise ValueError(
            f"{type(processor).__name__} makes no image_grid_thw; image_grid is for processors of "
            "Qwen-VL and GLM-V"
        )
    height, width = image_files().size(image, "the image")
    try:
        return _grid_of_size(processor.image_processor, height, width)
    except ValueError as error:
        raise DataError(f"the processor refuses {height} x {width} pixels: {error}") from error


def _grid_of_size(images: Any, height: int, width: int) -> npt.NDArray[np.int64]:
    """Return the grid of the image processor ``images`` for an image of this size; int64 [3]."""
    side = int(images.patch_size)
    if images.do_resize:
        resize = _smart_resize(images)
        size, options = images.size, {}
        if "num_frames" in inspect.signature(resize).parameters:  # GLM
            frames = int(images.temporal_patch_size)
            options = {"num_frames": frames, "temporal_factor": frames}
        height, width = resize(
            height=height,
            width=width,
            factor=side * int(images.merge_size),
            min_pixels=_edge(size, "shortest_edge"),
            max_pixels=_edge(size, "longest_edge"),
            **options,
        )
    return np.array([1, height // side, width // side])


def _smart_resize(images: Any) -> Any:
    """Return the function of the image processor's module that computes the size."""
    for base in type(images).__mro__:
        module = sys.modules[base.__module__]
        if hasattr(module, "smart_resize"):
            return module.smart_resize
    raise ValueError(
        f"the module of {type(images).__name__} has no smart_resize, so sizes are known only from "
        "the pixels; pass pixels=True"
    )


def _edge(size: Any, name: str) -> int:
    return int(size[name] if isinstance(size, dict) else getattr(size, name))


class SizesOnly:
    """Stand-in for an image processor: all fields but pixels, from arrays [height, width, ...]."""

    def __init__(self, images: Any, layout: VisionLayout) -> None:
        self._images, self._layout = images, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._images, name)

    def fetch_images(self, images: Any) -> Any:
        """Return the images: there is nothing to load."""
        return images

    def __call__(self, images: Any, **options: Any) -> dict[str, Any]:
        """Return the fields, with pixels that take no memory."""
        sizes = [image.shape[:2] for image in _images_of(images)]
        family = self._layout.family
        if family.has_grids:
            grids = [_grid_of_size(self._images, *size) for size in sizes]
            return {"image_grid_thw": np.stack(grids)}
        if family.name == "gemma3":
            return {"num_crops": [0] * len(sizes)}
        if family.has_sizes:  # they read the size of a tile from the tiles
            side = self._layout.tile_size
            fields = {
                "pixel_values": np.broadcast_to(np.float32(0), (1, 1, 3, side, side)),
                "image_sizes": np.array(sizes, dtype=np.int64),
            }
            more = {"batch_num_images": np.array([len(sizes)])}
            return fields | (more if "batch_num_images" in family.fields else {})
        counts = [self._images.get_number_of_image_patches(*size, options) for size in sizes]
        if family.name == "internvl":
            return {"num_patches": counts, "pixel_values": np.empty((sum(counts), 0))}
        return {"rows": [[rows for _, rows, _ in counts]], "cols": [[cols for *_, cols in counts]]}


def _images_of(images: Any) -> list[np.ndarray]:
    if isinstance(images, Sequence):
        return [image for inner in images for image in _images_of(inner)]
    return [images]
