"""The loss takes the logits that it needs: the values of all of them, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.test_losses import LAYOUTS, NUM_LOSS_TOKENS, examples_strategy
from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.losses import token_loss

VOCABULARY = 11


def whole_loss(logits: Tensor, batch: Batch, num_loss_tokens: float) -> tuple[Tensor, Tensor]:
    """The loss, and the nll [R, A] of every cell that predicts one, of a cross-entropy over all."""
    mask, ids = batch["loss_mask"], batch["input_ids"]
    hidden, last = ids.shape[1] - mask.shape[1], logits.shape[1] - 1
    targets = ids.clone()
    if "labels" in batch:
        targets = torch.where(batch["labels"] == IGNORE_INDEX, ids, batch["labels"])
    shifted = torch.full(logits.shape[:2], IGNORE_INDEX)
    shifted[:, last - mask.shape[1] : last] = targets[:, hidden:]
    flat = logits.flatten(0, 1)
    flat = flat.float() if flat.dtype.itemsize == 2 else flat
    nll = F.cross_entropy(flat, shifted.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    nll = nll.view(shifted.shape)[:, last - mask.shape[1] : last]
    total = (torch.where(mask != 0, nll, 0) * mask.to(nll.dtype)).sum()
    return total * batch.metadata["loss_mask_divisor"] / num_loss_tokens, nll


def check(batch: Batch, dtype: torch.dtype, kept: int = 0) -> None:
    """Values and gradients are those of the whole, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    shape = (*batch["input_ids"].shape, VOCABULARY)
    logits = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    needed = batch.metadata["response_length"] + 1
    used = logits[:, -max(needed, min(kept, shape[1])) :] if kept else logits
    expected, nll_RA = whole_loss(used, batch, 7)
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    loss = token_loss(used, batch, num_loss_tokens=7)
    assert torch.equal(loss, expected)
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.equal(found, gradient)
    if "example_indices" not in batch.row_metadata:
        return
    on, outputs = token_loss(used, batch, num_loss_tokens=7, return_per_token_outputs=True)
    assert torch.equal(on, expected)
    assert torch.equal(torch.autograd.grad(on, logits, retain_graph=True)[0], gradient)
    every = set(nll_RA.detach().float().flatten().tolist())
    assert all(value in every for values in outputs.nll for value in values.tolist())


dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@given(
    examples=examples_strategy,
    name=st.sampled_from(list(LAYOUTS)),
    dtype=dtypes,
    form=st.sampled_from(["loss_mask", "num_actions", "labels", "none"]),
    kept=st.sampled_from([0, 1, 3, 100]),
    data=st.data(),
)
def test_it_is_the_cross_entropy_of_all_cells(
    examples: Any, name: str, dtype: torch.dtype, form: str, kept: int, data: Any
) -> None:
    if name in ("packed", "dummy rows"):
        examples = [{key: row[:8] for key, row in example.items()} for example in examples]
    for example in examples:
        mask = example.pop("loss_mask")
        if form == "labels":  # which need not be the ids
            pairs = zip(example["input_ids"], mask, strict=True)
            example["labels"] = [(t + 3) % VOCABULARY if w else IGNORE_INDEX for t, w in pairs]
        elif form == "num_actions":
            example["num_actions"] = data.draw(st.integers(0, len(mask)))
            example["loss_mask"] = mask[len(mask) - example["num_actions"] :]
        elif form == "loss_mask":
            example["loss_mask"] = mask
    batch = LAYOUTS[name](True)(examples)
    check(batch, dtype, kept)
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True, min_size=1))
    check(batch.select(rows), dtype, kept)
    check(batch.pad_rows(multiple_of=3)[data.draw(st.integers(0, len(batch) - 1)) :], dtype)


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("collate", [PaddedCollator(0), PackedCollator(0, max_tokens=9)])
def test_a_mask_of_your_own_may_train_any_cell(collate: Any, replaced: bool) -> None:
    examples = [{"input_ids": list(range(n)), "loss_mask": [0] * (n - 1) + [1]} for n in (4, 2)]
    batch = collate(examples)
    if replaced:
        batch = batch.with_fields(loss_mask=torch.ones_like(batch["loss_mask"]))
    else:
        batch["loss_mask"].fill_(1)
    labels = batch["input_ids"].clone()
    batch = batch.with_fields(labels=labels)
    check(batch, torch.float32)
    check(batch[:1], torch.float32)


def kept_bytes(batch: Batch, logits: Tensor, **options: Any) -> int:
    """Of storages that the graph of the loss holds beside the logits."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_loss(logits, batch, num_loss_tokens=NUM_LOSS_TOKENS, **options)
    storages.pop(logits.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("collate", [PaddedCollator(0), PackedCollator(0, max_tokens=256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_kept_follows_from_the_response_tokens(
    collate: Any, dtype: torch.dtype, per_token: bool
) -> None:
    example = {"input_ids": list(range(100)), "loss_mask": [0] * 90 + [1] * 10}
    batch, vocabulary = collate([example] * 5), 512
    logits = torch.randn(*batch["input_ids"].shape, vocabulary).to(dtype).requires_grad_()
    cells = batch["input_ids"].numel()
    kept = kept_bytes(batch, logits, return_per_token_outputs=per_token)
    assert 4 * 50 * vocabulary <= kept < 4 * 50 * vocabulary + 40 * cells
    dense = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    kept = kept_bytes(dense, logits, return_per_token_outputs=per_token)
    predicting = batch["loss_mask"].numel()
    assert 4 * predicting * vocabulary <= kept < 4 * predicting * vocabulary + 80 * cells
