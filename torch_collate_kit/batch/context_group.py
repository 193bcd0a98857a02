"""The process group of context ranks: what its ranks have, and their exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_collate_kit.batch.placement import Shard
from torch_collate_kit.packing.context import LAYOUTS


def check_group(shard: Shard, group: Any) -> None:
    """Refuse a group of other ranks than those that the batch was cut for."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"the batch is the shard of context rank {shard.rank} of {shard.size}, whose attention "
            f"needs the keys of the others; pass context_group=, got {group!r}"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (rank, size) != (shard.rank, shard.size):
        raise ValueError(
            f"the batch is the shard of context rank {shard.rank} of {shard.size}, and this "
            f"process is rank {rank} of the {size} in the group; cut it with "
            "batch.context_shard(dist.get_rank(group), dist.get_world_size(group))"
        )


def check_one_batch(contents: list[list[int]]) -> None:
    """Refuse shards of different batches or layouts; ``contents`` is ``content_of`` each rank."""
    if any(of != contents[0] for of in contents):
        raise ValueError(
            "the context ranks have shards of different batches or layouts, with the checksums "
            f"{[of[0] for of in contents]}; all must cut the same rows: let a group read them as "
            "dp_rank, of dp_rank, cp_rank = layout.place(rank)"
        )


def content_of(shard: Shard) -> list[int]:
    """Return integers that are the same on all ranks that cut the same batch in the same way."""
    return [shard.content, LAYOUTS.index(shard.layout)]


def gathered_ints(values: list[int], group: Any) -> list[list[int]]:
    """Return the integers of every rank of the group; it waits for the device."""
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    devices = [part.partition(":")[0] for part in backends.split(",")]
    own = torch.tensor(values, dtype=torch.int64, device="cpu" if "cpu" in devices else devices[0])
    all_ranks = own.new_empty(dist.get_world_size(group) * len(values))
    all_gather()(all_ranks, own, group=group)
    found: Tensor = all_ranks.view(-1, len(values))
    listed: list[list[int]] = found.tolist()
    return listed


def all_gather() -> Callable[..., Any]:
    """Return the function of torch that joins tensors of all ranks along the first axis."""
    new: Any = getattr(dist, "all_gather_single", None)  # torch 2.13 renames it
    return dist.all_gather_into_tensor if new is None else new


def reduce_scatter() -> Callable[..., Any]:
    """Return the function of torch that adds tensors up, and leaves each rank its part."""
    new: Any = getattr(dist, "reduce_scatter_single", None)
    return dist.reduce_scatter_tensor if new is None else new
