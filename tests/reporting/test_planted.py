"""Every planted defect is found, in its rows and nowhere else; what only looks damaged is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reporting.clean_data import (
    Clean,
    Example,
    as_labels,
    chat_tokenizer,
    conversations,
    encoded,
    masked,
    serious,
    single_turn,
    tool_tokenizer,
)
from tests.reporting.planted import (
    CLOSED,
    DEFECTS,
    EMPTIES,
    ROLLOUT_DEFECTS,
    TEMPLATES,
    Planted,
    clean_rollouts,
)
from torch_collate_kit import audit, tokenize_chat_dataset

# ---- what looks damaged and is not

Trap = tuple[list[Example], Any]  # examples and their tokenizer
Edit = Callable[[int, Example], Example]


def _clean(edit: Edit = lambda i, e: e, **settings: Any) -> Trap:
    """Clean conversations, edited; settings of their tokenizer."""
    examples = [edit(i, e) for i, e in enumerate(Clean.made().examples)]
    return examples, chat_tokenizer(**settings)


def _padded(as_form: Callable[[Example], Example], num_pads: Callable[[int, int], int],
            **settings: Any) -> Trap:  # fmt: skip
    """With an untrained tail of pads; ``num_pads`` of the number of a row and its length."""
    tokenizer = chat_tokenizer(**settings)
    fills = {"input_ids": tokenizer.pad_token_id, "loss_mask": 0}
    return _clean(
        lambda i, e: as_form(
            {key: e[key] + [of] * num_pads(i, len(e["input_ids"])) for key, of in fills.items()}
        )
    )[0], tokenizer


PADDED: dict[str, Callable[[], Trap]] = {
    "a tail of EOS, of which the first is trained": lambda: _padded(
        as_labels, lambda i, n: 150 - n, pad_token="<|im_end|>"
    ),
    "a tail that is masked": lambda: _padded(dict, lambda i, n: i % 10),
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


def _parts(count: int, parts: Callable[[int], list[tuple[str, int]]]) -> Trap:
    """Rows of texts, each with its weight in the loss."""
    tokenizer = chat_tokenizer()
    return [masked(tokenizer, parts(i)) for i in range(count)], tokenizer


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
    clean = Clean.made().examples
    three = zip(clean, clean[1:], clean[2:], strict=False)
    joined = [{key: a[key] + b[key] + c[key] for key in a} for a, b, c in three]
    for e, last in list(zip(joined, clean[2:], strict=True))[::2]:
        before = len(e["loss_mask"]) - len(last["loss_mask"])
        e["loss_mask"] = [0] * before + last["loss_mask"]
    return joined, chat_tokenizer()


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


def _texts(edit: Callable[[int, str], str], template: str | None = None) -> Trap:
    """Conversations with a system prompt, several turns, tools and thinking in part, edited."""
    tokenizer = tool_tokenizer() if template is None else chat_tokenizer(template)
    texts = [edit(i, text) for i, text in enumerate(conversations(60))]
    return [encoded(text, tokenizer) for text in texts], tokenizer


def _two_templates(i: int, text: str) -> str:
    return text.replace("<|im_start|>", "## ").replace("<|im_end|>", "<eos>") if i % 2 else text


def _empty_blocks(i: int, text: str) -> str:
    text = re.sub("<think>.*?</think>\n\n", "", text, flags=re.DOTALL)
    return text.replace("\u27e6", "<think></think>\u27e6")


def _packed() -> Trap:
    rows, tokenizer = _texts(lambda i, text: text)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [{key: a[key] + b[key] for key in a} for a, b in pairs], tokenizer


TRAPS: dict[str, Callable[[], Trap]] = {
    "clean": _clean,
    "EOS as pad, and trained": lambda: _clean(lambda i, e: as_labels(e), pad_token="<|im_end|>"),
    "turns end with another token than EOS": lambda: _clean(eos_token="<eos>", pad_token="<eos>"),
    "no template": lambda: _clean(chat_template=None),
    "one BOS each": lambda: _clean(
        lambda i, e: {"input_ids": [1, *e["input_ids"]], "loss_mask": [0, *e["loss_mask"]]}
    ),
    "documents": lambda: ([{"input_ids": ids} for ids in _documents()], chat_tokenizer()),
    "documents in chunks": _chunks,
    "trials of one task": lambda: _parts(20, _trial),
    "last of three turns in part": _last_turns,
    "four solutions of each problem": lambda: _chats(
        40, lambda i: (f"Solve {i // 4}.", f"Way {i % 4}: it is {i // 4}.")
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
    "other roles": lambda: _texts(
        lambda i, text: text.replace("|>system", f"|>{('developer', 'observation')[i % 2]}")
        if i % 5 else text
    ),
    "two conversations in a row": _packed,
    "a template that ends texts with EOS": lambda: _texts(lambda i, text: text, CLOSED),
    "a template that empties earlier thinking": lambda: _texts(_empty_blocks, EMPTIES),
    "answers that prompts begin": lambda: _texts(
        lambda i, text: text.replace("\u27e6It is", "It is\u27e6")
    ),
}  # fmt: skip

# ---- what is damaged

MAY_BE_NOTES = {"reward_without_variance", "template_not_prefix_stable"}
WITHOUT_TOKENIZER = {"labels_shifted", "no_trained_token"}


def check(planted: Planted, tokenizer: Any) -> None:
    """The defect is found in its rows; other errors and warnings are only what follows from it."""
    report = audit(planted.examples, tokenizer)
    assert planted.name in report.names, report
    for finding in report.findings:
        rows = set(finding.rows.tolist())
        if len(rows) == len(planted.examples):
            assert "other rows" not in finding.message, finding.message
        if finding.name != planted.name:
            assert finding.severity == "note" or finding.name in planted.also, finding
            assert finding.severity == "note" or rows <= (planted.rows or rows)
            continue
        assert finding.severity != "note" or finding.name in MAY_BE_NOTES
        if planted.rows is not None:
            assert rows == planted.rows
            numbers = re.findall(r"\d+", finding.message.replace(",", ""))
            assert str(finding.count) in numbers, finding.message
            assert finding.example, "an example in words"


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_in_conversations(name: str) -> None:
    planted = DEFECTS[name](Clean.made())
    check(planted, planted.tokenizer)
    if planted.name in WITHOUT_TOKENIZER:
        check(planted, None)
    else:  # not all can be found, but none may raise
        audit(planted.examples)


@pytest.mark.parametrize("name", ROLLOUT_DEFECTS)
def test_planted_in_rollouts(name: str) -> None:
    planted = ROLLOUT_DEFECTS[name](clean_rollouts())
    check(planted, planted.tokenizer)


@pytest.mark.parametrize("name", TRAPS)
def test_traps_stay_silent(name: str) -> None:
    examples, tokenizer = TRAPS[name]()
    for used in (tokenizer, None):
        assert not serious(examples, used, max_tokens=10_000)


def test_earlier_thinking_that_is_emptied() -> None:
    """Of rows with a thought, and with nothing but the block that the template writes."""
    for thought, names in (("", set()), ("Hm.", {"template_not_prefix_stable"})):
        examples, tokenizer = _texts(
            lambda i, text, thought=thought: _empty_blocks(i, text).replace(
                "<think></think>\u27e6", f"<think>{thought}</think>\u27e6"
            ),
            EMPTIES,
        )
        assert set(serious(examples, tokenizer)) == names


@pytest.mark.parametrize("name", PADDED)
def test_padded_data_is_only_called_padded(name: str) -> None:
    """Its supervision is right: pads are not trained, and the end of every answer is."""
    examples, tokenizer = PADDED[name]()
    assert set(serious(examples, tokenizer, max_tokens=10_000)) <= {"padded_rows"}


@pytest.fixture(scope="module")
def real(shared_data: Path) -> Clean:
    """120 real questions with real answers, tokenized by the package."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "mistral-32k-chatml")
    with open(shared_data / "gsm8k_test_300.jsonl", encoding="utf-8") as lines:
        records = [{"messages": json.loads(next(lines))["messages"]} for _ in range(120)]
    dataset, _ = tokenize_chat_dataset(Dataset.from_list(records), tokenizer)
    return Clean([dict(e) for e in dataset], tokenizer)


def test_ids_of_another_tokenizer(real: Clean) -> None:
    """They are all known to this one, and decode to text that it writes with other ids."""
    assert audit(real.examples, real.tokenizer, max_tokens=4096).ok
    rng, rows, examples = np.random.default_rng(0), set(range(3, 120, 10)), list(real.examples)
    for i in rows:
        ids = rng.integers(1000, 32000, len(examples[i]["input_ids"])).tolist()
        examples[i] = examples[i] | {"input_ids": ids}
    found = set(audit(examples, real.tokenizer)["text_garbled"].rows.tolist())
    assert found <= rows
    assert len(found) >= 0.9 * len(rows), "a short row may come back by chance"


@pytest.mark.parametrize("name", sorted(DEFECTS.keys() - TEMPLATES))  # the latter read no row
def test_planted_in_real_conversations(name: str, real: Clean) -> None:
    planted = DEFECTS[name](real)
    check(planted, planted.tokenizer)
