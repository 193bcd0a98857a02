"""torch_varlen refuses what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.test_attention import bounds_of
from tests.tiny_models import WINDOW, packed_inputs, tiny_model
from torch_collate_kit.attention import register_torch_varlen

ONE_ROW = ([7, 1, 5],)


def model(kind: str, *, training: bool = False, config: Any = None, **changes: Any) -> Any:
    """A call with the inputs of packed rows, changed; None leaves one out."""

    def call() -> Any:
        inputs = packed_inputs(*ONE_ROW) | changes
        given = {name: value for name, value in inputs.items() if value is not None}
        return tiny_model(kind, **config or {}).train(training)(**given)

    return call


def layer(
    lengths: list[int], *, num_rows: int = 1, config: Any = None, **options: Any
) -> Callable[[], Any]:
    """The registered function, called as a layer of a model calls it."""
    module: Any = nn.Identity()
    module.config = config

    def call() -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        register_torch_varlen()
        query = torch.zeros(num_rows, 2, sum(lengths) // num_rows, 8)
        given = {"cu_seq_lens_q": bounds_of(lengths).cu_q, "attention_mask": None} | options
        return ALL_ATTENTION_FUNCTIONS["torch_varlen"](module, query, query, query, **given)

    return call


def bounds(of_queries: list[int], of_keys: list[int] | None = None) -> Callable[[], Any]:
    """Boundaries of two rows of three tokens."""
    cu_q, cu_k = (None if of is None else torch.tensor(of).int() for of in (of_queries, of_keys))
    return layer([3, 3], num_rows=2, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)


TOWER, BERT = SimpleNamespace(patch_size=4), SimpleNamespace(attention_probs_dropout_prob=0.1)
BOTH = r"an attention_mask is passed in addition to cu_seq_lens_q \(its shape is \[1, 1, 13, 13\]"
MASK_2D = torch.tensor([[1] * 8 + [0] * 5])
MASK_4D = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril()
# with a cache transformers does not look at the positions
NO_BOUNDS = dict.fromkeys((*("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"), "max_length_k"))
NO_BOUNDS |= {"use_cache": None}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (model("llama", attention_mask=MASK_2D), BOTH),
    (model("mistral", attention_mask=MASK_2D), BOTH),
    (model("llama", attention_mask=MASK_4D), BOTH),
    (model("gemma2", config={"attn_logit_softcapping": 50.0}), "soft-capping, but Gemma2A.*eager"),
    (model("qwen3", **NO_BOUNDS, training=True), "no cu_seq_lens_q in tr"),
    (model("qwen3", **NO_BOUNDS), "restart"),
    (model("qwen3", config={"attention_dropout": 0.1}, training=True),
     r"asks for 0.1; set config.attention_dropout = 0.0"),
    (layer([2, 1], s_aux=torch.zeros(4)), "cannot do attention sinks.*passes s_aux; use .*eager"),
    (layer([2, 1], position_bias=torch.zeros(4)), "cannot do a position bias.*passes position_bia"),
    (layer([2, 1], is_causal=False, config=TOWER), r'attends to patches .*"vision_config"'),
    (layer([2, 1], dropout=0.1, config=BERT), "set config.attention_probs_dropout_prob = 0.0"),
    (bounds([0, 2]), "has 2 entries for 2 rows: it was cut like them.*pass dispatch_batches=Fal"),
    (bounds([0, 1, 2]), r"must rise from 0 to 6 \(2 rows of 3 tokens.*got \[0, 1, 2\]"),
    (bounds([1, 3, 6]), "must rise from 0 to 6"),
    (bounds([0, 4, 3, 6]), "must rise from 0 to 6"),
    (bounds([0, 2, 6]), r"lacks the row boundaries \[3\]"),
    (bounds([0, 3, 6], [0, 6]), "differ.*pass the same"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_it_cannot_do_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_dropout_is_none_in_evaluation() -> None:
    model("qwen3", config={"attention_dropout": 0.1})()


def test_a_filled_cache_beside_boundaries_is_refused() -> None:
    inputs, llama = packed_inputs(*ONE_ROW), tiny_model("llama")
    inputs["use_cache"] = True
    cache = llama(**inputs).past_key_values
    with pytest.raises(ValueError, match=r"13 query and 26 key tokens per row.*use_cache=False"):
        llama(**inputs, past_key_values=cache)


def test_a_window_that_mask_and_layer_disagree_on_is_refused() -> None:
    gemma = tiny_model("gemma3")
    gemma.model.layers[0].self_attn.sliding_window = WINDOW - 1
    with pytest.raises(ValueError, match=r"sliding windows \[4\].*sliding_window=3; use .*sdpa"):
        gemma(**packed_inputs(*ONE_ROW))


def test_a_mask_pattern_beyond_causal_is_refused() -> None:
    from transformers import masking_utils

    options: dict[str, Any] = {
        "config": tiny_model("llama", attention_chunk_size=4).config,
        "inputs_embeds": torch.zeros(1, 3, 8),
        **{"attention_mask": None, "past_key_values": None},
    }

    with pytest.raises(ValueError, match=r"reads its attention mask itself \(\[0\]\)"):
        masking_utils.create_causal_mask(**options)[0]

    def image_tokens(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= 0

    chunks = masking_utils.create_chunked_causal_mask(**options)
    with pytest.raises(ValueError, match=r"built from \['chunked_overlay.*use .*\"sdpa\""):
        layer([2, 1], attention_mask=chunks)()
    blocks = masking_utils.create_causal_mask(**options, or_mask_function=image_tokens)
    with pytest.raises(ValueError, match="image_tokens"):
        layer([2, 1], attention_mask=blocks)()
