"""What collation costs the thread that trains: the time between its kernel launches.

A GPU is kept busy by one Python thread that launches kernels. Collation on another thread shares
Python's lock with it. Launched are many tiny kernels; each launch is timed, and told apart by
whether a batch was being built at that moment, as the loader's timeline says afterwards.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from samples import real_mix
from torch.utils.data import DataLoader

from gpu.lengths import DATA
from gpu.where import Where
from torch_collate_kit import PackedBatchSampler, PackedCollator, PrefetchLoader, TokenizedDataset
from torch_collate_kit.ragged import Ragged

__all__ = ["launch_delay"]

_HELD = 1e-3  # seconds: a launch that took longer waited for Python's lock


def launch_delay(where: Where, *, examples: int = 1024) -> dict[str, Any]:
    """Launches alone, beside our thread while it collates and while it has nothing to do, and
    beside it while a worker process collates."""
    examples = 64 if where.is_tiny else examples
    num_steps, seconds = (4, 0.05) if where.is_tiny else (24, 0.15)
    tensor = torch.zeros(1, device=where.device)
    _launched(tensor, seconds, where)  # the first launch loads the kernel
    alone = [_launched(tensor, seconds, where) for _ in range(num_steps)]
    rows = [_row("no loader", alone)]
    for what, num_workers in (("thread", 0), ("worker process", 1)):
        rows += _beside_loader(where, tensor, what, num_workers, examples, num_steps, seconds)
    base = rows[0]["mean"]
    for row in rows:
        row["over_alone"] = row["mean"] / base
        row["lost_per_batch"] = row["launches"] * (row["mean"] - base) / num_steps
    return {"rows": rows, "examples": examples, "batches": num_steps}


def _beside_loader(
    where: Where,
    tensor: torch.Tensor,
    what: str,
    num_workers: int,
    examples: int,
    num_steps: int,
    seconds: float,
) -> list[dict[str, Any]]:
    starts = []
    with _loader(where, examples, num_workers) as loader:
        for _batch in loader.steps(num_steps):
            starts.append(_launched(tensor, seconds, where))
        times = loader.timeline
    building = [(step.collate_began, step.copy_ended) for step in times]
    during = [_inside(stamps, building) for stamps in starts]
    collated = np.median([end - begin for begin, end in building])
    about = {"collate_seconds": float(collated), "workers": num_workers}
    if num_workers:  # the process collates whenever it is not done; the thread waits for it
        return [_row(f"{what} collates", starts) | about]
    return [
        _row("thread collates", starts, during) | about,
        _row("thread has nothing to do", starts, [~inside for inside in during]) | about,
    ]


def _loader(where: Where, examples: int, num_workers: int) -> PrefetchLoader:
    lengths, _ = real_mix(DATA, 4 * examples, longest=4096)
    tokens = np.ones(int(lengths.sum()), dtype=np.int32)
    rows = [{"input_ids": row} for row in Ragged.from_lengths(tokens, lengths)]
    dataset = TokenizedDataset(rows, train_all=True)
    collate = PackedCollator(0, max_tokens=4096, strategy="balanced", train_all=True)
    sampler = PackedBatchSampler(dataset, collate, batch_size=examples)

    def collate_longer(rows: Any) -> Any:  # a tiny batch is done before the lock is given back
        time.sleep(0.03)
        return collate(rows)

    collate_fn = collate_longer if where.is_tiny else collate
    workers = {"collate_fn": collate_fn, "num_workers": num_workers}
    loader = DataLoader(dataset, batch_sampler=sampler, **workers)
    return PrefetchLoader(loader, device=where.device)


def _launched(tensor: torch.Tensor, seconds: float, where: Where) -> np.ndarray:
    """When each launch returned, float64 [n + 1]; the device is idle before and after."""
    where.wait()
    clock, stamps = time.perf_counter, [time.perf_counter()]
    stop = stamps[0] + seconds
    while stamps[-1] < stop:
        tensor.add_(1)
        stamps.append(clock())
    where.wait()
    return np.array(stamps)


def _inside(stamps: np.ndarray, intervals: list[tuple[float, float]]) -> np.ndarray:
    """Which launches overlap one of the intervals: bool [n].

    >>> _inside(np.array([0.0, 1.0, 2.0, 3.0]), [(1.5, 1.7)]).tolist()
    [False, True, False]
    """
    inside = np.zeros(len(stamps) - 1, dtype=bool)
    for begin, end in intervals:
        inside |= (stamps[1:] > begin) & (stamps[:-1] < end)
    return inside


def _row(
    name: str, starts: list[np.ndarray], picked: list[np.ndarray] | None = None
) -> dict[str, Any]:
    """Seconds per launch of those that are picked; all without ``picked``."""
    gaps = [np.diff(stamps) for stamps in starts]
    if picked is not None:
        gaps = [gap[which] for gap, which in zip(gaps, picked, strict=True)]
    every = np.concatenate(gaps)
    if not len(every):
        raise RuntimeError(f"{name}: no launch; the collation was over before the first one")
    return {
        "name": name,
        "launches": len(every),
        "median": float(np.median(every)),
        "mean": float(every.mean()),
        "p99": float(np.quantile(every, 0.99)),
        "most": float(every.max()),
        "held_share": float(every[every > _HELD].sum() / every.sum()),
    }
