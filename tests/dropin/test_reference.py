"""The reference of the drop-ins is right, and a script with other losses ends with an error."""

from __future__ import annotations

import math

import pytest
import torch

from tests.dropin.launching import load_script

tiny = load_script("tiny")


def test_the_first_loss_by_hand_and_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
    losses = tiny.reference_losses([step])
    assert losses == pytest.approx([nll / count], abs=1e-5)
    monkeypatch.setattr("sys.argv", ["script.py"])
    tiny.compare(losses, [[0, 1]])
    with pytest.raises(SystemExit, match=r"the losses differ by 2\.\de-05, more than 1e-05"):
        tiny.compare([losses[0] + 2e-5], [[0, 1]])
