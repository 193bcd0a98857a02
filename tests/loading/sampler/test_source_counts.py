"""Metadata of the batches of a Mixture: examples and tokens of each source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.building import packed_collator
from torch_collate_kit import (
    DataError,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedRows,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PrefetchingSampler,
    PrefetchLoader,
    RolloutCollator,
    TokenizedDataset,
    audit,
)

RNG = np.random.default_rng(0)
LENGTHS = [RNG.integers(2, 30, size=n) for n in (40, 13, 25)]
NAMES = ["web", "math", "code"]
COLLATORS: dict[str, Any] = {
    "padded": PaddedCollator(0, train_all=True),
    "padded, cut": PaddedCollator(0, train_all=True, max_length=12, overflow="truncate"),
    "padded, dropped": PaddedCollator(0, train_all=True, max_length=25, overflow="drop"),
    "packed": packed_collator(0, max_tokens=40, train_all=True),
    "packed, cut": packed_collator(0, max_tokens=16, overflow="split", train_all=True),
    "packed, dropped": packed_collator(0, max_tokens=25, overflow="drop", train_all=True),
}


def counted(mixture: Mixture, examples: list[int], most: int, *, drops: bool) -> dict[str, Any]:
    """By loops: examples in the batch, and their tokens up to ``most``."""
    found: dict[str, Any] = {key: dict.fromkeys(NAMES, 0) for key in ("examples", "tokens")}
    for example in examples:
        source = int(mixture.source_of(example))
        length = len(mixture[example]["input_ids"])
        if not (drops and length > most):
            found["examples"][NAMES[source]] += 1
            found["tokens"][NAMES[source]] += min(length, most)
    return {f"source_{key}": of for key, of in found.items()}


@pytest.mark.parametrize("name", COLLATORS)
@pytest.mark.parametrize("num_workers", [None, 0])
def test_a_plain_batch_has_those_in_it(name: str, num_workers: int | None) -> None:
    collate, numbers = COLLATORS[name], iter(range(10**6))
    sources: list[Any] = [[{"input_ids": [next(numbers)] * n} for n in of] for of in LENGTHS]
    sources[1] = TokenizedDataset(sources[1])
    mixture = Mixture(sources, weights=[5, 2, 3], names=NAMES, stop="all_exhausted")
    most = {"padded, cut": 12, "padded, dropped": 25, "packed, dropped": 25}.get(name, 40)
    for rank in (0, 1):
        sampler = PrefetchingSampler(mixture, batch_size=10, dp_rank=rank, dp_size=2)
        options: Any = {"batch_sampler": sampler, "collate_fn": collate}
        loader: Any = DataLoader(mixture, **options)
        if num_workers is not None:
            loader = PrefetchLoader(loader)
        parts = list(sampler)
        sampler.set_epoch(0)
        batches = list(loader)
        assert len(batches) == len(parts) > 8
        for batch, examples in zip(batches, parts, strict=True):
            wanted = counted(mixture, examples, most, drops="dropped" in name)
            assert {key: batch.metadata[key] for key in wanted} == wanted
            assert sum(wanted["source_tokens"].values()) == batch.num_tokens


def test_rollouts_have_them_and_other_examples_none() -> None:
    rollout = {"prompt_ids": [5, 6], "response_ids": [7], "rewards": 1.0, "loss_mask": [1]}
    mixture = Mixture([[rollout] * 3, [rollout] * 2], names=["a", "b"])
    batch = RolloutCollator(0)(mixture.__getitems__([4, 0, 3]))
    assert batch.metadata["source_examples"] == {"a": 1, "b": 2}
    assert batch.metadata["source_tokens"] == {"a": 3, "b": 6}
    assert "source_tokens" not in RolloutCollator(0)([rollout]).metadata


def test_a_step_of_planned_rows_has_those_of_all_ranks() -> None:
    sources = [TokenizedDataset([{"input_ids": [5] * n}] * 40) for n in (3, 9)]
    mixture = Mixture(sources, weights=[3, 1], names=["web", "math"])
    by: list[dict[str, Any]] = [{"batch_size": 8}, {"batch_rows": 4}]
    for options in by:
        ranks = []
        for rank in (0, 1):
            layout = ParallelLayout(dp=2)
            collate = packed_collator(0, max_tokens=16, parallel=layout, train_all=True)
            sampler = PackedBatchSampler(mixture, collate, dp_rank=rank, **options)
            ranks.append(collate(mixture.__getitems__(next(iter(sampler)))))
        found = sampler.examples(0, 0)
        counts = mixture.source_counts(found)
        for batch in ranks:
            assert batch.metadata["source_examples"] == counts
            assert batch.metadata["source_tokens"] == {
                "web": 3 * counts["web"],
                "math": 9 * counts["math"],
            }
        assert sum(counts.values()) == len(found) > 4


def test_rows_for_a_trainer_have_them() -> None:
    sources = [TokenizedDataset([{"input_ids": [5] * n}] * 40) for n in (3, 9)]
    mixture = Mixture(sources, weights=[1, 1], names=["web", "math"])
    collate = packed_collator(0, max_tokens=32, train_all=True)
    rows = PackedRows(mixture, collate)
    batch = collate([rows[1], rows[0], rows[1]])
    examples = [*rows[0].examples, *rows[1].examples, *rows[1].examples]
    counts = mixture.source_counts(examples)
    assert batch.metadata["source_examples"] == counts
    tokens = {name: n * size for (name, n), size in zip(counts.items(), (3, 9), strict=True)}
    assert batch.metadata["source_tokens"] == tokens
    assert sum(tokens.values()) == batch.num_tokens


IDS_ONLY = [{"input_ids": [i + 1] * (2 + i % 3)} for i in range(8)]


@pytest.mark.parametrize("of", [list, TokenizedDataset])
def test_names_of_rows_that_have_only_ids_do_not_ask_for_a_target(of: Any) -> None:
    """The key "source" is the mixture's own; one of the rows' own says nothing about the loss."""
    mixture = Mixture([of(IDS_ONLY[:5]), of(IDS_ONLY[5:])], names=["web", "math"])
    packed = PackedCollator(0, max_tokens=16)
    expected = PaddedCollator(0)(IDS_ONLY)["labels"].tolist()
    named = PaddedCollator(0, fields={"source": PerExample(str)})
    for examples in ([mixture[i] for i in range(8)], mixture.__getitems__(range(8))):
        assert PaddedCollator(0)(examples)["labels"].tolist() == expected
        sources = named(examples).row_metadata["source"]
        assert sources == ["web"] * 5 + ["math"] * 3
        assert {type(source) for source in sources} == {str}
    sampler = PrefetchingSampler(mixture, batch_size=8)
    with PrefetchLoader(DataLoader(mixture, batch_sampler=sampler, collate_fn=packed)) as loader:
        (batch,) = loader
    assert batch.metadata["source_examples"] == {"web": 5, "math": 3}
    assert TokenizedDataset(mixture).num_loss_tokens.tolist() == [1 + i % 3 for i in range(8)]
    assert "no_target" not in str(audit(mixture))
    if of is TokenizedDataset:
        whole = PackedRows(mixture, packed)
        parts = [*PackedBatchSampler(mixture, packed, batch_size=8)]
        batches = [packed([*whole]), packed(mixture.__getitems__(parts[0]))]
        assert [b.metadata["source_examples"] for b in batches] == [{"web": 5, "math": 3}] * 2
    own = Mixture([of(IDS_ONLY)])[0] | {"source": "web"}
    with pytest.raises(DataError, match="example 0 has 'source' and no loss target"):
        PaddedCollator(0)([own])
