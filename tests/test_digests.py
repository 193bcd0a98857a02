"""Digests of 21 set-ups: dense fields, placement and metadata, to the bit.

A change that should leave batches alone leaves these alone. `python -m tests.test_digests` prints
them anew, for a change that should not.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.batch_samples import VISION
from torch_collate_kit import (
    Batch,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackedRows,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    PrefetchingSampler,
    RolloutCollator,
    TokenizedDataset,
)
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import stage_mini_batches

FIELDS = {
    "name": PerExample(str),
    "kind": PerToken(torch.int16, pad=-1),
    "old_logprobs": PerResponseToken(torch.float32),
}
STRATEGIES = ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential")


def lengths(seed: int, count: int, most: int) -> list[int]:
    """Many short and a few long ones, as of real data."""
    rng = random.Random(seed)
    return [1 + int(most * rng.random() ** 3) for _ in range(count)]


def examples(seed: int, count: int = 60, most: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for i, length in enumerate(lengths(seed, count, most)):
        prompt = rng.randrange(length)
        found.append(
            {
                "input_ids": [rng.randrange(3, 50_000) for _ in range(length)],
                "loss_mask": [rng.choice((1, 1, 0, 0.5)) for _ in range(length - prompt)],
                "weight": rng.choice((1, 0.25)),
                "name": f"example {i}",
                "kind": [rng.randrange(9) for _ in range(length)],
                "old_logprobs": [-rng.random() for _ in range(length - prompt)],
                "num_actions": length - prompt,
            }
        )
    return found


def plain(seed: int, count: int = 60, most: int = 60) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": e["input_ids"],
            "loss_mask": [int(t % 3 > 0) for t in e["input_ids"]],
        }
        for e in examples(seed, count, most)
    ]


def rollouts(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for i in range(24):
        response = rng.randrange(1, 20)
        found.append(
            {
                "prompt_ids": [rng.randrange(3, 999) for _ in range(1 + rng.randrange(15))],
                "response_ids": [rng.randrange(3, 999) for _ in range(response)],
                "loss_mask": [int(rng.random() < 0.8) for _ in range(response)],
                "rewards": rng.random(),
                "logprobs": [-rng.random() for _ in range(response)],
                "uid": f"prompt {i // 4}",
            }
        )
    return found


def pairs(seed: int, count: int = 20) -> list[dict[str, Any]]:
    """Two answers to a prompt, of which they share the tokens."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = [rng.randrange(3, 999) for _ in range(1 + rng.randrange(12))]
        answers = [[rng.randrange(3, 999) for _ in range(1 + rng.randrange(9))] for _ in "ab"]
        found.append(
            {
                "input_ids": [prompt + answer for answer in answers],
                "loss_mask": [[0] * len(prompt) + [1] * len(answer) for answer in answers],
            }
        )
    return found


def images(seed: int, count: int = 16) -> list[dict[str, Any]]:
    """Texts with none to two images; 7 is the placeholder."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        grids = [
            [1, 2 * rng.randrange(1, 3), 2 * rng.randrange(1, 3)] for _ in range(rng.randrange(3))
        ]
        ids = [rng.randrange(8, 999) for _ in range(1 + rng.randrange(9))]
        ids += [7] * sum(h * w // 4 for _, h, w in grids) + [9]
        patches = [[float(rng.randrange(9))] * 6 for _ in range(sum(h * w for _, h, w in grids))]
        shown: dict[str, Any] = {"pixel_values": None, "image_grid_thw": None}
        if grids:
            shown = {"pixel_values": patches, "image_grid_thw": grids}
        found.append({"input_ids": ids, "labels": ids, **shown})
    return found


def steps(sampler: Any, dataset: Any, collate: Any, count: int = 6) -> list[Batch]:
    """The first batches, of the next epoch, too, where one ends."""

    def parts() -> Iterator[Any]:
        while True:
            yield from sampler

    return [collate(dataset.__getitems__(part)) for part in islice(parts(), count)]


def of_ranks(collate: Any, data: Any, dp: int, **options: Any) -> list[Batch]:
    """What each rank reads."""
    found = []
    for rank in range(dp):
        sampler = PackedBatchSampler(data, collate, dp_rank=rank, seed=3, **options)
        found += steps(sampler, data, collate)
    return found


def mixture() -> Mixture:
    sources = [TokenizedDataset(plain(seed, 40)) for seed in (1, 2, 3)]
    return Mixture(sources, weights=[3, 2, 1], by="tokens", names=["web", "code", "math"])


def sharded() -> list[Batch]:
    collate = PackedCollator(0, max_tokens=96, parallel=ParallelLayout(cp=2), fields=FIELDS)
    batch = collate(examples(4))
    layouts = ("zigzag", "head_tail", "contiguous")
    return [batch.context_shard(rank, 2, layout=name) for name in layouts for rank in range(2)]


def streamed() -> list[Batch]:
    collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp=2))
    stream = PackedIterableDataset(plain(5), collate, batch_rows=4, buffer_size=20, dp_rank=0)
    return list(islice(iter(stream), 5))


def packed(strategy: str) -> list[Batch]:
    collate = PackedCollator(0, max_tokens=64, strategy=strategy, fields=FIELDS)
    return [collate(examples(6))]


def padded(side: str, **options: Any) -> list[Batch]:
    return [PaddedCollator(0, padding_side=side, fields=FIELDS, **options)(examples(7))]


def packed_rows() -> list[Batch]:
    collate = PackedCollator(0, max_tokens=64)
    rows = PackedRows(TokenizedDataset(plain(8)), collate)
    return [collate([rows[i], rows[i + 1]]) for i in range(0, len(rows) - 1, 2)]


def aligned() -> list[Batch]:
    layout = ParallelLayout(dp=2, tp=2, cp=2)
    collate = PackedCollator(0, max_tokens=128, parallel=layout, fixed_width=True, fields=FIELDS)
    batch = collate(examples(9))
    return [*batch.chunk(2), batch.pad_rows(multiple_of=8), batch[1:3]]


def by_rows(overflow: str) -> list[Batch]:
    collate = PackedCollator(
        0,
        max_tokens=48,
        overflow=overflow,
        parallel=ParallelLayout(dp=2),
        normalize_loss=overflow != "split",
    )
    return of_ranks(collate, TokenizedDataset(plain(10)), 2, batch_rows=4, window=2)


def wrapped() -> list[Batch]:
    collate = PackedCollator(
        SimpleNamespace(pad_token_id=0, eos_token_id=2),
        max_tokens=32,
        strategy="wrapped",
        normalize_loss=False,
    )
    documents = [{**e, "input_ids": [*e["input_ids"][:-1], 2]} for e in plain(11)]
    return of_ranks(collate, TokenizedDataset(documents), 1, batch_rows=3)


def trees(overflow: str, dp: int) -> list[Batch]:
    layout = ParallelLayout(dp=dp)
    options = PackingOptions(48, share_prefixes=True, overflow=overflow, parallel=layout)
    return [PackedCollator(0, packing=options)(pairs(12))]


def vision() -> list[Batch]:
    layout = ParallelLayout(dp=2)
    options = PackingOptions(32, parallel=layout, max_patches=40, dummy_image_tokens=1)
    collate = PackedCollator(0, packing=options, vision=VISION)
    return [collate(images(13)), PaddedCollator(0, vision=VISION)(images(14))]


def staged() -> list[Batch]:
    batch = RolloutCollator(0)(rollouts(17))
    return [part for parts in stage_mini_batches(batch, [0, 12, 24], 2) for part in parts]


def mixed_rows() -> list[Batch]:
    data = mixture()
    collate = PackedCollator(0, max_tokens=64, fields={"source": PerExample(str)})
    return of_ranks(collate, data, 1, batch_rows=3, window=2)


def mixed_examples() -> list[Batch]:
    data = mixture()
    sampler = PrefetchingSampler(data, batch_size=8, dp_rank=1, dp_size=2, tail="wrap")
    return steps(sampler, data, PaddedCollator(0))


SETUPS: dict[str, Callable[[], list[Batch]]] = {
    "padded left": lambda: padded("left"),
    "padded right, truncated": lambda: padded("right", max_length=24, overflow="truncate"),
    **{f"packed {name}": lambda name=name: packed(name) for name in STRATEGIES},
    "aligned, added rows, slices": aligned,
    "two ranks by examples": lambda: of_ranks(
        PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp=2)),
        TokenizedDataset(plain(15)),
        2,
        batch_size=16,
    ),
    "two ranks by rows": lambda: by_rows("drop"),
    "by rows, split": lambda: by_rows("split"),
    "wrapped": wrapped,
    "packed rows": packed_rows,
    "stream": streamed,
    "rollouts": lambda: [RolloutCollator(0)(rollouts(16))],
    "mini-batches": staged,
    "pairs": lambda: [PackedCollator(0, max_tokens=48)(pairs(18)), PaddedCollator(0)(pairs(19))],
    "trees": lambda: trees("raise", 2),
    "context shards": sharded,
    "vision": vision,
    "mixture by rows": mixed_rows,
    "mixture by examples": mixed_examples,
}


def readable(value: Any) -> Any:
    """A value as JSON has it, with the dtype and shape of an array."""
    if isinstance(value, Ragged):
        return ["ragged", str(value.values.dtype).removeprefix("torch."), value.tolist()]
    if hasattr(value, "tolist"):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {str(key): readable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, [readable(entry) for entry in value]]
    return value


def digest(batches: list[Batch]) -> str:
    """Of all dense fields and metadata; placement is in `example_indices` and its neighbours."""
    described = [
        {
            "fields": {name: readable(batch[name]) for name in batch},
            "row_metadata": readable(dict(batch.row_metadata)),
            "metadata": readable(dict(batch.metadata)),
        }
        for batch in batches
    ]
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


DIGESTS = {
    "padded left": "9dc28bbd9c9f78fd",
    "padded right, truncated": "784680f1c3d56835",
    "packed best_fit_decreasing": "b6d6b52dbb47f1df",
    "packed first_fit_decreasing": "12d63e920ef8244c",
    "packed balanced": "bc1800ab577c7b57",
    "packed sequential": "7e7a1bfec92cfd32",
    "aligned, added rows, slices": "817ed9b5368f6cb5",
    "two ranks by examples": "2ba5d80d7c44d34c",
    "two ranks by rows": "d2be7ef0a18b104f",
    "by rows, split": "319191df07af4fe6",
    "wrapped": "d88b5d16eed389e8",
    "packed rows": "288d68fc82a34291",
    "stream": "cde617ec75647652",
    "rollouts": "7fc78bca04545fe2",
    "mini-batches": "75ed558a908e9522",
    "pairs": "088bbaa0623200f4",
    "trees": "c6ab35a450b69404",
    "context shards": "3d8c0d641316bcf8",
    "vision": "98fccb5dff0a8188",
    "mixture by rows": "2f18427b96d92abe",
    "mixture by examples": "7badc88ad0993aa4",
}


@pytest.mark.parametrize("name", SETUPS)
def test_a_set_up_makes_the_batches_that_it_made(name: str) -> None:
    batches = SETUPS[name]()
    assert batches
    assert digest(batches) == DIGESTS[name]


if __name__ == "__main__":
    for name, make in SETUPS.items():
        print(f'    "{name}": "{digest(make())}",')
