"""Images of staged rows: ranks should run the vision tower equally often."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_collate_kit.batch import Batch

__all__ = ["rows_with_images", "warn_if_uneven"]


def rows_with_images(batch: Batch) -> np.ndarray | None:
    """bool [R], which rows have images; None where no row has."""
    columns = batch.stored().columns
    if columns is None or columns.placement.vision is None:
        return None
    names = columns.placement.vision.fields.keys() & columns.values.keys()
    lengths = [columns.values[name].lengths for name in names]
    if not lengths or not any(of.any() for of in lengths):
        return None
    has_image: np.ndarray = np.any(np.array(lengths) > 0, axis=0)
    return has_image


def warn_if_uneven(has_image: Sequence[Any], what: str) -> None:
    """Warn where some ranks have images and others do not."""
    if any(has_image) and not all(has_image):
        ranks = [rank for rank, some in enumerate(has_image) if not some]
        warnings.warn(
            f"ranks {ranks} have no image in a {what} in which others have: with a trained vision "
            "tower DDP needs find_unused_parameters=True, and FSDP waits for ever; stage rollouts "
            "with and without images apart, or give every rollout an image",
            stacklevel=4,
        )
