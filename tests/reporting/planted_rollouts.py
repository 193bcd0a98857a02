"""Planted defects of rollouts: rewards, log-probs, masks and ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reporting.clean_data import Example, chat_tokenizer
from tests.reporting.planted import Planted, shifted

__all__ = ["ROLLOUT_DEFECTS", "clean_rollouts"]


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


def _planted(
    name: str, step: int, also: str = "", **changes: Callable[[Example], Any]
) -> Callable[[list[Example]], Planted]:
    """Every rollout of so many gets other values, which are made of it."""

    def made(rollouts: list[Example]) -> Planted:
        rows = set(range(0, len(rollouts), step))
        examples = [
            r | {key: of(r) for key, of in changes.items()} if i in rows else r
            for i, r in enumerate(rollouts)
        ]
        return Planted(name, examples, chat_tokenizer(), [rows], also=set(also.split()))

    return made


def _moved(by: int) -> Callable[[Example], Any]:
    return lambda r: shifted(r["logprobs"], by, 0.0)


def _all(value: float) -> Callable[[Example], Any]:
    return lambda r: [value] * len(r["response_ids"])


def _rolled(r: Example) -> Any:
    return r["logprobs"][1:] + r["logprobs"][:1]


def _own(r: Example) -> str:
    return f"run {r['response_ids']}"


_FLAT, _SHIFTED = "reward_without_variance", "logprobs_shifted"
_DISAGREE = "mask_disagrees_with_logprobs"
ROLLOUT_DEFECTS: dict[str, Callable[[list[Example]], Planted]] = {
    "all rewards zero": _planted(_FLAT, 1, rewards=lambda r: 0.0),
    "rewards per token": _planted(_FLAT, 1, rewards=lambda r: [*_all(0.0)(r)[1:], 1.0]),
    "logprobs shifted left": _planted(_SHIFTED, 1, logprobs=_moved(-1)),
    "logprobs shifted right": _planted(_SHIFTED, 1, logprobs=_moved(1)),
    "logprobs shifted right in a third": _planted(_SHIFTED, 3, logprobs=_moved(1)),
    "logprobs rolled in a fifth": _planted(_SHIFTED, 5, logprobs=_rolled),
    "response masks zero": _planted(
        *("no_trained_token", 5, "masks_all_zero eos_never_trained"),
        loss_mask=_all(0), logprobs=_all(0.0),  # what is not trained needs no log-probs
    ),
    "ids beyond the vocabulary": _planted(
        "id_out_of_vocabulary", 5, response_ids=lambda r: [5000, *r["response_ids"][1:]]
    ),
    "two BOS": _planted("double_bos", 1, prompt_ids=lambda r: [1, 1, *r["prompt_ids"]]),
    "logprobs of one value": _planted("logprobs_constant", 5, logprobs=_all(-1.0)),
    "probabilities": _planted(
        "logprobs_positive", 5, logprobs=lambda r: np.exp(r["logprobs"]).tolist()
    ),
    "a tool trained": _planted(_DISAGREE, 5, "text_after_end_trained", loss_mask=_all(1)),
    "first tokens masked": _planted(
        _DISAGREE, 5, loss_mask=lambda r: [0, 0, *r["loss_mask"][2:]]
    ),
    "uids of their own": _planted("uid_without_group", 5, uid=_own),
    "a uid in every row": _planted("uid_without_group", 1, uid=_own),
    "uids of another prompt": _planted(
        "uid_of_several_prompts", 5, uid=lambda r: f"task {(int(r['uid'][-1]) + 1) % 8}"
    ),
}  # fmt: skip
