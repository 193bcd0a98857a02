"""The rules of docs/chat.md, one by one, on templates that break them."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset

from tests.chat.test_chat import (
    HEAD,
    NO_TAGS,
    TAGS,
    USER,
    YO,
    byte_tokenizer,
    chat,
    check,
    with_call,
)
from torch_collate_kit import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.chat.template import ChatTemplate
from torch_collate_kit.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content and (loop.last or preserve_thinking) %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}",
)
CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name }} "
    "{{ c.function.arguments }}</call>{% endfor %}",
)
TAG, END = "{% generation %}", "{% endgeneration %}"
CHATML_HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TWO = chat("user: hi", "assistant: yo", "user: a", "assistant: b")


def for_assistant(text: str, other: str) -> str:
    """A template that writes ``text`` for the assistant's messages."""
    return f"{{% if m.role == 'assistant' %}}{text}{{% else %}}{other}{{% endif %}}"


def thinking(*thoughts: str | None) -> dict[str, Any]:
    """A conversation in which the assistant thinks before some answers."""
    turns = [
        [USER, {**YO, "content": f"answer {i}", "reasoning_content": thought}]
        for i, thought in enumerate(thoughts)
    ]
    return {"messages": [message for turn in turns for message in turn]}


def refused(example: dict[str, Any], template: str, message: str, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        tokenize_chat(example, byte_tokenizer(template), ChatOptions(**options))


# ---- the whole turn


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("{{ m.content | upper }}", r"changes messages\[0\] content, or depends on its text"),
        ("{{ m.content[1:] }}", r"changes messages\[0\] content"),
        ("{{ m.content ~ m.content }}", r"messages\[1\]: .* writes its content twice"),
        ("{{ m.content if m.role == 'user' }}", r"messages\[1\]: .* drops its content"),
        ("{{ m.content if m.role != 'user' }}", r"drops messages\[0\] content; set a tokenizer"),
        (
            "{{ messages[0].content }}{{ m.content if not loop.first }}",
            r"messages\[1\]: the prompt before it ends inside another text",
        ),
    ],
)  # fmt: skip
def test_templates_that_change_or_drop_text(changed: str, message: str) -> None:
    refused(TWO, CHATML.replace("{{ m.content }}", changed), message)


def test_a_reasoning_that_is_not_printed_is_named() -> None:
    refused(
        thinking("hm"), CHATML, r"messages\[1\]: the chat template drops its reasoning_content;"
    )
    refused(thinking("hm"), CHATML, "drops its reasoning_content", train_on="each")
    refused(thinking("hm", None), CHATML, "drops its reasoning_content", train_on="each")
    only_last = tokenize_chat(
        thinking("hm", None), byte_tokenizer(CHATML), ChatOptions(train_on="last")
    )
    assert only_last["skip_reason"] == ""  # context loses it at inference, too


def test_calls_that_are_dropped_are_named() -> None:
    refused(with_call(), CHATML, r"messages\[1\]: the chat template drops its tool_calls\[0\] name")
    beside = with_call()
    beside["messages"][1]["content"] = "text"
    without_text = CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    refused(beside, without_text, r"messages\[1\]: the chat template drops its content")
    parallel = with_call()
    parallel["messages"][1]["tool_calls"] *= 2
    first_only = CALLS.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]")
    refused(parallel, first_only, r"messages\[1\]: .* drops its tool_calls\[1\] name")
    before = with_call()  # the last answer depends on the call
    before["messages"] += [{"role": "tool", "content": "42"}, YO]
    refused(before, CHATML, r"drops messages\[1\] tool_calls\[0\] name", train_on="last")


def test_tools_and_documents_that_are_dropped_are_named() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    refused(
        {**TWO, "tools": [tool]}, CHATML.replace("if", "if"), "drops the tool 'f'; remove `tools`"
    )
    document = {"title": "T", "text": "some text"}
    refused({**TWO, "documents": [document]}, CHATML, r"drops documents\[0\]\['title'\]")
    reads = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}" + CHATML
    for documents in ([document], json.dumps([document])):
        result = tokenize_chat({**chat("user: hi", "assistant: yo"), "documents": documents},
                               byte_tokenizer(reads))  # fmt: skip
        head = "T: some text\n" + CHATML_HEAD
        check(result, byte_tokenizer(reads), head, "yo<|im_end|>", "\n")


def test_templates_that_loop_over_parts() -> None:
    looping = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    for content in ("yo", [{"type": "text", "text": "yo"}], [{"type": "text", "text": "y"}, "o"]):
        record = {"messages": [USER, {**YO, "content": content}]}
        for template in (looping, CHATML):
            tokenizer = byte_tokenizer(template)
            check(tokenize_chat(record, tokenizer), tokenizer, CHATML_HEAD, "yo<|im_end|>", "\n")


def test_none_beside_a_call_is_given_so_that_the_call_arrives() -> None:
    """Templates that ask for None, and templates that print it."""
    asks = CALLS.replace(
        "{{ m.content }}{% for", "{% if m.content is not none %}{{ m.content }}{% else %}{% for"
    ).replace("{% endfor %}<", "{% endfor %}{% endif %}<")
    for template in (asks, CALLS):
        for content in (None, ""):
            record = with_call()
            record["messages"][1]["content"] = content
            tokenizer = byte_tokenizer(template)
            turn = '<call>f {"a": "é"}</call><|im_end|>'
            check(tokenize_chat(record, tokenizer), tokenizer, CHATML_HEAD, turn, "\n")


@pytest.mark.parametrize(
    "text", ['{"a":1,  "b": "\\u00e9"}', '{"a": "1", "a": "2"}', '{"a": null}']
)
def test_argument_strings_stay_byte_for_byte(text: str) -> None:
    tokenizer = byte_tokenizer(CALLS)
    result = tokenize_chat(with_call(arguments=text), tokenizer)
    check(result, tokenizer, CHATML_HEAD, f"<call>f {text}</call><|im_end|>", "\n")


def test_repeated_keys_are_not_lost_in_a_mapping() -> None:
    for template in (TAGS, NO_TAGS):  # both write the JSON of a mapping
        tokenizer = byte_tokenizer(template)
        result = tokenize_chat(with_call(arguments='{"a": "1", "a": "2"}'), tokenizer)
        turn = '<calls>f {"a": "1", "a": "2"}<|im_end|>'
        check(result, tokenizer, HEAD, turn, "\n")
        longer = with_call(arguments='{"a": "1", "a": "2"}')["messages"] + [USER, YO]
        result = tokenize_chat({"messages": longer}, tokenizer)
        head = "\n" + HEAD.removeprefix("<s>")
        check(result, tokenizer, HEAD, turn, head, "yo<|im_end|>", "\n")


def test_repeated_keys_are_not_lost_where_each_argument_is_written_alone() -> None:
    call = "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"
    template = CALLS.replace(" {{ c.function.arguments }}", call)
    assert template != CALLS
    tokenizer = byte_tokenizer(template)
    result = tokenize_chat(with_call(arguments='{"a": "1", "a": "2"}'), tokenizer)
    check(result, tokenizer, CHATML_HEAD, "<call>f a=1 a=2</call><|im_end|>", "\n")


def test_none_in_arguments_stays_unless_arrow_put_it_there() -> None:
    tokenizer = byte_tokenizer(TAGS)
    record = with_call(arguments={"a": None, "b": "é"})
    result = tokenize_chat(record, tokenizer)
    check(result, tokenizer, HEAD, '<calls>f {"a": null, "b": "é"}<|im_end|>', "\n")
    rows, _ = tokenize_chat_dataset(
        Dataset.from_list([record, with_call(arguments={"a": "x"})]), tokenizer
    )
    texts = [tokenizer.decode(ids) for ids in rows["input_ids"]]
    assert '<calls>f {"b": "é"}<|im_end|>' in texts[0]
    assert '<calls>f {"a": "x"}<|im_end|>' in texts[1]


def test_arguments_of_a_template_that_prints_python_are_given_as_text() -> None:
    tokenizer = byte_tokenizer(CALLS)
    result = tokenize_chat(with_call(arguments={"a": "é", "n": 1}), tokenizer)
    check(result, tokenizer, CHATML_HEAD, '<call>f {"a": "é", "n": 1}</call><|im_end|>', "\n")


def test_arguments_without_strings_are_not_printed_as_python_either() -> None:
    tokenizer = byte_tokenizer(CALLS)
    result = tokenize_chat(with_call(arguments={"n": 1}), tokenizer)
    check(result, tokenizer, CHATML_HEAD, '<call>f {"n": 1}</call><|im_end|>', "\n")


def test_argument_strings_are_not_wrapped_in_braces_or_quotes() -> None:
    """As Gemma 4: the template writes the items of a mapping between its own braces."""
    items = (
        "{{ '{' }}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}"
        "{% endif %}{{ '}' }}"
    )
    tokenizer = byte_tokenizer(CALLS.replace("{{ c.function.arguments }}", items))
    result = tokenize_chat(with_call(), tokenizer)
    check(result, tokenizer, CHATML_HEAD, "<call>f {a:é}</call><|im_end|>", "\n")


@pytest.mark.parametrize("place", ["{{ m.content }}", "{% if add_gen"])
def test_templates_that_depend_on_the_text_of_a_message(place: str) -> None:
    for depends in ("'loud' if 'b' in {} else 'soft'", "'loud' if 'b' in {}"):
        written = "{{ " + depends.format("messages[-1].content") + " }}" + place
        refused(TWO, CHATML.replace(place, written), "or depends on its text")


def test_quotes_and_tags_at_the_edges_are_text_too() -> None:
    quoted = chat("user: hi", 'assistant: "yo" <|im_end|>')
    tokenizer = byte_tokenizer(CHATML)
    result = tokenize_chat(quoted, tokenizer)
    check(result, tokenizer, CHATML_HEAD, '"yo" <|im_end|><|im_end|>', "\n")
    stripped = CHATML.replace("{{ m.content }}", "{{ m.content.strip('\"') }}")
    refused(quoted, stripped, r"changes messages\[1\] content")


def test_thinking_inside_the_content_is_a_part_of_its_own() -> None:
    inside = chat("user: hi", "assistant: <think>\nhm\n</think>\n\nyo")
    tokenizer = byte_tokenizer(CHATML)
    turn = "<think>\nhm\n</think>\n\nyo<|im_end|>"
    check(tokenize_chat(inside, tokenizer), tokenizer, CHATML_HEAD, turn, "\n")
    answers = CHATML.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    )
    refused(inside, answers, r"messages\[1\]: .* drops its thinking inside content")


def test_numbers_in_arguments_must_arrive() -> None:
    keys = CALLS.replace(
        "{{ c.function.arguments }}",
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v if v is string }}{% endfor %}",
    )
    refused(with_call(arguments={"a": "x", "n": 17}), keys, r"drops the value 17 of its arguments")


# ---- where a turn begins


def test_a_prompt_that_opens_thinking_where_there_is_none() -> None:
    opens = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    refused(TWO, opens, r"messages\[1\]: .* the model would see '.*<think>\\n', the text has '.*yo")
    switched = opens.replace("<think>\n", "{{ '<think>\n' if enable_thinking is not false }}")
    tokenizer = byte_tokenizer(switched)
    plain = tokenize_chat(TWO, byte_tokenizer(CHATML))
    assert tokenize_chat(TWO, tokenizer) == plain  # the prompt of a model that does not think


def test_a_prompt_without_a_header_is_refused() -> None:
    refused(
        TWO,
        CHATML[: CHATML.index("{% if add_gen")],
        r"messages\[1\]: the generation prompt .* no header after a message of the user; merge",
    )
    says = for_assistant("BOT: {{ m.content }}<|im_end|>", "YOU: {{ m.content }}\n")
    refused(
        TWO, f"{{% for m in messages %}}{says}{{% endfor %}}", "no header after a .* user; merge"
    )
    silent = CHATML.replace(
        "add_generation_prompt", "add_generation_prompt and messages[-1].role == 'user'"
    )
    twice = {"messages": [USER, YO, YO]}
    refused(twice, silent, r"messages\[2\]: .* no header after a message of the assistant; merge")
    after_tool = {"messages": [USER, YO, {"role": "tool", "content": "r"}, YO]}
    refused(after_tool, silent, r"messages\[3\]: .* no header after a message of the tool; merge")
    result = tokenize_chat({"messages": [USER, YO, USER, YO]}, byte_tokenizer(silent))
    assert result["skip_reason"] == ""


def test_messages_in_another_order_are_refused() -> None:
    for train_on in ("all", "last", "each"):
        reverse = CHATML.replace("in messages", "in messages | reverse")
        refused(chat("user: hi", "assistant: yo"), reverse, "differently", train_on=train_on)


def test_a_turn_follows_the_prompt_of_inference() -> None:
    """As gpt-oss: thinking before a call is dropped once the answer is there, not before."""
    shown = "messages[-1].tool_calls or messages[-1].role == 'tool'"
    thought = f"{{% if m.tool_calls and ({shown}) %}}({{{{ m.reasoning_content }}}}){{% endif %}}"
    tokenizer = byte_tokenizer(CALLS.replace("{{ m.content }}", thought + "{{ m.content }}"))
    messages = with_call()["messages"]
    messages[1] |= {"content": "", "reasoning_content": "hm"}
    messages += [{"role": "tool", "content": "r"}, YO]
    examples = tokenize_chat({"messages": messages}, tokenizer, ChatOptions(train_on="each"))
    texts = [tokenizer.decode(example["input_ids"]) for example in examples]
    call = '(hm)<call>f {"a": "é"}</call><|im_end|>\n'
    assert len(texts) == 2
    assert call in texts[0]
    assert call in texts[1]  # though the template drops it from the whole conversation
    assert texts[1].endswith("assistant\nyo<|im_end|>\n")


def test_headers_inside_generation_tags_are_not_trained() -> None:
    message = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    tokenizer = byte_tokenizer(
        CHATML.replace(message, for_assistant(f"{TAG}{message}{END}", message))
    )
    result = tokenize_chat(chat("user: hi", "assistant: yo"), tokenizer)
    check(result, tokenizer, CHATML_HEAD, "yo<|im_end|>", "\n")


def test_an_added_token_that_takes_white_space_is_not_trained() -> None:
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer(
        CHATML.replace("assistant\n{% endif", "assistant{% endif").replace(
            "{{ m.role }}\n", "{{ m.role }}"
        )
    )
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant", "<|assistant|>"
    ).replace("<|im_start|>{{ m.role }}", "<|{{ m.role }}|>")
    tokenizer.add_tokens([AddedToken("<|assistant|>", rstrip=True, special=True)])
    result = tokenize_chat(chat("user: hi", "assistant:  yo"), tokenizer)
    pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
    assert tokenizer.decode([i for i, kept in pairs if kept]) == "yo<|im_end|>"


# ---- where a turn ends


def test_nothing_after_the_end_of_turn_is_trained() -> None:
    for tail in ("\n<s>", "<s>\n", "\n\n"):
        template = CHATML.replace("<|im_end|>\n", "<|im_end|>" + tail)
        tokenizer = byte_tokenizer(template)
        head = CHATML_HEAD.replace("<|im_end|>\n", "<|im_end|>" + tail)
        result = tokenize_chat(chat("user: hi", "assistant: yo"), tokenizer)
        check(result, tokenizer, head, "yo<|im_end|>", tail)
        twice = tokenize_chat(chat("user: hi", "assistant: yo", "assistant: b"), tokenizer)
        assert not twice["skip_reason"]


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"), "yo<|im_end|>"),
        (
            CHATML.replace("{% endif %}", "{% else %}<|im_start|>system\nhm<|im_end|>{% endif %}"),
            "yo<|im_end|>",
        ),
        (CALLS.replace("<|im_end|>\n", "<|im_end|>it<|im_start|>"), None),
        (CHATML.replace("<|im_end|>", "<|im_start|><|im_end|>"), "yo<|im_start|><|im_end|>"),
        (CHATML.replace("<|im_end|>", "<|eos|><|im_end|>"), "yo<|eos|>"),
        (CHATML.replace("<|im_end|>", "<|im_end|><|eos|><|eos|>"), "yo<|im_end|><|eos|>"),
    ],
)
def test_what_begins_messages_does_not_end_a_turn(template: str, trained: str | None) -> None:
    """The last token does, of a tokenizer without EOS, or the EOS before it."""
    tokenizer = byte_tokenizer(template)
    if "<|eos|>" in template:
        tokenizer.add_special_tokens({"eos_token": "<|eos|>"})
    record = chat("user: hi", "assistant: yo")
    if trained is None:
        for other in (record, with_call()):
            refused(other, template, "writes no token that ends this turn")
        return
    result = tokenize_chat(record, tokenizer)
    pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
    assert tokenizer.decode([i for i, kept in pairs if kept]) == trained


def test_an_end_of_turn_that_comes_with_the_next_message() -> None:
    """As GLM-4.5: generation stops at the token of the next role."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt }}"
    )
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<|system|>"], special_tokens=True)
    result = tokenize_chat(TWO, tokenizer)
    head = "<|user|>hi<|assistant|>"
    check(result, tokenizer, head, "yo<|user|>", "a<|assistant|>", "b<|user|>")
    again = tokenize_chat(TWO, tokenizer)  # from what is known about the template
    assert again == result
    tokenizer.chat_template = template.replace(
        "{{ m.content }}", "{{ m.reasoning_content if loop.last }}{{ m.content }}"
    )
    result = tokenize_chat(thinking("hm"), tokenizer)  # though a next question drops the thought
    check(result, tokenizer, head, "hmanswer 0<|user|>")
    tokenizer.chat_template = template
    for follows in ("assistant: c", "system: c"):
        record = chat("user: hi", "assistant: yo", follows, "user: a", "assistant: b")
        with pytest.raises(DataError, match=r"messages\[1\]: .* no token that ends this turn"):
            tokenize_chat(record, tokenizer)


def test_what_closes_a_tag_of_the_turn_does_not_end_it() -> None:
    text = for_assistant("<|start_text|>{{ m.content }}<|end_text|>", "{{ m.content }}")
    template = CHATML.replace("{{ m.content }}", text)
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(["<|start_text|>", "<|end_text|>"], special_tokens=True)
    result = tokenize_chat(chat("user: hi", "assistant: yo"), tokenizer)
    check(result, tokenizer, CHATML_HEAD, "<|start_text|>yo<|end_text|><|im_end|>", "\n")


# ---- train_on


def test_each_gives_one_example_per_turn_that_is_rewritten() -> None:
    tokenizer = byte_tokenizer(THINKS)
    record = thinking("A", "B")
    refused(record, THINKS, r"messages\[1\]: .* drops its reasoning_content; pass train_on='each'")
    first, second = tokenize_chat(record, tokenizer, ChatOptions(train_on="each"))
    check(first, tokenizer, CHATML_HEAD, "<think>\nA\n</think>\nanswer 0<|im_end|>", "\n")
    context = CHATML_HEAD + "answer 0<|im_end|>\n" + CHATML_HEAD
    check(second, tokenizer, context, "<think>\nB\n</think>\nanswer 1<|im_end|>", "\n")
    assert tokenize_chat(record, tokenizer, ChatOptions(train_on="last")) == second
    kept = tokenize_chat(
        record, tokenizer, ChatOptions(chat_template_kwargs={"preserve_thinking": True})
    )
    assert sum(kept["loss_mask"]) == sum(first["loss_mask"]) + sum(second["loss_mask"])


def test_each_merges_what_a_later_turn_continues() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert tokenize_chat(TWO, tokenizer, ChatOptions(train_on="each")) == [
        tokenize_chat(TWO, tokenizer)
    ]
    some = thinking("A", None, "B")
    first, second = tokenize_chat(some, byte_tokenizer(THINKS), ChatOptions(train_on="each"))
    runs = [sum(b > a for a, b in zip([0, *e["loss_mask"]], e["loss_mask"], strict=False))
            for e in (first, second)]  # fmt: skip
    assert runs == [1, 2]  # the second turn is a prefix of the third


def test_a_cure_that_works_is_named() -> None:
    only_kept = THINKS.replace("loop.last or ", "")
    message = (
        r"drops its reasoning_content; pass chat_template_kwargs=\{'preserve_thinking': True\}$"
    )
    refused(thinking("A"), only_kept, message)
    refused(thinking("A"), only_kept, message, train_on="last")
    refused(thinking("A"), only_kept, message, train_on="each")


def test_each_in_a_dataset_says_which_record() -> None:
    tokenizer = byte_tokenizer(THINKS)
    records = [chat("user: hi"), thinking("A", "B"), thinking("C")]
    rows, skips = tokenize_chat_dataset(
        Dataset.from_list(records), tokenizer, ChatOptions(train_on="each")
    )
    assert rows["record_index"] == [1, 1, 2]
    assert rows.features["record_index"].dtype == "int64"
    assert skips == {"no_assistant_turn": 1}
    expected = [
        tokenize_chat(record, tokenizer, ChatOptions(train_on="each")) for record in records[1:]
    ]
    assert rows["loss_mask"] == [row["loss_mask"] for found in expected for row in found]


def test_each_of_a_record_that_is_skipped() -> None:
    tokenizer = byte_tokenizer(THINKS)
    [row] = tokenize_chat(chat("user: hi"), tokenizer, ChatOptions(train_on="each"))
    assert row["skip_reason"] == "no_assistant_turn"
    for overflow, reason in (("truncate", "nothing_left_after_truncation"), ("drop", "too_long")):
        options: Any = {"train_on": "each", "max_length": 5, "overflow": overflow}
        [row] = tokenize_chat(thinking("A", "B"), tokenizer, ChatOptions(**options))
        assert row["skip_reason"] == reason


# ---- generation tags


def test_tags_that_disagree_are_refused() -> None:
    text = "{{ m.content }}"
    half = for_assistant(TAG + "{{ m.content[:1] }}" + END + "{{ m.content[1:] }}", text)
    refused(TWO, CHATML.replace(text, half), r"messages\[1\]: ")
    nothing = for_assistant(TAG + "x" + END + text, text)  # holds no text of the record
    result = tokenize_chat(TWO, byte_tokenizer(CHATML.replace(text, nothing)))
    assert result["skip_reason"] == "no_trained_tokens"
    last = f"{{% if loop.last %}}{TAG}{text}{END}{{% else %}}{text}{{% endif %}}"
    last_only = CHATML.replace(text, last)
    refused(TWO, last_only, r"messages\[1\]: the \{% generation %\} tags .* leave out a part")
    assert len(tokenize_chat(TWO, byte_tokenizer(last_only), ChatOptions(train_on="each"))) == 2
    everyone = "{% generation %}" + CHATML + "{% endgeneration %}"
    refused(
        TWO,
        everyone,
        r"messages\[0\]: the \{% generation %\} tags .* hold the text of the role 'user'",
    )


def test_tags_in_a_comment_are_no_tags() -> None:
    plain = tokenize_chat(TWO, byte_tokenizer(CHATML))
    commented = "{# {% generation %} is not used #}" + CHATML
    assert tokenize_chat(TWO, byte_tokenizer(commented)) == plain


# ---- other text


def test_private_use_characters_are_refused() -> None:
    refused(chat("user: hi", "assistant: \U00100001"), CHATML, "private-use characters .*; replace")


def test_renderings_do_not_grow_with_the_turns() -> None:
    """One rendering per record once the template and the shape of the record are known."""
    tokenizer = byte_tokenizer(CHATML)
    counts = []
    for turns in (4, 4, 40):
        record = {"messages": [USER, YO] * turns}
        with patch.object(
            ChatTemplate, "_render", autospec=True, side_effect=ChatTemplate._render
        ) as spy:
            tokenize_chat(record, tokenizer)
        counts.append(spy.call_count)
    assert counts[1:] == [1, 2]
