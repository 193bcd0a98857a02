"""Padded rows of models that carry state: right on the right, wrong on the left in some."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hybrid_models import ATTENTION, FAMILIES, hybrid_model
from tests.test_isolation import Toy
from tests.tiny_models import VOCAB
from torch_collate_kit import Batch, PaddedCollator, check_isolation, packing_report
from torch_collate_kit.errors import IsolationError

WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
ALWAYS_WRONG = ("recurrent_gemma", "rwkv", "xlstm")
WITH_A_BIAS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "nemotron_h"), "use_bias"),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "zamba"), "mamba_proj_bias"
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "conv_bias"),
    "zamba2": "add_bias_linear",
}
CASES = [(name, {}) for name in FAMILIES] + [(name, {of: True}) for name, of in WITH_A_BIAS.items()]
FEW = [*ALWAYS_WRONG, "qwen3_5"], ["bamba", "lfm2", "nemotron_h"]


def is_quick(name: str, options: dict[str, Any]) -> bool:
    return name in FEW[bool(options)]


def model_of(name: str, options: dict[str, Any]) -> Any:
    """Biases are random, as after training; they begin at 0, which hides the fault."""
    attention = ATTENTION.get(name, "eager" if name in WITHOUT_ATTENTION else "sdpa")
    model = hybrid_model(name, attention, scale=5.0, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if of.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def padded(side: Any) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (11, 3, 7)]
    return PaddedCollator(0, padding_side=side)([{"input_ids": each} for each in ids])


@torch.no_grad()
def difference(model: Any, batch: Batch) -> float:
    """The largest difference of a logit from the example alone, relative to the largest."""
    fields = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**fields, use_cache=False).logits
    found = []
    for row, is_real in enumerate(batch["attention_mask"].bool()):
        alone = model(input_ids=batch["input_ids"][row, is_real][None], use_cache=False).logits[0]
        found.append((alone - logits[row, is_real]).abs().max() / alone.abs().max())
    return float(max(found))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.release, id=str(case))
        for case in CASES
    ],
)
def test_the_table_of_padding_sides(name: str, options: dict[str, Any]) -> None:
    model = model_of(name, options)
    is_wrong = name in ALWAYS_WRONG or bool(options)
    notes = packing_report([1], 8, model=model, show=False)["recommended"]["notes"]
    assert any("padded on the left are wrong" in note for note in notes) == is_wrong
    assert difference(model, padded("right")) < 2e-5
    left = difference(model, padded("left"))
    assert left > 0.01 if is_wrong else left < 2e-5


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("recurrent_gemma", {}, "recurrent_gemma models: its recurrent layers ignore the mask"),
        ("rwkv", {}, "rwkv models: it has no use for the mask"),
        ("lfm2", {"conv_bias": True}, "lfm2 models: with conv_bias=True pads on the left"),
    ],
)
def test_pads_on_the_left_are_refused_with_the_reason(
    name: str, options: dict[str, Any], reason: str
) -> None:
    model, (left, right) = model_of(name, options), map(padded, ("left", "right"))
    attention = model.config._attn_implementation
    for inputs in (left, left.model_inputs(attention)):
        with pytest.raises(IsolationError, match=rf"{reason}.*padding_side=\"right\""):
            check_isolation(model, inputs)
    for inputs in (right, right.model_inputs(attention)):
        check_isolation(model, inputs)


def test_without_a_config_pads_are_measured() -> None:
    model = Toy()
    del model.config
    inputs = padded("left").model_inputs("sdpa", labels=False)
    check_isolation(model, inputs)
