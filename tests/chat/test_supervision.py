"""The rules of docs/chat.md, one by one, on templates that break them."""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset
from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat.chats import (
    CALL,
    CALLS,
    CHATML,
    CHATML_HEAD,
    END,
    HEAD,
    NO_TAGS,
    RENDER,
    SAID,
    TAG,
    TAGS,
    THINKS,
    TWO,
    USER,
    YO,
    byte_tokenizer,
    chat,
    check,
    check_text,
    for_assistant,
    refused,
    thinking,
    tokenize,
    trained_text,
    with_call,
)
from torch_collate_kit import tokenize_chat_dataset

TEXT = "{{ m.content }}"
ARGUMENTS = "{{ c.function.arguments }}"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
TOOL_SAID = {"role": "tool", "content": "42"}


def writes(text: str, template: str = CHATML) -> str:
    return template.replace(TEXT, text)


def calls(arguments: str) -> str:
    return CALLS.replace(ARGUMENTS, arguments)


def messages(*found: Any, **keys: Any) -> dict[str, Any]:
    """A record whose last message has these keys."""
    return {"messages": [*found[:-1], {**found[-1], **keys}]}


# ---- the whole turn

BESIDE = messages(*with_call()["messages"], content="text")
PARALLEL = messages(*with_call()["messages"], tool_calls=[CALL, CALL])
INSIDE = chat("user: hi", "assistant: <think>\nhm\n</think>\n\nyo")
LOUD = "{{ 'loud' if 'b' in messages[-1].content else 'soft' }}"
LOUDER = "{{ 'loud' if 'b' in messages[-1].content }}"
ADD = "{% if add_gen"
SILENT = CHATML.replace("add_generation_prompt", "add_generation_prompt and messages[-1].role == "
                        "'user'")  # fmt: skip
SAYS = for_assistant("BOT: {{ m.content }}<|im_end|>", "YOU: {{ m.content }}\n")
OPENS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
HALF = for_assistant(TAG + "{{ m.content[:1] }}" + END + "{{ m.content[1:] }}", TEXT)
LAST_ONLY = writes(f"{{% if loop.last %}}{TAG}{TEXT}{END}{{% else %}}{TEXT}{{% endif %}}")
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (TWO, writes("{{ m.content | upper }}"), r"changes messages\[0\] content, or depends on"),
    (TWO, writes("{{ m.content[1:] }}"), r"changes messages\[0\] content"),
    (TWO, writes("{{ m.content ~ m.content }}"), r"messages\[1\]: .* writes its content twice"),
    (TWO, writes("{{ m.content if m.role == 'user' }}"), r"messages\[1\]: .* drops its content"),
    (TWO, writes("{{ m.content if m.role != 'user' }}"), r"content of the role 'user'"),
    (TWO, writes("{{ messages[0].content }}{{ m.content if not loop.first }}"),
     r"messages\[1\]: the prompt before it ends inside another text"),
    (chat("user: hi", 'assistant: "yo" <|im_end|>'), writes("{{ m.content.strip('\"') }}"),
     r"changes messages\[1\] content"),
    (TWO, CHATML.replace(TEXT, LOUD + TEXT), "or depends on its text"),
    (TWO, CHATML.replace(TEXT, LOUDER + TEXT), "or depends on its text"),
    (TWO, CHATML.replace(ADD, LOUD + ADD), "or depends on its text"),
    (TWO, CHATML.replace(ADD, LOUDER + ADD), "or depends on its text"),
    (thinking("hm", None), CHATML, "drops its reasoning_content"),
    (INSIDE, writes("{{ m.content.split('</think>')[-1].lstrip('\n') }}"),
     r"messages\[1\]: .* drops its thinking inside content"),
    (with_call(), CHATML, r"messages\[1\]: the chat template drops its tool_calls\[0\] name"),
    (BESIDE, writes("{{ m.content if not m.tool_calls }}", CALLS), r"\[1\]: .* drops its content"),
    (PARALLEL, CALLS.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]"),
     r"messages\[1\]: .* drops its tool_calls\[1\] name"),
    (with_call(arguments={"a": "x", "n": 17}), calls(ITEMS + "{{ k }}={{ v if v is string }}"
     "{% endfor %}"), r"drops the value 17 of its arguments"),
    ({**TWO, "tools": [CALL]}, CHATML, "drops the tool 'f'; remove `tools`"),
    # ---- where a turn begins
    (TWO, OPENS, r"messages\[1\]: .* the model would see '.*<think>\\n', the text has '.*yo"),
    (TWO, CHATML[: CHATML.index(ADD)], r"messages\[1\]: .* no header after a .* the user; set a"),
    (TWO, f"{{% for m in messages %}}{SAYS}{{% endfor %}}", "no header after a .* user; set a"),
    (messages(USER, YO, YO), SILENT, r"messages\[2\]: .* no header after a .* assistant; merge"),
    (messages(USER, YO, TOOL_SAID, YO), SILENT, r"messages\[3\]: .* no header after .* tool"),
    # ---- where it ends
    (SAID, CALLS.replace("<|im_end|>\n", "<|im_end|>it<|im_start|>"), "no token that ends this tu"),
    (with_call(), CALLS.replace("<|im_end|>\n", "<|im_end|>it<|im_start|>"), "no token that ends"),
    (TWO, CHATML.replace("<|im_end|>", ""), r"messages\[1\]: .* no token that ends this turn; set"),
    # ---- generation tags
    (TWO, writes(HALF), r"messages\[1\]: "),
    (TWO, TAG + CHATML + END, r"messages\[0\]: the .* tags .* hold the text of the role 'user'"),
    # ---- other text
    (chat("user: hi", "assistant: \U00100001"), CHATML, "private-use characters .*; replace"),
    (SAID, "{{ raise_exception('must alternate') }}", r"roles \[user, assistant\]: must altern"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "template", "message"), REFUSED)
def test_refused(record: dict[str, Any], template: str, message: str) -> None:
    refused(record, template, message)


@pytest.mark.parametrize("train_on", ["all", "last", "each"])
def test_refused_in_every_mode(train_on: str) -> None:
    refused(thinking("hm"), CHATML, r"messages\[1\]: .* drops its reasoning", train_on=train_on)
    reverse = CHATML.replace("in messages", "in messages | reverse")
    refused(SAID, reverse, "differently", train_on=train_on)


def test_tags_around_some_turns_alone() -> None:
    refused(TWO, LAST_ONLY, r"messages\[1\]: the \{% generation %\} tags .* leave out a part")
    assert len(tokenize(TWO, LAST_ONLY, train_on="each")) == 2


FIRST_LINE = f"{TAG}{{{{ m.content.split('\n')[0] }}}}{END}"
OTHER_LINES = "{% for line in m.content.split('\n')[1:] %}{{ '\n' + line }}{% endfor %}"


@pytest.mark.parametrize("train_on", ["all", "each"])
@pytest.mark.parametrize("answers", [["a\nb"], ["a\nb", "c"], ["c", "a\nb"]])
def test_tags_around_half_of_a_turn(answers: list[str], train_on: str) -> None:
    """Also where the template writes that turn alone: it is neither skipped nor lost."""
    template = writes(for_assistant(FIRST_LINE + OTHER_LINES, TEXT))
    record = chat(*(turn for text in answers for turn in ("user: hi", f"assistant: {text}")))
    place = 2 * answers.index("a\nb") + 1
    refused(record, template, rf"messages\[{place}\]: .* leave out a part", train_on=train_on)


@pytest.mark.parametrize("names", ["xy", "yx"])
def test_tags_around_some_turns_in_every_context(names: str) -> None:
    template = writes(f"{{% if 'y' == m.name %}}{TAG}{TEXT}{END}{{% else %}}{TEXT}{{% endif %}}")
    messages = [message for name in names for message in (USER, {**YO, "name": name})]
    record = {"messages": messages}
    for train_on in ("all", "each"):
        place = 2 * names.index("x") + 1
        refused(record, template, rf"messages\[{place}\]: .* leave out", train_on=train_on)
    only = tokenize({"messages": [USER, {**YO, "name": "x"}]}, template, train_on="each")
    assert [example["skip_reason"] for example in only] == ["no_trained_tokens"]


def test_context_that_is_dropped() -> None:
    """Thinking of a turn that is not trained may be, as it is at inference; a call may not."""
    refused(thinking("hm", None), CHATML, "drops its reasoning_content", train_on="each")
    last = tokenize(thinking("hm", None), CHATML, train_on="last")
    assert last["skip_reason"] == ""
    record = {"messages": [*with_call()["messages"], TOOL_SAID, YO]}
    refused(record, CHATML, r"drops messages\[1\] tool_calls\[0\] name", train_on="last")


YO_END = ("yo<|im_end|>", "\n")
PART = {"type": "text", "text": "y"}
LOOPS = writes("{% for p in m.content %}{{ p.text }}{% endfor %}")
NOT_NONE = CALLS.replace(TEXT, "{% if m.content is not none %}{{ m.content }}{% else %}").replace(
    "{% endfor %}<", "{% endfor %}{% endif %}<"
)
BRACES = "{{ '{' }}{% if c.function.arguments is string %}" + ARGUMENTS + "{% else %}" + ITEMS + (
    "{{ k }}:{{ v }}{% endfor %}{% endif %}{{ '}' }}"
)  # fmt: skip
MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
REPEATED = '{"a": "1", "a": "2"}'
JOINED = NO_TAGS.replace("(call.function.arguments | tojson)", "call.function.arguments")
TRAINED: list[tuple[Any, ...]] = [
    # parts, in templates that loop over them and in others
    *((messages(USER, YO, content=content), template, CHATML_HEAD, *YO_END)
      for content in ("yo", [{**PART, "text": "yo"}], [PART, "o"]) for template in (LOOPS, CHATML)),
    # None beside a call, in templates that ask for it and templates that print it
    *((messages(*with_call()["messages"], content=content), template, CHATML_HEAD,
       '<call>f {"a": "é"}</call><|im_end|>', "\n")
      for content in (None, "") for template in (NOT_NONE, CALLS)),
    # argument strings: byte for byte, repeated keys, no braces or quotes around them (Gemma 4)
    *((with_call(arguments=text), CALLS, CHATML_HEAD, f"<call>f {text}</call><|im_end|>", "\n")
      for text in ('{"a":1,  "b": "\\u00e9"}', REPEATED, '{"a": null}')),
    *((with_call(arguments=REPEATED), template, HEAD, f"<calls>f {REPEATED}<|im_end|>", "\n")
      for template in (TAGS, NO_TAGS)),
    (with_call(arguments=REPEATED), calls(ITEMS + " {{ k }}={{ v }}{% endfor %}"), CHATML_HEAD,
     "<call>f  a=1 a=2</call><|im_end|>", "\n"),
    (with_call(), calls(BRACES), CHATML_HEAD, "<call>f {a:é}</call><|im_end|>", "\n"),
    # mappings, in templates that print Python
    *((with_call(arguments=arguments), CALLS, CHATML_HEAD,
       f"<call>f {json.dumps(arguments, ensure_ascii=False)}</call><|im_end|>", "\n")
      for arguments in ({"a": "é", "n": 1}, {"n": 1}, {"a": "é", "b": None})),
    (with_call(arguments='{"a": "\\u00e9"}'), JOINED, HEAD, '<calls>f {"a": "\\u00e9"}<|im_end|>',
     "\n"),
    # quotes, tags and thinking in a text
    (chat("user: hi", 'assistant: "yo" <|im_end|>'), CHATML, CHATML_HEAD,
     '"yo" <|im_end|><|im_end|>', "\n"),
    (INSIDE, CHATML, CHATML_HEAD, "<think>\nhm\n</think>\n\nyo<|im_end|>", "\n"),
    # the prompt of a model that does not think
    (SAID, OPENS.replace("<think>\n", "{{ '<think>\n' if enable_thinking is not false }}"),
     CHATML_HEAD, *YO_END),
    # headers inside generation tags; tags in a comment
    (SAID, CHATML.replace(MESSAGE, for_assistant(f"{TAG}{MESSAGE}{END}", MESSAGE)), CHATML_HEAD,
     *YO_END),
    (SAID, "{# {% generation %} is not used #}" + CHATML, CHATML_HEAD, *YO_END),
    # nothing after the end of turn
    *((SAID, CHATML.replace("<|im_end|>\n", "<|im_end|>" + tail),
       CHATML_HEAD.replace("<|im_end|>\n", "<|im_end|>" + tail), "yo<|im_end|>", tail)
      for tail in ("\n<s>", "<s>\n", "\n\n")),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINED)
def test_trained(case: tuple[Any, ...]) -> None:
    check_text(*case)


def test_repeated_keys_in_the_context() -> None:
    record = {"messages": [*with_call(arguments=REPEATED)["messages"], USER, YO]}
    head = "\n" + HEAD.removeprefix("<s>")
    check_text(record, TAGS, HEAD, f"<calls>f {REPEATED}<|im_end|>", head, *YO_END)


def test_none_in_arguments_stays_unless_arrow_put_it_there() -> None:
    record, tokenizer = with_call(arguments={"a": None, "b": "é"}), byte_tokenizer(TAGS)
    check_text(record, TAGS, HEAD, '<calls>f {"a": null, "b": "é"}<|im_end|>', "\n")
    rows, _ = tokenize_chat_dataset(
        Dataset.from_list([record, with_call(arguments={"a": "x"})]), tokenizer
    )
    texts = [tokenizer.decode(ids) for ids in rows["input_ids"]]
    assert '<calls>f {"b": "é"}<|im_end|>' in texts[0]
    assert '<calls>f {"a": "x"}<|im_end|>' in texts[1]


# ---- where a turn begins and ends


def test_a_turn_follows_the_prompt_of_inference() -> None:
    """As gpt-oss: thinking before a call is dropped once the answer is there, not before."""
    shown = "messages[-1].tool_calls or messages[-1].role == 'tool'"
    thought = f"{{% if m.tool_calls and ({shown}) %}}({{{{ m.reasoning_content }}}}){{% endif %}}"
    tokenizer = byte_tokenizer(writes(thought + TEXT, CALLS))
    called = messages(*with_call()["messages"], content="", reasoning_content="hm")["messages"]
    examples = tokenize({"messages": [*called, TOOL_SAID, YO]}, tokenizer, train_on="each")
    first, second = (tokenizer.decode(example["input_ids"]) for example in examples)
    call = '(hm)<call>f {"a": "é"}</call><|im_end|>\n'
    assert call in first
    assert call in second  # though the template drops it from the whole conversation
    assert second.endswith("assistant\nyo<|im_end|>\n")


@pytest.mark.parametrize(
    ("before", "after", "trained"),
    [
        ("{% if add_generation_prompt %}", "{% if true %}", "yo<|im_end|>"),
        ("{% endif %}", "{% else %}<|im_start|>system\nhm<|im_end|>{% endif %}", "yo<|im_end|>"),
        ("<|im_end|>", "<|im_start|><|im_end|>", "yo<|im_start|><|im_end|>"),
        ("<|im_end|>", "<|eos|><|im_end|>", "yo<|eos|>"),
        ("<|im_end|>", "<|im_end|><|eos|><|eos|>", "yo<|im_end|><|eos|>"),
        (TEXT, for_assistant(f"<|start_text|>{TEXT}<|end_text|>", TEXT),
         "<|start_text|>yo<|end_text|><|im_end|>"),
    ],
)  # fmt: skip
def test_what_begins_messages_or_closes_a_tag_does_not_end_a_turn(
    before: str, after: str, trained: str
) -> None:
    """The last token does, of a tokenizer without EOS, or the EOS before it."""
    tokenizer = byte_tokenizer(CHATML.replace(before, after))
    tokenizer.add_tokens(["<|start_text|>", "<|end_text|>"], special_tokens=True)
    if "<|eos|>" in after:
        tokenizer.add_special_tokens({"eos_token": "<|eos|>"})
    assert trained_text(tokenize(SAID, tokenizer), tokenizer) == trained


def test_an_end_of_turn_that_comes_with_the_next_message() -> None:
    """As GLM-4.5: generation stops at the token of the next role."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt }}"
    )
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<|system|>"], special_tokens=True)
    head = "<|user|>hi<|assistant|>"
    for _ in range(2):  # then from what is known about the template
        result = tokenize(TWO, tokenizer)
        check(result, tokenizer, head, "yo<|user|>", "a<|assistant|>", "b<|user|>")
    thought = "{{ m.reasoning_content if loop.last }}"
    tokenizer.chat_template = template.replace(TEXT, thought + TEXT)
    result = tokenize(thinking("hm"), tokenizer)  # though a next question drops the thought
    check(result, tokenizer, head, "hmanswer 0<|user|>")
    tokenizer.chat_template = template
    for follows in ("assistant: c", "system: c"):
        record = chat("user: hi", "assistant: yo", follows, "user: a", "assistant: b")
        refused(record, tokenizer, r"messages\[1\]: .* no token that ends this turn")


# ---- train_on


def test_each_gives_one_example_per_turn_that_is_rewritten() -> None:
    tokenizer, record = byte_tokenizer(THINKS), thinking("A", "B")
    refused(record, THINKS, r"messages\[1\]: .* drops its reasoning_content; pass train_on='each'")
    first, second = tokenize(record, tokenizer, train_on="each")
    check(first, tokenizer, CHATML_HEAD, "<think>\nA\n</think>\nanswer 0<|im_end|>", "\n")
    context = CHATML_HEAD + "answer 0<|im_end|>\n" + CHATML_HEAD
    check(second, tokenizer, context, "<think>\nB\n</think>\nanswer 1<|im_end|>", "\n")
    assert tokenize(record, tokenizer, train_on="last") == second
    kept = tokenize(record, tokenizer, chat_template_kwargs={"preserve_thinking": True})
    assert sum(kept["loss_mask"]) == sum(first["loss_mask"]) + sum(second["loss_mask"])


def test_each_merges_what_a_later_turn_continues() -> None:
    assert tokenize(TWO, CHATML, train_on="each") == [tokenize(TWO, CHATML)]
    masks = [e["loss_mask"] for e in tokenize(thinking("A", None, "B"), THINKS, train_on="each")]
    runs = [sum(b > a for a, b in itertools.pairwise([0, *mask])) for mask in masks]
    assert runs == [1, 2]  # the second turn is a prefix of the third


def test_a_cure_that_works_is_named() -> None:
    message = r"reasoning_content; pass chat_template_kwargs=\{'preserve_thinking': True\}$"
    for train_on in ("all", "last", "each"):
        refused(thinking("A"), THINKS.replace("loop.last or ", ""), message, train_on=train_on)


def test_tags_that_hold_no_text_of_the_record() -> None:
    nobody = TAGS.replace("message.role == 'assistant'", "false")
    for source in (nobody, writes(for_assistant(TAG + "x" + END + TEXT, TEXT))):
        assert tokenize(TWO, source)["skip_reason"] == "no_trained_tokens"


def test_renderings_do_not_grow_with_the_turns() -> None:
    """One rendering per record once the template and the shape of the record are known."""
    tokenizer, counts = byte_tokenizer(CHATML), []
    for turns in (4, 4, 40):
        with patch(RENDER, side_effect=render_jinja_template) as spy:
            tokenize({"messages": [USER, YO] * turns}, tokenizer)
        counts.append(spy.call_count)
    assert counts[1:] == [1, 2]
