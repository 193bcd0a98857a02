"""What tests of streams share: examples, sources of every kind, the rule in a plain loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.loading.seals import resealed
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.packing.atoms import Atoms
from torch_collate_kit.packing.planner import plan_rows
from torch_collate_kit.packing.rank_plan import PlannedExamples
from torch_collate_kit.packing.steps import num_rows_needed, num_that_fit, plan_window

datasets = pytest.importorskip("datasets")
SETTINGS: dict[str, Any] = {"tokenizer": 0, "max_tokens": 12, "buffer_size": 7}


def make_examples(lengths: list[int], *, masks: bool = False) -> list[dict[str, Any]]:
    """Example i has the tokens 1000 * (i + 1), 1000 * (i + 1) + 1, ..."""
    examples = [
        {"input_ids": [1000 * (i + 1) + j for j in range(n)]} for i, n in enumerate(lengths)
    ]
    if masks:  # of every third token
        examples = [e | {"loss_mask": [int(t % 3 == 0) for t in e["input_ids"]]} for e in examples]
    return examples


LENGTHS = np.random.default_rng(0).integers(1, 9, size=43).tolist()
EXAMPLES = make_examples(LENGTHS)


class StatefulSource:
    """A list that can be put back to a place, and counts how often it was read."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples, self.start, self.next, self.num_reads = examples, 0, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.next, self.start = self.start, 0
        while self.next < len(self.examples):
            self.next += 1
            self.num_reads += 1
            yield self.examples[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


class Counted:
    """A source of ``examples`` that counts those that are alive, and the most there ever were."""

    class Example(dict[str, Any]):
        __hash__ = object.__hash__

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.examples, self.num_made, self.most = examples, 0, 0

    def __call__(self) -> Iterator[Example]:
        for example in self.examples:
            made = self.Example(example)
            self.alive.add(made)
            self.num_made += 1
            self.most = max(self.most, len(self.alive))
            yield made


def place_of(dataset: Any) -> dict[str, Any]:
    """Return the record of the only shard in the state of a stream, with its zeros."""
    ((_, record),) = dataset.state_dict()["shards"].items()
    return {"num_read": 0, "start": 0, "num_batches": 0, "num_given": 0} | record


def moved(state: dict[str, Any], source: Any = None, **place: int) -> dict[str, Any]:
    """Return the state of one shard with another place."""
    ((shard, record),) = state["shards"].items()
    if "num_batches" in place:
        place["num_given"] = place["num_batches"]
    sources = {} if source is None else {"sources": {shard: source}}
    return resealed(state, shards={shard: record | place}, **sources)


def tokens_of(batches: list[Any]) -> list[int]:
    """All real tokens, sorted."""
    real = [batch["input_ids"][batch["attention_mask"] == 1] for batch in batches]
    return sorted(torch.cat(real).tolist()) if real else []


def all_tokens(examples: list[dict[str, Any]]) -> list[int]:
    return sorted(token for example in examples for token in example["input_ids"])


def without_step(batch: Batch) -> Batch:
    """A stream does not know the tokens and cells of the whole step."""
    del batch.metadata["step_num_tokens"], batch.metadata["step_num_cells"]
    return batch


def plain_loop(
    examples: list[dict[str, Any]], collator: PackedCollator, buffer_size: int, num_rows: int
) -> list[Batch]:
    """Plan the beginning of the buffer that fills whole batches, and begin the next with the rest.

    How many fill it and which rows they make is held by the tests of packing.
    """
    packing, batches, rest = collator.packing, list[Batch](), list(examples)
    while rest:
        buffer = rest[:buffer_size]
        lengths = np.array([len(example["input_ids"]) for example in buffer])
        atoms = Atoms.of(lengths, None, packing)
        num_steps = num_rows_needed(atoms, packing) // num_rows
        if num_steps or packing.max_sequences_per_row is not None:
            number = len(buffer)
            if num_steps:
                number = num_that_fit(atoms, packing, num_steps * num_rows, more_follow=False)
            num_steps = max(1, num_steps)
            window = plan_window(
                atoms.take(np.arange(number)),
                packing,
                num_steps=num_steps,
                batch_rows=num_rows,
                group=packing.row_multiple,
            )
            steps = [window.step(step, packing) for step in range(num_steps)]
        else:
            number, steps = len(buffer), [(np.arange(len(buffer)), plan_rows(atoms, packing))]
        for chosen, plan in steps:
            batch = collator(PlannedExamples(plan, [buffer[i] for i in chosen.tolist()]))
            batches.append(without_step(batch))
        rest = rest[number:]
    return batches


def shard_by_generator(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from EXAMPLES[shard::6]


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: EXAMPLES,
    "callable": lambda: lambda: iter(EXAMPLES),
    "stateful": lambda: StatefulSource(EXAMPLES),
    "map-style": lambda: datasets.Dataset.from_list(EXAMPLES),
    "one shard": lambda: datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(),
    "shards": lambda: datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=4),
    "odd shards": lambda: datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=3),
    "generator": lambda: datasets.IterableDataset.from_generator(
        shard_by_generator, gen_kwargs={"shards": list(range(6))}
    ),
    "mapped": lambda: (
        datasets.Dataset.from_list(EXAMPLES)
        .to_iterable_dataset(num_shards=3)
        .map(
            lambda e: {"input_ids": [[*ids] for ids in e["input_ids"]]}, batched=True, batch_size=5
        )
        .filter(lambda e: e["input_ids"][0] >= 0)
    ),
    "shuffled": lambda: (
        datasets.Dataset.from_list(EXAMPLES)
        .to_iterable_dataset(num_shards=3)
        .shuffle(seed=1, buffer_size=10)
    ),
}
STREAMS = ("one shard", "shards", "odd shards", "generator", "mapped", "shuffled")
