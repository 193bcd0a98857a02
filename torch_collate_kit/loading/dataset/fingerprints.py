"""Fingerprints of data: digests of all lengths, and of the token ids of some rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.ragged import Ragged

_SAMPLED_ROWS = 64


def fingerprint_of(
    lengths: npt.NDArray[np.int64] | Ragged,
    token_ids: Callable[[npt.NDArray[np.int64]], npt.ArrayLike],
) -> dict[str, Any]:
    """Return the fingerprint of rows; ``token_ids(rows)`` returns the ids of some, end to end."""
    ids = np.asarray(token_ids(sampled_rows(len(lengths))))
    counts: npt.NDArray[np.int64] = lengths.values if isinstance(lengths, Ragged) else lengths
    return {
        **({"segments": _digest(lengths.offsets)} if isinstance(lengths, Ragged) else {}),
        "num_tokens": int(counts.sum()),
        "lengths": _digest(counts),
        "token_ids": _digest(ids),
    }


def sampled_rows(num_rows: int) -> npt.NDArray[np.int64]:
    """Return 64 rows at even distances, the first and the last among them, or all of fewer."""
    rows: npt.NDArray[np.int64] = np.unique(
        np.linspace(0, max(num_rows - 1, 0), min(num_rows, _SAMPLED_ROWS), dtype=np.int64)
    )
    return rows


def _digest(numbers: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers, dtype="<i8").data).hexdigest()[:32]
