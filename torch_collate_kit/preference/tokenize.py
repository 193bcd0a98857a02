"""A whole ``datasets.Dataset`` of preference records -> examples of two segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.chat.cache_keys import fingerprint
from torch_collate_kit.chat.dataset import (
    BATCH_SIZE,
    bars_of_rank_0,
    chats_key,
    check_is_dataset,
    mapped,
    without_skipped,
)
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.chat.records import BadArguments, without_padding
from torch_collate_kit.chat.template import num_shared
from torch_collate_kit.chat.tokenize import MarkedText, loss_target, marked_texts, too_long
from torch_collate_kit.errors import DataError
from torch_collate_kit.preference.records import (
    EMPTY_PROMPT,
    NUMBERS,
    PreferenceRecord,
    read_preference,
)
from torch_collate_kit.reading.keys import check_no_other_weight

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Keep = Literal["prompt_end", "answer_start"]

# Part of the cache key: increase it when the output of a record changes.
_CACHE_VERSION = 4
_NEEDED = "both sides need an answer with tokens that the chat template trains, before max_length"


def tokenize_preferences(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: ChatOptions = DEFAULT_OPTIONS,
    *,
    keep: Keep | None = None,
    seed: int = 0,
    num_proc: int | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Tokenize preference records as examples of two segments, for DPO, KTO and reward models.

    Args:
        dataset: pairs with the columns ``chosen`` and ``rejected``, or rows with ``prompt``,
            ``completion`` and ``label`` (KTO: True or 1 for a good answer, False or 0). Answers are
            strings, which no template renders (BOS as the tokenizer adds it, no EOS), or messages.
            Without a column ``prompt`` it is what both sides of a pair begin with.
        tokenizer: a transformers tokenizer, for messages one with a chat template.
        options: :class:`~torch_collate_kit.ChatOptions`. Trained are the assistant turns of the
            answers, ``train_on="last"``: their last one. ``max_length`` limits each segment.
        keep: cut longer pairs in place of dropping them. "prompt_end" removes the start of the
            prompt, the same tokens of both sides; "answer_start" keeps the first ``max_length``
            tokens of each side. Pairs without a prompt, or with nothing to train, are dropped.
        seed: of KTO rows decides which answer of another row is the second segment.
        num_proc: the number of processes; None for this one.

    Returns a new dataset of the kept examples, in order, and a Counter of the reasons why others
    are skipped. The columns are ``input_ids`` (lists of lists of int32) and ``loss_mask`` (int8),
    or with ``labels=True`` ``labels`` (int32), the numbers of the record (float32; ``label`` bool),
    with ``keep`` ``num_cut_tokens`` (int64). Segments of a pair are the chosen and the rejected
    side; of a KTO row its prompt with its own answer, and with that of another row for the KL term.
    Columns, reasons and refusals: docs/chat.md, "Preference data"; caching as in
    :func:`~torch_collate_kit.tokenize_chat_dataset`.

    Raises:
        DataError: as in ``tokenize_chat``, naming row and side; a record is neither a pair nor a
            labelled answer; sides differ before their answers; every row is skipped; or KTO with a
            single row.
        ValueError: a wrong option; ``train_on="each"``; ``keep`` without ``max_length``.
        TypeError: not a ``datasets.Dataset``, or a processor: images are not read.

    >>> import datasets
    >>> from torch_collate_kit.chat.preview import byte_tokenizer  # a stand-in for AutoTokenizer
    >>> pairs = datasets.Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "11"}])
    >>> examples, skipped = tokenize_preferences(pairs, byte_tokenizer(""))
    >>> examples[0]["loss_mask"], skipped
    ([[0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]], Counter())
    """
    check_is_dataset(dataset, "tokenize_preferences", num_proc=num_proc)
    setup = _checked_setup(tokenizer, options, keep)
    seed = checked_int("seed", seed, minimum=0)
    is_pair = _are_pairs(dataset.column_names)
    features = _features(setup, dataset.column_names, is_pair)
    tokenized = mapped(
        dataset.with_format(None),
        _tokenize_rows,
        features,
        {"setup": setup, "keep": keep},
        batch_size=BATCH_SIZE,
        num_proc=num_proc,
        new_fingerprint=fingerprint(preferences_key(setup, keep), dataset),
        desc="Tokenizing preferences",
    )
    kept, skips = without_skipped(tokenized, [] if keep else ["num_cut_tokens"], _NEEDED)
    return (kept if is_pair else with_other_answers(kept, setup, seed, num_proc)), skips


def _are_pairs(names: Sequence[str]) -> bool:
    """Return whether the columns hold pairs; False: labelled answers."""
    is_labelled = {"completion", "label"} <= set(names)
    if is_labelled and {"chosen", "rejected"} <= set(names):
        raise DataError(
            "the dataset has the columns of pairs (`chosen`, `rejected`) and of labelled answers "
            "(`completion`, `label`), which are trained with different losses; remove one of them"
        )
    check_no_other_weight(dict.fromkeys(names, "the dataset"), names)
    return not is_labelled


def preferences_key(setup: ChatSetup, keep: Keep | None) -> str:
    """Return the cache key of preferences."""
    return chats_key(setup, "preferences", _CACHE_VERSION, keep)


def _checked_setup(tokenizer: Any, options: ChatOptions, keep: Keep | None) -> ChatSetup:
    checked_choice("keep", keep, ("prompt_end", "answer_start", None))
    if hasattr(tokenizer, "image_processor"):
        raise TypeError(
            "tokenize_preferences reads no images, but got a processor; pass processor.tokenizer"
        )
    setup = ChatSetup(tokenizer, options, overflow="drop", may_split=False)
    if options.train_on == "each" or options.overflow == "windows":
        given = "train_on='each'" if options.train_on == "each" else "overflow='windows'"
        raise ValueError(
            f"{given} makes several examples of a side, and a pair has one of each; pass "
            "train_on='all' or 'last', and overflow='raise' or 'drop'"
        )
    if keep is None and options.overflow == "truncate":
        raise ValueError(
            "overflow='truncate' does not say what to keep of a pair; leave it out and pass "
            "keep='prompt_end' or 'answer_start'"
        )
    if keep is not None and (options.max_length is None or options.overflow in ("raise", "drop")):
        raise ValueError(
            f"keep={keep!r} cuts at max_length, got {options!r}; give max_length, and leave "
            "overflow out"
        )
    return setup


def _features(setup: ChatSetup, names: Sequence[str], is_pair: bool) -> Any:
    """Return the columns' types: a first batch without examples would make them null."""
    import datasets

    target, dtype = ("labels", "int32") if setup.options.labels else ("loss_mask", "int8")
    lists = {"input_ids": "int32", target: dtype}
    numbers = dict.fromkeys((n for n in (*NUMBERS, "weight") if n in names), "float32")
    if not is_pair:
        weight = {"weight": "float32"} if "weight" in names else {}
        numbers = {"label": "bool", **weight, "num_prompt": "int32", "prompt_key": "int64"}
    others = numbers | {"num_cut_tokens": "int64", "skip_reason": "string"}
    sequence = datasets.Sequence
    return datasets.Features(
        {name: sequence(sequence(datasets.Value(kind))) for name, kind in lists.items()}
        | {name: datasets.Value(kind) for name, kind in others.items()}
    )


def _tokenize_rows(
    columns: Mapping[str, list[Any]],
    indices: list[int],
    *,
    setup: ChatSetup,
    keep: Keep | None,
    names: list[str],
    features: Any,
) -> dict[str, list[Any]]:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = preference_examples(rows, setup, keep, from_arrow=features)
    for i, example in zip(indices, found, strict=True):
        if isinstance(example, DataError) and not isinstance(example, BadArguments):
            raise DataError(f"example {i}: {example}") from example
    examples = [
        example if isinstance(example, dict) else _skipped(BadArguments.skip_reason)
        for example in found
    ]
    return {name: [example.get(name) for example in examples] for name in names}


def preference_examples(
    records: Sequence[Mapping[str, Any]],
    setup: ChatSetup,
    keep: Keep | None = None,
    *,
    from_arrow: Any,
) -> list[dict[str, Any] | DataError]:
    """Return the example of each record, which may have a ``skip_reason``, or its error."""
    records, from_arrow = without_padding(records, from_arrow)
    found: list[Any] = [_or_error(read_preference, record) for record in records]
    sides = [
        side
        for entry in found
        if isinstance(entry, PreferenceRecord)
        for side in entry.sides.values()
    ]
    marked = iter(marked_texts(sides, setup, from_arrow=from_arrow))
    for i, record in enumerate(found):
        if isinstance(record, PreferenceRecord):
            texts = {name: next(marked) for name in record.sides}
            example = _or_error(_example, texts, setup, keep)
            if isinstance(example, dict):
                example = record.values | example
                if records[i].get("weight") is not None:
                    example["weight"] = records[i]["weight"]
            found[i] = example
    return found


def _or_error(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except DataError as error:
        return error


def _example(
    sides: Mapping[str, list[MarkedText] | str | DataError], setup: ChatSetup, keep: Keep | None
) -> dict[str, Any]:
    """Return the segments of a record, or why it is skipped."""
    texts: dict[str, MarkedText] = {}
    for name, entries in sides.items():
        if isinstance(entries, DataError):
            kind = BadArguments if isinstance(entries, BadArguments) else DataError
            raise kind(f"`{name}`: {entries}")
        if isinstance(entries, str):
            return _skipped(f"{name}_{entries}")
        [texts[name]] = entries
        if 1 not in texts[name].loss_mask:
            return _skipped(f"{name}_no_trained_tokens")
    _check_same_prompt(texts)
    num_prompt = _num_prompt(list(texts.values()))
    if not num_prompt:  # and the tokenizer adds no BOS
        raise DataError(EMPTY_PROMPT)
    first = _first_kept(texts, num_prompt, setup, keep)
    if first is None:
        return _skipped("too_long")
    limit = setup.options.max_length
    part = slice(first, None if limit is None else first + limit)
    kept = [
        (text.input_ids[part], _trained_from(num_prompt, text.loss_mask)[part])
        for text in texts.values()
    ]
    if not all(1 in mask[1:] for _, mask in kept):
        return _skipped("nothing_left_after_truncation")
    targets = [loss_target(setup, ids, mask) for ids, mask in kept]
    num_tokens = sum(len(text.input_ids) for text in texts.values())
    return {
        "input_ids": [ids for ids, _ in kept],
        **{name: [target[name] for target in targets] for name in targets[0]},
        "num_prompt": num_prompt - first,
        "prompt_key": prompt_key(next(iter(texts.values())).input_ids[:num_prompt]),
        "num_cut_tokens": num_tokens - sum(len(ids) for ids, _ in kept),
        "skip_reason": "",
    }


def _first_kept(
    texts: Mapping[str, MarkedText], num_prompt: int, setup: ChatSetup, keep: Keep | None
) -> int | None:
    """Return the first token that is kept of each side, or None if the record is too long."""
    lengths = {name: len(text.input_ids) for name, text in texts.items()}
    longest, limit = max(lengths, key=lengths.__getitem__), setup.options.max_length
    if limit is None or lengths[longest] <= limit or keep == "answer_start":
        return 0
    if setup.overflow == "raise":
        raise too_long(
            f"`{longest}` with its prompt", lengths[longest], setup, "'drop' or keep='prompt_end'"
        )
    first = lengths[longest] - limit
    return first if keep is not None and first < num_prompt else None


def _skipped(reason: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"input_ids": [], "loss_mask": [], "labels": []}
    return {**empty, "num_cut_tokens": 0, "skip_reason": reason}


def _check_same_prompt(texts: Mapping[str, MarkedText]) -> None:
    """Refuse sides whose texts before the first trained character differ."""
    heads = [example.text[: example.spans[0][0]] for example, *_ in texts.values()]
    if heads[0] == heads[-1]:
        return
    place = num_shared(heads[0], heads[-1])
    seen = " and ".join(
        f"`{name}` has {head[max(place - 20, 0) : place + 40]!r}"
        for name, head in zip(texts, heads, strict=True)
    )
    raise DataError(
        f"the sides differ before their first trained token: {seen}. Both need one prompt: begin "
        "the answers with a turn of the assistant, and where the chat template renders a prompt "
        "by what follows it (thinking, for example), give both answers equally many turns, or set "
        "another tokenizer.chat_template"
    )


def _num_prompt(texts: Sequence[MarkedText]) -> int:
    """Return the number of tokens before the first trained one that all sides share."""
    count = texts[0].loss_mask.index(1)
    first, last = texts[0].input_ids[:count], texts[-1].input_ids[:count]
    return count if first == last else num_shared(first, last)


def _trained_from(num_prompt: int, loss_mask: list[int]) -> list[int]:
    """Return the mask of a side that is trained from the end of the prompt that all sides share.

    The end of a prompt may merge with the answer of one side alone. Then both train it: their
    log-probs are those of all text after the same tokens.
    """
    return (
        [0] * num_prompt + [1] * (loss_mask.index(1) - num_prompt) + loss_mask[loss_mask.index(1) :]
    )


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """Return a hash of the prompt: int64, equal for different prompts once in 10**19."""
    digest = blake2b(np.array(prompt_ids, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@bars_of_rank_0()
def with_other_answers(kept: Any, setup: ChatSetup, seed: int, num_proc: int | None) -> Any:
    """Return examples with a second segment: the prompt of each, and the answer of another."""
    import datasets

    inner = ["num_prompt", "prompt_key"]
    if len(kept) == 0:
        return kept.remove_columns(inner)
    if len(kept) == 1:
        raise DataError(
            "KTO compares each answer with that of another row, and only 1 is left; give more rows"
        )
    target, fill = ("labels", IGNORE_INDEX) if setup.options.labels else ("loss_mask", 0)
    partners = _partners(np.asarray(kept["prompt_key"][:]), seed)
    named = {name: f"other_{name}" for name in ("input_ids", target, "num_prompt")}
    others = kept.select_columns(list(named)).select(partners).rename_columns(named)
    both = datasets.concatenate_datasets([kept, others], axis=1)
    return both.map(
        _add_answers,
        batched=True,
        batch_size=BATCH_SIZE,
        fn_kwargs={"names": list(named), "fill": fill, "limit": setup.options.max_length},
        remove_columns=[*inner, *named.values()],
        features=kept.remove_columns(inner).features,
        num_proc=num_proc,
        desc="Adding answers of other rows",
    )


def _partners(prompt_keys_N: np.ndarray, seed: int) -> np.ndarray:
    """Return for each row another one, of another prompt where that can be: a permutation [N]."""
    # a random order with the rows of a prompt together, moved on by the most rows of a prompt
    generator = np.random.default_rng(seed)
    _, groups, counts = np.unique(prompt_keys_N, return_inverse=True, return_counts=True)
    places = generator.permutation(len(counts))[groups]
    order = np.lexsort((generator.random(len(groups)), places))
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -max(int(counts.max()) % len(order), 1))
    return partners


def _add_answers(
    columns: Mapping[str, list[Any]], *, names: list[str], fill: int, limit: int | None
) -> dict[str, list[Any]]:
    ids, target, _ = names
    found: dict[str, list[Any]] = {ids: [], target: []}
    own = zip(*(columns[name] for name in names), strict=True)
    other = zip(*(columns[f"other_{name}"] for name in names), strict=True)
    for ([asked], [trained], n), ([answer], [answered], m) in zip(own, other, strict=True):
        found[ids].append([asked, (asked[:n] + answer[m:])[:limit]])
        found[target].append([trained, ([fill] * n + answered[m:])[:limit]])
    return found
