"""A packed stream under accelerate.prepare, on every rank."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from torch_collate_kit import PackedCollator, PackedIterableDataset, ParallelLayout, PrefetchLoader

EXAMPLES = [{"input_ids": [i + 1] * (1 + i % 5)} for i in range(41)]


def stream(dp_rank: int = 0, dp_size: int = 1) -> PackedIterableDataset:
    collate = PackedCollator(0, max_tokens=12, parallel=ParallelLayout(dp=dp_size))
    return PackedIterableDataset(EXAMPLES, collate, buffer_size=7, dp_rank=dp_rank)


def tokens_of(loader: Any) -> list[int]:
    """The tokens of all its batches in their order, or what it raised."""
    return [t for batch in loader for row in batch["input_ids"].tolist() for t in row if t]


def what_came(accelerator: Accelerator, loader: Any) -> Any:
    try:
        return tokens_of(accelerator.prepare(loader))
    except TypeError as error:
        return str(error)


def all_ways() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dispatch in (None, True, False):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        part = {"dp_rank": accelerator.process_index, "dp_size": accelerator.num_processes}
        dataset = stream(**part)
        loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)
        found[str(dispatch)] = what_came(accelerator, loader)
    loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)
    with PrefetchLoader(loader, device=accelerator.device) as prefetching:
        found["PrefetchLoader"] = what_came(accelerator, prefetching)
    accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
    accelerator.end_training()
    return found | part
