"""Dense fields by a copy per run of tokens, by windows, and by an index per token are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    RolloutCollator,
)
from torch_collate_kit.batch import dense, placement
from torch_collate_kit.ragged import Ragged

FIELDS = {
    "half": PerToken(torch.bfloat16, pad=-1),
    "vectors": PerToken(torch.float32, shape=(3,)),
    "flags": PerToken(torch.bool, pad=1),
    "domain": PerExample(torch.int64),
}
LENGTHS = (7, 1, 40, 3, 40, 22)


def examples(kind: str) -> list[dict[str, Any]]:
    rng, found = np.random.default_rng(4), []
    for n in LENGTHS:
        ids, weights = rng.integers(5, 99, n), rng.choice([0.0, 0.5, 1.0], n)
        if kind == "rollouts":
            values = dict.fromkeys(("rewards", "loss_mask", "ref"), weights)
            found.append({"prompt_ids": ids[:1], "response_ids": ids, **values})
            continue
        mask = weights if kind == "weights" else (rng.random(n) < 0.5).astype(np.float32)
        target = {"labels": np.where(mask != 0, ids, -100)} if kind == "labels" else {}
        more = {"half": rng.random(n), "vectors": rng.random((n, 3)), "flags": mask == 0}
        found.append({"input_ids": ids, **(target or {"loss_mask": mask}), **more, "domain": 3})
    return found


REF = {"ref": PerResponseToken(torch.float16)}
SET_UPS: dict[str, tuple[Any, str]] = {
    "left": (PaddedCollator(3, fields=FIELDS), "weights"),
    "right": (PaddedCollator(3, fields=FIELDS, padding_side="right"), "flags"),
    "a multiple": (PaddedCollator(0, fields=FIELDS, pad_to_multiple_of=16), "labels"),
    "rollouts": (RolloutCollator(0, fields=REF), "rollouts"),
    "packed": (PackedCollator(0, max_tokens=64, fields=FIELDS), "weights"),
    "with gaps": (
        PackedCollator(7, max_tokens=64, fields=FIELDS, parallel=ParallelLayout(dp=2, tp=8)),
        "labels",
    ),
    "wide": (PackedCollator(0, max_tokens=60, fixed_width=True, fields=FIELDS), "flags"),
    "packed rollouts": (PackedCollator(0, max_tokens=64, fields=REF), "rollouts"),
}


def fields_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: f.values if isinstance(f, Ragged) else f for name, f in batch.items()}


def changes(collate: Any, given: Any) -> list[Batch]:
    """A batch, and what may be made of it: other rows, joined, added, a context rank's part."""
    batch = collate(given)
    found = [batch, batch[1:], batch.select([1, 0, 1]), Batch.cat([batch[:1], batch[1:]])]
    found.append(batch.pad_rows(multiple_of=5))
    if collate.__class__ is PackedCollator and collate.packing.parallel.tp > 1:
        found.append(batch.context_shard(1, 2, layout="contiguous"))
    return found


@pytest.mark.parametrize("name", SET_UPS)
def test_every_way_to_fill_cells_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collate, kind = SET_UPS[name]
    given, put, ways = examples(kind), dense.put_spans, []
    for longest in (1e-9, 1e9):  # a copy for every run, an index for every token
        monkeypatch.setattr(placement, "SHORT_SPAN", longest)
        copies: list[int] = []
        monkeypatch.setattr(
            dense, "put_spans", lambda *of, copies=copies: (copies.append(len(of[2])), put(*of))
        )
        ways.append([fields_of(batch) for batch in changes(collate, given)])
        assert bool(copies) == (longest < 1)
        monkeypatch.setattr(dense._Maker, "last_cells", lambda *_, **__: None)  # no windows, then
    for copied, indexed in zip(*ways, strict=True):
        assert copied.keys() == indexed.keys()
        for field, values in copied.items():
            assert values.dtype == indexed[field].dtype, field
            assert torch.equal(values, indexed[field]), field


def test_segments_that_continue_one_another_are_one_run() -> None:
    whole = [{"input_ids": np.arange(1, 200), "loss_mask": np.ones(199)}] * 4
    packed = PackedCollator(0, max_tokens=400)(whole).placement
    assert packed is not None
    found = packed.spans("lengths", 1)
    assert found is not None
    cells, tokens, lengths = (of.tolist() for of in found)
    assert (cells, tokens, lengths) == ([0, 397], [1, 399], [397, 397])
    padded = PaddedCollator(0)(examples("flags")).placement
    assert padded is not None
    assert padded.spans("lengths", 0) is None  # 19 tokens on average: an index is as fast
