"""A tiny model learns from packed images, on one rank and on two of which one has no image."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.vision.alone import alone, alone_gradients
from tests.vision.families import FAMILIES, Example
from tests.vision.two_ranks_images import FAMILY, ranks_examples
from torch_collate_kit import PackedCollator, token_loss
from torch_collate_kit.vision import VisionLayout

COLORS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 230), "w": (240, 240, 240)}
VARLEN = {"text_config": "torch_varlen", "vision_config": "sdpa"}
STEPS = 20


def color_examples(count: int = 16) -> list[Example]:
    """Of images of one color each; the answer, one letter, is trained."""
    family, rng = FAMILIES["qwen3_vl"], np.random.default_rng(0)
    examples = []
    for i in range(count):
        letter, color = list(COLORS.items())[i % len(COLORS)]
        height, width = (32 * int(n) for n in rng.integers(1, 4, 2))
        image = Image.new("RGB", (width, height), color)
        text = f"{'so ' * (i % 3)}{family.placeholder} color: {letter}"
        fields = dict(family.processor()(text=[text], images=[[image]], return_tensors="np"))
        ids = fields["input_ids"][0].tolist()
        labels = [-100] * (len(ids) - 1) + ids[-1:]
        images = {name: fields[name] for name in ("pixel_values", "image_grid_thw")}
        examples.append({"input_ids": ids, "labels": labels, **images})
    return examples


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    logits = model(**batch.model_inputs(VARLEN, labels=False)).logits
    return token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])


def test_a_tiny_model_learns_colors() -> None:
    family = FAMILIES["qwen3_vl"]
    model = copy.deepcopy(family.model(VARLEN)).train()
    examples = color_examples()
    vision = VisionLayout.of(family.processor(), model.config)
    collate = PackedCollator(family.processor(), max_tokens=64, vision=vision)
    batch = collate(examples)
    assert max(batch["sub_seq_lengths"].lengths) > 1
    assert batch.metadata["num_loss_tokens"] == len(examples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    assert losses[-1] < 0.7 * np.log(len(COLORS)), "the letters are known, not the colors"
    with torch.no_grad():  # what was learned is in the images
        model.eval()
        shifted = [
            {**example, "labels": [*example["labels"][:-1], other["labels"][-1]]}
            for example, other in zip(examples, examples[1:] + examples[:1], strict=True)
        ]
        assert loss_of(model, collate(shifted)) > 2 * loss_of(model, batch)


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
