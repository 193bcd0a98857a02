"""Steps that continue each other, as one example."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from torch_collate_kit.collators import RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import merge_steps


@st.composite
def rollouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Trajectories of steps, of which some rewrite their prompt; lists, and a reward a token."""
    examples: list[dict[str, Any]] = []
    extras = draw(st.sets(st.sampled_from(["logprobs", "routes", "images"])))
    token = st.integers(0, 3)
    for uid in draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=3)):
        history: list[int] = []
        images: list[list[float]] = []
        for step in range(count := draw(st.integers(1, 4))):
            if draw(st.integers(0, 4)) == 0:
                history, images = history[1:], images[1:]  # rewritten
            prompt = history + draw(st.lists(token, min_size=not history, max_size=3))
            response = draw(st.lists(token, min_size=1, max_size=3))
            history = prompt + response
            n = len(response)
            example = {
                "uid": uid,
                "is_last_step": step == count - 1 and draw(st.integers(0, 9)) > 0,
                "prompt_ids": prompt,
                "response_ids": response,
                "loss_mask": draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
                "rewards": [0.0] * (n - 1) + [float(draw(token))],
                "tag": f"step {step}",
            }
            if "logprobs" in extras:
                example["logprobs"] = [-0.5 - step] * n
            if "routes" in extras:
                covered = draw(st.integers(0, len(history)))
                holes = draw(st.sets(st.integers(0, 9), max_size=2))
                example["rollout_expert_indices"] = [
                    [[-1, -1]] * 2 if t in holes else [[100 * step + t, 7], [t, 8]]
                    for t in range(covered)
                ]
            if "images" in extras:
                images = images + [[float(draw(token))] * 2] * draw(st.integers(0, 1))
                example["pixel_values"] = list(images) or None
                example["image_grid_thw"] = [[1, 1, 1]] * len(images) or None
            examples.append(example)
    return examples


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def as_arrays(example: dict[str, Any], kind: str) -> dict[str, Any]:
    shapes = {
        "rollout_expert_indices": (-1, 2, 2),
        "pixel_values": (-1, 2),
        "image_grid_thw": (-1, 3),
    }
    result = dict(example)
    for key, value in example.items():
        if isinstance(value, list):
            array = np.array(value)
            if key == "rollout_expert_indices":
                array = array.astype(np.int16)
            array = array.reshape(shapes.get(key, (-1,)))
            result[key] = array if kind == "ndarray" else torch.from_numpy(array)
    if kind == "scalar":
        result |= {k: example[k] for k in example if k != "rollout_expert_indices"}
        result["rewards"] = example["rewards"][-1]
    return result


@pytest.mark.parametrize("kind", ["ndarray", "tensor", "scalar"])
@given(examples=rollouts())
def test_against_the_oracle(examples: list[dict[str, Any]], kind: str) -> None:
    given_examples = [as_arrays(example, kind) for example in examples]
    before = copy.deepcopy(given_examples)
    found = merge_steps(given_examples)
    for kept, now in zip(before, given_examples, strict=True):
        assert {k: plain(v) for k, v in kept.items()} == {k: plain(v) for k, v in now.items()}
    expected = oracle.merged(examples)
    assert len(found) == len(expected)
    for merged, wanted in zip(found, expected, strict=True):
        values = {key: plain(value) for key, value in merged.items()}
        if not isinstance(values["rewards"], list):
            values["rewards"] = [0.0] * (len(wanted["rewards"]) - 1) + [values["rewards"]]
        assert values == wanted
        if "rollout_expert_indices" in merged:
            routes = merged["rollout_expert_indices"]
            assert routes.dtype in (np.uint8, np.int16, torch.int16)
            assert len(routes) <= len(values["prompt_ids"]) + len(values["response_ids"])


def step(prompt: list[int], response: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "uid": "a",
        "is_last_step": False,
        "prompt_ids": prompt,
        "response_ids": response,
        "loss_mask": [1] * len(response),
        "rewards": 0,
        **changes,
    }


def test_the_route_of_a_last_token_is_that_of_the_next_step() -> None:
    """An engine fills the row of the token that it sampled last; only the next step reads it."""
    rows = {"dummy": [[0, 1]], "hole": [[-1, -1]], "none": None}
    for first in rows.values():
        given = [[[10, 11]], [[20, 21]], *([] if first is None else [first])]
        steps = [step([1, 2], [3], rollout_expert_indices=given)]
        following = [[[30 + t, 40 + t]] for t in range(4)]
        steps += [step([1, 2, 3, 4], [5], rollout_expert_indices=[*following, [[8, 9]]])]
        [merged] = merge_steps(steps)
        routes = merged["rollout_expert_indices"]
        assert routes.tolist() == [*given[:2], [[32, 42]], [[33, 43]], [[8, 9]]]
        assert routes.dtype == (np.int16 if first == rows["hole"] else np.uint8)
        steps[1]["rollout_expert_indices"] = np.zeros((0, 1, 2), dtype=int)  # none has it
        [merged] = merge_steps(steps)
        assert RolloutCollator(0)([merged])["router_padding_mask"].tolist() == [[0, 0, 1, 1, 1]]


def test_a_prompt_that_ends_within_the_step_before_is_not_merged() -> None:
    steps = [step([1, 2], [3, 4]), step([1, 2, 3], [5])]
    assert [e["prompt_ids"] for e in merge_steps(steps)] == [[1, 2], [1, 2, 3]]


def test_what_is_not_merged_is_shared() -> None:
    examples = [step([1], [2], is_last_step=True), step([1, 2, 3], [4], is_last_step=True)]
    found = merge_steps(examples)
    assert found == examples
    for new, old in zip(found, examples, strict=True):
        assert new is not old
        assert all(new[key] is old[key] for key in old)
    assert merge_steps([]) == []


IMAGE = {"pixel_values": np.ones((4, 2)), "image_grid_thw": np.array([[1, 2, 2]])}
TWO = {"pixel_values": np.ones((8, 2)), "image_grid_thw": np.array([[1, 2, 2]] * 2)}
NONE = {"pixel_values": None, "image_grid_thw": None}


@pytest.mark.parametrize(
    ("earlier", "later", "count"),
    [
        (NONE, IMAGE, 1),
        (IMAGE, IMAGE, 1),
        (IMAGE, copy.deepcopy(IMAGE), 1),
        (IMAGE, TWO, 1),
        (IMAGE, {k: torch.from_numpy(v) for k, v in TWO.items()}, 1),
        (TWO, IMAGE, 2),
        (IMAGE, NONE, 2),
        (NONE, NONE, 1),
        (IMAGE, {**TWO, "pixel_values": np.zeros((8, 2))}, 2),
        (IMAGE, {**IMAGE, "image_grid_thw": np.array([[1, 4, 1]])}, 2),
    ],
)
def test_images(earlier: dict[str, Any], later: dict[str, Any], count: int) -> None:
    found = merge_steps([step([1], [2], **earlier), step([1, 2, 3], [4], **later)])
    assert len(found) == count
    if count == 1:
        assert all(found[0][key] is value for key, value in later.items())


@pytest.mark.parametrize(
    "changes", [{"prompt_ids": []}, {"is_last_step": 2}, {"uid": {}}, {"logprobs": [0.5]}]
)
def test_errors_are_those_of_the_collator(changes: dict[str, Any]) -> None:
    examples = [step([1], [2]), step([1, 2, 3], [4], **changes)]
    with pytest.raises(DataError) as merging:
        merge_steps(examples)
    with pytest.raises(DataError) as collating:
        RolloutCollator(0)(examples)
    assert str(merging.value) == str(collating.value)


@pytest.mark.parametrize("key", ["uid", "is_last_step"])
@pytest.mark.parametrize("changes", [{}, {"uid": None, "is_last_step": None}])
def test_what_merging_needs(key: str, changes: dict[str, Any]) -> None:
    examples = [step([1], [2]), step([1, 2, 3], [4])]
    for example in examples:
        del example[key]
        example |= {name: value for name, value in changes.items() if name == key}
    message = f"no {key} in example 0; steps are merged by uid and is_last_step, give both"
    with pytest.raises(DataError, match=message):
        merge_steps(examples)


@pytest.mark.parametrize("examples", [step([1], [2]), (e for e in [])])
def test_type_errors(examples: Any) -> None:
    with pytest.raises(TypeError, match=r"list of mappings, one per step, got (dict|generator)"):
        merge_steps(examples)


def test_the_weight_of_each_step_is_in_the_merged_mask() -> None:
    steps: list[dict[str, Any]] = [
        {"uid": "a", "is_last_step": False, "prompt_ids": [1], "response_ids": [3, 4]},
        {"uid": "a", "is_last_step": True, "prompt_ids": [1, 3, 4], "response_ids": [6]},
        {"uid": "b", "is_last_step": True, "prompt_ids": [1], "response_ids": [7]},
    ]
    for step, weight in zip(steps, (0.5, 2, 3), strict=True):
        n = len(step["response_ids"])
        step |= {"loss_mask": [1] * n, "rewards": [0.0] * n, "weight": weight}
    batch = RolloutCollator(0)(merge_steps(steps))
    assert batch["loss_mask"].tolist() == [[0.5, 0.5, 2.0], [0.0, 0.0, 3.0]]
    assert batch.metadata["num_loss_tokens"] == 4
