"""A tiny model learns from packed images, on one rank and on two of which one has no image."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.ranks import on_two_ranks
from tests.vision.batches import alone, alone_gradients, layout_of
from tests.vision.families import FAMILIES, Example, TinyFamily
from torch_collate_kit import PackedCollator, ParallelLayout, token_loss


def test_a_rank_without_an_image_trains_on_with_the_others() -> None:
    pytest.importorskip("accelerate")
    found, _ = on_two_ranks(on_rank)
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


# --- Two optimizer steps on every rank, one of which has no image


FAMILY = FAMILIES["qwen3_vl"]
MAX_TOKENS = 128  # a row for each rank


def ranks_examples(family: TinyFamily = FAMILY) -> list[Example]:
    """One has an image, so a rank has none."""
    rng = np.random.default_rng(0)
    examples = [family.example(rng, ["text", (64, 96), "text"])]
    return [*examples, *(family.example(rng, ["text", "text"]) for _ in range(4))]


def on_rank() -> dict[str, Any]:
    """Return what came out, on this rank."""
    accelerator = Accelerator()
    ranks = accelerator.num_processes
    model = accelerator.prepare(FAMILY.model().train())
    collate = PackedCollator(
        FAMILY.processor(),
        vision=layout_of(FAMILY),
        max_tokens=MAX_TOKENS,
        parallel=ParallelLayout(dp=ranks),
        normalize_loss=False,
    )
    batch = collate(ranks_examples())
    mine = batch.chunk(ranks)[accelerator.process_index]
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    for step in range(2):  # without an image of its own, DDP fails in the second one
        total = torch.zeros(())
        for i in range(len(mine)):
            micro = mine[i : i + 1]
            last = i == len(mine) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                logits = model(**micro.model_inputs("sdpa", labels=False)).logits
                loss = token_loss(logits, micro, num_loss_tokens=batch.metadata["num_loss_tokens"])
                accelerator.backward(loss * ranks)
            total += loss.detach()
        if step == 0:
            loss_of_all = accelerator.reduce(total, "sum")
            gradients = {
                name: p.grad.clone()
                for name, p in zip(names, model.parameters(), strict=True)
                if p.grad is not None
            }
        model.zero_grad()
    num_images = accelerator.gather(torch.tensor([len(mine.column("image_grid_thw"))]))
    found = {
        "num_processes": ranks,
        "num_images": num_images.tolist(),
        "num_dummy_images": batch.metadata["num_dummy_images"],
        "loss": loss_of_all.item(),
        "gradients": gradients,
    }
    # DDP holds the process group, whose threads must have ended before the interpreter does.
    model = accelerator.free_memory(model)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return found
