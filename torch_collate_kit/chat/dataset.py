"""A whole ``datasets.Dataset`` of chat records."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch_collate_kit._checks import checked_optional_int, needed_package, plural
from torch_collate_kit.chat.cache_keys import cache_key, fingerprint
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.chat.records import BadArguments
from torch_collate_kit.chat.tokenize import COUNTS, grouped, tokenize_records
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.source import check_not_transformed

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_logger = logging.getLogger("torch_collate_kit.chat")

BATCH_SIZE = 256
_PIXELS_BATCH_SIZE = 16  # an example may have tens of megabytes
# Part of the cache key: increase it when the output of a record changes.
_CACHE_VERSION = 7


def tokenize_chat_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    options: ChatOptions = DEFAULT_OPTIONS,
    *,
    num_proc: int | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Tokenize every record of a ``datasets.Dataset`` as :func:`tokenize_chat` does.

    Args:
        dataset: records in one of the forms that ``tokenize_chat`` reads. In Arrow each struct has
            the keys of all others, so keys that are None are removed from tool arguments; those in
            JSON strings and in values of ``datasets.Json`` are kept.
        tokenizer: a transformers tokenizer with a chat template; or a processor, for images.
        options: :class:`ChatOptions`, such as ``ChatOptions(train_on="last", max_length=4096)``.
            Examples over ``max_length`` are dropped by default and counted as "too_long".
        num_proc: the number of processes; None for this one.

    Returns a new dataset of the kept examples, in order, and a Counter of the ``skip_reason`` of
    the others, which is also logged. The columns are ``input_ids`` (int32) and ``loss_mask``
    (int8), or with ``labels=True`` ``labels`` (int32); ``weight`` (float32) is kept, other columns
    are not; options and images add columns (docs/chat.md). ``datasets.map`` shows progress and
    caches the result by the paths of image files, not by their contents.

    Raises:
        DataError: as in :func:`tokenize_chat`, naming the index of the example; or every example is
            skipped.
        ValueError: as in :func:`tokenize_chat`.
        TypeError: not a ``datasets.Dataset``, or as in :func:`tokenize_chat`.
        ImportError: datasets is not installed.

    >>> import datasets
    >>> from torch_collate_kit.chat.preview import byte_tokenizer  # a stand-in for AutoTokenizer
    >>> tokenizer = byte_tokenizer(
    ...     "{% for m in messages %}{{ m.role[0] + m.content }}<end>{% endfor %}"
    ...     "{% if add_generation_prompt %}a{% endif %}"
    ... )
    >>> asked, answered = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    >>> chats = datasets.Dataset.from_list([{"messages": [asked, answered]}, {"messages": [asked]}])
    >>> examples, skipped = tokenize_chat_dataset(chats, tokenizer, ChatOptions(max_length=100))
    >>> examples[0]["loss_mask"], skipped
    ([0, 0, 0, 0, 0, 0, 1, 1], Counter({'no_assistant_turn': 1}))
    """
    others = ", or stream.map(tokenize_chat, fn_kwargs=...) and a filter"
    check_is_dataset(dataset, "tokenize_chat_dataset", others, num_proc)
    setup = ChatSetup(tokenizer, options, overflow="drop")
    tokenized = _map(dataset, setup, num_proc)
    removed = [] if options.train_on == "each" else ["record_index"]
    if setup.overflow == "windows":
        removed = [COUNTS]
        if counts := [count for count in tokenized[COUNTS][:] if count]:
            windows, trained, lost = map(sum, zip(*counts, strict=True))
            made = f"{plural(len(counts), 'row')} became {plural(windows, 'window')}"
            gone = f"truncation would have lost {lost / trained:.1%} of the trained tokens"
            _logger.warning("%s; %s", made, gone)
    removed += [] if setup.overflow == "truncate" else ["num_cut_tokens"]
    needed = "a record needs an assistant turn with tokens that the chat template trains"
    count = len(dataset) if options.group_turns else None
    return without_skipped(tokenized, removed, f"{needed}, before max_length", count)


def check_is_dataset(
    dataset: Any, function: str, others: str = "", num_proc: int | None = None
) -> None:
    """Raise TypeError unless ``dataset`` is a ``datasets.Dataset``, and ``num_proc`` a number."""
    checked_optional_int("num_proc", num_proc, hint="None is this process")
    datasets = needed_package("datasets", function)
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"expected a datasets.Dataset, got {type(dataset).__name__}; use Dataset.from_list, a "
            f"split of the DatasetDict{others}"
        )
    check_not_transformed(dataset)


@contextmanager
def bars_of_rank_0(hide: bool = False) -> Iterator[None]:
    """Hide the progress bars of datasets, on all ranks or on all but the first of a launcher."""
    datasets: Any = sys.modules.get("datasets")
    hide = hide or os.environ.get("RANK", "0") != "0"
    if hides := bool(hide and datasets and not datasets.are_progress_bars_disabled()):
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            datasets.enable_progress_bars()


@bars_of_rank_0()
def without_skipped(
    tokenized: Any, removed: Sequence[str], needed: str, num_conversations: int | None = None
) -> tuple[Any, Counter[str]]:
    """Return the kept examples, and the count of each ``skip_reason``. DataError if all have one.

    ``needed`` is the way out then. Given ``num_conversations``, rows are segments of them.
    """
    reasons = tokenized["skip_reason"][:]  # a list at once: a column is read in small batches
    skips, cuts = Counter(filter(None, reasons)), list(filter(None, tokenized["num_cut_tokens"][:]))
    if reasons and skips.total() == len(reasons):
        raise DataError(
            f"all {len(reasons)} examples are skipped: "
            f"{', '.join(f'{count} with {reason}' for reason, count in skips.items())}; {needed}"
        )
    tokenized = tokenized.remove_columns(["skip_reason", *removed])
    what = "conversation" if num_conversations else "example"
    of_all = plural(num_conversations or len(reasons), what)
    left_out = plural(skips.total(), "segment") if num_conversations else skips.total()
    if cuts:
        _logger.warning("cut %d tokens off %d of %s", sum(cuts), len(cuts), of_all)
    if skips:
        _logger.warning("skipped %s of %s: %s", left_out, of_all, dict(skips))
        kept = [i for i, reason in enumerate(reasons) if not reason]
        # flatten_indices removes the indices mapping, which columnar readers do not expect.
        tokenized = tokenized.select(kept).flatten_indices()
    return tokenized, skips


def _map(dataset: Any, setup: ChatSetup, num_proc: int | None) -> Any:
    import datasets

    features = _features(setup)
    if "weight" in dataset.column_names:
        features["weight"] = datasets.Value("float32")
    has_images, has_pixels = setup.images is not None, "pixel_values" in features
    batch_size = _PIXELS_BATCH_SIZE if has_pixels else BATCH_SIZE
    encoded = [name for name in dataset.features if _is_encoded(dataset.features, name)]
    is_table = has_images and bool(encoded)
    return mapped(
        dataset.with_format("arrow" if is_table else None),
        _tokenize_rows,
        features,
        {"setup": setup, "is_table": is_table},
        batch_size=batch_size,
        writer_batch_size=batch_size if has_pixels else None,
        num_proc=num_proc,
        new_fingerprint=fingerprint(chats_key(setup), dataset),
        desc="Tokenizing chats",
    )


@bars_of_rank_0()
def mapped(
    dataset: Any, function: Any, features: Any, arguments: dict[str, Any], **options: Any
) -> Any:
    """Return the columns ``features`` that ``function`` makes of batches of records."""
    import datasets

    if len(dataset) == 0:  # map would return no columns at all
        return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
    found = dataset.map(
        function,
        with_indices=True,
        batched=True,
        fn_kwargs={"names": list(features), "features": dataset.features, **arguments},
        remove_columns=dataset.column_names,
        features=features,
        **options,
    )
    return found.with_format(None)


def chats_key(setup: ChatSetup, *others: Any) -> str:
    """Return the cache key of chats, or of another function with ``others``."""
    loaded = setup.tokenizer if setup.images is None else setup.images.processor
    folder = "" if setup.images is None else os.getcwd()  # where relative paths of images start
    options = [*vars(setup.options).items(), setup.overflow, folder, *others]
    return cache_key(f"chats {_CACHE_VERSION}", loaded, options)


def _features(setup: ChatSetup) -> Any:
    """Return the columns' types: a first batch without examples would make them null."""
    import datasets

    target, dtype = ("labels", "int32") if setup.options.labels else ("loss_mask", "int8")
    found = {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        target: datasets.Sequence(datasets.Value(dtype)),
    }
    if setup.options.group_turns:
        found = {name: datasets.Sequence(segment) for name, segment in found.items()}
    for name, field in () if setup.images is None else setup.images.smallest().items():
        found[name] = datasets.Value(str(field.dtype))
        for _ in range(field.ndim):  # lists of lists, because a null of Array2D is read as NaN
            found[name] = datasets.Sequence(found[name])
    if setup.overflow == "windows":
        found["is_continued"] = datasets.Value("bool")
        found[COUNTS] = datasets.Sequence(datasets.Value("int64"))
    others = {"record_index": "int64", "num_cut_tokens": "int64", "skip_reason": "string"}
    return datasets.Features(found | {name: datasets.Value(kind) for name, kind in others.items()})


def _is_encoded(features: Any, name: str) -> bool:
    """Return whether a column has images to be decoded here, so that errors name them."""
    import datasets

    inner = getattr(features[name], "feature", features[name])  # of a list
    is_image = isinstance(inner, datasets.Image) and inner.decode and inner.mode is None
    return is_image and name in ("image", "images")


def _tokenize_rows(
    columns: Any,
    indices: list[int],
    *,
    setup: ChatSetup,
    names: list[str],
    features: Any,
    is_table: bool,
) -> dict[str, list[Any]]:
    """Tokenize columns of records, lists or an Arrow table."""
    if is_table:
        lists = {name: columns[name].to_pylist() for name in columns.column_names}
        columns = {
            name: values if _is_encoded(features, name) else features.decode_column(values, name)
            for name, values in lists.items()
        }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    results = tokenize_records(rows, setup, from_arrow=features)
    found: list[dict[str, Any]] = []
    for i, result in zip(indices, results, strict=True):
        if isinstance(result, BadArguments):
            result = [{"skip_reason": result.skip_reason}]
        elif isinstance(result, DataError):
            raise DataError(f"example {i}: {result}") from result
        rows_of_record = grouped(result) if setup.options.group_turns else result
        found += [{**row, "record_index": i} for row in rows_of_record]
    return {name: [row.get(name) for row in found] for name in names}
