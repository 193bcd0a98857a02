"""Rows that share prefixes: losses and gradients are those of rows that do not, to 1e-10."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.devices import NoWaiting
from tests.tree_samples import (
    FIELDS,
    both,
    exact_model,
    inputs_of,
    pairs,
    random_examples,
)
from torch_collate_kit import (
    Batch,
    PackedCollator,
    ParallelLayout,
    global_num_loss_tokens,
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


@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bfloat16_and_autocast_are_close(attention: str) -> None:
    from tests.tiny_models import tiny_model

    batches, losses = both(random_examples(6)), []
    for dtype, enabled in ((torch.bfloat16, False), (torch.float32, True)):
        model = tiny_model("qwen3", attention, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for batch in batches:
                total, grads = run(model, batch, weighted_sum)
                assert all(bool(g.isfinite().all()) for g in grads)
                losses.append(float(total))
    assert max(losses) - min(losses) < 0.02 * max(losses)


# --- rows move whole -----------------------------------------------------------------------------


def rows() -> tuple[Batch, Batch]:
    """Several rows, each with trees of several examples."""
    examples = [one for seed in range(6) for one in random_examples(seed)]
    return both(examples, max_tokens=120, fields=FIELDS, parallel=ParallelLayout(dp=2))


def _selected(batch: Batch) -> list[Batch]:
    return [batch.select([i]) for i in reversed(range(len(batch)))]


def _sent(batch: Batch) -> list[Batch]:
    return list(DataLoader([batch], batch_size=1, collate_fn=lambda of: of[0], num_workers=1))


PARTS: dict[str, Callable[[Batch], list[Batch]]] = {
    "split": lambda b: b.split(1),
    "row numbers": lambda b: b.split([[len(b) - 1], [*range(len(b) - 1)]]),
    "slices": lambda b: [b[1:], b[:1]],
    "chunk": lambda b: b.chunk(2),
    "select": _selected,
    "pad_rows": lambda b: [b.pad_rows(multiple_of=len(b) + 1)],
    "cat": lambda b: [Batch.cat([b[1:], b[:1]])],
    "pickle": lambda b: [pickle.loads(pickle.dumps(b[1:])), b[:1]],
    "worker": _sent,
    "to": lambda b: [b.to("cpu")],
    "with_fields": lambda b: [b.with_fields(more=torch.zeros(len(b), 1))],
    "replaced": lambda b: [b.with_fields(position_ids=b["position_ids"].clone())],
}


@pytest.mark.parametrize("name", PARTS)
def test_rows_move_whole(name: str) -> None:
    shared, plain = rows()
    model, total = exact_model("qwen3", "torch_varlen"), global_num_loss_tokens(plain)
    assert (
        int(total)
        == int(global_num_loss_tokens(shared))
        == int(global_num_loss_tokens(PARTS[name](shared)))
    )

    def loss(logits: Tensor, batch: Batch, old: Any) -> Tensor:
        logps = token_logps(logits, batch)
        sums = segment_sums(logps, batch)
        return token_loss(logits, batch, num_loss_tokens=total) + sums.square().sum() / 100

    with torch.no_grad():
        expected = loss(model(**inputs_of(plain, model)).logits, plain, None)
        found = sum(
            loss(model(**inputs_of(of, model)).logits, of, None) for of in PARTS[name](shared)
        )
    assert abs(float(found - expected)) < EXACT * float(expected)


def test_parts_of_parts_are_the_same_rows() -> None:
    shared, _ = rows()
    again = Batch.cat([shared.select([i]) for i in range(len(shared))])
    assert again == Batch.cat(shared.chunk(2)) == shared
    assert sum(part.num_cells for part in shared.split(1)) == shared.num_cells


def test_per_token_outputs_are_those_of_plain_rows() -> None:
    model, outputs = exact_model("qwen3", "sdpa"), []
    for batch in both(random_examples(4)):
        logits = model(**inputs_of(batch, model)).logits
        options = {"num_loss_tokens": 1, "return_per_token_outputs": True}
        outputs.append(token_loss(logits, batch, **options)[1])
    assert outputs[0].example_indices.tolist() == outputs[1].example_indices.tolist()
    for one, other in zip(outputs[0].nll, outputs[1].nll, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_fewer_columns_of_logits_are_refused() -> None:
    shared, _ = both(random_examples(1))
    logits = torch.zeros(len(shared), shared["input_ids"].shape[1] - 1, 8)
    for loss in (token_logps, lambda x, b: token_loss(x, b, num_loss_tokens=1)):
        with pytest.raises(ValueError, match="logits have shape"):
            loss(logits, shared)


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


def test_inputs_need_the_model_or_the_name_of_its_attention() -> None:
    with pytest.raises(
        ValueError, match=r"share prefixes \(share_prefixes\), so their inputs are th"
    ):
        three().model_inputs()


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


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("flex_attention", {}, "'flex_attention' has no paths .* without share_prefixes"),
        ("flash_attention_2", {}, "'flash_attention_2' has no paths .* without share_prefixes"),
        ("kernels-community/flash-attn2", {}, "has no paths .* without share_prefixes"),
        ("torch_varlen", {"mask": "block"}, 'mask="block" is for attention "sdpa"'),
        ("torch_varlen", {"sliding_window": 4}, 'mask="block" is for attention "sdpa"'),
        ("sdpa", {"mask": "whole"}, "mask='whole' is unknown"),
        ("sdpa", {"sliding_window": 0}, "sliding_window must be at least 1"),
        (("lfm2", "sdpa", {}), {}, "lfm2 models: its layers carry state .* share_prefixes"),
        (("bloom", "eager", {}), {}, "bloom models: it takes a 2-D .* without share_prefixes"),
        (
            ("qwen3", "sdpa", {"attention_dropout": 0.1}),
            {},
            r"attention dropout \(0.1\).* without share_prefixes",
        ),
        (
            ("qwen3", "torch_varlen", {"attention_dropout": 0.1}),
            {},
            r"attention dropout \(0.1\).* without share_prefixes",
        ),
    ],
    ids=lambda of: str(of)[:40],
)
def test_models_that_do_not_follow_paths_are_refused(
    model: Any, options: dict[str, Any], message: str
) -> None:
    from tests.tiny_models import tiny_model

    if isinstance(model, tuple):
        kind, attention, changes = model
        model = tiny_model(kind, attention, **changes)
    with pytest.raises((ValueError, IsolationError), match=message):
        three().model_inputs(model, **options)


def test_chunked_attention_is_refused() -> None:
    from types import SimpleNamespace

    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(_attn_implementation="sdpa", attention_chunk_size=8)
    with pytest.raises(ValueError, match=r"layers \('chunked_attention',\).*share_prefixes"):
        three().model_inputs(model)


@pytest.mark.parametrize("share", [True, "auto"])
def test_trainer_gets_no_shared_prefixes(share: Any) -> None:
    collate = PackedCollator(0, max_tokens=9, share_prefixes=share)
    with pytest.raises(ValueError, match=f"several targets.*share_prefixes={share!r}"):
        collate.for_trainer()


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
