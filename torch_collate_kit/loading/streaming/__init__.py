"""A stream of examples into packed batches, through a bounded buffer."""

from __future__ import annotations

from torch_collate_kit.loading.streaming.packed import PackedIterableDataset

__all__ = ["PackedIterableDataset"]
