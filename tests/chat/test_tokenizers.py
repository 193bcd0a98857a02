"""The same characters are trained whatever cuts the text, and templates with damage are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, ByT5Tokenizer, PreTrainedTokenizerFast

from tests.chat.chats import END as OFF
from tests.chat.chats import MARKS, tokenize, trained_ids, trained_text
from tests.chat.chats import TAG as ON
from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import tokenizer_for
from torch_collate_kit.errors import DataError

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


DAMAGED = {
    "tags in raw text": "{% if false %}{% raw %}{% generation %}{% endraw %}{% endif %}" + CHATML,
    "tags that are never reached": CHATML + "{% if false %}" + ON + "x" + OFF + "{% endif %}",
    "tags around nothing": CHATML + ON + OFF,
    "around the header too": TAGGED.replace(
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}",
        "{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>' + m.role + '\n' }}",
    ).replace("{% else %}", "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"),
    "around every message": CHATML.replace("{{ '<|im_start|>'", ON + "{{ '<|im_start|>'").replace(
        "{% endfor %}", OFF + "{% endfor %}"
    ),
    "around the user's": TAGGED.replace("m.role == 'assistant'", "m.role == 'user'"),
    "around everything": ON + CHATML + OFF,
    "without the end": TAGGED.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}",
        "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    ),
    "only the end": TAGGED.replace(
        "{% generation %}{{ m.content + '<|im_end|>' }}",
        "{{ m.content }}{% generation %}{{ '<|im_end|>' }}",
    ),
    "with the line break after the end": TAGGED.replace(
        "'<|im_end|>' }}{% endgeneration %}", "'<|im_end|>\n' }}{% endgeneration %}"
    ),
    "only the last turn": TAGGED.replace(
        "m.role == 'assistant'", "m.role == 'assistant' and loop.last"
    ),
    "no end of turn": CHATML.replace("<|im_end|>", ""),
    "an end that is no token": CHATML.replace("<|im_end|>", "[stop]"),
    "one end for all": CHATML.replace("<|im_end|>\n", "") + "<|im_end|>",
    "the answer twice": CHATML.replace("m.content +", "m.content + m.content +"),
    "the answer upside down": CHATML.replace("m.content +", "(m.content | reverse) +"),
    "the answer in capitals": CHATML.replace("m.content +", "(m.content | upper) +"),
    "the answer cut": CHATML.replace("m.content +", "m.content[:5] +"),
    "the answer replaced": CHATML.replace("m.content +", "(m.content | replace('3', 'x')) +"),
    "the question in the answer": CHATML.replace(
        "m.content +", "messages[0].content + m.content +"
    ),
    "no header": CHATML.replace("'<|im_start|>' + m.role + '\n' +", ""),
    "another prompt": CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>model\n'"),
    "no prompt": CHATML[: CHATML.index("{% if add_generation")],
    "a prompt for everyone": CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"),
    "in another order": CHATML.replace("in messages %}", "in messages | reverse %}"),
    "only the last message": CHATML.replace("in messages %}", "in messages[-1:] %}"),
    "the number of messages first": "{{ messages | length }}" + CHATML,
}

REFUSED = {  # where no answer can be trained as the model would write it
    "no end of turn", "an end that is no token", "the answer twice", "the answer upside down",
    "the answer in capitals", "the answer cut", "the question in the answer", "no header",
    "another prompt", "in another order", "only the last message", "around every message",
    "around everything", "one end for all", "the answer replaced", "no prompt",
}  # fmt: skip
SKIPPED = {"tags in raw text", "tags that are never reached", "tags around nothing", "only the end",
           "around the user's"}  # fmt: skip


@pytest.mark.parametrize("mode", ["all", "last", "each"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_template_trains_nothing_wrong(damage: str, mode: Any) -> None:
    """The trained text is the answers and their ends, or the record is refused."""
    tokenizer = tokenizer_for(DAMAGED[damage], "<|im_end|>")
    num_refused = 0
    for name in ("one turn", "two turns", "system, three turns", "white space"):
        record = CONVERSATIONS[name]
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        answers = answers[-1:] if mode == "last" else answers
        try:
            result = tokenize(record, tokenizer, train_on=mode)
        except DataError:
            num_refused += 1
            continue
        examples = result if mode == "each" else [result]
        if damage in SKIPPED and examples[0]["skip_reason"] == "no_trained_tokens":
            continue
        assert not any(example["skip_reason"] for example in examples)
        trained = "".join(trained_text(example, tokenizer) for example in examples)
        assert trained == "".join(answer + "<|im_end|>" for answer in answers), name
    assert (num_refused == 4) == (damage in REFUSED), num_refused
