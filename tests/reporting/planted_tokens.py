"""Planted defects of single tokens: end of text, start of text, pads, and ids without a text."""

from __future__ import annotations

from collections.abc import Callable

from tests.reporting.clean_data import Clean, Example, with_target
from tests.reporting.planted import Planted, edited, eos_position, first_target, planted

__all__: list[str] = []


def _without_eos_target(e: Example) -> Example:
    mask = list(e["loss_mask"])
    mask[eos_position(e)] = 0
    return e | {"loss_mask": mask}


def _without_eos(e: Example) -> Example:
    at = eos_position(e)
    return {"input_ids": e["input_ids"][:at], "loss_mask": e["loss_mask"][:at]}


@planted
def mask_ends_before_eos(clean: Clean) -> Planted:
    rows = clean.all_rows()
    examples = edited(clean, rows, _without_eos_target)
    return Planted("eos_never_trained", examples, clean.tokenizer, [rows])


@planted
def mask_ends_before_eos_in_some_rows(clean: Clean) -> Planted:
    rows = clean.rows()
    examples = edited(clean, rows, _without_eos_target)
    return Planted("eos_never_trained | eos_not_trained", examples, clean.tokenizer, [rows])


@planted
def no_eos_in_the_data(clean: Clean) -> Planted:
    """Answers tokenized without an end of text."""
    rows = clean.all_rows()
    examples = edited(clean, rows, _without_eos)
    also = {"eos_truncated"}
    return Planted("eos_never_trained", examples, clean.tokenizer, [rows], also=also)


def _eos_masked(clean: Clean, rows: set[int], form: str) -> Planted:
    """``labels[labels == pad] = -100`` where the pad is the end of text."""
    clean = clean.with_eos_as_pad()
    examples = [
        with_target(_without_eos_target(e) if i in rows else e, form)
        for i, e in enumerate(clean.examples)
    ]
    also = {"eos_never_trained"}
    return Planted("eos_masked_as_pad", examples, clean.tokenizer, [rows], also=also)


@planted
def eos_masked_as_pad_in_labels(clean: Clean) -> Planted:
    return _eos_masked(clean, clean.all_rows(), "labels")


@planted
def eos_masked_as_pad_in_masks(clean: Clean) -> Planted:
    return _eos_masked(clean, clean.all_rows(), "loss_mask")


@planted
def eos_masked_as_pad_before_a_tail_of_it(clean: Clean) -> Planted:
    """Rows padded to one length with the end of text, all of which is masked."""
    planted = _eos_masked(clean, clean.all_rows(), "loss_mask")
    pad = planted.tokenizer.pad_token_id
    width = max(len(e["input_ids"]) for e in planted.examples) + 2
    examples = []
    for e in planted.examples:
        tail = width - len(e["input_ids"])
        ids, mask = e["input_ids"] + [pad] * tail, e["loss_mask"] + [0] * tail
        examples.append(with_target({"input_ids": ids, "loss_mask": mask}, "labels"))
    also = planted.also | {"padded_rows"}
    return Planted(planted.name, examples, planted.tokenizer, planted.rows, also=also)


# Truncation: by max_tokens, or already in the data.
def _longer(e: Example, at: int, tokens: int, weight: int) -> Example:
    """The example with as many more tokens before position ``at``, copies of what is there."""
    ids, mask = e["input_ids"], e["loss_mask"]
    filler = (ids[at - 3 : at] * (tokens // 3 + 1))[:tokens]
    return {
        "input_ids": ids[:at] + filler + ids[at:],
        "loss_mask": mask[:at] + [weight] * tokens + mask[at:],
    }


def _limit(clean: Clean) -> int:
    """More tokens than any example has."""
    return max(len(e["input_ids"]) for e in clean.examples) + 10


def _truncated(
    clean: Clean, name: str, also: set[str], edit: Callable[[Example], Example], form: str
) -> Planted:
    rows, limit = clean.rows(), _limit(clean)
    examples = [
        with_target(edit(e) if i in rows else e, form) for i, e in enumerate(clean.examples)
    ]
    return Planted(name, examples, clean.tokenizer, [rows], max_tokens=limit, also=also)


@planted
def row_ends_right_before_eos(clean: Clean) -> Planted:
    limit = _limit(clean)

    def edit(e: Example) -> Example:
        return _longer(e, eos_position(e), limit - eos_position(e), 1)

    return _truncated(clean, "eos_truncated", {"target_truncated"}, edit, "loss_mask")


@planted
def row_ends_within_the_answer(clean: Clean) -> Planted:
    limit = _limit(clean)

    def edit(e: Example) -> Example:
        return _longer(e, eos_position(e), limit + 20 - eos_position(e), 1)

    return _truncated(clean, "eos_truncated", {"target_truncated"}, edit, "labels")


_ANY_OF_BOTH = "target_truncated | prompt_longer_than_row"
_NOTHING_LEFT = {"eos_truncated", "no_trained_token", "prompt_longer_than_row", "target_truncated"}


def _prompt_of(clean: Clean, tokens: int) -> Callable[[Example], Example]:
    def edit(e: Example) -> Example:
        first = first_target(e)
        return _longer(e, first - len(clean.header) - 3, tokens - first, 0)

    return edit


@planted
def prompt_fills_the_row(clean: Clean) -> Planted:
    """The prompt fits exactly, so the answer is lost as a whole."""
    edit = _prompt_of(clean, _limit(clean))
    return _truncated(clean, _ANY_OF_BOTH, _NOTHING_LEFT, edit, "loss_mask")


@planted
def prompt_fills_the_row_of_actions(clean: Clean) -> Planted:
    edit = _prompt_of(clean, _limit(clean))
    return _truncated(clean, _ANY_OF_BOTH, _NOTHING_LEFT, edit, "num_actions")


@planted
def prompt_longer_than_the_row(clean: Clean) -> Planted:
    edit = _prompt_of(clean, _limit(clean) + 25)
    return _truncated(clean, "prompt_longer_than_row", _NOTHING_LEFT, edit, "loss_mask")


@planted
def prompt_longer_than_the_row_of_labels(clean: Clean) -> Planted:
    edit = _prompt_of(clean, _limit(clean) + 1)
    return _truncated(clean, "prompt_longer_than_row", _NOTHING_LEFT, edit, "labels")


@planted
def last_turn_beyond_the_row(clean: Clean) -> Planted:
    """The first answer is whole, the second one is cut off with its question."""
    limit = _limit(clean)

    def edit(e: Example) -> Example:
        filled = _longer(e, first_target(e) - len(clean.header) - 3, limit - len(e["input_ids"]), 0)
        return {key: values + e[key] for key, values in filled.items()}

    return _truncated(clean, "target_truncated", {"eos_truncated"}, edit, "loss_mask")


@planted
def cut_by_the_tokenizer(clean: Clean) -> Planted:
    """``truncation=True, max_length=n`` when the data was made: n tokens and no end of text."""
    whole = row_ends_within_the_answer(clean)
    limit = whole.max_tokens
    examples = [{key: values[:limit] for key, values in e.items()} for e in whole.examples]
    also = {"eos_never_trained"}
    return Planted("eos_truncated", examples, clean.tokenizer, whole.rows, also=also)


# Start of text, pads, ids without a text.
def _before(e: Example, tokens: list[int]) -> Example:
    return {
        "input_ids": tokens + e["input_ids"],
        "loss_mask": [0] * len(tokens) + e["loss_mask"],
    }


def _double_bos(clean: Clean, rows: set[int], form: str) -> Planted:
    bos = clean.tokenizer.bos_token_id
    examples = [
        with_target(_before(e, [bos, bos] if i in rows else [bos]), form)
        for i, e in enumerate(clean.examples)
    ]
    return Planted("double_bos", examples, clean.tokenizer, [rows])


@planted
def bos_of_template_and_tokenizer(clean: Clean) -> Planted:
    return _double_bos(clean, clean.all_rows(), "loss_mask")


@planted
def double_bos_in_some_rows(clean: Clean) -> Planted:
    return _double_bos(clean, clean.rows(), "labels")


def _replaced(clean: Clean, rows: set[int], token: int, *, at: str) -> Planted:
    def edit(e: Example) -> Example:
        ids = list(e["input_ids"])
        ids[first_target(e) + 1 if at == "answer" else first_target(e) // 2] = token
        return e | {"input_ids": ids}

    examples = edited(clean, rows, edit)
    return Planted("id_out_of_vocabulary", examples, clean.tokenizer, [rows])


@planted
def first_id_beyond_the_vocabulary(clean: Clean) -> Planted:
    """A token that was added to the tokenizer of the data, not to that of the model."""
    return _replaced(clean, clean.rows(), len(clean.tokenizer), at="answer")


@planted
def ids_of_a_larger_vocabulary(clean: Clean) -> Planted:
    return _replaced(clean, clean.all_rows(), len(clean.tokenizer) + 90_000, at="prompt")


def _pads(clean: Clean, form: str, *, left: bool) -> Planted:
    """Rows padded to one length, and trained there; the longest row has no pads.

    The first token of a row is never trained, so one pad on the left is none that is.
    """
    pad, width = clean.tokenizer.pad_token_id, max(len(e["input_ids"]) for e in clean.examples)
    examples, rows = [], set()
    for i, e in enumerate(clean.examples):
        pads = width - len(e["input_ids"])
        rows |= {i} if pads > left else set()
        padded: Example = {}
        for key, value in (("input_ids", pad), ("loss_mask", 1)):
            padded[key] = [value] * pads + e[key] if left else e[key] + [value] * pads
        examples.append(with_target(padded, form))
    return Planted("pad_trained", examples, clean.tokenizer, [rows], also={"padded_rows"})


@planted
def pad_tail_in_labels(clean: Clean) -> Planted:
    return _pads(clean, "labels", left=False)


@planted
def pad_tail_in_masks(clean: Clean) -> Planted:
    return _pads(clean, "loss_mask", left=False)


@planted
def pads_before_the_prompt_in_labels(clean: Clean) -> Planted:
    return _pads(clean, "labels", left=True)
