"""A stream of examples into packed batches, through a bounded buffer."""

from torch_collate_kit.loading.streaming.states import merge_states
from torch_collate_kit.loading.streaming.stream import PackedIterableDataset

__all__ = ["PackedIterableDataset", "merge_states"]
