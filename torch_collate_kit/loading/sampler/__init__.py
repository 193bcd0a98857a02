"""Batch samplers that can be resumed: an order, a budget of a step, and a division over ranks."""

from torch_collate_kit.loading.sampler.packed import PackedBatchSampler, PrefetchingSampler
from torch_collate_kit.loading.sampler.packed_rows import PackedRows
from torch_collate_kit.loading.sampler.sampler import ResumableSampler

__all__ = ["PackedBatchSampler", "PackedRows", "PrefetchingSampler", "ResumableSampler"]
