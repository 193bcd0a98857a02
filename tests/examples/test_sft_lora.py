"""Adapters in examples/sft.py: trained alone, saved alone, and exact in all that packing does."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_model
import transformers
from safetensors.torch import load_file
from trained_model import Attention, ModelWithLoss, prepare, trained_parameters

import torch_collate_kit as kit
from tests.examples.runs import run
from tests.tiny_models import tiny_model

pytest.importorskip("peft")

ARGS = Namespace(lora=4, lora_alpha=None, gradient_checkpointing=False, precision="no")
EXAMPLES = [
    {"input_ids": list(range(3, 3 + n)), "loss_mask": [0, 1] * (n // 2)} for n in (6, 4, 12)
]
COLLATE = kit.PackedCollator(0, max_tokens=64)
VARLEN = Attention("torch_varlen")
OPTIMIZER = Namespace(learning_rate=0.1, weight_decay=0.0)


def adapted(**changes: Any) -> Any:
    """A tiny model with adapters that do something: at first their second half is zeros."""
    args = Namespace(**{**vars(ARGS), **changes})
    model = prepare(tiny_model("qwen3").to(trained_model.weight_dtype(args)), args).train()
    generator = torch.Generator().manual_seed(1)
    for parameter in trained_parameters(model):
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def gradients(trained: ModelWithLoss, *batches: kit.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses, and its gradients, as one vector."""
    trained.zero_grad()
    loss = sum(trained(batch, 11) for batch in batches)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trained_parameters(trained)])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_examples_are_trained_as_alone(checkpointing: bool) -> None:
    """Through the head: its logits never exist as a whole. Adapters are all that is trained."""
    trained = ModelWithLoss(adapted(gradient_checkpointing=checkpointing), VARLEN)
    names = [name for name, value in trained.named_parameters() if value.requires_grad]
    assert len(names) == 2 * 2 * 7  # A and B of seven linear layers in two decoder layers
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    [group] = trained_model.make_optimizer(trained, OPTIMIZER).param_groups
    assert len(group["params"]) == len(names)
    kit.check_isolation(trained.model, COLLATE(EXAMPLES))
    trained.check_head(COLLATE(EXAMPLES))
    assert trained.through_head
    packed = gradients(trained, COLLATE(EXAMPLES))
    alone = gradients(trained, *[COLLATE([example]) for example in EXAMPLES])
    assert packed[1].abs().max() > 0
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    trained.through_head = False
    torch.testing.assert_close(gradients(trained, COLLATE(EXAMPLES)), alone, rtol=1e-4, atol=1e-5)


# --- runs of sft.py

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
