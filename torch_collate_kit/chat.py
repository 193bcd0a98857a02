"""Chat records -> ``input_ids`` and ``loss_mask``.

The tokenizer's chat template renders a record. The loss mask marks the tokens that an assistant
wrote, including its end-of-turn token. If the template has ``{% generation %}`` tags, they decide.
Otherwise a turn is the text between two renderings: all messages before it with the generation
prompt, and all messages including it. Both must be literal prefixes of the whole text. So a
template that rewrites earlier turns is refused; it would train the wrong tokens.

The cost is one tokenization per record, and one template rendering per record with tags or two per
trained turn without them.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any, Literal

from torch_collate_kit._chat_records import (
    assistant_turns,
    check_weights,
    read_dicts,
    read_messages,
)
from torch_collate_kit._checks import checked_bool, needed_package
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokenize_chat", "tokenize_chat_dataset"]

_logger = logging.getLogger(__name__)

# Part of the fingerprint of the `datasets` cache: increase it when the output of a record changes.
_CACHE_VERSION = 2
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def tokenize_chat(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: Literal["all", "last"] = "all",
    max_length: int | None = None,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    decode_arguments: bool = True,
    labels: bool = False,
) -> dict[str, Any]:
    """Tokenize one chat or Alpaca record and mark the tokens to train on.

    Args:
        example: a mapping. It is not changed. Columns that are missing or None are ignored:

            ``messages``: dicts with ``role`` and ``content``, where None is an empty text. Keys
            whose value is None are removed at every depth, because Arrow adds them. Messages after
            the last assistant turn are removed, since nothing in them can be trained.

            ``instruction``, ``input``, ``output``: used if there are no ``messages``. They become
            one user turn (instruction, blank line, input) and one assistant turn.

            ``system``: becomes the first message.

            ``tools``: schemas as dicts or JSON strings, or one JSON string of the whole list. They
            replace those of the argument.

            ``chat_template_kwargs``: variables for the template. They override those of the
            argument.
        tokenizer: a transformers tokenizer with a chat template.
        train_on: "all" assistant turns, or only the "last".
        max_length: keep only this many tokens from the beginning; None keeps all.
        tools: schemas for records without ``tools``.
        chat_template_kwargs: variables for the template.
        decode_arguments: parse ``function.arguments`` into a dict if it is the JSON of one, as most
            Hugging Face templates expect. False is for templates that concatenate it as a string.
        labels: return ``labels`` (list of int, -100 where not trained) instead of ``loss_mask``.
            transformers.Trainer and TRL keep them, and drop a ``loss_mask`` column by default.

    Returns ``input_ids`` (list of int), ``loss_mask`` (0/1, same length), ``num_cut_tokens``
    (removed by ``max_length``) and ``skip_reason``. That is "", or with empty lists
    "no_assistant_turn", "nothing_left_after_truncation", or "no_trained_tokens" (the template marks
    none). The first token does not count as trained, because nothing predicts it.

    Raises:
        DataError: the record has another form; ``system`` and a system message differ; a turn to
            train has a ``weight``, ``train`` or ``trainable`` other than 1; a legacy
            ``function_call``; no assistant turn but an unknown role; or the template cannot render
            the record, or rewrites earlier turns.
        ValueError: a wrong option, no chat template, or one that is not valid Jinja.
        TypeError: not a mapping, not a tokenizer, or a ``max_length`` that is not an integer.
        ImportError: the template has ``{% generation %}`` tags, and transformers is not installed.

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
    _check_options(
        tokenizer, train_on, max_length, decode_arguments=decode_arguments, labels=labels
    )
    if not isinstance(example, Mapping):
        raise TypeError(
            f"a record is a mapping with `messages`, got {type(example).__name__}; wrap a list of "
            "messages as {'messages': ...}, and pass a dataset to tokenize_chat_dataset"
        )
    messages = read_messages(example, decode_arguments)
    turns = assistant_turns(messages)
    if not turns:
        return _result(labels, skip_reason="no_assistant_turn")
    trained = turns if train_on == "all" else turns[-1:]
    check_weights(messages, trained)
    schemas = read_dicts(example.get("tools"), "`tools`") or read_dicts(tools, "`tools`")
    own_kwargs = read_dicts([example.get("chat_template_kwargs") or {}], "`chat_template_kwargs`")
    kwargs = {**(chat_template_kwargs or {}), **own_kwargs[0]}
    chat = _Chat(tokenizer, messages[: turns[-1] + 1], schemas or None, kwargs)
    input_ids, loss_mask = chat.tokenize(trained)
    kept = len(input_ids) if max_length is None else min(index(max_length), len(input_ids))
    if not any(loss_mask[1:]):
        return _result(labels, skip_reason="no_trained_tokens")
    if not any(loss_mask[1:kept]):
        return _result(labels, skip_reason="nothing_left_after_truncation")
    return _result(labels, input_ids[:kept], loss_mask[:kept], len(input_ids) - kept)


def tokenize_chat_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: Literal["all", "last"] = "all",
    max_length: int | None = None,
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    decode_arguments: bool = True,
    labels: bool = False,
    num_proc: int | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Run :func:`tokenize_chat` over a ``datasets.Dataset``, in ``num_proc`` processes.

    Returns a new dataset of the kept examples, in order, and a Counter of the ``skip_reason`` of
    the others. The dataset has the columns ``input_ids`` (int32) and ``loss_mask`` (int8), or with
    ``labels=True`` ``labels`` (int32) instead of ``loss_mask``. One warning is logged for skipped
    examples and one for truncated ones. ``datasets.map`` shows progress and caches the result.

    Raises:
        DataError: as in :func:`tokenize_chat`, naming the index of the example; or every example is
            skipped.
        ValueError: as in :func:`tokenize_chat`.
        TypeError: not a ``datasets.Dataset``, or as in :func:`tokenize_chat`.
        ImportError: datasets is not installed.

    >>> tokenize_chat_dataset([{"messages": []}], tokenizer=None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: expected a datasets.Dataset, got list; use Dataset.from_list...
    """
    datasets = needed_package("datasets", "tokenize_chat_dataset")
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"expected a datasets.Dataset, got {type(dataset).__name__}; use Dataset.from_list, a "
            "split of the DatasetDict, or stream.map(tokenize_chat, fn_kwargs=...) and a filter"
        )
    _check_options(
        tokenizer, train_on, max_length, decode_arguments=decode_arguments, labels=labels
    )
    options: dict[str, Any] = {"train_on": train_on, "max_length": max_length, "tools": tools}
    options |= {"chat_template_kwargs": chat_template_kwargs, "decode_arguments": decode_arguments}
    options["labels"] = labels
    tokenized = _map(dataset, {"tokenizer": tokenizer, "options": options}, num_proc)
    reasons = list(tokenized["skip_reason"])
    cuts = [cut for cut in tokenized["num_cut_tokens"] if cut]
    skips = Counter(reason for reason in reasons if reason)
    if reasons and skips.total() == len(reasons):
        raise DataError(
            f"all {len(reasons)} examples are skipped: {dict(skips)}; a record needs an assistant "
            "turn with tokens that the chat template trains, before max_length"
        )
    tokenized = tokenized.select_columns(["input_ids", "labels" if labels else "loss_mask"])
    if cuts:
        _logger.warning("cut %d tokens off %d of %d examples", sum(cuts), len(cuts), len(reasons))
    if skips:
        _logger.warning("skipped %d of %d examples: %s", skips.total(), len(reasons), dict(skips))
        kept = [i for i, reason in enumerate(reasons) if not reason]
        # flatten_indices removes the indices mapping, which columnar readers do not expect.
        tokenized = tokenized.select(kept).flatten_indices()
    return tokenized, skips


def _map(dataset: Any, fn_kwargs: dict[str, Any], num_proc: int | None) -> Any:
    import datasets

    # Explicit types: a first batch that is skipped as a whole would fix them as lists of null.
    features = {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        **_target_feature(fn_kwargs["options"]["labels"]),
        "num_cut_tokens": datasets.Value("int64"),
        "skip_reason": datasets.Value("string"),
    }
    if len(dataset) == 0:  # map would return no columns at all
        empty: dict[str, list[Any]] = {name: [] for name in features}
        return datasets.Dataset.from_dict(empty, features=datasets.Features(features))
    return dataset.with_format(None).map(
        _tokenize_row,
        with_indices=True,
        fn_kwargs={**fn_kwargs, "version": _CACHE_VERSION},
        remove_columns=dataset.column_names,
        features=datasets.Features(features),
        num_proc=num_proc,
        desc="Tokenizing chats",
    )


def _target_feature(labels: bool) -> dict[str, Any]:
    import datasets

    name, dtype = ("labels", "int32") if labels else ("loss_mask", "int8")
    return {name: datasets.Sequence(datasets.Value(dtype))}


def _tokenize_row(
    example: Mapping[str, Any], index: int, *, tokenizer: Any, options: dict[str, Any], version: int
) -> dict[str, Any]:
    try:
        return tokenize_chat(example, tokenizer, **options)
    except DataError as error:
        raise DataError(f"example {index}: {error}") from error


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


def _check_options(tokenizer: Any, train_on: str, max_length: int | None, **flags: bool) -> None:
    for name, flag in flags.items():
        checked_bool(name, flag)
    if train_on not in ("all", "last"):
        raise ValueError(f"train_on must be 'all' or 'last', got {train_on!r}")
    if max_length is not None and not hasattr(max_length, "__index__"):
        raise TypeError(f"max_length must be an integer or None, got {max_length!r}; convert it")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}; None means no limit")
    if not hasattr(tokenizer, "get_chat_template"):
        raise TypeError(
            f"tokenizer must be a tokenizer, got {type(tokenizer).__name__}; load it with "
            "AutoTokenizer.from_pretrained, or pass the processor's .tokenizer"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat_template; use the tokenizer of the model's "
            "chat version, or set tokenizer.chat_template"
        )


@dataclass(frozen=True)
class _Chat:
    """One conversation that ends with an assistant turn, and the tokenizer that renders it."""

    tokenizer: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]

    def tokenize(self, turns: list[int]) -> tuple[list[int], list[int]]:
        """Ids, and 1 where a token belongs to one of ``turns`` (indices of assistant messages)."""
        template = self.tokenizer.get_chat_template(self.kwargs.get("chat_template"), self.tools)
        if _GENERATION_TAG.search(template):
            text, spans = self._tagged_spans(template, turns)
        else:
            text = self._render(self.messages)
            spans = [self._span(text, turn) for turn in turns]
        is_fast = self.tokenizer.is_fast  # only these give the characters of each token
        encoded = self._encode(text, return_offsets_mapping=is_fast)
        input_ids = list(encoded["input_ids"])
        loss_mask = [0] * len(input_ids)
        for start, end in (span for span in spans if span[0] < span[1]):
            # A token that crosses the start belongs to the turn, since no prompt ends inside it.
            if is_fast:
                offsets = encoded["offset_mapping"]
                first = bisect_right(offsets, start, key=itemgetter(1))
                stop = bisect_left(offsets, end, key=itemgetter(0))
            else:
                first, stop = (self._num_shared(input_ids, text[:cut]) for cut in (start, end))
            loss_mask[first:stop] = [1] * (stop - first)
        return input_ids, loss_mask

    def _tagged_spans(self, template: str, turns: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans of characters inside tags, from the first of ``turns`` on."""
        purpose = "a chat template with {% generation %} tags"
        templates = needed_package("transformers.utils.chat_template_utils", purpose)
        # apply_chat_template finds their tokens with char_to_token. Where a tag is next to a
        # character without a token of its own, it trains everything after it, or nothing, or half
        # an emoji: https://github.com/huggingface/transformers/issues/47325
        kwargs = {**self.tokenizer.special_tokens_map, **self.kwargs, "chat_template": template}
        kwargs["return_assistant_tokens_mask"] = True
        with self._explained(self.messages):
            [text], [spans] = templates.render_jinja_template(
                [self.messages], tools=self.tools, **kwargs
            )
        before = self.messages[: turns[0]]
        if any(message["role"] == "assistant" for message in before):
            first = self._prefix_length(text, self._render(before), turns[0])
            spans = [(max(start, first), end) for start, end in spans]
        return text, spans

    def _span(self, text: str, turn: int) -> tuple[int, int]:
        """The span of characters that the assistant writes in its turn: first, and last + 1."""
        before, through = self.messages[:turn], self._render(self.messages[: turn + 1])
        if before:
            prompt = self._render(before, prompt=True)
        else:  # no template renders an empty list: find the prompt by what it adds to this turn
            header = self._render(self.messages[:1], prompt=True)[len(through) :]
            prompt = through.partition(header)[0] + header if header else ""
        start = self._prefix_length(text, prompt, turn)
        end = self._prefix_length(text, through, turn)
        # "\n" after <|im_end|> is not part of the turn: generation has stopped by then.
        written = text[start:end].rstrip()
        tokens = self.tokenizer.added_tokens_decoder.values()
        if written.endswith(tuple(token.content for token in tokens if token.special)):
            end = start + len(written)
        return start, end

    def _prefix_length(self, text: str, prefix: str, turn: int) -> int:
        if not text.startswith(prefix):
            raise DataError(
                f"messages[{turn}]: the chat template renders this turn, or an earlier one, "
                "differently once more messages follow (does it drop thinking?); pass "
                "train_on='last', or set a tokenizer.chat_template with {% generation %} tags that "
                "does not rewrite earlier turns"
            )
        return len(prefix)

    def _num_shared(self, input_ids: list[int], text: str) -> int:
        head = self._encode(text)["input_ids"][: len(input_ids)]
        return next((i for i, token in enumerate(head) if token != input_ids[i]), len(head))

    def _encode(self, text: str, **options: Any) -> Any:
        # The template writes the special tokens itself: adding them would repeat the BOS.
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": prompt, "tools": self.tools}
        with self._explained(messages):
            return str(self.tokenizer.apply_chat_template(messages, **self.kwargs, **options))

    @contextmanager
    def _explained(self, messages: list[dict[str, Any]]) -> Iterator[None]:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            yield
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja, line {error.lineno}: {error.message}; fix "
                "tokenizer.chat_template"
            ) from error
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template cannot render the roles [{roles}]: {error}; change the record, "
                "or pass decode_arguments=False if the template uses function.arguments as text"
            ) from error
