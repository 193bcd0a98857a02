"""Tiny two-way models of every family, and what each text alone gives: logits and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torch_collate_kit import PackedCollator

VOCAB, TABLE = 61, 24
SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "initializer_range": 0.3, "pad_token_id": 0},
}
BERT = {
    **SIZES,
    **{"max_position_embeddings": TABLE, "hidden_dropout_prob": 0.0},
    "attention_probs_dropout_prob": 0.0,
}
ROBERTA = {**BERT, "pad_token_id": 1, "max_position_embeddings": TABLE + 2}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "is_causal": False}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**DECODER, **WINDOWS, "query_pre_attn_scalar": 8, "is_causal": None}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
      "dropout_rate": 0.0, "initializer_factor": 3.0, "relative_attention_num_buckets": 8,
      "relative_attention_max_distance": 16}  # fmt: skip
DISTIL = {"vocab_size": VOCAB, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2,
          "max_position_embeddings": TABLE, "dropout": 0.0, "attention_dropout": 0.0,
          "initializer_range": 0.3, "pad_token_id": 0}  # fmt: skip
MASKS, EVERY = ("sdpa", "eager"), ("sdpa", "eager", "torch_varlen", "flash")


class Encoder(NamedTuple):
    """A class of transformers, its options, and the attention with which it is exact."""

    name: str
    options: dict[str, Any]
    attention: tuple[str, ...] = EVERY
    bounds: tuple[float, float] = (1e-10, 1e-10)
    """Of what is computed in fp64: with sdpa or a kernel, and eager. Many soften in fp32 there."""


SOFT_32, NORM_32 = (1e-10, 1e-6), (1e-6, 1e-6)
_EAGER = ("eager",)
ENCODERS = [
    Encoder("BertForMaskedLM", BERT),
    Encoder("ErnieForMaskedLM", BERT),
    Encoder("ElectraForMaskedLM", {**BERT, "embedding_size": 16}),
    Encoder("AlbertForMaskedLM", {**BERT, "embedding_size": 16}),
    Encoder("RoCBertForMaskedLM", {**BERT, "enable_pronunciation": False, "enable_shape": False}),
    Encoder("BertGenerationEncoder", BERT),
    Encoder("DistilBertForMaskedLM", DISTIL),
    Encoder("RobertaForMaskedLM", ROBERTA),
    Encoder("XLMRobertaForTokenClassification", ROBERTA),
    Encoder("CamembertForMaskedLM", ROBERTA),
    Encoder("Data2VecTextForMaskedLM", ROBERTA),
    Encoder("XLMRobertaXLForMaskedLM", ROBERTA),
    Encoder("RobertaPreLayerNormForMaskedLM", ROBERTA),
    Encoder("XmodForMaskedLM", {**ROBERTA, "default_language": "en_XX"}),
    Encoder("EuroBertForMaskedLM", {**SIZES, "num_key_value_heads": 2}, bounds=SOFT_32),
    Encoder("NomicBertForMaskedLM", {**SIZES, "hidden_dropout_prob": 0.0}),
    Encoder("GteForMaskedLM", {**SIZES, "hidden_dropout_prob": 0.0}),
    Encoder("JinaEmbeddingsV3ForMaskedLM", {**SIZES, "hidden_dropout_prob": 0.0}),
    Encoder("ModernBertForMaskedLM", {**SIZES, **WINDOWS, "local_attention": 8}, bounds=SOFT_32),
    Encoder("EmbeddingGemma2TextModel", GEMMA, bounds=NORM_32),
    Encoder("Gemma3TextModel", {**GEMMA, "use_bidirectional_attention": True}, bounds=NORM_32),
    Encoder("Gemma3TextModel", {**GEMMA, "is_causal": False}, EVERY[:3], NORM_32),
    Encoder("GemmaModel", DECODER, bounds=NORM_32),
    Encoder("LlamaForTokenClassification", DECODER, bounds=SOFT_32),
    Encoder("Qwen2Model", {**DECODER, "use_sliding_window": True, **WINDOWS}, EVERY[:3], SOFT_32),
    *(Encoder(f"{name}Model", DECODER, bounds=SOFT_32) for name in ("Qwen3", "Olmo2", "Granite")),
    *(Encoder(f"{name}Model", {**DECODER, "sliding_window": None}, bounds=SOFT_32)
      for name in ("Phi3", "SmolLM3", "Ministral3")),
    *(Encoder(f"{name}Model", {**DECODER, "sliding_window": 4}, EVERY[:3], SOFT_32)
      for name in ("Mistral", "Ministral")),
    *(Encoder(f"{name}EncoderModel", T5, MASKS) for name in ("T5", "MT5", "UMT5")),
    Encoder("T5GemmaEncoderModel", {}, _EAGER, NORM_32),
    Encoder("MPNetForMaskedLM", ROBERTA, _EAGER),
    Encoder("RemBertForMaskedLM", {**BERT, "input_embedding_size": 16, "output_embedding_size": 16},
     _EAGER),
    Encoder("MegatronBertForMaskedLM", BERT, _EAGER),
    Encoder("BigBirdForTokenClassification", {**BERT, "attention_type": "original_full"}, _EAGER),
    Encoder("RoFormerForMaskedLM", {**BERT, "embedding_size": 16, "max_position_embeddings": 48},
     _EAGER, NORM_32),
    Encoder("EsmForMaskedLM", {**ROBERTA, "mask_token_id": 3, "token_dropout": False,
     "position_embedding_type": "rotary"}, EVERY[2:]),
]  # fmt: skip
BY_NAME = {encoder.name: encoder for encoder in ENCODERS}


EXAMPLES = [{"input_ids": list(range(5, 5 + n))} for n in (5, 9, 7)]


def encoder_model(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A model in eval mode and fp64: the same weights for the same name, whatever its attention."""
    transformers = pytest.importorskip("transformers")
    from torch_collate_kit import register_torch_varlen

    register_torch_varlen()
    options = {**BY_NAME[name].options, **changes} if name in BY_NAME else changes
    if name == "T5GemmaEncoderModel":
        side = {**GEMMA, "dropout_rate": 0.0}
        del side["is_causal"]
        options = {"encoder": side, "decoder": side, "is_encoder_decoder": False, **changes}
    if options.get("is_causal", 0) is None:
        options = {key: value for key, value in options.items() if key != "is_causal"}
    config = getattr(transformers, name).config_class(**options)
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
        for parameter in model.parameters():  # some begin at 0 or 1, whatever initializer_range
            if parameter.ndim > 1 and parameter.std() < 0.2:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def outputs_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Logits or last hidden states of every token."""
    output = model(**inputs)
    found = output.get("logits", output.get("last_hidden_state"))
    assert found.shape[:2] == inputs["input_ids"].shape
    return found


def texts(model: Any) -> list[dict[str, list[int]]]:
    """Texts of 1 to 20 tokens, with two types of tokens for a model that has them."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for n in (9, 20, 1, 5, 17, 8):
        text = {"input_ids": torch.randint(4, VOCAB, (n,), generator=generator).tolist()}
        if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
            text["token_type_ids"] = [0] * (n // 2) + [1] * (n - n // 2)
        found.append(text)
    return found


def sums(outputs: Tensor) -> Tensor:
    """A loss of outputs ``[T, H]``: any numbers that differ from feature to feature."""
    weights = torch.linspace(-1, 1, outputs.shape[-1], dtype=outputs.dtype)
    return (outputs.sin() @ weights).sum()


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each weight that has one."""
    model.zero_grad()
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def difference(found: Any, expected: Any) -> float:
    """The largest difference, over the largest value; of tensors, or of dicts of them."""
    if isinstance(found, Tensor):
        found, expected = {"": found.detach()}, {"": expected.detach()}
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[k] - expected[k]).abs().max()) for k in expected) / largest


def compared(
    model: Any, batch: Any, examples: list[dict[str, list[int]]], reference: Any = None
) -> tuple[float, float]:
    """How far logits and gradients of a batch are from each text alone, by itself or another."""
    reference = model if reference is None else reference
    inputs = batch.model_inputs(model, labels=False)
    found = outputs_of(model, inputs)[batch["attention_mask"].bool()]
    order = batch.row_metadata["example_indices"].values.tolist()
    alone = [
        outputs_of(reference, {key: torch.tensor([value]) for key, value in examples[i].items()})[0]
        for i in order
    ]
    expected = torch.cat(alone)
    mine, theirs = gradients_of(model, sums(found)), gradients_of(reference, sums(expected))
    return difference(found, expected), difference(mine, theirs)


def packed(model: Any, examples: Any, **options: Any) -> Any:
    """Two rows, one with a tail that is longer than the tables of positions."""
    pad = getattr(model.config, "pad_token_id", None) or 0
    options = {"max_tokens": 48, "strategy": "first_fit_decreasing", "fixed_width": True} | options
    return PackedCollator(pad, **options)(examples)
