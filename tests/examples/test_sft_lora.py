"""Adapters in examples/sft.py: trained alone, saved alone, and resumed exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.examples.runs import run

pytest.importorskip("peft", MIN_PEFT_VERSION)
TINY = "--num-conversations 60 --num-held-out 10 --batch-size 6 --max-tokens 256 --cpu --threads 1"


def test_a_run_saves_its_adapter_and_resumes_exactly(base: Path, tmp_path: Path) -> None:
    options = f"{TINY} --model {base / 'model'} --lora 2 --max-steps 4 --checkpoint-every 2"
    options += " --learning-rate 0.02 --gradient-checkpointing"
    out = tmp_path / "out"
    found = run(options, out)
    assert sum(name.startswith("exact match") for name in found.summary) >= 3
    assert not (out / "model" / "model.safetensors").exists()
    config = json.loads((out / "model" / "adapter_config.json").read_text())
    expected = (2, 4, str(base / "model"))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == expected
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    saved = load_file(out / "model" / "adapter_model.safetensors")
    in_checkpoint = load_file(out / "checkpoint-00000004" / "model.safetensors")
    own = dict(loaded.named_parameters())
    for name, value in saved.items():
        name = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(own[name], value)
        assert torch.equal(in_checkpoint[f"model.{name}"], value)
    assert max(value.abs().max() for name, value in saved.items() if "lora_B" in name) > 0
    optimizer = torch.load(out / "checkpoint-00000004" / "optimizer.bin", weights_only=True)
    assert len(saved) == len(in_checkpoint) == len(optimizer["state"]) == 2 * 14
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(out / later)
    assert run(f"{options} --resume", out).losses == found.losses
    again = load_file(out / "model" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in saved.items())
