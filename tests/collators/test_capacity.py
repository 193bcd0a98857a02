"""max_sequences_per_row with fixed_width: one shape of everything that a packed model reads."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from tests.building import packed_stream
from tests.conftest import DATA_FOLDER
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    TokenizedDataset,
    register_torch_varlen,
    token_loss,
)
from torch_collate_kit.ragged import Ragged

RNG = np.random.default_rng(0)
EXAMPLES = [{"input_ids": RNG.integers(1, 50, n).tolist()} for n in RNG.integers(3, 30, 150)]
ALL = "ALL_CASES" in os.environ  # of what is compiled: a minute
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")


def collator(most: int | None, width: int = 64, **options: Any) -> PackedCollator:
    own = {"fixed_width": True, "train_all": True, **options}
    parallel = own.pop("parallel", ParallelLayout())
    packing = PackingOptions(width, max_sequences_per_row=most, parallel=parallel)
    return PackedCollator(0, packing=packing, **own)


def by_rows(most: int | None, rows: int, examples: list[Any] = EXAMPLES) -> list[Batch]:
    collate, dataset = collator(most), TokenizedDataset(examples, train_all=True)
    sampler = PackedBatchSampler(dataset, collate, batch_rows=rows, dp_rank=0)
    return [collate(dataset.__getitems__(part)) for part in sampler]


def shape_of(batch: Any) -> tuple[Any, ...]:
    inputs = batch.model_inputs("torch_varlen")
    shapes = [v.shape if isinstance(v, torch.Tensor) else v for v in inputs.values()]
    return tuple(zip(inputs, shapes, strict=True))


def test_written_out() -> None:
    for lengths, bounds in (([3, 2], [0, 3, 5, 8]), ([8], [0, 8, 8, 8]), ([4, 4], [0, 4, 8, 8])):
        batch = collator(2, 8)([{"input_ids": [5] * n} for n in lengths])
        inputs = batch.model_inputs()
        assert batch.metadata["max_segments_per_row"] == 3
        assert inputs["cu_seq_lens_q"].tolist() == bounds
        assert inputs["cu_seq_lens_q"].dtype == torch.int32
        assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
        assert inputs["max_length_q"] == inputs["max_length_k"] == 8
        assert batch["cu_seq_lens"].tolist() == [list(dict.fromkeys(bounds))]  # stays ragged


def test_one_shape_by_rows_and_of_a_stream_also_in_the_last_step() -> None:
    batches = by_rows(7, 3)
    assert len(batches) > 8
    assert len({batch.model_inputs()["max_length_q"] for batch in by_rows(None, 3)}) > 1
    options: dict[str, Any] = {"fixed_width": True, "train_all": True, "buffer_size": 60}
    packing = PackingOptions(64, max_sequences_per_row=7)
    stream = list(packed_stream(EXAMPLES, rows=3, packing=packing, **options))
    assert sum(len(batch["sub_seq_lengths"].values) for batch in stream) == len(EXAMPLES)
    for found in (batches, stream):
        assert {shape_of(batch) for batch in found} == {shape_of(batches[0])}
        assert found[0].model_inputs()["cu_seq_lens_q"].shape == (3 * 8 + 1,)
        assert max(batch["sub_seq_lengths"].lengths.max() for batch in found) <= 7


def test_parts_keep_it_and_other_capacities_are_refused() -> None:
    batch = collator(4)(EXAMPLES[:40])
    singles = batch.split(1)
    assert {shape_of(row) for row in singles} == {shape_of(batch[:1])}
    parts: Any = ((batch[1:3], 2), (batch.select([0, 2, 0]), 3), (Batch.cat(singles), None))
    for rows, count in parts:
        count = len(batch) if count is None else count
        assert rows.model_inputs()["cu_seq_lens_q"].shape == (5 * count + 1,)
    assert batch[:0].model_inputs()["cu_seq_lens_q"].tolist() == [0]
    added = batch.pad_rows(multiple_of=len(batch) + 1)
    assert added.model_inputs()["cu_seq_lens_q"].shape == (5 * len(added) + 1,)
    other = collator(5)(EXAMPLES[:40])
    with pytest.raises(ValueError, match=r"metadata\['max_segments_per_row'\] is 5, 6; pass"):
        Batch.cat([batch, other])
    cells = Ragged(torch.arange(0, 65, 8, dtype=torch.int32).repeat(2), np.array([0, 9, 18]))
    message = (
        "cu_seq_lens has 16 segments, more than the 10 of 2 rows with "
        "metadata['max_segments_per_row']=5; replace it by fewer, or collate with a larger max_seq"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Batch(  # rebuilt, with other boundaries
            {**dict(batch[:2].items()), "cu_seq_lens": cells},
            row_metadata=batch[:2].row_metadata,
            metadata=batch.metadata,
        ).model_inputs()


def test_nothing_is_promised_without_both_options() -> None:
    for batch in (collator(None)(EXAMPLES[:9]), collator(4, fixed_width=False)(EXAMPLES[:9])):
        assert "max_segments_per_row" not in batch.metadata
    trees = PackingOptions(64, max_sequences_per_row=4, share_prefixes=True)
    pair = {"input_ids": [[5, 6], [5, 7]], "labels": [[-100, 6], [-100, 7]]}
    batch = PackedCollator(0, packing=trees, fixed_width=True)([pair])
    assert "max_segments_per_row" not in batch.metadata


@pytest.mark.parametrize(("cp", "most"), [(1, 6), (2, 5)])
def test_every_row_ends_with_what_it_had(cp: int, most: int) -> None:
    batch = collator(most, parallel=ParallelLayout(cp=cp))(EXAMPLES)
    flat = batch.model_inputs()["cu_seq_lens_q"]
    assert torch.unique(flat).tolist() == batch_bounds(batch)
    assert (torch.diff(flat) >= 0).all()
    assert len(flat) == len(batch) * (most + 1) + 1


def batch_bounds(batch: Batch) -> list[int]:
    width = batch["input_ids"].shape[1]
    return sorted(
        {row * width + n for row, of in enumerate(batch["cu_seq_lens"]) for n in of.tolist()}
    )


@pytest.mark.parametrize("case", ["mixers", "rocm"])
def test_it_stays_ragged_where_empty_segments_are_wrong(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention: Any = "flash_attention_2"
    if case == "mixers":
        attention = torch.nn.Module()
        attention.config = transformers.AutoConfig.for_model("qwen3_next")
        attention.config._attn_implementation = "torch_varlen"
    else:
        monkeypatch.setattr(torch.version, "hip", "7.2")
    batch = collator(4)(EXAMPLES[:6])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            inputs = batch.model_inputs(attention)
            assert inputs["cu_seq_lens_q"].tolist() == batch_bounds(batch)
    assert inputs["max_length_q"] < 64
    [record] = caplog.records
    reason = {"mixers": "qwen3_next models size their work", "rocm": "ROCm were NaN before"}[case]
    assert "stays ragged here" in record.getMessage()
    assert reason in record.getMessage()


def real_examples(count: int = 700 if ALL else 40) -> list[dict[str, Any]]:
    """Lengths of real conversations, an eighth of them, or made up ones."""
    path = Path(os.environ.get("TORCH_COLLATE_KIT_DATA", DATA_FOLDER))
    path = path / "lengths" / "gsm8k_train.qwen.npy"
    if not path.exists():
        return EXAMPLES[:count]
    lengths = np.minimum(np.load(path)[:count] // 8 + 1, 64)  # the longest would be refused
    return [{"input_ids": [5] * int(n)} for n in lengths]


def compiled_epoch(
    most: int | None, backend: str, *, dynamic: bool | None, with_loss: bool
) -> tuple[int, int]:
    """Return graphs after the first step and at the end; logits are those of the plain model."""
    register_torch_varlen()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation="torch_varlen",
    )  # fmt: skip
    torch.manual_seed(0)
    model, graphs = transformers.LlamaForCausalLM(config), list[int]()

    def step(inputs: dict[str, Any], labels: torch.Tensor, divisor: torch.Tensor) -> Any:
        logits = model(**inputs).logits
        if with_loss:
            return logits, token_loss(logits, labels, num_loss_tokens=divisor)
        return logits, logits.mean()

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend=backend, dynamic=dynamic)
    for batch in by_rows(most, 2, real_examples()):
        divisor = torch.tensor(batch.metadata["num_loss_tokens"])
        inputs = batch.model_inputs(model, labels=False)
        logits, loss = compiled(inputs, batch["labels"], divisor)
        loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            ragged = {**inputs, "max_length_q": 64, "max_length_k": 64}
            ragged |= dict.fromkeys(BOUNDS, torch.unique(inputs["cu_seq_lens_q"]))
            assert torch.equal(logits, model(**ragged).logits)
    assert len(graphs) > 3
    torch._dynamo.reset()
    return graphs[0], graphs[-1]


@pytest.mark.parametrize(
    ("backend", "dynamic", "with_loss"),
    [("eager", None, True), ("aot_eager", False, False)]
    + ALL * [("eager", False, True), ("aot_eager", None, True), ("aot_eager", False, True)],
)
def test_nothing_is_compiled_again(backend: str, dynamic: bool | None, with_loss: bool) -> None:
    first, last = compiled_epoch(7, backend, dynamic=dynamic, with_loss=with_loss)
    assert first == last


def test_without_a_capacity_it_is() -> None:
    first, last = compiled_epoch(None, "eager", dynamic=None, with_loss=False)
    assert first < last


# --- fixed_width alone: fields have one shape, boundaries do not


def shapes_of(batches: Iterable[Any]) -> set[Any]:
    return {
        tuple((name, v.shape) for name, v in batch.items() if isinstance(v, torch.Tensor))
        for batch in batches
    }


def test_fields_have_one_shape_in_single_rows_added_rows_and_streams_of_one_row() -> None:
    collate = collator(None)
    batches = [collate(EXAMPLES[i : i + 16]) for i in range(0, len(EXAMPLES), 16)]
    rows = [row for batch in batches for row in batch.split(1)]
    assert len(rows) > 30
    assert len(shapes_of(rows)) == 1
    assert len(shapes_of(row.model_inputs("sdpa") for row in rows)) == 1
    assert len(shapes_of(row.model_inputs("torch_varlen") for row in rows)) > 1
    assert len(shapes_of(batch.pad_rows(multiple_of=8) for batch in batches)) == 1
    options: dict[str, Any] = {"tokenizer": 0, "max_tokens": 64, "fixed_width": True}
    for rows_per_batch, shapes in ((1, 1), (3, 2)):  # the last of three has fewer
        examples = [*EXAMPLES, {"input_ids": [1] * 90}]  # dropped
        stream = packed_stream(examples, rows=rows_per_batch, overflow="drop", **options)
        assert len(shapes_of(stream)) == shapes
