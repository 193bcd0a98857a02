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


def test_examples_train_the_answer_and_its_end() -> None:
    chat = {"messages": tiny.make_chats(count=160)[4]["messages"]}
    example = tiny.make_examples(count=160)[4]
    question = chat["messages"][0]["content"].split()
    words = ["<user>", *question, "<end>", "<assistant>", *question[::-1], "<end>"]
    assert [tiny.VOCABULARY[i] for i in example["input_ids"]] == words
    num_trained = len(question) + 1
    assert (
        example["labels"]
        == [-100] * (len(words) - num_trained) + example["input_ids"][-num_trained:]
    )


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


def packed_losses(
    loss_of: Callable[[Any, kit.Batch], torch.Tensor], *, gradient_scale: float = 1.0
) -> list[float]:
    """What a loop over packed steps gives, with a loss and a scale of its gradients."""
    model = tiny.make_model("sdpa")
    optimizer = tiny.make_optimizer(model)
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS)
    losses = []
    for step in steps():
        loss = loss_of(model, collate(step))
        (loss * gradient_scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def exact(model: Any, batch: kit.Batch) -> torch.Tensor:
    logits = model(**batch.model_inputs("sdpa", labels=False)).logits
    return kit.token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])


def mean_of_means(model: Any, batch: kit.Batch) -> torch.Tensor:
    """Each row divided by its own targets, as accumulation of means does."""
    losses = [
        kit.token_loss(
            model(**row.model_inputs("sdpa", labels=False)).logits,
            row,
            num_loss_tokens=int(kit.global_num_loss_tokens(row)),
        )
        for row in batch.chunk(len(batch))
    ]
    return torch.stack(losses).mean()


def not_isolated(model: Any, batch: kit.Batch) -> torch.Tensor:
    """With the 2-D mask, which makes transformers ignore where examples begin."""
    inputs = batch.model_inputs("sdpa", labels=False) | {"attention_mask": batch["attention_mask"]}
    return kit.token_loss(
        model(**inputs).logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"]
    )


def every_token(model: Any, batch: kit.Batch) -> torch.Tensor:
    """All tokens but the first of each example, as without a loss mask."""
    logits = model(**batch.model_inputs("sdpa", labels=False)).logits
    ids, starts = batch["input_ids"], batch["position_ids"] == 0
    labels = ids.masked_fill(starts | (batch["attention_mask"] == 0), -100)
    return kit.token_loss(logits, labels, num_loss_tokens=kit.global_num_loss_tokens(labels))


def difference(losses: list[float]) -> float:
    expected = tiny.reference_losses(steps())
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def test_a_packed_loop_agrees() -> None:
    assert difference(packed_losses(exact)) < 1e-5


@pytest.mark.parametrize(
    ("loss_of", "gradient_scale"),
    [
        pytest.param(mean_of_means, 1.0, id="a mean of means"),
        pytest.param(not_isolated, 1.0, id="examples that see each other"),
        pytest.param(every_token, 1.0, id="every token trained"),
        pytest.param(exact, 0.5, id="gradients not multiplied by 2 ranks"),
        pytest.param(exact, 0.99, id="gradients 1% too small"),
    ],
)
def test_faults_show(loss_of: Callable[..., torch.Tensor], gradient_scale: float) -> None:
    found = difference(packed_losses(loss_of, gradient_scale=gradient_scale))
    print(f"{found:.4f}")
    assert found > 1e-3


def test_a_script_with_other_losses_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    losses, numbers = tiny.reference_losses(steps()[:2]), [list(range(8)), list(range(8, 16))]
    with contextlib.redirect_stdout(None):
        tiny.compare(losses, numbers)
        losses[1] += 2e-5
        with pytest.raises(SystemExit, match=r"the losses differ by 2\.\de-05, more than 1e-05"):
            tiny.compare(losses, numbers)
