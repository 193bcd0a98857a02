"""Samplers and streams that find their rank, and tools that would divide them, on every rank."""

from __future__ import annotations

import pickle
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    ParallelLayout,
    PrefetchingSampler,
    PrefetchLoader,
    StateError,
    TokenizedDataset,
)

EXAMPLES = [{"input_ids": [i + 1] * (1 + i % 5)} for i in range(42)]
DATA = TokenizedDataset(EXAMPLES)


def made(kind: str, layout: ParallelLayout | None = None, **options: Any) -> Any:
    """Return a sampler or a stream of the examples; ``layout`` is that of its collator."""
    if kind == "prefetching":
        return PrefetchingSampler(DATA, batch_size=8, seed=3, **options)
    collate = PackedCollator(0, max_tokens=12, parallel=layout or ParallelLayout())
    if kind == "packed":
        return PackedBatchSampler(DATA, collate, batch_size=8, seed=3, **options)
    return PackedIterableDataset(EXAMPLES, collate, buffer_size=7, **options)


def loader_of(source: Any) -> DataLoader[Any]:
    if isinstance(source, PackedIterableDataset):
        return DataLoader(source, batch_size=None, collate_fn=source.as_is)
    collate = getattr(source, "_collate", PackedCollator(0, max_tokens=12))
    return DataLoader(DATA, batch_sampler=source, collate_fn=collate)


def read(loader: Any) -> list[int]:
    """Return the examples that were read, by the id of their tokens."""
    ids = (ids for batch in loader for row in batch["input_ids"].tolist() for ids in set(row))
    return sorted(i - 1 for i in ids if i)


def error_of(accelerator: Accelerator, source: Any) -> str:
    """Return the message with which a loader is refused, or what is read from it."""
    try:
        return str(read(accelerator.prepare(loader_of(source))))
    except TypeError as error:
        return str(error)


def saved_and_loaded(folder: str, **options: Any) -> list[Any]:
    """Return what is left of a stream after a save, and after it is loaded; or the error."""
    found: list[Any] = []
    for step in ("save", "load"):
        accelerator = Accelerator(cpu=True)
        stream = made("stream", ParallelLayout(dp=accelerator.num_processes), **options)
        with PrefetchLoader(loader_of(stream)) as loader:
            accelerator.register_for_checkpointing(loader)
            batches = iter(loader)
            try:
                if step == "save":
                    next(batches)
                    accelerator.save_state(folder)
                    accelerator.wait_for_everyone()  # the first rank writes
                else:
                    accelerator.load_state(folder)
                    batches = iter(loader)
            except StateError as error:
                return [str(error)]
            found.append(read(batches))
    accelerator.end_training()
    return found


def on_rank() -> dict[str, Any]:
    before: list[str] = []
    for kind in ("prefetching", "packed", "stream"):
        try:
            made(kind)
        except ValueError as error:
            before.append(str(error))
    found: dict[str, Any] = {"before": before, "refused": {}, "read": {}, "wrong": []}
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    layout = {"packed": ParallelLayout(dp=ranks), "stream": ParallelLayout(dp=ranks)}
    for kind in ("prefetching", "packed", "stream"):
        source = made(kind, layout.get(kind))
        copied = pickle.loads(pickle.dumps(source))  # as a worker gets it
        with PrefetchLoader(loader_of(copied), device=accelerator.device) as loader:
            found["read"][kind] = read(accelerator.prepare(loader))
    for dispatch in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for kind in ("prefetching", "packed"):
            message = error_of(accelerator, made(kind, layout.get(kind)))
            found["refused"][kind, dispatch] = message
    own = made("packed", ParallelLayout(tp=ranks))  # all ranks compute the same rows
    found["refused"]["tensor"] = error_of(Accelerator(cpu=True), own)
    config = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    alone = {"prefetching": {"dp_rank": 0, "dp_size": 1}, "packed": {"dp_rank": 0}}
    for kind, options in alone.items():  # whose steps Accelerate divides
        loader = accelerator.prepare(loader_of(made(kind, **options)))
        found["read"][kind, "divided by Accelerate"] = read(loader)
    for kind in ("packed", "stream"):
        try:
            made(kind)
        except ValueError as error:
            found["wrong"].append(str(error))
    accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
    accelerator.end_training()
    return found
