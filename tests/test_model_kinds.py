"""What a batch gives to a model of each family of the table, and what it refuses."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.devices import NoWaiting
from torch_collate_kit import families
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.ragged import Ragged

LENGTHS = [5, 3, 7, 2, 4]
CU = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
ALWAYS = ["input_ids", "position_ids", "labels", "use_cache"]
SERVED = [family for family in families.FAMILIES if family.keywords]
ALONE = [family for family in families.FAMILIES if family.needs_isolation]


def named(model_type: str, attention: str = "sdpa", **config: Any) -> nn.Module:
    """A model of which only the config is read."""
    model: Any = nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type=model_type, _attn_implementation=attention, **config)
    named_model: nn.Module = model
    return named_model


def isolated(model: nn.Module) -> nn.Module:
    """As after isolate_mixers."""
    setattr(model, families.ISOLATED, True)
    return model


def packed() -> Batch:
    """Two rows with gaps and a pad tail."""
    examples = [{"input_ids": list(range(1, n + 1))} for n in LENGTHS]
    batch = PackedCollator(0, max_tokens=14, fixed_width=True)(examples)
    assert batch["input_ids"].shape == (2, 14)
    return batch


def expected_segments(batch: Batch) -> tuple[list[list[int]], list[int]]:
    """The number of the segment of every cell, over all rows, and the boundaries."""
    numbers, bounds, number = [], [0], -1
    for row in batch["position_ids"].tolist():
        numbers.append([])
        for cell, position in enumerate(row):
            if position == 0 or cell == 0:
                number += 1
                bounds.append(bounds[-1])
            numbers[-1].append(number)
            bounds[-1] += 1
    return numbers, bounds


def test_every_model_type_is_in_one_family() -> None:
    types = [name for family in families.FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))
    assert sum(bool(family.mixers) for family in families.FAMILIES) == 28


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_a_family_gets_what_its_kernels_read(family: families.Family) -> None:
    batch = packed()
    inputs = batch.model_inputs(named(family.name))
    own = {"cu_seq_lens": CU}
    added = [name for word in family.keywords for name in own.get(word, [word])]
    mask = ["attention_mask"] if family.blind_mask else []
    assert list(inputs) == [*ALWAYS, *mask, *added]
    rows = (1, 28) if family.one_row else (2, 14)
    for name in ("input_ids", "position_ids", "labels", "seq_idx"):
        assert inputs[name].shape == rows
    numbers, bounds = expected_segments(batch)
    assert inputs["seq_idx"].dtype == torch.int32
    assert inputs["seq_idx"].is_contiguous()
    assert inputs["seq_idx"].flatten().tolist() == [*numbers[0], *numbers[1]]
    for name in ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_cpu"):
        if name in inputs:
            assert inputs[name].tolist() == bounds
            assert inputs[name].dtype == torch.int32
    assert inputs["input_ids"].flatten().tolist() == batch["input_ids"].flatten().tolist()


@pytest.mark.parametrize("family", SERVED + ALONE, ids=lambda family: family.name)
def test_an_isolated_model_gets_boundaries(family: families.Family) -> None:
    batch = packed()
    inputs = batch.model_inputs(isolated(named(family.name, "torch_varlen")))
    assert list(inputs) == [*ALWAYS, *CU, "cu_seqlens_cpu"]
    assert inputs["input_ids"].shape == (2, 14)
    assert inputs["cu_seqlens_cpu"].tolist() == expected_segments(batch)[1]


@pytest.mark.parametrize("family", ALONE, ids=lambda family: family.name)
def test_packed_rows_of_other_families_are_refused(family: families.Family) -> None:
    with pytest.raises(
        IsolationError, match=r"packed rows are not.*; call isolate_mixers\(model\)"
    ):
        packed().model_inputs(named(family.model_types[-1]))
    examples = [{"input_ids": [5, 6]}, {"input_ids": [5, 6, 7]}]
    padded = PaddedCollator(0, padding_side="right")(examples)
    assert "attention_mask" in padded.model_inputs(named(family.name))


def test_refusals_that_nothing_lifts() -> None:
    for name in ("glm5_next", "bloom", "bart", "openai-gpt"):
        with pytest.raises(IsolationError, match=r"packed rows are not.*; use PaddedCollator"):
            packed().model_inputs(isolated(named(name)))
    with pytest.raises(IsolationError, match=r"bloom models: it takes a 2-D"):
        packed().model_inputs(named("falcon", alibi=True))
    with pytest.raises(ValueError, match="Linear has no config, so its inputs are unknown"):
        packed().model_inputs(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (named("llama"), []),
        (named("llama", "torch_varlen"), CU),
        (named("falcon"), ["attention_mask"]),
        (named("falcon", "torch_varlen"), CU),
        (named("gpt_oss", "eager", sliding_window=3), ["attention_mask"]),
        (named("granitemoehybrid", "flash_attention_2"), [*CU, "seq_idx"]),
        (named("lfm2", "torch_varlen"), [*CU, "seq_idx"]),
    ],
)
def test_the_attention_of_the_model_decides(model: nn.Module, names: list[str]) -> None:
    inputs = packed().model_inputs(model)
    assert list(inputs) == [*ALWAYS, *names]
    if hasattr(model.config, "sliding_window"):
        assert list(inputs["attention_mask"]) == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "model",
    [
        *(named(name) for name in ("rwkv", "xlstm", "recurrent_gemma", "bart", "trocr")),
        named("bamba", mamba_proj_bias=True),
    ],
)
def test_rows_padded_on_the_left_are_refused_where_they_are_wrong(model: nn.Module) -> None:
    examples = [{"input_ids": [5, 6]}, {"input_ids": [5, 6, 7]}]
    with pytest.raises(IsolationError, match=r"padded on the left are wrong in .*side=\"right\""):
        PaddedCollator(0)(examples).model_inputs(model)
    rollouts = [
        {"prompt_ids": [5] * n, "response_ids": [6], "rewards": [1.0], "loss_mask": [1]}
        for n in (1, 2)
    ]
    with pytest.raises(IsolationError, match="padded on the left"):
        RolloutCollator(0)(rollouts).model_inputs(model)
    PaddedCollator(0)(examples[:1]).model_inputs(model)
    PaddedCollator(0)(examples).model_inputs(named("bamba"))


def test_trainer_gets_the_inputs_of_the_model() -> None:
    examples = [{"input_ids": list(range(1, n + 1)), "labels": [1] * n} for n in LENGTHS]
    model = named("qwen3_next")
    collate = PackedCollator(0, max_tokens=14).for_trainer(model)
    inputs = pickle.loads(pickle.dumps(collate))(examples)
    expected = collate.collate(examples).model_inputs(model)
    assert list(inputs) == list(expected)
    assert all(
        torch.equal(inputs[name], value)
        for name, value in expected.items()
        if isinstance(value, Tensor)
    )
    with pytest.raises(IsolationError, match="rwkv"):
        PackedCollator(0, max_tokens=14).for_trainer(named("rwkv"))(examples)


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_nothing_waits_for_the_device(family: families.Family) -> None:
    batch = packed()
    moved = batch.to("meta")
    with NoWaiting() as mode:
        inputs = moved.model_inputs(named(family.name))
    assert mode.seen > 10
    on_host = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_cpu}
    assert on_host == {"cu_seqlens_cpu"} & set(inputs)


VARLEN = ("torch_varlen", "flash_attention_3", "flash_attention_4", "kernels-community/flash-attn2")
MASKED = ("sdpa", "eager", "flex_attention")


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
