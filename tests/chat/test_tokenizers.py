"""The same characters are trained whatever cuts the text into tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, ByT5Tokenizer, PreTrainedTokenizerFast

from tests.chat.chats import MARKS, tokenize, trained_ids, trained_text
from tests.chat.conversations import CONVERSATIONS

END = "<|im_end|>"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}" + PROMPT
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)
NAMES = ["one turn", "five turns", "consecutive answers", "assistant first", "echo", "markup",
         "last turn by the user", "empty answer", "emoji", "combining marks", "right to left",
         "Chinese and Japanese", "white space", "line breaks first", "looks like a header",
         ]  # fmt: skip
CORPUS = [
    "assistant\n\nlion3 sleeps4 user\nzebra1 walks2\n\n",
    " \n lion3\n\nsleeps4  \n \U0001f981",
]


# ---- tokenizers


def wrapped(backend: Tokenizer) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.add_tokens(MARKS, special_tokens=True)
    return tokenizer


def byte_level(size: int = 340, *, words: bool = False) -> Any:
    """Byte-level BPE whose merges cross line breaks, words and spaces; or ``words``, as GPT-2's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 9, trainer)
    return wrapped(backend)


def metaspace(prepend_scheme: str) -> Any:
    """As SentencePiece: a mark for a space, bytes for what the vocabulary lacks."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    for text in ("▁", *"\nabcdefghijklmnopqrstuvwxyz1234567890", "▁l", "\n\n"):
        vocab.setdefault(text, len(vocab))
    model = models.BPE(
        vocab=vocab, merges=[("▁", "l"), ("\n", "\n")], byte_fallback=True, unk_token="<unk>"
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return wrapped(backend)


def llama_2_like() -> Any:
    """Spaces are replaced by a normalizer, which also puts one before the text."""
    tokenizer = metaspace("never")
    backend = tokenizer.backend_tokenizer
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = None
    return tokenizer


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    letters = sorted(set("".join(str(record) for record in CONVERSATIONS.values())))
    trainer = trainers.UnigramTrainer(
        vocab_size=400, initial_alphabet=letters, unk_token="<unk>", show_progress=False,
        special_tokens=["<unk>"],
    )  # fmt: skip
    backend.train_from_iterator(CORPUS + letters, trainer)
    return wrapped(backend)


FAST: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level,
    "GPT-2-like": lambda: byte_level(300, words=True),
    "Metaspace, first": lambda: metaspace("first"),
    "Metaspace, always": lambda: metaspace("always"),
    "Metaspace, never": lambda: metaspace("never"),
    "Llama-2-like": llama_2_like,
    "Unigram": unigram,
}
tokenizer_of = cache(lambda kind: FAST[kind]())


class PairingByT5(ByT5Tokenizer):
    """A slow tokenizer in which two line breaks are one token."""

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return super()._tokenize(text.replace("\n\n", "\1"))


def slow(kind: type[ByT5Tokenizer]) -> Any:
    tokenizer = kind()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    return tokenizer


# ---- whole conversations


def rendered(record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and from where to where in it the assistant writes, by hand."""
    text, spans = "", []
    messages = record["messages"]
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(message["content"] + END)))
        text += message["content"] + END + "\n"
    return text, spans


def expected(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], Any]:
    """Ids and mask: a token that has at least one character of the spans is trained, no other."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, [
        int(any(first < end and start < stop for start, end in spans))
        for first, stop in encoding.offsets
    ]


plain_and_tagged = pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])


@plain_and_tagged
@pytest.mark.parametrize("kind", FAST)
def test_the_same_characters_are_trained(kind: str, template: str) -> None:
    tokenizer = FAST[kind]()
    tokenizer.chat_template = template
    for name in NAMES:
        result = tokenize(CONVERSATIONS[name], tokenizer, allow_empty=True)
        wanted = expected(tokenizer, *rendered(CONVERSATIONS[name]))
        assert (result["input_ids"], result["loss_mask"]) == wanted, name


@given(
    st.text(st.sampled_from("\n lion3\u65e5\U0001f981\u0301"), min_size=1, max_size=60),
    st.integers(0, 60),
)
@pytest.mark.parametrize("kind", FAST)
def test_any_place_of_any_text(kind: str, text: str, cut: int) -> None:
    """Against the list of all offsets: a completion begins at any character."""
    start = cut % len(text)
    record = {"prompt": text[:start], "completion": text[start:]}
    ids, mask = expected(tokenizer_of(kind), text, [(start, len(text))])
    result = tokenize(record, tokenizer_of(kind), allow_empty=True)
    if any(mask[1:]):
        assert (result["input_ids"], result["loss_mask"]) == (ids, mask)
    else:
        assert result["skip_reason"] == "no_trained_tokens"


@plain_and_tagged
def test_bytes_of_a_slow_tokenizer(template: str) -> None:
    tokenizer = slow(ByT5Tokenizer)
    tokenizer.chat_template = template
    for name in NAMES:
        text, spans = rendered(CONVERSATIONS[name])
        ids, mask, done = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, kept in ((text[done:start], 0), (text[start:end], 1)):
                ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
                mask += [kept] * (len(ids) - len(mask))
            done = end
        result = tokenize(CONVERSATIONS[name], tokenizer, allow_empty=True)
        assert (result["input_ids"], result["loss_mask"]) == (ids, mask), name


@plain_and_tagged
def test_a_token_that_straddles_header_and_text(template: str) -> None:
    """It belongs to the turn; the header's other tokens do not."""
    for tokenizer, pair in (
        (byte_level(), "\n\n"), (metaspace("never"), "\n\n"), (slow(PairingByT5), "\1")
    ):  # fmt: skip
        tokenizer.chat_template = template
        result = tokenize(CONVERSATIONS["line breaks first"], tokenizer)
        trained = trained_ids(result)
        assert pair in tokenizer.decode(trained[:1]), tokenizer.decode(trained)
        assert tokenizer.decode(trained[-1:]) == END
        assert "lion3" in tokenizer.decode(trained)
        assert "lion3" not in tokenizer.decode(result["input_ids"][: -len(trained) - 1])


# ---- added tokens

PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
BOTH = {"lstrip": True, "rstrip": True}


@pytest.mark.parametrize("strips", [{"rstrip": True}, {"lstrip": True}, BOTH])
def test_an_added_token_that_takes_white_space(strips: dict[str, bool]) -> None:
    """As Phi-3's: the header's token is not trained, though it reaches into the turn."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    names = ("user", "assistant", "end")
    tokens = [AddedToken(f"<|{name}|>", normalized=False, **strips) for name in names]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = PHI
    for name in ("line breaks first", "white space", "one turn", "five turns"):
        result = tokenize(CONVERSATIONS[name], tokenizer)
        assert tokenize(CONVERSATIONS[name], tokenizer, train_on="each") == [result]
        text = tokenizer.decode(result["input_ids"])
        answers = [t.split("<|end|>")[0].strip() for t in text.split("<|assistant|>")[1:]]
        got = trained_text(result, tokenizer).split("<|end|>")
        assert [t.strip() for t in got] == [*answers, ""]


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_turn_is_any_added_token(special: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["[END]"], special_tokens=special)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "[END]")
    kept = trained_ids(tokenize(CONVERSATIONS["five turns"], tokenizer))
    assert kept.count(tokenizer.convert_tokens_to_ids("[END]")) == 5
