"""What the collation benchmarks share: one comparison of a collator with plain NumPy, in one table.

**collate** is the call; **ready** the call and every field that ``model_inputs`` and the loss read,
made on the CPU; **delivered** the time from batch to batch through one DataLoader worker, when
nothing else is done. Plain NumPy has no other call than the one that makes all fields.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import Report, Times, alternate, timed
from samples import Examples
from torch.utils.data import DataLoader

from torch_collate_kit import Batch
from torch_collate_kit.ragged import Ragged

__all__ = [
    "HEADER",
    "Runs",
    "columns_of",
    "compare",
    "lists_of",
    "measured",
    "ready",
    "rows_of",
]

Runs = dict[str, Callable[[], Any]]
HEADER = ["", "median", "quartiles", "minimum", "time / ours", "fields"]
_OF_THE_LOSS = ("loss_mask", "response_mask", "rewards", "rollout_logprobs")
_WARM_UP, _DELIVERED = 4, 12  # batches of a run through a worker: not timed, timed


def columns_of(examples: Examples) -> dict[str, Ragged]:
    """What a TokenizedDataset hands over: one array per field."""
    return {name: Ragged.from_rows([e[name] for e in examples]) for name in examples[0]}


def lists_of(examples: Examples) -> list[dict[str, list[float]]]:
    return [{name: row.tolist() for name, row in example.items()} for example in examples]


def ready(batch: Batch) -> Batch:
    """The batch with the fields made that a training step reads."""
    batch.model_inputs()
    for name in _OF_THE_LOSS:
        if name in batch:
            batch[name]
    return batch


def measured(runs: Runs, rounds: int) -> dict[str, Times]:
    return alternate({name: timed(run) for name, run in runs.items()}, rounds=rounds, warm_up=3)


def delivery(make: Callable[[], Any]) -> Callable[[], float]:
    """A run of batches through one worker: the median of the seconds from one to the next."""
    loader = DataLoader(
        range(_WARM_UP + _DELIVERED),
        collate_fn=lambda _: make(),
        num_workers=1,
        persistent_workers=True,
    )

    def run() -> float:
        seconds, began = [], time.perf_counter()
        for _batch in loader:
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
        return statistics.median(seconds[_WARM_UP:])

    return run


def compare(
    report: Report,
    heading: str,
    collate: Callable[[Any], Batch],
    inputs: Mapping[str, Any],
    plain: Runs,
    *,
    rounds: int,
    about: str,
) -> dict[str, float]:
    """The table of one layout, and its medians by name, such as "ready, columns".

    ``inputs`` has "columns", "ndarrays" and "lists", ``plain`` row-by-row versions.
    """
    batch = collate(inputs["columns"])
    dense = [f.values if isinstance(f, Ragged) else f for f in batch.values()]
    source = torch.zeros(sum(field.nbytes for field in dense), dtype=torch.uint8)
    there = torch.zeros_like(source)
    runs: Runs = {}
    for kind, given in inputs.items():
        runs[f"collate, {kind}"] = partial(collate, given)
        runs[f"ready, {kind}"] = lambda given=given: ready(collate(given))
    floors: Runs = {"memcpy of the fields": lambda: there.copy_(source)}
    floors["and to new memory"] = source.clone
    makers: Runs = {kind: partial(collate, given) for kind, given in inputs.items()} | plain
    times = alternate(
        {name: timed(run) for name, run in (runs | plain | floors).items()}
        | {f"delivered, {name}": delivery(make) for name, make in makers.items()},
        rounds=rounds,
        warm_up=3,
    )
    report.times(heading, times)
    median = {name: t.median for name, t in times.items()}
    for stage in ("collate", "ready"):  # they have no other call
        median |= {f"{stage}, {name}": median[name] for name in (*plain, *floors)}
    stages = ("collate", "ready", "delivered")
    rows = []
    for name in (*makers, *floors):
        keys = [f"{stage}, {name}" for stage in stages]
        rows.append([name, *(f"{1e3 * median[k]:.3g}" if k in median else "-" for k in keys)])
    note = f"ms; {about}; the last batch is alive while the next is built; medians of {rounds}."
    report.table(heading, ["", *stages], rows, note)
    _bytes(report, heading, collate(inputs["columns"]))
    return median


def _bytes(report: Report, heading: str, batch: Batch) -> None:
    """What is sent to another process, before and after the fields are made."""
    tokens = batch.num_tokens
    stored = len(pickle.dumps(batch, protocol=5))
    dense = len(pickle.dumps(dict(batch.items()), protocol=5))
    share = f"{stored:,} bytes pickled, {stored / tokens:.1f} per token; its fields {dense:,}, "
    report.text(f"{heading}: {share}{dense / stored:.1f} times as many.\n")
    report.data[f"{heading}, bytes"] = {"stored": stored, "fields": dense, "tokens": tokens}
    if "rewards" in batch:
        report.target(f"{heading}: bytes pickled, the fields' over ours", dense / stored, "x", 8)
    else:
        report.target(f"{heading}: bytes pickled per token", stored / tokens, "<", 7)


def rows_of(times: Mapping[str, Times], ours: str, fields: Mapping[str, str]) -> list[list[str]]:
    base = times[ours].median
    return [
        [name, *t.cells(), f"{t.median / base:.2f}x", fields.get(name, "the contract's")]
        for name, t in times.items()
    ]
