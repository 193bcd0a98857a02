"""The reference is right, and the faults that the drop-ins could have show in the losses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_collate_kit as kit
from tests.dropin.launching import load_script

tiny = load_script("tiny")

Step = list[dict[str, Any]]


def steps() -> list[Step]:
    examples = tiny.make_examples()
    return [examples[i : i + 8] for i in range(0, len(examples), 8)]


def test_the_first_reference_loss_by_hand() -> None:
    """A loop over the tokens of two examples, from probabilities."""
    step = tiny.make_examples(count=2)
    model = tiny.make_model("eager")
    nll, count = 0.0, 0
    for example in step:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0].double()
        for at, label in enumerate(example["labels"]):
            if label != -100:
                probabilities = logits[at - 1].exp() / logits[at - 1].exp().sum()
                nll, count = nll - math.log(probabilities[label].item()), count + 1
    assert tiny.reference_losses([step]) == pytest.approx([nll / count], abs=1e-5)


def packed_losses(loss_of: Callable[[Any, kit.Batch], torch.Tensor]) -> list[float]:
    """What a loop over packed steps gives, with this loss."""
    model = tiny.make_model("sdpa")
    optimizer = tiny.make_optimizer(model)
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS)
    losses = []
    for step in steps():
        loss = loss_of(model, collate(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def exact(model: Any, batch: kit.Batch, **changed: Any) -> torch.Tensor:
    inputs = batch.model_inputs("sdpa", labels=False) | changed
    count = batch.metadata["num_loss_tokens"]
    return kit.token_loss(model(**inputs).logits, batch, num_loss_tokens=count)


def small_gradients(model: Any, batch: kit.Batch) -> torch.Tensor:
    """Of half the size, as without a factor of 2 ranks."""
    loss = exact(model, batch)
    return loss.detach() + (loss - loss.detach()) / 2


def mean_of_means(model: Any, batch: kit.Batch) -> torch.Tensor:
    """Each row divided by its own targets, as accumulation of means does."""
    means = []
    for row in batch.chunk(len(batch)):
        logits = model(**row.model_inputs("sdpa", labels=False)).logits
        count = int(kit.global_num_loss_tokens(row))
        means.append(kit.token_loss(logits, row, num_loss_tokens=count))
    return torch.stack(means).mean()


def not_isolated(model: Any, batch: kit.Batch) -> torch.Tensor:
    """With the 2-D mask, which makes transformers ignore where examples begin."""
    return exact(model, batch, attention_mask=batch["attention_mask"])


def test_a_packed_loop_agrees_and_faults_show() -> None:
    expected = tiny.reference_losses(steps())

    def difference(loss_of: Callable[[Any, kit.Batch], torch.Tensor]) -> float:
        found = packed_losses(loss_of)
        return max(abs(a - b) for a, b in zip(found, expected, strict=True))

    assert difference(exact) < 1e-5
    for fault in (mean_of_means, not_isolated, small_gradients):
        assert difference(fault) > 1e-3, fault.__name__


def test_a_script_with_other_losses_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    losses, numbers = tiny.reference_losses(steps()[:2]), [list(range(8)), list(range(8, 16))]
    with contextlib.redirect_stdout(None):
        tiny.compare(losses, numbers)
        losses[1] += 2e-5
        with pytest.raises(SystemExit, match=r"the losses differ by 2\.\de-05, more than 1e-05"):
            tiny.compare(losses, numbers)
