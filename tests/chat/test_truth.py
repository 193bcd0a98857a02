"""The truth accepts right masks and finds planted errors, on templates of every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.reference import reference_examples
from tests.chat.truth import Case

Example = dict[str, Any]


def first(example: Example) -> int:
    return int(example["loss_mask"].index(1))


def last(example: Example) -> int:
    return max(i for i, kept in enumerate(example["loss_mask"]) if kept)


def masked(example: Example, places: Iterable[int], value: int) -> Example:
    changes = dict.fromkeys(places, value)
    mask = [changes.get(i, kept) for i, kept in enumerate(example["loss_mask"])]
    return {**example, "loss_mask": mask}


def start_dropped(case: Case, example: Example) -> Example:
    start = first(example)
    word = b"".join(case.pieces(example["input_ids"][start:])).find(b"lion3")
    return masked(example, range(start, start + max(word, 1)), 0)


def user_trained(case: Case, example: Example) -> Example:
    before = b"".join(case.pieces(example["input_ids"][: first(example)]))
    token = len(case.tokenizer(before[: before.find(b"zebra1")].decode())["input_ids"])
    return masked(example, range(token, token + 6), 1)


def text_after_the_end(case: Case, example: Example) -> Example:
    end = last(example) + 1
    ids = [*example["input_ids"][:end], *case.tokenizer.encode("\n")]
    return {**example, "input_ids": ids, "loss_mask": [*example["loss_mask"][:end], 1]}


def letter_changed(case: Case, example: Example) -> Example:
    ids = list(example["input_ids"])
    ids[last(example) - 1] = case.tokenizer.encode("Q")[0]
    return {**example, "input_ids": ids}


def context_dropped(case: Case, example: Example) -> Example:
    """The user's words are not in the text."""
    cut = {key: example[key][first(example) - 3 :] for key in ("input_ids", "loss_mask")}
    return {**example, **cut}


SEVERAL: dict[str, Callable[[Case, Example], Example]] = {
    "end dropped": lambda case, example: masked(example, [last(example)], 0),
    "header trained": lambda case, example: masked(example, [first(example) - 1], 1),
    "hole": lambda case, example: masked(example, [(first(example) + last(example)) // 2], 0),
    "all": lambda case, example: masked(example, range(len(example["loss_mask"])), 1),
}
DAMAGES = SEVERAL | {
    "nothing": lambda case, example: masked(example, range(len(example["loss_mask"])), 0),
    "shifted": lambda case, example: {**example, "loss_mask": [0, *example["loss_mask"][:-1]]},
    **{damage.__name__: damage for damage in (start_dropped, user_trained, text_after_the_end,
       letter_changed, context_dropped)},
}  # fmt: skip


def case_of(name: str, conversation: str) -> Case:
    tokenizer = tokenizer_for(templates()[name], FAMILY_OF[name].eos)
    return Case(name, tokenizer, CONVERSATIONS[conversation])


def test_every_word_is_said_once() -> None:
    """But in "echo"; else nothing could be told from a word. Every template has a family."""
    for name, record in CONVERSATIONS.items():
        said = [w for words in Case("llama3", None, record).words() for w in words]
        said = [word for word in said if word not in ("look1", "find2")]
        assert said, name
        assert (name == "echo") == (len(said) != len(set(said))), name
    assert set(templates()) == set(FAMILY_OF)


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "llama3_1", "gemma4", "glm4moe", "cohere2"])
def test_planted_errors_are_found(name: str) -> None:
    case = case_of(name, PLAIN)
    examples = reference_examples(case)
    assert examples is not None
    assert case.verdict("each", examples).kind == "right"
    for damage, planted in DAMAGES.items():
        damaged = planted(case, examples[0])
        assert damaged != examples[0], damage
        assert case.verdict("each", [damaged]).kind == "wrong", damage


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "llama3_1", "gemma4", "muse_glimmer"])
def test_planted_errors_of_several_examples_are_found(name: str) -> None:
    case = case_of(name, "two rounds of calls")
    examples = reference_examples(case)
    assert examples is not None
    assert case.verdict("each", examples).kind == "right"
    damaged = [[damage(case, examples[0]), *examples[1:]] for damage in SEVERAL.values()]
    for wrong in (examples[:-1], examples[1:], [*examples, examples[0]], [], *damaged):
        assert case.verdict("each", wrong).kind == "wrong"
    assert case.verdict("all", examples[-1]).kind == "wrong"
    assert case.verdict("last", examples[0]).kind == "wrong"
    assert case.verdict("last", examples[-1]).kind == "right"


def test_a_part_that_did_not_arrive_is_found() -> None:
    """The mask of another record: its reasoning, call or document is not there."""
    examples = reference_examples(case_of("qwen3", PLAIN))
    assert examples
    for other in ("reasoning, one turn", "documents", "system", "ends with a call"):
        assert case_of("qwen3", other).verdict("each", examples).kind == "wrong", other
