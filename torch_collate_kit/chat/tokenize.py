"""Chat records -> ``input_ids`` and ``loss_mask``."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.chat.locating import THINK_END
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.chat.record_forms import (
    ImageSource,
    check_columns,
    find_texts,
    images_of_record,
    num_images,
    text_of,
)
from torch_collate_kit.chat.records import ROLES, Conversation, read_record, without_padding
from torch_collate_kit.chat.rendering import Rendering, render_conversation
from torch_collate_kit.chat.template import ChatTemplate, Refusal, Spans, num_shared
from torch_collate_kit.chat.turns import ANY_TOOL, leaves_out, turn_spans
from torch_collate_kit.chat.windows import windows
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.expansion import Expansion
from torch_collate_kit.vision.families import num_kept

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_Ints = Sequence[int]
_TOO_DEEP = "the record is nested too deeply to be read; flatten it, or give arguments as text"
_SURROGATE = re.compile("[\ud800-\udfff]")
# Variables that decide in public templates whether thinking is opened, kept or dropped.
_CURES = (
    ("enable_thinking", False),
    ("enable_thinking", True),
    ("thinking", True),
    ("thinking", False),
    ("preserve_thinking", True),
    ("clear_thinking", False),
    ("keep_thinking", True),
    ("keep_past_thinking", True),
    ("truncate_history_thinking", False),
    ("preserve_previous_think", True),
)
# Of a record of more turns only those around the refused one are tried, and the advice says "try":
# each turn may be a rendering of its own, and a refusal must not cost more than the record.
_MAX_TURNS = 8
COUNTS = "_counts"  # of a record: windows, trained tokens, and those that truncation would lose


def tokenize_chat(
    record: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    options: ChatOptions = DEFAULT_OPTIONS,
) -> Any:
    """Tokenize one record and mark the tokens that the assistant writes.

    Args:
        record: a mapping, which is not changed. Columns that are missing or None are ignored. The
            first of these forms is read: ``messages``; ``conversations`` (ShareGPT); ``prompt`` and
            ``completion``; ``instruction``, ``input`` and ``output`` (Alpaca). The columns
            ``system``, ``tools``, ``documents`` and ``chat_template_kwargs`` belong to the record,
            and override the options; ``weight`` is kept. See docs/chat.md.
        tokenizer: a transformers tokenizer with a chat template; or a processor, for records with
            images. See docs/vision.md for the forms of images.
        options: :class:`ChatOptions`: which turns are trained, how long an example may be, ...

    Returns a dict with ``input_ids`` (list of int), ``loss_mask`` (0/1, same length),
    ``num_cut_tokens`` (removed by ``max_length``), ``skip_reason`` (with empty lists; "" otherwise)
    and the record's ``weight``, if it has one; with images also the processor's vision fields. The
    first token does not count as trained, because nothing predicts it. With ``train_on="each"``, or
    windows, a list of such dicts, at least one; with ``group_turns`` one dict of lists of lists,
    and ``skipped_segments``. The values of ``skip_reason``: docs/chat.md.

    Raises:
        DataError: the record has another form, is preference data, has an empty answer, or is too
            long; or its turns cannot be trained exactly: the template drops or changes a part of
            it, does not end a turn with an added token, or renders a turn in another context than
            that of inference; or an image is missing, left over or not readable. The message names
            the message or image, the cause and a way out.
        ValueError: a wrong option, no chat template, or one that is not valid Jinja.
        TypeError: not a mapping, not a tokenizer, or options other than ``ChatOptions``.
        ImportError: transformers is not installed, or Pillow where there are images.

    >>> from torch_collate_kit.chat.preview import byte_tokenizer  # a stand-in for AutoTokenizer
    >>> tokenizer = byte_tokenizer(
    ...     "{% for m in messages %}{{ m.role[0] + m.content }}<end>{% endfor %}"
    ...     "{% if add_generation_prompt %}a{% endif %}"
    ... )
    >>> example = tokenize_chat({"instruction": "1+1", "output": "2"}, tokenizer)
    >>> [tokenizer.decode([token]) for token in example["input_ids"]]
    ['u', '1', '+', '1', '<end>', 'a', '2', '<end>']
    >>> example["loss_mask"], example["skip_reason"]
    ([0, 0, 0, 0, 0, 0, 1, 1], '')
    """
    [results] = tokenize_records([record], ChatSetup(tokenizer, options), from_arrow=False)
    if isinstance(results, DataError):
        raise results
    results[0].pop(COUNTS, None)
    if options.group_turns:
        example, *skipped = grouped(results)
        return example | {"skipped_segments": [row["skip_reason"] for row in skipped]}
    return results if options.train_on == "each" or options.overflow == "windows" else results[0]


def tokenize_records(
    records: Collection[Any], setup: ChatSetup, *, from_arrow: Any
) -> list[list[dict[str, Any]] | DataError]:
    """Return each record's results, or its refusal. All texts are tokenized in one call."""
    results: list[list[dict[str, Any]] | DataError] = []
    records, from_arrow = without_padding(records, from_arrow)
    found = marked_texts(records, setup, from_arrow=from_arrow)
    for record, entries in zip(records, found, strict=True):
        if isinstance(entries, DataError):
            results.append(entries)
            continue
        if isinstance(entries, str):
            rows = [_result(setup, skip_reason=entries)]
        else:
            try:
                rows = [row for entry in entries for row in _fitted(entry, setup)]
            except DataError as error:  # too long
                results.append(error)
                continue
        if "weight" in record:
            rows = [row | {"weight": record["weight"]} for row in rows]
        results.append(rows[:1] if all(row["skip_reason"] for row in rows) else rows)
    return results


def grouped(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row with a segment for each kept row, then the skipped rows."""
    kept = [row for row in rows if not row["skip_reason"]]
    if not kept:
        return [*rows]
    targets = (name for name in ("input_ids", "loss_mask", "labels") if name in kept[0])
    example = kept[0] | {name: [row[name] for row in kept] for name in targets}
    example["num_cut_tokens"] = sum(row["num_cut_tokens"] for row in kept)
    if "is_continued" in example:
        example["is_continued"] = any(row["is_continued"] for row in kept)
    return [example, *(row for row in rows if row["skip_reason"])]


class MarkedText(NamedTuple):
    """A text as tokens, 1 in ``loss_mask`` where they are trained, and the tokens of images."""

    example: TextExample
    input_ids: list[int]
    loss_mask: list[int]
    images: Sequence[tuple[int, int]] = ()


def marked_texts(
    records: Collection[Any], setup: ChatSetup, *, from_arrow: bool
) -> list[list[MarkedText] | str | DataError]:
    """Return each record's texts as tokens of any number, why it has none, or its refusal."""
    found: list[list[TextExample] | str | DataError] = []
    for record in records:
        try:
            found.append(_read(record, setup, from_arrow))
        except DataError as error:
            found.append(error)
        except RecursionError:
            found.append(DataError(_TOO_DEEP))
    examples = [entry for entries in found if isinstance(entries, list) for entry in entries]
    tokens = iter(_encode(setup.tokenizer, [example.text for example in examples]))
    before = ids_around(setup.tokenizer)[0] if any(e.is_bare for e in examples) else []
    return [
        [_marked(entry, *next(tokens), setup, before) for entry in entries]
        if isinstance(entries, list)
        else entries
        for entries in found
    ]


def _read(record: Any, setup: ChatSetup, from_arrow: bool) -> list[TextExample] | str:
    """Return the texts of a record with all placeholders of its images, or why it has none."""
    if not isinstance(record, Mapping):
        raise TypeError(
            f"a record is a mapping with `messages`, got {type(record).__name__}; wrap a list of "
            "messages as {'messages': ...}, and pass a dataset to tokenize_chat_dataset"
        )
    examples = text_examples(record, setup, from_arrow)
    if isinstance(examples, str):
        return examples
    for i, example in enumerate(examples):
        half = None if example.text.isascii() else _SURROGATE.search(example.text)
        if half is not None:
            raise DataError(
                f"the text has U+{ord(half[0]):04X}, half of a character cut in two, which no "
                "tokenizer reads; replace or remove it"
            )
        if setup.images is not None:
            images = setup.images.expand(example.text, example.images)
            spans = [(images.moved(start), images.moved(end)) for start, end in example.spans]
            examples[i] = example._replace(text=images.text, spans=spans, expansion=images)
    return examples


def _encode(tokenizer: Any, texts: list[str]) -> list[tuple[list[int], Any]]:
    """Return the ids of each text, and its Encoding if the tokenizer is a fast one."""
    if not texts:
        return []
    # The template writes the special tokens itself: adding them would repeat the BOS.
    unread = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded = tokenizer(texts, add_special_tokens=False, **unread)
    ids = encoded["input_ids"]
    return list(zip(ids, encoded.encodings or [None] * len(ids), strict=True))


def ids_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before a text, BOS or none, and after it."""
    alone, ids = (tokenizer("x", add_special_tokens=of)["input_ids"] for of in (False, True))
    fits = (i for i in range(len(ids)) if ids[i : i + len(alone)] == alone)
    first = next(fits, 0)
    return ids[:first], ids[first + len(alone) :]


def _marked(
    example: TextExample, input_ids: list[int], encoding: Any, setup: ChatSetup, before: list[int]
) -> MarkedText:
    loss_mask = _loss_mask(example, input_ids, encoding, setup.tokenizer)
    images = example.expansion
    places = [_tokens_of(encoding, *span) for span in images.images] if images else []
    for first, stop in places:
        loss_mask[first:stop] = [0] * (stop - first)
    if example.is_bare and input_ids[: len(before)] != before:
        input_ids, loss_mask = before + input_ids, [0] * len(before) + loss_mask
    return MarkedText(example, input_ids, loss_mask, places)


def _fitted(marked: MarkedText, setup: ChatSetup) -> list[dict[str, Any]]:
    """Return a text as examples of at most ``max_length`` tokens, or why it is skipped."""
    example, input_ids, loss_mask, places = marked
    if 1 not in loss_mask[1:]:
        return [_result(setup, skip_reason="no_trained_tokens")]
    length, limit = len(input_ids), setup.options.max_length
    if limit is not None and setup.overflow == "windows":
        try:
            found = windows({"input_ids": input_ids, "loss_mask": loss_mask}, limit)
        except DataError:
            return [_result(setup, skip_reason="prompt_too_long")]
        rows = [_result(setup, row.pop("input_ids"), row.pop("loss_mask")) | row for row in found]
        rows[0][COUNTS] = [len(rows), sum(loss_mask[1:]), sum(loss_mask[limit:])]
        return rows
    kept = length if limit is None else min(length, limit)
    if kept < length and setup.overflow == "raise":
        raise too_long("the text", length, setup, "'drop' or 'truncate'")
    if kept < length and setup.overflow == "drop":
        return [_result(setup, skip_reason="too_long")]
    fields: dict[str, Any] = {}
    images = example.expansion
    if images and places:
        num_images = sum(stop <= kept for _, stop in places)
        num_images = num_kept(images.fields, num_images, of=len(places))
        if num_images < len(places):  # an image is left out as a whole, and what comes after it
            kept = min(kept, places[num_images][0])
        fields = images.first(num_images)
    if 1 not in loss_mask[1:kept]:
        return [_result(setup, skip_reason="nothing_left_after_truncation")]
    return [{**_result(setup, input_ids[:kept], loss_mask[:kept], length - kept), **fields}]


def too_long(what: str, length: int, setup: ChatSetup, others: str) -> DataError:
    """Return the error for a text over ``max_length`` where ``overflow`` is "raise"."""
    return DataError(
        f"{what} has {length} tokens, more than max_length={setup.options.max_length}; raise "
        f"max_length, shorten the record, or pass overflow={others}"
    )


def _loss_mask(
    example: TextExample, input_ids: list[int], encoding: Any, tokenizer: Any
) -> list[int]:
    """Return 1 for the tokens of the spans that are trained, and 0 for others."""
    loss_mask = [0] * len(input_ids)
    for start, end in (span for span in example.spans if span[0] < span[1]):
        # A token that crosses the start belongs to the turn, since no prompt ends inside it.
        if encoding is not None:
            first, stop = _tokens_of(encoding, start, end)
            straddles = first < stop and encoding.token_to_chars(first)[0] < start
            if straddles and input_ids[first] in tokenizer.added_tokens_decoder:
                first += 1  # a tag of the header that includes the white space after it
        else:
            heads = _encode(tokenizer, [example.text[:start], example.text[:end]])
            first, stop = (num_shared(input_ids, head) for head, _ in heads)
        loss_mask[first:stop] = [1] * (stop - first)
    return loss_mask


def _tokens_of(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Return the first token of a span of characters and the last + 1, crossing ones included."""
    # asked about a few tokens: a list of all offsets costs three times the ids
    places, chars = range(len(encoding)), encoding.token_to_chars
    first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
    if first is None:  # a character that is in no token
        first = bisect_right(places, start, key=lambda i: chars(i)[1])
    if last is None:
        return first, bisect_left(places, end, key=lambda i: chars(i)[0])
    stop = last + 1
    while stop < len(places) and chars(stop)[0] < end:  # tokens of the same character
        stop += 1
    return first, stop


def _result(
    setup: ChatSetup, ids: _Ints = (), mask: _Ints = (), cut: int = 0, skip_reason: str = ""
) -> dict[str, Any]:
    target = loss_target(setup, ids, mask)
    return {"input_ids": list(ids), **target, "num_cut_tokens": cut, "skip_reason": skip_reason}


def loss_target(setup: ChatSetup, ids: Sequence[int], mask: Sequence[int]) -> dict[str, list[int]]:
    """Return the loss mask as ``loss_mask`` or ``labels``, as the options say."""
    if not setup.options.labels:
        return {"loss_mask": list(mask)}
    # another packer would train the first token, which nothing predicts
    trained = [i if kept else IGNORE_INDEX for i, kept in zip(ids, mask, strict=True)]
    return {"labels": [IGNORE_INDEX, *trained[1:]] if trained else []}


class TextExample(NamedTuple):
    """A text, the spans of characters in it that are trained, and the images it has places for.

    ``expansion`` has these images once their placeholders are written out; ``is_bare``: no template
    has written the BOS.
    """

    text: str
    spans: Spans
    images: Sequence[ImageSource] = ()
    expansion: Expansion | None = None
    is_bare: bool = False


def text_examples(
    record: Mapping[str, Any], setup: ChatSetup, from_arrow: bool
) -> list[TextExample] | str:
    """Return the examples of a record, or the reason why it has none."""
    check_columns(record)
    texts = find_texts(record)
    if texts is not None:
        if setup.images is not None:
            images_of_record([], record)  # no part for an image: refused if there is one
        prompt, completion = texts
        if completion and not setup.options.allow_empty:
            _check_answer(completion, "`completion`")
        text = prompt + completion
        example = TextExample(text, [(len(prompt), len(text))], is_bare=True)
        return [example] if completion else "no_assistant_turn"
    conversation = read_record(record, setup, from_arrow)
    _check_roles(conversation, setup.tokenizer)
    if not conversation.trained:
        return "no_trained_tokens" if conversation.has_assistant else "no_assistant_turn"
    train_on = setup.options.train_on
    for turn in [] if setup.options.allow_empty else _trained_turns(conversation, train_on):
        message = conversation.messages[turn]
        if "tool_calls" not in message:
            _check_answer(message["content"], f"messages[{turn}]")
    try:
        return _examples(setup.tokenizer, conversation, train_on)
    except Refusal as refusal:
        advice = _way_out(setup, conversation, train_on, refusal)
        raise (Refusal(refusal.reason, advice) if advice else refusal) from None


def _check_roles(conversation: Conversation, tokenizer: Any) -> None:
    """Refuse roles that the template does not name, whose answers would not be trained."""
    roles = [message["role"] for message in conversation.messages]
    for role in {*roles}.difference(ROLES):
        template = ChatTemplate.of(tokenizer, conversation.kwargs, conversation.tools)
        if not template.names_role(role):
            raise DataError(
                f"messages[{roles.index(role)}] has the unknown role {role!r}, which the chat "
                "template does not name, or writes as it writes assistant; rename the role of the "
                "answers to assistant, others to system, user or tool"
            )


def _trained_turns(conversation: Conversation, train_on: str) -> list[int]:
    return conversation.trained if train_on != "last" else conversation.trained[-1:]


def _check_answer(content: Any, where: str) -> None:
    text = text_of(content)
    if text is None or (isinstance(text, str) and not text.rpartition(THINK_END)[2].strip()):
        raise DataError(
            f"{where} is an empty answer ({content!r:.40}), so the model would be trained to say "
            "nothing; remove it, set its `weight` to 0 (of a message), or pass allow_empty=True"
        )


def _examples(tokenizer: Any, conversation: Conversation, train_on: str) -> list[TextExample]:
    """Return one example; with "each" one for the turns that a later turn continues."""
    template = ChatTemplate.of(tokenizer, conversation.kwargs, conversation.tools)
    turns = _trained_turns(conversation, train_on)
    found: list[tuple[Rendering, Spans]] = []
    try:
        rendering = render_conversation(template, conversation, turns)
        found = [(rendering, turn_spans(rendering, turns))]
    except Refusal as refusal:
        if train_on != "each" or len(turns) == 1 or not refusal.rendered:
            raise
        for turn in reversed(turns):
            earlier = _merged(*found[-1], turn) if found else []
            if earlier:
                rendering, spans = found[-1]
                found[-1] = rendering, earlier + spans
            else:
                rendering = render_conversation(template, conversation, [turn])
                found.append((rendering, turn_spans(rendering, [turn])))
        lost = [len(rendering.messages) - 1 for rendering, spans in found if not spans]
        if lost and len(lost) < len(found):
            raise leaves_out(lost[-1]) from None
    images = conversation.images
    return [
        TextExample(rendering.text, spans, images and images[: num_images(rendering.messages)])
        for rendering, spans in reversed(found)
    ]


def _merged(rendering: Rendering, spans: Spans, turn: int) -> Spans:
    """Return the span of an earlier turn if it is rendered here as at inference, else []."""
    if not spans or rendering.is_composed or rendering.problem(turn):
        return []
    try:
        return turn_spans(rendering, [turn])
    except Refusal:
        return []


def _way_out(
    setup: ChatSetup, conversation: Conversation, train_on: str, refusal: Refusal
) -> str | None:
    """Return advice that was tried and with which the record is accepted, or None."""

    def refused(part: Conversation, mode: str) -> Refusal | None:
        try:
            _examples(setup.tokenizer, part, mode)
        except Refusal as other:
            return other
        return None

    code = ChatTemplate.of(setup.tokenizer, conversation.kwargs, conversation.tools).code
    if not refusal.rendered and (conversation.tools is not None or "tools" not in code):
        return None
    part = conversation
    if len(conversation.trained) > _MAX_TURNS and train_on != "last":
        part = conversation.around(refusal.reason)
        again = refused(part, train_on)
        if again is None or again.rendered != refusal.rendered:
            return None
    if not refusal.rendered:
        other = refused(replace(part, tools=[ANY_TOOL]), train_on)
        if other is None or other.rendered:
            return "give its tools, in a column `tools` or as tools=[...]: the template needs them"
        return None
    verb = "pass" if part is conversation else "try"
    may_split = setup.may_split and train_on == "all" and len(part.trained) > 1
    if may_split and refused(part, "each") is None:
        return f"{verb} train_on='each' (an example per turn)"
    for name, value in _CURES:
        if part.kwargs.get(name) == value or not re.search(rf"\b{name}\b", code):
            continue
        cure = {name: value}
        cured = replace(part, kwargs={**part.kwargs, **cure})
        advice = f"{verb} chat_template_kwargs={cure}"
        if refused(cured, train_on) is None:
            return advice
        if may_split and refused(cured, "each") is None:
            return f"{advice} and train_on='each'"
    return None
