"""Which part a rank reads: from torch.distributed by default, and divided only once."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace

import torch.distributed as dist

from torch_collate_kit._checks import checked_int
from torch_collate_kit.packing import ParallelLayout

_logger = logging.getLogger("torch_collate_kit.loading")


def checked_rank(rank: int, size: int, name: str = "dp_size", hint: str = "") -> int:
    """Return ``rank`` as an int of 0 .. ``size`` - 1."""
    rank = checked_int("dp_rank", rank, minimum=0, hint=hint)
    if rank >= size:
        raise ValueError(f"dp_rank must be below {name}={size}, got {rank}; ranks count from 0")
    return rank


def rank_and_size(dp_rank: int | None, dp_size: int | None) -> tuple[int, int]:
    """Return the part of each batch that is read, and how many there are; None: this process's."""
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
    """Return ``dp_rank``; None: that of this process in a layout of all processes."""
    if dp_rank is not None:
        return checked_rank(dp_rank, parallel.dp, "parallel.dp", hint)
    (rank, size), inner = _of_process("dp_rank"), parallel.cp * parallel.tp
    if size == parallel.dp * inner:
        return parallel.place(rank)[0]
    if size > 1:
        fitting = ParallelLayout(dp=size) if size % inner else replace(parallel, dp=size // inner)
        raise ValueError(
            f"torch.distributed has {size} ranks, the collator's layout dp * cp * tp = "
            f"{parallel.dp * inner}; pass the collator parallel={fitting!r}, or dp_rank= of your "
            "own mesh (pipelines, another order), or dp_rank=0 for the same data on all ranks"
        )
    if parallel.dp > 1:
        _logger.warning(
            "a single process reads the rows of rank 0, of parallel.dp=%d ranks; pass dp_rank%s",
            *(parallel.dp, f" ({hint})" if hint else ""),
        )
    return 0


class DividedOnce:
    """A sampler that no tool divides again: what tools ask for has no value, or is refused."""

    _num_ranks: int  # that read or compute the batches of a step together

    @property
    def batch_size(self) -> int:
        """No value. Tools that divide batches ask for it; with several ranks they are refused."""
        if self._num_ranks > 1:
            raise divided_again(self, "batch_sampler=sampler, collate_fn=collate")
        raise AttributeError(f"a {type(self).__name__} has no batch_size and no drop_last")

    drop_last = batch_size

    @property
    def sampler(self) -> object:
        """No value. A loader of one process that reads for all is refused with several ranks."""
        asking = sys._getframe(1).f_locals.get("self")
        if self._num_ranks > 1 and type(asking).__name__ == "DataLoaderDispatcher":
            raise divided_again(self, "batch_sampler=sampler, collate_fn=collate")
        raise AttributeError(f"a {type(self).__name__} has no sampler")


def divided_again(of: object, parts: str) -> TypeError:
    """Return the error of a tool that would divide a loader of ``parts``."""
    return TypeError(
        "accelerator.prepare, or Lightning's use_distributed_sampler=True, would divide the "
        f"batches of a {type(of).__name__} over the ranks by itself, and cut or lose what "
        "belongs together; make it after Accelerator(), from which it has its rank, and wrap its "
        "loader in a PrefetchLoader, which they leave as it is: PrefetchLoader(DataLoader(dataset, "
        f"{parts}), device=accelerator.device); or pass Lightning use_distributed_sampler=False; "
        "transformers.Trainer resumes neither: give it PackedRows"
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
