"""Chat records -> ``input_ids`` and ``loss_mask``."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, overload

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.chat.examples import TextExample, text_examples
from torch_collate_kit.chat.options import ChatOptions, Overflow, TrainOn
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.expansion import ImageProcessing
from torch_collate_kit.vision.families import num_kept

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

__all__ = ["tokenize_chat", "tokenize_records"]

_SURROGATE = re.compile("[\ud800-\udfff]")


@overload
def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    processor: ProcessorMixin | None = None,
    train_on: Literal["all", "last"] = "all",
    max_length: int | None = None,
    overflow: Overflow = "raise",
    allow_empty: bool = False,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: bool = False,
    pixels: bool = True,
    image_root: str | PathLike[str] | None = None,
    max_pixels: int | None = None,
) -> dict[str, Any]: ...


@overload
def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    processor: ProcessorMixin | None = None,
    train_on: Literal["each"],
    max_length: int | None = None,
    overflow: Overflow = "raise",
    allow_empty: bool = False,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: bool = False,
    pixels: bool = True,
    image_root: str | PathLike[str] | None = None,
    max_pixels: int | None = None,
) -> list[dict[str, Any]]: ...


def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    processor: ProcessorMixin | None = None,
    train_on: TrainOn = "all",
    max_length: int | None = None,
    overflow: Overflow = "raise",
    allow_empty: bool = False,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: bool = False,
    pixels: bool = True,
    image_root: str | PathLike[str] | None = None,
    max_pixels: int | None = None,
) -> dict[str, Any] | list[dict[str, Any]]:
    """Tokenize one record and mark the tokens that the assistant writes.

    Args:
        example: a mapping, which is not changed. Columns that are missing or None are ignored. The
            first of these forms is read: ``messages``; ``conversations`` (ShareGPT); ``prompt`` and
            ``completion``; ``instruction``, ``input`` and ``output`` (Alpaca). The columns
            ``system``, ``tools``, ``documents`` and ``chat_template_kwargs`` belong to the record,
            and override the arguments. See docs/chat.md.
        tokenizer: a transformers tokenizer with a chat template.
        processor: a transformers processor in place of the tokenizer, for records with images. See
            docs/vision.md for the forms of images.
        train_on: "all" assistant turns in one example; only the "last"; or "each" in the context
            that the model sees at inference, in as few examples as the template allows.
        max_length: the most tokens of an example; None means no limit.
        overflow: what becomes of a longer one: "raise"; "truncate" keeps its first ``max_length``
            tokens, so that its last answer may have no end; "drop" returns empty lists.
        allow_empty: train answers without text and tool calls, too: the model learns to say
            nothing. They are refused by default.
        tools: schemas for records without ``tools``.
        chat_template_kwargs: variables for the template.
        labels: return ``labels`` (list of int, -100 where not trained) instead of ``loss_mask``.
            transformers.Trainer and TRL keep them, and drop a ``loss_mask`` column by default.
        pixels: False reads the sizes of image files alone. The result has the same ids, and of the
            vision fields those that planning needs.
        image_root: the folder where relative paths of images start, and which no path may leave.
            None: the working directory, and any path.
        max_pixels: the most that an image may have, checked before it is decoded; None: the limit
            of PIL.

    Returns ``input_ids`` (list of int), ``loss_mask`` (0/1, same length), ``num_cut_tokens``
    (removed by ``max_length``) and ``skip_reason``. That is "", or with empty lists
    "no_assistant_turn", "no_trained_tokens" (the template or the record's weights select none),
    "too_long", or "nothing_left_after_truncation". The first token does not count as trained,
    because nothing predicts it. With ``train_on="each"`` a list of such dicts, at least one. If
    there are images, also the processor's vision fields, as NumPy arrays without padding.

    Raises:
        DataError: the record has another form, is preference data, has an empty answer, or is too
            long; or its turns cannot be trained exactly: the template drops or changes a part of
            it, does not end a turn with an added token, or renders a turn in another context than
            that of inference; or an image is missing, left over or not readable. The message names
            the message or image, the cause and a way out.
        ValueError: a wrong option, no chat template, or one that is not valid Jinja.
        TypeError: not a mapping, not a tokenizer, or a ``max_length`` that is not an integer.
        ImportError: transformers is not installed, or Pillow where there are images.

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
    options = ChatOptions(
        tokenizer,
        processor,
        train_on=train_on,
        max_length=max_length,
        overflow=overflow,
        allow_empty=allow_empty,
        tools=tools,
        chat_template_kwargs=chat_template_kwargs,
        labels=labels,
        pixels=pixels,
        image_root=image_root,
        max_pixels=max_pixels,
    )
    [results] = tokenize_records([example], options, from_arrow=False)
    if isinstance(results, DataError):
        raise results
    return results if train_on == "each" else results[0]


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
        except RecursionError:
            deep = "the record is nested too deep for Python; give what is inside as a JSON string"
            found.append(DataError(deep))
    texts = [entry.text for entries in found if isinstance(entries, list) for entry in entries]
    tokenized = iter(_encode(options.tokenizer, texts))
    results: list[list[dict[str, Any]] | DataError] = []
    for entries in found:
        if isinstance(entries, DataError):
            results.append(entries)
        elif isinstance(entries, str):
            results.append([_result(options.labels, skip_reason=entries)])
        else:
            pairs = [(entry, next(tokenized)) for entry in entries]
            try:
                rows = [_tokenized(*pair, options) for pair in pairs]
            except DataError as error:  # too long
                results.append(error)
                continue
            results.append(rows[:1] if all(row["skip_reason"] for row in rows) else rows)
    return results


def _read(record: Any, options: ChatOptions, from_arrow: bool) -> list[TextExample] | str:
    """The texts of a record, or the reason why it has none."""
    if not isinstance(record, Mapping):
        raise TypeError(
            f"a record is a mapping with `messages`, got {type(record).__name__}; wrap a list of "
            "messages as {'messages': ...}, and pass a dataset to tokenize_chat_dataset"
        )
    try:
        examples = text_examples(record, options, from_arrow)
    except RecursionError:
        raise DataError(
            "the record is nested too deeply to be read; flatten it, or give arguments as text"
        ) from None
    if isinstance(examples, str):
        return examples
    for example in examples:
        half = None if example.text.isascii() else _SURROGATE.search(example.text)
        if half is not None:
            raise DataError(
                f"the text has U+{ord(half[0]):04X}, half of a character cut in two, which no "
                "tokenizer reads; replace or remove it"
            )
    if options.images is None:
        return examples
    return [_expanded(example, options.images) for example in examples]


def _expanded(example: TextExample, processing: ImageProcessing) -> TextExample:
    """The example with all placeholders of its images in the text."""
    images = processing.expand(example.text, example.images)
    spans = [(images.moved(start), images.moved(end)) for start, end in example.spans]
    return example._replace(text=images.text, spans=spans, expansion=images)


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
    images = example.expansion
    loss_mask = _loss_mask(example, tokens, options)
    length = len(input_ids)
    places: list[tuple[int, int]] = []
    if images is not None and images.images:
        places = [_tokens_of(encoding, *span) for span in images.images]
        for first, stop in places:
            loss_mask[first:stop] = [0] * (stop - first)
    if not any(loss_mask[1:]):
        return _result(options.labels, skip_reason="no_trained_tokens")
    kept = _num_kept_tokens(length, options)
    if kept == 0:
        return _result(options.labels, skip_reason="too_long")
    fields: dict[str, Any] = {}
    if images is not None and places:
        num_images = sum(stop <= kept for _, stop in places)
        num_images = num_kept(images.fields, num_images, of=len(places))
        if num_images < len(places):  # an image is left out as a whole, and what comes after it
            kept = min(kept, places[num_images][0])
        fields = images.first(num_images)
    if not any(loss_mask[1:kept]):
        return _result(options.labels, skip_reason="nothing_left_after_truncation")
    return {**_result(options.labels, input_ids[:kept], loss_mask[:kept], length - kept), **fields}


def _num_kept_tokens(length: int, options: ChatOptions) -> int:
    """How many tokens ``max_length`` leaves of an example; 0 drops it."""
    limit = options.max_length
    if limit is None or length <= limit:
        return length
    if options.overflow == "raise":
        raise DataError(
            f"the text has {length} tokens, more than max_length={limit}; raise max_length, "
            "shorten the record, or pass overflow='drop' or 'truncate'"
        )
    return limit if options.overflow == "truncate" else 0


def _loss_mask(
    example: TextExample, tokens: tuple[list[int], Any], options: ChatOptions
) -> list[int]:
    """1 for the tokens of the spans that are trained."""
    input_ids, encoding = tokens
    loss_mask = [0] * len(input_ids)
    for start, end in (span for span in example.spans if span[0] < span[1]):
        # A token that crosses the start belongs to the turn, since no prompt ends inside it.
        if encoding is not None:
            first, stop = _tokens_of(encoding, start, end)
            straddles = first < stop and encoding.token_to_chars(first)[0] < start
            if straddles and input_ids[first] in options.tokenizer.added_tokens_decoder:
                first += 1  # a tag of the header that takes the white space after it
        else:
            heads = _encode(options.tokenizer, [example.text[:start], example.text[:end]])
            first, stop = (_num_shared(input_ids, head) for head, _ in heads)
        loss_mask[first:stop] = [1] * (stop - first)
    return loss_mask


def _tokens_of(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """The first token of a span of characters and the last + 1, those that cross its ends too.

    The encoding is asked for a few tokens: a list of all offsets costs three times the ids.
    """
    places = range(len(encoding))
    return (
        bisect_right(places, start, key=lambda i: encoding.token_to_chars(i)[1]),
        bisect_left(places, end, key=lambda i: encoding.token_to_chars(i)[0]),
    )


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
