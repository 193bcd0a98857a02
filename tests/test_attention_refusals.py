"""torch_varlen refuses what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.test_attention import bounds_of
from tests.tiny_models import WINDOW, packed_inputs, tiny_model
from torch_collate_kit.attention import register_torch_varlen

ONE_ROW = ([7, 1, 5],)


# --- fail closed ---------------------------------------------------------------------------------


BOTH = r"an attention_mask is passed in addition to cu_seq_lens_q \(its shape is \[1, 1, 13, 13\]"
MASK_2D = torch.tensor([[1] * 8 + [0] * 5])
MASK_4D = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("kind", "mask", "message"),
    [
        ("llama", MASK_2D, BOTH),
        ("mistral", MASK_2D, BOTH),
        ("llama", MASK_4D, BOTH),
        ("gemma2", None, "soft-capping, but Gemma2Attention.*eager"),
    ],
)
def test_what_stands_beside_boundaries_is_refused(kind, mask, message):
    model = tiny_model(kind, **({"attn_logit_softcapping": 50.0} if kind == "gemma2" else {}))
    with pytest.raises(ValueError, match=message):
        model(**packed_inputs(*ONE_ROW), attention_mask=mask)


@pytest.mark.parametrize(
    ("training", "message"), [(True, "no cu_seq_lens_q in tr"), (False, "restart")]
)
def test_packed_rows_without_boundaries_are_refused(training, message):
    inputs = packed_inputs(*ONE_ROW, varlen=False)
    del inputs["use_cache"]  # with a cache transformers does not look at the positions
    with pytest.raises(ValueError, match=message):
        tiny_model("qwen3").train(training)(**inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "cannot do attention sinks.*passes s_aux; use .*eager"),
        ({"position_bias": torch.zeros(4)}, "cannot do a position bias.*passes position_bias"),
        ({"is_causal": False}, '"text_config": "torch_varlen", "vision_config"'),
    ],
)
def test_other_attention_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call_attention([2, 1], **options)


def test_a_filled_cache_beside_boundaries_is_refused():
    inputs, model = packed_inputs(*ONE_ROW), tiny_model("llama")
    inputs["use_cache"] = True
    cache = model(**inputs).past_key_values
    with pytest.raises(ValueError, match=r"13 query and 26 key tokens per row.*use_cache=False"):
        model(**inputs, past_key_values=cache)


def test_dropout_is_refused():
    model = tiny_model("qwen3", attention_dropout=0.1)
    model(**packed_inputs(*ONE_ROW))  # eval: there is none
    with pytest.raises(ValueError, match=r"asks for 0.1; set config.attention_dropout = 0.0"):
        model.train()(**packed_inputs(*ONE_ROW))


def test_a_window_that_mask_and_layer_disagree_on_is_refused():
    model = tiny_model("gemma3")
    model.model.layers[0].self_attn.sliding_window = WINDOW - 1
    with pytest.raises(ValueError, match=r"sliding windows \[4\].*sliding_window=3; use .*sdpa"):
        model(**packed_inputs(*ONE_ROW))


def test_a_mask_pattern_beyond_causal_is_refused():
    from transformers import masking_utils

    model = tiny_model("llama", attention_chunk_size=4)
    options = {
        "config": model.config,
        "inputs_embeds": torch.zeros(1, 3, 8),
        "attention_mask": None,
        "past_key_values": None,
    }
    chunks = masking_utils.create_chunked_causal_mask(**options)
    with pytest.raises(ValueError, match=r"built from \['chunked_overlay.*use .*\"sdpa\""):
        call_attention([2, 1], attention_mask=chunks)

    def image_tokens(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= 0

    blocks = masking_utils.create_causal_mask(**options, or_mask_function=image_tokens)
    with pytest.raises(ValueError, match="image_tokens"):
        call_attention([2, 1], attention_mask=blocks)


@pytest.mark.parametrize(
    ("bounds", "bounds_k", "message"),
    [
        ([0, 2], None, "has 2 entries for 2 rows: it was cut like them.*pass dispatch_batches=Fal"),
        ([0, 1, 2], None, r"must rise from 0 to 6 \(2 rows of 3 tokens.*got \[0, 1, 2\]"),
        ([1, 3, 6], None, "must rise from 0 to 6"),
        ([0, 4, 3, 6], None, "must rise from 0 to 6"),
        ([0, 2, 6], None, r"lacks the row boundaries \[3\]"),
        ([0, 3, 6], [0, 6], "differ.*pass the same"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(bounds, bounds_k, message):
    cu = torch.tensor(bounds, dtype=torch.int32)
    cu_k = None if bounds_k is None else torch.tensor(bounds_k, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        call_attention([3, 3], cu_seq_lens_q=cu, cu_seq_lens_k=cu_k, num_rows=2)


def call_attention(lengths: list[int], *, num_rows: int = 1, **options: Any) -> Any:
    """The registered function, called as a layer of a model calls it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_torch_varlen()
    width = sum(lengths) // num_rows
    query = torch.zeros(num_rows, 2, width, 8)
    options = {"cu_seq_lens_q": bounds_of(lengths).cu_q, "attention_mask": None} | options
    return ALL_ATTENTION_FUNCTIONS["torch_varlen"](nn.Identity(), query, query, query, **options)
