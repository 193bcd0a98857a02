"""--compile of the examples: nothing is compiled twice, and the losses are the same.

The backend is "aot_eager": graphs of the forward and the backward pass, which torch runs as they
are. What is compiled again does not depend on the backend.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import sft
import torch
import trained_model
import vlm_sft
from torch._dynamo.utils import counters
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.examples.runs import TINY, Results, run

IMAGES = "--num-conversations 48 --num-held-out 8 --batch-size 8 --max-tokens 256 --max-patches 48 "
IMAGES += "--max-steps 3 --cpu --threads 1"
TEXTS = f"{TINY} --max-steps 4 --batch-size 20 --rows-per-micro-batch 2"


def compiled_run(arguments: str, folder: Path, script: ModuleType, num_graphs: int) -> Results:
    """Run with compiled layers; what is compiled more often raises, or is counted."""
    torch._dynamo.reset()
    counters.clear()
    before = torch._dynamo.config.optimize_ddp
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._dynamo.config.patch(optimize_ddp=before, error_on_recompile=num_graphs == 1),
    ):
        patch.setattr(trained_model.compile_layers, "__defaults__", ("aot_eager",))
        found = run(f"{arguments} --compile", folder, script)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert sum(counters["graph_break"].values()) == 0, counters["graph_break"]
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("kind", ["texts", "images", "adapters"])
def test_layers_are_compiled_once(kind: str, base: Path, tmp_path: Path) -> None:
    """Whatever segments and images a row has: rows are of one shape, and the last are filled up."""
    arguments, script = (IMAGES, vlm_sft) if kind == "images" else (TEXTS, sft)
    if kind == "adapters":  # the first layer is a graph of its own: its input needs no gradient
        pytest.importorskip("peft", MIN_PEFT_VERSION)
        arguments += f" --model {base / 'model'} --lora 2 --rows-per-micro-batch 2"
    plain = run(arguments, tmp_path / "plain", script)
    num_graphs = 2 if kind == "adapters" else 1
    found = compiled_run(arguments, tmp_path / "compiled", script, num_graphs)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)
    assert found.summary["held_out_loss"] == pytest.approx(plain.summary["held_out_loss"], rel=1e-4)
    assert {step["cells"] % 256 for step in found.steps} == {0}
    assert found.summary["cells"] > plain.summary["cells"]
