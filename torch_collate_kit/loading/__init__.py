"""From examples to batches in time: datasets, samplers, prefetching, streaming."""

from torch_collate_kit.loading.dataset import (
    TokenizedDataset,
    read_records,
    token_files,
    unpack_dataset,
)
from torch_collate_kit.loading.loader import PrefetchLoader
from torch_collate_kit.loading.map_segments import map_segments
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.loading.packed_rows import PackedRows
from torch_collate_kit.loading.packed_sampler import PackedBatchSampler, PrefetchingSampler
from torch_collate_kit.loading.reader import AsyncBatchCollator
from torch_collate_kit.loading.sampler import ResumableSampler
from torch_collate_kit.loading.skipping import SkippedExample
from torch_collate_kit.loading.states import merge_states
from torch_collate_kit.loading.stream import PackedIterableDataset
from torch_collate_kit.loading.timeline import StepTimes

__all__ = [
    "AsyncBatchCollator",
    "Mixture",
    "PackedBatchSampler",
    "PackedIterableDataset",
    "PackedRows",
    "PrefetchLoader",
    "PrefetchingSampler",
    "ResumableSampler",
    "SkippedExample",
    "StepTimes",
    "TokenizedDataset",
    "map_segments",
    "merge_states",
    "read_records",
    "token_files",
    "unpack_dataset",
]
