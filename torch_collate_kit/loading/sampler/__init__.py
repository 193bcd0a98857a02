"""Orders of examples as pure functions of (seed, epoch): batch samplers that can be resumed."""

from __future__ import annotations

from torch_collate_kit.loading.sampler.mixed import MixedSampler
from torch_collate_kit.loading.sampler.packed import PackedBatchSampler
from torch_collate_kit.loading.sampler.resumable import ResumableSampler
from torch_collate_kit.loading.sampler.shuffled import PrefetchingSampler

__all__ = ["MixedSampler", "PackedBatchSampler", "PrefetchingSampler", "ResumableSampler"]
