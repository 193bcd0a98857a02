"""Edits of a clean conversation, one defect of its supervision each, and what must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.reporting.clean_data import Clean, Example, with_target

Edit = Callable[[Clean, Example], Example]


@dataclass(frozen=True)
class Planted:
    """Damaged data and what must be found in it."""

    name: str
    """The finding, or several with a space between, where either describes the damage."""
    examples: list[Example]
    tokenizer: Any
    rows: list[set[int]] | None
    """The damaged rows, or several sets of which one must be found; None: rows mean nothing."""
    max_tokens: int | None = None
    also: set[str] = field(default_factory=set)
    """Findings that follow from this one: they may be there, but in damaged rows only."""


def shifted(values: list[Any], by: int, fill: Any) -> list[Any]:
    """The values moved by one: +1 to the right, -1 to the left."""
    return [fill, *values[:-1]] if by == 1 else [*values[1:], fill]


def answers(mask: list[int]) -> list[tuple[int, int]]:
    """First token and end of every run of trained tokens."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def of_three_turns(clean: Clean) -> list[Example]:
    """Each conversation followed by the next two."""
    rounds = [clean.examples[i:] + clean.examples[:i] for i in range(3)]
    return [
        {key: a[key] + b[key] + c[key] for key in ("input_ids", "loss_mask")}
        for a, b, c in zip(*rounds, strict=True)
    ]


def first_trained(e: Example) -> int:
    return answers(e["loss_mask"])[0][0]


def last_trained(e: Example) -> int:
    """The last trained token: the end of text."""
    return answers(e["loss_mask"])[-1][1] - 1


def with_mask(e: Example, start: int, stop: int, weight: int) -> Example:
    mask = list(e["loss_mask"])
    mask[start:stop] = [weight] * (stop - start)
    return e | {"loss_mask": mask}


def inserted(e: Example, at: int, tokens: list[int], weight: int) -> Example:
    """The example with more tokens before the place ``at``."""
    added = {"input_ids": tokens, "loss_mask": [weight] * len(tokens)}
    return {key: e[key][:at] + of + e[key][at:] for key, of in added.items()}


def longer(e: Example, at: int, tokens: int, weight: int) -> Example:
    """The same with copies of what is before ``at``."""
    return inserted(e, at, (e["input_ids"][at - 3 : at] * (tokens // 3 + 1))[:tokens], weight)


def row_limit(clean: Clean) -> int:
    """More tokens than any example has."""
    return max(len(e["input_ids"]) for e in clean.examples) + 10


@dataclass(frozen=True)
class Case:
    """An edit of some rows, and what must be found of it."""

    name: str
    edit: Edit = lambda clean, e: e
    """Of ``input_ids`` and ``loss_mask``."""
    also: str = ""
    rows: str = "all"
    """Or "tenth", or "twentieth"."""
    form: str = "loss_mask"
    moved: Callable[[list[Any]], list[Any]] = lambda target: target
    """The target in its form, changed."""
    eos_is_pad: bool = False
    has_limit: bool = False
    everywhere: Edit = lambda clean, e: e
    """Before the edit, of all rows."""

    def __call__(self, clean: Clean) -> Planted:
        clean = clean.with_eos_as_pad() if self.eos_is_pad else clean
        rows = {"all": clean.all_rows(), "tenth": clean.rows(), "twentieth": clean.rows(7, 20)}
        chosen, examples = rows[self.rows], []
        for i, e in enumerate(clean.examples):
            e = self.everywhere(clean, e)
            e = with_target(self.edit(clean, e) if i in chosen else e, self.form)
            key = "loss_mask" if self.form == "num_actions" else self.form
            examples.append(e | {key: self.moved(e[key])} if i in chosen else e)
        limit, also = row_limit(clean) if self.has_limit else None, set(self.also.split())
        return Planted(self.name, examples, clean.tokenizer, [chosen], limit, also)


def long_answer(more: int) -> Edit:
    return lambda c, e: longer(e, last_trained(e), row_limit(c) + more - last_trained(e), 1)


def long_prompt(more: int) -> Edit:
    def edit(clean: Clean, e: Example) -> Example:
        first = first_trained(e)
        return longer(e, first - len(clean.header) - 3, row_limit(clean) + more - first, 0)

    return edit


def last_turn_beyond(clean: Clean, e: Example) -> Example:
    """The first answer is whole, the second one is cut off with its question."""
    at = first_trained(e) - len(clean.header) - 3
    filled = longer(e, at, row_limit(clean) - len(e["input_ids"]), 0)
    return {key: values + e[key] for key, values in filled.items()}


def another_id(of: Callable[[Clean, Example], int], more: int) -> Edit:
    def edit(clean: Clean, e: Example) -> Example:
        ids = list(e["input_ids"])
        ids[of(clean, e)] = len(clean.tokenizer) + more
        return e | {"input_ids": ids}

    return edit


def bos(clean: Clean, e: Example) -> Example:
    return inserted(e, 0, [clean.tokenizer.bos_token_id], 0)


def no_end(clean: Clean, e: Example) -> Example:
    return with_mask(e, last_trained(e), last_trained(e) + 1, 0)
