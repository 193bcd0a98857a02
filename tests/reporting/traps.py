"""Data that looks damaged and is not: ``audit`` must stay silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reporting.clean_data import (
    Clean,
    Example,
    chat_tokenizer,
    masked,
    single_turn,
    with_target,
)
from tests.reporting.planted import answers, of_three_turns
from tests.reporting.planted_rollouts import clean_rollouts
from tests.reporting.planted_texts import conversations, encoded, tool_tokenizer

__all__ = ["PADDED", "TRAPS"]

Trap = tuple[list[Example], Any]  # examples and their tokenizer
Edit = Callable[[int, Example], Example]


def _clean(edit: Edit = lambda i, e: e, **tokenizer: Any) -> Trap:
    """Clean conversations, edited; settings of their tokenizer."""
    made = chat_tokenizer()
    for name, value in tokenizer.items():
        setattr(made, name, value)
    return [edit(i, e) for i, e in enumerate(Clean.made().examples)], made


def _labels(i: int, e: Example) -> Example:
    return with_target(e, "labels")


def _padded(form: str, num_pads: Callable[[int, int], int], **tokenizer: Any) -> Trap:
    """With an untrained tail of pads; ``num_pads`` of the number of a row and its length."""
    examples, made = _clean(**tokenizer)
    pads = [num_pads(i, len(e["input_ids"])) for i, e in enumerate(examples)]
    fills = {"input_ids": made.pad_token_id, "loss_mask": 0}
    return [
        with_target({key: e[key] + [of] * n for key, of in fills.items()}, form)
        for e, n in zip(examples, pads, strict=True)
    ], made


PADDED: dict[str, Callable[[], Trap]] = {
    "a tail of EOS, of which the first is trained": lambda: _padded(
        "labels", lambda i, n: 150 - n, pad_token="<|im_end|>"
    ),
    "a tail that is masked": lambda: _padded("loss_mask", lambda i, n: i % 10),
}


def _documents() -> list[list[int]]:
    texts = [f"Chapter {i}. It rained for {i * i} days." + " And on." * (i % 4) for i in range(30)]
    return [
        chat_tokenizer().encode(text + "<|im_end|>", add_special_tokens=False) for text in texts
    ]


def _chunks() -> Trap:
    """Joined by the end of text and cut every 32 tokens: few chunks end where a document ends."""
    joined = [token for ids in _documents() for token in ids]
    chunks = [joined[i : i + 32] for i in range(0, len(joined) - 31, 32)]
    return [{"input_ids": chunk} for chunk in chunks], chat_tokenizer()


def _parts(count: int, parts: Callable[[int], list[tuple[str, int]]], form: str = "") -> Trap:
    """Rows of texts, each with its weight in the loss."""
    tokenizer = chat_tokenizer()
    examples = [masked(tokenizer, parts(i)) for i in range(count)]
    return [with_target(e, form) if form else e for e in examples], tokenizer


def _chats(count: int, turn: Callable[[int], tuple[str, str]]) -> Trap:
    """Rows of one question and one answer."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<tool>", "<memory>"], special_tokens=True)
    return [single_turn(tokenizer, *turn(i)) for i in range(count)], tokenizer


def _trial(i: int) -> list[tuple[str, int]]:
    """An agent's runs: the first prompt is the same, and the conversations differ."""
    task, trial = divmod(i, 4)
    parts = [
        (f"<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\nTask {task}<|im_end|>\n", 0)
    ]
    for turn in range(2 + trial % 2):
        parts += [
            ("<|im_start|>assistant\n", 0),
            (f"I try {task} {trial} {turn}<|im_end|>", 1),
            (f"\n<|im_start|>user\nNot {trial * turn}<|im_end|>\n", 0),
        ]
    return [*parts, ("<|im_start|>assistant\n", 0), (f"Done {trial}.<|im_end|>", 1), ("\n", 0)]


def _last_turns() -> Trap:
    """Every second conversation of three turns trains its last answer alone."""
    clean, examples = Clean.made(), []
    for i, e in enumerate(of_three_turns(clean)):
        start, _ = answers(e["loss_mask"])[-1]
        last = [m if j >= start else 0 for j, m in enumerate(e["loss_mask"])]
        examples.append(e | {"loss_mask": last} if i % 2 else e)
    return examples, clean.tokenizer


def _rollouts(edit: Edit, groups: int = 8, size: int = 4, **options: Any) -> Trap:
    found = clean_rollouts(groups, size, **options)
    return [edit(i, r) for i, r in enumerate(found)], chat_tokenizer()


def _equal_rollouts() -> Trap:
    """Two samples of one prompt may be the same text."""
    rollouts = clean_rollouts()
    for i in range(1, len(rollouts), 4):
        rollouts[i] |= {key: rollouts[i + 1][key] for key in ("response_ids", "loss_mask")}
        rollouts[i]["logprobs"] = [p * 0.9 for p in rollouts[i + 1]["logprobs"]]
    return rollouts, chat_tokenizer()


def _certain(i: int, r: Example) -> Example:
    """Log-probs of 0.0 at tokens that were sampled, also right after a tool's answer."""
    mask = np.array(r["loss_mask"])
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    drawn = np.random.default_rng(i).choice(len(mask), 6)
    zeros = {*starts.tolist(), *drawn.tolist()}
    return r | {"logprobs": [0.0 if j in zeros else p for j, p in enumerate(r["logprobs"])]}


def _texts(edit: Callable[[int, str], str]) -> Trap:
    """Conversations with a system prompt, several turns, tools and thinking in part, edited."""
    tokenizer = tool_tokenizer()
    texts = [edit(i, text) for i, text in enumerate(conversations(60))]
    return [encoded(text, tokenizer) for text in texts], tokenizer


def _two_templates(i: int, text: str) -> str:
    return text.replace("<|im_start|>", "## ").replace("<|im_end|>", "<eos>") if i % 2 else text


def _packed() -> Trap:
    rows, tokenizer = _texts(lambda i, text: text)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [{key: a[key] + b[key] for key in a} for a, b in pairs], tokenizer


_SCRIPTS = (
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d", "\u041f\u0440\u0438\u0432\u0435\u0442", "\U0001f600",
    "`<eos >` [x] {y}",
)  # fmt: skip
TRAPS: dict[str, Callable[[], Trap]] = {
    "clean": _clean,
    "EOS as pad, and trained": lambda: _clean(_labels, pad_token="<|im_end|>"),
    "turns end with another token than EOS": lambda: _clean(eos_token="<eos>", pad_token="<eos>"),
    "no template": lambda: _clean(chat_template=None),
    "weights in place of a mask": lambda: _clean(
        lambda i, e: e | {"loss_mask": [0.5 * m for m in e["loss_mask"]]}
    ),
    "one BOS each": lambda: _clean(
        lambda i, e: {"input_ids": [1, *e["input_ids"]], "loss_mask": [0, *e["loss_mask"]]}
    ),
    "documents": lambda: ([{"input_ids": ids} for ids in _documents()], chat_tokenizer()),
    "documents in chunks": _chunks,
    "trials of one task": lambda: _parts(20, _trial),
    "last of three turns in part": _last_turns,
    "few answers, as of a classifier": lambda: _chats(
        40, lambda i: (f"Yes or no? Is {i} even?", "No." if i % 2 else "Yes.")
    ),
    "four solutions of each problem": lambda: _chats(
        40, lambda i: (f"Solve {i // 4}.", f"Way {i % 4}: it is {i // 4}.")
    ),
    "one token everywhere": lambda: _parts(
        20, lambda i: [("x" * (i + 2), 0), ("x" * (2 * i + 2) + "<|im_end|>", 1)], "labels"
    ),
    "empty thinking in the prompt": lambda: _parts(
        20,
        lambda i: [
            (f"<|im_start|>user\n{i} and 3?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("<think>\n\n</think>\n\n", 0), (f"{i + 3}<|im_end|>", 1), ("\n", 0),
        ],
    ),
    "thinking": lambda: _chats(
        20, lambda i: (f"{i} and 3?", f"<think>\n{i}, 3.\n</think>\n\n{i + 3}")
    ),
    "added tokens": lambda: _chats(20, lambda i: (f"<tool>{i}", f"<memory>{i}")),
    "rollouts of which two groups are right": lambda: _rollouts(
        lambda i, r: r | {"rewards": 1.0} if r["uid"] in {"task 2", "task 5"} else r
    ),
    "equal rollouts": _equal_rollouts,
    "certain tokens": lambda: _rollouts(_certain),
    "logprobs of a tool": lambda: _rollouts(
        lambda i, r: r | {"logprobs": [p or -4.5 for p in r["logprobs"]]}
    ),
    "one rollout per prompt": lambda: _rollouts(lambda i, r: r | {"uid": i}, 32, 1),
    "tools and thinking in part": lambda: _texts(lambda i, text: text),
    "two templates": lambda: _texts(_two_templates),
    "line breaks trained in half": lambda: _texts(
        lambda i, text: text.replace("\u27e7\n", "\n\u27e7") if i % 2 else text
    ),
    "other scripts and code": lambda: _texts(
        lambda i, text: text.replace("It is", f"{_SCRIPTS[i % 4]}: it is")
    ),
    "other roles": lambda: _texts(
        lambda i, text: text.replace("|>system", f"|>{('developer', 'observation')[i % 2]}")
        if i % 5 else text
    ),
    "two conversations in a row": _packed,
    "answers that prompts begin": lambda: _texts(
        lambda i, text: text.replace("\u27e6It is", "It is\u27e6")
    ),
    "short answers": lambda: _texts(
        lambda i, text: text.replace(", I think", "").replace("It is ", "")
    ),
}  # fmt: skip
