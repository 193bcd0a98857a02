"""Defects of supervision, planted in clean conversations: the truth that ``audit`` is held to.

Those that an edit of a text can make are in planted_texts.py.

They were written from the list of findings, not from the code of audit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.reporting.clean_data import CHATML, Clean, with_target
from tests.reporting.planted_edits import (
    Case,
    Planted,
    another_id,
    answers,
    bos,
    first_trained,
    inserted,
    last_trained,
    last_turn_beyond,
    long_answer,
    long_prompt,
    no_end,
    of_three_turns,
    shifted,
)

__all__ = ["DEFECTS", "TEMPLATES", "Planted", "answers", "of_three_turns", "shifted"]

_SHIFT = "generation_prompt_trained eos_never_trained eos_not_trained eos_truncated"
_ZERO, _ONE = "masks_all_zero no_trained_token eos_never_trained", "generation_prompt_trained"
_LOST = "eos_truncated no_trained_token prompt_longer_than_row target_truncated"


def _zeros(target: list[Any]) -> list[Any]:
    return [0] * len(target)


def _ones(target: list[Any]) -> list[Any]:
    return [1] * len(target)


DEFECTS: dict[str, Callable[[Clean], Planted]] = {
    **{
        f"labels shifted by {by}, {rows}": Case(
            "labels_shifted", rows=rows, form="labels", also=_SHIFT,
            moved=lambda of, by=by: shifted(of, by, -100),
        )
        for by in (-1, 1) for rows in ("all", "twentieth")
    },
    "some masks zero": Case("no_trained_token", moved=_zeros, rows="tenth", also=_ZERO),
    "template without generation marks": Case(
        "masks_all_zero", form="assistant_masks", moved=_zeros, also=_ZERO
    ),
    "all masks one": Case("masks_all_one", moved=_ones, also=_ONE),
    "mask ends before EOS": Case("eos_never_trained", no_end),
    "no EOS in the data": Case(
        "eos_never_trained", also="eos_truncated",
        edit=lambda c, e: {k: v[: last_trained(e)] for k, v in e.items()},
    ),
    **{
        f"EOS masked as a pad in {form}": Case(
            "eos_masked_as_pad", no_end, "eos_never_trained", form=form, eos_is_pad=True
        )
        for form in ("labels", "loss_mask")
    },
    "row ends within the answer": Case(
        "eos_truncated", long_answer(20), "target_truncated", rows="tenth", has_limit=True,
        form="labels",
    ),
    **{
        f"prompt longer than the row of {form}": Case(
            "prompt_longer_than_row", long_prompt(more), _LOST, rows="tenth", has_limit=True,
            form=form,
        )
        for form, more in (("loss_mask", 25), ("labels", 1))
    },
    "last turn beyond the row": Case(
        "target_truncated", last_turn_beyond, "eos_truncated", rows="tenth", has_limit=True
    ),
    **{
        f"two BOS, {rows}": Case("double_bos", bos, rows=rows, form=form, everywhere=bos)
        for rows, form in (("all", "loss_mask"), ("tenth", "labels"))
    },
    "first id beyond the vocabulary": Case(
        "id_out_of_vocabulary", another_id(lambda c, e: first_trained(e) + 1, 0), rows="tenth"
    ),
}  # fmt: skip


def _next_tokens_as_labels(clean: Clean) -> Planted:
    """The x, y pairs of a loop that shifts itself: nothing is masked."""
    examples = [
        {"input_ids": e["input_ids"][:-1], "labels": e["input_ids"][1:]} for e in clean.examples
    ]
    also = {*_SHIFT.split(), "masks_all_one"}
    return Planted("labels_shifted", examples, clean.tokenizer, [clean.all_rows()], also=also)


def _pads(form: str, *, left: bool = False) -> Callable[[Clean], Planted]:
    """Rows padded to one length, and trained there; the longest row has no pads.

    The first token of a row is never trained, so one pad on the left is none that is.
    """

    def made(clean: Clean) -> Planted:
        width = max(len(e["input_ids"]) for e in clean.examples)
        num_pads = [width - len(e["input_ids"]) for e in clean.examples]
        examples = [
            with_target(
                inserted(e, 0 if left else width, [clean.tokenizer.pad_token_id] * pads, 1), form
            )
            for e, pads in zip(clean.examples, num_pads, strict=True)
        ]
        rows = {i for i, pads in enumerate(num_pads) if pads > left}
        return Planted("pad_trained", examples, clean.tokenizer, [rows], also={"padded_rows"})

    return made


def _repeated(name: str, form: str, *groups: tuple[int, ...]) -> Callable[[Clean], Planted]:
    """Each group's first row, or its prompt before their own answers, over its other rows."""

    def made(clean: Clean) -> Planted:
        count = len(clean.examples)
        examples = list(clean.examples)
        found = [[row % count for row in group] for group in groups]
        for first, *others in found:
            source = examples[first]
            prompt = first_trained(source)
            for row in others:
                e = clean.examples[row]
                asked = {
                    key: of[:prompt] + e[key][first_trained(e) :] for key, of in source.items()
                }
                examples[row] = asked if name == "contradictory_answers" else source
        rows = [{row for g in found for row in g}, {row for g in found for row in g[1:]}]
        examples = [with_target(e, form) | {"id": i} for i, e in enumerate(examples)]
        return Planted(name, examples, clean.tokenizer, rows)

    return made


def _templated(template: str) -> Callable[[Clean], Planted]:
    """A template that writes the beginning of a conversation differently when it goes on."""

    def made(clean: Clean) -> Planted:
        tokenizer = copy.deepcopy(clean.tokenizer)
        assert template != CHATML, "the damage was not done"
        tokenizer.chat_template = template
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
DEFECTS |= {
    "next tokens as labels": _next_tokens_as_labels,
    "pad tail in labels": _pads("labels"),
    "pads before the prompt in labels": _pads("labels", left=True),
    "neighbours twice": _repeated("duplicates", "loss_mask", (4, 5), (20, 21)),
    "two answers": _repeated("contradictory_answers", "loss_mask", (4, 5), (20, 28)),
    **TEMPLATES,
}
