"""The special tokens of a tokenizer, and how its chat template begins and ends turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from torch_collate_kit.chat.plain_turn import plain_turn
from torch_collate_kit.chat.template import ChatTemplate
from torch_collate_kit.errors import DataError
from torch_collate_kit.reporting.audit.roles import RoleTexts, role_texts

__all__ = ["THINKING_TAGS", "Vocabulary"]

THINKING_TAGS = ("think", "thinking", "reasoning")

_MEDIA_WORDS = ("image", "video", "audio", "vision", "pad")
_REPLACEMENT = "\ufffd"
_PARTIAL: WeakKeyDictionary[Any, dict[int, np.ndarray]] = WeakKeyDictionary()
_TAGS: WeakKeyDictionary[Any, dict[Any, set[tuple[int, ...]]]] = WeakKeyDictionary()
_TEXTS: WeakKeyDictionary[ChatTemplate, RoleTexts] = WeakKeyDictionary()
_QUESTION, _THINKING, _ANSWER = "Who?", "A thought", "An answer"


class Vocabulary:
    """Special tokens and headers of a tokenizer, of a processor's, or of None, which has none.

    They are ids; None, or an empty tuple, where the tokenizer does not have them.

    Raises:
        TypeError: something that cannot decode.
    """

    def __init__(self, tokenizer: Any = None, template_kwargs: dict[str, Any] | None = None):
        kwargs = dict(template_kwargs or {})
        if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
            own = getattr(tokenizer, "chat_template", None)
            own = own.get("default") if isinstance(own, dict) else own
            kwargs = {"chat_template": own, **kwargs} if own else kwargs
            tokenizer = tokenizer.tokenizer
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(
                f"tokenizer must be a tokenizer or a processor, got {type(tokenizer).__name__}; "
                "load it with AutoTokenizer.from_pretrained, or leave it out"
            )
        self.tokenizer = tokenizer
        self.size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        self.bos_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self.eos_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.pad_id: int | None = getattr(tokenizer, "pad_token_id", None)
        self.template: ChatTemplate | None = None
        if tokenizer is not None and (
            getattr(tokenizer, "chat_template", None) or kwargs.get("chat_template")
        ):
            self.template = ChatTemplate.of(tokenizer, kwargs, None)

    @cached_property
    def _plain_turn(self) -> tuple[str, str]:
        """Text before an answer, and the added token after it; "" if unknown."""
        if self.template is None:
            return "", ""
        turn = plain_turn(self.template)
        try:
            # What begins the next question ends an answer where nothing else does
            end = turn.end or next(iter(self.template.added_token.findall(turn.after)), "")
            return turn.header, end
        except DataError:
            return "", ""

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: EOS, and the one that the chat template writes."""
        ends = () if self.eos_id is None else (self.eos_id,)
        of_template = self.encode(self._plain_turn[1])
        return tuple(dict.fromkeys((*ends, *of_template))) if len(of_template) == 1 else ends

    @cached_property
    def roles(self) -> RoleTexts:
        """Texts that the chat template writes around messages."""
        if self.template is None:
            return RoleTexts()
        if self.template not in _TEXTS:
            bos = getattr(self.tokenizer, "bos_token", None) or ""
            _TEXTS[self.template] = role_texts(self.template, bos, self._plain_turn[1])
        return _TEXTS[self.template]

    @cached_property
    def role_ids(self) -> dict[tuple[int, ...], str]:
        """Role of each header of messages; empty where those before an answer are unknown."""
        answers = dict.fromkeys(self.roles.answer, "assistant")
        headers = {**dict(self.roles.others), **answers} if answers else {}
        by_ids = {self.encode(header): role for header, role in headers.items()}
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return {
            ids: role
            for ids, role in by_ids.items()
            if self.added_ids & {*ids} and unknown not in ids
        }

    @cached_property
    def late_end_ids(self) -> frozenset[int]:
        """Tokens that end an answer when something follows it."""
        ids = map(self.encode, self.roles.ends)
        return frozenset(of[0] for of in ids if len(of) == 1)

    @cached_property
    def _header(self) -> str:
        return self._plain_turn[0].partition("<think")[0].strip()

    @cached_property
    def header_ids(self) -> tuple[int, ...]:
        """Generation prompt of the chat template, without the white space around it."""
        return self.encode(self._header)

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """Generation prompt of the chat template."""
        return self.encode(self._plain_turn[0])

    @cached_property
    def repeats_header(self) -> bool:
        """Whether the model, too, writes the header: between thinking and answer (gpt-oss)."""
        if self.template is None or not self._header:
            return False
        turn = {"role": "assistant", "content": _ANSWER}
        turn |= dict.fromkeys(("thinking", "reasoning_content"), _THINKING)
        try:
            text = self.template.render([{"role": "user", "content": _QUESTION}, turn])
        except DataError:
            return False
        return self._header in text.partition(_THINKING)[2].partition(_ANSWER)[0]

    @cached_property
    def _added(self) -> dict[int, Any]:
        return getattr(self.tokenizer, "added_tokens_decoder", {})

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Tokens that were added to the vocabulary, such as all of a chat template."""
        return frozenset(self._added)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Special tokens, other than those that stand for a part of an image or a sound."""
        return frozenset(
            token
            for token, text in self._added.items()
            if text.special and not any(word in text.content.lower() for word in _MEDIA_WORDS)
        )

    @cached_property
    def template_ids(self) -> frozenset[int]:
        """Added tokens whose text is in the source of the chat template."""
        source = "" if self.template is None else self.template.source
        return frozenset(token for token, text in self._added.items() if text.content in source)

    def ids_of_tag(self, tag: str) -> set[tuple[int, ...]]:
        """Return the fewest ids that hold ``tag``, in several surroundings.

        A tag is given without its last character, which may be merged with what follows.
        """
        known = _TAGS.setdefault(self.tokenizer, {}) if self.tokenizer is not None else {}
        if (self.size, tag) not in known:
            known[self.size, tag] = set().union(
                *(
                    self.fewest_ids(f"{before}{tag}{after}a", tag, tag)
                    for before, after in itertools.product(("", "\n", " "), (">", ">\n"))
                )
            )
        return known[self.size, tag]

    def fewest_ids(self, text: str, first: str, last: str) -> set[tuple[int, ...]]:
        """Return the ids of ``text`` from the start of ``first`` to the end of ``last``, if any."""
        ids = self.encode(text)
        tails = self.texts([ids[i:] for i in range(len(ids))])
        heads = self.texts([ids[: i + 1] for i in range(len(ids))])
        starts = [i for i, tail in enumerate(tails) if first in tail]
        stops = [i + 1 for i, head in enumerate(heads) if last in head]
        return {ids[starts[-1] : stops[0]]} if starts and stops else set()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without special tokens around it; none without a tokenizer."""
        if not text or not callable(self.tokenizer):
            return ()
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def texts(self, spans: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each of these spans of ids, which the vocabulary must have."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.text(ids) for ids in spans]
        found: list[str] = backend.decode_batch(spans, skip_special_tokens=False)
        return found

    @cached_property
    def partial_ids(self) -> np.ndarray:
        """Ids, int64, that by themselves are no whole character."""
        if self.tokenizer is None or self.size is None:
            return np.empty(0, dtype=np.int64)
        known = _PARTIAL.setdefault(self.tokenizer, {})
        if self.size not in known:
            texts = self.texts([[token] for token in range(self.size)])
            known[self.size] = np.flatnonzero([_REPLACEMENT in text for text in texts])
        return known[self.size]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids; the ids as numbers without a tokenizer, or beyond its size."""
        is_known = self.size is None or not ids or (min(ids) >= 0 and max(ids) < self.size)
        try:
            if self.tokenizer is not None and is_known:
                return str(self.tokenizer.decode(list(ids)))
        except (IndexError, KeyError, OverflowError, TypeError):  # holes in a vocabulary
            pass
        return " ".join(map(str, ids))
