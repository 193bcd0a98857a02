"""Reprs of what is configured: the call that makes it, without defaults, and where it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Qwen2VLProcessor

import torch_collate_kit
from tests.batch_samples import DECLARED, VISION
from tests.vision.processors import qwen
from torch_collate_kit import (
    ChatOptions,
    MixedSampler,
    ModelCost,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    PaddedCollator,
    ParallelLayout,
    PrefetchingSampler,
    PrefetchLoader,
    RolloutCollator,
    TokenizedDataset,
    VisionLanguageCollator,
    pack,
)
from torch_collate_kit.loading import AsyncBatchCollator
from torch_collate_kit.vision import VisionLayout

EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]


def source() -> Any:
    return iter(EXAMPLES)


def order(epoch: int, rng: np.random.Generator) -> Any:
    return rng.permutation(10)


CALLS: dict[str, Any] = {  # each is what it says
    "PaddedCollator(0)": PaddedCollator(0),
    "PaddedCollator(3, padding_side='right', pad_to_multiple_of=8, normalize_loss=False)": (
        PaddedCollator(3, padding_side="right", pad_to_multiple_of=8, normalize_loss=False)
    ),
    "PaddedCollator(0, max_length=9, train_all=True, fields={'type': PerToken(dtype=torch.int8, "
    "pad=3)})": PaddedCollator(0, max_length=9, train_all=True, fields={"type": DECLARED["type"]}),
    "PackedCollator(0, max_tokens=4096)": PackedCollator(0, max_tokens=4096),
    "PackedCollator(0, max_tokens=8, strategy='balanced', parallel=ParallelLayout(dp=2), "
    "train_all=True)": PackedCollator(
        0, max_tokens=8, strategy="balanced", parallel=ParallelLayout(dp=2), train_all=True
    ),
    "PackedCollator(0, max_tokens=8, overflow='drop', fixed_width=True)": PackedCollator(
        0, packing=PackingOptions(8, overflow="drop"), fixed_width=True
    ),
    "PackedCollator(0, packing=PackingOptions(max_tokens=8, balance=None), fixed_width=True)": (
        PackedCollator(0, packing=PackingOptions(8, balance=None), fixed_width=True)
    ),
    "PackedCollator(0, max_tokens=8, vision=VisionLayout(family_name="
    "'qwen3_vl', image_token_id=7, merge_size=2, patch_shape=(3, 2, 1)))": PackedCollator(
        0, max_tokens=8, vision=VISION
    ),
    "RolloutCollator(0)": RolloutCollator(0),
    "RolloutCollator(0, max_length=9, overflow='drop')": RolloutCollator(
        0, max_length=9, overflow="drop"
    ),
    "PackingOptions(max_tokens=8)": PackingOptions(8),
    "PackingOptions(max_tokens=8, balance=None, cost=ModelCost(vision_linear=1))": PackingOptions(
        8, balance=None, cost=ModelCost(vision_linear=1)
    ),
    "ParallelLayout()": ParallelLayout(),
    "ParallelLayout(tp=2, fp8=True)": ParallelLayout(tp=2, fp8=True),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_repr_is_the_call_that_makes_it(call: str) -> None:
    assert repr(CALLS[call]) == call
    names = {**vars(torch_collate_kit), "torch": torch, "VisionLayout": VisionLayout}
    made = eval(call, names)
    assert repr(made) == call
    assert {k: v for k, v in vars(made).items() if k != "packing"} == {
        k: v for k, v in vars(CALLS[call]).items() if k != "packing"
    }
    assert getattr(made, "packing", None) == getattr(CALLS[call], "packing", None)


def test_a_collator_for_trainer_says_what_it_was_made_of() -> None:
    assert repr(PaddedCollator(0).for_trainer()) == "PaddedCollator(0).for_trainer()"


def test_plans() -> None:
    assert repr(pack([5, 3, 9, 2], 10)) == (
        "PackingPlan(4 examples; 19 tokens in 2 rows of 10 cells, efficiency 95.00%, max_tokens=10)"
    )
    assert repr(pack([5, 9, 2], 6, overflow="split", parallel=ParallelLayout(dp=2))) == (
        "PackingPlan(4 pieces, 1 cut; 16 tokens in 4 rows of 6 cells for 2 ranks, efficiency "
        "66.67%, max_tokens=6)"
    )
    assert "PackingPlan(1 example, 2 dropped; 2 tokens in 1 rows" in repr(
        pack([5, 9, 2], 4, overflow="drop")
    )


def test_samplers_say_where_they_stand() -> None:
    sampler = PrefetchingSampler(10, batch_size=4)
    assert repr(sampler) == "PrefetchingSampler(10, batch_size=4) [next iter(): epoch 0, step 0]"
    sampler.set_epoch(2, step=1)
    assert repr(sampler).endswith("[next iter(): epoch 2, step 1]")
    ranked = PrefetchingSampler(
        10, batch_size=4, seed=3, shuffle=False, tail="drop", order=order, dp_rank=1, dp_size=2
    )
    assert repr(ranked) == (
        "PrefetchingSampler(10, batch_size=4, shuffle=False, seed=3, tail='drop', order=<order>, "
        "dp_rank=1, dp_size=2) [next iter(): epoch 0, step 0]"
    )
    packed = PackedBatchSampler(
        [3, 1, 4, 2],
        PackedCollator(0, max_tokens=8, parallel=ParallelLayout(dp=2)),
        batch_size=4,
        dp_rank=1,
        num_loss_tokens=[1, 0, 1, 1],
    )
    assert repr(packed) == (
        "PackedBatchSampler(<4 lengths, 10 tokens>, PackedCollator(0, max_tokens=8, "
        "parallel=ParallelLayout(dp=2)), batch_size=4, num_loss_tokens=<ndarray of 4>, dp_rank=1) "
        "[next iter(): epoch 0, step 0]"
    )
    with_images = PackedBatchSampler(
        [3, 1], PackedCollator(0, max_tokens=8), batch_size=2, patches=[[4], []]
    )
    assert "patches=<ndarray of 2>" in repr(with_images)
    mixed = MixedSampler(
        [100, 10], batch_size=4, weights=[0.3, 0.7], stop="all", dp_rank=1, dp_size=2
    )
    assert repr(mixed) == (
        "MixedSampler([100, 10], batch_size=4, weights=[3, 7], stop='all', dp_rank=1, dp_size=2) "
        "[next iter(): epoch 0, step 0]"
    )
    lengths = [[1] * 5, [2] * 5]
    by_tokens = MixedSampler(
        [5, 5], batch_size=2, by="tokens", lengths=lengths, num_steps=3, seed=1
    )
    assert "seed=1, weights=[1, 2], by='tokens', num_steps=3)" in repr(by_tokens)


def test_a_repr_does_not_ask_for_an_order() -> None:
    calls = []

    def counted(epoch: int, rng: np.random.Generator) -> Any:
        calls.append(epoch)
        return range(10)

    sampler = PrefetchingSampler(10, batch_size=4, order=counted)
    sampler.set_epoch(5)
    calls.clear()
    assert "test_a_repr_does_not_ask_for_an_order.<locals>.counted" in repr(sampler)
    assert calls == []


def test_datasets_say_what_they_hold() -> None:
    assert repr(TokenizedDataset(EXAMPLES)) == "TokenizedDataset(2 examples, 4 tokens; input_ids)"
    labelled = [{"input_ids": [7] * 600, "labels": [7] * 600}] * 4
    assert repr(TokenizedDataset(labelled)) == (
        "TokenizedDataset(4 examples, 2,400 tokens; input_ids, labels)"
    )
    images = TokenizedDataset(EXAMPLES, train_all=True, vision=VISION)
    assert repr(images).endswith(
        "4 tokens; input_ids, train_all=True, vision=" + repr(VISION) + ")"
    )
    streams = {
        "<list of 2>": EXAMPLES,
        "<TokenizedDataset of 2>": TokenizedDataset(EXAMPLES),
        "<source>": source,
    }
    for shown, given in streams.items():
        stream = PackedIterableDataset(given, PackedCollator(3, max_tokens=8, overflow="split"))
        assert repr(stream) == (
            f"PackedIterableDataset({shown}, PackedCollator(3, max_tokens=8, overflow='split'), "
            "batch_rows=1)"
        )
    ranked = PackedIterableDataset(
        EXAMPLES,
        PackedCollator(0, max_tokens=8, parallel=ParallelLayout(dp=2), fixed_width=True),
        batch_rows=4,
        dp_rank=1,
    )
    assert repr(ranked) == (
        "PackedIterableDataset(<list of 2>, PackedCollator(0, max_tokens=8, "
        "parallel=ParallelLayout(dp=2), fixed_width=True), batch_rows=4, dp_rank=1)"
    )


def test_loaders_say_where_they_stand() -> None:
    def loader(**options: Any) -> PrefetchLoader:
        sampler = PrefetchingSampler(5, batch_size=2, shuffle=False)
        return PrefetchLoader(
            DataLoader(EXAMPLES * 2 + EXAMPLES[:1], batch_sampler=sampler, collate_fn=len),
            **options,
        )

    with loader(prefetch=False, device="meta") as prefetching:
        call = (
            "PrefetchLoader(DataLoader(<list of 5>, batch_sampler=PrefetchingSampler(5, "
            "batch_size=2, shuffle=False)), prefetch=False, device='meta')"
        )
        assert repr(prefetching) == f"{call} [epoch 0, step 0]"
    with loader() as prefetching:
        for step, _ in enumerate(prefetching.steps(4)):
            where = f"[epoch {(step + 0) // 3}, step {step % 3 + 1}]"
            assert repr(prefetching).endswith(where)
        assert repr(prefetching).endswith("[epoch 1, step 1]")
    assert repr(prefetching).endswith("[closed]")


def test_an_async_collator_says_what_it_holds() -> None:
    collator = AsyncBatchCollator(lambda step: step)
    with collator:
        shown = "AsyncBatchCollator(<test_an_async_collator_says_what_it_holds.<locals>.<lambda>>)"
        assert repr(collator) == f"{shown} [empty]"
        collator.submit(3)
        assert repr(collator) in (f"{shown} [builds step 3]", f"{shown} [holds step 3]")
        assert collator.get(3) == 3
    assert repr(collator) == f"{shown} [shut down]"


def test_a_vision_language_collator() -> None:
    processor = qwen(Qwen2VLProcessor, 14)
    assert repr(VisionLanguageCollator(processor)) == "VisionLanguageCollator(<Qwen2VLProcessor>)"
    packing = VisionLanguageCollator(
        processor,
        max_tokens=64,
        max_patches=32,
        require_images="all",
        chat=ChatOptions(train_on="last", max_length=9),
    )
    assert repr(packing) == (
        "VisionLanguageCollator(<Qwen2VLProcessor>, max_tokens=64, max_patches=32, "
        "chat=ChatOptions(train_on='last', max_length=9), require_images='all')"
    )
    padding = VisionLanguageCollator(processor, padding_side="right", pixel_dtype="bfloat16")
    assert repr(padding) == (
        "VisionLanguageCollator(<Qwen2VLProcessor>, padding_side='right', pixel_dtype='bfloat16')"
    )
