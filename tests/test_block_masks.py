"""BlockMask in closed form against ``create_block_mask``, and through models of transformers."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from torch_collate_kit import PackedCollator
from torch_collate_kit.batch.block_masks import document_masks

CASES = 600 if "ALL_CASES" in os.environ else 60
TABLES = [
    f"{full}{of}_{what}"
    for of in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
]
RNG = np.random.default_rng(0)
EXAMPLES = [{"input_ids": RNG.integers(1, 50, n).tolist()} for n in (150, 40, 3, 90, 200, 1, 20)]


def rows_of(rng: np.random.Generator, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return boundaries over rows of documents, some empty, and the document of each cell."""
    longest, bounds = int(rng.choice([5, 60, 300, 2000])), [0]
    for row in range(num_rows):
        while bounds[-1] < (row + 1) * width:
            bounds.append(min((row + 1) * width, bounds[-1] + int(rng.integers(1, longest + 1))))
    bounds += [bounds[-1]] * int(rng.integers(3))
    flat = torch.tensor(bounds, dtype=torch.int32)
    return flat, torch.repeat_interleave(torch.diff(flat)).view(num_rows, width)


def visible(segments: Tensor, window: int | None, *, two_way: bool) -> Any:
    """What a cell sees, one pair at a time."""

    def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = segments[row, query] == segments[row, key]
        if not two_way:
            seen = seen & (key <= query)
        return seen if window is None else seen & ((query - key).abs() < window)

    return is_seen


def slow(kind: str) -> Any:
    """A case that only `make kills` runs: flex attention without a compiler takes 10 to 25 s."""
    return pytest.param(kind, marks=pytest.mark.release)


@pytest.mark.parametrize("case", range(CASES))
def test_all_tables_are_those_of_create_block_mask(case: int) -> None:
    rng = np.random.default_rng((7, case))
    num_rows, whole = int(rng.integers(1, 4)), 128 * int(rng.integers(1, 8))
    width = int(rng.choice([int(rng.integers(1, 900)), whole]))
    flat, segments = rows_of(rng, num_rows, width)
    two_way, window = bool(rng.integers(2)), int(rng.integers(1, width + 50))
    masks = document_masks(flat, segments, window=window, two_way=two_way)
    assert isinstance(masks, dict)
    for name, mask in masks.items():
        of = window if name == "sliding_attention" else None
        expected = visible(segments, of, two_way=two_way)
        other = create_block_mask(expected, num_rows, None, width, width, device="cpu")
        for table in TABLES:
            found = getattr(mask, table)
            assert found.dtype == torch.int32
            assert found.is_contiguous()
            assert torch.equal(found, getattr(other, table)), (table, name, width, two_way)
        assert (mask.shape, mask.BLOCK_SIZE) == (other.shape, other.BLOCK_SIZE)
        if case % 5 == 0:
            cells = [
                create_mask(mod, num_rows, 1, width, width, device="cpu")
                for mod in (mask.mask_mod, expected)
            ]
            assert torch.equal(*cells)


def test_written_out() -> None:
    """Blocks of 128: documents of 192 and 320 cells are the 3 and 5 of blocks of 2, FACTS 3."""
    flat = torch.tensor([0, 192, 512], dtype=torch.int32)
    mask: Any = document_masks(flat, torch.repeat_interleave(torch.diff(flat))[None])

    def listed(numbers: Tensor, indices: Tensor) -> list[list[int]]:
        pairs = zip(numbers[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
        return [row[:number] for number, row in pairs]

    assert listed(mask.kv_num_blocks, mask.kv_indices) == [[0], [0, 1], [1, 2], [1, 3]]
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == [[], [], [], [2]]
    assert listed(mask.q_num_blocks, mask.q_indices) == [[0, 1], [1, 2, 3], [2], [3]]


def test_it_takes_a_five_hundredth_of_the_time() -> None:
    batch = PackedCollator(0, max_tokens=8192, fixed_width=True)([{"input_ids": [5] * 400}] * 20)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        document_masks(batch_bounds(batch), segments_of(batch))
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    mod = visible(segments_of(batch), None, two_way=False)
    create_block_mask(mod, 1, None, 8192, 8192, device="cpu")
    assert 500 * min(seconds) < time.perf_counter() - began


def batch_bounds(batch: Any) -> Tensor:
    found: Tensor = batch.model_inputs()["cu_seq_lens_q"]
    return found


def segments_of(batch: Any) -> Tensor:
    shape = batch["input_ids"].shape
    return torch.repeat_interleave(torch.diff(batch_bounds(batch))).view(shape)


def tiny(kind: str, attention: str, **options: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
        attn_implementation=attention, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


GEMMA = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": GEMMA,
    "mistral": {"sliding_window": 40},
}


@pytest.mark.parametrize("kind", [slow(k) if k in ("qwen3", "mistral") else k for k in MODELS])
def test_logits_are_those_of_sdpa(kind: str) -> None:
    batch = PackedCollator(0, max_tokens=256)(EXAMPLES)
    model = tiny(kind, "flex_attention", **MODELS[kind])
    found = batch.model_inputs(model, labels=False, mask="block")
    assert isinstance(found["attention_mask"], dict) == ("layer_types" in MODELS[kind])
    other = tiny(kind, "sdpa", **MODELS[kind])
    other.load_state_dict(model.state_dict())
    window = MODELS[kind].get("sliding_window")
    inputs = batch.model_inputs("sdpa", labels=False, mask="block", sliding_window=window)
    if kind == "mistral":
        inputs["attention_mask"] = inputs["attention_mask"]["sliding_attention"]
    with torch.no_grad():
        torch.testing.assert_close(
            model(**found).logits, other(**inputs).logits, atol=1e-5, rtol=1e-4
        )


TWO_WAY: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 300},
    "modernbert": {"local_attention": 40, "global_attn_every_n_layers": 2},
    "llama": {"is_causal": False},
}


@pytest.mark.parametrize("kind", [slow(k) if k != "llama" else k for k in TWO_WAY])
def test_two_way_models_get_it_from_the_model(kind: str) -> None:
    batch, found, state = PackedCollator(0, max_tokens=256, train_all=True)(EXAMPLES), [], None
    for attention in ("flex_attention", "sdpa"):
        config = transformers.AutoConfig.for_model(
            kind, vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, pad_token_id=0, attn_implementation=attention, **TWO_WAY[kind],
        )  # fmt: skip
        model = transformers.AutoModel.from_config(config).eval()
        state = state or model.state_dict()
        model.load_state_dict(state)
        inputs = batch.model_inputs(model, labels=False)
        assert isinstance(inputs["attention_mask"], dict) == (kind == "modernbert")
        with torch.no_grad():
            found.append(model(**inputs)[0])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_a_model_whose_mask_ignores_positions_gets_it_unasked() -> None:
    batch = PackedCollator(0, max_tokens=256)(EXAMPLES)
    model = tiny("gpt_oss", "flex_attention", **GEMMA, num_local_experts=2)
    masks = batch.model_inputs(model)["attention_mask"]
    assert list(masks) == ["full_attention", "sliding_attention"]


def test_the_name_of_the_attention_makes_the_same_masks() -> None:
    batch = PackedCollator(0, max_tokens=256)(EXAMPLES)
    one = batch.model_inputs("flex_attention", mask="block")["attention_mask"]
    assert one.shape == (len(batch), 1, *[batch["input_ids"].shape[1]] * 2)
    two = batch.model_inputs("flex_attention", mask="block", sliding_window=9)["attention_mask"]
    assert torch.equal(two["full_attention"].kv_indices, one.kv_indices)
    assert "attention_mask" not in batch.model_inputs("flex_attention")
    tree = PackedCollator(0, max_tokens=8, share_prefixes=True)
    shared = tree([{"input_ids": [[5, 6], [5, 7]], "labels": [[-100, 6], [-100, 7]]}])
    with pytest.raises(ValueError, match="flex_attention takes none of image blocks or shared pre"):
        shared.model_inputs("flex_attention", mask="block")
