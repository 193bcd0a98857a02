"""RolloutCollator, and PackedCollator on rollouts: the edges, written out."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from tests.batch_checks import (
    assert_contract_dtypes,
    assert_equals_oracle,
    assert_round_trips,
    assert_same_batch,
)
from tests.oracle import packed_rollouts, rollout_batch
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.losses import token_loss
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.rl import stage_mini_batches
from torch_collate_kit.vision import VisionLayout


def rollout(prompt: int, response: int, **more: Any) -> dict[str, Any]:
    """Tokens 1, 2, ...; every response token is trained."""
    ids = list(range(1, prompt + response + 1))
    parts = {"prompt_ids": ids[:prompt], "response_ids": ids[prompt:]}
    return {**parts, "rewards": 1.0, "loss_mask": [1] * response, **more}


def routes(tokens: int, layers: int = 2, top_k: int = 2) -> list[Any]:
    return np.arange(tokens * layers * top_k).reshape(tokens, layers, top_k).tolist()


def image(patches: int, first: float = 0.0) -> dict[str, Any]:
    pixels = first + np.arange(2.0 * patches).reshape(patches, 2)
    return {"pixel_values": pixels.tolist(), "image_grid_thw": [[1, 1, patches]]}


NO_IMAGE = {"pixel_values": None, "image_grid_thw": None}
RICH = [
    rollout(2, 3, rollout_expert_indices=routes(5), uid="a", is_last_step=True, **image(2)),
    rollout(4, 2, rollout_expert_indices=routes(3), uid="a", is_last_step=False, **NO_IMAGE),
    rollout(1, 1, rollout_expert_indices=routes(1), uid="b", is_last_step=True, **image(3, 50.0)),
]
TEXT = [{k: v for k, v in r.items() if k not in NO_IMAGE} for r in RICH]


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


def test_what_belongs_to_a_rollout_is_of_plain_python() -> None:
    """Whatever it comes as, so that it can be compared, counted and sent."""
    examples = [
        rollout(1, 1, uid=np.int64(3), is_last_step=1),
        rollout(1, 1, uid=torch.tensor(4), is_last_step=np.bool_(False)),
        rollout(1, 1, uid="5", is_last_step=torch.tensor(True)),
    ]
    row_metadata = RolloutCollator(0)(examples).row_metadata
    assert [(type(uid), uid) for uid in row_metadata["uids"]] == [(int, 3), (int, 4), (str, "5")]
    assert [type(flag) for flag in row_metadata["is_last_step"]] == [bool] * 3
    assert row_metadata["is_last_step"] == [True, False, True]


def test_routes_by_hand() -> None:
    """Tokens behind the routes, and pads, hold distinct experts and are marked."""
    batch = collated(
        [
            rollout(1, 2, rollout_expert_indices=[[[5, 9, 7]], [[1, 2, 3]]]),
            rollout(1, 1, rollout_expert_indices=[[[8, 4, 6]]]),
        ]
    )
    own = [0, 1, 2]
    assert batch["rollout_expert_indices"].tolist() == [
        [[[5, 9, 7]], [[1, 2, 3]], [own]],
        [[own], [[8, 4, 6]], [own]],
    ]
    assert batch["router_padding_mask"].tolist() == [[False, False, True], [True, False, True]]


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


def test_the_width_is_that_of_the_longest_rollout() -> None:
    """Not of the longest prompt and the longest response: 59k cells, not 105k."""
    batch = RolloutCollator(0)([rollout(5_000, 50_000), rollout(55_000, 4_000)])
    assert batch["input_ids"].shape == (2, 59_000)
    assert batch["rewards"].shape == (2, 50_000)
    assert batch["attention_mask"].sum(dim=1).tolist() == [55_000, 59_000]
    assert batch["response_mask"].sum(dim=1).tolist() == [50_000, 4_000]
    assert batch["rewards"].sum(dim=1).tolist() == [1, 1]


def test_one_token_each() -> None:
    batch = collated([rollout(1, 1, rewards=2.0)])
    assert batch["input_ids"].tolist() == [[1, 2]]
    assert batch["rewards"].tolist() == [[2]]
    packed = PackedCollator(0, max_tokens=4)([rollout(1, 1), rollout(1, 1)])
    assert packed["response_mask"].tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_trained_divides_by_one(normalize: bool) -> None:
    examples = [rollout(2, 2, loss_mask=[0, 0]), rollout(1, 1, loss_mask=[0.0])]
    batch = collated(examples, normalize_loss=normalize)
    assert batch.metadata["num_loss_tokens"] == 0
    assert batch.metadata["loss_mask_divisor"] == 1
    assert batch["response_mask"].sum() == 3  # still responses
    assert not batch["loss_mask"].any()


def test_normalising_divides_the_loss_mask_alone() -> None:
    examples = [
        rollout(2, 3, logprobs=[-1.0] * 3, advantages=2.0),
        rollout(1, 1, logprobs=[-1.0], advantages=1.0),
    ]
    batch = collated(examples, normalize_loss=True)
    assert batch["loss_mask"].sum() == 1
    assert batch["rewards"].sum() == 2
    assert batch["rollout_logprobs"].sum() == -4
    assert batch["advantages"].sum() == 7


def test_a_rollout_over_max_length_raises_or_is_dropped() -> None:
    examples = [rollout(2, 2, uid="a"), rollout(3, 4, uid="b"), rollout(2, 6, uid="c")]
    with pytest.raises(DataError, match=r'example 1 has 7 tokens.*overflow="drop"$'):
        RolloutCollator(0, max_length=6)(examples)
    batch = collated(examples, max_length=7, overflow="drop")
    assert batch.row_metadata["uids"] == ["a", "b"]
    assert batch.metadata["dropped"] == (2,)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_max_length_must_be_a_positive_integer(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"max_length .*None switches it off"):
        RolloutCollator(0, max_length=bad)


def test_the_width_is_rounded_up() -> None:
    batch = RolloutCollator(0, pad_to_multiple_of=4)([rollout(2, 3), rollout(1, 1)])
    assert batch["input_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0, 1, 2]]
    assert batch.metadata["response_length"] == 3
    for same in (1, 5, None):
        assert (
            RolloutCollator(0, pad_to_multiple_of=same)([rollout(2, 3)])["input_ids"].shape[1] == 5
        )


@pytest.mark.parametrize("bad", [0, -4, 2.0, True])
def test_pad_to_multiple_of_must_be_a_positive_integer(bad: Any) -> None:
    message = r"pad_to_multiple_of must be (at least 1|an int), got .*; None switches it off"
    with pytest.raises((ValueError, TypeError), match=message):
        RolloutCollator(0, pad_to_multiple_of=bad)


def test_a_bf16_reward_is_a_number() -> None:
    rewards = [torch.tensor(0.1, dtype=d) for d in (torch.bfloat16, torch.float8_e4m3fn)]
    batch = RolloutCollator(0)([rollout(1, 2, rewards=reward) for reward in rewards])
    assert batch["rewards"][:, 1].tolist() == [reward.float().item() for reward in rewards]


def test_pandas_columns_go_by_their_place() -> None:
    """A filtered Series is labelled with the rows it came from."""
    columns = {
        "prompt_ids": pd.Series([np.array([1]), np.array([2])], index=[4, 7]),
        "response_ids": [[3, 4], [5, 6]],
        "loss_mask": [[1, 1], [1, 1]],
        "rewards": pd.Series([[0.5, 1.0], 2.0], index=[1, 0]),
    }
    assert RolloutCollator(0)(columns)["rewards"].tolist() == [[0.5, 1.0], [0.0, 2.0]]


@pytest.mark.parametrize("name", ["problem", "dialog_prompt", "probability", "masks"])
def test_other_keys_are_left_alone(name: str) -> None:
    batch = RolloutCollator(0)([rollout(1, 1, **{name: "1 + 1"})])
    assert set(batch.metadata) & {name, "uids"} == set()


OPTIONAL = {
    "logprobs": [-1.0],
    "advantages": 1.0,
    "uid": "a",
    "trajectory_id": "t",
    "is_last_step": True,
    "rollout_expert_indices": routes(2),
}


@pytest.mark.parametrize("name", [*OPTIONAL, "pixel_values", "image_grid_thw"])
@pytest.mark.parametrize("as_columns", [False, True])
@pytest.mark.parametrize("collate", [RolloutCollator(0), PackedCollator(0, max_tokens=8)])
def test_an_optional_key_that_is_none_everywhere_is_not_there(
    collate: Any, as_columns: bool, name: str
) -> None:
    """A table has the column for all of its rows, also of a policy that gave no log-probs."""
    examples = [rollout(1, 1), rollout(2, 1)]
    with_none: Any = [{**example, name: None} for example in examples]
    if as_columns:
        with_none = {key: [example[key] for example in with_none] for key in with_none[0]}
        for column in ([None, None], pd.Series([None, None]), np.array([None, None])):
            assert_same_batch(collate({**with_none, name: column}), collate(examples))
    assert_same_batch(collate(with_none), collate(examples))


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("missing", [0, 1])
def test_an_optional_key_that_is_none_somewhere_is_refused(name: str, missing: int) -> None:
    examples = [rollout(1, 1, **{name: OPTIONAL[name]}) for _ in range(2)]
    examples[missing][name] = None
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        with pytest.raises(DataError, match=f"^example {missing}: {name} is None; "):
            collate(examples)


def test_a_key_that_is_none_does_not_hide_a_near_miss() -> None:
    with pytest.raises(DataError, match="has no logprobs, but 'log_probs' looks like it"):
        RolloutCollator(0)([rollout(1, 1, logprobs=None, log_probs=[-1.0])])
    with pytest.raises(DataError, match="example 0: rewards is None; give one number"):
        RolloutCollator(0)([rollout(1, 1, rewards=None)] * 2)


def test_an_sft_example_may_have_a_prompt_beside_its_ids() -> None:
    example = {"input_ids": [1, 2, 3], "prompt_ids": [1], "response_ids": [2, 3]}
    example["labels"] = [-100, 2, 3]
    batch = PackedCollator(0, max_tokens=4)([example])
    assert "labels" in batch
    assert "rewards" not in batch
    both = PackedCollator(0, max_tokens=4)([{**rollout(1, 2), "input_ids": [1, 2, 3]}])
    assert "rewards" in both


def test_a_batch_without_any_image_has_no_image_fields() -> None:
    assert "pixel_values" not in RolloutCollator(0)([rollout(1, 1, **NO_IMAGE)])


def test_a_slice_with_images_moves_with_its_own_images() -> None:
    batch = collated(RICH)
    assert batch["pixel_values"].lengths.tolist() == [2, 0, 3]
    tail = batch[1:]
    moved = pickle.loads(pickle.dumps(tail))
    assert_same_batch(moved, tail)
    assert moved["pixel_values"].values.shape == (3, 2)
    assert moved["image_grid_thw"].tolist() == [[], [[1, 1, 3]]]
    assert_same_batch(tail.to("cpu"), tail)
    assert tail.to("meta")["pixel_values"].values.shape == (3, 2)
    chosen = batch.select([2, 0])
    assert chosen["pixel_values"][0].tolist() == RICH[2]["pixel_values"]
    assert (
        chosen["rollout_expert_indices"][1].tolist() == batch["rollout_expert_indices"][0].tolist()
    )
    assert batch.pad_rows(multiple_of=2)["pixel_values"].lengths.tolist() == [2, 0, 3, 2]


def test_model_inputs_of_rollouts() -> None:
    text = RolloutCollator(0)(TEXT)
    assert list(text.model_inputs()) == ["input_ids", "position_ids", "use_cache", "attention_mask"]
    assert list(text.model_inputs(labels=False)) == list(text.model_inputs())
    with pytest.raises(ValueError, match="its model is not known, so neither are its positions"):
        RolloutCollator(0)(RICH).model_inputs()


def test_model_inputs_of_rollouts_with_images() -> None:
    layout = VisionLayout("qwen2_vl", image_token_id=7, patch_shape=(1, 1, 2))
    examples = [{**r, "prompt_ids": [*[7] * len(r["pixel_values"] or ()), 3]} for r in RICH]
    del examples[0]["rollout_expert_indices"], examples[1]["rollout_expert_indices"]
    del examples[2]["rollout_expert_indices"]
    batch = RolloutCollator(0, vision=layout)(examples)
    for part, patches, images in ((batch, 5, 2), (batch[1:], 3, 1), (batch[1:2], 0, 0)):
        inputs = part.model_inputs()
        of_images = ["pixel_values", "image_grid_thw"] if images else []
        assert list(inputs) == [
            "input_ids",
            "position_ids",
            *of_images,
            "use_cache",
            "attention_mask",
        ]
        assert inputs["position_ids"].shape == (4, *inputs["input_ids"].shape)
        if images:
            assert inputs["pixel_values"].shape == (patches, 2)
            assert inputs["image_grid_thw"].shape == (images, 3)
    assert batch[1:].model_inputs()["pixel_values"].tolist() == RICH[2]["pixel_values"]


@pytest.mark.parametrize(
    "workers",
    [{"num_workers": 0}, {"num_workers": 2, "multiprocessing_context": "fork"}],
    ids=["0", "fork"],
)
@pytest.mark.parametrize("kind", ["block", "packed"])
def test_workers_give_the_batches_of_the_main_process(kind: str, workers: dict[str, Any]) -> None:
    examples = (RICH if kind == "block" else TEXT) * 4
    collate: Any = RolloutCollator(0)
    if kind == "packed":
        collate = PackedCollator(0, max_tokens=16, parallel=ParallelLayout(dp=2, tp=2))
    expected = [collate(examples[i : i + 5]) for i in range(0, 12, 5)]
    batches = list(DataLoader(examples, batch_size=5, collate_fn=collate, **workers))
    assert len(batches) == len(expected)
    for batch, wanted in zip(batches, expected, strict=True):
        assert_same_batch(batch, wanted)
        if workers["num_workers"]:
            assert batch.column("input_ids").is_shared()


def test_the_collator_can_be_pickled() -> None:
    collate = pickle.loads(pickle.dumps(RolloutCollator(3, max_length=99, normalize_loss=True)))
    assert_same_batch(collate(RICH), RolloutCollator(3, normalize_loss=True)(RICH))
    with pytest.raises(DataError, match="max_length=99"):
        collate([{**TEXT[0], **rollout(50, 50)}])


def test_packed_rows_by_hand() -> None:
    """Column j of every response field is cell j + 1; gaps and the tail hold nothing."""
    examples = [
        rollout(2, 3, rewards=[1, 2, 3], logprobs=[-1, -2, -3], advantages=4.0),
        rollout(1, 1, rewards=5.0, logprobs=[-5], advantages=[6]),
    ]
    collate = PackedCollator(
        0, max_tokens=12, parallel=ParallelLayout(tp=4), fixed_width=True, normalize_loss=False
    )
    batch = collate(examples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 0, 0]]
    assert batch["response_mask"].tolist() == [[0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0]]
    assert batch["rewards"].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0, 5, 0, 0]]
    assert batch["rollout_logprobs"].tolist() == [[0, -1, -2, -3, 0, 0, 0, 0, -5, 0, 0]]
    assert batch["advantages"].tolist() == [[0, 4, 4, 4, 0, 0, 0, 0, 6, 0, 0]]
    assert torch.equal(batch["loss_mask"], batch["response_mask"].float())


@pytest.mark.parametrize("overflow", ["raise", "truncate", "split"])
def test_a_rollout_is_never_cut(overflow: str) -> None:
    """Not even where only the alignment makes it too long: 8 of 10 cells can be filled."""
    layout = ParallelLayout(tp=4)
    collate = PackedCollator(0, max_tokens=10, parallel=layout, overflow=overflow)
    with pytest.raises(DataError, match="example 1 is a rollout of 9 tokens, more than the 8 that"):
        collate([rollout(4, 4), rollout(4, 5)])
    assert collate([rollout(4, 4)])["rewards"].sum() == 1


def test_too_long_rollouts_are_dropped_whole() -> None:
    examples = [rollout(2, 3), rollout(5, 5, rewards=9.0), rollout(1, 2, rewards=2.0)]
    collate = PackedCollator(0, max_tokens=8, overflow="drop", strategy="sequential")
    batch = collate(examples)
    expected = packed_rollouts(examples, collate.plan([5, 10, 3]), pad_token_id=0, max_tokens=8)
    assert_equals_oracle(batch, expected)
    assert batch.metadata["dropped"] == (1,)
    assert batch["rewards"].sum() == 3


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


def test_packed_rollouts_keep_their_uids_with_their_rows() -> None:
    examples = [rollout(1, n, uid=f"prompt {n}", is_last_step=bool(n % 2)) for n in (3, 7, 1, 5, 2)]
    batch = PackedCollator(0, max_tokens=9)(examples)
    assert len(batch) > 1
    indices = batch.row_metadata["example_indices"].tolist()
    for key, name in (("uid", "uids"), ("is_last_step", "is_last_step")):
        in_rows = [tuple(examples[i][key] for i in row) for row in indices]
        assert batch.row_metadata[name] == in_rows
    head, tail = batch[:1], batch[1:]
    assert tail.row_metadata["uids"] == batch.row_metadata["uids"][1:]
    assert_same_batch(Batch.cat([head, tail]), batch)


def test_a_pad_id_outside_the_vocabulary_is_never_looked_up() -> None:
    batch = RolloutCollator(999)([rollout(1, 3), rollout(1, 1)])
    logits = torch.zeros(*batch["input_ids"].shape, 7)
    loss = token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
    assert loss.item() == pytest.approx(np.log(7))
