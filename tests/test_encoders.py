"""Two-way models: packed and padded rows equal each text alone, or are refused with the reason."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.building import packed_collator
from tests.encoder_models import (
    BERT,
    BY_NAME,
    ENCODERS,
    EXAMPLES,
    ROBERTA,
    TABLE,
    Encoder,
    compared,
    difference,
    encoder_model,
    outputs_of,
    packed,
    texts,
)
from tests.oracle import two_way_inputs
from tests.strategies import FUZZ, batches, packed_options
from tests.test_model_kinds import named
from torch_collate_kit import (
    DataError,
    IsolationError,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    TokenizedDataset,
    check_isolation,
    families,
)
from torch_collate_kit.batch.model_kind import ModelKind

transformers = pytest.importorskip("transformers")
ALL_CASES = bool(os.environ.get("ALL_CASES"))
# In CI a family for each mechanism; ALL_CASES=1 runs every one.
IN_CI = {
    "BertForMaskedLM": ("sdpa", "torch_varlen"),
    "RobertaForMaskedLM": ("sdpa", "torch_varlen"),
    "ModernBertForMaskedLM": ("sdpa", "eager", "torch_varlen"),
    "Gemma3TextModel": ("sdpa", "torch_varlen"),
    "MistralModel": ("eager", "torch_varlen"),
    "T5EncoderModel": ("sdpa",),
    "MPNetForMaskedLM": ("eager",),
    "RoFormerForMaskedLM": ("eager",),
    "EsmForMaskedLM": ("torch_varlen",),
}
CASES = [
    pytest.param(encoder, attention, id=f"{encoder.name}-{attention}-{number}")
    for number, encoder in enumerate(ENCODERS)
    for attention in encoder.attention
    if attention != "flash" and (ALL_CASES or attention in IN_CI.get(encoder.name, ()))
]
POOLS_CELL_0 = ("BigBirdForTokenClassification",)


def test_the_path_of_flash_attention_equals_each_text_alone() -> None:
    """With a stand-in for the kernel; numbers are multiples of the bounds."""
    command = [sys.executable, "-m", "tests.kernels.encoders"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == sum("flash" in encoder.attention for encoder in ENCODERS)
    assert max(found.values()) < 1, found


def test_every_two_way_type_of_the_table_has_a_case() -> None:
    models = [getattr(transformers, encoder.name).config_class for encoder in ENCODERS]
    of_cases = {config.model_type for config in models} | {"embedding_gemma2"}
    rows = [family for family in families.FAMILIES if family.two_way]
    assert of_cases == {name for family in rows for name in family.model_types}
    attention = {e.name: e.attention for e in ENCODERS if e.attention[-1] == "flash"}
    for name in attention:
        config = getattr(transformers, name).config_class
        assert families.family_of(config(**BY_NAME[name].options)).two_way[-1] == "flash"


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_a_name_alone_stays_causal_and_a_model_says_what_it_is(name: str) -> None:
    model = encoder_model(name)
    batch = packed(model, EXAMPLES)
    mask = batch.model_inputs("sdpa", mask="block")["attention_mask"]
    assert not mask.triu(1).any()
    two_way = batch.model_inputs(model)["attention_mask"]
    two_way = two_way["full_attention"] if isinstance(two_way, dict) else two_way
    assert torch.equal(two_way, mask | mask.mT)
    collate = PackedCollator(0, max_tokens=48, targets="same_token")
    labelled = [{**example, "labels": example["input_ids"]} for example in EXAMPLES]
    inputs = pickle.loads(pickle.dumps(collate.for_trainer(model)))(labelled)
    expected = collate(labelled).model_inputs(model)
    assert inputs.keys() == expected.keys()
    for key, value in expected.items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        for part, tensor in pairs:
            found = inputs[key][part] if part else inputs[key]
            assert torch.equal(found, tensor) if isinstance(tensor, Tensor) else found == tensor
    flash = named("bert", "flash_attention_2", is_causal=False)
    assert "attention_mask" not in batch.model_inputs(flash)
    assert "cu_seq_lens_q" in batch.model_inputs(flash)


# --- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "first"), [("BertForMaskedLM", 0), ("RobertaForMaskedLM", 2)])
def test_cells_without_a_text_have_the_first_position(name: str, first: int) -> None:
    model = encoder_model(name)
    text = {"input_ids": [7, 8, 9]}
    batch = PackedCollator(1, max_tokens=64, fixed_width=True)([text])
    inputs = batch.model_inputs(model)
    assert inputs["position_ids"][0].tolist() == [first, first + 1, first + 2, *[first] * 61]
    alone = outputs_of(model, {"input_ids": torch.tensor([text["input_ids"]])})
    assert difference(outputs_of(model, inputs)[:, :3], alone) < 1e-10
    more = batch.pad_rows(multiple_of=3)
    assert outputs_of(model, more.model_inputs(model)).isfinite().all()
    assert batch["position_ids"][0, :3].tolist() == [0, 1, 2]  # the batch's own count from 0


def test_a_rank_with_only_added_rows_runs() -> None:
    from torch_collate_kit.loading import PackedBatchSampler

    model = encoder_model("BertForMaskedLM")
    dataset = TokenizedDataset([{"input_ids": [7, 8, 9], "token_type_ids": [0, 1, 1]}])
    collate = PackedCollator(
        0, max_tokens=64, fixed_width=True, parallel=ParallelLayout(dp=2), strategy="sequential"
    )
    ranks = []
    for rank in range(2):
        sampler = PackedBatchSampler(dataset, collate, batch_size=1, dp_rank=rank, shuffle=False)
        ranks += [collate(dataset.__getitems__(part)) for part in sampler]
    assert [len(batch.row_metadata["example_indices"].values) for batch in ranks] == [1, 0]
    for batch in ranks:
        assert outputs_of(model, batch.model_inputs(model)).isfinite().all()
        assert int(batch.model_inputs(model)["position_ids"].max()) < TABLE


def test_a_text_over_the_table_is_named_with_both_numbers() -> None:
    long = [{"input_ids": [5] * 25}, {"input_ids": [5] * 3}]
    message = r"a text has 25 tokens, and the table of the bert model has 24 positions; cut texts"
    model = encoder_model("BertForMaskedLM")
    for collate in (PackedCollator(0, max_tokens=32), PaddedCollator(0)):
        with pytest.raises(ValueError, match=message):
            collate(long).model_inputs(model)
    labelled = [{**text, "labels": text["input_ids"]} for text in long]
    with pytest.raises(ValueError, match=message):
        PackedCollator(0, max_tokens=32, targets="same_token").for_trainer(model)(labelled)
    rows = PackedCollator(0, max_tokens=48)([{"input_ids": [5] * 24}, {"input_ids": [5] * 24}])
    rows.model_inputs(model)  # a row is longer than the table
    with pytest.raises(ValueError, match="a row has 48 tokens, and the table of the roformer"):
        rows.model_inputs(encoder_model("RoFormerForMaskedLM", "eager", max_position_embeddings=24))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("NystromformerForMaskedLM", BERT),
        ("LongformerForMaskedLM", ROBERTA),
        ("MPNetModel", ROBERTA),
    ],
)
def test_padded_rows_have_the_positions_that_the_model_makes(name: str, options: Any) -> None:
    model = encoder_model(name, "eager", **options)
    pad = model.config.pad_token_id
    batch = PaddedCollator(pad, padding_side="right")(EXAMPLES)
    own = {key: batch[key] for key in ("input_ids", "attention_mask")}
    found, expected = (outputs_of(model, each) for each in (batch.model_inputs(model), own))
    assert difference(found[1], expected[1]) < 1e-10  # the longest: Nystromformer mixes pads in


# --- types of tokens -----------------------------------------------------------------------------

PAIRS = [
    {"input_ids": [5, 6, 7, 8], "token_type_ids": [0, 0, 1, 1]},
    {"input_ids": [9, 6, 4], "token_type_ids": [0, 1, 1]},
    {"input_ids": [3], "token_type_ids": [0]},
]


def test_types_of_tokens_reach_a_model_that_has_them() -> None:
    batch = PackedCollator(0, max_tokens=10, fixed_width=True, strategy="sequential")(PAIRS)
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 0, 1, 1, 0, 0, 0]]
    assert batch["token_type_ids"].dtype == torch.int64
    columns = {key: [pair[key] for pair in PAIRS] for key in PAIRS[0]}
    dataset = TokenizedDataset(PAIRS)
    assert batch == PackedCollator(0, max_tokens=10, fixed_width=True, strategy="sequential")(
        columns
    )
    assert dataset.__getitems__([1])["token_type_ids"].values.tolist() == [0, 1, 1]
    padded = PaddedCollator(0)(PAIRS)
    assert padded["token_type_ids"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    model = encoder_model("BertForMaskedLM")
    without = [{"input_ids": pair["input_ids"]} for pair in PAIRS]
    plain = PackedCollator(0, max_tokens=10, fixed_width=True, strategy="sequential")(without)
    assert "token_type_ids" not in plain.model_inputs(model)
    found, untyped = (outputs_of(model, b.model_inputs(model))[:, :7] for b in (batch, plain))
    assert difference(found, untyped) > 0.1
    assert max(compared(model, padded[:1], PAIRS)) < 1e-10


def test_types_that_a_model_would_lose_are_refused() -> None:
    typed = PackedCollator(0, max_tokens=10)(PAIRS)
    lost = r"token_type_ids are up to 1, and this model gets none; pass the model itself"
    roberta = encoder_model("RobertaForMaskedLM", type_vocab_size=1)
    for model in (roberta, encoder_model("ModernBertForMaskedLM"), named("llama"), "sdpa", None):
        with pytest.raises(ValueError, match=lost):
            typed.model_inputs(model)
        with pytest.raises(ValueError, match=lost):
            PaddedCollator(0)(PAIRS).model_inputs(model)
    zeros = [{**pair, "token_type_ids": [0] * len(pair["input_ids"])} for pair in PAIRS]
    untyped = PackedCollator(0, max_tokens=10)(zeros)
    for model in (roberta, named("llama"), "sdpa"):
        assert "token_type_ids" not in untyped.model_inputs(model)
    joined = type(typed).cat([untyped[:1], typed[:1]], metadata=dict(typed.metadata))
    with pytest.raises(ValueError, match=lost):
        joined.model_inputs(roberta)
    three = [{"input_ids": [5, 6], "token_type_ids": [0, 3]}]
    with pytest.raises(ValueError, match=r"are up to 3, and this model has the types 0 to 1"):
        PackedCollator(0, max_tokens=4)(three).model_inputs(encoder_model("BertForMaskedLM"))
    for rows, error in (
        (
            [*PAIRS, {"input_ids": [5], "token_type_ids": [-1]}],
            r"example 3: .* contain -1; they count",
        ),
        ([*PAIRS, {"input_ids": [5], "token_type_ids": [1, 1]}], "example 3: token_type_ids has 2"),
        ([*PAIRS, {"input_ids": [5], "token_type_ids": [0.5]}], r"example 3.*token_type_ids"),
        ([*PAIRS, {"input_ids": [5]}], "example 3 and example 0 differ in token_type_ids"),
    ):
        with pytest.raises(DataError, match=error):
            PackedCollator(0, max_tokens=10)(rows)


@FUZZ
@given(data=st.data())
def test_types_positions_and_masks_equal_the_oracle(data: st.DataObject) -> None:
    drawn = data.draw(batches("none", max_examples=5, max_length=12, columns=False))
    options = data.draw(packed_options(drawn.lengths))
    layout = {"dp": options.layout["dp"]}  # no pads inside
    collate = packed_collator(0, parallel=ParallelLayout(**layout), **options.collator)
    given_types = [[id % 3 for id in example["input_ids"]] for example in drawn.plain]
    rows = [{"input_ids": example["input_ids"]} for example in drawn.plain]
    batch = collate(
        [{**row, "token_type_ids": t} for row, t in zip(rows, given_types, strict=True)]
    )
    window = data.draw(st.integers(1, 12))
    model: Any = torch.nn.Module()
    model.position_embeddings = torch.nn.Embedding(200, 1, padding_idx=1)
    types = ["sliding_attention", "full_attention"]
    model.config = SimpleNamespace(
        model_type="modernbert", is_causal=False, type_vocab_size=3, _attn_implementation="sdpa",
        sliding_window=window - 1 or None, layer_types=types,
    )  # fmt: skip
    inputs = batch.model_inputs(model)
    bounds, lengths = (batch[name].tolist() for name in ("cu_seq_lens", "sub_seq_lengths"))
    for reach in (1000, window):
        positions, seen = two_way_inputs(bounds, lengths, 2, reach)
        assert inputs["position_ids"].tolist() == positions
        mask = inputs["attention_mask"]
        if isinstance(mask, dict):
            mask = mask["full_attention" if reach == 1000 else "sliding_attention"]
        elif reach != 1000:
            assert window == 1
            continue
        assert mask[:, 0].tolist() == seen
    expected = (batch["input_ids"] % 3) * batch["attention_mask"]
    assert torch.equal(batch["token_type_ids"], expected)
    found = inputs.get("token_type_ids")
    assert found is not None
    assert torch.equal(found, expected)


# --- check_isolation -----------------------------------------------------------------------------


def changed(name: str, inputs: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Inputs with a planted fault."""
    if name == "positions from 0":
        return inputs | {"position_ids": inputs["position_ids"] - 2}
    if name == "causal":
        causal = (
            {kind: each.tril() for kind, each in mask.items()}
            if isinstance(mask, dict)
            else mask.tril()
        )
        return inputs | {"attention_mask": causal}
    if name == "one side":
        sliding = mask["sliding_attention"]
        beyond = (mask["full_attention"] & ~sliding).triu()
        return inputs | {"attention_mask": {**mask, "sliding_attention": sliding | beyond}}
    assert name == "no mask"
    return {key: value for key, value in inputs.items() if key != "attention_mask"}


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("RobertaForMaskedLM", "positions from 0", "differs from a run alone.*its position_ids"),
        ("BertForMaskedLM", "causal",
         "differs from a run alone.*lets tokens see too much or too l"),
        ("ModernBertForMaskedLM", "causal", "differs from a run alone.*see too much or too little"),
        ("ModernBertForMaskedLM", "one side",
         "differs from a run alone.*see too much or too little"),
        ("BertForMaskedLM", "no mask",
         r"leaks into .*see later ones.*pass batch.model_inputs\(model"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_found(name: str, fault: str, message: str) -> None:
    model = encoder_model(name)
    inputs = packed(model, EXAMPLES).model_inputs(model, labels=False)
    check_isolation(model, inputs)  # the tail of pads is no segment
    with pytest.raises(IsolationError, match=message):
        check_isolation(model, changed(fault, inputs, inputs.get("attention_mask")))


def test_a_window_lost_on_one_side_of_the_only_mask() -> None:
    model = encoder_model("MistralModel")
    inputs = packed(model, EXAMPLES).model_inputs(model)
    check_isolation(model, inputs)
    mask = inputs["attention_mask"]
    full = packed(model, EXAMPLES).model_inputs(encoder_model("LlamaForTokenClassification"))
    for wrong in (mask | full["attention_mask"].triu(), mask | full["attention_mask"].tril()):
        with pytest.raises(ValueError, match="so the sliding window of 5 tokens is lost"):
            check_isolation(model, {**inputs, "attention_mask": wrong})


# --- every family ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "attention"), CASES)
def test_packed_and_padded_rows_equal_each_text_alone(encoder: Encoder, attention: str) -> None:
    model = encoder_model(encoder.name, attention, **encoder.options)
    examples, bound = texts(model), encoder.bounds[attention == "eager"]
    batch = packed(model, examples)
    assert batch["input_ids"].shape == (2, 48)
    check_isolation(model, batch)
    if attention == "torch_varlen":  # padded rows are for a mask
        reference = encoder_model(encoder.name, "sdpa", **encoder.options)
        assert max(compared(model, batch, examples, reference)) < bound
        return
    assert max(compared(model, batch, examples)) < bound
    if attention == "eager" and ModelKind.of(model).window is not None:
        # in fp64 transformers' own mask is -inf for the fp32 softmax: a pad that sees none is NaN
        model, bound = model.float(), 1e-5
    sides = ("right",) if encoder.name in POOLS_CELL_0 else ("right", "left")
    for side in sides:
        rows = PaddedCollator(batch.placement.pad_token_id, padding_side=side)(examples)
        assert max(compared(model, rows, examples)) < bound
