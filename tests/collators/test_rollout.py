"""RolloutCollator, and PackedCollator on rollouts: the edges, written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.batch_checks import (
    assert_contract_dtypes,
    assert_equals_oracle,
    assert_round_trips,
    assert_same_batch,
)
from tests.oracle import rollout_batch
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.losses import token_loss
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.rl import stage_mini_batches


def rollout(prompt: int, response: int, **more: Any) -> dict[str, Any]:
    """Tokens 1, 2, ...; every response token is trained."""
    ids = list(range(1, prompt + response + 1))
    parts = {"prompt_ids": ids[:prompt], "response_ids": ids[prompt:]}
    return {**parts, "rewards": 1.0, "loss_mask": [1] * response, **more}


def collated(examples: list[dict[str, Any]], **options: Any) -> Batch:
    batch = RolloutCollator(0, **options)(examples)
    assert_equals_oracle(batch, rollout_batch(examples, pad_token_id=0, **options))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, 1)
    return batch


def test_the_layout_by_hand() -> None:
    batch = collated(
        [
            rollout(2, 2, rewards=[0.5, -1.0], logprobs=[-0.1, -0.2], advantages=2.0, uid=7),
            rollout(
                1, 3, rewards=3.0, loss_mask=[1, 0, 1], logprobs=[-1, 0, -3], advantages=-1, uid=8
            ),
            rollout(1, 1, rewards=-2.0, logprobs=[-4.0], advantages=[0.25], uid=7),
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 1, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 1]]
    assert batch["response_mask"].tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert batch["rewards"].tolist() == [[0, 0.5, -1], [0, 0, 3], [0, 0, -2]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 1], [0, 0, 1]]
    assert batch["advantages"].tolist() == [[0, 2, 2], [-1, -1, -1], [0, 0, 0.25]]
    assert batch["rollout_logprobs"][1:].tolist() == [[-1, 0, -3], [0, 0, -4]]
    assert batch.row_metadata["uids"] == [7, 8, 7]
    assert batch.metadata["response_length"] == 3
    assert batch.metadata["num_loss_tokens"] == 5


@pytest.mark.parametrize("kind", ["block", "packed"])
def test_a_hole_is_a_token_without_a_route_everywhere(kind: str) -> None:
    """Marked are pads, holes, and tokens after the last route, whatever is done to the rows."""
    hole = [[-1, -1]] * 2
    routes = [[[[3, 1], [0, 4]], hole, [[30, 2], [5, 6]]], [hole] * 2, [[[7, 8], [9, 10]]] * 3]
    examples = [rollout(1, 3, rollout_expert_indices=own) for own in routes]
    collate: Any = RolloutCollator(0) if kind == "block" else PackedCollator(0, max_tokens=4)
    batch = collate(examples)
    parts = [batch, Batch.cat([batch[:1], batch[1:]]), batch.select([0, 1, 2])]
    parts += [batch.pad_rows(multiple_of=2)[:3], Batch.cat(stage_mini_batches(batch, [0, 3], 3)[0])]
    for rows in parts:
        order = [rows.row_metadata["example_indices"].tolist().index([i]) for i in range(3)]
        marked = rows["router_padding_mask"][order].tolist()
        assert marked == [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
        found = rows["rollout_expert_indices"][order]
        assert found[0, [0, 2]].tolist() == [routes[0][0], routes[0][2]]
        assert (found[rows["router_padding_mask"][order]] == torch.arange(2)).all()
    for rank in range(2):
        shard = batch.context_shard(rank, 2, layout="head_tail")
        expected = batch["router_padding_mask"].flatten()[shard.cells]
        assert torch.equal(shard["router_padding_mask"].flatten(), expected)


@pytest.mark.parametrize("kind", ["block", "packed"])
def test_the_routes_of_an_added_row_are_those_of_a_pad(kind: str) -> None:
    """They were row 0's, not marked as padding: a router counted them as tokens of the batch."""
    collate: Any = RolloutCollator(0) if kind == "block" else PackedCollator(0, max_tokens=5)
    batch = collate([rollout(1, 2, rollout_expert_indices=[[[5, 9, 7]], [[1, 2, 3]]])] * 3)
    names = ("rollout_expert_indices", "router_padding_mask")
    expected = {name: batch[name].clone() for name in names}
    padded = batch.pad_rows(multiple_of=4)
    [ranks] = stage_mini_batches(batch, [0, 3], 4)
    for rows in (padded, Batch.cat(ranks)):
        assert rows["router_padding_mask"].dtype == torch.bool
        assert rows["rollout_expert_indices"].dtype == torch.int16
        assert rows["router_padding_mask"][3].all()
        assert rows["rollout_expert_indices"][3].tolist() == [[[0, 1, 2]]] * 3
        for name, field in expected.items():
            assert torch.equal(rows[name][:3], field)
            assert torch.equal(batch[name], field)


def test_pandas_columns_go_by_their_place() -> None:
    """A filtered Series is labelled with the rows it came from."""
    columns = {
        "prompt_ids": pd.Series([np.array([1]), np.array([2])], index=[4, 7]),
        "response_ids": [[3, 4], [5, 6]],
        "loss_mask": [[1, 1], [1, 1]],
        "rewards": pd.Series([[0.5, 1.0], 2.0], index=[1, 0]),
    }
    assert RolloutCollator(0)(columns)["rewards"].tolist() == [[0.5, 1.0], [0.0, 2.0]]


OPTIONAL: dict[str, Any] = {
    **{"logprobs": [-1.0], "advantages": 1.0, "uid": "a", "trajectory_id": "t"},
    **{"is_last_step": True, "rollout_expert_indices": np.ones((2, 2, 2), dtype=int)},
}


@pytest.mark.parametrize("name", [*OPTIONAL, "pixel_values", "image_grid_thw"])
def test_an_optional_key_may_be_none_everywhere_but_not_somewhere(name: str) -> None:
    """A table has the column for all of its rows, also of a policy that gave no log-probs."""
    examples = [rollout(1, 1), rollout(2, 1)]
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        for column in ([None, None], pd.Series([None, None]), np.array([None, None])):
            assert_same_batch(collate({**columns, name: column}), collate(examples))
        for missing in (0, 1) if name in OPTIONAL else ():
            given = [rollout(1, 1, **{name: OPTIONAL[name]}) for _ in range(2)]
            given[missing][name] = None
            with pytest.raises(DataError, match=f"^example {missing}: {name} is None; "):
                collate(given)


def test_an_sft_example_may_have_a_prompt_beside_its_ids() -> None:
    example = {"input_ids": [1, 2, 3], "prompt_ids": [1], "response_ids": [2, 3]}
    example["labels"] = [-100, 2, 3]
    batch = PackedCollator(0, max_tokens=4)([example])
    assert "labels" in batch
    assert "rewards" not in batch
    both = PackedCollator(0, max_tokens=4)([{**rollout(1, 2), "input_ids": [1, 2, 3]}])
    assert "rewards" in both


@pytest.mark.parametrize("overflow", ["raise", "truncate", "split"])
def test_a_rollout_is_never_cut(overflow: str) -> None:
    """Not even where only the alignment makes it too long: 8 of 10 cells can be filled."""
    layout = ParallelLayout(tp=4)
    collate = PackedCollator(0, max_tokens=10, parallel=layout, overflow=overflow)
    with pytest.raises(DataError, match="example 1 is a rollout of 9 tokens, more than the 8 that"):
        collate([rollout(4, 4), rollout(4, 5)])
    assert collate([rollout(4, 4)])["rewards"].sum() == 1


def test_numbers_of_what_is_dropped_are_not_looked_at() -> None:
    """Of a rollout as of any example, which is checked when it is placed."""
    collate = PackedCollator(0, max_tokens=8, overflow="drop")
    wrong = [np.nan] * 5
    short, too_long = rollout(2, 3), rollout(5, 5, loss_mask=wrong, rewards=wrong)
    assert len(collate([short, too_long])["input_ids"]) == 1
    examples = [{"input_ids": [5] * n, "loss_mask": [np.nan] * (n - 3) + [1] * 3} for n in (3, 9)]
    assert len(collate(examples)["input_ids"]) == 1
    with pytest.raises(DataError, match="example 1: rewards is nan at response token 0"):
        PackedCollator(0, max_tokens=10)([short, rollout(5, 5, rewards=wrong)])


def test_a_pad_id_outside_the_vocabulary_is_never_looked_up() -> None:
    batch = RolloutCollator(999)([rollout(1, 3), rollout(1, 1)])
    logits = torch.zeros(*batch["input_ids"].shape, 7)
    loss = token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
    assert loss.item() == pytest.approx(np.log(7))


def test_routes_of_segments_that_share_cells_are_refused() -> None:
    one = rollout(1, 2, rollout_expert_indices=np.ones((3, 1, 1), int))
    keys = ("prompt_ids", "response_ids", "loss_mask", "rewards", "rollout_expert_indices")
    examples = [{**one, **{key: [one[key]] * n for key in keys}} for n in (1, 2)]
    routes = PackedCollator(0, max_tokens=9)(examples)["rollout_expert_indices"]
    assert routes.flatten().tolist() == [1] * 9
    with pytest.raises(DataError, match=r"^example 1 has rollout_expert_indices in 2 seg"):
        PackedCollator(0, max_tokens=9, share_prefixes=True)(examples)
    alone = PackedCollator(0, max_tokens=9, share_prefixes=True)(examples[:1])
    assert alone["rollout_expert_indices"].flatten().tolist() == [1] * 3


def test_a_log_prob_may_be_nan_where_the_engine_did_not_score_the_token() -> None:
    given = rollout(1, 3, logprobs=[-1.0, np.nan, -0.5])
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        found = collate([given])["rollout_logprobs"]
        assert found.isnan().tolist() == [[False, True, False]]
        with pytest.raises(DataError, match="example 0: logprobs is -inf at response token 2; it"):
            collate([rollout(1, 3, logprobs=[-1.0, np.nan, -np.inf])])
        with pytest.raises(DataError, match=r"logprobs is 0\.5 at response token 0; a log-prob"):
            collate([rollout(1, 3, logprobs=[0.5, np.nan, -1.0])])
