"""Whether the examples of a packed batch are apart: by gradients, and against each alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.kernels import recurrent
from tests.tiny_models import token_ids
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator

WIDTH = 15
LENGTHS = {1: (5, 7, 3), 2: (5, 4, 6, 7, 3)}  # by rows; the second of two ends with pads
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def packed(rows: int) -> Batch:
    """Pack examples into one row, or two."""
    ids = token_ids(1, sum(LENGTHS[rows]))[0].split(LENGTHS[rows])
    collate = PackedCollator(0, max_tokens=WIDTH, strategy="sequential")
    batch = collate([{"input_ids": each} for each in ids])
    assert batch["input_ids"].shape == (rows, WIDTH)
    return batch


def _cells_of(batch: Batch) -> list[slice]:
    """Return the cells of each example, all rows as one."""
    cells = []
    for row, lengths in enumerate(batch["sub_seq_lengths"].tolist()):
        start = row * WIDTH
        for length in lengths:
            cells.append(slice(start, start + length))
            start += length
    return cells


def _measure(model: nn.Module, batch: Batch, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the largest gradient at other examples, and the difference from each alone."""
    seen: list[Tensor] = []
    embed = model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda *args: seen.append(args[2]))
    try:
        logits = model(**inputs).logits.flatten(0, 1)
    finally:
        hook.remove()
    gradient = difference = 0.0
    for cells in _cells_of(batch):
        ids = batch["input_ids"].flatten()[cells][None]
        with torch.no_grad():
            alone = model(input_ids=ids, use_cache=False).logits[0]
            apart = (logits[cells] - alone).abs().max() / alone.abs().max()
        loss = (logits[cells] * torch.randn_like(logits[cells])).sum()
        found = torch.autograd.grad(loss, seen[0], retain_graph=True)[0].flatten(0, 1).abs()
        own = found[cells].max().item()
        assert own > 0, "the logits do not depend on the tokens"
        found[cells] = 0
        gradient = max(gradient, found.max().item() / own)
        difference = max(difference, apart.item())
    return {"gradient": gradient, "difference": difference}


def verdict(model: nn.Module, batch: Batch, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return exact, leak or error, and what it was told by.

    ``gradient`` is relative to the example's own, ``difference`` to its largest logit, ``reads``
    counts how often a kernel read boundaries from the device.
    """
    recurrent.device_reads[0] = 0
    try:
        found = _measure(model, batch, inputs)
    except Exception as error:  # of the model or a kernel: its message is compared
        return {"verdict": "error", "message": f"{type(error).__name__}: {error}"}
    is_exact = found["gradient"] == 0 and found["difference"] < _TOLERANCE[model.dtype]
    reads = recurrent.device_reads[0]
    return {"verdict": "exact" if is_exact else "leak", "reads": reads, **found}
