"""Planted defects of whole rows, duplicates and contradictions, and of the chat template."""

from __future__ import annotations

import copy

from tests.reporting.clean_data import CHATML, Clean, with_target
from tests.reporting.planted import Planted, first_target, planted

__all__: list[str] = []


def _copied(clean: Clean, groups: list[list[int]], form: str = "loss_mask") -> Planted:
    """Each group's first row over its other rows; every row keeps an id of its own."""
    examples = [with_target(e, form) | {"id": i} for i, e in enumerate(clean.examples)]
    for first, *others in groups:
        for row in others:
            examples[row] = copy.deepcopy(examples[first]) | {"id": row}
    return Planted("duplicates", examples, clean.tokenizer, _either(groups))


def _either(groups: list[list[int]]) -> list[set[int]]:
    """All rows of the groups, or all but the first of each."""
    return [{row for g in groups for row in g}, {row for g in groups for row in g[1:]}]


@planted
def duplicates_next_to_each_other(clean: Clean) -> Planted:
    return _copied(clean, [[4, 5], [20, 21]])


@planted
def duplicates_far_apart(clean: Clean) -> Planted:
    return _copied(clean, [[0, len(clean.examples) - 1]], "labels")


@planted
def one_example_four_times(clean: Clean) -> Planted:
    return _copied(clean, [[2, 11, 12, 30]], "num_actions")


def _contradicting(clean: Clean, groups: list[list[int]], form: str = "loss_mask") -> Planted:
    """The prompt of each group's first row before the answers of its other rows."""
    examples = list(clean.examples)
    for first, *others in groups:
        prompt = examples[first]["input_ids"][: first_target(examples[first])]
        for row in others:
            e = clean.examples[row]
            answer = slice(first_target(e), None)
            examples[row] = {
                "input_ids": prompt + e["input_ids"][answer],
                "loss_mask": [0] * len(prompt) + e["loss_mask"][answer],
            }
    examples = [with_target(e, form) for e in examples]
    return Planted("contradictory_answers", examples, clean.tokenizer, _either(groups))


@planted
def two_answers_to_one_prompt(clean: Clean) -> Planted:
    return _contradicting(clean, [[4, 5], [20, 28]])


@planted
def two_answers_far_apart(clean: Clean) -> Planted:
    return _contradicting(clean, [[1, len(clean.examples) - 1]], "labels")


@planted
def three_answers_to_one_prompt(clean: Clean) -> Planted:
    return _contradicting(clean, [[6, 17, 31]], "completion_mask")


# Templates that write the beginning of a conversation differently when it goes on.
_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def _with_template(clean: Clean, template: str) -> Planted:
    assert template != CHATML, "the damage was not done"
    tokenizer = copy.deepcopy(clean.tokenizer)
    tokenizer.chat_template = template
    return Planted("template_not_prefix_stable", clean.examples, tokenizer, None)


@planted
def template_drops_earlier_thinking(clean: Clean) -> Planted:
    """As Qwen3's: the reasoning of an answer is gone once another question follows."""
    content = "(m.content.split('</think>')[-1].lstrip('\n') if not loop.last else m.content)"
    return _with_template(clean, CHATML.replace("m.content", content))


@planted
def template_moves_the_system_message(clean: Clean) -> Planted:
    """As Mistral's: the system message is written before the last question."""
    return _with_template(
        clean,
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last = messages[loop.index0:] | selectattr('role', 'eq', 'user') | list "
        "| length == 1 %}"
        "{{ '<|im_start|>user\n' + (system if last else '') + m.content + '<|im_end|>\n' }}"
        "{% elif m.role != 'system' %}" + _TURN + "{% endif %}{% endfor %}" + _PROMPT,
    )


@planted
def template_counts_the_messages(clean: Clean) -> Planted:
    return _with_template(clean, "{{ messages | length }} messages\n" + CHATML)


@planted
def template_keeps_the_last_question(clean: Clean) -> Planted:
    """Earlier turns are dropped once there are more than four messages."""
    return _with_template(clean, "{% for m in messages[-4:] %}" + _TURN + "{% endfor %}" + _PROMPT)


@planted
def template_asks_for_thinking(clean: Clean) -> Planted:
    """The generation prompt opens a thinking block that the rendered answers do not have."""
    prompt = "'<|im_start|>assistant\n' }}{% endif %}"
    return _with_template(
        clean, CHATML.replace(prompt, "'<|im_start|>assistant\n<think>\n' }}{% endif %}")
    )
