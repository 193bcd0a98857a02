"""Adapters in examples/sft.py: trained alone, saved alone, and exact in all that packing does."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sft
import torch
import trained_model
import transformers
from attention_choice import Attention
from safetensors.torch import load_file
from trained_model import ModelWithLoss, make_optimizer, prepare, trained_parameters

import torch_collate_kit as kit
from tests.tiny_models import tiny_model

pytest.importorskip("peft")

ARGS = Namespace(lora=4, lora_alpha=None, gradient_checkpointing=False, precision="no")
EXAMPLES = [
    {"input_ids": list(range(3, 3 + n)), "loss_mask": [0, 1] * (n // 2)} for n in (6, 4, 12)
]
COLLATE = kit.PackedCollator(0, max_tokens=64)
VARLEN = Attention("torch_varlen")


def adapted(kind: str = "qwen3", **changes: Any) -> Any:
    """A tiny model with adapters that do something: at first their second half is zeros."""
    args = Namespace(**{**vars(ARGS), **changes})
    model = prepare(tiny_model(kind).to(trained_model.weight_dtype(args)), args).train()
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


@pytest.mark.parametrize("kind", ["qwen3", "opt"])
def test_adapters_are_all_that_is_trained(kind: str) -> None:
    model = adapted(kind)
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    linear = [m for m in tiny_model(kind).base_model.modules() if type(m) is torch.nn.Linear]
    assert len(names) == 2 * len(linear)
    args = Namespace(learning_rate=0.1, weight_decay=0.0)
    [group] = make_optimizer(ModelWithLoss(model, VARLEN), args).param_groups
    assert [id(value) for value in group["params"]] == [id(v) for v in trained_parameters(model)]
    assert group["fused"]


@pytest.mark.parametrize(("alpha", "factor"), [(None, 2.0), (2, 0.5)])
def test_alpha(alpha: int | None, factor: float) -> None:
    layers = [m for m in adapted(lora_alpha=alpha).modules() if hasattr(m, "lora_A")]
    assert {layer.scaling["default"] for layer in layers} == {factor}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_examples_are_trained_as_alone(checkpointing: bool) -> None:
    """Through the head: its logits never exist as a whole."""
    trained = ModelWithLoss(adapted(gradient_checkpointing=checkpointing), VARLEN)
    kit.check_isolation(trained.model, COLLATE(EXAMPLES))
    trained.check_head(COLLATE(EXAMPLES))
    assert trained.through_head
    packed = gradients(trained, COLLATE(EXAMPLES))
    alone = gradients(trained, *[COLLATE([example]) for example in EXAMPLES])
    assert packed[1].abs().max() > 0
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    trained.through_head = False
    torch.testing.assert_close(gradients(trained, COLLATE(EXAMPLES)), alone, rtol=1e-4, atol=1e-5)


def test_frozen_weights_in_bfloat16() -> None:
    """As on a GPU: half the memory, adapters in float32, and the loss of bfloat16 products."""
    exact, _ = gradients(ModelWithLoss(adapted(), VARLEN), COLLATE(EXAMPLES))
    model = adapted(precision="bf16")
    dtypes = {value.requires_grad: value.dtype for value in model.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        loss, found = gradients(ModelWithLoss(model, VARLEN), COLLATE(EXAMPLES))
    assert found.dtype == torch.float32
    assert 0 < abs(loss - exact) < 0.05 * exact


def test_the_state_is_that_of_the_adapters() -> None:
    trained, other = (ModelWithLoss(adapted(), VARLEN) for _ in range(2))
    state = trained.state_dict()
    assert len(state) == len(trained_parameters(trained))
    with torch.no_grad():
        for parameter in trained_parameters(other):
            parameter.zero_()
    other.load_state_dict(state)
    batch = COLLATE(EXAMPLES)
    assert torch.equal(other(batch, 11), trained(batch, 11))
    state.popitem()
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_B") as caught:
        other.load_state_dict(state)
    assert "base_layer" not in str(caught.value)
    wrapped = torch.nn.ModuleDict({"module": trained})
    assert set(wrapped.state_dict()) == {f"module.{name}" for name in trained.state_dict()}
    wrapped.load_state_dict(wrapped.state_dict())


def test_without_adapters_the_state_is_all() -> None:
    model = tiny_model("qwen3")
    trained = ModelWithLoss(model, VARLEN)
    assert len(trained.state_dict()) == len(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        trained.load_state_dict({})


# --- runs of sft.py

TINY = "--num-conversations 60 --num-held-out 10 --batch-size 6 --max-tokens 256 --cpu --threads 1"
EXAMPLES_FOLDER = Path(__file__).resolve().parents[2] / "examples"
Run = Callable[..., list[float]]


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Call sft.main() with these arguments in this process; its losses."""
    with pytest.MonkeyPatch.context() as patch:

        def call(arguments: str, folder: Path) -> list[float]:
            patch.setattr(sys, "argv", ["sft.py", *arguments.split(), "--output-dir", str(folder)])
            sft.main()
            return losses(folder)

        yield call


@pytest.fixture(scope="module")
def options(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run that trains adapters of a model that was trained a little."""
    folder = tmp_path_factory.mktemp("base")
    run(f"{TINY} --max-steps 3", folder)
    model = f"--model {folder / 'model'} --lora 2 --learning-rate 0.02"
    return f"{TINY} {model} --max-steps 4 --checkpoint-every 2 --gradient-checkpointing"


@pytest.fixture(scope="module")
def trained(run: Run, options: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    run(options, folder)
    return folder


def test_a_run_saves_its_adapter(options: str, trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert sum(name.startswith("exact match") for name in summary) > 3
    assert not (trained / "model" / "model.safetensors").exists()
    config = json.loads((trained / "model" / "adapter_config.json").read_text())
    base = options.split("--model ")[1].split()[0]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4, base)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(trained / "model")
    saved = load_file(trained / "model" / "adapter_model.safetensors")
    in_checkpoint = load_file(trained / "checkpoint-00000004" / "model.safetensors")
    assert len(saved) == len(in_checkpoint) == 2 * 14
    own = dict(loaded.named_parameters())
    for name, value in saved.items():
        name = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(own[name], value)
        assert torch.equal(in_checkpoint[f"model.{name}"], value)
    assert max(value.abs().max() for name, value in saved.items() if "lora_B" in name) > 0
    optimizer = torch.load(trained / "checkpoint-00000004" / "optimizer.bin", weights_only=True)
    assert len(optimizer["state"]) == 2 * 14


def test_resume_is_exact(run: Run, options: str, trained: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(trained, again)
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(again / later)
    assert run(f"{options} --resume", again) == losses(trained)
    files = [folder / "model" / "adapter_model.safetensors" for folder in (trained, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.release
def test_two_ranks_have_the_losses_of_one(options: str, trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(EXAMPLES_FOLDER / "sft.py"), *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command += ["--output-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("attention: torch_varlen (the first choice on cpu)") == 1
    assert losses(tmp_path) == pytest.approx(losses(trained), rel=1e-4)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--lora 8", "--lora 8: adapters are of a trained model; pass --model"),
        ("--lora-alpha 8", "--lora-alpha 8: there are no adapters without --lora"),
        ("--lora 0", "--lora 0: must be 1 or more"),
        ("--lora 4 --lora-alpha 0", "--lora-alpha 0: must be 1 or more"),
    ],
)
def test_options_that_cannot_be(run: Run, tmp_path: Path, option: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(f"{TINY} {option}", tmp_path / "out")
    assert str(caught.value) == f"sft.py: {message}"
    assert not (tmp_path / "out").exists()


def test_without_peft(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name)
    )
    with pytest.raises(SystemExit) as caught:
        run(f"{TINY} --model somewhere --lora 4", tmp_path / "out")
    message = 'sft.py: --lora 4: needs peft; pip install "torch_collate_kit[lora]"'
    assert str(caught.value) == message
