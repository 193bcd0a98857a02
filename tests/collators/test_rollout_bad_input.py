"""Hostile rollouts: each is refused by name, and never with an error of NumPy or torch."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.collators.bad_inputs import COLUMNS, IMAGE, NO_IMAGE, ROLLOUT, ROUTES
from torch_collate_kit.collators import PackedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import merge_steps

META = torch.ones(3, device="meta")
GOOD = {
    "logprobs": [-1.0] * 3,
    "advantages": 1.0,
    "uid": "a",
    "is_last_step": True,
    "trajectory_id": "t",
    "rollout_expert_indices": ROUTES,
    **IMAGE,
}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": META.long()}, "prompt_ids is a tensor of layout .* on device meta"),
    ({"prompt_ids": torch.tensor([1, 0]).to_sparse()}, "prompt_ids is a tensor of .*sparse_coo"),
    ({"response_ids": "abc"}, "response_ids is str"),
    ({"rewards": np.array("a")}, r"rewards is 'a' \(str\); give one number"),
    ({"rewards": datetime.timedelta(1)}, "rewards is timedelta"),
    ({"rewards": 10**400}, r"rewards is 1000.*\(int\); give one number"),
    ({"rewards": [10**400, 0, 0]}, r"rewards\[0\] is 1000.*\(int\); it must be a number"),
    ({"rewards": -np.inf}, "rewards is -inf at response token 2; .*filter such rollouts out"),
    ({"rewards": META[0]}, r"rewards is tensor\(.*meta.* give one number"),
    ({"rewards": torch.tensor([1j, 1, 1])}, "rewards has dtype complex64; give numbers"),
    ({"loss_mask": np.array(1)}, r"loss_mask is 0-D .* \(loss_mask\[0\]\)"),
    ({"loss_mask": np.array([1, 1, 1], dtype=object)}, "loss_mask has dtype object; give numbers"),
    ({"uid": META[0]}, r"uid is tensor\(.*\(Tensor\); rollouts are grouped by it"),
    ({"uid": ["a"]}, r"uid is \['a'\] \(list\)"),
    ({"is_last_step": 2}, "is_last_step is 2"),
    ({"is_last_step": torch.tensor([True, False])}, "is_last_step is tensor"),
    ({"rollout_expert_indices": []}, r"has shape \(0,\) .* an array \[0, layers, top_k\] where"),
    ({"rollout_expert_indices": ROUTES > 1}, "dtype bool; give integers"),
    ({"rollout_expert_indices": META.view(1, 1, 3).long()}, "is a tensor of layout"),
    ({"rollout_expert_indices": [torch.ones(2, 2, requires_grad=True)]}, "dtype float32; give int"),
    ({"rollout_expert_indices": [[[2**70, 1], [1, 2]]]}, "dtype object; give integers"),
    ({"rollout_expert_indices": ROUTES - 2}, "has the expert -2; experts are 0 to 32767"),
    ({"rollout_expert_indices": np.where(ROUTES > 17, -1, ROUTES)}, "-1 in some .* of token 4; "),
    ({**IMAGE, "pixel_values": [[1.0, 2.0], [3.0]]}, "pixel_values is a list whose parts differ"),
    ({**IMAGE, "pixel_values": META}, "pixel_values is a tensor of layout"),
    ({**IMAGE, "image_grid_thw": [1, 2, 2]}, r"shape \(3,\) .* give integers \[images, 3\]"),
    ({**IMAGE, "image_grid_thw": [[1.0, 2.0, 2.0]]}, "image_grid_thw has .* dtype float64"),
    ({**IMAGE, "image_grid_thw": [[1, 2]]}, r"has shape \(1, 2\)"),
]


@pytest.mark.parametrize("wrong", HOSTILE, ids=[message for _, message in HOSTILE])
@pytest.mark.parametrize("collator", ["block", "packed"])
def test_a_hostile_entry_is_refused_by_name(
    wrong: tuple[dict[str, Any], str], collator: str
) -> None:
    entries, message = wrong
    collate: Any = RolloutCollator(0)
    if collator == "packed":
        collate = PackedCollator(0, max_tokens=64)
    good = {**ROLLOUT, **{key: GOOD[key] for key in entries if key in GOOD}}
    with pytest.raises(DataError, match=rf"^example 1\b.*{message}"):
        collate([good, {**ROLLOUT, **entries}])


@pytest.mark.parametrize(
    "entries",
    [
        {**IMAGE, "pixel_values": np.ones((1, 4, 3))},
        {**IMAGE, "image_grid_thw": [[1, 2]]},
        {**IMAGE, "image_grid_thw": [[1, 2, 2, 1]]},
    ],
)
def test_an_image_behind_a_rollout_without_one_is_refused_by_name(entries: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^example 1: (pixel_values|image_grid_thw)"):
        RolloutCollator(0)([{**ROLLOUT, **NO_IMAGE}, {**ROLLOUT, **entries}])
    other = {**IMAGE, "pixel_values": np.ones((4, 5))}
    with pytest.raises(DataError, match=r"^example 2: .* example 1 has \(4, 3\)"):
        RolloutCollator(0)([{**ROLLOUT, **e} for e in (NO_IMAGE, IMAGE, other)])
    with pytest.raises(DataError, match=r"^example 1 has pixel_values, and the collator does not"):
        PackedCollator(0, max_tokens=8)([{**ROLLOUT, **e} for e in (NO_IMAGE, IMAGE)])


@pytest.mark.parametrize("largest", [255, 256, 257])
@pytest.mark.parametrize("collate", [RolloutCollator(0), PackedCollator(0, max_tokens=8)])
def test_experts_around_the_largest_of_a_byte(collate: Any, largest: int) -> None:
    routes = ROUTES + largest - ROUTES.max()
    batch = collate([{**ROLLOUT, "rollout_expert_indices": routes}])
    assert batch["rollout_expert_indices"].tolist() == [routes.tolist()]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rewards": 1.0}, "column rewards is float, which has no rows"),
        ({"uid": "ab"}, "column uid is str, which has no rows"),
        ({"prompt_ids": None}, "column prompt_ids is NoneType"),
        ({"response_ids": [7, 8]}, r"collate one example as a list: \[example\]"),
        ({"prompt_ids": [5, 6]}, "example 0: prompt_ids is int"),
        ({"rewards": [1.0]}, "column rewards has 1 rows, response_ids has 2"),
        ({"rewards": np.array(["a", "b"])}, "example 0: rewards is str"),
        ({"rewards": np.array([1j, 0])}, "example 0: rewards is complex"),
        ({"rewards": np.array([1.0, None], dtype=object)}, "example 1: rewards is None"),
        ({"rewards": np.ones((2, 1, 1))}, "example 0: rewards is 2-D"),
        ({"rewards": Ragged(META, [0, 1, 2])}, "column rewards is a tensor of layout"),
        ({"rewards": Ragged(np.ones((2, 2)), [0, 1, 2])}, "column rewards has 2-D values"),
        ({"uid": np.ones((2, 2))}, "example 0: uid is array"),
        ({"uid": np.array([1.0, np.nan])}, "example 1: uid is nan"),
        ({"uid": pd.Series(["a", None], dtype="string")}, "example 1: uid is <NA>"),
        ({"rollout_expert_indices": np.ones((2, 2), dtype=int)}, r"shape \(2,\)"),
    ],
)
def test_a_hostile_column_is_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        RolloutCollator(0)({**COLUMNS, **entries})


@pytest.mark.parametrize("key", ["prompt_ids", "response_ids"])
def test_an_id_over_64_bits_does_not_wrap(key: str) -> None:
    """A column of uint64 alone stays one."""
    wide = {**ROLLOUT, key: np.array([5, 2**63, 7], dtype=np.uint64)}
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        with pytest.raises(DataError, match=f"example 0: {key} is -9223372036854775808 at token 1"):
            collate([wide])


@pytest.mark.parametrize("as_array", [list, np.array, np.float16, torch.tensor])
@pytest.mark.parametrize("collate", [RolloutCollator(0), PackedCollator(0, max_tokens=8)])
def test_log_probs_over_0_are_refused_but_for_rounding(collate: Any, as_array: Any) -> None:
    step = {**ROLLOUT, "uid": "a", "is_last_step": True}
    good = {**step, "logprobs": as_array([-0.5, 0.0, 0.0009])}
    assert collate([good])["rollout_logprobs"].max() == pytest.approx(0.0009, rel=1e-3)
    for wrong in (0.0011, 0.5, 1.0):
        bad = {**step, "logprobs": as_array([-0.5, wrong, 0.0])}
        for read in (collate, merge_steps):
            with pytest.raises(
                DataError, match=r"example 1: logprobs is \S+ at response token 1; a"
            ):
                read([good, bad])
