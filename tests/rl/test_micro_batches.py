"""Micro-batches of a staged batch: a budget of cells, one number on every rank, nothing lost."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.rollouts import rollout_batch
from torch_collate_kit import (
    PackedCollator,
    PaddedCollator,
    RolloutCollator,
    global_num_loss_tokens,
    token_loss,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import micro_batches, stage_mini_batches
from torch_collate_kit.vision import VisionLayout

DP_SIZES = [1, 2, 3, 8]


def rollouts(shape: list[tuple[int, int]], *, routes: bool = False) -> list[dict[str, Any]]:
    """``(prompt tokens, response tokens)`` each; about one response token in three not trained."""
    rng = np.random.default_rng(len(shape))
    return [
        {
            "prompt_ids": rng.integers(1, 11, p),
            "response_ids": rng.integers(1, 11, r),
            "rewards": rng.normal(size=r),
            "loss_mask": rng.integers(0, 3, r),
            "logprobs": -rng.random(size=r),
            "uid": i // 2,
            **({"rollout_expert_indices": rng.integers(0, 9, (p, 2, 2))} if routes else {}),
        }
        for i, (p, r) in enumerate(shape)
    ]


def examples(shape: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """SFT examples of the same tokens; of every third nothing is trained."""
    return [
        {
            "input_ids": np.concatenate([r["prompt_ids"], r["response_ids"]]),
            "loss_mask": np.append(np.zeros(p), r["loss_mask"] * (i % 3 > 0)),
        }
        for i, ((p, _), r) in enumerate(zip(shape, rollouts(shape), strict=True))
    ]


def collated(kind: str, shape: list[tuple[int, int]], **options: Any) -> Batch:
    if kind == "rollouts":
        return RolloutCollator(0, **options)(rollouts(shape))
    if kind == "packed rollouts":
        return PackedCollator(0, max_tokens=16, **options)(rollouts(shape))
    if kind == "packed":
        return PackedCollator(0, max_tokens=16, **options)(examples(shape))
    if kind == "dense":
        return rollout_batch(shape, [0] * len(shape))
    return PaddedCollator(0, padding_side=kind, **options)(examples(shape))


KINDS = ["rollouts", "left", "right", "packed rollouts", "packed", "dense"]
SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=9)


def cut_out(name: str, field: torch.Tensor, kind: str, widths: tuple[int, int], a: int) -> Any:
    """The part of a dense field that rows have after they were trimmed to another width."""
    before, after = widths
    is_right_padded = kind == "right"
    if name in ("input_ids", "attention_mask", "position_ids", "labels", "per_token"):
        return field[:, :after] if is_right_padded else field[:, before - after :]
    columns = field.shape[1] - (before - after if is_right_padded else 0)
    return field[:, columns - a : columns]


@pytest.mark.parametrize("kind", KINDS)
@given(
    shape=SHAPES,
    dp_size=st.sampled_from(DP_SIZES),
    extra=st.integers(0, 60),
    multiple=st.sampled_from([None, 4]),
    given_fields=st.booleans(),
)
def test_micro_batches_are_cuts_of_the_block(
    kind: str,
    shape: list[tuple[int, int]],
    dp_size: int,
    extra: int,
    multiple: int | None,
    given_fields: bool,
) -> None:
    """Within the budget, as many on every rank, every row once, every field as in the block."""
    can_round = kind in ("rollouts", "left", "right")
    multiple = multiple if can_round else None
    batch = collated(kind, shape, **({"pad_to_multiple_of": multiple} if can_round else {}))
    if given_fields:  # as tensors that are stored as they are
        torch.manual_seed(0)
        a = batch["loss_mask"].shape[1]
        extras = {
            "per_token": torch.randn(batch["input_ids"].shape),
            "values": torch.randn(len(batch), a, 2),
            "scores": torch.randn(len(batch)),
            "ids": batch["input_ids"].clone(),
        }
        batch = batch.with_fields(**extras)
        batch["input_ids"].add_(0)  # changed in place
    [ranks] = stage_mini_batches(batch, [0, len(batch)], dp_size)
    width = ranks[0]["input_ids"].shape[1]
    needs = ranks[0].metadata["row_widths"]
    assert needs.shape == (dp_size, len(ranks[0]))
    budget = -(-int(needs.max()) // (multiple or 1)) * (multiple or 1) + extra
    micro = [micro_batches(part, max_tokens=budget, pad_to_multiple_of=multiple) for part in ranks]
    assert len({len(parts) for parts in micro}) == 1
    computed = sum(m["input_ids"].numel() for parts in micro for m in parts)  # by all ranks
    for part, parts in zip(ranks, micro, strict=True):
        rows = np.concatenate([m.row_metadata["row_indices"] for m in parts])
        assert sorted(rows.tolist()) == sorted(part.row_metadata["row_indices"].tolist())
        assert sum(map(len, parts)) == len(part)
        left = list(range(len(part)))
        for m in parts:
            ids = m["input_ids"]
            assert 0 < ids.numel() <= budget
            lengths = m["attention_mask"].sum(dim=1)
            trims = kind in ("rollouts", "left", "right")
            if trims:
                longest = -(-int(lengths.max()) // (multiple or 1)) * (multiple or 1)
                assert ids.shape[1] == longest
            else:
                assert ids.shape[1] == width
            assert m["loss_mask"].shape[1] == m.metadata["response_length"] < ids.shape[1]
            wanted_rows = []
            for row in m.row_metadata["row_indices"].tolist():
                at = next(i for i in left if part.row_metadata["row_indices"][i] == row)
                left.remove(at)
                wanted_rows.append(at)
            whole = part.select(wanted_rows)
            if trims:  # the response begins where the first of any row does
                cut = width - ids.shape[1] if kind == "right" else 0
                pads = ids.shape[1] - lengths if kind == "right" else 0 * lengths
                reach = [
                    int(n) + p
                    for row, p in zip(m.row_metadata["num_actions"], pads.tolist(), strict=True)
                    for n in row
                    if n
                ]
                kept = min(part.metadata["response_length"] - cut, ids.shape[1] - 1)
                assert m.metadata["response_length"] == max(0, min(max(reach, default=1), kept))
            widths, a = (width, ids.shape[1]), m.metadata["response_length"]
            for name, field in whole.items():
                if name in ("sub_seq_lengths", "cu_seq_lens"):
                    assert m[name].tolist() == field.tolist()
                elif name == "scores":
                    assert torch.equal(m[name], field)
                elif name == "ids":
                    assert torch.equal(m[name], m["input_ids"])
                else:
                    found = m[name]
                    assert found.dtype == field.dtype
                    assert torch.equal(found, cut_out(name, field, kind, widths, a)), name
            # nothing was lost with the columns that are gone
            assert m["attention_mask"].sum() == whole["attention_mask"].sum()
            for name in ("loss_mask", "response_mask", "rewards"):
                if name in whole:
                    assert (m[name] != 0).sum() == (whole[name] != 0).sum()
            assert m.metadata.pop("row_widths").shape == part.metadata["row_widths"].shape
            assert m.metadata.pop("is_last_part") == (m is parts[-1])
            assert m.step.num_cells == computed
            own = {"response_length": a, "row_widths": 0, "step_num_cells": computed}
            assert {**m.metadata, **own} == {**part.metadata, **own}


def test_a_loss_mask_of_ones_own_keeps_its_columns() -> None:
    """Where a user trains what the rollouts did not say, no column of it is cut off."""
    batch = RolloutCollator(0)(rollouts([(1, 8), (5, 1)]))
    mask = torch.zeros(2, 8)
    mask[1, -5:] = 1  # four tokens of the prompt, too
    [[part]] = stage_mini_batches(batch.with_fields(loss_mask=mask), [0, 2], 1)
    parts = micro_batches(part, max_tokens=9)
    assert [m["loss_mask"].tolist() for m in parts] == [[[0.0] * 8], [[1.0] * 5]]
    assert parts[1].metadata["response_length"] == parts[1]["rewards"].shape[1] == 5


@pytest.mark.parametrize("short", range(1, 7))
def test_a_mask_of_all_predicted_tokens_is_cut_with_its_cells(short: int) -> None:
    batch = RolloutCollator(0)(rollouts([(6, 2), (short, 2)]))
    mask = batch["attention_mask"][:, 1:].float()
    logits = torch.randn(*batch["input_ids"].shape, 20)
    batch = batch.with_fields(loss_mask=mask, logits=logits)
    [[part]] = stage_mini_batches(batch, [0, 2], 1)
    assert part.metadata["num_loss_tokens"] == global_num_loss_tokens(part) == 7 + short + 1
    parts = micro_batches(part, max_tokens=8)
    losses = [token_loss(m["logits"], m, num_loss_tokens=1) for m in parts]
    torch.testing.assert_close(sum(losses), token_loss(logits, batch, num_loss_tokens=1))


def test_a_mini_batch_counts_what_is_trained() -> None:
    batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    fewer = batch.with_fields(labels=torch.where(batch["labels"] == 2, -100, batch["labels"]))
    more = batch.with_fields(loss_mask=torch.ones_like(batch["loss_mask"]))
    for changed, number in ((fewer, 2), (more, 3)):
        [[part]] = stage_mini_batches(changed, [0, 1], 1)
        assert part.metadata["num_loss_tokens"] == global_num_loss_tokens(part) == number


class Bigram(torch.nn.Module):
    """Logits of the next token from the token and its position: left padding must not matter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(12, 12, generator=generator, dtype=torch.float64)
        places = torch.randn(40, 12, generator=generator, dtype=torch.float64)
        self.table, self.places = torch.nn.Parameter(table), torch.nn.Parameter(places)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.table[batch["input_ids"]] + self.places[batch["position_ids"]]


@pytest.mark.parametrize("normalize_loss", [False, True])
@pytest.mark.parametrize("balance", [None, "tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_staged_batch(
    kind: str, balance: Any, normalize_loss: bool
) -> None:
    options = {} if kind == "dense" else {"normalize_loss": normalize_loss}
    shape = [(1, 8), (5, 2), (2, 5), (1, 2), (6, 1), (3, 3), (2, 2)]
    batch = collated(kind, shape, **options)
    model = Bigram()
    for ranks in stage_mini_batches(batch, [0, 2, len(batch)], 2, balance=balance):
        model.zero_grad()
        number = ranks[0].metadata["num_loss_tokens"]
        whole = sum(token_loss(model(part), part, num_loss_tokens=number) for part in ranks)
        whole.backward()
        wanted = [parameter.grad.clone() for parameter in model.parameters()]
        assert wanted[0].abs().max() > 1e-3
        model.zero_grad()
        total = 0.0
        micro = [m for part in ranks for m in micro_batches(part, max_tokens=30)]
        assert len(micro) >= 2
        for m in micro:
            loss = token_loss(model(m), m, num_loss_tokens=m.metadata["num_loss_tokens"])
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(whole.item(), rel=1e-9, abs=1e-9)
        for parameter, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-9)


def test_errors() -> None:
    batch = RolloutCollator(0)(rollouts([(1, 8), (5, 2), (2, 5), (1, 2)]))
    ranks = stage_mini_batches(batch, [0, 4], 2)[0]
    [[plain]] = stage_mini_batches(Batch({"x": torch.ones(2)}), [0, 2], 1)
    ninth = r"^row 0 of rank 0 has 9 cells, more than max_tokens=8 \(1 rows have\).*raise .* to 9,"
    third = r"^row 0 of rank 0 has 9 cells, more than max_tokens=6 \(3 rows have\)"
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (ranks, {"max_tokens": 8}, TypeError, "be a Batch, got list; pass staged"),
        (ranks[0], {"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        (ranks[0], {"max_tokens": 9, "pad_to_multiple_of": 0}, ValueError, "at least 1, got 0"),
        (ranks[0], {"max_tokens": 9, "pad_to_multiple_of": 2}, ValueError, "9 cells wide, which"),
        (batch, {"max_tokens": 9}, ValueError, "^the batch was not staged"),
        (plain, {"max_tokens": 9}, ValueError, "^the batch was not staged"),
        (ranks[0][:1], {"max_tokens": 9}, ValueError, "the 1 rows of the batch are not the 2"),
        (ranks[0].select([1, 0]), {"max_tokens": 9}, ValueError, "the 2 rows of the batch are"),
        (Batch.cat(ranks), {"max_tokens": 9}, ValueError, "the 4 rows of the batch are not the 2"),
        (ranks[0], {"max_tokens": 8}, DataError, ninth),
        (ranks[1], {"max_tokens": 8}, DataError, ninth),  # though only rank 0 has the row
        (ranks[1], {"max_tokens": 6}, DataError, third),
    ]
    for part, options, error, message in cases:
        with pytest.raises(error, match=message):
            micro_batches(part, **options)


# --- Rows into micro-batches of a budget of cells, against brute force


def micro_batch_rows(widths: list[int], budget: int, dp_size: int = 1) -> list[list[list[int]]]:
    """The rows of every micro-batch of every rank."""
    batch = PaddedCollator(0)([{"input_ids": [1] * width} for width in widths])
    [ranks] = stage_mini_batches(batch, [0, len(widths)], dp_size)
    parts = [micro_batches(part, max_tokens=budget) for part in ranks]
    return [[m.row_metadata["row_indices"].tolist() for m in of_rank] for of_rank in parts]


def cells(widths: list[int], rows: list[int]) -> int:
    return len(rows) * max((widths[i] for i in rows), default=0)


def smallest_largest(widths: list[int], num_parts: int) -> int:
    """The fewest cells that the largest of so many micro-batches can have."""
    return min(
        max(cells(widths, [i for i in range(len(widths)) if of[i] == p]) for p in range(num_parts))
        for of in product(range(num_parts), repeat=len(widths))
    )


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    extra=st.integers(0, 12),
    num_wide=st.integers(0, 6),
)
def test_against_brute_force(widths: list[int], extra: int, num_wide: int) -> None:
    """Of the second of two ranks; rows of the first may need more micro-batches."""
    count, budget = len(widths), max(widths) + extra
    first = ([budget] * num_wide + [1] * count)[:count]
    ranks = micro_batch_rows(first + widths, budget, dp_size=2)
    found = [[i - count for i in part] for part in ranks[1]]
    assert len(ranks[0]) == len(found)
    assert all(found)
    assert sorted(i for part in found for i in part) == list(range(count))
    if len(found) <= 3:
        assert max(cells(widths, part) for part in found) == smallest_largest(widths, len(found))
    if 2 <= len(found) <= 4:  # one less is not enough
        assert max(smallest_largest(own, len(found) - 1) for own in (first, widths)) > budget
    assert [widths[i] for part in found for i in part] == sorted(widths, reverse=True)


def test_the_largest_has_as_few_cells_as_can_be() -> None:
    assert micro_batch_rows([3, 2, 1, 5], 11) == [[[3], [0, 1, 2]]]  # 9 cells, not 10


def test_equal_rows_stay_in_their_order() -> None:
    assert micro_batch_rows([4] * 5, 8) == [[[0, 1], [2, 3], [4]]]
    assert micro_batch_rows([4, 4], 10**9) == [[[0, 1]]]


def test_the_largest_is_split_where_another_rank_needs_more() -> None:
    _, second = micro_batch_rows([6, 6, 6, 6, 2, 2, 6, 3, 3, 2, 2, 2], 6, dp_size=2)
    assert [[i - 6 for i in part] for part in second] == [[0], [1], [2], [3, 4], [5]]


# --- Ranks whose parts differ in whether they have images are named when rollouts are staged


QWEN = VisionLayout("qwen2_vl", image_token_id=9, patch_shape=(1, 1, 2))
IMAGE = {"pixel_values": np.ones((1, 2)), "image_grid_thw": np.array([[1, 1, 1]])}


def rollout(length: int, *, image: bool) -> dict[str, Any]:
    ids = [9, 1] if image else [1, 1]
    given = {"prompt_ids": ids, "response_ids": [2] * length, "rewards": 1.0}
    return {**given, "loss_mask": [1] * length, **(IMAGE if image else {})}


def staged(images: list[bool], lengths: list[int], dp_size: int = 2) -> Any:
    rollouts = [rollout(n, image=i) for n, i in zip(lengths, images, strict=True)]
    batch = RolloutCollator(0, vision=QWEN)(rollouts)
    return stage_mini_batches(batch, [0, len(batch)], dp_size)[0]


def test_a_rank_without_images_beside_one_with_images_is_named() -> None:
    with pytest.warns(UserWarning, match=r"ranks \[1\] have no image in a mini-batch") as found:
        staged([True, True, False, False], [1, 1, 1, 1])
    assert [warning.filename for warning in found] == [__file__], "the line that staged"


def test_micro_batches_that_differ_are_named_on_every_rank() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = staged([True, False, True, False], [8, 1, 1, 8])
    for part in parts:
        message = r"ranks \[1\] have no image in a micro-batch 0"
        with pytest.warns(UserWarning, match=message) as found:
            micro_batches(part, max_tokens=10)
        assert {warning.filename for warning in found} == {__file__}, "the line that cut"


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [8, 1, 8, 1]])
@pytest.mark.parametrize("images", [[True] * 4, [False] * 4, [True, False, True, False]])
def test_even_ranks_give_no_warning(images: list[bool], lengths: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in staged(images, lengths):
            micro_batches(part, max_tokens=10)
        staged(images, lengths, dp_size=1)
