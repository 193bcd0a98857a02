"""Batches for the tests of Batch, and their contents as Python values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged

LENGTHS = (5, 3, 4, 2, 7)


def examples(lengths: Any = LENGTHS) -> list[dict[str, list[int]]]:
    """Token t of example i is 100 * i + t + 1."""
    return [{"input_ids": [100 * i + t + 1 for t in range(n)]} for i, n in enumerate(lengths)]


def loose() -> Batch:
    """Not from a collator: fields of many kinds, and metadata of all kinds."""
    return Batch(
        {
            "ids": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]),
            "rewards": torch.tensor([0.5, 1.5, 2.5, 3.5]),
            "half": torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.bfloat16),
            "kept": torch.tensor([True, False, True, True]),
            "words": Ragged.from_rows([[1], [2, 3], [], [4, 5, 6]]),
        },
        row_metadata={
            "uids": ["a", "b", "c", "d"],
            "turns": np.array([1, 2, 3, 4]),
            "scores": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            "parts": Ragged.from_rows([[0], [], [1, 2], [3]]),
        },
        metadata={
            "step": 7,
            "name": "run",
            "limits": (1, 2, 3),
            "options": {"x": [1]},
            "nothing": None,
        },
    )


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def contents(batch: Batch) -> dict[str, Any]:
    """All of a batch as Python values, so that two can be compared."""
    dtypes = {k: (v.values if isinstance(v, Ragged) else v).dtype for k, v in batch.items()}
    return {
        "rows": len(batch),
        "fields": {name: plain(field) for name, field in batch.items()},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "row_metadata": {key: plain(value) for key, value in batch.row_metadata.items()},
        "metadata": dict(batch.metadata),
    }


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All that is stored."""
    stored = batch._stored().items().values()
    return [field.values if isinstance(field, Ragged) else field for field in stored]


def storages_of(batch: Batch) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}
