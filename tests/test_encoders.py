"""Models that are not causal decoders: what is refused, with the kind, and what stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_collate_kit import IsolationError, PackedCollator, PaddedCollator, check_isolation

transformers = pytest.importorskip("transformers")
SIZES = {
    **{"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "initializer_range": 0.3, "pad_token_id": 0},
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
BART = {"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("ffn_dim", 24), ("attention_heads", 2))
}
VISION = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4} | {
    name: SIZES[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
LENGTHS = [5, 9, 7]
EXAMPLES = [{"input_ids": list(range(5, 5 + n))} for n in LENGTHS]
TWO_WAY = r"packed rows are not isolated in \S+ models: its attention is not causal, .*PaddedCol"
ENCODER_DECODER = "is an encoder-decoder.*DataCollatorForSeq2Seq"
POSITIONS = "do not begin at 0.*input_ids and attention_mask alone"


def model_of(name: str, **options: Any) -> Any:
    """A tiny model of a class of transformers."""
    config_type = getattr(transformers, name).config_class
    sizes = {"T5": T5, "MT": T5, "UM": T5, "Ba": BART, "Wh": BART, "Pe": BART}.get(name[:2], SIZES)
    if name.startswith(("Llama", "Qwen3", "Gemma", "Mistral", "EuroBert")):
        sizes = DECODER
    if name.startswith("DistilBert"):
        sizes = {"vocab_size": 61, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}
    config = config_type(**{**sizes, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, name)(config).eval()


SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
KINDS = [
    ("BertForMaskedLM", {}, TWO_WAY),
    ("BertModel", {}, TWO_WAY),
    ("DistilBertForMaskedLM", {}, TWO_WAY),
    ("AlbertForMaskedLM", {"embedding_size": 16}, TWO_WAY),
    ("ModernBertForMaskedLM", {}, TWO_WAY),
    ("EuroBertForMaskedLM", {}, TWO_WAY),
    ("DebertaV2ForMaskedLM", {}, TWO_WAY),
    ("RoFormerForMaskedLM", {"embedding_size": 16}, TWO_WAY),
    ("XLNetLMHeadModel", {"d_model": 16, "n_head": 2, "n_layer": 1, "d_inner": 24}, TWO_WAY),
    ("T5EncoderModel", {}, TWO_WAY),
    ("LlamaForCausalLM", {"is_causal": False}, TWO_WAY),
    ("Qwen3ForTokenClassification", {"is_causal": False}, TWO_WAY),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, TWO_WAY),
    ("T5ForConditionalGeneration", {}, ENCODER_DECODER),
    ("BartForConditionalGeneration", {}, ENCODER_DECODER),
    (
        "WhisperForConditionalGeneration",
        {"max_source_positions": 8, **dict.fromkeys(SPECIAL, 1)},
        ENCODER_DECODER,
    ),
    ("RobertaForMaskedLM", {}, POSITIONS),
    ("RobertaForCausalLM", {"is_decoder": True}, POSITIONS),
    ("MPNetForMaskedLM", {}, POSITIONS),
    ("EsmForMaskedLM", {}, POSITIONS),
    ("LongformerForMaskedLM", {"attention_window": 4}, POSITIONS),
    ("NystromformerForMaskedLM", {}, POSITIONS),
]


@pytest.mark.parametrize(("name", "options", "message"), KINDS, ids=[name for name, *_ in KINDS])
def test_other_kinds_are_refused_with_their_reason(name: str, options: Any, message: str) -> None:
    model = model_of(name, **options)
    packed, padded = PackedCollator(0, max_tokens=32), PaddedCollator(0, padding_side="right")
    inputs = dict(packed(EXAMPLES).model_inputs("sdpa", labels=False))
    calls = [
        lambda: packed(EXAMPLES).model_inputs(model),
        lambda: packed.for_trainer(model),
        lambda: check_isolation(model, packed(EXAMPLES)),
        lambda: check_isolation(model, inputs),
    ]
    if message != TWO_WAY:
        calls += [lambda: padded(EXAMPLES).model_inputs(model), lambda: padded.for_trainer(model)]
    for call in calls:
        with pytest.raises(IsolationError, match=message):
            call()
    if message == TWO_WAY:
        padded(EXAMPLES).model_inputs(model)
        padded.for_trainer(model)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("BertForMaskedLM", "logits"),
        ("DistilBertForMaskedLM", "logits"),
        ("ModernBertForTokenClassification", "logits"),
        ("LlamaForTokenClassification", "logits"),
        ("LlamaModel", "last_hidden_state"),
    ],
)
def test_padded_rows_are_exact(name: str, output: str, side: str) -> None:
    model = model_of(name)
    batch = PaddedCollator(0, padding_side=side)(EXAMPLES)
    with torch.no_grad():
        found = model(**batch.model_inputs(model, labels=False))[output]
        for row, example in zip(found, EXAMPLES, strict=True):
            ids = torch.tensor([example["input_ids"]])
            own = row[: ids.shape[1]] if side == "right" else row[-ids.shape[1] :]
            torch.testing.assert_close(own, model(input_ids=ids)[output][0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "options", "is_refused"),
    [
        ("BertForSequenceClassification", {}, True),
        ("BertModel", {}, True),
        ("AlbertForSequenceClassification", {"embedding_size": 16}, True),
        ("DistilBertForSequenceClassification", {}, True),
        ("ModernBertForSequenceClassification", {}, True),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "mean"}, False),
        ("BertForMaskedLM", {}, False),
        ("LlamaForSequenceClassification", {}, False),
    ],
)
def test_pads_on_the_left_of_a_head_that_reads_cell_0(
    name: str, options: Any, is_refused: bool
) -> None:
    model = model_of(name, **options)
    PaddedCollator(0, padding_side="right")(EXAMPLES).model_inputs(model)
    PaddedCollator(0)(EXAMPLES[:1]).model_inputs(model)  # no pads
    batch = PaddedCollator(0)(EXAMPLES)
    if is_refused:
        with pytest.raises(
            IsolationError, match=r'head reads the first cell.*padding_side="right"'
        ):
            batch.model_inputs(model)
    else:
        batch.model_inputs(model)


@pytest.mark.parametrize(
    "name",
    ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel", "Qwen3Model"],
)
def test_causal_decoders_with_any_head_are_checked(name: str) -> None:
    model = model_of(name, pad_token_id=None)  # rows cannot be classified without
    packed = PackedCollator(0, max_tokens=14)(EXAMPLES)
    check_isolation(model, packed)
    assert len(packed) == 2
    leaking = {**packed.model_inputs(model, labels=False), "use_cache": True}
    with pytest.raises(IsolationError, match=r"leaks into .*use_cache=False"):
        check_isolation(model, leaking)


def test_a_row_head_of_ones_own_and_adapters_are_checked() -> None:
    class Reward(transformers.LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.head = transformers.LlamaModel(config), torch.nn.Linear(16, 1)

        def forward(self, **inputs: Any) -> Any:
            hidden = self.model(**inputs)[0]
            return transformers.modeling_outputs.SequenceClassifierOutput(
                logits=self.head(hidden[:, -1])
            )

    packed = PackedCollator(0, max_tokens=14)(EXAMPLES)
    check_isolation(Reward(transformers.LlamaConfig(**DECODER)).eval(), packed)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    check_isolation(peft.get_peft_model(model_of("LlamaForSequenceClassification"), config), packed)


def test_what_tells_text_from_vision() -> None:
    """The text part decides: towers are two-way, and PaliGemma's prefix stays as it is."""
    from tests.vision.families import FAMILIES

    packed = PackedCollator(0, max_tokens=32)(EXAMPLES)
    for name in ("qwen2_5_vl", "internvl", "gemma3"):
        packed.model_inputs(FAMILIES[name].model())
    text = {**DECODER, "use_bidirectional_attention": True, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=VISION)
    packed.model_inputs(transformers.PaliGemmaForConditionalGeneration(config))
