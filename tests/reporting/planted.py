"""Defects of supervision, planted in clean data: the truth that ``audit`` is held to.

Those that an edit of a text can make are in test_planted_texts.py; those that a loop over the
tokens of a row finds are drawn in test_audit.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.reporting.clean_data import CHATML, Clean, Example, as_labels, chat_tokenizer


@dataclass(frozen=True)
class Planted:
    """Damaged data and what must be found in it."""

    name: str
    examples: list[Example]
    tokenizer: Any
    rows: set[int] | None  # the damaged ones; None: rows mean nothing
    also: set[str] = field(default_factory=set)  # may be found, too, in damaged rows only


def shifted(values: list[Any], by: int, fill: Any) -> list[Any]:
    """The values moved by one: +1 to the right, -1 to the left."""
    return [fill, *values[:-1]] if by == 1 else [*values[1:], fill]


# ---- conversations

_ALSO = "generation_prompt_trained eos_never_trained eos_not_trained eos_truncated masks_all_one"


def _edited(
    name: str,
    edit: Callable[[Example], Example],
    first: int = 0,
    step: int = 1,
    template: str = CHATML,
) -> Callable[[Clean], Planted]:
    def made(clean: Clean) -> Planted:
        rows = set(range(first, len(clean.examples), step))
        examples = [edit(e) if i in rows else as_labels(e) for i, e in enumerate(clean.examples)]
        tokenizer = clean.with_template(template).tokenizer
        return Planted(name, examples, tokenizer, rows, set(_ALSO.split()))

    return made


# As Phi-3's: what a text ends with hides which part of it the generation prompt adds
CLOSED = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


def _with_header(e: Example) -> Example:
    """The line break before the answer is trained, and the token before it."""
    mask = list(e["loss_mask"])
    first = mask.index(1)
    mask[first - 2 : first] = [1, 1]
    return as_labels(e | {"loss_mask": mask})


def _labels_shifted(by: int) -> Callable[[Example], Example]:
    return lambda e: as_labels(e) | {"labels": shifted(as_labels(e)["labels"], by, -100)}


def _templated(template: str) -> Callable[[Clean], Planted]:
    """A template that writes the beginning of a conversation differently when it goes on."""
    assert template != CHATML, "the damage was not done"

    def made(clean: Clean) -> Planted:
        tokenizer = clean.with_template(template).tokenizer
        return Planted("template_not_prefix_stable", clean.examples, tokenizer, None)

    return made


_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES: dict[str, Callable[[Clean], Planted]] = {
    "drops earlier thinking, as Qwen3's": _templated(
        CHATML.replace(
            "m.content",
            "(m.content.split('</think>')[-1].lstrip('\n') if not loop.last else m.content)",
        )
    ),
    "writes the system message before the last question, as Mistral's": _templated(
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last = messages[loop.index0:] | selectattr('role', 'eq', 'user') | list "
        "| length == 1 %}"
        "{{ '<|im_start|>user\n' + (system if last else '') + m.content + '<|im_end|>\n' }}"
        "{% elif m.role != 'system' %}" + _TURN + "{% endif %}{% endfor %}" + _PROMPT
    ),
    "counts the messages": _templated("{{ messages | length }} messages\n" + CHATML),
    "keeps the last four messages": _templated(
        "{% for m in messages[-4:] %}" + _TURN + "{% endfor %}" + _PROMPT
    ),
    "opens a thinking block that the answers do not have": _templated(
        CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    ),
}
# As Nemotron's: an answer without thinking has an empty block, and so do all earlier ones
EMPTIES = CHATML.replace(
    "m.content",
    "('<think>' ~ (m.reasoning_content if loop.last else '') ~ '</think>' "
    "if m.role == 'assistant' else '') ~ m.content",
)
DEFECTS: dict[str, Callable[[Clean], Planted]] = {
    **{
        f"labels shifted by {by}, {rows}": _edited("labels_shifted", _labels_shifted(by), *of)
        for by in (-1, 1)
        for rows, of in (("all", ()), ("a twentieth", (7, 20)))
    },
    "next tokens as labels": _edited(  # the x, y pairs of a loop that shifts itself
        "labels_shifted", lambda e: {"input_ids": e["input_ids"][:-1], "labels": e["input_ids"][1:]}
    ),
    "all masks one": _edited("masks_all_one", lambda e: as_labels(e) | {"labels": e["input_ids"]}),
    "all masks one, texts that end otherwise": _edited(
        "masks_all_one", lambda e: as_labels(e) | {"labels": e["input_ids"]}, template=CLOSED
    ),
    "headers trained, texts that end otherwise": _edited(
        "generation_prompt_trained", _with_header, 1, 3, CLOSED
    ),
    "masks early, texts that end otherwise": _edited(
        "mask_shifted",
        lambda e: as_labels(e | {"loss_mask": shifted(e["loss_mask"], -1, 0)}),
        template=CLOSED,
    ),
    **TEMPLATES,
}

# ---- rollouts: rewards, log-probs, masks and ids


def clean_rollouts(groups: int = 8, size: int = 4, *, tools: bool = True) -> list[Example]:
    """Groups of answers to one prompt, with a tool's answer in the middle (0.0 as log-probs)."""
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


def _changed(
    name: str, step: int, also: str = "", **changes: Callable[[Example], Any]
) -> Callable[[list[Example]], Planted]:
    """Every rollout of so many gets other values, which are made of it."""

    def made(rollouts: list[Example]) -> Planted:
        rows = set(range(0, len(rollouts), step))
        examples = [
            r | {key: of(r) for key, of in changes.items()} if i in rows else r
            for i, r in enumerate(rollouts)
        ]
        return Planted(name, examples, chat_tokenizer(), rows, set(also.split()))

    return made


def _moved(by: int) -> Callable[[Example], Any]:
    return lambda r: shifted(r["logprobs"], by, 0.0)


def _all(value: float) -> Callable[[Example], Any]:
    return lambda r: [value] * len(r["response_ids"])


def _own(r: Example) -> str:
    return f"run {r['response_ids']}"


_FLAT, _SHIFTED = "reward_without_variance", "logprobs_shifted"
_DISAGREE = "mask_disagrees_with_logprobs"
ROLLOUT_DEFECTS: dict[str, Callable[[list[Example]], Planted]] = {
    "rewards per token": _changed(_FLAT, 1, rewards=lambda r: [*_all(0.0)(r)[1:], 1.0]),
    "logprobs shifted left": _changed(_SHIFTED, 1, logprobs=_moved(-1)),
    "logprobs shifted right": _changed(_SHIFTED, 1, logprobs=_moved(1)),
    "logprobs rolled in a fifth": _changed(
        _SHIFTED, 5, logprobs=lambda r: r["logprobs"][1:] + r["logprobs"][:1]
    ),
    "response masks zero": _changed(
        *("no_trained_token", 5, "masks_all_zero eos_never_trained"),
        loss_mask=_all(0), logprobs=_all(0.0),  # what is not trained needs no log-probs
    ),
    "logprobs of one value": _changed("logprobs_constant", 5, logprobs=_all(-1.0)),
    "probabilities": _changed(
        "logprobs_positive", 5, logprobs=lambda r: np.exp(r["logprobs"]).tolist()
    ),
    "a tool trained": _changed(_DISAGREE, 5, "text_after_end_trained", loss_mask=_all(1)),
    "first tokens masked": _changed(
        _DISAGREE, 5, loss_mask=lambda r: [0, 0, *r["loss_mask"][2:]]
    ),
    "a uid in every row": _changed("uid_without_group", 1, uid=_own),
    "uids of another prompt": _changed(
        "uid_of_several_prompts", 5, uid=lambda r: f"task {(int(r['uid'][-1]) + 1) % 8}"
    ),
}  # fmt: skip
