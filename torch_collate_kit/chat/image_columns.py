"""Columns of a ``datasets.Dataset`` with images, and with what a processor makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_collate_kit.vision.expansion import ImageProcessing

__all__ = ["image_columns", "image_features", "read_table"]


def image_features(images: ImageProcessing) -> dict[str, Any]:
    """The type of each vision field: lists of lists, because a null of Array2D is read as NaN."""
    import datasets

    found: dict[str, Any] = {}
    for name, field in images.smallest().items():
        found[name] = datasets.Value(str(field.dtype))
        for _ in range(field.ndim):
            found[name] = datasets.Sequence(found[name])
    return found


def image_columns(dataset: Any) -> list[str]:
    """Which of ``image`` and ``images`` hold images that datasets would decode."""
    import datasets

    found = []
    for name in {"image", "images"} & set(dataset.column_names):
        feature = dataset.features[name]
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.Image) and inner.decode and inner.mode is None:
            found.append(name)
    return found


def read_table(table: Any, features: Any, encoded: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of an Arrow table as lists, those named in ``encoded`` as bytes and paths."""
    columns = {name: table[name].to_pylist() for name in table.column_names}
    return {
        name: values if name in encoded else features.decode_column(values, name)
        for name, values in columns.items()
    }
