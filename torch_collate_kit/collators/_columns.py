"""SFT examples in, columns out, checked. A column is one flat array and where its rows begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.collators._examples import Examples, first_with, one_value, raw_columns
from torch_collate_kit.collators._flat import int_column, row_array, weight_column
from torch_collate_kit.collators._keys import KNOWN, TARGETS, check_keys
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

__all__ = [
    "NO_EXAMPLES",
    "Columns",
    "loss_token_counts",
    "pad_token_id_of",
    "read_columns",
]


@dataclass(frozen=True)
class Columns:
    """The examples of a batch, a column at a time. ``target`` holds the form's name, if any."""

    input_ids: Ragged  # of ndarrays, as is target
    lengths: np.ndarray  # int64 [N], tokens an example
    target_name: str | None
    target: Ragged | None  # full length, or the last num_actions tokens
    num_actions: np.ndarray | None  # int64 [N], as given


NO_EXAMPLES = Columns(
    Ragged(np.zeros(0, dtype=np.int64), [0]), np.zeros(0, dtype=np.int64), None, None, None
)


def read_columns(examples: Examples, *, train_all: bool = False) -> Columns:
    """Check the examples (DataError names the bad one) and look at them as columns.

    ``train_all``: they have no target, whatever other keys they have.
    """
    raw = raw_columns(examples, KNOWN, "input_ids", "tokenize the text first")
    check_keys({k: f"example {i}" for k, i in first_with(examples).items()}, train_all=train_all)
    input_ids = int_column("input_ids", raw["input_ids"])
    lengths = input_ids.lengths
    if not lengths.all():
        index = int(np.flatnonzero(lengths == 0)[0])
        raise DataError(f"example {index} is empty (input_ids has 0 tokens); filter it out")
    if "attention_mask" in raw:
        _check_attention_mask(raw["attention_mask"], lengths)
    name = _target_name(raw)
    num_actions = _num_actions(raw, lengths) if "num_actions" in raw else None
    if name is None:
        return Columns(input_ids, lengths, None, None, None)
    target = (int_column if name == "labels" else weight_column)(name, raw[name])
    _check_target_lengths(name, target, lengths, num_actions)
    return Columns(input_ids, lengths, name, target, num_actions)


def loss_token_counts(columns: Columns) -> np.ndarray:
    """Trained tokens of each example: int64 [N]. Its first token is none: nothing predicts it."""
    if columns.target is None:
        return columns.lengths - 1
    untrained = IGNORE_INDEX if columns.target_name == "labels" else 0
    is_trained = columns.target.values != untrained
    offsets = columns.target.offsets
    is_trained[offsets[:-1][columns.target.lengths == columns.lengths]] = False
    before = np.append(0, np.cumsum(is_trained))
    return np.diff(before[offsets])


def pad_token_id_of(tokenizer: Any) -> int:
    """The pad id of an int, a tokenizer, or anything with ``pad_token_id``."""
    if isinstance(tokenizer, int | np.integer) and not isinstance(tokenizer, bool):
        pad_token_id = int(tokenizer)
    elif not hasattr(tokenizer, "pad_token_id"):
        raise TypeError(
            "tokenizer must be an int pad id or have .pad_token_id, got "
            f"{type(tokenizer).__name__}; pass the tokenizer, or tokenizer.pad_token_id"
        )
    elif tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token (pad_token_id is None); set one, for instance "
            "tokenizer.pad_token = tokenizer.eos_token, or pass the pad id as an int"
        )
    elif not isinstance(tokenizer.pad_token_id, int | np.integer):
        raise TypeError(f"pad_token_id must be an int, got {tokenizer.pad_token_id!r}")
    else:
        pad_token_id = int(tokenizer.pad_token_id)
    if pad_token_id < 0:
        raise ValueError(f"pad_token_id must be 0 or more, got {pad_token_id}; embeddings index it")
    return pad_token_id


def _target_name(raw: Mapping[str, Any]) -> str | None:
    given = [key for key in TARGETS if key in raw]
    if len(given) > 1:
        raise DataError(
            f"example 0 says twice where its loss is: {' and '.join(given)}; keep one of them"
        )
    return given[0] if given else None


def _num_actions(raw: Mapping[str, Any], lengths: np.ndarray) -> np.ndarray:
    if "loss_mask" not in raw:
        raise DataError(
            "example 0 has num_actions but no loss_mask; give the mask of its last num_actions "
            "tokens, or remove num_actions"
        )
    values = _int_per_example(raw["num_actions"])
    bad = np.flatnonzero((values < 0) | (values > lengths))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"example {i} has num_actions={values[i]}, but {lengths[i]} tokens; it counts the "
            "tokens at the end, 0 to all of them"
        )
    return values


def _int_per_example(column: Any) -> np.ndarray:
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iu":
        return column.astype(np.int64, copy=False)
    counts = [one_value(value) for value in column]
    for i, count in enumerate(counts):
        if not isinstance(count, int) or isinstance(count, bool):
            raise DataError(
                f"example {i}: num_actions is {count!r:.40}; it must be an integer, the number of "
                "tokens at the end that loss_mask speaks of"
            )
    return np.array(counts, dtype=np.int64)


def _check_target_lengths(
    name: str, target: Ragged, lengths: np.ndarray, num_actions: np.ndarray | None
) -> None:
    expected = lengths if num_actions is None else num_actions
    got = target.lengths
    if np.array_equal(got, expected):
        return
    i = int(np.flatnonzero(got != expected)[0])
    if num_actions is not None:
        raise DataError(
            f"example {i}: loss_mask has {got[i]} entries, num_actions={num_actions[i]}; give one "
            "entry for each of the last num_actions tokens"
        )
    hint = " (or pass num_actions too, if it is the mask of the last tokens)"
    raise DataError(
        f"example {i}: {name} has {got[i]} entries, input_ids has {lengths[i]} tokens; give one "
        f"entry a token{hint if name == 'loss_mask' else ''}"
    )


def _check_attention_mask(column: Any, lengths: np.ndarray) -> None:
    whole = isinstance(column, Ragged) and np.array_equal(column.lengths, lengths)
    if whole and column.flat_values.all():
        return
    for i, (row, length) in enumerate(zip(column, lengths.tolist(), strict=True)):
        if isinstance(row, Tensor | np.ma.MaskedArray):
            row = row_array("attention_mask", i, row)
        if not hasattr(row, "__len__") or isinstance(row, str) or len(row) != length:
            sized = hasattr(row, "__len__") and not isinstance(row, str)
            got = f"{len(row)} entries" if sized else repr(row)
            raise DataError(f"example {i}: attention_mask has {got}, input_ids has {length} tokens")
        if (0 in row) if isinstance(row, list | tuple) else not bool(row.all()):
            raise DataError(
                f"example {i}: attention_mask contains a 0, so the example is padded already; "
                "tokenize without padding, collators pad"
            )
