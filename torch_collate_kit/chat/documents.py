"""A whole ``datasets.Dataset`` of raw texts -> documents for pretraining."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.chat.cache_keys import cache_key, fingerprint
from torch_collate_kit.chat.dataset import check_is_dataset, mapped
from torch_collate_kit.chat.tokenize import ids_around
from torch_collate_kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger("torch_collate_kit.chat")
_VERSION = "documents 1"  # increase it when the ids of a text change


def tokenize_documents(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text: str = "text",
    end: bool = True,
    parse_special: bool = False,
    num_proc: int | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Tokenize raw texts as documents: what the tokenizer adds around them, and one EOS.

    Args:
        dataset: a ``datasets.Dataset`` with a column of texts, each a document.
        tokenizer: a transformers tokenizer. A BOS is added if it adds one itself.
        text: the column's name.
        end: end each document with EOS, once; False: only with what the tokenizer adds.
        parse_special: special tokens written in a text ("</s>") are these tokens, and what such a
            text begins or ends with is not added again. By default they stay text.
        num_proc: the number of processes; None for this one.

    Returns a new Dataset with the one column ``input_ids`` (int32, all trained, never cut) in the
    order of the texts, and a Counter, also logged: "empty" texts, which are skipped. The result is
    cached by ``datasets``.

    Raises:
        DataError: no such column, or one of no texts; a null, naming its row; all texts are empty.
        ValueError: the tokenizer has no EOS.
        TypeError: not a ``datasets.Dataset``, or not a tokenizer.

    >>> import datasets
    >>> from torch_collate_kit.chat.preview import byte_tokenizer  # a stand-in for AutoTokenizer
    >>> tokenizer = byte_tokenizer("")
    >>> texts = datasets.Dataset.from_dict({"text": ["ab", "", "c"]})
    >>> documents, skipped = tokenize_documents(texts, tokenizer)
    >>> [tokenizer.decode(ids) for ids in documents["input_ids"]], skipped
    (['ab</s>', 'c</s>'], Counter({'empty': 1}))
    """
    check_is_dataset(dataset, "tokenize_documents", num_proc=num_proc)
    options = {"text": text, "end": end, "parse_special": parse_special}
    for name in ("end", "parse_special"):
        checked_bool(name, options[name])
    around = _around(tokenizer, end)
    if text not in dataset.column_names:
        raise DataError(
            f"there is no column {text!r}; pass text= with one of {dataset.column_names}"
        )
    if not len(dataset):
        raise DataError("the dataset is empty (0 texts); give at least one")
    kind = dataset.features[text]
    if getattr(kind, "dtype", None) == "null":
        raise DataError(f"row 0: the text of column {text} is null, as all are; drop the rows")
    if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view"):
        raise DataError(
            f"column {text} holds {kind}, not texts; pass text= with the column of texts"
        )
    from datasets import Features, Sequence, Value

    found = mapped(
        dataset.select_columns(text).with_format("arrow"),
        _tokenize,
        Features({"input_ids": Sequence(Value("int32"))}),
        {"tokenizer": tokenizer, "around": around, "parse_special": parse_special},
        num_proc=num_proc,
        new_fingerprint=fingerprint(cache_key(_VERSION, tokenizer, options), dataset),
        desc="Tokenizing texts",
    )
    skipped = Counter(empty=len(dataset) - len(found))
    if skipped.total():
        _logger.warning("skipped %d of %d texts: %s", skipped.total(), len(dataset), dict(skipped))
    if not len(found):
        raise DataError(f"all {len(dataset)} texts of column {text} are empty; give at least one")
    return found, +skipped


def _around(tokenizer: Any, end: bool) -> tuple[list[int], list[int]]:
    """Return the ids before and after the ids of each text."""
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise TypeError(
            f"expected a tokenizer, got {type(tokenizer).__name__}; AutoTokenizer loads one"
        )
    before, after = ids_around(tokenizer)
    if end and tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS; set tokenizer.eos_token, or pass end=False")
    if end and after[-1:] != [tokenizer.eos_token_id]:
        after = [*after, tokenizer.eos_token_id]
    return before, after


def _tokenize(
    table: Any, indices: list[int], *, tokenizer: Any, around: Any, parse_special: bool, **_: Any
) -> Any:
    import pyarrow as pa

    texts = table.column(0).to_pylist()
    if None in texts:
        raise DataError(f"row {indices[texts.index(None)]}: the text is null; drop the row")
    before, after = around
    tokens, ends = array("i"), [0]
    for ids in _encoded(tokenizer, texts, parse_special):
        if ids:
            has_head = parse_special and ids[: len(before)] == before
            has_tail = parse_special and ids[-1:] == after[-1:]
            for part in ([] if has_head else before, ids, [] if has_tail else after):
                tokens.extend(part)
            ends.append(len(tokens))
    values = pa.array(np.frombuffer(tokens, np.int32))
    return pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)})


def _encoded(tokenizer: Any, texts: list[str], parse_special: bool) -> Iterator[list[int]]:
    """Yield the ids of each text alone; the tokenizer is left as it was."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        options = {"add_special_tokens": False, "split_special_tokens": not parse_special}
        yield from tokenizer(texts, verbose=False, **options)["input_ids"]
        return
    # padding and truncation are off since `_around`
    before, backend.encode_special_tokens = backend.encode_special_tokens, not parse_special
    try:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    yield from (encoding.ids for encoding in encodings)
