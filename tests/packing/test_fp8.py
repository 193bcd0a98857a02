"""Rows that fp8 kernels can compute: a rule about the tokens of a row on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    ParallelLayout,
    TokenizedDataset,
    pack,
    packing_report,
)

ALIGN = {"tensorwise": 16, "mxfp8": 32, "nvfp4": 64, "blockwise": 128}

# What kernels assert about "shard", a rank's tokens of a row after context and sequence
# parallelism, and "gathered", these tokens after the all-gather of sequence parallelism.
# Read in TransformerEngine 2.20, torchao 0.18, DeepGEMM, HybridEP and hipBLASLt.
Rule = Callable[[int, int], bool]
RULES: dict[str, tuple[Rule, ...]] = {
    "tensorwise": (
        lambda shard, gathered: shard % 8 == 0,  # TE, before the gather
        lambda shard, gathered: gathered % 16 == 0,  # TE on Hopper and torchao, weight gradient
    ),
    "mxfp8": (lambda shard, gathered: shard % 32 == 0,),  # TE's quantizer, torchao
    "nvfp4": (  # TE: the rule, the fast kernel, the fused Hadamard transform
        lambda shard, gathered: shard % 16 == 0,
        lambda shard, gathered: shard % 32 == 0,
        lambda shard, gathered: shard % 64 == 0,
    ),
    "blockwise": (
        lambda shard, gathered: shard % 8 == gathered % 16 == 0,  # TE
        lambda shard, gathered: shard % 128 == 0,  # TE without a bf16 gather, HybridEP
        lambda shard, gathered: gathered % 128 == 0,  # torchao, DeepGEMM K-grouped
    ),
}


def layout_of(rng: np.random.Generator, fp8: str | None) -> ParallelLayout:
    sizes = {name: int(rng.choice([1, 1, 2, 3, 4, 8])) for name in ("dp", "tp", "cp")}
    return ParallelLayout(**sizes, fp8=cast(Any, fp8))


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.release)])
def test_no_rule_of_a_kernel_is_broken_in_random_layouts(number: int) -> None:
    rng = np.random.default_rng(0)
    num_checked = 0
    for case in range(number):
        fp8 = list(ALIGN)[case % 4]
        layout = layout_of(rng, fp8)
        least = layout.row_align
        packing = PackingOptions(
            max_tokens=int(rng.integers(least, 5 * least)),
            strategy=("balanced", "sequential", None)[case % 3],
            parallel=layout,
            overflow="drop",
        )
        assert packing.capacity % least == 0
        assert 0 <= packing.max_tokens - packing.capacity < least
        lengths = rng.integers(1, packing.capacity, int(rng.integers(1, 6)))
        plan = pack(lengths, packing=packing)
        for width in (plan.width, packing.capacity):
            assert width <= packing.max_tokens
            cells = width * int(rng.integers(1, 4))  # of any number of rows
            shard, left = divmod(cells, layout.cp * layout.tp)
            assert left == 0
            assert cells % layout.align == 0
            assert all(rule(shard, shard * layout.tp) for rule in RULES[fp8]), (layout, width)
            num_checked += 1
        assert plan.row_cells.max(initial=0) <= packing.capacity
        assert plan.packing.parallel.align == ParallelLayout(tp=layout.tp, cp=layout.cp).align
    assert num_checked == 2 * number


def test_the_tail_is_one_segment_and_segments_keep_their_multiple() -> None:
    examples = [{"input_ids": list(range(1, n + 1))} for n in (100, 61, 200)]
    layout = ParallelLayout(cp=2, fp8="blockwise")
    assert (layout.align, layout.row_align) == (4, 256)
    options: dict[str, Any] = {"max_tokens": 1100, "strategy": "sequential", "parallel": layout}
    batch = PackedCollator(0, **options)(examples)
    assert batch["cu_seq_lens"].tolist() == [[0, 100, 164, 364, 512]]
    assert batch["position_ids"][0, 364:].tolist() == list(range(148))
    assert batch["loss_mask"][0, 363:].eq(0).all()
    for rank in range(2):
        assert batch.context_shard(rank, 2)["input_ids"].shape == (1, 256)
    fixed = PackedCollator(0, **options, fixed_width=True)(examples)
    assert fixed["cu_seq_lens"].tolist() == [[0, 100, 164, 364, 1024]]


def batches_of(kind: str, layout: ParallelLayout) -> Iterator[Batch]:
    """Batches of rows that are planned, filled, shared, added and padded in every way."""
    examples = [{"input_ids": [5] * n} for n in (70, 9, 33, 41, 90, 18, 55, 7, 62, 88, 20)]
    options: dict[str, Any] = {"max_tokens": 300, "parallel": layout, "train_all": True}
    if kind in ("rows", "examples"):
        dataset, collate = TokenizedDataset(examples), PackedCollator(0, **options)
        size = {"batch_rows": 2} if kind == "rows" else {"batch_size": 4}
        for rank in range(2):
            for part in PackedBatchSampler(dataset, collate, **size, dp_rank=rank):
                yield collate(part.with_examples([examples[i] for i in part.indices]))
    elif kind == "stream":
        collate = PackedCollator(0, **options)
        yield from PackedIterableDataset(examples, collate, batch_rows=2, dp_rank=1, buffer_size=4)
    else:  # of one example for two ranks
        for is_fixed in (False, True):
            yield PackedCollator(0, fixed_width=is_fixed, **options)(examples[:1])[1:]


@pytest.mark.parametrize("kind", ["rows", "examples", "stream", "added"])
def test_all_rows_have_the_multiple(kind: str) -> None:
    layout = ParallelLayout(dp=2, tp=2, fp8="mxfp8")
    batches = list(batches_of(kind, layout))
    assert batches
    for batch in batches:
        width = int(batch["input_ids"].shape[1])
        assert width % layout.row_align == 0
        assert 0 < width <= 300


def test_rows_with_images_have_the_multiple() -> None:
    layout = ParallelLayout(dp=2, fp8="nvfp4")
    packing = PackingOptions(300, parallel=layout, dummy_image_tokens=20, max_patches=100)
    plan = pack([100, 230, 30, 80, 120], packing=packing, patches=[64, 0, 0, 0, 0])
    assert plan.needs_dummy_image.any()
    assert (plan.width, packing.capacity, packing.capacity - packing.reserved) == (256, 256, 236)


def test_a_plan_without_the_multiple_is_refused() -> None:
    plain = PackedCollator(0, max_tokens=300)
    fp8 = PackedCollator(0, max_tokens=300, parallel=ParallelLayout(fp8="mxfp8"))
    for made, reads in ((plain, fp8), (fp8, plain)):
        part = next(iter(PackedBatchSampler([20], made, batch_rows=1, num_loss_tokens=[19])))
        with pytest.raises(ValueError, match=r"planned for .*'row_align': .*'row_align': "):
            reads(part.with_examples([{"input_ids": [5] * 20}]))


@pytest.mark.parametrize(
    ("fp8", "words"), [(True, "got True: "), (False, "got False"), ("fp8", "'fp8'"), (16, "16")]
)
def test_what_is_no_recipe_lists_the_four(fp8: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ParallelLayout(fp8=fp8)
    assert all(name in str(caught.value) for name in (*ALIGN, "multiple of 16 * cp"))


def test_rows_that_cannot_hold_a_multiple_are_refused() -> None:
    layout = ParallelLayout(tp=8, cp=8, fp8="blockwise")
    with pytest.raises(ValueError, match="max_tokens must be at least row_align=8192, got 8191"):
        PackingOptions(8191, parallel=layout)
    plan = pack([3000, 5000, 8191], 20_000, parallel=layout)
    planned = plan.packing.parallel
    assert (plan.width, planned.align, planned.row_align) == (16_384, 128, 8192)
    rows = ParallelLayout(fp8="mxfp8")
    assert PackingOptions(96, strategy="wrapped", parallel=rows).capacity == 96
    with pytest.raises(ValueError, match=r"row_align=32 \(fp8='mxfp8'\); pass max_tokens=96"):
        PackingOptions(100, strategy="wrapped", parallel=rows)
    with pytest.raises(ValueError, match=r"leaves no gaps, .* without tp and cp"):
        PackingOptions(96, strategy="wrapped", parallel=ParallelLayout(tp=2, fp8="mxfp8"))


def test_options_come_back_from_their_state() -> None:
    rng = np.random.default_rng(1)
    for number in range(200):
        layout = layout_of(rng, [None, *ALIGN][number % 5])
        packing = PackingOptions(3 * layout.row_align + 1, parallel=layout)
        state = packing.as_state()
        again = PackingOptions.from_state(state)
        assert again.as_state() == state
        assert again.capacity == packing.capacity
        lengths = rng.integers(1, packing.capacity, 20)
        plans = [pack(lengths, packing=of) for of in (packing, again)]
        assert plans[0].width == plans[1].width
        assert plans[0].row_offsets.tolist() == plans[1].row_offsets.tolist()


@pytest.mark.parametrize("fp8", ALIGN)
def test_fp8_adds_little_to_the_pads_of_real_rows(fp8: Any, shared_data: Path) -> None:
    lengths = np.load(shared_data / "lengths" / "mix_all.qwen.npy")[:5000]
    padding = []
    for layout in (ParallelLayout(), ParallelLayout(fp8=fp8)):
        options: dict[str, Any] = {"parallel": layout, "overflow": "drop"}
        collate = PackedCollator(0, max_tokens=8192, normalize_loss=False, **options)
        plans = [part.plan for part in PackedBatchSampler(lengths, collate, batch_rows=4)]
        cells = sum(plan.num_rows * plan.width for plan in plans)
        padding.append(1 - sum(int(plan.lengths.sum()) for plan in plans) / cells)
    assert 0 <= padding[1] - padding[0] <= 0.006


def test_the_report_has_both_multiples() -> None:
    layout = ParallelLayout(tp=2, fp8="mxfp8")
    report = packing_report([50, 60, 70], 200, parallel=layout, show=False)
    assert (report["options"]["align"], report["options"]["row_align"]) == (2, 64)
    assert "examples aligned to 2 tokens\nfp8: the width of rows is a multiple of 64 cells" in str(
        report
    )
    cells = {c["strategy"]: c["num_cells"] for c in report["candidates"]}
    assert cells["padded"] == 3 * 128  # pad_to_multiple_of=layout.row_align
    assert cells["best_fit_decreasing"] == 192
