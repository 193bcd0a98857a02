"""Columns of a ``datasets.Dataset`` with images, and with what a processor makes of them."""

from __future__ import annotations

from typing import Any

from torch_collate_kit.vision.expansion import ImageProcessing

__all__ = ["image_features", "with_image_files"]


def image_features(images: ImageProcessing) -> dict[str, Any]:
    """The type of each vision field: lists of lists, because a null of Array2D is read as NaN."""
    import datasets

    found: dict[str, Any] = {}
    for name, field in images.smallest().items():
        found[name] = datasets.Value(str(field.dtype))
        for _ in range(field.ndim):
            found[name] = datasets.Sequence(found[name])
    return found


def with_image_files(dataset: Any) -> Any:
    """The dataset with images in ``image`` and ``images`` not decoded, so that errors name them."""
    import datasets

    for name in {"image", "images"} & set(dataset.column_names):
        feature = dataset.features[name]
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.Image) and inner.decode and inner.mode is None:
            files = datasets.Image(decode=False)
            dataset = dataset.cast_column(
                name, files if inner is feature else datasets.Sequence(files)
            )
    return dataset
