"""Defects of supervision, planted in clean conversations: the truth that ``audit`` is held to.

They were written from the list of findings, not from the code of audit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.reporting.clean_data import CHATML, Clean, Example, with_target

__all__ = ["DEFECTS", "TEMPLATES", "Planted", "answers", "of_three_turns", "shifted"]

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


def _first(e: Example) -> int:
    return answers(e["loss_mask"])[0][0]


def _end(e: Example) -> int:
    """The last trained token: the end of text."""
    return answers(e["loss_mask"])[-1][1] - 1


def _with_mask(e: Example, start: int, stop: int, weight: int) -> Example:
    mask = list(e["loss_mask"])
    mask[start:stop] = [weight] * (stop - start)
    return e | {"loss_mask": mask}


def _inserted(e: Example, at: int, tokens: list[int], weight: int) -> Example:
    """The example with more tokens before the place ``at``."""
    added = {"input_ids": tokens, "loss_mask": [weight] * len(tokens)}
    return {key: e[key][:at] + of + e[key][at:] for key, of in added.items()}


def _longer(e: Example, at: int, tokens: int, weight: int) -> Example:
    """The same with copies of what is before ``at``."""
    return _inserted(e, at, (e["input_ids"][at - 3 : at] * (tokens // 3 + 1))[:tokens], weight)


def _limit(clean: Clean) -> int:
    """More tokens than any example has."""
    return max(len(e["input_ids"]) for e in clean.examples) + 10


@dataclass(frozen=True)
class _Case:
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
    of_turns: bool = False
    everywhere: Edit = lambda clean, e: e
    """Before the edit, of all rows."""

    def __call__(self, clean: Clean) -> Planted:
        clean = clean.with_eos_as_pad() if self.eos_is_pad else clean
        rows = {"all": clean.all_rows(), "tenth": clean.rows(), "twentieth": clean.rows(7, 20)}
        chosen, examples = rows[self.rows], []
        for i, e in enumerate(of_three_turns(clean) if self.of_turns else clean.examples):
            e = self.everywhere(clean, e)
            e = with_target(self.edit(clean, e) if i in chosen else e, self.form)
            key = "loss_mask" if self.form == "num_actions" else self.form
            examples.append(e | {key: self.moved(e[key])} if i in chosen else e)
        limit, also = _limit(clean) if self.has_limit else None, set(self.also.split())
        return Planted(self.name, examples, clean.tokenizer, [chosen], limit, also)


def _header(tokens: int) -> Edit:
    """The last tokens of the header trained, ``tokens`` fewer than all."""
    return lambda c, e: _with_mask(e, _first(e) - len(c.header) + tokens, _first(e), 1)


def _thinking(turn: int) -> Edit:
    block = "<think>\n\n</think>\n\n"
    return lambda c, e: _inserted(e, answers(e["loss_mask"])[turn][0], c.encode(block), 1)


def _long_answer(more: int) -> Edit:
    return lambda c, e: _longer(e, _end(e), _limit(c) + more - _end(e), 1)


def _long_prompt(more: int) -> Edit:
    def edit(clean: Clean, e: Example) -> Example:
        first = _first(e)
        return _longer(e, first - len(clean.header) - 3, _limit(clean) + more - first, 0)

    return edit


def _last_turn_beyond(clean: Clean, e: Example) -> Example:
    """The first answer is whole, the second one is cut off with its question."""
    at = _first(e) - len(clean.header) - 3
    filled = _longer(e, at, _limit(clean) - len(e["input_ids"]), 0)
    return {key: values + e[key] for key, values in filled.items()}


def _of_turn(turn: int, start: Callable[[Clean, int, int], int], weight: int) -> Edit:
    def edit(clean: Clean, e: Example) -> Example:
        first, end = answers(e["loss_mask"])[turn]
        return _with_mask(e, start(clean, first, end), first if weight else end, weight)

    return edit


def _from_the_first(clean: Clean, e: Example) -> Example:
    return _with_mask(e, _first(e), _end(e) + 1, 1)


def _another_id(of: Callable[[Clean, Example], int], more: int) -> Edit:
    def edit(clean: Clean, e: Example) -> Example:
        ids = list(e["input_ids"])
        ids[of(clean, e)] = len(clean.tokenizer) + more
        return e | {"input_ids": ids}

    return edit


def _bos(clean: Clean, e: Example) -> Example:
    return _inserted(e, 0, [clean.tokenizer.bos_token_id], 0)


def _no_end(clean: Clean, e: Example) -> Example:
    return _with_mask(e, _end(e), _end(e) + 1, 0)


def _padded(clean: Clean, e: Example) -> Example:
    """With an untrained tail of pads."""
    num_pads = _limit(clean) - len(e["input_ids"])
    return _inserted(e, len(e["input_ids"]), [clean.tokenizer.pad_token_id] * num_pads, 0)


_SHIFT = "generation_prompt_trained eos_never_trained eos_not_trained eos_truncated"
_ZERO, _ONE = "masks_all_zero no_trained_token eos_never_trained", "generation_prompt_trained"
_LOST = "eos_truncated no_trained_token prompt_longer_than_row target_truncated"
_CUT, _NO_EOS = "target_truncated prompt_longer_than_row", "eos_never_trained eos_not_trained"


def _zeros(target: list[Any]) -> list[Any]:
    return [0] * len(target)


def _ones(target: list[Any]) -> list[Any]:
    return [1] * len(target)


DEFECTS: dict[str, Callable[[Clean], Planted]] = {
    **{
        f"labels shifted by {by}, {rows}": _Case(
            "labels_shifted", rows=rows, form="labels", also=_SHIFT,
            moved=lambda of, by=by: shifted(of, by, -100),
        )
        for by in (-1, 1) for rows in ("all", "twentieth")
    },
    "mask shifted left": _Case(
        "labels_shifted mask_shifted generation_prompt_trained eos_never_trained", also=_SHIFT,
        moved=lambda of: shifted(of, -1, 0),
    ),
    "mask shifted right": _Case(
        "labels_shifted mask_shifted", moved=lambda of: shifted(of, 1, 0), also=_SHIFT
    ),
    "some labels all ignored": _Case(
        "no_trained_token", rows="tenth", form="labels", moved=lambda of: [-100] * len(of),
        also=_ZERO,
    ),
    "some masks zero": _Case("no_trained_token", moved=_zeros, rows="tenth", also=_ZERO),
    "some actions masked": _Case(
        "no_trained_token", rows="tenth", form="num_actions", moved=_zeros, also=_ZERO
    ),
    "only the first token trained": _Case(
        "no_trained_token", rows="tenth", moved=lambda of: [1, *_zeros(of)[1:]], also=_ZERO
    ),
    "template without generation marks": _Case(
        "masks_all_zero", form="assistant_masks", moved=_zeros, also=_ZERO
    ),
    "completion masks all zero": _Case(
        "masks_all_zero", form="completion_mask", moved=_zeros, also=_ZERO
    ),
    "all masks one": _Case("masks_all_one", moved=_ones, also=_ONE),
    "some masks one": _Case(
        "masks_all_one", form="completion_mask", rows="tenth", moved=_ones, also=_ONE
    ),
    "labels copied from the ids": _Case(
        "masks_all_one", form="labels", also=_ONE,
        edit=lambda c, e: _with_mask(e, 0, len(e["loss_mask"]), 1),
    ),
    "header trained everywhere": _Case("generation_prompt_trained", _header(0)),
    "header trained in some rows": _Case("generation_prompt_trained", _header(0), rows="tenth"),
    "role name trained": _Case("generation_prompt_trained", _header(1)),
    "header in completion masks": _Case(
        "generation_prompt_trained", _header(0), form="completion_mask"
    ),
    "empty thinking everywhere": _Case("empty_thinking_trained", _thinking(0)),
    "empty thinking in some rows": _Case("empty_thinking_trained", _thinking(0), rows="tenth"),
    "mask ends before EOS": _Case("eos_never_trained", _no_end),
    "mask ends before EOS in some rows": _Case(_NO_EOS, _no_end, rows="tenth"),
    "no EOS in the data": _Case(
        "eos_never_trained", lambda c, e: {k: v[: _end(e)] for k, v in e.items()}, "eos_truncated"
    ),
    **{
        f"EOS masked as a pad in {form}": _Case(
            "eos_masked_as_pad", _no_end, "eos_never_trained", form=form, eos_is_pad=True
        )
        for form in ("labels", "loss_mask")
    },
    "EOS masked as a pad before a tail of it": _Case(
        "eos_masked_as_pad", _no_end, "eos_never_trained padded_rows", form="labels",
        eos_is_pad=True, everywhere=_padded,
    ),
    "row ends right before EOS": _Case(
        "eos_truncated", _long_answer(0), "target_truncated", rows="tenth", has_limit=True
    ),
    "row ends within the answer": _Case(
        "eos_truncated", _long_answer(20), "target_truncated", rows="tenth", has_limit=True,
        form="labels",
    ),
    "cut by the tokenizer": _Case(
        "eos_truncated", rows="tenth", form="labels", also="eos_never_trained",
        edit=lambda c, e: {k: v[: _limit(c)] for k, v in _long_answer(20)(c, e).items()},
    ),
    **{
        f"prompt fills the row of {form}": _Case(
            _CUT, _long_prompt(0), _LOST, rows="tenth", has_limit=True, form=form
        )
        for form in ("loss_mask", "num_actions")
    },
    **{
        f"prompt longer than the row of {form}": _Case(
            "prompt_longer_than_row", _long_prompt(more), _LOST, rows="tenth", has_limit=True,
            form=form,
        )
        for form, more in (("loss_mask", 25), ("labels", 1))
    },
    "last turn beyond the row": _Case(
        "target_truncated", _last_turn_beyond, "eos_truncated", rows="tenth", has_limit=True
    ),
    **{
        f"two BOS, {rows}": _Case("double_bos", _bos, rows=rows, form=form, everywhere=_bos)
        for rows, form in (("all", "loss_mask"), ("tenth", "labels"))
    },
    "first id beyond the vocabulary": _Case(
        "id_out_of_vocabulary", _another_id(lambda c, e: _first(e) + 1, 0), rows="tenth"
    ),
    "ids of a larger vocabulary": _Case(
        "id_out_of_vocabulary", _another_id(lambda c, e: _first(e) // 2, 90_000)
    ),
    # In one of three turns
    "header of a later turn trained": _Case(
        "generation_prompt_trained", _of_turn(1, lambda c, first, end: first - len(c.header), 1),
        rows="tenth", of_turns=True,
    ),
    "end of an earlier turn masked": _Case(
        _NO_EOS, _of_turn(1, lambda c, first, end: end - 1, 0), rows="tenth", of_turns=True
    ),
    "end of the last turn masked": _Case(
        _NO_EOS, _of_turn(2, lambda c, first, end: end - 1, 0), rows="tenth", of_turns=True,
        form="labels",
    ),
    "empty thinking in the second turn": _Case(
        "empty_thinking_trained", _thinking(1), rows="tenth", of_turns=True
    ),
    "all trained from the first answer": _Case(
        "generation_prompt_trained", _from_the_first, "prompt_trained text_after_end_trained",
        rows="tenth", of_turns=True,
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
                _inserted(e, 0 if left else width, [clean.tokenizer.pad_token_id] * pads, 1), form
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
            prompt = _first(source)
            for row in others:
                e = clean.examples[row]
                asked = {key: of[:prompt] + e[key][_first(e) :] for key, of in source.items()}
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
    "pad tail in masks": _pads("loss_mask"),
    "pads before the prompt in labels": _pads("labels", left=True),
    "neighbours twice": _repeated("duplicates", "loss_mask", (4, 5), (20, 21)),
    "rows far apart twice": _repeated("duplicates", "labels", (0, -1)),
    "one row four times": _repeated("duplicates", "num_actions", (2, 11, 12, 30)),
    "two answers": _repeated("contradictory_answers", "loss_mask", (4, 5), (20, 28)),
    "two answers far apart": _repeated("contradictory_answers", "labels", (1, -1)),
    "three answers": _repeated("contradictory_answers", "completion_mask", (6, 17, 31)),
    **TEMPLATES,
}
