"""Data that looks damaged and is not: ``audit`` must stay silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reporting.clean_data import (
    CHATML,
    Clean,
    Example,
    chat_tokenizer,
    masked,
    single_turn,
    with_target,
)
from tests.reporting.planted_rollouts import clean_rollouts
from tests.reporting.planted_texts import conversations, encoded, tool_tokenizer
from tests.reporting.planted_turns import answers, of_three_turns

__all__ = ["PADDED", "TRAPS"]

Trap = tuple[list[Example], Any]  # examples and their tokenizer
TRAPS: dict[str, Callable[[], Trap]] = {}


def trap(made: Callable[[], Trap]) -> Callable[[], Trap]:
    assert made.__name__ not in TRAPS, made.__name__
    TRAPS[made.__name__] = made
    return made


@trap
def clean_conversations() -> Trap:
    clean = Clean.made()
    return clean.examples, clean.tokenizer


@trap
def pad_is_eos_and_eos_is_trained() -> Trap:
    clean = Clean.made().with_eos_as_pad()
    return [with_target(e, "labels") for e in clean.examples], clean.tokenizer


def pad_tail_of_eos() -> Trap:
    """Right-padded with the end of text: the first one is trained, the tail is not."""
    clean = Clean.made().with_eos_as_pad()
    width = max(len(e["input_ids"]) for e in clean.examples)
    examples = []
    for e in clean.examples:
        pads = width - len(e["input_ids"])
        padded = {
            "input_ids": e["input_ids"] + [clean.tokenizer.pad_token_id] * pads,
            "loss_mask": e["loss_mask"] + [0] * pads,
        }
        examples.append(with_target(padded, "labels"))
    return examples, clean.tokenizer


def pad_tail_that_is_masked() -> Trap:
    clean = Clean.made(10)
    examples = [
        {"input_ids": e["input_ids"] + [0] * i, "loss_mask": e["loss_mask"] + [0] * i}
        for i, e in enumerate(clean.examples)
    ]
    return examples, clean.tokenizer


PADDED = {made.__name__: made for made in (pad_tail_of_eos, pad_tail_that_is_masked)}


def _documents(count: int = 30) -> list[list[int]]:
    tokenizer = chat_tokenizer()
    texts = [
        f"Chapter {i}. It rained for {i * i} days." + " And on." * (i % 4) for i in range(count)
    ]
    return [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts]


@trap
def documents_all_trained() -> Trap:
    """Pretraining: only ids, every token is a target."""
    return [{"input_ids": ids} for ids in _documents()], chat_tokenizer()


@trap
def documents_with_labels_of_all_tokens() -> Trap:
    examples = [{"input_ids": ids, "labels": list(ids)} for ids in _documents()]
    return examples, chat_tokenizer()


@trap
def documents_cut_into_chunks_of_one_length() -> Trap:
    """Joined by the end of text and cut every 32 tokens: few chunks end where a document ends."""
    joined = [token for ids in _documents() for token in ids]
    chunks = [joined[i : i + 32] for i in range(0, len(joined) - 31, 32)]
    return [{"input_ids": chunk} for chunk in chunks], chat_tokenizer()


@trap
def several_trials_of_one_task() -> Trap:
    """An agent's runs: the first prompt is the same, and the conversations differ."""
    tokenizer, examples = chat_tokenizer(), []
    for task in range(5):
        for trial in range(4):
            parts = [
                ("<|im_start|>system\nRules.<|im_end|>\n", 0),
                (f"<|im_start|>user\nTask {task}<|im_end|>\n", 0),
            ]
            for turn in range(2 + trial % 2):
                parts += [
                    ("<|im_start|>assistant\n", 0),
                    (f"I try {task} {trial} {turn}<|im_end|>", 1),
                    (f"\n<|im_start|>user\nNot {trial * turn}<|im_end|>\n", 0),
                ]
            parts += [("<|im_start|>assistant\n", 0), (f"Done {trial}.<|im_end|>", 1), ("\n", 0)]
            examples.append(masked(tokenizer, parts))
    return examples, tokenizer


@trap
def three_turns() -> Trap:
    """Every second conversation trains its last answer alone."""
    clean, examples = Clean.made(), []
    for i, e in enumerate(of_three_turns(clean)):
        start, _ = answers(e["loss_mask"])[-1]
        last = [m if j >= start else 0 for j, m in enumerate(e["loss_mask"])]
        examples.append(e | {"loss_mask": last} if i % 2 else e)
    return examples, clean.tokenizer


@trap
def short_examples() -> Trap:
    """Two to four tokens: a prompt of one or two, and the end of text."""
    tokenizer = chat_tokenizer()
    texts = [("a", ""), ("b", "x"), ("cd", "y"), ("e", "zz"), ("fg", "")]
    return [masked(tokenizer, [(p, 0), (a + "<|im_end|>", 1)]) for p, a in texts], tokenizer


@trap
def one_answer_to_many_prompts() -> Trap:
    """A classifier: few answers, a shared instruction, every prompt once."""
    tokenizer = chat_tokenizer()
    examples = [
        single_turn(tokenizer, f"Yes or no? Is {i} even?", "No." if i % 2 else "Yes.")
        for i in range(40)
    ]
    return examples, tokenizer


@trap
def several_solutions_of_each_problem() -> Trap:
    """Sampled answers that were found right: four ways to say the same."""
    tokenizer = chat_tokenizer()
    examples = [
        single_turn(tokenizer, f"Solve {i // 4}.", f"Way {i % 4}: it is {i // 4}.")
        for i in range(40)
    ]
    return examples, tokenizer


@trap
def texts_without_a_question() -> Trap:
    """Masked documents: the prompt is the start of text alone, the same for all."""
    tokenizer = chat_tokenizer()
    texts = [f"Chapter {i}, a text.<|im_end|>" for i in range(30)]
    return [masked(tokenizer, [("<bos>", 0), (text, 1)]) for text in texts], tokenizer


@trap
def answer_starts_with_the_last_prompt_token() -> Trap:
    """The first answer token equals the token before it, and the last one the token after it."""
    tokenizer = chat_tokenizer()
    examples = [
        masked(tokenizer, [(f"Item {i}:\n", 0), (f"\nitem {i} <|im_end|>", 1), ("<|im_end|>", 0)])
        for i in range(20)
    ]
    return [with_target(e, "labels") for e in examples], tokenizer


@trap
def constant_answers() -> Trap:
    """All trained tokens of a row are one token: a shift of them changes nothing within."""
    tokenizer = chat_tokenizer()
    texts = [(f"Give {i} of them: ", "a" * i) for i in range(3, 23)]
    examples = [masked(tokenizer, [(p, 0), (a + "<|im_end|>", 1)]) for p, a in texts]
    return [with_target(e, "labels") for e in examples], tokenizer


@trap
def repeated_tokens_everywhere() -> Trap:
    """Prompt and answer repeat one token, so labels also agree with the tokens beside them."""
    tokenizer = chat_tokenizer()
    examples = [
        masked(tokenizer, [("x" * (i + 2), 0), ("x" * (2 * i + 2) + "<|im_end|>", 1)])
        for i in range(20)
    ]
    return [with_target(e, "labels") for e in examples], tokenizer


@trap
def eos_is_not_the_end_of_a_turn() -> Trap:
    """A base tokenizer with a chat template: turns end with a token that is not its EOS."""
    tokenizer = chat_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "<eos>", "<eos>"
    return Clean.made().examples, tokenizer


@trap
def empty_thinking_in_the_prompt() -> Trap:
    """Thinking switched off: the empty block is there, masked."""
    tokenizer = chat_tokenizer()
    examples = [
        masked(
            tokenizer,
            [
                (f"<|im_start|>user\nSum of {i} and 3?<|im_end|>\n<|im_start|>assistant\n", 0),
                ("<think>\n\n</think>\n\n", 0),
                (f"{i + 3}<|im_end|>", 1),
                ("\n", 0),
            ],
        )
        for i in range(20)
    ]
    return examples, tokenizer


@trap
def thinking_that_is_not_empty() -> Trap:
    tokenizer = chat_tokenizer()
    examples = [
        single_turn(tokenizer, f"{i} and 3?", f"<think>\n{i}, 3.\n</think>\n\n{i + 3}")
        for i in range(20)
    ]
    return examples, tokenizer


@trap
def one_bos_each() -> Trap:
    clean = Clean.made(20)
    examples = [
        {"input_ids": [1, *e["input_ids"]], "loss_mask": [0, *e["loss_mask"]]}
        for e in clean.examples
    ]
    return examples, clean.tokenizer


@trap
def added_tokens() -> Trap:
    """Ids from ``vocab_size`` to ``len(tokenizer)`` are tokens that were added later."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<tool>", "<memory>"], special_tokens=True)
    examples = [single_turn(tokenizer, f"<tool>{i}", f"<memory>{i}") for i in range(20)]
    return examples, tokenizer


@trap
def template_that_wants_alternation() -> Trap:
    """It raises at a system message and at two questions in a row."""
    check = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    clean = Clean.made(20, chat_tokenizer(check + CHATML))
    return clean.examples, clean.tokenizer


@trap
def no_template() -> Trap:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    return Clean.made(20).examples, tokenizer


@trap
def weights_in_place_of_a_mask() -> Trap:
    clean = Clean.made(20)
    examples = [e | {"loss_mask": [0.5 * m for m in e["loss_mask"]]} for e in clean.examples]
    return examples, clean.tokenizer


@trap
def rollouts_of_which_two_groups_are_all_right() -> Trap:
    """In a run that learns, some groups have equal rewards."""
    rollouts = [
        r | {"rewards": 1.0} if r["uid"] in {"task 2", "task 5"} else r for r in clean_rollouts()
    ]
    return rollouts, chat_tokenizer()


@trap
def equal_rollouts_in_a_group() -> Trap:
    """Two samples of one prompt may be the same text."""
    rollouts = clean_rollouts()
    for i in range(1, len(rollouts), 4):
        same = ("response_ids", "loss_mask")
        rollouts[i] |= {key: rollouts[i + 1][key] for key in same}
        rollouts[i]["logprobs"] = [p * 0.9 for p in rollouts[i + 1]["logprobs"]]
    return rollouts, chat_tokenizer()


@trap
def certain_tokens() -> Trap:
    """Log-probs of 0.0 at tokens that were sampled, also right after a tool's answer."""
    rollouts, rng = clean_rollouts(), np.random.default_rng(1)
    for r in rollouts:
        mask = np.array(r["loss_mask"])
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        zeros = set(starts.tolist()) | set(rng.choice(len(mask), 6).tolist())
        r["logprobs"] = [0.0 if i in zeros else p for i, p in enumerate(r["logprobs"])]
    return rollouts, chat_tokenizer()


@trap
def logprobs_of_tool_tokens() -> Trap:
    """An engine that also scores the tokens it did not sample."""
    rollouts = clean_rollouts()
    for r in rollouts:
        r["logprobs"] = [p or -4.5 for p in r["logprobs"]]
    return rollouts, chat_tokenizer()


@trap
def rollouts_without_tools() -> Trap:
    return clean_rollouts(tools=False), chat_tokenizer()


def _texts(edit: Callable[[int, str], str], count: int = 60) -> Trap:
    """Conversations with a system prompt, several turns, tools and thinking in part, edited."""
    tokenizer = tool_tokenizer()
    texts = [edit(i, text) for i, text in enumerate(conversations(count))]
    return [encoded(text, tokenizer) for text in texts], tokenizer


@trap
def tools_and_thinking_in_part_of_the_rows() -> Trap:
    return _texts(lambda i, text: text)


@trap
def two_templates_half_and_half() -> Trap:
    def other(i: int, text: str) -> str:
        return text.replace("<|im_start|>", "## ").replace("<|im_end|>", "<eos>") if i % 2 else text

    return _texts(other)


@trap
def line_breaks_trained_by_one_source_of_two() -> Trap:
    return _texts(lambda i, text: text.replace("\u27e7\n", "\n\u27e7") if i % 2 else text)


@trap
def only_the_last_turn_is_trained() -> Trap:
    def last(i: int, text: str) -> str:
        before, mark, after = text.rpartition("\u27e6")
        return before.replace("\u27e6", "").replace("\u27e7", "") + mark + after

    return _texts(last)


@trap
def other_scripts_and_code() -> Trap:
    words = (
        "\u4eca\u5929\u5929\u6c14\u5f88\u597d",
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\U0001f600",
        "`<eos >` [x] {y}",
    )
    return _texts(lambda i, text: text.replace("It is", f"{words[i % 4]}: it is"))


@trap
def roles_that_the_template_does_not_name() -> Trap:
    """It writes any role; a tenth of the rows has a developer or an observation."""
    roles = ("developer", "observation")
    return _texts(lambda i, text: text.replace("|>system", f"|>{roles[i % 2]}") if i % 5 else text)


@trap
def several_conversations_in_a_row() -> Trap:
    packed, tokenizer = _texts(lambda i, text: text)
    return [
        {key: a[key] + b[key] for key in a} for a, b in zip(packed[::2], packed[1::2], strict=True)
    ], tokenizer


@trap
def prompts_that_end_with_an_answer_that_was_begun() -> Trap:
    """Prefilled in all rows: a note at most."""
    return _texts(lambda i, text: text.replace("\u27e6It is", "It is\u27e6"))


@trap
def short_answers() -> Trap:
    return _texts(lambda i, text: text.replace(", I think", "").replace("It is ", ""))


@trap
def one_rollout_per_prompt() -> Trap:
    return [r | {"uid": i} for i, r in enumerate(clean_rollouts(32, 1))], chat_tokenizer()
