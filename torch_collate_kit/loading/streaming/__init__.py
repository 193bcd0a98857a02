"""A stream of examples into packed batches, through a bounded buffer."""

from torch_collate_kit.loading.streaming.packed import PackedIterableDataset
from torch_collate_kit.loading.streaming.states import merge_states

__all__ = ["PackedIterableDataset", "merge_states"]
