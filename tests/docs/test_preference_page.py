"""The losses of the guide to preference pairs equal those of the papers, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.docs.test_code import DOCS, blocks_of

PAGE = DOCS / "guide" / "preference.md"


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def answer(model: Any, example: Any, side: int) -> list[float]:
    """The log-prob of each token of an answer, from a call with that side alone."""
    ids, mask = (torch.tensor(example[name][side]) for name in ("input_ids", "loss_mask"))
    logps = model(ids[None]).logits[0].double().log_softmax(-1)
    return [logps[i - 1, ids[i]].item() for i in range(1, len(ids)) if mask[i]]


@torch.no_grad()
def test_losses_of_the_page_equal_each_pair_alone() -> None:
    names: dict[str, Any] = {}
    blocks = [block for _, block in blocks_of(PAGE)]
    rated = next(i for i, block in enumerate(blocks) if '"label": i' in block)
    with torch.enable_grad():
        exec(compile("\n".join(blocks[:rated]), str(PAGE), "exec"), names)
        exec(compile("\n".join(blocks[rated + 1 :]), str(PAGE), "exec"), names)
    batch = names["batch"]
    names["model"].eval()  # called without segments
    order = batch.row_metadata["example_indices"].values[::2].tolist()
    assert sorted(order) == list(range(12))
    for place, i in enumerate(order):
        chosen, rejected = (answer(names["model"], names["examples"][i], side) for side in (0, 1))
        base = [sum(answer(names["reference"], names["examples"][i], side)) for side in (0, 1)]
        ratio = sum(chosen) - base[0] - (sum(rejected) - base[1])
        means = [sum(logps) / len(logps) for logps in (chosen, rejected)]
        odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
        expected = {
            "ipo": (ratio - 1 / (2 * 0.1)) ** 2,
            "simpo": -log_sigmoid(2.0 * (means[0] - means[1]) - 0.5),
            "orpo": -means[0] - 0.1 * log_sigmoid(odds[0] - odds[1]),
        }
        for name, loss in expected.items():
            assert names[name][place].item() == pytest.approx(loss, rel=2e-4), (name, i)
