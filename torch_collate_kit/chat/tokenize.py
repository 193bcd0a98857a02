"""Chat records -> ``input_ids`` and ``loss_mask``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.chat.examples import TextExample, text_examples
from torch_collate_kit.chat.records import read_record
from torch_collate_kit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatOptions", "tokenize_chat", "tokenize_records"]

TrainOn = Literal["all", "last", "each"]


@overload
def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: Literal["all", "last"] = "all",
    max_length: int | None = None,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: bool = False,
) -> dict[str, Any]: ...


@overload
def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: Literal["each"],
    max_length: int | None = None,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: bool = False,
) -> list[dict[str, Any]]: ...


def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "all",
    max_length: int | None = None,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: bool = False,
) -> dict[str, Any] | list[dict[str, Any]]:
    """Tokenize one record and mark the tokens that the assistant writes.

    Args:
        example: a mapping, which is not changed. Columns that are missing or None are ignored. The
            first of these forms is read: ``messages``; ``conversations`` (ShareGPT); ``prompt`` and
            ``completion``; ``instruction``, ``input`` and ``output`` (Alpaca). The columns
            ``system``, ``tools``, ``documents`` and ``chat_template_kwargs`` belong to the record,
            and override the arguments. See docs/chat.md.
        tokenizer: a transformers tokenizer with a chat template.
        train_on: "all" assistant turns in one example; only the "last"; or "each" in the context
            that the model sees at inference, in as few examples as the template allows.
        max_length: keep only this many tokens from the beginning; None keeps all.
        tools: schemas for records without ``tools``.
        chat_template_kwargs: variables for the template.
        labels: return ``labels`` (list of int, -100 where not trained) instead of ``loss_mask``.
            transformers.Trainer and TRL keep them, and drop a ``loss_mask`` column by default.

    Returns ``input_ids`` (list of int), ``loss_mask`` (0/1, same length), ``num_cut_tokens``
    (removed by ``max_length``) and ``skip_reason``. That is "", or with empty lists
    "no_assistant_turn", "nothing_left_after_truncation", or "no_trained_tokens" (the template or
    the record's weights select none). The first token does not count as trained, because nothing
    predicts it. With ``train_on="each"`` a list of such dicts, at least one.

    Raises:
        DataError: the record has another form, or its turns cannot be trained exactly: the template
            drops or changes a part of it, does not end a turn with an added token, or renders a
            turn in another context than that of inference. The message names the message, the cause
            and a way out.
        ValueError: a wrong option, no chat template, or one that is not valid Jinja.
        TypeError: not a mapping, not a tokenizer, or a ``max_length`` that is not an integer.
        ImportError: transformers is not installed.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> vocab = {"?": 0, "user": 1, "assistant": 2, "1+1": 3, "2": 4, "<end>": 5}
    >>> words = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    >>> tokenizer.chat_template = (
    ...     "{% for m in messages %}{{ m.role + ' ' + m.content + ' <end> ' }}{% endfor %}"
    ...     "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    ... )
    >>> tokenize_chat({"instruction": "1+1", "output": "2"}, tokenizer)
    {'input_ids': [1, 3, 5, 2, 4, 5], 'loss_mask': [0, 0, 0, 0, 1, 1], 'num_cut_tokens': 0,
    'skip_reason': ''}
    """
    options = ChatOptions(tokenizer, train_on, max_length, tools, chat_template_kwargs, labels)
    [results] = tokenize_records([example], options, from_arrow=False)
    if isinstance(results, DataError):
        raise results
    return results if train_on == "each" else results[0]


class ChatOptions:
    """The checked options of :func:`tokenize_chat`.

    >>> ChatOptions(None, "first", None, None, None, False)
    Traceback (most recent call last):
    ValueError: train_on must be 'all', 'last' or 'each', got 'first'
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: str,
        max_length: int | None,
        tools: Sequence[Any] | str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        labels: bool,
    ) -> None:
        if train_on not in ("all", "last", "each"):
            raise ValueError(f"train_on must be 'all', 'last' or 'each', got {train_on!r}")
        if max_length is not None and not hasattr(max_length, "__index__"):
            raise TypeError(
                f"max_length must be an integer or None, got {max_length!r}; convert it"
            )
        if max_length is not None and max_length < 2:
            raise ValueError(
                f"max_length must be at least 2, got {max_length}; None means no limit"
            )
        if not hasattr(tokenizer, "get_chat_template"):
            raise TypeError(
                f"tokenizer must be a tokenizer, got {type(tokenizer).__name__}; load it with "
                "AutoTokenizer.from_pretrained, or pass the processor's .tokenizer"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.max_length = None if max_length is None else index(max_length)
        self.tools = tools
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.labels = checked_bool("labels", labels)


def tokenize_records(
    records: Iterable[Any], options: ChatOptions, *, from_arrow: bool
) -> list[list[dict[str, Any]] | DataError]:
    """The results of each record, or why it is refused. All texts are tokenized in one call."""
    found: list[list[TextExample] | str | DataError] = []
    for record in records:
        try:
            found.append(_read(record, options, from_arrow))
        except DataError as error:
            found.append(error)
    texts = [example.text for entry in found if isinstance(entry, list) for example in entry]
    tokenized = iter(_encode(options.tokenizer, texts))
    results: list[list[dict[str, Any]] | DataError] = []
    for entry in found:
        if isinstance(entry, DataError):
            results.append(entry)
        elif isinstance(entry, str):
            results.append([_result(options.labels, skip_reason=entry)])
        else:
            rows = [_tokenized(example, next(tokenized), options) for example in entry]
            results.append(rows[:1] if all(row["skip_reason"] for row in rows) else rows)
    return results


def _read(record: Any, options: ChatOptions, from_arrow: bool) -> list[TextExample] | str:
    """The texts of a record, or the reason why it has none."""
    if not isinstance(record, Mapping):
        raise TypeError(
            f"a record is a mapping with `messages`, got {type(record).__name__}; wrap a list of "
            "messages as {'messages': ...}, and pass a dataset to tokenize_chat_dataset"
        )
    conversation = read_record(record, options.tools, options.chat_template_kwargs, from_arrow)
    if not conversation.has_assistant:
        return "no_assistant_turn"
    if conversation.texts is None:
        if not conversation.trained:
            return "no_trained_tokens"
        if not getattr(options.tokenizer, "chat_template", None) and not (
            conversation.kwargs.get("chat_template")
        ):
            raise ValueError(
                f"{type(options.tokenizer).__name__} has no chat_template; use the tokenizer of "
                "the model's chat version, or set tokenizer.chat_template"
            )
    return text_examples(options.tokenizer, conversation, options.train_on)


def _encode(tokenizer: Any, texts: list[str]) -> list[tuple[list[int], Any]]:
    """For each text its ids, and its Encoding if the tokenizer is a fast one."""
    if not texts:
        return []
    # The template writes the special tokens itself: adding them would repeat the BOS.
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        verbose=False,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    ids = encoded["input_ids"]
    return list(zip(ids, encoded.encodings or [None] * len(ids), strict=True))


def _tokenized(
    example: TextExample, tokens: tuple[list[int], Any], options: ChatOptions
) -> dict[str, Any]:
    input_ids, encoding = tokens
    places = range(len(input_ids))
    loss_mask = [0] * len(input_ids)
    for start, end in (span for span in example.spans if span[0] < span[1]):
        # A token that crosses the start belongs to the turn, since no prompt ends inside it.
        if encoding is not None:  # a list of all offsets costs three times the ids
            first = bisect_right(places, start, key=lambda i: encoding.token_to_chars(i)[1])
            stop = bisect_left(places, end, key=lambda i: encoding.token_to_chars(i)[0])
            straddles = first < stop and encoding.token_to_chars(first)[0] < start
            if straddles and _is_added(options.tokenizer, input_ids[first]):
                first += 1  # a tag of the header that takes the white space after it
        else:
            heads = _encode(options.tokenizer, [example.text[:start], example.text[:end]])
            first, stop = (_num_shared(input_ids, head) for head, _ in heads)
        loss_mask[first:stop] = [1] * (stop - first)
    length = len(input_ids)
    kept = length if options.max_length is None else min(options.max_length, length)
    if not any(loss_mask[1:]):
        return _result(options.labels, skip_reason="no_trained_tokens")
    if not any(loss_mask[1:kept]):
        return _result(options.labels, skip_reason="nothing_left_after_truncation")
    return _result(options.labels, input_ids[:kept], loss_mask[:kept], length - kept)


def _is_added(tokenizer: Any, token: int) -> bool:
    return token in tokenizer.added_tokens_decoder


def _num_shared(input_ids: list[int], head: list[int]) -> int:
    pairs = zip(input_ids, head, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(head), len(input_ids)))


def _result(
    labels: bool,
    ids: Sequence[int] = (),
    mask: Sequence[int] = (),
    cut: int = 0,
    skip_reason: str = "",
) -> dict[str, Any]:
    if labels:  # another packer would train the first token, which nothing predicts
        trained = [i if kept else IGNORE_INDEX for i, kept in zip(ids, mask, strict=True)]
        target = {"labels": [IGNORE_INDEX, *trained[1:]] if trained else []}
    else:
        target = {"loss_mask": list(mask)}
    return {"input_ids": list(ids), **target, "num_cut_tokens": cut, "skip_reason": skip_reason}
