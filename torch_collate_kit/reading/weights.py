"""Loss weights: 0/1 masks as bools, others in float32, wrong ones refused."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

__all__ = ["LEAST_WEIGHT", "as_flags", "as_weights", "bad_weight", "is_bad_weight"]

# Divided by the loss tokens of a batch, up to 10**8, it is still a normal float32.
LEAST_WEIGHT = 1e-30


def as_flags(column: Ragged) -> Ragged:
    """A column that holds nothing but 0 and 1 as bools, which are put in order in less memory."""
    values = column.values
    if values.dtype != np.bool_:
        trained = values != 0
        if np.count_nonzero(values == 1) == np.count_nonzero(trained):
            return Ragged(trained, column.offsets)
    return column


def as_weights(values: np.ndarray) -> np.ndarray | None:
    """Loss weights as bool where all are 0 or 1, else float32: a copy; None where one is wrong."""
    if values.dtype == np.bool_:
        return values.copy()
    trained = values != 0
    if np.count_nonzero(values == 1) == np.count_nonzero(trained):
        return trained
    return None if is_bad_weight(values).any() else values.astype(np.float32)


def is_bad_weight(values: np.ndarray) -> np.ndarray:
    """Where a weight is negative, not finite in float32, or lost in it."""
    with np.errstate(over="ignore"):
        kept = values.astype(np.float32)
    return ~((values == 0) | ((kept >= LEAST_WEIGHT) & (kept < np.inf)))


def bad_weight(index: int, name: str, value: float, entry: int, token: int) -> DataError:
    """What is wrong with a weight: entry ``entry`` of its column, which is of token ``token``."""
    if 0 < value < 1:
        return DataError(
            f"example {index}: {name}[{entry}] is {value}, which float32 loses; a weight must be 0 "
            f"or at least {LEAST_WEIGHT}: give 0 where nothing is trained"
        )
    return DataError(
        f"example {index}: {name} is {value} at token {token}; weights must be finite and 0 or more"
    )
