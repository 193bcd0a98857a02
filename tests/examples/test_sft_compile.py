"""torch.compile in examples/sft.py: nothing is compiled twice, and the losses are the same.

The backend is "aot_eager": graphs of the forward and the backward pass, which torch runs as they
are. What is compiled again does not depend on the backend.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sft
import torch
import trained_model
import transformers
from attention_choice import Attention
from datasets import Dataset
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trained_model import ModelWithLoss, compile_layers

import torch_collate_kit as kit
from tests.tiny_models import VOCAB, tiny_model
from torch_collate_kit.loading import read_records

ARGS = Namespace(
    rows_multiple_of=None,
    batch_size=8,
    seed=0,
    no_packing=False,
    max_tokens=256,
    compile=True,
    rows_per_micro_batch=2,
    num_ranks=1,
    rank=0,
    num_workers=0,
    prefetch=False,
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing is compiled yet, and what a test configures is forgotten."""
    torch._dynamo.reset()
    counters.clear()
    before = torch._dynamo.config.optimize_ddp
    with (
        torch.compiler.config.patch(dynamic_sources=""),
        torch._dynamo.config.patch(optimize_ddp=before),
    ):
        yield
    torch._dynamo.reset()


def micro_batches(examples: kit.TokenizedDataset, count: int) -> list[kit.Batch]:
    """As sft.py makes them, of the first epochs."""
    accelerator: Any = Namespace(device=torch.device("cpu"))
    found: list[kit.Batch] = []
    collate = sft.make_collator(0, tiny_model("qwen3"), ARGS)
    with sft.make_loader(examples, collate, accelerator, ARGS, shuffle=True) as loader:
        while len(found) < count:
            for batch in loader:
                found += sft.micro_batches(batch, ARGS)
    return found[:count]


def seeded_mix(count: int) -> kit.TokenizedDataset:
    """Short and long conversations, of one to a hundred and more in a row."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, count).astype(int).clip(3, ARGS.max_tokens)
    rows = [rng.integers(3, VOCAB, length).tolist() for length in lengths]
    mask = [[0, *rng.integers(0, 2, len(row) - 2).tolist(), 1] for row in rows]
    return kit.TokenizedDataset(Dataset.from_dict({"input_ids": rows, "loss_mask": mask}))


def real_chats(shared_data: Path) -> kit.TokenizedDataset:
    """Lengths and masks of real conversations, and token ids that a tiny model knows."""
    name = str(shared_data / "tokenizers" / "mistral-32k-chatml")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    records = read_records(str(shared_data / "chat_tools_tm4_900.jsonl"), split="train")
    options = {"max_length": ARGS.max_tokens}
    tokenized, _ = kit.tokenize_chat_dataset(
        records.select(range(400)), tokenizer, kit.ChatOptions(**options)
    )
    few = [[i % (VOCAB - 3) + 3 for i in ids] for ids in tokenized["input_ids"]]
    columns = {"input_ids": few, "loss_mask": tokenized["loss_mask"]}
    return kit.TokenizedDataset(Dataset.from_dict(columns))


def losses_and_gradients(
    model: ModelWithLoss, batches: list[kit.Batch]
) -> tuple[list[float], torch.Tensor]:
    """The loss of every batch, and the sum of all gradients."""
    losses = []
    for batch in batches:
        loss = model(batch, 100)
        loss.backward()
        losses.append(loss.item())
    return losses, torch.cat([p.grad.flatten() for p in trained_model.trained_parameters(model)])


def assert_compiled_once_and_equal(
    model: Any, batches: list[kit.Batch], attention: str = "torch_varlen", num_graphs: int = 1
) -> None:
    """In the first batch and never again, where it would raise."""
    plain = ModelWithLoss(model.train(), Attention(attention))
    compiled = copy.deepcopy(plain)
    compile_layers(compiled.model, backend="aot_eager")
    losses_and_gradients(compiled, batches[:1])
    assert counters["stats"]["unique_graphs"] == num_graphs
    compiled.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found, gradients = losses_and_gradients(compiled, batches)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert sum(counters["graph_break"].values()) == 0, counters["graph_break"]
    expected, expected_gradients = losses_and_gradients(plain, batches)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-4)


def assert_of_one_shape(batches: list[kit.Batch]) -> None:
    """And of no other: how many segments they have differs, and how long the longest is."""
    assert {batch["input_ids"].shape for batch in batches} == {(2, ARGS.max_tokens)}
    added = [batch["sub_seq_lengths"][-1].numel() == 0 for batch in batches]
    assert 0 < sum(added) < len(added)  # a last row that fills up, and has nothing to train
    inputs = [batch.model_inputs() for batch in batches]
    assert len({len(i["cu_seq_lens_q"]) for i in inputs}) >= 5
    assert len({i["max_length_q"] for i in inputs}) >= 5


def test_200_real_batches_compile_once(shared_data: Path) -> None:
    batches = micro_batches(real_chats(shared_data), 200)
    assert_of_one_shape(batches)
    assert_compiled_once_and_equal(tiny_model("qwen3"), batches)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("llama", "torch_varlen"),
        ("qwen3", "torch_varlen"),
        ("mistral", "torch_varlen"),
        ("qwen3", "sdpa"),
    ],
)
def test_a_seeded_mix_compiles_once(kind: str, attention: str) -> None:
    batches = micro_batches(seeded_mix(200), 12)
    assert_of_one_shape(batches)
    assert_compiled_once_and_equal(tiny_model(kind, attention), batches, attention)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_with_gradient_checkpointing() -> None:
    model = tiny_model("qwen3")
    trained_model.checkpoint_activations(model)
    assert_compiled_once_and_equal(model, micro_batches(seeded_mix(80), 6))


def test_with_adapters() -> None:
    """The first layer is a graph of its own: what it is given needs no gradient."""
    pytest.importorskip("peft")
    args = Namespace(lora=4, lora_alpha=None, gradient_checkpointing=False)
    model = trained_model.prepare(tiny_model("qwen3"), args)
    assert_compiled_once_and_equal(model, micro_batches(seeded_mix(80), 6), num_graphs=2)


def test_sliding_and_full_layers_are_two_graphs() -> None:
    batches = micro_batches(seeded_mix(80), 6)
    assert_compiled_once_and_equal(tiny_model("gemma3"), batches, num_graphs=2)


def test_without_varying_lengths_it_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "VARYING", "")
    with pytest.raises(RecompileError, match=r"cu_seq_lens_q|max_length_q"):
        assert_compiled_once_and_equal(tiny_model("qwen3"), micro_batches(seeded_mix(80), 6))


def test_with_sharded_weights(tmp_path: Path) -> None:
    """FSDP2 shards layers that are compiled already, and its hooks break no graph."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = ModelWithLoss(tiny_model("qwen3").train(), Attention("torch_varlen"))
        compiled = copy.deepcopy(plain)
        compile_layers(compiled.model, backend="aot_eager")
        for part in (*compiled.model.model.layers, compiled):
            fully_shard(part, mesh=mesh)
        batches = micro_batches(seeded_mix(80), 4)
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses = [compiled(batch, 100).item() for batch in batches]
        assert losses == pytest.approx([plain(batch, 100).item() for batch in batches], rel=1e-5)
        assert counters["stats"]["unique_graphs"] == 1
        assert sum(counters["graph_break"].values()) == 0, counters["graph_break"]
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_without_known_layers() -> None:
    model = Namespace(get_decoder=lambda: torch.nn.Linear(2, 2))
    with pytest.raises(SystemExit, match="--compile: Namespace has no layers that are known"):
        compile_layers(model)


TINY = "--num-conversations 60 --num-held-out 10 --batch-size 6 --max-tokens 256 --cpu --threads 1"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, options: str = "") -> dict[str, Any]:
    """Losses, and the summary, of five steps."""
    arguments = f"{TINY} --max-steps 5 --rows-per-micro-batch 2 {options}".split()
    monkeypatch.setattr(sys, "argv", ["sft.py", *arguments, "--output-dir", str(folder)])
    sft.main()
    return read_results(folder)


def read_results(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {"losses": [step["loss"] for step in steps], "summary": summary}


@pytest.mark.release
def test_a_run_compiles_once_and_evaluates_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(monkeypatch, tmp_path / "plain")
    monkeypatch.setattr(compile_layers, "__defaults__", ("aot_eager",))
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = run(monkeypatch, tmp_path / "compiled", "--compile")
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    held_out = (result["summary"]["held_out_loss"] for result in (compiled, plain))
    assert next(held_out) == pytest.approx(next(held_out), rel=1e-4)
    assert compiled["summary"]["cells"] % 512 == 0
    assert compiled["summary"]["cells"] > plain["summary"]["cells"]
    two_ranks(tmp_path / "two")
    found = read_results(tmp_path / "two")
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    graphs = [(tmp_path / "two" / f"graphs-{rank}").read_text() for rank in (0, 1)]
    assert graphs == ["1", "1"]


def two_ranks(folder: Path) -> None:
    """This file, run as a script on each of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    compile_layers.__defaults__ = ("aot_eager",)
    torch._dynamo.config.error_on_recompile = True
    output = Path(sys.argv[1])
    run(pytest.MonkeyPatch(), output, "--compile")
    count = counters["stats"]["unique_graphs"]
    (output / f"graphs-{os.environ['RANK']}").write_text(str(count))
