"""What tests of streams share: examples, sources of every kind, the rule in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.loading.seals import resealed
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.packing import PackingOptions, ParallelLayout, pack

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


def place_of(dataset: Any) -> dict[str, Any]:
    """Return the position of the only shard in the state of a stream."""
    ((_, entry),) = dataset.state_dict()["shards"].items()
    return dict(zip(("num_read", "start", "num_batches"), entry, strict=False))


def moved(state: dict[str, Any], source: Any = None, **place: int) -> dict[str, Any]:
    """Return the state of one shard with another place."""
    ((shard, entry),) = state["shards"].items()
    counts = dict(zip(("num_read", "start", "num_batches"), entry, strict=False)) | place
    num_given = entry[3] if counts["num_batches"] == entry[2] else counts["num_batches"]
    shards = {shard: [*counts.values(), num_given]}
    sources = {} if source is None else {"sources": {shard: source}}
    return resealed(state, shards=shards, **sources)


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
    examples: list[dict[str, Any]],
    collator: PackedCollator,
    buffer_size: int,
    num_rows: int,
    following: Callable[[int, int], dict[str, Any] | None] | None = None,
) -> list[Batch]:
    """Give out full rows while a window of eight buffers lasts, then a beginning of the buffer.

    After the examples come those of ``following(batches, tokens in them)``, until None.
    """
    examples = list(examples)
    packing = collator.packing
    limit, align = packing.max_tokens, packing.parallel.align
    alone = PackingOptions(
        limit,
        strategy=packing.strategy.replace("balanced", "best_fit_decreasing"),  # levelled later
        parallel=ParallelLayout(tp=align),
        overflow=packing.overflow,
        max_sequences_per_row=packing.max_sequences_per_row,
    )
    batches: list[Batch] = []
    unread, buffer, held_back, num_read = list(range(len(examples))), [], set(), 0
    num_buffers = 1 if packing.strategy == "sequential" else 8

    def rows_of(waiting: list[int]) -> list[list[int]]:
        plan = pack([len(examples[i]["input_ids"]) for i in waiting], packing=alone)
        return [[waiting[j] for j in row] for row in plan.bins if row]

    def percent_free(row: list[int]) -> int:
        lengths = [min(len(examples[i]["input_ids"]), limit) for i in row]
        return (limit - sum(-(-n // align) * align for n in lengths)) * 100 // limit

    def give(rows: list[list[int]], among: list[int]) -> None:
        kept = {i for row in rows_of(among) for i in row}
        lost = [i for i in among if i not in kept]
        rows.sort(key=lambda row: row[0])
        for i in range(0, max(1, len(rows)), num_rows):
            members = sum(rows[i : i + num_rows], lost if i == 0 else [])
            batches.append(without_step(collator([examples[j] for j in sorted(members)])))
            buffer[:] = [j for j in buffer if j not in members]

    def full_rows() -> list[list[int]]:
        rows = sorted(rows_of(buffer), key=lambda row: (percent_free(row), row[0]))
        for most in range(num_rows, len(rows) - num_rows + 1, num_rows):
            if 3 * sum(map(len, rows[:most])) >= sum(map(len, rows)):
                return rows[:most]
        return []

    def beginning() -> list[int]:
        num_all = len(rows_of(buffer))
        for fewer in range(len(buffer) - 1, 0, -1):
            made = len(rows_of(buffer[:fewer]))
            if 0 < made < num_all and made % num_rows == 0:
                return buffer[:fewer]
        return list(buffer)

    def read_on() -> None:
        nonlocal num_read
        tokens_given = sum(len(e["input_ids"]) for e in examples) if following else 0
        tokens_given -= sum(len(examples[i]["input_ids"]) for i in buffer)
        while len(buffer) < buffer_size:
            if not unread and following:
                example = following(len(batches), tokens_given)
                if example is not None:
                    examples.append(example)
                    unread.append(len(examples) - 1)
            if not unread:
                return
            buffer.append(unread.pop(0))
            num_read += 1

    while read_on() or buffer:
        is_full = len(buffer) == buffer_size  # there may be more
        if is_full and num_read <= (num_buffers - 1) * buffer_size and (rows := full_rows()):
            give(rows, buffer)
            held_back = set(buffer)
        else:
            given = beginning() if is_full else list(buffer)
            give(rows_of(given), given)
            if not buffer or given[-1] not in held_back:
                held_back, num_read = set(), len(buffer)
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
