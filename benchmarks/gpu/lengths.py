"""Examples of real lengths with random tokens, and loaders over them, packed and padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from samples import real_mix
from torch.utils.data import DataLoader

from gpu.where import DATA, Where
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PaddedCollator,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.ragged import Ragged

__all__ = ["ROWS", "Layout", "Mix", "loader_of", "mix_of"]

ROWS = 4  # packed rows of a step, on average


@dataclass(frozen=True)
class Mix:
    """Examples, what their lengths are, and how many make a step."""

    dataset: TokenizedDataset
    what: str
    max_tokens: int
    """Cells of a micro-batch at most: one packed row, or padded rows."""
    batch_size: int
    """Examples of a step, whatever the layout."""


@dataclass(frozen=True)
class Layout:
    """How the examples of a step become micro-batches.

    "packed": rows of several examples, one a micro-batch. "padded": as many examples in their order
    as fit. "sorted": the same after sorting the step by length, the best that padding can do.
    """

    kind: str
    fixed_width: bool = False
    prefetch: bool = True
    num_workers: int = 0


def mix_of(where: Where, vocabulary: int, *, max_tokens: int = 8192, rows: int = ROWS) -> Mix:
    """A step is as many examples as fill ``rows`` packed rows on average, to 97%: a multiple of
    ``rows``, for trainers whose micro-batches are a number of examples."""
    count = 600 if where.is_tiny else 6000
    max_tokens = 512 if where.is_tiny else max_tokens
    lengths, what = real_mix(DATA, count, longest=max_tokens)
    tokens = np.random.default_rng(0).integers(1, vocabulary, int(lengths.sum()), dtype=np.int32)
    source = [{"input_ids": row} for row in Ragged.from_lengths(tokens, lengths)]
    batch_size = rows * max(1, round(0.97 * max_tokens / lengths.mean()))
    dataset = TokenizedDataset(source, train_all=True)
    return Mix(dataset, f"{what}, at most {max_tokens:,} tokens", max_tokens, batch_size)


def loader_of(mix: Mix, layout: Layout, where: Where) -> PrefetchLoader:
    """Micro-batches of a step, on the device; the same examples in every layout."""
    options: dict[str, Any] = {"batch_size": mix.batch_size, "seed": 0, "tail": "drop"}
    collate: Any
    if layout.kind == "packed":
        collate = PackedRows(mix.max_tokens, fixed_width=layout.fixed_width)
        sampler: Any = PackedBatchSampler(mix.dataset, collate, **options)
    else:
        sampler = PrefetchingSampler(mix.dataset, **options)
        collate = PaddedRows(mix.max_tokens, is_sorted=layout.kind == "sorted")
    loader = DataLoader(
        mix.dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=layout.num_workers,
        persistent_workers=layout.num_workers > 0,
    )
    return PrefetchLoader(loader, prefetch=layout.prefetch, device=where.device)


class PackedRows:
    """The batch itself: its rows are slices of it, taken where it is used."""

    def __init__(self, max_tokens: int, *, fixed_width: bool) -> None:
        self.collate = PackedCollator(
            0, max_tokens=max_tokens, strategy="balanced", fixed_width=fixed_width, train_all=True
        )

    def __call__(self, examples: Any) -> Batch:
        return self.collate(examples)


class PaddedRows:
    """Several batches, of at most ``max_cells`` cells each, as wide as their longest example."""

    def __init__(self, max_cells: int, *, is_sorted: bool) -> None:
        self._collate = PaddedCollator(0, padding_side="right", train_all=True)
        self._max_cells, self._is_sorted = max_cells, is_sorted

    def __call__(self, examples: dict[str, Ragged]) -> list[Batch]:
        ids = examples["input_ids"]
        order = np.argsort(ids.lengths, kind="stable") if self._is_sorted else np.arange(len(ids))
        groups: list[list[int]] = []
        longest = 0
        for i in order.tolist():
            longest = max(longest, int(ids.lengths[i]))
            if not groups or longest * (len(groups[-1]) + 1) > self._max_cells:
                groups.append([])
                longest = int(ids.lengths[i])
            groups[-1].append(i)
        return [self._collate({"input_ids": ids.take(group)}) for group in groups]
