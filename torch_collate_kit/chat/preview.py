"""Small conversations with the tokens marked that a chat template trains."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torch_collate_kit._checks import needed_package
from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_chat
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.trees import trees_of

_TAG = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|</?[A-Za-z|][^<>\s'\"{}]*>|\[/?[A-Z_]+\]"
)
_SHOWN = 150  # characters of a long untrained text, at each end
_ENDS = "<|im_end|> <|eot_id|> <end_of_turn> <turn|> <|return|> <|eot|> <|end|>"
_ENDS += " <|END_OF_TURN_TOKEN|> <end_of_utterance> <\uff5cend\u2581of\u2581sentence\uff5c> </s>"
_GET_TIME = {"name": "get_time", "arguments": '{"city": "Lima"}'}
_CALL = {"id": "abcdefghi", "type": "function", "function": _GET_TIME}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
_TIME = {"name": "get_time", "description": "The time in a city.", "parameters": _CITY}
_TOOL = {"type": "function", "function": _TIME}
_HI, _HELLO = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}
_WHO, _ME = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}
_ASKED = {"role": "user", "content": "What time is it?"}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULTS = [
    {"role": "tool", "name": "get_time", "tool_call_id": "abcdefghi", "content": "noon"},
    {"role": "assistant", "content": "It is noon."},
]
_THOUGHT = {**_HELLO, "reasoning_content": "A greeting."}
# What a template is asked for, each in the smallest conversation that has it.
CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [_HI, _HELLO],
    "system": [{"role": "system", "content": "Be kind."}, _HI, _HELLO],
    "two turns": [_HI, _HELLO, _WHO, _ME],
    "tool call": [_ASKED, _CALLED, *_RESULTS],
    "text beside a call": [_ASKED, {**_CALLED, "content": "Let me see."}, *_RESULTS],
    "thinking": [_HI, _THOUGHT],
    "thinking twice": [_HI, _THOUGHT, _WHO, {**_ME, "reasoning_content": "A question."}],
}
_CAUSES = {  # by the words of a refusal, the first that fits
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


def preview(name: str) -> str:
    """Return small conversations with the tokens marked that a template trains, as text."""
    tokenizer = load_tokenizer(name)
    lines = [f"{name}: trained tokens are inside \u27e6 \u27e7", ""]
    for case in CASES:
        texts, refusals = _verdicts(tokenizer, case)
        for mode in list(texts)[:1]:
            note = ", which trains no call" if _trains_no_call(case, mode) else ""
            note = _shared_tokens(tokenizer, case) if mode == "each" else note
            lines.append(f"{case}: accepted with train_on='{mode}'{note}")
            lines += [f"    {text!r}" for text in texts[mode]]
            lines += [f"    all: {refusals['all']}"] if "all" in refusals else []
        if not texts:
            lines += [f"{case}: refused", f"    {refusals['each']}"]
        lines.append("")
    return "\n".join(lines)


def verdict_table(names: Sequence[str]) -> str:
    """Return a Markdown table of templates and conversations: the mode that accepts each."""
    rows = [["template", *CASES], ["---"] * (len(CASES) + 1)]
    for name in names:
        tokenizer = load_tokenizer(name)
        cells = [Path(name).stem]
        for case in CASES:
            texts, refusals = _verdicts(tokenizer, case)
            mode = next(iter(texts), "")
            note = ", no call" if _trains_no_call(case, mode) else ""
            cells.append(mode + note if mode else "refused: " + _cause(refusals["each"]))
        rows.append(cells)
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a folder or hub name, or make one up for a ``.jinja`` file."""
    transformers = needed_package("transformers", "the template command")
    if not name.endswith(".jinja"):
        try:
            return transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{name!r} is not a .jinja file, and a tokenizer cannot be loaded from it: {error}"
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
    eos = next((end for end in _ENDS.split() if end in tags), "</s>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    tokenizer.add_tokens(tags, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def _verdicts(tokenizer: Any, case: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the marked texts of each mode that accepts, "all" first, and the refusals."""
    texts: dict[str, list[str]] = {}
    refusals: dict[str, str] = {}
    modes: tuple[Literal["all", "each", "last"], ...] = ("all", "each", "last")
    for mode in modes:
        options = ChatOptions(train_on=mode, tools=_tools_of(case))
        try:
            found = tokenize_chat({"messages": CASES[case]}, tokenizer, options)
        except DataError as error:
            refusals[mode] = str(error)
            continue
        examples = found if mode == "each" else [found]
        if reason := examples[0]["skip_reason"]:
            refusals[mode] = f"skipped: {reason}"
        else:
            texts[mode] = [_marked(tokenizer, example) for example in examples]
    return texts, refusals


def _shared_tokens(tokenizer: Any, case: str) -> str:
    """Return how many tokens of the examples of a case differ, as a note."""
    options = ChatOptions(train_on="each", group_turns=True, tools=_tools_of(case))
    segments = tokenize_chat({"messages": CASES[case]}, tokenizer, options)["input_ids"]
    lengths = [len(ids) for ids in segments]
    ids = np.fromiter(itertools.chain.from_iterable(segments), np.int32)
    offsets, example = np.append(0, np.cumsum(lengths)), np.array([0, len(segments)])
    num_cells = int(trees_of(ids, offsets, example).num_cells[0])
    cells = f"{num_cells} different tokens of {sum(lengths)} (group_turns=True)"
    return f": {len(segments)} examples, {cells}"


def _tools_of(case: str) -> list[Any] | None:
    return [_TOOL] if any("tool_calls" in message for message in CASES[case]) else None


def _trains_no_call(case: str, mode: str) -> bool:
    """Return whether the call is context only: the last turn is the answer to its result."""
    return mode == "last" and _tools_of(case) is not None


def _marked(tokenizer: Any, example: dict[str, Any]) -> str:
    """Return the text of an example, with brackets around the runs of trained tokens."""
    pairs = zip(example["loss_mask"], example["input_ids"], strict=True)
    runs = [
        (kept, tokenizer.decode([token for _, token in run]))
        for kept, run in itertools.groupby(pairs, key=itemgetter(0))
    ]
    return "".join(f"\u27e6{text}\u27e7" if kept else _cut(text) for kept, text in runs)


def _cut(text: str) -> str:
    """Return the text without its middle, if it is long."""
    num_cut = len(text) - 2 * _SHOWN
    if num_cut <= _SHOWN:
        return text
    return f"{text[:_SHOWN]} [... {num_cut:,} characters ...] {text[-_SHOWN:]}"


def _cause(refusal: str) -> str:
    """Return the cause in a few words, for the table."""
    causes = (cause for words, cause in _CAUSES.items() if words in refusal)
    return next(causes, refusal.partition(";")[0][:60])
