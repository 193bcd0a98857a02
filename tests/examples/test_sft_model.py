"""The model of examples/sft.py: which attention it gets and why, and what a GPU changes."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from typing import Any

import options
import pytest
import torch
import trained_model
import transformers
from trained_model import Attention, ModelWithLoss, choose_attention

import torch_collate_kit as kit
from tests.tiny_models import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXAMPLES = [{"input_ids": list(range(3, 9))}, {"input_ids": list(range(20, 32))}]
TWO = kit.PackedCollator(0, max_tokens=64)(EXAMPLES)
AUTO = Namespace(attention="auto", no_packing=False, precision="no", lora=None)


def with_changes(args: Namespace, **changes: Any) -> Namespace:
    return Namespace(**{**vars(args), **changes})


# --- attention on the CPU, with real models


@pytest.mark.parametrize(
    ("kind", "expected", "line"),
    [
        ("qwen3", ("torch_varlen", None, None), r"torch_varlen \(the first choice on cpu\)"),
        ("opt", ("torch_varlen", None, None), r"torch_varlen \(the first choice on cpu\)"),
        (
            "gemma2",
            ("eager", None, None),
            r"eager \(torch_varlen fails: torch_varlen cannot do attention soft-capping, but "
            r"Gemma2Attention passes softcap; sdpa leaves out the soft-capping",
        ),
        (
            "gpt_oss",
            ("eager", "block", 4),
            r"eager with a block mask \(torch_varlen fails: .* sinks, .*; sdpa is refused: .*; "
            r"eager fails: row 0 segment 0 leaks into row 0 segment 1 \(in eval mode\)\)",
        ),
        (
            "falcon",
            ("eager", "block", None),
            r"eager with a block mask \(torch_varlen cannot be set, FalconForCausalLM keeps eager",
        ),
    ],
)
def test_the_first_attention_that_keeps_examples_apart(
    kind: str, expected: tuple[Any, ...], line: str
) -> None:
    model = tiny_model(kind, "eager").train()
    attention, said = choose_attention(model, TWO, CPU, AUTO)
    assert attention == expected
    assert model.config._attn_implementation == attention.attention
    assert re.match("attention: " + line, said)
    assert "\n" not in said
    assert_is_each_alone(model, attention)


def assert_is_each_alone(model: Any, attention: Attention) -> None:
    """The loss of both, packed, is that of each in a batch of its own."""
    trained = ModelWithLoss(model.eval(), attention)
    trained.check_head(TWO)
    alone = Attention("eager") if attention.attention == "eager" else attention
    one_by_one = ModelWithLoss(model, alone)
    one_by_one.through_head = trained.through_head
    collate = kit.PackedCollator(0, max_tokens=64)
    parts = [one_by_one(collate([example]), 100) for example in EXAMPLES]
    torch.testing.assert_close(trained(TWO, 100), sum(parts), rtol=1e-4, atol=0)


def test_a_model_that_cannot_be_packed() -> None:
    with pytest.raises(kit.IsolationError) as caught:
        choose_attention(tiny_model("lfm2", "eager").train(), TWO, CPU, AUTO)
    message = str(caught.value)
    assert message.startswith(
        "no attention can train Lfm2ForCausalLM on packed rows, use --no-packing: torch_varlen"
    )
    assert "lfm2 model has ['conv'] layers" in message


def test_attention_chosen_by_hand() -> None:
    model, args = tiny_model("qwen3", "eager").train(), with_changes(AUTO, attention="sdpa")
    chosen, line = choose_attention(model, TWO, CPU, args)
    assert (chosen, line) == (Attention("sdpa"), "attention: sdpa (as asked for)")
    assert model.config._attn_implementation == "sdpa"
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(kit.IsolationError) as caught:
            choose_attention(model, TWO, CPU, with_changes(AUTO, attention=name))
        assert str(caught.value) == (
            f"--attention {name} cannot train Qwen3ForCausalLM on packed rows, use --no-packing: "
            f"{name} needs a CUDA GPU"
        )


def test_padded_rows_have_the_attention_of_transformers() -> None:
    padded, args = kit.PaddedCollator(0)(EXAMPLES), with_changes(AUTO, no_packing=True)
    chosen, line = choose_attention(tiny_model("qwen3", "eager"), padded, CPU, args)
    assert (chosen, line) == (Attention("sdpa"), "attention: sdpa (the first choice on cpu)")
    chosen, line = choose_attention(tiny_model("gemma2", "eager"), padded, CPU, args)
    assert chosen == Attention("eager")
    assert "sdpa leaves out the soft-capping" in line


# --- attention on CUDA, as it would be chosen: what is installed, the GPU and the check are made up

HOPPER, AMPERE, TURING = (9, 0), (8, 6), (7, 5)
BF16 = with_changes(AUTO, precision="bf16")
NONE_INSTALLED = "flash_attention_3 is not installed; flash_attention_2 is not installed"


def chosen_on_cuda(
    patch: pytest.MonkeyPatch,
    *,
    installed: tuple[int, ...] = (),
    gpu: tuple[int, int] = HOPPER,
    args: Namespace = BF16,
    failing: tuple[str, ...] = (),
    kind: str = "qwen3",
    **changes: Any,
) -> str:
    """The line, of which the attention must be what is set last."""
    tried: list[Attention] = []

    def fails(attention: Attention, *_: Any) -> str | None:
        tried.append(attention)
        return "fails: examples leak" if str(attention) in failing else None

    for version in (2, 3):
        name = f"is_flash_attn_{version}_available"
        patch.setattr(transformers.utils, name, lambda v=version: v in installed)
    patch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    patch.setattr(trained_model, "why_refused", lambda *_: None)
    patch.setattr(trained_model, "why_it_fails", fails)
    attention, line = choose_attention(tiny_model(kind, **changes), TWO, CUDA, args)
    assert attention == tried[-1]
    assert line.count("\n") == 0
    return line.removeprefix("attention: ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"installed": (2, 3)}, "flash_attention_3 (the first choice on cuda)"),
        ({}, f"torch_varlen ({NONE_INSTALLED})"),
        (
            {"installed": (2, 3), "gpu": AMPERE},
            "flash_attention_2 (flash_attention_3 needs a Hopper GPU (compute capability 9), this "
            "one has 8.6)",
        ),
        (
            {"gpu": TURING, "args": AUTO},
            f"sdpa ({NONE_INSTALLED}; torch_varlen needs a GPU of compute capability 8.0, this one "
            "has 7.5)",
        ),
        (
            {"args": AUTO},
            f"sdpa ({NONE_INSTALLED}; torch_varlen needs bfloat16, and this run is in float32)",
        ),
        (
            {"head_dim": 12},
            f"sdpa ({NONE_INSTALLED}; torch_varlen needs a head size that divides by 8 and is at "
            "most 256, this model has 12)",
        ),
        (
            {"failing": ("torch_varlen", "sdpa")},
            f"sdpa with a block mask ({NONE_INSTALLED}; torch_varlen fails: examples leak; sdpa "
            "fails: examples leak)",
        ),
        ({"args": with_changes(BF16, attention="sdpa")}, "sdpa (as asked for)"),
        ({"args": with_changes(BF16, no_packing=True)}, "sdpa (the first choice on cuda)"),
    ],
)
def test_attention_on_cuda(
    options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_on_cuda(monkeypatch, **options) == expected


def test_what_a_model_has_no_flash_attention_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks: transformers names the kernels that have them, and the usual packages are none."""
    line = chosen_on_cuda(monkeypatch, kind="gpt_oss", installed=(2, 3), failing=("torch_varlen",))
    reason = "is not supported by GptOssForCausalLM"
    flash = f"flash_attention_3 {reason}; flash_attention_2 {reason}"
    assert line == f"sdpa ({flash}; torch_varlen fails: examples leak)"  # sdpa: as made up here
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "_supports_flash_attn", False)
    line = chosen_on_cuda(monkeypatch, installed=(2, 3))
    assert line == f"torch_varlen ({flash})".replace("GptOss", "Qwen3")


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
    pytest.importorskip("peft")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    args = arguments(monkeypatch, given, gpu=gpu)
    assert (args.max_tokens, args.learning_rate) == (max_tokens, learning_rate)
    rows = 1 if "--model" in given else 8
    assert (args.rows_per_micro_batch, args.attention, args.compile) == (rows, "auto", False)
    assert args.precision == ("bf16" if gpu else "no")
