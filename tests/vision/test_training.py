"""A tiny model learns from packed images, on one rank and on two of which one has no image."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vision.alone import alone, alone_gradients
from tests.vision.two_ranks_images import FAMILY, ranks_examples


def test_a_rank_without_an_image_trains_on_with_the_others(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = tmp_path / "gradients.pt"
    script = Path(__file__).with_name("two_ranks_images.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(out)],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(out)
    assert found["num_processes"] == 2
    assert found["num_dummy_images"] == 1
    assert sorted(found["num_images"]) == [1, 1], "one of them is the dummy"
    examples = ranks_examples()
    assert sum("pixel_values" in example for example in examples) == 1
    each = [alone(FAMILY, FAMILY.model(), example)[1:] for example in examples]
    loss_sums, counts = zip(*each, strict=True)
    assert found["loss"] == pytest.approx(float(sum(loss_sums)) / sum(counts), abs=1e-5)
    expected = alone_gradients(FAMILY, examples)
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found["gradients"][name] - gradient).abs().max() < 1e-4, name
