"""Batch: what a model is given."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged

VARLEN = ("torch_varlen", "flash_attention_3", "flash_attention_4", "kernels-community/flash-attn2")
MASKED = ("sdpa", "eager", "flex_attention")

ALWAYS = ["input_ids", "position_ids", "labels", "use_cache"]
CU = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]


@pytest.mark.parametrize("attention", VARLEN)
def test_packed_rows_for_varlen_attention(packed: Batch, attention: str) -> None:
    inputs = packed.model_inputs(attention)
    assert list(inputs) == list(packed.model_inputs())
    assert list(inputs) == [*ALWAYS[:3], "use_cache", *CU]
    assert inputs["use_cache"] is False
    assert inputs["input_ids"].data_ptr() == packed["input_ids"].data_ptr()
    assert inputs["labels"].data_ptr() == packed["labels"].data_ptr()
    assert inputs["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 0],
        [0, 1, 2, 3, 4, 0, 1, 2],
        [0, 1, 2, 3, 0, 1, 0, 1],
    ]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert inputs[name].dtype == torch.int32
        assert inputs[name].tolist() == [0, 7, 8, 13, 16, 20, 22, 24]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (7, 7)
    assert type(inputs["max_length_q"]) is int
    without = packed.model_inputs(attention, labels=False)
    assert list(without) == [name for name in inputs if name != "labels"]


@pytest.mark.parametrize("attention", VARLEN + MASKED)
def test_padded_rows_come_with_their_mask(padded: Batch, attention: str) -> None:
    inputs = padded.model_inputs(attention)
    assert list(inputs) == [*ALWAYS, "attention_mask"]
    assert inputs["attention_mask"] is padded["attention_mask"]


@pytest.mark.parametrize("attention", VARLEN + MASKED)
def test_a_dict_of_attention_means_that_of_the_text(packed: Batch, attention: str) -> None:
    parts = {"text_config": attention, "vision_config": "sdpa"}
    assert list(packed.model_inputs(parts)) == list(packed.model_inputs(attention))
    if attention == "sdpa":
        masked = packed.model_inputs(parts, mask="block")["attention_mask"]
        assert torch.equal(masked, packed.model_inputs("sdpa", mask="block")["attention_mask"])


def test_boundaries_of_slices_and_selections_by_hand(packed: Batch) -> None:
    by_hand: list[tuple[Batch, list[int], int]] = [
        (packed[:1], [0, 7, 8], 7),
        (packed[1:], [0, 5, 8, 12, 14, 16], 5),
        (packed[2:], [0, 4, 6, 8], 4),
        (packed[::2], [0, 7, 8, 12, 14, 16], 7),
        (packed.chunk(3)[1], [0, 5, 8], 5),
        (packed.select([2, 0]), [0, 4, 6, 8, 15, 16], 7),
        (packed.select([1, 1, 2]), [0, 5, 8, 13, 16, 20, 22, 24], 5),
        (Batch.cat([packed[2:], packed[1:2]]), [0, 4, 6, 8, 13, 16], 5),
        (packed[1:][1:], [0, 4, 6, 8], 4),
        (packed[:2].pad_rows(multiple_of=3), [0, 7, 8, 13, 16, 23, 24], 7),
        (pickle.loads(pickle.dumps(packed[1:])), [0, 5, 8, 12, 14, 16], 5),
    ]
    for batch, boundaries, longest in by_hand:
        inputs = batch.model_inputs()
        assert inputs["cu_seq_lens_q"].tolist() == boundaries
        assert inputs["cu_seq_lens_q"].dtype == torch.int32
        assert inputs["max_length_k"] == longest
    assert packed["cu_seq_lens"].tolist() == [[0, 7, 8], [0, 5, 8], [0, 4, 6, 8]]  # unchanged


def test_more_cells_than_int32_counts_are_refused() -> None:
    """The boundaries wrapped; tensors that are expanded take no memory."""
    rows, width = 70_000, 32_768
    cells = torch.zeros(1, 1, dtype=torch.int64).expand(rows, width)
    boundaries = Ragged(
        torch.tensor([0, width] * rows, dtype=torch.int32), np.arange(0, 2 * rows + 1, 2)
    )
    fields = {"input_ids": cells, "position_ids": cells, "cu_seq_lens": boundaries}
    batch = Batch(fields, row_metadata={"max_segment_length": [width] * rows})
    with pytest.raises(ValueError, match=r"2293760000 tokens are more than int32 .* batch\.chunk"):
        batch.model_inputs()
    assert batch.chunk(2)[0].model_inputs()["cu_seq_lens_q"][-1] == rows * width // 2
    assert "cu_seq_lens_q" not in batch.model_inputs("sdpa")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        *[
            (name, r"is unknown; use one of torch_varlen, .*_4, sdpa, .*flex_attention")
            for name in ("flash", "", "SDPA", "flash_attention_9", "a/sdpa")
        ],
        ({"vision_config": "sdpa"}, r"has no text_config, .*\{\"text_config\": \"torch_varlen\", "),
        ({"text_config": "sdpa", "vision_config": "torch_varlen"}, r"\"torch_varlen\" for vision_"),
        ({"text_config": "fast"}, r"attention='fast' is unknown; use one of torch_varlen, "),
    ],
)
def test_attention_that_cannot_be(packed: Batch, attention: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed.model_inputs(attention)
