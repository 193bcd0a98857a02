"""Defects of supervision, planted in clean conversations: the truth that ``audit`` is held to.

Each function takes clean data and returns it damaged, with the finding that must name the damage
and the rows that have it. They are written from the list of findings, not from the code of audit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.reporting.clean_data import Clean, Example, with_target

__all__ = ["DEFECTS", "Planted", "edited", "planted", "shifted"]


@dataclass(frozen=True)
class Planted:
    """Damaged data and what must be found in it.

    ``rows`` are the damaged rows, or several sets of which one must be found (of duplicates: all
    copies, or all but the first); None where rows mean nothing. ``also`` are findings that follow
    from this one: they may be there, but in damaged rows only.
    """

    name: str
    """Or several with "|" between, where either describes the damage."""
    examples: list[Example]
    tokenizer: Any
    rows: list[set[int]] | None
    max_tokens: int | None = None
    also: set[str] = field(default_factory=set)


DEFECTS: dict[str, Callable[[Clean], Planted]] = {}
Defect = Callable[[Clean], Planted]


def planted(defect: Defect) -> Defect:
    """Register a defect under the name of its function."""
    assert defect.__name__ not in DEFECTS, defect.__name__
    DEFECTS[defect.__name__] = defect
    return defect


def edited(
    clean: Clean, rows: set[int], edit: Callable[[Example], Example], *, form: str = "loss_mask"
) -> list[Example]:
    """The examples with one form of target, after ``edit`` of those in ``rows``."""
    examples = [with_target(e, form) for e in clean.examples]
    return [edit(e) if i in rows else e for i, e in enumerate(examples)]


def shifted(values: list[Any], by: int, fill: Any) -> list[Any]:
    """The values moved by one: +1 to the right, -1 to the left.

    >>> shifted([1, 2, 3], 1, 0), shifted([1, 2, 3], -1, 0)
    ([0, 1, 2], [2, 3, 0])
    """
    return [fill, *values[:-1]] if by == 1 else [*values[1:], fill]


def first_target(example: Example) -> int:
    return int(example["loss_mask"].index(1))


def eos_position(example: Example) -> int:
    """Where the answer ends: its last trained token."""
    return len(example["loss_mask"]) - 1 - int(example["loss_mask"][::-1].index(1))


# Labels shifted: a model of transformers shifts them itself.
_AFTER_A_SHIFT = {
    *("generation_prompt_trained", "eos_never_trained", "eos_not_trained", "eos_truncated"),
}  # fmt: skip


def _labels_moved(clean: Clean, by: int, rows: set[int]) -> Planted:
    def move(e: Example) -> Example:
        return e | {"labels": shifted(e["labels"], by, -100)}

    examples = edited(clean, rows, move, form="labels")
    return Planted("labels_shifted", examples, clean.tokenizer, [rows], also=_AFTER_A_SHIFT)


@planted
def labels_shifted_left_everywhere(clean: Clean) -> Planted:
    return _labels_moved(clean, -1, clean.all_rows())


@planted
def labels_shifted_right_everywhere(clean: Clean) -> Planted:
    return _labels_moved(clean, 1, clean.all_rows())


@planted
def labels_shifted_left_in_one_row_of_twenty(clean: Clean) -> Planted:
    return _labels_moved(clean, -1, clean.rows(7, 20))


@planted
def labels_shifted_right_in_one_row_of_twenty(clean: Clean) -> Planted:
    return _labels_moved(clean, 1, clean.rows(7, 20))


@planted
def next_tokens_as_labels(clean: Clean) -> Planted:
    """The x, y pairs of a loop that shifts itself: nothing is masked."""
    examples = [
        {"input_ids": e["input_ids"][:-1], "labels": e["input_ids"][1:]} for e in clean.examples
    ]
    also = _AFTER_A_SHIFT | {"masks_all_one"}
    return Planted("labels_shifted", examples, clean.tokenizer, [clean.all_rows()], also=also)


def _mask_moved(clean: Clean, by: int, names: str) -> Planted:
    """A mask made for predictions (of ``logits[:-1]``) in place of tokens, or moved twice."""

    def move(e: Example) -> Example:
        return e | {"loss_mask": shifted(e["loss_mask"], by, 0)}

    rows = clean.all_rows()
    examples = edited(clean, rows, move)
    return Planted(names, examples, clean.tokenizer, [rows], also=_AFTER_A_SHIFT)


@planted
def mask_shifted_left(clean: Clean) -> Planted:
    """The last token of the generation prompt is trained, the end of text is not."""
    names = "labels_shifted | mask_shifted | generation_prompt_trained | eos_never_trained"
    return _mask_moved(clean, -1, names)


@planted
def mask_shifted_right(clean: Clean) -> Planted:
    """The first token of every answer is not trained, the line break after its end is."""
    return _mask_moved(clean, 1, "labels_shifted | mask_shifted")


# Masks that train nothing, or everything.
def _target(name: str, clean: Clean, rows: set[int], form: str, edit: Any, also: str) -> Planted:
    examples = edited(clean, rows, edit, form=form)
    return Planted(name, examples, clean.tokenizer, [rows], also=set(also.split()))


_ZERO = "masks_all_zero no_trained_token eos_never_trained"
_ONE = "generation_prompt_trained"


def _filled(key: str, value: Any) -> Callable[[Example], Example]:
    return lambda e: e | {key: [value] * len(e[key])}


@planted
def some_labels_all_ignored(clean: Clean) -> Planted:
    edit = _filled("labels", -100)
    return _target("no_trained_token", clean, clean.rows(), "labels", edit, _ZERO)


@planted
def some_masks_zero(clean: Clean) -> Planted:
    edit = _filled("loss_mask", 0)
    return _target("no_trained_token", clean, clean.rows(), "loss_mask", edit, _ZERO)


@planted
def some_actions_masked(clean: Clean) -> Planted:
    edit = _filled("loss_mask", 0)
    return _target("no_trained_token", clean, clean.rows(), "num_actions", edit, _ZERO)


@planted
def only_the_first_token_trained(clean: Clean) -> Planted:
    """No token predicts the first one, so such an example has no loss."""

    def edit(e: Example) -> Example:
        return e | {"loss_mask": [1] + [0] * (len(e["loss_mask"]) - 1)}

    return _target("no_trained_token", clean, clean.rows(), "loss_mask", edit, _ZERO)


@planted
def template_without_generation_marks(clean: Clean) -> Planted:
    """``return_assistant_tokens_mask`` gives zeros where a template lacks the marks."""
    edit = _filled("assistant_masks", 0)
    return _target("masks_all_zero", clean, clean.all_rows(), "assistant_masks", edit, _ZERO)


@planted
def completion_masks_all_zero(clean: Clean) -> Planted:
    edit = _filled("completion_mask", 0)
    return _target("masks_all_zero", clean, clean.all_rows(), "completion_mask", edit, _ZERO)


@planted
def all_masks_one(clean: Clean) -> Planted:
    edit = _filled("loss_mask", 1)
    return _target("masks_all_one", clean, clean.all_rows(), "loss_mask", edit, _ONE)


@planted
def some_masks_one(clean: Clean) -> Planted:
    edit = _filled("completion_mask", 1)
    return _target("masks_all_one", clean, clean.rows(), "completion_mask", edit, _ONE)


@planted
def labels_copied_from_the_ids(clean: Clean) -> Planted:
    def edit(e: Example) -> Example:
        return e | {"labels": list(e["input_ids"])}

    return _target("masks_all_one", clean, clean.all_rows(), "labels", edit, _ONE)


# What the template writes is trained, or what the model must write is not.
def _header_trained(clean: Clean, tokens: int) -> Callable[[Example], Example]:
    def edit(e: Example) -> Example:
        mask, first = list(e["loss_mask"]), first_target(e)
        mask[first - tokens : first] = [1] * tokens
        return e | {"loss_mask": mask}

    return edit


@planted
def generation_prompt_trained_everywhere(clean: Clean) -> Planted:
    edit = _header_trained(clean, len(clean.header))
    name, rows = "generation_prompt_trained", clean.all_rows()
    return _target(name, clean, rows, "loss_mask", edit, "")


@planted
def generation_prompt_trained_in_some_rows(clean: Clean) -> Planted:
    edit = _header_trained(clean, len(clean.header))
    name, rows = "generation_prompt_trained", clean.rows()
    return _target(name, clean, rows, "loss_mask", edit, "")


@planted
def role_name_trained(clean: Clean) -> Planted:
    """The mask starts after ``<|im_start|>``: "assistant" and the line break are trained."""
    edit = _header_trained(clean, len(clean.header) - 1)
    name, rows = "generation_prompt_trained", clean.all_rows()
    return _target(name, clean, rows, "loss_mask", edit, "")


@planted
def generation_prompt_in_completion_masks(clean: Clean) -> Planted:
    edit = _header_trained(clean, len(clean.header))
    examples = [with_target(edit(e), "completion_mask") for e in clean.examples]
    name, rows = "generation_prompt_trained", clean.all_rows()
    return Planted(name, examples, clean.tokenizer, [rows])


def _thinking(clean: Clean, rows: set[int]) -> Planted:
    block = clean.encode("<think>\n\n</think>\n\n")

    def edit(e: Example) -> Example:
        at = first_target(e)
        ids, mask = e["input_ids"], e["loss_mask"]
        return {
            "input_ids": ids[:at] + block + ids[at:],
            "loss_mask": mask[:at] + [1] * len(block) + mask[at:],
        }

    examples = edited(clean, rows, edit)
    return Planted("empty_thinking_trained", examples, clean.tokenizer, [rows])


@planted
def empty_thinking_trained_everywhere(clean: Clean) -> Planted:
    return _thinking(clean, clean.all_rows())


@planted
def empty_thinking_trained_in_some_rows(clean: Clean) -> Planted:
    return _thinking(clean, clean.rows())
