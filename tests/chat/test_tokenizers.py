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

from tests.chat.conversations import CONVERSATIONS
from torch_collate_kit.chat import tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.chat.examples import TextExample
from torch_collate_kit.chat.options import ChatOptions, ChatSetup
from torch_collate_kit.chat.tokenize import _encode, _tokenized

HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
NAMES = [
    "one turn",
    "five turns",
    "consecutive answers",
    "assistant first",
    "last turn by the user",
    "empty answer",
    "emoji",
    "combining marks",
    "Chinese and Japanese",
    "right to left",
    "white space",
    "line breaks first",
    "looks like a header",
    "markup",
    "echo",
]
CORPUS = [
    "assistant\n\nlion3 sleeps4 user\nzebra1 walks2\n\n",
    " \n lion3\n\nsleeps4  \n \U0001f981",
]


def wrapped(backend: Tokenizer) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    return tokenizer


def byte_level() -> Any:
    """Byte-level BPE whose merges cross line breaks, words and spaces."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 9, trainer)
    return wrapped(backend)


def gpt_like() -> Any:
    """Byte-level BPE that splits words as GPT-2 does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 9, trainer)
    return wrapped(backend)


def metaspace(prepend_scheme: str) -> Any:
    """As SentencePiece: a mark for a space, bytes for what the vocabulary lacks."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    for text in ("▁", *"\nabcdefghijklmnopqrstuvwxyz1234567890", "▁l", "\n\n"):
        vocab.setdefault(text, len(vocab))
    merges = [("▁", "l"), ("\n", "\n")]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrapped(backend)


def llama_2_like() -> Any:
    """Spaces are replaced by a normalizer, which also puts one before the text."""
    tokenizer = metaspace("never")
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
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
    "GPT-2-like": gpt_like,
    "Metaspace, first": lambda: metaspace("first"),
    "Metaspace, always": lambda: metaspace("always"),
    "Metaspace, never": lambda: metaspace("never"),
    "Llama-2-like": llama_2_like,
    "Unigram": unigram,
}


tokenizer_of = cache(lambda kind: FAST[kind]())


class WordByT5(ByT5Tokenizer):
    """A slow tokenizer in which a line break and what follows it are one token."""

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return super()._tokenize(text.replace("\n\n", "\1"))


def slow(kind: type[ByT5Tokenizer]) -> Any:
    tokenizer = kind()
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    return tokenizer


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


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])
@pytest.mark.parametrize("kind", FAST)
def test_the_same_characters_are_trained(kind: str, template: str) -> None:
    """A token that has at least one of the assistant's characters is trained, no other."""
    tokenizer = FAST[kind]()
    tokenizer.chat_template = template
    for name in NAMES:
        record = CONVERSATIONS[name]
        text, spans = rendered(record)
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        expected = [
            int(any(first < end and start < stop for start, end in spans))
            for first, stop in encoding.offsets
        ]
        for mode in ("all",):
            result = tokenize_chat(record, tokenizer, ChatOptions(train_on=mode, allow_empty=True))
            [result] = result if isinstance(result, list) else [result]
            assert result["input_ids"] == encoding.ids, (name, mode)
            assert result["loss_mask"] == expected, (name, mode, encoding.tokens)


@given(
    st.text(st.sampled_from("\n lion3\u65e5\U0001f981\u0301"), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
)
@pytest.mark.parametrize("kind", FAST)
def test_any_spans_of_any_text(kind: str, text: str, cuts: list[int]) -> None:
    """Against the list of all offsets, for spans that are in order and do not meet."""
    edges = sorted({min(cut, len(text)) for cut in cuts})
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    setup = ChatSetup(tokenizer_of(kind), ChatOptions())
    [tokens] = _encode(setup.tokenizer, [text])
    encoding = setup.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    expected = [
        int(any(first < end and start < stop for start, end in spans))
        for first, stop in encoding.offsets
    ]
    result = _tokenized(TextExample(text, spans), tokens, setup)
    if any(expected[1:]):
        assert (result["input_ids"], result["loss_mask"]) == (encoding.ids, expected)
    else:
        assert result["skip_reason"] == "no_trained_tokens"


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])
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
        result = tokenize_chat(CONVERSATIONS[name], tokenizer, ChatOptions(allow_empty=True))
        assert (result["input_ids"], result["loss_mask"]) == (ids, mask), name


def straddling() -> list[tuple[Any, str]]:
    """Tokenizers in which two line breaks are one token, and how it is called."""
    return [(byte_level(), "\n\n"), (metaspace("never"), "\n\n"), (slow(WordByT5), "\1")]


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])
def test_a_token_that_straddles_header_and_text(template: str) -> None:
    """It belongs to the turn; the header's other tokens do not."""
    record = CONVERSATIONS["line breaks first"]
    for tokenizer, pair in straddling():
        tokenizer.chat_template = template
        result = tokenize_chat(record, tokenizer)
        trained = [
            i for i, kept in zip(result["input_ids"], result["loss_mask"], strict=True) if kept
        ]
        before = [
            i for i, kept in zip(result["input_ids"], result["loss_mask"], strict=True) if not kept
        ]
        assert pair in tokenizer.decode(trained[:1]), tokenizer.decode(trained)
        assert tokenizer.decode(trained[-1:]) == END
        assert "lion3" in tokenizer.decode(trained)
        assert "lion3" not in tokenizer.decode(before)


PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "strips", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}]
)
def test_an_added_token_that_takes_white_space(strips: dict[str, bool]) -> None:
    """As Phi-3's: the header's token is not trained, though it reaches into the turn."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    tokens = [
        AddedToken(f"<|{t}|>", normalized=False, **strips) for t in ("user", "assistant", "end")
    ]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = PHI
    for name in ("line breaks first", "white space", "one turn", "five turns"):
        for mode in ("all", "each"):
            result = tokenize_chat(CONVERSATIONS[name], tokenizer, ChatOptions(train_on=mode))
            [result] = result if isinstance(result, list) else [result]
            text = tokenizer.decode(result["input_ids"])
            answers = [t.split("<|end|>")[0] for t in text.split("<|assistant|>")[1:]]
            trained = [
                i for i, k in zip(result["input_ids"], result["loss_mask"], strict=True) if k
            ]
            got = tokenizer.decode(trained).split("<|end|>")
            assert [t.strip() for t in got] == [t.strip() for t in [*answers, ""]]


@pytest.mark.parametrize("added", ["special", "not special"])
def test_the_end_of_turn_is_any_added_token(added: str) -> None:
    tokenizer = byte_level()
    template = CHATML.replace("<|im_end|>", "[END]")
    tokenizer.add_tokens(["[END]"], special_tokens=added == "special")
    tokenizer.chat_template = template
    result = tokenize_chat(CONVERSATIONS["five turns"], tokenizer)
    kept = [i for i, k in zip(result["input_ids"], result["loss_mask"], strict=True) if k]
    assert kept.count(tokenizer.convert_tokens_to_ids("[END]")) == 5


def test_a_real_tokenizer_over_a_dataset(shared_data: Any) -> None:
    """One tokenization for the whole batch gives what one record at a time gives."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "mistral-32k-chatml")
    records = [{"messages": CONVERSATIONS[name]["messages"]} for name in NAMES]
    for mode in ("all", "last", "each"):
        options: Any = {"train_on": mode, "allow_empty": True}
        dataset, skipped = tokenize_chat_dataset(
            Dataset.from_list(records), tokenizer, ChatOptions(**options)
        )
        assert not skipped
        alone = [tokenize_chat(record, tokenizer, ChatOptions(**options)) for record in records]
        flat = [e for found in alone for e in (found if isinstance(found, list) else [found])]
        assert [row["input_ids"] for row in dataset] == [e["input_ids"] for e in flat]
        assert [row["loss_mask"] for row in dataset] == [e["loss_mask"] for e in flat]
