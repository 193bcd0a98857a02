# ruff: noqa: E501
"""Write docs/chat_templates.md: what is trained with each chat template that TRL ships.

    python website/chat_templates.py

No template's text is on the page: parts, end tokens and refusals alone.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from torch_collate_kit import ChatOptions, DataError, tokenize_chat
from torch_collate_kit.chat.preview import CASES, byte_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "chat_templates.md"
SHOWN = {"one turn": "plain", "thinking": "thinking", "tool call": "tool call"}
PARTS = {"Hello!": "text", "It is noon.": "text", "A greeting.": "thinking", "get_time": "call"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HEAD = """# Chat templates

What `tokenize_chat` trains with each of the {count} chat templates that TRL {version} ships: the parts of the assistant's turns in a plain chat, one with
thinking and one with a tool call, and the token that ends the last turn. Where a template would be trained wrongly the chat is refused; the reasons
are below the table. Written by `python website/chat_templates.py`; `torch-collate-kit template NAME` shows your own.

| template | plain | thinking | tool call | end token |
| --- | --- | --- | --- | --- |
"""


def outcome(case: str, template: str) -> tuple[str, str, str]:
    """Return the trained parts, the end token, and the refusal."""
    tokenizer: Any = byte_tokenizer(template)
    tools = [TOOL] if case == "tool call" else None
    try:
        options = ChatOptions(tools=tools)
        example = tokenize_chat({"messages": CASES[case]}, tokenizer, options)
    except DataError as error:
        return "refused", "", str(error)
    if example["skip_reason"]:
        return "refused", "", example["skip_reason"]
    pairs = zip(example["input_ids"], example["loss_mask"], strict=True)
    ids = [token for token, trained in pairs if trained]
    text = tokenizer.decode(ids)
    parts = dict.fromkeys(part for shown, part in PARTS.items() if shown in text)
    return (
        ", ".join(parts),
        next((t for t in map(tokenizer.decode, reversed(ids)) if t.strip()), ""),
        "",
    )


def page(folder: Path) -> str:
    """Return the page over the templates of a folder."""
    rows, reasons = [], []
    files = sorted(folder.glob("*.jinja"))
    for file in files:
        found = {case: outcome(case, file.read_text()) for case in SHOWN}
        ends = dict.fromkeys(f"`{end}`" for _, end, _ in found.values() if end)
        cells = [parts for parts, _, _ in found.values()]
        rows.append(
            f"| {file.stem} | {' | '.join(cells)} | {' '.join(ends).replace('|', chr(92) + '|')} |"
        )
        for case, (_, _, reason) in found.items():
            if reason:
                short = " ".join(reason.replace("|", "\\|").split())
                reasons.append(f"- **{file.stem}**, {SHOWN[case]}: {escaped(short[:300])}")
    head = HEAD.format(count=len(files), version=importlib.metadata.version("trl"))
    return (
        head + "\n".join(rows) + "\n\n## What is refused, and why\n\n" + "\n".join(reasons) + "\n"
    )


def escaped(text: str) -> str:
    """Return text without HTML tags and links of Markdown."""
    for letter, other in (("<", "&lt;"), ("[", "\\["), ("{", "&#123;"), ("`", "'")):
        text = text.replace(letter, other)
    return text


if __name__ == "__main__":
    spec: Any = importlib.metadata.distribution("trl").locate_file("trl/chat_templates")
    PAGE.write_text(page(Path(spec)))
    print(PAGE)
