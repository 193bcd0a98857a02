"""Small conversations with the tokens marked that a chat template trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_collate_kit._checks import needed_package
from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_chat
from torch_collate_kit.errors import DataError

__all__ = ["CASES", "byte_tokenizer", "load_tokenizer", "preview", "verdict_table"]

_TAG = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|</?[A-Za-z|][^<>\s'\"{}]*>|\[/?[A-Z_]+\]"
)
_SHOWN = 150  # characters of a long untrained text, at each end
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|eot|>", "<|end|>"),
    *("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"),
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str | None, **parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **parts}


_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_time", "arguments": '{"city": "Lima"}'},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_RESULT = {"role": "tool", "name": "get_time", "tool_call_id": "abcdefghi", "content": "noon"}
# What a template is asked for, each in the smallest conversation that has it.
CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [_user("Hi."), _assistant("Hello!")],
    "system": [{"role": "system", "content": "Be kind."}, _user("Hi."), _assistant("Hello!")],
    "two turns": [_user("Hi."), _assistant("Hello!"), _user("Who?"), _assistant("Me.")],
    "tool call": [
        _user("What time is it?"),
        _assistant(None, tool_calls=[_CALL]),
        _RESULT,
        _assistant("It is noon."),
    ],
    "text beside a call": [
        _user("What time is it?"),
        _assistant("Let me see.", tool_calls=[_CALL]),
        _RESULT,
        _assistant("It is noon."),
    ],
    "thinking": [_user("Hi."), _assistant("Hello!", reasoning_content="A greeting.")],
    "thinking twice": [
        _user("Hi."),
        _assistant("Hello!", reasoning_content="A greeting."),
        _user("Who?"),
        _assistant("Me.", reasoning_content="A question."),
    ],
}


class _Verdict(NamedTuple):
    """The marked texts of a conversation in one mode, or the refusal."""

    texts: list[str]
    refusal: str = ""


def preview(name: str) -> str:
    """Return small conversations with the tokens marked that a template trains, as text.

    >>> preview("no/such/file.jinja")
    Traceback (most recent call last):
    FileNotFoundError: no/such/file.jinja does not exist
    """
    tokenizer = load_tokenizer(name)
    lines = [f"{name}: trained tokens are inside \u27e6 \u27e7", ""]
    for case in CASES:
        verdicts = _verdicts(tokenizer, case)
        mode = _first_mode(verdicts)
        if mode is None:
            lines += [f"{case}: refused", f"    {verdicts['each'].refusal}"]
        else:
            note = ", which trains no call" if _trains_no_call(case, mode) else ""
            lines.append(f"{case}: accepted with train_on='{mode}'{note}")
            lines += [f"    {text!r}" for text in verdicts[mode].texts]
            if verdicts["all"].refusal:
                lines.append(f"    all: {verdicts['all'].refusal}")
        lines.append("")
    return "\n".join(lines)


def verdict_table(names: Sequence[str]) -> str:
    """Return a Markdown table of templates x conversations.

    >>> print(verdict_table([]))  # doctest: +ELLIPSIS
    | template | one turn | system | two turns | ...
    """
    rows = [["template", *CASES], ["---"] * (len(CASES) + 1)]
    for name in names:
        tokenizer = load_tokenizer(name)
        rows.append([Path(name).stem, *(_cell(case, _verdicts(tokenizer, case)) for case in CASES)])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a folder or hub name, or make one up for a ``.jinja`` file."""
    transformers = needed_package("transformers", "the template command")
    if not name.endswith(".jinja"):
        try:
            return transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{name!r} is no .jinja file, and no tokenizer can be loaded from it: {error}"
            ) from error
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} does not exist")
    return byte_tokenizer(Path(name).read_text(encoding="utf-8"))


def byte_tokenizer(template: str) -> Any:
    """Make a tokenizer with one token per byte, and one for each tag in the template.

    >>> byte_tokenizer("<|end|>").tokenize("a<|end|>")
    ['a', '<|end|>']
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tags = sorted(set(_TAG.findall(template)))
    eos = next((end for end in _ENDS if end in tags), "</s>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    tokenizer.add_tokens(tags, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def _verdicts(tokenizer: Any, case: str) -> dict[str, _Verdict]:
    """Return the verdict of each mode, the one that trains most at once first."""
    messages = CASES[case]
    tools = [_TOOL] if any("tool_calls" in message for message in messages) else None
    return {mode: _judge(tokenizer, messages, tools, mode) for mode in ("all", "each", "last")}


def _first_mode(verdicts: dict[str, _Verdict]) -> str | None:
    return next((mode for mode, verdict in verdicts.items() if verdict.texts), None)


def _judge(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, mode: Any) -> _Verdict:
    options = ChatOptions(train_on=mode, tools=tools)
    try:
        found = tokenize_chat({"messages": messages}, tokenizer, options)
    except DataError as error:
        return _Verdict([], str(error))
    examples = found if mode == "each" else [found]
    if examples[0]["skip_reason"]:
        return _Verdict([], f"skipped: {examples[0]['skip_reason']}")
    return _Verdict([_marked(tokenizer, example) for example in examples])


def _marked(tokenizer: Any, example: dict[str, Any]) -> str:
    """Return the text of an example, with brackets around the runs of trained tokens."""
    runs: list[tuple[int, list[int]]] = []
    for token, kept in zip(example["input_ids"], example["loss_mask"], strict=True):
        if not runs or runs[-1][0] != kept:
            runs.append((kept, []))
        runs[-1][1].append(token)
    texts = ((kept, tokenizer.decode(ids)) for kept, ids in runs)
    return "".join(f"\u27e6{text}\u27e7" if kept else _cut(text) for kept, text in texts)


def _cut(text: str) -> str:
    """Return the text without its middle, if it is long."""
    num_cut = len(text) - 2 * _SHOWN
    if num_cut <= _SHOWN:
        return text
    return f"{text[:_SHOWN]} [... {num_cut:,} characters ...] {text[-_SHOWN:]}"


def _trains_no_call(case: str, mode: str) -> bool:
    """Return whether the call is context only: the last turn is the answer to its result."""
    return mode == "last" and any("tool_calls" in message for message in CASES[case])


def _cell(case: str, verdicts: dict[str, _Verdict]) -> str:
    """Return the mode that accepts the conversation, or why it is refused."""
    mode = _first_mode(verdicts)
    if mode is None:
        return "refused: " + _short(verdicts["each"].refusal)
    return f"{mode}, no call" if _trains_no_call(case, mode) else mode


def _short(reason: str) -> str:
    """Return the cause in a few words, for the table."""
    for words, short in _SHORT.items():
        if words in reason:
            return short
    return reason.partition(";")[0][:60]


_SHORT = {
    "cannot render": "cannot render it",
    "drops its thinking": "drops thinking",
    "drops its reasoning_content": "drops thinking",
    "drops its content": "drops text",
    "drops messages[1] tool_calls": "drops calls",
    "drops its tool_calls": "drops calls",
    "drops the tool": "drops tools",
    "content": "drops text",
    "tool_calls": "changes calls",
    "differently": "another prompt",
    "no token that ends": "no end of turn",
    "adds no header": "no header",
}
