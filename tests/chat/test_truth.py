"""The truth accepts right masks and finds every planted error, on every template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.reference import reference_examples
from tests.chat.truth import Case

TEMPLATES = templates()

Example = dict[str, Any]
Damage = Callable[[Case, Example], Example]


def first(example: Example) -> int:
    return int(example["loss_mask"].index(1))


def last(example: Example) -> int:
    mask = example["loss_mask"]
    return len(mask) - 1 - int(mask[::-1].index(1))


def with_mask(example: Example, changes: dict[int, int]) -> Example:
    mask = [changes.get(i, kept) for i, kept in enumerate(example["loss_mask"])]
    return {**example, "loss_mask": mask}


def shifted_left(case: Case, example: Example) -> Example:
    return {**example, "loss_mask": [*example["loss_mask"][1:], 0]}


def shifted_right(case: Case, example: Example) -> Example:
    return {**example, "loss_mask": [0, *example["loss_mask"][:-1]]}


def header_trained(case: Case, example: Example) -> Example:
    return with_mask(example, {first(example) - 1: 1})


def start_dropped(case: Case, example: Example) -> Example:
    start, ids = first(example), example["input_ids"]
    word = b"".join(case.pieces(ids[start:])).find(b"lion3")
    return with_mask(example, dict.fromkeys(range(start, start + max(word, 1)), 0))


def end_dropped(case: Case, example: Example) -> Example:
    return with_mask(example, {last(example): 0})


def text_after_the_end(case: Case, example: Example) -> Example:
    ids = [*example["input_ids"][: last(example) + 1], *case.tokenizer.encode("\n")]
    mask = [*example["loss_mask"][: last(example) + 1], 1]
    return {**example, "input_ids": ids, "loss_mask": mask}


def user_trained(case: Case, example: Example) -> Example:
    before = b"".join(case.pieces(example["input_ids"][: first(example)]))
    token = len(case.tokenizer(before[: before.find(b"zebra1")].decode())["input_ids"])
    return with_mask(example, dict.fromkeys(range(token, token + 6), 1))


def everything_trained(case: Case, example: Example) -> Example:
    return {**example, "loss_mask": [1] * len(example["loss_mask"])}


def nothing_trained(case: Case, example: Example) -> Example:
    return {**example, "loss_mask": [0] * len(example["loss_mask"])}


def hole(case: Case, example: Example) -> Example:
    return with_mask(example, {(first(example) + last(example)) // 2: 0})


def letter_changed(case: Case, example: Example) -> Example:
    """Another text than the record's."""
    ids = list(example["input_ids"])
    ids[last(example) - 1] = case.tokenizer.encode("Q")[0]
    return {**example, "input_ids": ids}


def context_dropped(case: Case, example: Example) -> Example:
    """The user's words are not in the text."""
    start = first(example)
    keep = [i for i, piece in enumerate(case.pieces(example["input_ids"])) if i >= start - 3]
    return {
        **example,
        **{key: [example[key][i] for i in keep] for key in ("input_ids", "loss_mask")},
    }


DAMAGES: list[Damage] = [
    shifted_left,
    shifted_right,
    header_trained,
    start_dropped,
    end_dropped,
    text_after_the_end,
    user_trained,
    everything_trained,
    nothing_trained,
    hole,
    letter_changed,
    context_dropped,
]


def case_of(name: str, conversation: str) -> Case:
    tokenizer = tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)
    return Case(name, tokenizer, CONVERSATIONS[conversation])


def test_every_word_is_said_once() -> None:
    """But in "echo"; else nothing could be told from a word."""
    assert len(CONVERSATIONS) >= 35
    for name, record in CONVERSATIONS.items():
        case = Case("llama3", None, record)
        said = [word for words in case.words() for word in words if word not in ("look1", "find2")]
        assert said, name
        assert (name == "echo") == (len(said) != len(set(said))), name


def test_every_template_has_a_family() -> None:
    assert set(TEMPLATES) == set(FAMILY_OF)


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "llama3_1", "gemma4", "glm4moe", "cohere2"])
def test_planted_errors_are_found(name: str) -> None:
    case = case_of(name, PLAIN)
    examples = reference_examples(case)
    assert examples is not None
    assert case.verdict("each", examples).kind == "right"
    survived = []
    for damage in DAMAGES:
        damaged = damage(case, examples[0])
        assert damaged != examples[0], damage.__name__
        if case.verdict("each", [damaged]).kind != "wrong":
            survived.append(damage.__name__)
    assert not survived


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "llama3_1", "gemma4", "muse_glimmer"])
def test_planted_errors_of_several_examples_are_found(name: str) -> None:
    case = case_of(name, "two rounds of calls")
    examples = reference_examples(case)
    assert examples is not None
    assert case.verdict("each", examples).kind == "right"
    for wrong in (examples[:-1], examples[1:], [*examples, examples[0]], []):
        assert case.verdict("each", wrong).kind == "wrong"
    assert case.verdict("all", examples[-1]).kind == "wrong"
    assert case.verdict("last", examples[0]).kind == "wrong"
    assert case.verdict("last", examples[-1]).kind == "right"
    for damage in (end_dropped, header_trained, hole, everything_trained):
        damaged = [damage(case, examples[0]), *examples[1:]]
        assert case.verdict("each", damaged).kind == "wrong", damage.__name__


def test_a_part_that_did_not_arrive_is_found() -> None:
    """The mask of another record: its reasoning, call, argument or document is not there."""
    plain = reference_examples(case_of("qwen3", PLAIN))
    called = reference_examples(case_of("qwen3", "call, dict"))
    assert plain
    assert called
    for other in ("reasoning, one turn", "documents", "system", "ends with a call"):
        assert case_of("qwen3", other).verdict("each", plain).kind == "wrong", other
    for other in ("call, string in its own spelling", "call, nested", "text beside a call"):
        assert case_of("qwen3", other).verdict("each", called).kind == "wrong", other
