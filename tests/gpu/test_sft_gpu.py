"""examples/sft.py on a CUDA device: twenty steps in bf16, packed and padded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")
import sft
import trained_model
from run_log import peak_flops


def run(folder: Path, patch: pytest.MonkeyPatch, *options: str) -> tuple[list[float], set[Any]]:
    """The losses, and the types of (the weights, the products in training steps, their device)."""
    load_model, seen = trained_model.load_model, set()

    def watch(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # a training step, no check or evaluation
            seen.add((layer.weight.dtype, output.dtype, output.device.type))

    def load_and_watch(*args: Any) -> Any:
        model = load_model(*args)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(watch)
        return model

    arguments = ["--max-steps", "20", "--num-conversations", "700", "--output-dir", str(folder)]
    with patch.context() as patched:
        patched.setattr(trained_model, "load_model", load_and_watch)
        patched.setattr(sys, "argv", ["sft.py", *arguments, "--num-held-out", "70", *options])
        sft.main()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], seen


@pytest.mark.gpu
def test_twenty_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, types = run(tmp_path / "packed", monkeypatch)
    padded, padded_types = run(tmp_path / "padded", monkeypatch, "--no-packing")
    assert types == padded_types == {(torch.float32, torch.bfloat16, "cuda")}
    assert len(packed) == len(padded) == 20
    assert packed[-1] < 0.7 * packed[0]
    assert packed[0] == pytest.approx(padded[0], rel=1e-2)  # bf16
    is_known = peak_flops(torch.cuda.get_device_name()) is not None
    for line in (tmp_path / "packed" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["peak_memory_gib"] > 0
        assert ("mfu" in record) == is_known
        assert 0 < record.get("mfu", 0.5) < 1
