"""Dense fields by a copy per run of tokens, by windows, and by an index per token are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torch_collate_kit import Batch, PackedCollator, PaddedCollator, ParallelLayout, PerToken

FIELDS = {
    "half": PerToken(torch.bfloat16, pad=-1),
    "vectors": PerToken(torch.float32, shape=(3,)),
    "flags": PerToken(torch.bool, pad=1),
}
LENGTHS = (7, 1, 40, 3, 40, 22)


def examples(kind: str, scale: int) -> list[dict[str, Any]]:
    rng, found = np.random.default_rng(4), []
    for n in scale * np.array(LENGTHS):
        ids, weights = rng.integers(5, 99, n), rng.choice([0.0, 0.5, 1.0], n)
        if kind != "weights":
            weights = (weights > 0).astype(np.float64)
        target = {"loss_mask": weights}
        if kind == "labels":
            target = {"labels": np.where(weights != 0, ids, -100)}
        more = {"half": rng.random(n), "vectors": rng.random((n, 3)), "flags": weights == 0}
        found.append({"input_ids": ids, **target, **more})
        found[-1]["weights_of_tokens"] = weights
    return found


def padded(pad: int, **options: Any) -> Any:
    return lambda scale: PaddedCollator(pad, fields=FIELDS, normalize_loss=False, **options)


def packed(pad: int, **options: Any) -> Any:
    shared = {"fields": FIELDS, "normalize_loss": False, **options}
    return lambda scale: PackedCollator(pad, max_tokens=64 * scale, **shared)


SET_UPS: dict[str, tuple[Any, str, int]] = {
    "left": (padded(3), "weights", 3),
    "right": (padded(3, padding_side="right"), "flags", 3),
    "a multiple": (padded(0, pad_to_multiple_of=16), "labels", 0),
    "packed": (packed(0), "weights", 0),
    "with gaps": (packed(7, parallel=ParallelLayout(dp=2, tp=8)), "labels", 7),
    "wide": (packed(0, fixed_width=True), "flags", 0),
}


def changes(collate: Any, given: Any) -> list[Batch]:
    """A batch, and what may be made of it: other rows, joined, added."""
    batch = collate(given)
    found = [batch, batch[1:], batch.select([1, 0, 1]), Batch.cat([batch[:1], batch[1:]])]
    return [*found, batch.pad_rows(multiple_of=5)]


def places(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Row, first cell, example and length of every segment."""
    indices, lengths = batch.row_metadata["example_indices"].tolist(), batch["sub_seq_lengths"]
    mask = batch["attention_mask"]
    for row, (examples_of_row, of_row) in enumerate(zip(indices, lengths.tolist(), strict=True)):
        starts = [int(mask[row].argmax())]  # of a padded row
        if "cu_seq_lens" in batch:
            starts = batch["cu_seq_lens"].tolist()[row][: len(of_row)]
        yield from zip([row] * len(of_row), starts, examples_of_row, of_row, strict=False)


def in_cells(batch: Batch, given: Any, name: str, pad: float) -> torch.Tensor:
    """A field per token, example by example; of added rows, which have no example, the batch's."""
    found = torch.full_like(batch[name], pad)
    for row in np.flatnonzero([not of for of in batch["sub_seq_lengths"].tolist()]).tolist():
        found[row] = batch[name][row]
    for row, start, example, length in places(batch):
        values = np.asarray(given[example][name])
        found[row, start : start + length] = torch.as_tensor(values).to(found.dtype)
    return found


@pytest.mark.parametrize("name", SET_UPS)
@pytest.mark.parametrize("scale", [1, 10], ids=["an index per token", "a copy per run"])
def test_fields_are_those_of_the_examples(name: str, scale: int) -> None:
    """Runs of 100 tokens on average are copied, shorter ones placed by an index per token."""
    make, kind, pads = SET_UPS[name]
    given = examples(kind, scale)
    for batch in changes(make(scale), given):
        for field, pad in {"half": -1, "vectors": 0, "flags": 1, "input_ids": pads}.items():
            expected = in_cells(batch, given, field, pad)
            assert torch.equal(batch[field], expected), field
        weights = torch.zeros(batch["input_ids"].shape)
        for row, start, example, length in places(batch):
            weights[row, start + 1 : start + length] = torch.as_tensor(
                given[example]["weights_of_tokens"][1:]
            ).float()
        width = batch.metadata["response_length"]
        assert torch.equal(batch["loss_mask"], weights[:, -width:])
        labels = torch.where(weights != 0, batch["input_ids"], -100)
        assert torch.equal(batch["labels"], labels)
