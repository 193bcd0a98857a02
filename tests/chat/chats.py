"""Small records, templates and tokenizers with a token per byte, and checks of what is trained."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from torch_collate_kit.chat import ChatOptions, tokenize_chat
from torch_collate_kit.errors import DataError

RENDER = "transformers.utils.chat_template_utils.render_jinja_template"
TAG, END = "{% generation %}", "{% endgeneration %}"
TAGS = """{{- bos_token -}}
{%- if tools -%}{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
    {{- message.content -}}
    {%- if 'tool_calls' in message -%}
      {{- '<calls>' -}}
      {%- for call in message.tool_calls -%}
        {{- call.function.name + ' ' + (call.function.arguments | tojson) -}}
      {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\n' -}}
  {%- else -%}
    {{- message.content + (mark or '') + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
NO_TAGS = TAGS.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
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
CHATML_HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
HEAD = "<s>" + CHATML_HEAD  # of TAGS and NO_TAGS


def for_assistant(text: str, other: str) -> str:
    """A template that writes ``text`` for the assistant's messages."""
    return f"{{% if m.role == 'assistant' %}}{text}{{% else %}}{other}{{% endif %}}"


# ---- records


def chat(*turns: str, **columns: Any) -> dict[str, Any]:
    """Return the record of messages written as "user: hi"."""
    messages = [dict(zip(("role", "content"), t.split(": ", 1), strict=True)) for t in turns]
    return {"messages": messages, **columns}


USER = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}
SAID = chat("user: hi", "assistant: yo")
TWO = chat("user: hi", "assistant: yo", "user: a", "assistant: b")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


def with_call(**changes: Any) -> dict[str, Any]:
    call = {**CALL, "function": {**CALL["function"], **changes}}
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def thinking(*thoughts: str | None) -> dict[str, Any]:
    """A conversation in which the assistant thinks before some answers."""
    turns = [
        [USER, {**YO, "content": f"answer {i}", "reasoning_content": thought}]
        for i, thought in enumerate(thoughts)
    ]
    return {"messages": [message for turn in turns for message in turn]}


# ---- tokenizers

MARKS = ["<|im_start|>", "<|im_end|>"]


def byte_tokenizer(template: str | None) -> Any:
    """One token per byte, and a post-processor that would add a second BOS if it were let."""
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def slow_tokenizer(template: str) -> Any:
    tokenizer = ByT5Tokenizer(bos_token="<s>")
    tokenizer.add_tokens(["<s>", *MARKS], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


# ---- what is trained


def tokenize(record: Any, tokenizer: Any, **options: Any) -> Any:
    """Return what tokenize_chat does; a template stands for a byte tokenizer with it."""
    tokenizer = byte_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return tokenize_chat(record, tokenizer, ChatOptions(**options))


def trained_ids(result: dict[str, Any]) -> list[int]:
    pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
    return [token for token, kept in pairs if kept]


def trained_text(result: dict[str, Any], tokenizer: Any) -> str:
    return str(tokenizer.decode(trained_ids(result), clean_up_tokenization_spaces=False))


def check(result: dict[str, Any], tokenizer: Any, *parts: str) -> None:
    """The parts are untrained, trained, untrained, ... text."""
    ids: list[int] = []
    mask: list[int] = []
    for i, part in enumerate(parts):
        ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        mask += [i % 2] * (len(ids) - len(mask))
    assert tokenizer.decode(result["input_ids"]) == tokenizer.decode(ids)
    assert result == {
        "input_ids": ids, "loss_mask": mask, "num_cut_tokens": 0, "skip_reason": ""
    }  # fmt: skip


def check_text(record: Any, template: str, *parts: str, **options: Any) -> None:
    """The record with a byte tokenizer gives these parts."""
    tokenizer = byte_tokenizer(template)
    check(tokenize(record, tokenizer, **options), tokenizer, *parts)


def refused(record: Any, tokenizer: Any, message: str, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        tokenize(record, tokenizer, **options)
