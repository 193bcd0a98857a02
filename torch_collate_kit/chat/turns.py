"""The characters of a rendered turn that the model writes: from its prompt to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch_collate_kit._checks import computed_once
from torch_collate_kit.chat.record_forms import text_of
from torch_collate_kit.chat.rendering import Rendering, preferred_style
from torch_collate_kit.chat.template import ChatTemplate, Messages, Refusal, Spans, num_shared

_MAX_KNOWN_TURNS, _MAX_KNOWN_FORMS = 10_000, 100
_ASKED, _TOOL_SAID = {"role": "user", "content": "Q"}, {"role": "tool", "content": "Q"}
_OPENING, _CLOSING = {"begin", "start", "open"}, {"end", "close"}
# For templates that render nothing without tools.
ANY_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}

_TEXTS = {"user": "Q", "assistant": "an answer"}


def turn_spans(rendering: Rendering, turns: list[int]) -> Spans:
    """Return the first character and the last + 1 that the model writes in each turn."""
    shapes = tuple(_shape(message, rendering.template.tags) for message in rendering.messages)
    key = (rendering.style, shapes, *turns)
    spans = [_known_span(rendering, *known) for known in rendering.known_turns.get(key, ())]
    if not spans:
        found = [_turn_span(rendering, turn, shapes) for turn in turns]
        spans = [span for span, _ in found]
        if all(known for _, known in found) and len(rendering.known_turns) < _MAX_KNOWN_FORMS:
            rendering.known_turns[key] = [known for _, known in found]
    tagged = rendering.tagged
    return spans if tagged is None else _confirmed(rendering, turns, spans, tagged)


def _turn_span(rendering: Rendering, turn: int, shapes: Sequence[Any]) -> tuple[Any, Any]:
    """Return the span of a turn, and its form in other texts, or None."""
    own = rendering.own.get(turn)
    if own is None:  # an empty turn: its place is known by its prompt alone
        start = _start(rendering, turn, None)
        return (start, _end(rendering, turn, start, start)), None
    first, last = rendering.occurrences[own[0]].start, rendering.occurrences[own[-1]].end
    known = rendering.template.known_turns
    key = _key(rendering, turn, shapes, first, last)
    if key is None or key not in known:
        start = _start(rendering, turn, first)
        first, last = rendering.occurrences[own[0]].start, rendering.occurrences[own[-1]].end
        end = _end(rendering, turn, start, last)
        if key is None or rendering.is_composed:
            return (start, end), None
        if len(known) >= _MAX_KNOWN_TURNS:
            known.clear()
        known[key] = first - start, rendering.text[last:end]
    found = (own[0], own[-1], *known[key])
    return _known_span(rendering, *found), found


def _known_span(rendering: Rendering, i: int, j: int, width: int, tail: str) -> Any:
    """Return the span that begins before the ``i``-th occurrence and ends after the ``j``-th."""
    start, last = rendering.occurrences[i].start - width, rendering.occurrences[j].end
    if not rendering.text.startswith(tail, last):  # the end of the last turn is appended
        rendering.text = rendering.text[:last] + tail
    return start, last + len(tail)


def _shape(message: dict[str, Any], tags: re.Pattern[str]) -> tuple[Any, ...]:
    """Return the features of a message that decide what a template writes around its texts."""
    content = text = message.get("content")
    types: tuple[Any, ...] = ()
    if isinstance(content, list):
        text = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(text_of(content), str):
            types = tuple(p.get("type") if isinstance(p, Mapping) else None for p in content)
    quoted = tags.findall(text) if text and ("<" in text or "[" in text) else ()
    calls = len(message.get("tool_calls", ()))
    has_thinking = bool(message.get("reasoning_content"))
    return message["role"], bool(content), has_thinking, calls, types, *quoted


def _key(
    rendering: Rendering, turn: int, shapes: Sequence[Any], first: int, last: int
) -> tuple[Any, ...] | None:
    """Return everything that a turn's prompt and end depend on; None if unknown."""
    if rendering.missing:  # what a template drops may depend on anything
        return None
    before, after = rendering.region(turn)
    asked = next((i for i in range(turn - 1, -1, -1) if shapes[i][0] == "user"), 0)
    return (
        rendering.style,
        rendering.text[before:first],
        rendering.text[last:after],
        tuple(shapes[max(turn - 1, 0) : turn + 2]),
        frozenset(shapes[:asked]),
        frozenset(shapes[asked:turn]),
        frozenset(shapes[turn + 1 :]),
        rendering.conversation.tools is None,
        rendering.conversation.documents is None,
    )


def _start(rendering: Rendering, turn: int, first: int | None) -> int:
    """Return the end of the prompt that the model sees before it writes this turn."""
    text, messages = rendering.text, rendering.messages
    plain = plain_turn(rendering.template)
    if turn == 0:  # no template renders an empty list: find what the prompt adds to this turn
        through = rendering.render(1)
        header = rendering.render(1, prompt=True)[len(through) :]
        where = text.rfind(header, 0, first) if first is not None else text.find(header)
        if not header or where < 0 or plain.lacks_header(text[: where + len(header)]):
            raise Refusal(
                "messages[0]: the chat template has no prompt before a first turn of the assistant",
                "begin the record with a user message",
            )
        return where + len(header)
    prompt = rendering.render(turn, prompt=True)
    if not text.startswith(prompt):
        # It may be the prompt of a model that is asked to think, or not to.
        switched = (
            rendering.render(turn, prompt=True, switch=s) for s in rendering.template.switches
        )
        fitting = next((other for other in switched if text.startswith(other)), None)
        if fitting is None:
            return _compose(rendering, turn, prompt, first)
        prompt = fitting
    start = len(prompt)
    if first is not None and not rendering.region(turn)[0] <= start <= first:
        raise Refusal(f"messages[{turn}]: the prompt before it ends inside another text")
    previous = messages[turn - 1]["role"]
    bare = previous == "tool" or not text[start:first].strip()
    # Where a plain answer follows the question at once (Mistral), so does a call or a thought.
    bare = bare or (previous == "user" and plain.has_no_header)
    no_header = plain.lacks_header(prompt) or not (
        (bare and previous in ("user", "tool")) or rendering.render(turn) != prompt
    )
    if no_header or (plain.end and prompt.rstrip().endswith(plain.end)):
        cause, way_out = "", "set a tokenizer.chat_template that adds it"
        if previous not in ("user", "tool"):
            way_out = (
                "merge messages that follow each other, or set another tokenizer.chat_template"
            )
        elif plain.end and rendering.template.added_token.search(prompt.rpartition(plain.end)[2]):
            cause = f": it ends every text with {prompt.rpartition(plain.end)[2]!r}"
            way_out = "set a tokenizer.chat_template that does so if add_generation_prompt is true"
        raise Refusal(
            f"messages[{turn}]: the generation prompt of the chat template adds no header after a "
            f"message of the {previous}{cause}",
            way_out,
        )
    return start


def _compose(rendering: Rendering, turn: int, prompt: str, first: int | None) -> int:
    """Put the last turn after its prompt, where earlier turns are written differently (gpt-oss)."""
    text = rendering.text
    same = num_shared(text, prompt)
    refusal = Refusal(
        f"messages[{turn}]: the chat template renders what comes before this turn differently once "
        f"it follows: the model would see {prompt[max(same - 20, 0) : same + 40]!r}, the text has "
        f"{text[max(same - 20, 0) : same + 40]!r}",
        "change the record, or set another tokenizer.chat_template",
    )
    before = rendering.render(turn)
    header = prompt[len(before) :] if prompt.startswith(before) else ""
    place = text.rfind(header, rendering.region(turn)[0], first) if header else -1
    if first is None or place < 0 or turn + 1 < len(rendering.messages):
        raise refusal
    if rendering.own[turn][-1] + 1 < len(rendering.occurrences):
        raise refusal  # another message comes after the last turn
    for part in rendering.parts:
        of_others = part.message < 0 or rendering.messages[part.message]["role"] != "assistant"
        escaped = json.dumps(part.core, ensure_ascii=False)[1:-1]
        if of_others and part.core not in prompt and escaped not in prompt:
            raise refusal
    rendering.move_last_turn(place + len(header), prompt)
    return len(prompt)


def _end(rendering: Rendering, turn: int, start: int, last: int) -> int:
    """Return the end of the token that ends the turn; refuse one that the turn contains, too."""
    alone = rendering.render(turn + 1)
    end = _end_of_turn(rendering, turn, alone, start, last)
    known = alone.rstrip() if end is None else alone[:end]
    if not rendering.text.startswith(known):
        raise Refusal(
            f"messages[{turn}]: the chat template renders this turn, or an earlier one, "
            "differently once more messages follow (does it drop thinking?)",
            "set a tokenizer.chat_template that does not rewrite earlier turns",
        )
    if end is None:
        end = _end_after(rendering, turn, known)
    *inside, stop = rendering.template.added_token.finditer(rendering.text, start, end)
    spans = [rendering.occurrences[i][1:] for i in rendering.own.get(turn, ())]
    for token in inside:
        if token[0] == stop[0] and not any(a <= token.start() < b for a, b in spans):
            raise Refusal(
                f"messages[{turn}]: the chat template writes {stop[0]!r}, which ends this turn, "
                "inside it, too",
                "set a tokenizer.chat_template that ends turns with an added token of their own",
            )
    return end


def _end_of_turn(rendering: Rendering, turn: int, alone: str, start: int, last: int) -> int | None:
    """Return the end of the turn's last token in ``alone``, a text that ends with the turn."""
    template, plain = rendering.template, plain_turn(rendering.template)
    tail = list(template.added_token.finditer(alone, last))
    end = None
    for token in tail:
        if token[0] == plain.end:
            end = token.end()
        if end is not None and token[0] in (template.eos_token, *plain.openers):
            break
    # Calls may have an end of their own. What closes a tag of the turn is not one.
    if end is not None or not tail or "tool_calls" not in rendering.messages[turn]:
        return end
    token = tail[-1]
    opened = {_tag_of(tag) for tag in template.added_token.findall(alone, start, token.start())}
    name, side = _tag_of(token[0])
    closes = side == "close" and ((name, "open") in opened or token[0][1] == "/")
    if closes or token[0] in plain.openers or alone[token.end() :].strip():
        return None
    # The end of every answer may follow where the next message is not a result (Apertus)
    more = template.added_token.match(rendering.text, token.end())
    is_whole = more is not None and rendering.text.startswith(alone[: token.end()])
    return more.end() if more and is_whole and more[0] == plain.end else token.end()


def _end_after(rendering: Rendering, turn: int, known: str) -> int:
    """Return the end of the token after ``known``: in the text, or before a next question."""
    template, messages = rendering.template, rendering.messages
    is_last = turn + 1 == len(messages)
    if is_last:
        follows, text = "user", rendering.render(turn + 1, then=_reply(rendering, turn))
        rest = text[len(known) :] if text.startswith(known) else plain_turn(template).after
    else:
        follows, rest = messages[turn + 1]["role"], rendering.text[len(known) :]
    token = template.added_token.match(rest, len(rest) - len(rest.lstrip()))
    header = plain_turn(template).header
    # What begins every message does not end one; nor is there a stop token before a system message.
    if token is None or not header or token[0] in header or follows not in ("user", "tool"):
        raise Refusal(
            f"messages[{turn}]: the chat template writes no token that ends this turn",
            "set a tokenizer.chat_template that ends it with an added token such as "
            f"{template.eos_token!r}",
        )
    if is_last:
        rendering.text = known + rest[: token.end()]
    return len(known) + token.end()


def _reply(rendering: Rendering, turn: int) -> Messages:
    """Return messages that may follow a turn: results of its calls, or a question."""
    said: Messages = [
        {**_TOOL_SAID, "name": call["function"]["name"], "tool_call_id": call.get("id", "")}
        for call in rendering.messages[turn].get("tool_calls", ())
    ]
    return [rendering.style.apply(message) for message in said or [_ASKED]]


def leaves_out(turn: int) -> Refusal:
    """Return the refusal of a turn that generation tags do not hold."""
    return Refusal(
        f"messages[{turn}]: the {{% generation %}} tags of the chat template leave out a part of "
        "this turn",
        "correct the tags, or remove them all",
    )


def _confirmed(rendering: Rendering, turns: list[int], spans: Spans, tagged: Spans) -> Spans:
    """Return the spans if generation tags agree about every text; [] if they mark nothing."""
    held = bytearray(len(rendering.text))
    for first, last in tagged:
        held[first:last] = b"\1" * (last - first)
    found = [
        (turn, held[rendering.occurrences[i].start : rendering.occurrences[i].end])
        for turn in turns
        for i in rendering.own.get(turn, ())
    ]
    if found and not any(1 in marks for _, marks in found):
        return []
    for turn, marks in found:
        if 0 in marks:
            raise leaves_out(turn)
    for part, start, end in rendering.occurrences:
        role = rendering.messages[part.message]["role"] if part.message >= 0 else "document"
        if role != "assistant" and 1 in held[start:end]:
            raise Refusal(
                f"messages[{part.message}]: the {{% generation %}} tags of the chat template hold "
                f"the text of the role {role!r}",
                "correct the tags, or remove them all",
            )
    return spans


def _tag_of(token: str) -> tuple[str, str]:
    """Return the name of a tag, and whether it opens or closes: ("tool_call", "close")."""
    words = re.split(r"[_▁ -]+", token.strip("<>[]|\uff5c/").lower())
    side = "open"
    ends_like_gemma = token.endswith("|>") and not token.startswith("<|")
    if token[1:2] == "/" or ends_like_gemma or _CLOSING & set(words):
        side = "close"
    name = "_".join(word for word in words if word not in _OPENING | _CLOSING)
    return name, side


def plain_turn(template: ChatTemplate) -> PlainTurn:
    """Return the facts of a template, one object per template, so that each is found once."""
    if template.plain_turn is None:
        template.plain_turn = PlainTurn(template)
    found: PlainTurn = template.plain_turn
    return found


class PlainTurn:
    """The texts of a template before and after an answer to a question, found on first use.

    Texts that the template cannot render are "".
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tools: list[dict[str, Any]] | None = None
        if "tools" in template.code and not self._text("user", "assistant"):
            self._tools = [ANY_TOOL]

    def _text(self, *roles: str, prompt: bool = False) -> str:
        style = preferred_style(self._template, self._tools)
        messages = [style.apply({"role": role, "content": _TEXTS[role]}) for role in roles]
        try:
            return self._template.render(messages, self._tools, prompt=prompt)
        except Refusal:
            return ""

    @computed_once
    def _asked(self) -> tuple[str, str]:
        """The text of the question, without and with the generation prompt."""
        return self._text("user"), self._text("user", prompt=True)

    @computed_once
    def _answered(self) -> tuple[str, str]:
        """The text before the answer to the question, and after it."""
        before, _, after = self._text("user", "assistant").rpartition(_TEXTS["assistant"])
        return before, after

    def begins_with(self, text: str) -> bool:
        """Return whether the template begins a conversation with a text."""
        return bool(text) and self._text("user", "assistant").startswith(text)

    @property
    def prompt(self) -> str:
        """The text of the question with the generation prompt."""
        return self._asked[1]

    @computed_once
    def header(self) -> str:
        """The text that the prompt adds to the question; "" if it changes the text before."""
        asked, prompt = self._asked
        return prompt[len(asked) :] if prompt.startswith(asked) else ""

    @computed_once
    def writes_no_end(self) -> bool:
        """True where no added token follows the answer that a text ends with."""
        before, closing = self._answered
        return bool(before) and not self._template.added_token.search(closing)

    @computed_once
    def after(self) -> str:
        """The text after the answer, with another question."""
        return self._text("user", "assistant", "user").partition(_TEXTS["assistant"])[2]

    @computed_once
    def has_no_header(self) -> bool:
        """True where the answer follows the text of the question at once."""
        asked, before = self._asked[0], self._answered[0]
        return bool(asked) and before.startswith(asked) and not before[len(asked) :].strip()

    def lacks_header(self, prompt: str) -> bool:
        """Return whether a prompt lacks the header, which only some messages end with.

        Command R7B, for example, writes most of the header with the question: the added token with
        which that text begins the header is looked for.
        """
        asked, end = self._asked[0], self.end
        asked = asked[: num_shared(*self._asked)]
        if not end or end not in asked:
            return False
        begun = self._template.added_token.search(asked.rpartition(end)[2])
        return begun is not None and begun[0] not in prompt.rpartition(end)[2]

    @computed_once
    def openers(self) -> list[str]:
        """The added tokens of the header; without one the last token before the answer."""
        added = self._template.added_token
        return added.findall(self.header) if self.header else added.findall(self._answered[0])[-1:]

    @computed_once
    def end(self) -> str | None:
        """The added token at which generation stops; None if the template does not tell.

        That is EOS, if the template writes it after the answer, or else the last added token before
        the next message or the end of the text. It is EOS where the answer cannot be rendered.
        """
        eos, bos, closing = self._template.eos_token, self._template.bos_token, self._answered[1]
        if not any(self._answered):
            return eos
        shared = num_shared(closing, self.after) if self.after else len(closing)
        tokens = self._template.added_token.finditer(closing)
        written = [token for token in tokens if token[0] == eos or token[0] != bos]
        # Some write other tokens after the last answer: one more (Phi-3), or another (gpt-oss).
        found = [t[0] for t in written if t.end() <= shared] or [t[0] for t in written]
        if eos in found:
            return eos
        while len(found) > 1 and found[-1] in self.openers and shared != len(closing):
            found.pop()  # the next message begins like the prompt that ends every text
        return found[-1] if found and found[-1] not in self.openers else None
