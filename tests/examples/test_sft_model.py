"""The model of examples/sft.py: which attention it gets and why, and what a GPU changes."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from typing import Any

import options
import pytest
import sft
import torch
import trained_model
import transformers
from trained_model import ModelWithLoss, choose_attention
from transformers.integrations.peft import MIN_PEFT_VERSION

import torch_collate_kit as kit
from tests.hybrid_models import hybrid_model
from tests.tiny_models import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXAMPLES = [{"input_ids": list(range(3, 9))}, {"input_ids": list(range(20, 32))}]
PACK = kit.PackedCollator(0, max_tokens=64)
TWO = PACK(EXAMPLES)
AUTO = Namespace(attention="auto", no_packing=False, precision="no", lora=None)


def with_changes(args: Namespace, **changes: Any) -> Namespace:
    return Namespace(**{**vars(args), **changes})


# --- attention on the CPU, with real models


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("qwen3", r"torch_varlen \(the first choice on cpu\)$"),
        ("opt", r"torch_varlen \(the first choice on cpu\)$"),
        (
            "gemma2",
            r"eager \(torch_varlen fails: torch_varlen cannot do attention soft-capping, but "
            r"Gemma2Attention passes softcap; sdpa leaves out the soft-capping",
        ),
        ("gpt_oss", r"eager \(torch_varlen fails: .* sinks, .*; sdpa is refused: "),
        ("falcon", r"eager \(torch_varlen cannot be set, FalconForCausalLM keeps eager; sdpa"),
        (
            "lfm2",
            r"torch_varlen \(the first choice on cpu\); isolate_mixers, since no attention can "
            r"train Lfm2ForCausalLM on packed rows without it$",
        ),
    ],
)
def test_the_first_attention_that_keeps_examples_apart(kind: str, line: str) -> None:
    model = tiny_model(kind, "eager").train()
    said = choose_attention(model, TWO, CPU, AUTO)
    assert re.match("attention: " + line, said), said
    assert "\n" not in said
    assert model.config._attn_implementation == said.split()[1]
    assert_is_each_alone(model)


def assert_is_each_alone(model: Any, collate: Any = PACK) -> None:
    """The loss of both together is that of each in a batch of its own."""
    trained, two = ModelWithLoss(model.eval()), collate(EXAMPLES)
    trained.check_head(two)
    parts = [trained(collate([example]), 100) for example in EXAMPLES]
    torch.testing.assert_close(trained(two, 100), sum(parts), rtol=1e-4, atol=0)


def test_a_model_that_cannot_be_packed() -> None:
    with pytest.raises(kit.IsolationError) as caught:
        choose_attention(tiny_model("bloom", "eager").train(), TWO, CPU, AUTO)
    assert str(caught.value).startswith(
        "no attention can train BloomForCausalLM on packed rows, use --no-packing: torch_varlen"
    )
    assert "in bloom models" in str(caught.value)


def test_padded_rows_of_a_model_that_reads_pads_on_the_left() -> None:
    model, args = hybrid_model("rwkv", "eager").train(), with_changes(AUTO, no_packing=True)
    collate = sft.make_collator(0, model, args)
    choose_attention(model, collate(EXAMPLES), CPU, args)
    assert_is_each_alone(model, collate)


# --- attention on CUDA: what is installed and the GPU are made up

HOPPER, AMPERE, TURING = (9, 0), (8, 6), (7, 5)
BF16 = with_changes(AUTO, precision="bf16")
WHY_NOT: list[tuple[str, dict[str, Any], str | None]] = [
    ("flash_attention_3", {}, None),
    ("flash_attention_3", {"gpu": AMPERE}, "a Hopper GPU (compute capability 9), this one has 8.6"),
    ("flash_attention_2", {"gpu": AMPERE}, None),
    ("torch_varlen", {"gpu": TURING}, "a GPU of compute capability 8.0, this one has 7.5"),
    ("torch_varlen", {"args": AUTO}, "bfloat16, and this run is in float32"),
    (
        "torch_varlen",
        {"head_dim": 12},
        "a head size that divides by 8 and is at most 256, this model has 12",
    ),
    ("sdpa", {"gpu": TURING, "args": AUTO, "head_dim": 12}, None),
]


@pytest.mark.parametrize(("name", "options", "expected"), WHY_NOT)
def test_what_an_attention_needs_on_cuda(
    name: str, options: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(options)
    gpu, args = options.pop("gpu", HOPPER), options.pop("args", BF16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    for version in (2, 3):
        installed = f"is_flash_attn_{version}_available"
        monkeypatch.setattr(transformers.utils, installed, lambda: True)
    found = trained_model.why_not(name, tiny_model("qwen3", **options), CUDA, args)
    assert found == (expected and f"needs {expected}")
    if name in trained_model.FLASH:
        # sinks: transformers names the kernels that have them, and the usual packages are none
        found = trained_model.why_not(name, tiny_model("gpt_oss"), CUDA, args)
        assert found == "is not supported by GptOssForCausalLM"
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{name[-1]}_available", lambda: 0)
        found = trained_model.why_not(name, tiny_model("qwen3"), CUDA, args)
        assert found == "is not installed"


# --- settings


def arguments(patch: pytest.MonkeyPatch, given: str = "", *, gpu: bool = False) -> Namespace:
    patch.setattr(sys, "argv", ["sft.py", *given.split()])
    patch.setattr(torch.cuda, "is_available", lambda: gpu)
    patch.delenv("ACCELERATE_USE_CPU", raising=False)
    return options.parse_arguments(options.argument_parser(), from_scratch=3e-3)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("given", "max_tokens", "learning_rate"),
    [
        ("", 512, 3e-3),
        ("--model m", 4096, 2e-5),
        ("--model m --lora 8", 4096, 2e-4),
        ("--model m --max-tokens 512 --learning-rate 0.5", 512, 0.5),
    ],
)
def test_defaults_do_not_depend_on_the_machine(
    gpu: bool, given: str, max_tokens: int, learning_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", MIN_PEFT_VERSION)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    args = arguments(monkeypatch, given, gpu=gpu)
    assert (args.max_tokens, args.learning_rate) == (max_tokens, learning_rate)
    rows = 1 if "--model" in given else 8
    assert (args.rows_per_micro_batch, args.attention, args.compile) == (rows, "auto", False)
    assert args.precision == ("bf16" if gpu else "no")
