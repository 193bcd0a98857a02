"""Planted defects in one of several turns: conversations of three questions and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.reporting.clean_data import Clean, Example, with_target
from tests.reporting.planted import Planted, planted

__all__ = ["answers", "of_three_turns"]


def of_three_turns(clean: Clean) -> list[Example]:
    """Each conversation followed by the next two."""
    rounds = [clean.examples[i:] + clean.examples[:i] for i in range(3)]
    return [
        {key: a[key] + b[key] + c[key] for key in ("input_ids", "loss_mask")}
        for a, b, c in zip(*rounds, strict=True)
    ]


def answers(mask: list[int]) -> list[tuple[int, int]]:
    """First token and end of every run of trained tokens.

    >>> answers([0, 1, 1, 0, 1])
    [(1, 3), (4, 5)]
    """
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _planted(
    clean: Clean, name: str, edit: Callable[[Example], Example], form: str = "loss_mask"
) -> Planted:
    rows = clean.rows()
    examples = [
        with_target(edit(e) if i in rows else e, form) for i, e in enumerate(of_three_turns(clean))
    ]
    return Planted(name, examples, clean.tokenizer, [rows])


def _with_mask(e: Example, start: int, end: int, weight: int) -> Example:
    mask = list(e["loss_mask"])
    mask[start:end] = [weight] * (end - start)
    return e | {"loss_mask": mask}


@planted
def header_of_a_later_turn_trained(clean: Clean) -> Planted:
    """Only the second of three answers is trained with its header."""

    def edit(e: Example) -> Example:
        start, _ = answers(e["loss_mask"])[1]
        return _with_mask(e, start - len(clean.header), start, 1)

    return _planted(clean, "generation_prompt_trained", edit)


@planted
def end_of_an_earlier_turn_masked(clean: Clean) -> Planted:
    def edit(e: Example) -> Example:
        _, end = answers(e["loss_mask"])[1]
        return _with_mask(e, end - 1, end, 0)

    return _planted(clean, "eos_never_trained | eos_not_trained", edit)


@planted
def end_of_the_last_turn_masked(clean: Clean) -> Planted:
    """The first two answers teach to stop, the last one does not."""

    def edit(e: Example) -> Example:
        _, end = answers(e["loss_mask"])[2]
        return _with_mask(e, end - 1, end, 0)

    return _planted(clean, "eos_never_trained | eos_not_trained", edit, "labels")


@planted
def empty_thinking_in_the_second_turn(clean: Clean) -> Planted:
    block = clean.encode("<think>\n\n</think>\n\n")

    def edit(e: Example) -> Example:
        at, _ = answers(e["loss_mask"])[1]
        ids, mask = e["input_ids"], e["loss_mask"]
        longer = ids[:at] + block + ids[at:]
        return {"input_ids": longer, "loss_mask": mask[:at] + [1] * len(block) + mask[at:]}

    return _planted(clean, "empty_thinking_trained", edit)


@planted
def all_turns_trained_from_the_first_answer(clean: Clean) -> Planted:
    """The mask goes from the first answer to the end, over the questions between."""

    def edit(e: Example) -> Example:
        found = answers(e["loss_mask"])
        return _with_mask(e, found[0][0], found[-1][1], 1)

    found = _planted(clean, "generation_prompt_trained", edit)
    return replace(found, also={"prompt_trained", "text_after_end_trained"})
