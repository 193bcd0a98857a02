"""What the collation benchmarks share: kinds of input, ways to run a collator, the memcpy floor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import Times, alternate, timed
from samples import Examples

from torch_collate_kit import Batch, Ragged

__all__ = ["HEADER", "Runs", "columns_of", "copies", "lists_of", "measured", "rows_of", "ways"]

Runs = dict[str, Callable[[], Any]]
HEADER = ["", "median", "quartiles", "minimum", "time / ours", "fields"]
_ALL = "the contract's"


def columns_of(examples: Examples) -> dict[str, Ragged]:
    """What a TokenizedDataset hands over: one array a field."""
    return {name: Ragged.from_rows([e[name] for e in examples]) for name in examples[0]}


def lists_of(examples: Examples) -> list[dict[str, list[float]]]:
    return [{name: row.tolist() for name, row in example.items()} for example in examples]


def copies(batch: Batch) -> Runs:
    """The floor: the bytes of the batch, copied to where memory is, and to new memory."""
    fields = (field.values if isinstance(field, Ragged) else field for field in batch.values())
    source = torch.zeros(sum(field.nbytes for field in fields), dtype=torch.uint8)
    there = torch.zeros_like(source)
    return {"memcpy of the output": lambda: there.copy_(source), "and to new memory": source.clone}


def measured(runs: Runs, rounds: int, state: str) -> dict[str, Times]:
    return alternate({k: timed(f, state) for k, f in runs.items()}, rounds=rounds, warm_up=3)


def rows_of(times: Mapping[str, Times], ours: str, fields: Mapping[str, str]) -> list[list[str]]:
    base = times[ours].median
    return [
        [name, *t.cells(), f"{t.median / base:.2f}x", fields.get(name, _ALL)]
        for name, t in times.items()
    ]


def ways(collator: Callable[..., Any], inputs: Mapping[str, Any], **options: Any) -> Runs:
    """A collator on every kind of input, and with compiled loops where numba is installed."""
    runs: Runs = {kind: partial(collator(0, **options), given) for kind, given in inputs.items()}
    if importlib.util.find_spec("numba"):
        fast = collator(0, compiled=True, **options)
        runs |= {f"{kind}, compiled": partial(fast, given) for kind, given in inputs.items()}
    return runs
