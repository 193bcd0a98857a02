"""Planted defects of rollouts: rewards, log-probs, masks and ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reporting.clean_data import Example, chat_tokenizer
from tests.reporting.planted import Planted, shifted

__all__ = ["ROLLOUT_DEFECTS", "clean_rollouts"]

ROLLOUT_DEFECTS: dict[str, Callable[[list[Example]], Planted]] = {}
Defect = Callable[[list[Example]], Planted]


def planted(defect: Defect) -> Defect:
    assert defect.__name__ not in ROLLOUT_DEFECTS, defect.__name__
    ROLLOUT_DEFECTS[defect.__name__] = defect
    return defect


def clean_rollouts(groups: int = 8, size: int = 4, *, tools: bool = True) -> list[Example]:
    """Groups of answers to one prompt, with a tool's answer in the middle (0.0 as log-probs).

    >>> rollout = clean_rollouts(1, 1)[0]
    >>> tokenizer = chat_tokenizer()
    >>> tokenizer.decode(rollout["response_ids"])
    'call 0<|im_end|>got 0\\nIt is 0<|im_end|>'
    >>> rollout["loss_mask"], rollout["logprobs"][6:14]
    ([1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], \
[-1.21, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2.9])
    """
    tokenizer, rng = chat_tokenizer(), np.random.default_rng(0)
    rollouts = []
    for i in range(groups * size):
        group, trial = divmod(i, size)
        question = f"<|im_start|>user\nNumber {group}?<|im_end|>\n<|im_start|>assistant\n"
        parts = [(f"call {i}<|im_end|>", 1), (f"got {group}\n", 0), (f"It is {i}<|im_end|>", 1)]
        ids, mask = [], []
        for text, weight in parts if tools else parts[2:]:
            found = tokenizer.encode(text, add_special_tokens=False)
            ids, mask = ids + found, mask + [weight] * len(found)
        drawn = np.round(rng.uniform(-3, -0.05, len(ids)), 2)
        rollouts.append(
            {
                "prompt_ids": tokenizer.encode(question, add_special_tokens=False),
                "response_ids": ids,
                "loss_mask": mask,
                "logprobs": [float(p) if m else 0.0 for p, m in zip(drawn, mask, strict=True)],
                "rewards": float(trial == group % size),
                "uid": f"task {group}",
            }
        )
    return rollouts


def _edited(
    name: str, rollouts: list[Example], rows: set[int], edit: Callable[[Example], Example]
) -> Planted:
    examples = [edit(r) if i in rows else r for i, r in enumerate(rollouts)]
    return Planted(name, examples, chat_tokenizer(), [rows])


def _every(rollouts: list[Example], step: int = 1) -> set[int]:
    return set(range(0, len(rollouts), step))


@planted
def all_rewards_zero(rollouts: list[Example]) -> Planted:
    """The checker finds no answer, say because of another format."""
    return _edited(
        "reward_without_variance", rollouts, _every(rollouts), lambda r: r | {"rewards": 0.0}
    )


@planted
def rewards_of_the_prompt(rollouts: list[Example]) -> Planted:
    """Each group has one reward, and groups differ."""
    return _edited(
        "reward_without_variance",
        rollouts,
        _every(rollouts),
        lambda r: r | {"rewards": float(r["uid"][-1]) / 8},
    )


@planted
def rewards_per_token_all_equal(rollouts: list[Example]) -> Planted:
    return _edited(
        "reward_without_variance",
        rollouts,
        _every(rollouts),
        lambda r: r | {"rewards": [0.0] * (len(r["response_ids"]) - 1) + [1.0]},
    )


def _moved(rollouts: list[Example], by: int, step: int = 1) -> Planted:
    return _edited(
        "logprobs_shifted",
        rollouts,
        _every(rollouts, step),
        lambda r: r | {"logprobs": shifted(r["logprobs"], by, 0.0)},
    )


@planted
def logprobs_shifted_left(rollouts: list[Example]) -> Planted:
    return _moved(rollouts, -1)


@planted
def logprobs_shifted_right(rollouts: list[Example]) -> Planted:
    return _moved(rollouts, 1)


@planted
def logprobs_shifted_left_in_some_rollouts(rollouts: list[Example]) -> Planted:
    return _moved(rollouts, -1, 3)


@planted
def logprobs_shifted_right_in_some_rollouts(rollouts: list[Example]) -> Planted:
    return _moved(rollouts, 1, 3)


@planted
def logprobs_rolled(rollouts: list[Example]) -> Planted:
    """``torch.roll`` in place of a shift: the first value comes to the end."""
    return _edited(
        "logprobs_shifted",
        rollouts,
        _every(rollouts),
        lambda r: r | {"logprobs": r["logprobs"][1:] + r["logprobs"][:1]},
    )


@planted
def response_masks_zero(rollouts: list[Example]) -> Planted:
    planted = _edited(
        "no_trained_token",
        rollouts,
        _every(rollouts, 5),
        lambda r: r | {"loss_mask": [0] * len(r["loss_mask"])},
    )
    planted.also.update({"masks_all_zero", "eos_never_trained"})
    for i in _every(rollouts, 5):  # a rollout that is not trained needs no log-probs
        planted.examples[i]["logprobs"] = [0.0] * len(planted.examples[i]["loss_mask"])
    return planted


@planted
def response_ids_beyond_the_vocabulary(rollouts: list[Example]) -> Planted:
    return _edited(
        "id_out_of_vocabulary",
        rollouts,
        _every(rollouts, 5),
        lambda r: r | {"response_ids": [5000, *r["response_ids"][1:]]},
    )


@planted
def double_bos_of_prompts(rollouts: list[Example]) -> Planted:
    rows = _every(rollouts)
    return _edited(
        "double_bos", rollouts, rows, lambda r: r | {"prompt_ids": [1, 1, *r["prompt_ids"]]}
    )


def _values(name: str, rollouts: list[Example], **changes: Callable[[Example], Any]) -> Planted:
    """Every fifth rollout with other values, which are made of it."""
    return _edited(
        name,
        rollouts,
        _every(rollouts, 5),
        lambda r: r | {key: made(r) for key, made in changes.items()},
    )


@planted
def logprobs_all_zero(rollouts: list[Example]) -> Planted:
    """Placeholders that were never filled in."""
    return _values("logprobs_constant", rollouts, logprobs=lambda r: [0.0] * len(r["logprobs"]))


@planted
def logprobs_of_one_value(rollouts: list[Example]) -> Planted:
    return _values("logprobs_constant", rollouts, logprobs=lambda r: [-1.0] * len(r["logprobs"]))


@planted
def probabilities_in_place_of_logprobs(rollouts: list[Example]) -> Planted:
    return _values("logprobs_positive", rollouts, logprobs=lambda r: np.exp(r["logprobs"]).tolist())


@planted
def logprobs_rolled_in_some_rollouts(rollouts: list[Example]) -> Planted:
    return _values(
        "logprobs_shifted", rollouts, logprobs=lambda r: r["logprobs"][1:] + r["logprobs"][:1]
    )


@planted
def tokens_of_a_tool_trained(rollouts: list[Example]) -> Planted:
    planted = _values(
        "mask_disagrees_with_logprobs", rollouts, loss_mask=lambda r: [1] * len(r["loss_mask"])
    )
    planted.also.add("text_after_end_trained")
    return planted


@planted
def first_tokens_of_responses_masked(rollouts: list[Example]) -> Planted:
    return _values(
        "mask_disagrees_with_logprobs", rollouts, loss_mask=lambda r: [0, 0, *r["loss_mask"][2:]]
    )


@planted
def uids_of_their_own(rollouts: list[Example]) -> Planted:
    return _values("uid_without_group", rollouts, uid=lambda r: f"run {r['response_ids']}")


@planted
def uid_unique_in_every_row(rollouts: list[Example]) -> Planted:
    rows = _every(rollouts)
    return _edited(
        "uid_without_group", rollouts, rows, lambda r: r | {"uid": f"run {r['response_ids']}"}
    )


@planted
def uids_of_another_prompt(rollouts: list[Example]) -> Planted:
    other = {f"task {i}": f"task {(i + 1) % 8}" for i in range(8)}
    return _values("uid_of_several_prompts", rollouts, uid=lambda r: other[r["uid"]])
