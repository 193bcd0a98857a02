"""From examples to batches in time: datasets, samplers, prefetching, streaming."""

from torch_collate_kit.loading.dataset import (
    TokenizedDataset,
    read_records,
    token_files,
    unpack_dataset,
)
from torch_collate_kit.loading.map_segments import map_segments
from torch_collate_kit.loading.orders import Mixture
from torch_collate_kit.loading.prefetch import AsyncBatchCollator, PrefetchLoader
from torch_collate_kit.loading.sampler import (
    PackedBatchSampler,
    PackedRows,
    PrefetchingSampler,
    ResumableSampler,
)
from torch_collate_kit.loading.streaming import PackedIterableDataset, merge_states

__all__ = [
    "AsyncBatchCollator",
    "Mixture",
    "PackedBatchSampler",
    "PackedIterableDataset",
    "PackedRows",
    "PrefetchLoader",
    "PrefetchingSampler",
    "ResumableSampler",
    "TokenizedDataset",
    "map_segments",
    "merge_states",
    "read_records",
    "token_files",
    "unpack_dataset",
]
