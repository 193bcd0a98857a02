"""Templates with generation tags in wrong places, and other damage: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.chats import END as OFF
from tests.chat.chats import TAG as ON
from tests.chat.chats import tokenize, trained_text
from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import tokenizer_for
from tests.chat.test_tokenizers import CHATML, NAMES, TAGGED, byte_level, expected, rendered
from torch_collate_kit.errors import DataError

UNCHANGED = {
    "tags in a comment": "{# {% generation %} x {% endgeneration %} #}" + CHATML,
    "tags in a comment and in place": "{#- {% generation %} -#}" + TAGGED,
}
DAMAGED = {
    "tags in raw text": "{% if false %}{% raw %}{% generation %}{% endraw %}{% endif %}" + CHATML,
    "tags that are never reached": CHATML + "{% if false %}" + ON + "x" + OFF + "{% endif %}",
    "tags around nothing": CHATML + ON + OFF,
    "around the header too": TAGGED.replace(
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}",
        "{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>' + m.role + '\n' }}",
    ).replace("{% else %}", "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"),
    "around every message": CHATML.replace("{{ '<|im_start|>'", ON + "{{ '<|im_start|>'").replace(
        "{% endfor %}", OFF + "{% endfor %}"
    ),
    "around the user's": TAGGED.replace("m.role == 'assistant'", "m.role == 'user'"),
    "around everything": ON + CHATML + OFF,
    "without the end": TAGGED.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}",
        "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    ),
    "only the end": TAGGED.replace(
        "{% generation %}{{ m.content + '<|im_end|>' }}",
        "{{ m.content }}{% generation %}{{ '<|im_end|>' }}",
    ),
    "with the line break after the end": TAGGED.replace(
        "'<|im_end|>' }}{% endgeneration %}", "'<|im_end|>\n' }}{% endgeneration %}"
    ),
    "only the last turn": TAGGED.replace(
        "m.role == 'assistant'", "m.role == 'assistant' and loop.last"
    ),
    "no end of turn": CHATML.replace("<|im_end|>", ""),
    "an end that is no token": CHATML.replace("<|im_end|>", "[stop]"),
    "one end for all": CHATML.replace("<|im_end|>\n", "") + "<|im_end|>",
    "the answer twice": CHATML.replace("m.content +", "m.content + m.content +"),
    "the answer upside down": CHATML.replace("m.content +", "(m.content | reverse) +"),
    "the answer in capitals": CHATML.replace("m.content +", "(m.content | upper) +"),
    "the answer cut": CHATML.replace("m.content +", "m.content[:5] +"),
    "the answer replaced": CHATML.replace("m.content +", "(m.content | replace('3', 'x')) +"),
    "the question in the answer": CHATML.replace(
        "m.content +", "messages[0].content + m.content +"
    ),
    "no header": CHATML.replace("'<|im_start|>' + m.role + '\n' +", ""),
    "another prompt": CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>model\n'"),
    "no prompt": CHATML[: CHATML.index("{% if add_generation")],
    "a prompt for everyone": CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"),
    "in another order": CHATML.replace("in messages %}", "in messages | reverse %}"),
    "only the last message": CHATML.replace("in messages %}", "in messages[-1:] %}"),
    "the number of messages first": "{{ messages | length }}" + CHATML,
}

REFUSED = {  # where no answer can be trained as the model would write it
    "no end of turn", "an end that is no token", "the answer twice", "the answer upside down",
    "the answer in capitals", "the answer cut", "the question in the answer", "no header",
    "another prompt", "in another order", "only the last message", "around every message",
    "around everything", "one end for all", "the answer replaced", "no prompt",
}  # fmt: skip
SKIPPED = {"tags in raw text", "tags that are never reached", "tags around nothing", "only the end",
           "around the user's"}  # fmt: skip


@pytest.mark.parametrize("damage", UNCHANGED)
def test_tags_that_print_nothing_change_nothing(damage: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = UNCHANGED[damage]
    for name in NAMES:
        found = tokenize(CONVERSATIONS[name], tokenizer, allow_empty=True)
        wanted = expected(tokenizer, *rendered(CONVERSATIONS[name]))
        assert (found["input_ids"], found["loss_mask"]) == wanted, name


@pytest.mark.parametrize("mode", ["all", "last", "each"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_template_trains_nothing_wrong(damage: str, mode: Any) -> None:
    """The trained text is the answers and their ends, or the record is refused."""
    tokenizer = tokenizer_for(DAMAGED[damage], "<|im_end|>")
    num_refused = 0
    for name in ("one turn", "two turns", "system, three turns", "white space"):
        record = CONVERSATIONS[name]
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        answers = answers[-1:] if mode == "last" else answers
        try:
            result = tokenize(record, tokenizer, train_on=mode)
        except DataError:
            num_refused += 1
            continue
        examples = result if mode == "each" else [result]
        if damage in SKIPPED and examples[0]["skip_reason"] == "no_trained_tokens":
            continue
        assert not any(example["skip_reason"] for example in examples)
        trained = "".join(trained_text(example, tokenizer) for example in examples)
        assert trained == "".join(answer + "<|im_end|>" for answer in answers), name
    assert (num_refused == 4) == (damage in REFUSED), num_refused
