"""Which part a rank reads: from torch.distributed by default, and divided only once."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch.distributed as dist

from torch_collate_kit._checks import checked_int
from torch_collate_kit.packing import ParallelLayout

_logger = logging.getLogger("torch_collate_kit.loading")


def checked_rank(dp_rank: int, dp_size: int, name: str = "dp_size", hint: str = "") -> int:
    """Return ``dp_rank`` as an int of 0 .. ``dp_size`` - 1."""
    dp_rank = checked_int("dp_rank", dp_rank, minimum=0, hint=hint)
    if dp_rank >= dp_size:
        raise ValueError(
            f"dp_rank must be below {name}={dp_size}, got {dp_rank}; ranks count from 0"
        )
    return dp_rank


def rank_and_size(dp_rank: int | None, dp_size: int | None) -> tuple[int, int]:
    """Return the part of each batch that is read, and the number of parts; None: of this process.

    Raises:
        TypeError, ValueError: only one is given, or a wrong one, or the process has no rank yet.
    """
    if (dp_rank is None) != (dp_size is None):
        raise TypeError(
            "pass both dp_rank and dp_size, or neither for those of torch.distributed; got "
            f"dp_rank={dp_rank!r}, dp_size={dp_size!r}"
        )
    if dp_rank is not None:
        size = checked_int("dp_size", dp_size)
        return checked_rank(dp_rank, size), size
    rank, size = _of_process("dp_rank and dp_size")
    if size > 1:
        _logger.warning(
            "PrefetchingSampler reads part %d of %d; pass dp_rank and dp_size where ranks share "
            "data, or dp_rank=0, dp_size=1 for all of it",
            *(rank, size),
        )
    return rank, size


def rank_in(parallel: ParallelLayout, dp_rank: int | None, *, hint: str = "") -> int:
    """Return ``dp_rank``; None: that of this process in a layout of all processes.

    Raises:
        TypeError, ValueError: a wrong rank, another number of processes, or no rank yet.
    """
    if dp_rank is not None:
        return checked_rank(dp_rank, parallel.dp, "parallel.dp", hint)
    rank, num_processes = _of_process("dp_rank")
    if num_processes == num_ranks(parallel):
        return parallel.place(rank)[0]
    if num_processes > 1:
        dp, others = divmod(num_processes, parallel.cp * parallel.tp)
        fitting = ParallelLayout(dp=num_processes) if others else replace(parallel, dp=dp)
        raise ValueError(
            f"torch.distributed has {num_processes} ranks, and the layout of the collator is for "
            f"dp * cp * tp = {num_ranks(parallel)}; pass the collator parallel={fitting!r}, or "
            "dp_rank= from a mesh of your own (pipelines, another order), or dp_rank=0 for the "
            "same data on all ranks"
        )
    if parallel.dp > 1:
        _logger.warning(
            "a single process reads the rows of rank 0, of parallel.dp=%d ranks; pass dp_rank%s",
            *(parallel.dp, f" ({hint})" if hint else ""),
        )
    return 0


def num_ranks(parallel: ParallelLayout) -> int:
    """Return the number of processes that share the data of a layout, or compute it together."""
    return parallel.dp * parallel.cp * parallel.tp


def divided_again(owner: str) -> TypeError:
    """Return the error of a tool that would divide the batches of a rank's sampler."""
    return TypeError(
        f"a {owner} for several ranks yields the part of one rank, and accelerator.prepare, or "
        "Lightning's use_distributed_sampler=True, would divide it over the ranks again; wrap its "
        "loader in a PrefetchLoader, which they leave as it is: PrefetchLoader(DataLoader(dataset, "
        "batch_sampler=sampler, collate_fn=collate), device=accelerator.device)"
    )


def _of_process(names: str) -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = os.environ.get("WORLD_SIZE", "")
    if started.strip().isdecimal() and int(started) > 1:
        raise ValueError(
            f"WORLD_SIZE={started}, but torch.distributed is not initialized, so the rank is "
            f"unknown; make it after Accelerator() or init_process_group, or pass {names}"
        )
    return 0, 1
