"""Reprs of what is configured: the call that makes it, without defaults, and where it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Qwen2VLProcessor

import torch_collate_kit
from tests.batch_samples import VISION
from tests.vision.processors import qwen
from torch_collate_kit import (
    ChatOptions,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    PaddedCollator,
    ParallelLayout,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
    VisionLanguageCollator,
    pack,
)
from torch_collate_kit.loading import AsyncBatchCollator

EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
TWO_RANKS = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(dp=2))
PROCESSOR = qwen(Qwen2VLProcessor, 14)
NAMES = {**vars(torch_collate_kit), "torch": torch, "VisionLayout": type(VISION)}
CALLS = [
    "PaddedCollator(0)",
    "PaddedCollator(3, padding_side='right', pad_to_multiple_of=8, normalize_loss=False)",
    "PaddedCollator(0, train_all=True, fields={'t': PerToken(dtype=torch.int8, pad=3, shape=())})",
    "PackedCollator(0, max_tokens=4096)",
    "PackedCollator(0, max_tokens=8, strategy='sequential', parallel=ParallelLayout(dp=2))",
    "PackedCollator(0, packing=PackingOptions(max_tokens=8, balance=None), fixed_width=True)",
    f"PackedCollator(0, max_tokens=8, vision={VISION!r})",
    "RolloutCollator(0, max_length=9, overflow='drop')",
    "PackingOptions(max_tokens=8, balance=None, cost=ModelCost(vision_linear=1))",
    "ParallelLayout(tp=2, fp8='mxfp8')",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_repr_is_the_call_that_makes_it(call: str) -> None:
    assert repr(eval(call, NAMES)) == call


ASKED: list[int] = []  # epochs whose order was asked for


def order(epoch: int, rng: np.random.Generator) -> Any:
    ASKED.append(epoch)
    return rng.permutation(10)


def stream(data: Any, collate: Any = TWO_RANKS, **options: Any) -> PackedIterableDataset:
    return PackedIterableDataset(data, collate, batch_rows=4, **options)


START = " [next iter(): epoch 0, step 0]"
TWO = "PackedCollator(0, max_tokens=8, parallel=ParallelLayout(dp=2))"
SHOWN: list[tuple[Any, str]] = [
    (PackedCollator(0, packing=PackingOptions(8, overflow="drop")),
     "PackedCollator(0, max_tokens=8, overflow='drop')"),
    (PaddedCollator(0).for_trainer(), "PaddedCollator(0).for_trainer()"),
    (pack([5, 3, 9, 2], 10), "PackingPlan(4 examples; 19 tokens in 2 rows of 10 cells, "
     "efficiency 95.00%, max_tokens=10)"),
    (pack([5, 9, 2], 6, overflow="split", parallel=ParallelLayout(dp=2)), "PackingPlan(4 pieces, "
     "1 cut; 16 tokens in 4 rows of 6 cells for 2 ranks, efficiency 66.67%, max_tokens=6)"),
    (PrefetchingSampler(10, batch_size=4, seed=3, shuffle=False, tail="drop", order=order,
                        dp_rank=1, dp_size=2),
     "PrefetchingSampler(10, batch_size=4, shuffle=False, seed=3, tail='drop', order=<order>, "
     "dp_rank=1, dp_size=2)" + START),
    (PackedBatchSampler([3, 1, 4, 2], TWO_RANKS, batch_size=4, dp_rank=1,
                        num_loss_tokens=[1, 0, 1, 1]),
     f"PackedBatchSampler(<4 lengths, 10 tokens>, {TWO}, batch_size=4, "
     "num_loss_tokens=<ndarray of 4>, dp_rank=1)" + START),
    (Mixture([100, 10], weights=[0.3, 0.7], stop="all_exhausted"),
     "Mixture([100, 10], weights=['3/10', '7/10'], stop='all_exhausted')"),
    (TokenizedDataset([{"input_ids": [7] * 600, "labels": [7] * 600}] * 4),
     "TokenizedDataset(4 examples, 2,400 tokens; input_ids, labels)"),
    (TokenizedDataset(EXAMPLES, train_all=True, vision=VISION),
     f"TokenizedDataset(2 examples, 4 tokens; input_ids, train_all=True, vision={VISION!r})"),
    (stream(EXAMPLES, dp_rank=1),
     f"PackedIterableDataset(<list of 2>, {TWO}, batch_rows=4, dp_rank=1)"),
    (stream(TokenizedDataset(EXAMPLES)), "PackedIterableDataset(<TokenizedDataset of 2>, "),
    (VisionLanguageCollator(PROCESSOR, max_tokens=64, max_patches=32, require_images="all",
                            chat=ChatOptions(train_on="last", max_length=9)),
     "VisionLanguageCollator(<Qwen2VLProcessor>, max_tokens=64, max_patches=32, "
     "chat=ChatOptions(train_on='last', max_length=9), require_images='all')"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), SHOWN, ids=[text[:40] for _, text in SHOWN])
def test_what_has_data_or_a_position_names_them(made: Any, expected: str) -> None:
    assert repr(made) == expected or (expected.endswith(" ") and repr(made).startswith(expected))


def test_a_sampler_that_was_moved_names_its_place() -> None:
    sampler = PrefetchingSampler(10, batch_size=4)
    sampler.set_epoch(2, step=1)
    assert repr(sampler).endswith("[next iter(): epoch 2, step 1]")
    ordered = PrefetchingSampler(10, batch_size=4, order=order)
    ordered.set_epoch(5)
    ASKED.clear()
    assert repr(ordered).endswith("order=<order>) [next iter(): epoch 5, step 0]")
    assert ASKED == []


def test_loaders_name_their_place() -> None:
    sampler = PrefetchingSampler(5, batch_size=2, shuffle=False)
    data = DataLoader(range(5), batch_sampler=sampler, collate_fn=len)
    with PrefetchLoader(data, prefetch=False, device="meta") as loader:
        assert repr(loader) == (
            "PrefetchLoader(DataLoader(<range of 5>, batch_sampler=PrefetchingSampler(5, "
            "batch_size=2, shuffle=False)), prefetch=False, device='meta') [epoch 0, step 0]"
        )
    with PrefetchLoader(data) as loader:
        for step, _ in enumerate(loader.steps(4)):
            assert repr(loader).endswith(f"[epoch {step // 3}, step {step % 3 + 1}]")
    assert repr(loader).endswith("[closed]")


def test_an_async_collator_names_what_it_holds() -> None:
    with AsyncBatchCollator(abs) as collator:
        assert repr(collator) == "AsyncBatchCollator(<abs>) [empty]"
        collator.submit(3)
        states = ("[builds step 3]", "[holds step 3]")
        assert repr(collator) in [f"AsyncBatchCollator(<abs>) {state}" for state in states]
        assert collator.get(3) == 3
    assert repr(collator) == "AsyncBatchCollator(<abs>) [shut down]"
