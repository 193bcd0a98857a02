"""The loss of each example: against a loop over examples, with samplers, and on two processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.ranks import on_two_ranks
from tests.test_losses import Model, examples_strategy
from tests.test_segments import KINDS, collated, loop
from torch_collate_kit import (
    Batch,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
    segment_sums,
    token_logps,
)
from torch_collate_kit.losses import example_losses, trained_values


@given(
    examples=examples_strategy,
    name=st.sampled_from(list(KINDS)),
    data=st.data(),
)
def test_against_a_loop(examples: Any, name: str, data: st.DataObject) -> None:
    batch, given_examples = collated(name, examples, normalize=False)
    model = Model()
    expected: dict[int, list[float]] = {}
    parts = loop(model, given_examples, batch)
    indices = batch.row_metadata["example_indices"].values.tolist()
    for i, part in zip(indices, parts, strict=True):
        expected.setdefault(i, []).extend(-value.item() for value in part)
    cut = data.draw(st.integers(1, len(batch)))
    rows = [batch] if cut == len(batch) else [batch[cut:], batch[:cut]]
    sums = [segment_sums(-token_logps(model(part), part), part) for part in rows]
    table = example_losses(sums, rows)
    assert table["example"].tolist() == sorted(expected)
    wanted = [sum(expected[i]) for i in sorted(expected)]
    np.testing.assert_allclose(table["loss"], wanted, rtol=1e-12, atol=1e-12)
    assert table["tokens"].tolist() == [len(expected[i]) for i in sorted(expected)]
    ones = [segment_sums(torch.ones_like(token_logps(model(p), p)), p) for p in rows]
    assert example_losses(ones, rows)["loss"].tolist() == table["tokens"].tolist()


# ---- with a sampler: the loss of a token is its id, so an example tells which one it is ----

IDS = [[i + 1] * (2 + i % 4) for i in range(24)]
SOURCES = ["web", "math"]


class Failing(TokenizedDataset):
    def __getitems__(self, indices: Any) -> Any:
        if 4 in getattr(indices, "indices", indices):
            raise OSError("broken")
        return super().__getitems__(indices)


def dataset(ids: list[list[int]], kind: type = TokenizedDataset) -> TokenizedDataset:
    return kind([{"input_ids": row} for row in ids], train_all=True)


def kept(kind: str, rank: int, steps: int = 3) -> tuple[list[Any], list[Batch], Any]:
    """The sums and the micro-batches of some steps of a rank of two, and its sampler."""
    data: Any = dataset(IDS)
    if "mixture" in kind:
        data = Mixture([dataset(IDS[:16]), dataset(IDS[16:])], names=SOURCES)
    if "failing" in kind:
        data = dataset(IDS, Failing)
    if "padded" in kind:
        collate: Any = PaddedCollator(0, train_all=True)
        sampler: Any = PrefetchingSampler(data, batch_size=7, seed=3, dp_rank=rank, dp_size=2)
    else:
        layout = ParallelLayout(dp=2)
        collate = PackedCollator(0, max_tokens=12, parallel=layout, train_all=True)
        sampler = PackedBatchSampler(data, collate, batch_size=7, seed=3, dp_rank=rank)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    sums, parts = [], []
    how = {"on_error": "skip"} if "failing" in kind else {}
    for batch in PrefetchLoader(loader, **how).steps(steps):
        for part in batch.split(1):
            values = trained_values(part["input_ids"], part).float()
            sums.append(segment_sums(values, part))
            parts.append(part)
    return sums, parts, sampler


@pytest.mark.parametrize("more", ["", " mixture", " failing"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_examples_are_those_of_the_dataset(layout: str, more: str) -> None:
    kind, seen = layout + more, []
    for rank in range(2):
        sums, parts, sampler = kept(kind, rank)
        table = example_losses(sums, parts, sampler=sampler)
        check(table, kind)
        seen += table["example"].tolist()
    expected = np.concatenate([sampler.examples(0, step) for step in range(3)])
    if "failing" in kind:
        assert 4 in expected
        expected = expected[expected != 4]
    assert sorted(seen) == sorted(expected.tolist())


def check(table: dict[str, np.ndarray], kind: str) -> None:
    examples = table["example"]
    counts = np.array([len(IDS[i]) - 1 for i in examples])
    assert table["tokens"].tolist() == counts.tolist()
    assert table["loss"].tolist() == ((examples + 1) * counts).tolist()
    assert ("source" in table) == ("mixture" in kind)
    if "mixture" in kind:
        assert table["source"].tolist() == [SOURCES[int(i >= 16)] for i in examples]


def on_rank(kind: str, empty: int | None) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums, parts, sampler = kept(kind, rank)
    given: Any = ([], []) if rank == empty else (sums, parts)
    found = example_losses(*given, sampler=sampler)
    alone = dist.new_group([0]), dist.new_group([1])
    own = example_losses(*given, sampler=sampler, group=alone[rank])
    try:  # both ranks' collators begin at 0
        example_losses(*given)
        message = ""
    except ValueError as error:
        message = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return {"table": found, "own": own, "message": message}


@pytest.mark.parametrize(("kind", "empty"), [("padded", None), ("packed mixture", 1)])
def test_two_processes_have_the_same_table(kind: str, empty: int | None) -> None:
    ranks = on_two_ranks(on_rank, kind, empty)
    first, second = (rank["table"] for rank in ranks)
    for name, column in first.items():
        np.testing.assert_array_equal(column, second[name])
    check(first, kind)
    assert all("an example comes twice" in rank["message"] for rank in ranks)
    own = [rank["own"]["example"].tolist() for rank in ranks]
    assert sorted(own[0] + own[1]) == first["example"].tolist()
    assert bool(own[1]) == (empty is None)


def test_a_declared_source_pairs_and_a_mask_of_your_own() -> None:
    pairs = [
        {"input_ids": [[1, 2, 2], [1, 3]], "loss_mask": [[0, 1, 1], [0, 1]], "source": "a"},
        {"input_ids": [[1, 4], [1, 5]], "loss_mask": [[0, 1], [0, 0]], "source": "b"},
    ]
    for collate in (PackedCollator, PaddedCollator):
        options: Any = {"max_tokens": 9} if collate is PackedCollator else {}
        batch = collate(0, fields={"source": PerExample(str)}, **options)(pairs[::-1])
        values = trained_values(batch["input_ids"], batch).double()
        table = example_losses(segment_sums(values, batch), batch)
        assert {k: column.tolist() for k, column in table.items()} == {
            **{"example": [0, 1], "source": ["b", "a"], "loss": [4.0, 7.0], "tokens": [1, 3]}
        }
        batch["loss_mask"][...] = (batch["loss_mask"] != 0) & (
            batch["input_ids"][:, 1:][:, -batch["loss_mask"].shape[1] :] != 2
        )
        values = trained_values(batch["input_ids"], batch).double()
        table = example_losses(segment_sums(values, batch), batch)
        assert table["loss"].tolist() == [4.0, 3.0]
        assert table["tokens"].tolist() == [1, 1]


def test_no_batches_are_a_table_without_rows() -> None:
    table = example_losses([], [])
    assert {k: (len(of), of.dtype.kind) for k, of in table.items()} == {
        **{"example": (0, "i"), "loss": (0, "f"), "tokens": (0, "i")}
    }


def batch_of(**options: Any) -> Batch:
    return PackedCollator(0, max_tokens=8, **options)(
        [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    )


def test_bad_inputs() -> None:
    batch, two = batch_of(), torch.ones(2)
    sums, parts, sampler = kept("padded", 0)
    other = PrefetchingSampler(24, batch_size=9, seed=3)
    wrapped = PackedCollator(
        type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": 9}),
        max_tokens=8, strategy="wrapped", isolate=False, train_all=True,
    )([{"input_ids": [5, 9]}, {"input_ids": [7, 9]}])  # fmt: skip
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (
            (two[:1], batch),
            {},
            ValueError,
            r"^sums have shape \[1\], the batch has 2 segments",
        ),
        (([two], [batch, batch]), {}, ValueError, "^1 sums for 2 batches; pass one for each"),
        (([two] * 2, [batch] * 2), {}, ValueError, "^an example comes twice: the batches are of "),
        (([1, 2], batch), {}, TypeError, "^sums must be a tensor of floats, got list; pass those"),
        (([two], [dict(batch)]), {}, TypeError, "^batch must be the Batch that the collator"),
        ((two, batch.context_shard(0, 1)), {}, ValueError, "is the shard of context rank 0"),
        ((two[:1], wrapped), {}, ValueError, "^a segment of isolate=False has several examples"),
        ((two, batch), {"sampler": sampler}, ValueError, "^the batch has no epoch and step"),
        ((sums, parts), {"sampler": other}, ValueError, "^the batch has 4 examples, step 0 of epo"),
    ]
    for given_arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            example_losses(*given_arguments, **options)
