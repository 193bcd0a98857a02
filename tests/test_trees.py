"""Rows that share prefixes: losses and gradients are those of rows that do not, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.devices import NoWaiting
from tests.tiny_models import tiny_model
from tests.tree_samples import FIELDS, both, exact_model, inputs_of, pairs, random_examples
from torch_collate_kit import (
    Batch,
    PackedCollator,
    ParallelLayout,
    segment_sums,
    token_logps,
    token_loss,
    unpack,
)
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.losses import segment_ends, trained_values
from torch_collate_kit.preference import dpo

EXACT = 1e-10
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
WINDOWED["layer_types"] = ["full_attention", "sliding_attention"]
ATTENTIONS = ("torch_varlen", "sdpa")


def weighted_sum(logits: Tensor, batch: Batch, old: Any) -> Tensor:
    return token_loss(logits, batch, num_loss_tokens=7)


def clipped_ratio(logits: Tensor, batch: Batch, old: Any) -> Tensor:
    ratio = (token_logps(logits, batch) - trained_values(batch["old"], batch)).exp()
    weights = trained_values(batch["loss_mask"], batch)
    return (torch.minimum(2 * ratio, 2 * ratio.clamp(0.8, 1.2)) * weights).sum()


def mean_of_means(logits: Tensor, batch: Batch, old: Any) -> Tensor:
    return segment_sums(token_logps(logits, batch), batch, mean=True).mean()


def ends(logits: Tensor, batch: Batch, old: Any) -> Tensor:
    return logits.flatten(0, 1)[segment_ends(batch)].square().sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (weighted_sum, clipped_ratio, mean_of_means, ends)
}


def run(
    model: Any, batch: Batch, loss: Callable[..., Tensor], window: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    total = loss(model(**inputs_of(batch, model, window)).logits, batch, None)
    total.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return total.detach(), grads


def check(model: Any, batches: tuple[Batch, Batch], loss: Any, window: int | None = None) -> None:
    (found, grads), (expected, wanted) = (run(model, of, loss, window) for of in batches)
    assert abs(float(found - expected)) < EXACT * max(1, abs(float(expected)))
    largest = max(float(g.abs().max()) for g in wanted)
    for grad, right in zip(grads, wanted, strict=True):
        assert float((grad - right).abs().max()) < EXACT * max(1, largest)


def check_tree(seed: int, models: dict[Any, Any]) -> None:
    """Every loss and the logits of each segment, of one random set of trees."""
    rng = np.random.default_rng((seed, 1))
    options = {"fields": FIELDS, "parallel": ParallelLayout(tp=int(rng.choice([1, 4])))}
    batches = both(random_examples(seed), max_tokens=int(rng.choice([320, 640])), **options)
    for (_, window), model in models.items():
        for loss in LOSSES.values():
            check(model, batches, loss, window)
        with torch.no_grad():
            logits = [model(**inputs_of(of, model, window)).logits for of in batches]
        for one, other in zip(*map(unpack, logits, batches), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def models_of(kind: str, windows: tuple[int | None, ...] = (None,)) -> dict[Any, Any]:
    return {
        (attention, window): exact_model(kind, attention, **(WINDOWED if window else {}))
        for attention in ATTENTIONS
        for window in windows
    }


@pytest.mark.parametrize("seed", range(2))
def test_random_trees_are_exact(seed: int) -> None:
    check_tree(seed, models_of("qwen3", (None, 4)) if seed % 2 else models_of("llama"))


@pytest.mark.release
def test_a_thousand_random_trees_are_exact() -> None:
    models = models_of("qwen3", (None, 4)), models_of("llama")
    for seed in range(1000):
        check_tree(seed + 100, models[seed % 2])


@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa", "eager"])
def test_pairs_are_exact(attention: str) -> None:
    def loss(logits: Tensor, batch: Batch, old: Any) -> Tensor:
        sums = segment_sums(token_logps(logits, batch), batch)
        return dpo(sums, torch.zeros_like(sums) - 3).loss.sum()

    model, batches = exact_model("qwen3", attention), both(pairs(0))
    if attention != "eager":
        return check(model, batches, loss)
    found, expected = (run(model, of, loss)[0] for of in batches)  # its softmax is in float32
    assert abs(float(found - expected)) < 1e-5


def test_models_whose_layers_all_slide_get_one_mask() -> None:
    """Mistral takes no dict of masks."""
    batches = both(random_examples(3))
    for attention in ATTENTIONS:
        model = exact_model("mistral", attention)
        shared = run(model, batches[0], weighted_sum)[0]
        varlen = exact_model("mistral", "torch_varlen")
        assert abs(float(shared - run(varlen, batches[1], weighted_sum)[0])) < EXACT


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_with_checkpointing_through_the_head(attention: str) -> None:
    model = exact_model("qwen3", attention).train()
    batches = both(random_examples(5), fields=FIELDS)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def hidden_loss(batch: Batch) -> Tensor:
        hidden = model.model(**inputs_of(batch, model)).last_hidden_state
        loss = token_loss(hidden, batch, num_loss_tokens=3, head=model.lm_head)
        return loss + token_logps(hidden, batch, head=model.lm_head).square().sum()

    found = []
    for batch in batches:
        model.zero_grad()
        hidden_loss(batch).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


# --- rows move whole -----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa", "eager"])
def test_nothing_waits_for_the_device(attention: str) -> None:
    shared, _ = both(random_examples(2), fields=FIELDS)
    moved = shared.to("meta")
    logits = torch.zeros(*moved["input_ids"].shape, 8, device="meta", requires_grad=True)
    with NoWaiting() as mode:
        inputs = moved.model_inputs(attention)
        logps = token_logps(logits, moved)
        trained_values(moved["old"], moved)
        loss = token_loss(logits, moved, num_loss_tokens=3) + segment_sums(logps, moved).sum()
        (loss + logits.flatten(0, 1)[segment_ends(moved)].sum()).backward()
    assert mode.seen > 20
    assert {v.device.type for v in inputs.values() if isinstance(v, Tensor)} == {"meta"}


# --- what does not know trees refuses ------------------------------------------------------------


def three() -> Batch:
    segments = [[3, 4, 5], [3, 4, 6, 7], [3, 4, 6, 8]]
    return both([{"input_ids": segments}])[0]


def test_paths_and_masks_written_by_hand() -> None:
    inputs = three().model_inputs("torch_varlen")
    assert inputs["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 2, 3, 3]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 5, 6]
    assert inputs["cu_seq_lens_k"].tolist() == [0, 3, 7, 11]
    assert inputs["path_cells"].tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 3, 5]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (3, 4)
    assert "labels" not in inputs
    mask = three().model_inputs("sdpa")["attention_mask"]
    assert mask.int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [1, 1, 0, 1, 0, 0],
                [1, 1, 0, 1, 1, 0],
                [1, 1, 0, 1, 0, 1],
            ]
        ]
    ]
    windows = three().model_inputs("sdpa", mask="block", sliding_window=2)["attention_mask"]
    assert windows["sliding_attention"][0, 0, 5].int().tolist() == [0, 0, 0, 1, 0, 1]


def chunked(attention: str) -> Any:
    model: Any = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(_attn_implementation=attention, attention_chunk_size=8)
    return model


def inputs(model: Any = None, **options: Any) -> Callable[[], Any]:
    """Of a model, the name of its attention, or what tiny_model takes."""

    def call() -> Any:
        of = tiny_model(*model[:2], **dict(model[2:])) if isinstance(model, tuple) else model
        return three().model_inputs(*[] if of is None else [of], **options)

    return call


def for_trainer(share: Any) -> Callable[[], Any]:
    return lambda: PackedCollator(0, max_tokens=9, share_prefixes=share).for_trainer()


def short_logits(loss: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: loss(torch.zeros(1, 5, 8), three())


DROPS = ("attention_dropout", 0.1)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (inputs(), r"share prefixes \(share_prefixes\), so their inputs are th"),
    (inputs("flex_attention"), "'flex_attention' has no paths .* without share_prefixes"),
    (inputs("flash_attention_2"), "'flash_attention_2' has no paths .* without share_prefixes"),
    (inputs("kernels-community/flash-attn2"), "has no paths .* without share_prefixes"),
    (inputs("torch_varlen", mask="block"), 'mask="block" is for attention "sdpa"'),
    (inputs("torch_varlen", sliding_window=4), 'mask="block" is for attention "sdpa"'),
    (inputs("sdpa", mask="whole"), "mask='whole' is unknown"),
    (inputs("sdpa", sliding_window=0), "sliding_window must be at least 1"),
    (inputs(("lfm2", "sdpa")), "lfm2 models: its layers carry state .* share_prefixes"),
    (inputs(("bloom", "eager")), "bloom models: it takes a 2-D .* without share_prefixes"),
    (inputs(("qwen3", "sdpa", DROPS)), r"dropout \(0.1\).* without share_prefixes"),
    (inputs(("qwen3", "torch_varlen", DROPS)), r"dropout \(0.1\).* without share_prefixes"),
    (inputs(chunked("sdpa")), r"layers \('chunked_attention',\).*share_prefixes"),
    (for_trainer(True), "several targets.*share_prefixes=True"),
    (for_trainer("auto"), "several targets.*share_prefixes='auto'"),
    (short_logits(token_logps), "logits have shape"),
    (short_logits(lambda x, b: token_loss(x, b, num_loss_tokens=1)), "logits have shape"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_has_no_paths_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, IsolationError), match=words):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path_cells": lambda x: x[:-1]}, "must rise from 0 to 10, the entries of path_cells"),
        ({"path_cells": lambda x: x + 1}, "must be cells 0 to 5 of the rows, got 1 to 6"),
        ({"path_cells": lambda x: x - 1}, "must be cells 0 to 5 of the rows, got -1 to 4"),
        ({"cu_seq_lens_k": lambda x: x[:-1]}, "a path for each of the 3 segments"),
        ({"cu_seq_lens_k": lambda x: x.new_tensor([0, 2, 7, 11])}, "at least as long"),
        ({"cu_seq_lens_q": lambda x: x.new_tensor([0, 3, 5])}, "must rise from 0 to 6"),
        ({"path_cells": lambda x: None}, "cu_seq_lens_q and cu_seq_lens_k differ"),
    ],
    ids=lambda of: str([*of]) if isinstance(of, dict) else "",
)
def test_boundaries_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    model = exact_model("llama", "torch_varlen")
    inputs = three().model_inputs(model)
    for name, of in change.items():
        inputs[name] = of(inputs[name])
    with pytest.raises(ValueError, match=message):
        model(**inputs)
