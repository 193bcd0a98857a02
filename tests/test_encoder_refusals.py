"""Two-way models: what is refused, by name and with the reason; heads, decoders, towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.encoder_models import (
    BERT,
    BY_NAME,
    DECODER,
    EXAMPLES,
    ROBERTA,
    SIZES,
    T5,
    encoder_model,
    packed,
)
from tests.test_model_kinds import named
from torch_collate_kit import (
    IsolationError,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    check_isolation,
    families,
)

transformers = pytest.importorskip("transformers")

# --- refusals ------------------------------------------------------------------------------------

XLNET = {"vocab_size": 61, "d_model": 16, "n_head": 2, "n_layer": 1, "d_inner": 24}
BART = {"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("ffn_dim", 24), ("attention_heads", 2))
}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
WHISPER = {**BART, "max_source_positions": 8, **dict.fromkeys(SPECIAL, 1)}
VISION = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4} | {
    name: SIZES[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
ENCODER_DECODER = "is an encoder-decoder.*DataCollatorForSeq2Seq"
ESM = {**ROBERTA, "mask_token_id": 3, "token_dropout": False, "position_embedding_type": "rotary"}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("DebertaV2ForMaskedLM", BERT, "eager", "deberta-v2 models: it multiplies its embeddings by"),
    ("DebertaV2ForMaskedLM", BERT, "torch_varlen", "deberta-v2 models: it multiplies its embed"),
    ("XLNetForTokenClassification", XLNET, "eager",
     "xlnet models: tokens see later ones there, and it is no"),
    ("LongformerForMaskedLM", {**ROBERTA, "attention_window": 4}, "eager",
     "2-D attention_mask only"),
    ("NystromformerForMaskedLM", BERT, "eager", "takes a 2-D attention_mask only"),
    ("EsmForMaskedLM", ESM, "sdpa",
     "'sdpa' is wrong there .it multiplies.*='torch_varlen' or 'fla"),
    ("EsmForMaskedLM", {**ESM, "token_dropout": True}, "torch_varlen", "with token_dropout=True"),
    ("BigBirdForMaskedLM", BERT, "eager", "with attention_type='block_sparse' they are wrong; set"),
    ("T5EncoderModel", T5, "torch_varlen", "they lose its position bias.*='sdpa' or 'eager'"),
    ("T5ForConditionalGeneration", T5, "sdpa", ENCODER_DECODER),
    ("BartForConditionalGeneration", BART, "sdpa", ENCODER_DECODER),
    ("WhisperForConditionalGeneration", WHISPER, "sdpa", ENCODER_DECODER),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "attention", "message"), REFUSED)
def test_other_kinds_are_refused_with_their_reason(
    name: str, options: Any, attention: str, message: str
) -> None:
    model = encoder_model(name, attention, **options)
    collate, padded = PackedCollator(0, max_tokens=32), PaddedCollator(0, padding_side="right")
    inputs = dict(collate(EXAMPLES).model_inputs("sdpa", labels=False))
    calls = [
        lambda: collate(EXAMPLES).model_inputs(model),
        lambda: PackedCollator(0, max_tokens=32, targets="same_token").for_trainer(model),
        lambda: check_isolation(model, collate(EXAMPLES)),
        lambda: check_isolation(model, inputs),
    ]
    of_padded = [
        lambda: padded(EXAMPLES).model_inputs(model),
        lambda: PaddedCollator(0, targets="same_token").for_trainer(model),
    ]
    for call in calls + (of_padded if message == ENCODER_DECODER else []):
        with pytest.raises(IsolationError, match=message):
            call()
    if message != ENCODER_DECODER:
        for call in of_padded:
            call()


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_each_two_way_type_is_refused_with_other_attention(family: families.Family) -> None:
    batch = PackedCollator(0, max_tokens=32)(EXAMPLES)
    option = dict([family.option]) if family.option[0] else {}
    for name in family.model_types if family.two_way else ():
        for attention in ("sdpa", "eager", "torch_varlen", "flash_attention_2", "flex_attention"):
            model = named(name, attention, is_causal=False, **option)
            by_mask_or_bounds = {"sdpa", "torch_varlen"} <= {*family.two_way}
            is_flex = attention == "flex_attention" and by_mask_or_bounds
            if is_flex or attention.replace("_attention_2", "") in family.two_way:
                batch.model_inputs(model)
                continue
            with pytest.raises(IsolationError, match=f"{name} models: attention '{attention}' is"):
                batch.model_inputs(model)
        if "flash" in family.two_way:
            window = named(name, "flash_attention_2", is_causal=False, sliding_window=4, **option)
            with pytest.raises(IsolationError, match="flash attention has a window of one cell le"):
                batch.model_inputs(window)


@pytest.mark.parametrize("name", ["ultrabert", "mobilebert", "splinter", "squeezebert", "llama4"])
def test_a_two_way_model_that_is_not_in_the_table_is_refused(name: str) -> None:
    batch = PackedCollator(0, max_tokens=32)(EXAMPLES)
    with pytest.raises(
        IsolationError, match=f"{name} models: tokens see later .* not in the table"
    ):
        batch.model_inputs(named(name, is_causal=False))


@pytest.mark.parametrize("name", ["RoFormerForCausalLM", "RemBertForCausalLM"])
def test_a_decoder_that_ignores_the_name_of_its_attention(name: str) -> None:
    masked = BY_NAME[name.replace("CausalLM", "MaskedLM")].options
    batch = PackedCollator(0, max_tokens=14)(EXAMPLES)
    with pytest.raises(IsolationError, match="it ignores attention 'torch_varlen'"):
        batch.model_inputs(encoder_model(name, "torch_varlen", **masked, is_decoder=True))
    check_isolation(encoder_model(name, "eager", **masked, is_decoder=True), batch)


@pytest.mark.parametrize("attention", ["sdpa", "torch_varlen"])
@pytest.mark.parametrize("name", ["BertLMHeadModel", "RobertaForCausalLM"])
def test_decoders_of_these_families_are_causal_and_apart(name: str, attention: str) -> None:
    options = BERT if name.startswith("Bert") else ROBERTA
    model = encoder_model(name, attention, **options, is_decoder=True)
    batch = packed(model, EXAMPLES)
    check_isolation(model, batch)
    if attention == "sdpa":
        assert not batch.model_inputs(model)["attention_mask"].triu(1).any()


def test_what_only_causal_models_get_is_refused() -> None:
    bert = encoder_model("BertForMaskedLM", "torch_varlen")
    collate = PackedCollator(0, max_tokens=48, parallel=ParallelLayout(tp=4))
    with pytest.raises(
        ValueError, match=r"a segment of row 0 has 9 tokens and 3 pads of alignment"
    ):
        collate(EXAMPLES).model_inputs(bert)
    collate([{"input_ids": [5] * 8}, {"input_ids": [6] * 4}]).model_inputs(bert)  # no such pads
    tree = PackedCollator(0, max_tokens=16, share_prefixes=True)([{"input_ids": [[5, 6], [5, 7]]}])
    with pytest.raises(
        IsolationError, match="share prefixes are wrong in bert models: tokens see l"
    ):
        tree.model_inputs(bert)
    even = PackedCollator(0, max_tokens=16, parallel=ParallelLayout(cp=2))(EXAMPLES[:1])
    with pytest.raises(
        IsolationError, match="context shards are wrong in bert models: tokens see l"
    ):
        even.context_shard(0, 2).model_inputs(bert)


# --- heads, padded rows, decoders ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "is_refused"),
    [
        ("BertForSequenceClassification", BERT, True),
        ("BertModel", BERT, True),
        ("AlbertForSequenceClassification", {**BERT, "embedding_size": 16}, True),
        ("DistilBertForSequenceClassification", BY_NAME["DistilBertForMaskedLM"].options, True),
        ("ModernBertForSequenceClassification", SIZES, True),
        ("ModernBertForSequenceClassification", {**SIZES, "classifier_pooling": "mean"}, False),
        ("BertForMaskedLM", {}, False),
        ("LlamaForSequenceClassification", {**DECODER, "is_causal": True}, False),
    ],
)
def test_pads_on_the_left_of_a_head_that_reads_cell_0(
    name: str, options: Any, is_refused: bool
) -> None:
    model = encoder_model(name, **options)
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
    options = {**DECODER, "is_causal": None, "pad_token_id": None}  # rows need one to be classified
    model = encoder_model(name, **options)
    batch = PackedCollator(0, max_tokens=14)(EXAMPLES)
    check_isolation(model, batch)
    assert len(batch) == 2
    leaking = {**batch.model_inputs(model, labels=False), "use_cache": True}
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

    batch = PackedCollator(0, max_tokens=14)(EXAMPLES)
    causal = {key: value for key, value in DECODER.items() if key != "is_causal"}
    check_isolation(Reward(transformers.LlamaConfig(**causal)).eval(), batch)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    model = encoder_model("LlamaForSequenceClassification", **causal)
    check_isolation(peft.get_peft_model(model, config), batch)
    bert = peft.LoraConfig(task_type="TOKEN_CLS", target_modules=["query"])
    check_isolation(peft.get_peft_model(encoder_model("RobertaForMaskedLM"), bert), batch)


def test_what_tells_text_from_vision() -> None:
    """The text part decides: towers are two-way, and PaliGemma's prefix stays as it is."""
    from tests.vision.families import FAMILIES

    batch = PackedCollator(0, max_tokens=32)(EXAMPLES)
    for name in ("qwen2_5_vl", "internvl", "gemma3"):
        batch.model_inputs(FAMILIES[name].model())
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "model_type": "gemma"}
    text |= {"use_bidirectional_attention": True}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=VISION)
    batch.model_inputs(transformers.PaliGemmaForConditionalGeneration(config))
