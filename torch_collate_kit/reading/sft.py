"""SFT examples in, columns out, checked. A column is one flat array and where its rows begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.declared import (
    DeclaredColumn,
    DeclaredFields,
    empty_columns,
    read_declared,
)
from torch_collate_kit.reading.numbers import (
    Numbers,
    Placed,
    as_flags,
    as_weights,
    bad_weight,
    first_bad,
    int_column,
    is_bad_weight,
    joined,
    row_array,
    spans,
    taken,
    token_ids,
    weight_column,
)
from torch_collate_kit.reading.raw import (
    KNOWN,
    TARGETS,
    Examples,
    check_keys,
    first_with,
    one_value,
    raw_columns,
)

__all__ = [
    "SftExamples",
    "loss_token_counts",
    "no_examples",
    "pad_token_id_of",
    "read_columns",
]


@dataclass(frozen=True)
class SftExamples:
    """The examples of a batch, a column at a time. ``target_name`` is the target's form, if any."""

    input_ids: Numbers
    lengths: np.ndarray  # int64 [N], tokens per example
    target_name: str | None
    target: Numbers | None  # full length, or the last num_actions tokens
    num_actions: np.ndarray | None  # int64 [N], as given
    declared: list[DeclaredColumn]

    def place(self, pieces: Pieces) -> Placed:
        """What the pieces hold; the first token of each is not trained, as nothing predicts it.

        Raises:
            DataError: an id, a label or a weight is wrong.
        """
        ids = token_ids("input_ids", self.input_ids, pieces)
        columns: dict[str, np.ndarray | Tensor] = {"input_ids": ids}
        firsts = np.cumsum(pieces.lengths) - pieces.lengths
        if self.target_name == "labels":
            labels = self._labels(pieces)
            labels[firsts] = IGNORE_INDEX
            columns |= {"labels": labels}
            trained = labels != IGNORE_INDEX
        else:
            weights = self._weights(pieces)
            weights[firsts] = 0
            columns |= {"loss_weights": weights}
            trained = weights if weights.dtype == np.bool_ else weights != 0
        num_actions = self._count_actions(pieces, trained, firsts)
        entries = pieces.starts
        if self.num_actions is not None:
            prompt = (self.lengths - self.num_actions)[pieces.examples]
            entries = pieces.starts + pieces.lengths - num_actions - prompt
        for column in self.declared:
            columns[column.name] = column.place(pieces, entries, num_actions)
        return Placed(columns, int(np.count_nonzero(trained)), num_actions)

    def _labels(self, pieces: Pieces) -> np.ndarray:
        assert self.target is not None
        labels = taken(self.target, pieces.examples, pieces.starts, pieces.lengths)
        is_bad = (labels < 0) & (labels != IGNORE_INDEX)
        if is_bad.any():
            i, token = first_bad(is_bad, pieces)
            raise DataError(
                f"example {i}: labels is {labels[is_bad][0]} at token {token}; a label is a token "
                f"id, or {IGNORE_INDEX} where nothing is trained"
            )
        fits = not labels.size or labels.max() <= np.iinfo(np.int32).max
        return labels.astype(np.int32 if fits else np.int64)

    def _weights(self, pieces: Pieces) -> np.ndarray:
        examples, starts, lengths = pieces[:3]
        if self.target is None:
            return np.ones(int(lengths.sum()), dtype=np.bool_)
        target = as_flags(self.target)
        if self.num_actions is None:
            weights = taken(target, examples, starts, lengths)
        else:
            # The mask has the tokens n - a .. n of an example; a piece may hold a part of them.
            prompt = (self.lengths - self.num_actions)[examples]
            hidden = np.clip(prompt - starts, 0, lengths)
            given = taken(target, examples, np.maximum(starts - prompt, 0), lengths - hidden)
            weights = np.zeros(int(lengths.sum()), dtype=given.dtype)
            weights[spans(np.cumsum(lengths) - lengths + hidden, lengths - hidden)] = given
        checked = as_weights(weights)
        if checked is None:
            is_bad = is_bad_weight(weights)
            i, token = first_bad(is_bad, pieces)
            entry = token
            if self.num_actions is not None:
                entry -= int(self.lengths[i] - self.num_actions[i])
            raise bad_weight(i, str(self.target_name), float(weights[is_bad][0]), entry, token)
        return checked

    def _count_actions(self, pieces: Pieces, trained: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """As given, or from the first trained token to the end; at most all but the first token."""
        if self.num_actions is not None:
            prompt = (self.lengths - self.num_actions)[pieces.examples]
            ends = pieces.starts + pieces.lengths
            return np.clip(ends - prompt, 0, pieces.lengths - 1)
        if self.target is None:
            return pieces.lengths - 1
        # The first token of a piece is not trained, so a trained run begins after one that is not.
        begins = np.append(np.flatnonzero(trained[1:] > trained[:-1]) + 1, len(trained))
        begin = begins[np.searchsorted(begins, firsts)]
        return np.maximum(firsts + pieces.lengths - begin, 0)


def no_examples(fields: DeclaredFields) -> SftExamples:
    """What a rank reads that has no examples of a batch."""
    nothing = np.zeros(0, dtype=np.int64)
    return SftExamples(Ragged(nothing, [0]), nothing, None, None, None, empty_columns(fields))


def read_columns(
    examples: Examples, *, train_all: bool = False, fields: DeclaredFields | None = None
) -> SftExamples:
    """Check the examples (DataError names the bad one) and look at them as columns.

    ``train_all``: they have no target, whatever other keys they have. ``fields`` are read too.
    """
    fields = fields or {}
    raw = raw_columns(examples, (*KNOWN, *fields), "input_ids", "tokenize the text first")
    owners = {key: f"example {i}" for key, i in first_with(examples).items()}
    check_keys(owners, train_all=train_all, declared=tuple(fields))
    input_ids = int_column("input_ids", raw["input_ids"])
    lengths = input_ids.lengths
    if not lengths.all():
        index = int(np.flatnonzero(lengths == 0)[0])
        raise DataError(f"example {index} is empty (input_ids has 0 tokens); filter it out")
    if "attention_mask" in raw:
        _check_attention_mask(raw["attention_mask"], lengths)
    name = _target_name(raw)
    num_actions = _num_actions(raw, lengths) if "num_actions" in raw else None
    declared = read_declared(raw, fields, lengths, num_actions)
    if name is None:
        return SftExamples(input_ids, lengths, None, None, None, declared)
    target = (int_column if name == "labels" else weight_column)(name, raw[name])
    _check_target_lengths(name, target, lengths, num_actions)
    return SftExamples(input_ids, lengths, name, target, num_actions, declared)


def loss_token_counts(columns: SftExamples) -> np.ndarray:
    """Trained tokens of each example: int64 [N]. Its first token is none: nothing predicts it."""
    if columns.target is None:
        return columns.lengths - 1
    untrained = IGNORE_INDEX if columns.target_name == "labels" else 0
    target = joined(columns.target)
    if columns.target_name != "labels" and target.values.dtype.kind == "f":
        is_bad = is_bad_weight(target.values)
        if is_bad.any():
            place = int(np.flatnonzero(is_bad)[0])
            i = int(np.searchsorted(target.offsets, place, side="right")) - 1
            j = place - int(target.offsets[i])
            raise bad_weight(i, str(columns.target_name), float(target[i][j]), j, j)
    is_trained = target.values != untrained
    offsets = target.offsets
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
                "tokens at the end that loss_mask covers"
            )
    return np.array(counts, dtype=np.int64)


def _check_target_lengths(
    name: str, target: Numbers, lengths: np.ndarray, num_actions: np.ndarray | None
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
        f"entry per token{hint if name == 'loss_mask' else ''}"
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
