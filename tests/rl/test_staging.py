"""Mini-batches on ranks: the same rows, the same gradients, and back again."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_samples import contents
from tests.rl.rollouts import grouped_uids, rollout_batch
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.losses import token_loss
from torch_collate_kit.packing import ModelCost
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import (
    mini_batch_boundaries,
    prompt_boundaries,
    stage_mini_batches,
    unstage,
)

BALANCES = (None, "tokens", "attention")
ZERO_FIELDS = ("response_mask", "loss_mask", "rewards", "rollout_logprobs", "advantages")


def rows_of(staged: list[list[Batch]]) -> list[list[list[int]]]:
    return [[part.row_metadata["row_indices"].tolist() for part in ranks] for ranks in staged]


def drawn_shape(uids: list[str], seed: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(1, 6)), int(rng.integers(1, 8))) for _ in uids]


# --- which rows go where -------------------------------------------------------------------------


@given(
    uids=grouped_uids(),
    seed=st.integers(0, 99),
    dp_size=st.sampled_from([1, 2, 3, 8]),
    balance=st.sampled_from(BALANCES),
    divided=st.booleans(),
)
def test_every_mini_batch_keeps_its_rows(
    uids: list[str], seed: int, dp_size: int, balance: Any, divided: bool
) -> None:
    batch = rollout_batch(drawn_shape(uids, seed), uids, seed=seed, divided=divided)
    before = contents(batch)
    edges = mini_batch_boundaries(uids, 1)
    staged = stage_mini_batches(batch, edges, dp_size, balance=balance)
    assert contents(batch) == before
    assert len(staged) == len(edges) - 1
    for (start, stop), ranks in zip(pairwise(edges.tolist()), staged, strict=True):
        assert len(ranks) == dp_size
        assert len({len(part) for part in ranks}) == 1
        whole = Batch.cat(ranks)  # refuses other batch metadata
        rows = whole.row_metadata["row_indices"]
        real = rows >= 0
        assert sorted(rows[real].tolist()) == list(range(start, stop))
        assert len(rows) == -(-(stop - start) // dp_size) * dp_size
        if balance is None:
            assert rows[: stop - start].tolist() == list(range(start, stop))
        mini, meta = batch[start:stop], whole.metadata
        count = int((mini["loss_mask"] != 0).sum())
        assert meta["num_loss_tokens"] == count
        assert meta["num_examples"] == stop - start
        assert meta["step_num_tokens"] == int(mini["attention_mask"].sum())
        assert meta["num_dummy_rows"] == len(rows) - (stop - start)
        assert whole.row_metadata["uids"] == [
            uids[i] if i >= 0 else uids[start] for i in rows.tolist()
        ]
        for name, field in batch.items():
            found = whole[name]
            assert found.dtype == field.dtype
            if name == "loss_mask":
                continue
            assert torch.equal(found[real], field[torch.from_numpy(rows[real])])
        weights = whole["loss_mask"] * meta["loss_mask_divisor"]
        wanted = batch["loss_mask"] * batch.metadata["loss_mask_divisor"]
        torch.testing.assert_close(weights[real], wanted[torch.from_numpy(rows[real])])
        divides = batch.metadata["loss_mask_divisor"] != 1
        assert meta["loss_mask_divisor"] == (max(count, 1) if divides else 1)
        for name in ZERO_FIELDS:
            assert (whole[name][~real] == 0).all()
        repeated = batch["input_ids"][start].tolist()
        assert whole["input_ids"][~real].tolist() == [repeated] * int((~real).sum())


def test_views_where_nothing_is_added() -> None:
    batch = rollout_batch([(2, 2)] * 4, list("aabb"))
    [[first], [second]] = stage_mini_batches(batch, [0, 2, 4], 1)
    assert first["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
    assert second["loss_mask"].data_ptr() == batch["loss_mask"][2:].data_ptr()
    assert "row_indices" not in batch.metadata
    again = pickle.loads(pickle.dumps(second))
    assert again.row_metadata["row_indices"].tolist() == [2, 3]


# --- balance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["tokens", "attention"])
def test_balance_lowers_the_largest_load(balance: Any) -> None:
    rng = np.random.default_rng(5)
    responses = np.sort(rng.exponential(600, 61).astype(int) % 2500 + 1)
    responses = np.concatenate([responses[::2], responses[1::2][::-1]])  # up, then down
    lengths = responses + 3
    shape = [(3, int(n)) for n in responses]
    uids = [i // 4 for i in range(61)]
    batch = rollout_batch(shape, uids)
    edges = [0, 31, 61]
    costs = lengths if balance == "tokens" else ModelCost().language(lengths)

    def loads(staged: list[list[Batch]]) -> list[list[int]]:
        rows = [[part.row_metadata["row_indices"] for part in ranks] for ranks in staged]
        return [[int(costs[i[i >= 0]].sum()) for i in ranks] for ranks in rows]

    plain, even = (stage_mini_batches(batch, edges, 8, balance=how) for how in (None, balance))
    for ranks, before, after in zip(even, loads(plain), loads(even), strict=True):
        assert sum(before) == sum(after)
        assert max(after) < 0.7 * max(before)
        assert max(after) < 1.3 * sum(after) / 8
        for part in ranks:  # longest first, so that the i-th rows of all ranks are about as long
            rows = part.row_metadata["row_indices"]
            own = np.where(rows < 0, 0, lengths[rows])
            assert (np.diff(own) <= 0).all()
            assert (rows < 0).sum() <= 1  # pads are spread
    assert [ranks[0].metadata["num_dummy_rows"] for ranks in even] == [1, 2]


def test_lengths_come_from_sub_sequences_first() -> None:
    """Two pieces of 100 cost less attention than one of 200."""
    lengths = Ragged.from_rows([[20000, 20000], [39000], [10], [10]])
    batch = Batch(
        {"attention_mask": torch.ones(4, 3, dtype=torch.int64), "sub_seq_lengths": lengths}
    )
    assert rows_of(stage_mini_batches(batch, [0, 4], 2, balance="tokens")) == [[[0, 3], [1, 2]]]
    assert rows_of(stage_mini_batches(batch, [0, 4], 2, balance="attention")) == [[[1, 3], [0, 2]]]
    [[whole]] = stage_mini_batches(batch, [0, 4], 1)
    assert whole.metadata["step_num_tokens"] == 79020
    assert "num_loss_tokens" not in whole.metadata


# --- what the collators give ----------------------------------------------------------------------


EXAMPLES = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]},
    {"input_ids": [8, 9], "loss_mask": [0, 2]},
    {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 0, 1, 1, 1]},
]


@pytest.mark.parametrize("normalize_loss", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_token_loss_of_a_mini_batch(normalize_loss: bool, packs: bool) -> None:
    """With its own divisor, staged or collated alone, summed plainly or by token_loss."""
    if packs:
        collate: Any = PackedCollator(0, max_tokens=6, normalize_loss=normalize_loss)
    else:
        collate = PaddedCollator(0, normalize_loss=normalize_loss)
    batch = collate(EXAMPLES)
    assert len(batch) > 1
    torch.manual_seed(0)
    logits = torch.randn(*batch["input_ids"].shape, 11, dtype=torch.float64)
    edges = [0, 1, len(batch)]
    for (start, stop), ranks in zip(
        pairwise(edges), stage_mini_batches(batch, edges, 4), strict=True
    ):
        rows = batch[start:stop]
        count = int((rows["loss_mask"] != 0).sum())
        weights = rows["loss_mask"].double() * batch.metadata["loss_mask_divisor"]
        nll = torch.nn.functional.cross_entropy(
            logits[start:stop, :-1].mT, rows["labels"][:, 1:], reduction="none"
        )
        wanted = float((nll[:, -weights.shape[1] :] * weights).sum()) / count
        found = plain = 0.0
        for part in ranks:
            meta = part.metadata
            assert meta["num_loss_tokens"] == count
            own = logits[np.maximum(part.row_metadata["row_indices"], 0)]
            total = token_loss(own, part, num_loss_tokens=count)
            found += float(total)
            plain += float(token_loss(own, part, num_loss_tokens=meta["loss_mask_divisor"]))
        assert found == pytest.approx(wanted, rel=1e-6)
        assert plain == pytest.approx(wanted if normalize_loss else wanted * count, rel=1e-6)
        wanted_examples = {int(i) for row in rows.row_metadata["example_indices"] for i in row}
        assert ranks[0].metadata["num_examples"] == len(wanted_examples)
        assert ranks[0].step.num_tokens == int(rows["attention_mask"].sum())


def test_rows_without_a_response_are_not_counted() -> None:
    """Of a batch that was built from tensors: as dummy rows are."""
    batch = rollout_batch([(1, 1), (2, 2), (1, 1)], list("abb"))
    batch = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    batch = batch.pad_rows(multiple_of=4)
    [[found]] = stage_mini_batches(batch, [0, 4], 1)
    assert found.metadata["num_examples"] == 3


# --- unstage --------------------------------------------------------------------------------------


@given(
    uids=grouped_uids(), dp_size=st.sampled_from([1, 2, 4, 8]), balance=st.sampled_from(BALANCES)
)
def test_there_and_back(device: str, uids: list[str], dp_size: int, balance: Any) -> None:
    batch = rollout_batch(drawn_shape(uids, 1), uids).to(device)
    staged = stage_mini_batches(batch, prompt_boundaries(uids), dp_size, balance=balance)
    tensors = [[part["input_ids"] for part in ranks] for ranks in staged]
    found = unstage(staged, tensors)
    assert torch.equal(found, batch["input_ids"])
    assert found.dtype == torch.int64
    assert found.device.type == device
    arrays = unstage(staged, [[t.cpu().numpy() for t in ranks] for ranks in tensors])
    assert isinstance(arrays, np.ndarray)
    assert np.array_equal(arrays, batch["input_ids"].cpu().numpy())
    lists = unstage(staged, [[part.row_metadata["uids"] for part in ranks] for ranks in staged])
    assert lists == uids


# --- errors ---------------------------------------------------------------------------------------


def test_errors() -> None:
    batch, plain = rollout_batch([(1, 1)] * 2, list("ab")), Batch({"x": torch.ones(2)})
    cases: list[tuple[Any, Any, int, Any, type[Exception], str]] = [
        ({}, [0, 2], 1, None, TypeError, "batch must be a Batch, got dict; collate first"),
        (batch, [0, 2], 0, None, ValueError, "dp_size must be at least 1, got 0; 1 means no data"),
        (batch, [0, 2], 1, "flops", ValueError, "balance must be one of 'tokens', .*got 'flops'"),
        (batch, [0, 1], 1, None, ValueError, r"boundaries must .* 2 rows, got \[0 1\]"),
        (plain, [0, 2], 1, "tokens", ValueError, r"balance='tokens' needs .* only \['x'\]; pass"),
    ]
    for rows, boundaries, dp_size, balance, error, message in cases:
        with pytest.raises(error, match=message):
            stage_mini_batches(rows, boundaries, dp_size, balance=balance)


ONE, TWO = torch.ones(1), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ([[[1], [2]]], ValueError, r"outputs has 1 mini-batches, staged has 2; pass one for each"),
        ([[[1], [2]], [[3]]], ValueError, r"outputs\[1\] has 1 ranks, staged has 2"),
        ([[[1], [2, 2]], [[3], [4]]], ValueError, r"outputs\[0\]\[1\] has 2 rows, staged has 1"),
        ([[[1], (2,)], [[3], [4]]], TypeError, r"outputs\[0\]\[1\] is tuple; pass a tensor or"),
        ([[ONE[0], [2]], [[3], [4]]], TypeError, r"outputs\[0\]\[0\] is Tensor; pass"),
        ([[[1], ONE], [[3], [4]]], TypeError, r"\[0\]\[1\] is Tensor .*\[0\]\[0\] is list; all"),
        ([[TWO, TWO], [ONE, TWO]], TypeError, r"\[1\]\[0\] is Tensor \[\] per row .* \[2\] per"),
        ([[ONE, ONE.to("meta")], [ONE, ONE]], TypeError, r"\[0\]\[1\] is .* meta, .* on cpu; all"),
    ],
)
def test_unstage_errors(outputs: Any, error: type[Exception], message: str) -> None:
    staged = stage_mini_batches(rollout_batch([(1, 1)] * 3, list("aab")), [0, 2, 3], 2)
    with pytest.raises(error, match=message):
        unstage(staged, outputs)
