"""Sources of columns for tests of streams: tables, chunks, datasets, in every form of target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.loading.streaming.streaming_oracle import datasets, make_examples
from torch_collate_kit.loading import TokenizedDataset

pa = pytest.importorskip("pyarrow")
FORMS = ("none", "loss_mask", "bools", "weights", "last tokens", "labels", "padding mask")
FORMS += ("weighted labels", "weighted")


def examples_of(form: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Arrays, with a target in every form."""
    rng = np.random.default_rng(len(lengths))
    examples: list[dict[str, Any]] = []
    for example in make_examples(lengths):
        ids = np.array(example["input_ids"], dtype=np.int32)
        n = len(ids)
        made: dict[str, Any] = {"input_ids": ids}
        if form == "last tokens":
            made["num_actions"] = int(rng.integers(0, n + 1))
            made["loss_mask"] = rng.integers(0, 2, made["num_actions"]).astype(np.int8)
        elif "labels" in form:
            made["labels"] = np.where(rng.random(n) < 0.5, ids, -100)
        elif form == "bools":
            made["completion_mask"] = rng.random(n) < 0.5
        elif form == "weights":
            made["loss_mask"] = rng.random(n).astype(np.float32)
        elif form == "padding mask":
            made["attention_mask"] = np.ones(n, dtype=np.int8)
        if "weighted" in form:
            made["weight"] = float(rng.integers(0, 4)) / 2
        if form in ("loss_mask", "padding mask"):
            made["loss_mask"] = rng.integers(0, 2, n).astype(np.int8)
        examples.append(made)
    return examples


def table_of(examples: list[dict[str, Any]], *, num_chunks: int = 1) -> Any:
    ragged = {
        name: [e[name] for e in examples] for name in (examples[0] if examples else ("input_ids",))
    }
    columns = {}
    for name, rows in ragged.items():
        number = {"num_actions": pa.int64(), "weight": pa.float64()}.get(name)
        kind = pa.list_(pa.int32()) if number is None else None
        if kind is not None and rows and len(flat := np.concatenate(rows)):
            kind = pa.list_(pa.from_numpy_dtype(flat.dtype))
        parts = np.array_split(np.arange(len(rows)), num_chunks)
        chunks = [pa.array([rows[i] for i in part], type=kind or number) for part in parts]
        columns[name] = pa.chunked_array(chunks)
    return pa.table(columns)


def permuted(examples: list[dict[str, Any]]) -> Any:
    """A datasets.Dataset whose rows lie in another order than they are given in."""
    order = np.random.default_rng(1).permutation(len(examples))
    mixed = datasets.Dataset(
        datasets.table.InMemoryTable(table_of([examples[i] for i in order] or examples))
    )
    return mixed.select(np.argsort(order)) if len(examples) else mixed


def dataset_of(examples: list[dict[str, Any]]) -> Any:
    return datasets.Dataset(datasets.table.InMemoryTable(table_of(examples)))


SOURCES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "table": lambda examples: TokenizedDataset(table_of(examples)),
    "chunks": lambda examples: TokenizedDataset(table_of(examples, num_chunks=3)),
    "dataset": dataset_of,
    "permuted": permuted,
    "with text": lambda examples: dataset_of(examples).add_column("text", ["x"] * len(examples)),
    "callable": lambda examples: lambda: TokenizedDataset(table_of(examples)),
}
