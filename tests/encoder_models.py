"""Tiny two-way models of every family, and the loop over single texts that they must equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

VOCAB, TABLE = 61, 24
_BERT = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "initializer_range": 0.3, "pad_token_id": 0},
    **{"max_position_embeddings": TABLE, "hidden_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0},
}
_ROBERTA = {**_BERT, "pad_token_id": 1, "max_position_embeddings": TABLE + 2}
_ROPE = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "initializer_range": 0.3, "pad_token_id": 0},
}
_DECODER = {**_ROPE, "num_key_value_heads": 2, "head_dim": 8, "is_causal": False}
_GEMMA = {
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "layer_types": ["sliding_attention", "full_attention"],
}
_T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
       "dropout_rate": 0.0, "initializer_factor": 3.0, "relative_attention_num_buckets": 8,
       "relative_attention_max_distance": 16}  # fmt: skip
MASKS, EVERY = ("sdpa", "eager"), ("sdpa", "eager", "torch_varlen", "flash")


class Encoder(NamedTuple):
    """A class of transformers, its options, and the attention with which it is exact."""

    name: str
    options: dict[str, Any]
    attention: tuple[str, ...] = EVERY
    softmax_32: tuple[str, ...] = ()
    """Where its softmax is of 32 bits."""


_ROBERTAS = ("Roberta", "XLMRoberta", "Camembert", "Data2VecText", "XLMRobertaXL")
_ROBERTAS += ("RobertaPreLayerNorm",)
_OF_32 = ("eager",)
ENCODERS = [
    Encoder("BertForMaskedLM", _BERT),
    Encoder("BertModel", _BERT),
    Encoder("ErnieForMaskedLM", _BERT),
    Encoder("ElectraForMaskedLM", {**_BERT, "embedding_size": 16}),
    Encoder("AlbertForMaskedLM", {**_BERT, "embedding_size": 16}),
    Encoder("RoCBertForMaskedLM", {**_BERT, "enable_pronunciation": False, "enable_shape": False}),
    Encoder("BertGenerationEncoder", _BERT),
    Encoder("DistilBertForMaskedLM", {"vocab_size": VOCAB, "dim": 16, "hidden_dim": 24,
     "n_layers": 2, "n_heads": 2, "max_position_embeddings": TABLE, "dropout": 0.0,
     "attention_dropout": 0.0, "initializer_range": 0.3, "pad_token_id": 0}),
    *(Encoder(f"{name}ForMaskedLM", _ROBERTA) for name in _ROBERTAS),
    Encoder("XmodForMaskedLM", {**_ROBERTA, "default_language": "en_XX"}),
    Encoder("EuroBertForMaskedLM", {**_ROPE, "num_key_value_heads": 2}, softmax_32=_OF_32),
    Encoder("NomicBertForMaskedLM", {**_ROPE, "hidden_dropout_prob": 0.0}, softmax_32=_OF_32),
    Encoder("GteForMaskedLM", {**_ROPE, "hidden_dropout_prob": 0.0}, softmax_32=_OF_32),
    Encoder("JinaEmbeddingsV3ForMaskedLM", {**_ROPE, "hidden_dropout_prob": 0.0},
     softmax_32=_OF_32),
    Encoder("ModernBertForMaskedLM", {**_ROPE, "local_attention": 8, "global_attn_every_n_layers": 2},
     softmax_32=_OF_32),
    Encoder("EmbeddingGemma2TextModel", {**_ROPE, **_GEMMA}, softmax_32=_OF_32),
    Encoder("Gemma3TextModel", {**_ROPE, **_GEMMA, "use_bidirectional_attention": True,
     "sliding_window": 6}, softmax_32=_OF_32),
    Encoder("LlamaForTokenClassification", _DECODER, softmax_32=_OF_32),
    Encoder("Qwen3Model", _DECODER, softmax_32=_OF_32),
    Encoder("Qwen2Model", _DECODER, softmax_32=_OF_32),
    Encoder("MistralModel", {**_DECODER, "sliding_window": 4}, (*MASKS, "torch_varlen"), _OF_32),
    Encoder("T5EncoderModel", _T5, MASKS, _OF_32),
    Encoder("MT5EncoderModel", _T5, MASKS, _OF_32),
    Encoder("UMT5EncoderModel", _T5, MASKS, _OF_32),
    Encoder("MPNetForMaskedLM", _ROBERTA, ("eager",)),
    Encoder("RemBertForMaskedLM", {**_BERT, "input_embedding_size": 16, "output_embedding_size": 16}, ("eager",)),
    Encoder("MegatronBertForMaskedLM", _BERT, ("eager",)),
    Encoder("BigBirdForMaskedLM", {**_BERT, "attention_type": "original_full"}, ("eager",)),
    Encoder("RoFormerForMaskedLM", {**_BERT, "embedding_size": 16, "max_position_embeddings": 64}, ("eager",)),
    Encoder("EsmForMaskedLM", {**_ROBERTA, "mask_token_id": 3, "token_dropout": False,
     "position_embedding_type": "rotary"}, ("torch_varlen", "flash")),
]  # fmt: skip


def encoder(name: str, options: dict[str, Any], attention: str = "sdpa", **changes: Any) -> Any:
    """A model in eval mode and fp64: the same weights for the same name, whatever its attention."""
    transformers = pytest.importorskip("transformers")
    from torch_collate_kit import register_torch_varlen

    register_torch_varlen()
    config = getattr(transformers, name).config_class(**{**options, **changes})
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
        for parameter in model.parameters():  # some begin at 0 or 1, whatever initializer_range
            if parameter.ndim > 1 and parameter.std() < 0.2:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def hidden_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Logits or last hidden states of every token."""
    output = model(**inputs)
    found = output.get("logits", output.get("last_hidden_state"))
    assert found is not None and found.ndim == 3
    return found
