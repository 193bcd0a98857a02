"""Examples in, columns out, checked.

A column is one flat array and where its rows begin. Ragged columns are looked at where they lie,
arrays are joined, and Python lists are converted once a column (10 to 15 ns a token, the dearest
step of all: hand over arrays where speed matters). ``struct`` does it because it is the fastest way
and refuses floats as ids; ``np.fromiter`` would cut 1.5 to 1 without a word.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit._host_memory import host_array
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

__all__ = [
    "NO_EXAMPLES",
    "TARGETS",
    "Columns",
    "Examples",
    "loss_token_counts",
    "pad_token_id_of",
    "read_columns",
]

TARGETS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
_KNOWN = ("input_ids", "attention_mask", "num_actions", *TARGETS)

Examples = Sequence[Mapping[str, Any]] | Mapping[str, Any]


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


def read_columns(examples: Examples) -> Columns:
    """Check the examples (DataError names the bad one) and look at them as columns."""
    raw = _raw_columns(examples)
    input_ids = _int_column("input_ids", raw["input_ids"])
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
    target = (_int_column if name == "labels" else _weight_column)(name, raw[name])
    _check_target_lengths(name, target, lengths, num_actions)
    return Columns(input_ids, lengths, name, target, num_actions)


def loss_token_counts(columns: Columns) -> np.ndarray:
    """Trained tokens of each example: int64 [N]. Its first token is none: nothing predicts it."""
    if columns.target is None:
        return columns.lengths - 1
    untrained = IGNORE_INDEX if columns.target_name == "labels" else 0
    # in the dtype of loss_mask, where a tiny weight may be 0
    is_trained = columns.target.values.astype(np.float32) != untrained
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


def _raw_columns(examples: Examples) -> dict[str, Any]:
    """The known columns, unconverted: a Ragged or a list with one entry an example."""
    if isinstance(examples, Mapping):
        if _is_one_example(examples.get("input_ids", ())):
            raise DataError(
                "a mapping is taken as columns, but its input_ids are the tokens of one example; "
                "collate one example as a list: [example]"
            )
        raw = {key: examples[key] for key in _KNOWN if key in examples}
    elif _is_sequence(examples):
        raw = _transpose(examples)
    else:
        raise TypeError(
            "examples must be a list of mappings or a mapping of columns, got "
            f"{type(examples).__name__}; of a dataset pass dataset[i:j], of a DataFrame "
            'df.to_dict("records")'
        )
    if "input_ids" not in raw:
        given = sorted(map(str, examples if isinstance(examples, Mapping) else examples[0]))
        raise DataError(f"no input_ids in example 0, got keys {given}; tokenize the text first")
    if not any(key in raw for key in TARGETS):
        _refuse_misspelt_target(examples if isinstance(examples, Mapping) else examples[0])
    num_examples = len(raw["input_ids"])
    if not num_examples:
        raise DataError("the batch is empty (0 examples); give at least one")
    for key, column in raw.items():
        if len(column) != num_examples:
            raise DataError(f"column {key} has {len(column)} rows, input_ids has {num_examples}")
    return raw


def _is_one_example(column: Any) -> bool:
    """Whether ``input_ids`` are tokens, not rows of tokens."""
    if isinstance(column, Ragged):
        return False
    if isinstance(column, np.ndarray | Tensor):
        return column.ndim < 2 and not (isinstance(column, np.ndarray) and column.dtype.hasobject)
    return not hasattr(column, "__iter__") or isinstance(
        next(iter(column), None), int | float | np.number
    )


def _refuse_misspelt_target(keys: Mapping[str, Any]) -> None:
    """Without a target every token is trained, so a near miss must not pass."""
    for key in map(str, keys):
        looks = ("mask" in key or "label" in key) and not key.endswith(
            ("attention_mask", "_tokens_mask")
        )
        if looks and key not in _KNOWN:
            raise DataError(
                f"example 0 has no loss target, but {key!r} looks like one; rename it to one of "
                f"{', '.join(TARGETS)}, or remove it to train every token"
            )


def _transpose(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    if not len(examples):
        raise DataError("the batch is empty (0 examples); give at least one")
    if set(map(type, examples)) != {dict}:
        for i, example in enumerate(examples):
            if not isinstance(example, Mapping):
                raise DataError(
                    f"example {i} is a {type(example).__name__}; an example is a mapping with "
                    "input_ids (of a pandas row pass row.to_dict())"
                )
    first = examples[0].keys()
    known = [key for key in _KNOWN if key in first]
    for i, example in enumerate(examples):
        if example.keys() != first and {k for k in _KNOWN if k in example} != set(known):
            odd = sorted(set(known) ^ {k for k in _KNOWN if k in example})
            raise DataError(
                f"example {i} and example 0 differ in {', '.join(odd)}; every example of a batch "
                "needs the same keys"
            )
    return {key: [example[key] for example in examples] for key in known}


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
    counts = [_one_value(value) for value in raw["num_actions"]]
    for i, count in enumerate(counts):
        if not isinstance(count, int) or isinstance(count, bool):
            raise DataError(
                f"example {i}: num_actions is {count!r:.40}; it must be an integer, the number of "
                "tokens at the end that loss_mask speaks of"
            )
    values = np.array(counts, dtype=np.int64)
    bad = np.flatnonzero((values < 0) | (values > lengths))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"example {i} has num_actions={values[i]}, but {lengths[i]} tokens; it counts the "
            "tokens at the end, 0 to all of them"
        )
    return values


def _one_value(value: Any) -> Any:
    """The number in a NumPy scalar, or in an array or tensor of one entry."""
    if isinstance(value, Tensor):
        value = value.numpy(force=True)
    single = isinstance(value, np.generic | np.ndarray) and value.size == 1
    return value.item() if single else value


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
    for i, (row, length) in enumerate(zip(column, lengths.tolist(), strict=True)):
        if not hasattr(row, "__len__") or isinstance(row, str) or len(row) != length:
            sized = hasattr(row, "__len__") and not isinstance(row, str)
            got = f"{len(row)} entries" if sized else repr(row)
            raise DataError(f"example {i}: attention_mask has {got}, input_ids has {length} tokens")
        if (0 in row) if isinstance(row, list | tuple) else not bool(row.all()):
            raise DataError(
                f"example {i}: attention_mask contains a 0, so the example is padded already; "
                "tokenize without padding, collators pad"
            )


def _int_column(name: str, column: Any) -> Ragged:
    advice = "not integers; token ids index an embedding, convert them with .astype(np.int64)"
    return _column(name, column, "q", "iu", advice)


def _weight_column(name: str, column: Any) -> Ragged:
    return _column(name, column, "d", "iufb", "give 0/1 or weights")


def _column(name: str, column: Any, typecode: str, kinds: str, advice: str) -> Ragged:
    """Flat values of a NumPy dtype of these kinds, and offsets from 0 on."""
    if isinstance(column, Ragged):
        values = column.flat_values
        flat = values if isinstance(values, np.ndarray) else _tensor_to_numpy(values)
        if flat.ndim != 1:
            raise DataError(f"column {name} has {flat.ndim}-D values; a column holds flat rows")
        rows, offsets = [flat], column.offsets - column.offsets[0]
    else:
        types = set(map(type, column))
        if types == {list}:
            return _from_lists(name, column, typecode)
        joined = _joined(column, kinds) if types == {np.ndarray} else None
        if joined is not None:
            return joined
        rows = [_as_array(name, i, row, typecode) for i, row in enumerate(column)]
        offsets = np.cumsum([0, *map(len, rows)])
    dtypes = {row.dtype for row in rows}
    if any(dtype.kind not in kinds for dtype in dtypes):
        i, dtype = next((i, r.dtype) for i, r in enumerate(rows) if r.dtype.kind not in kinds)
        separator = ", " if typecode == "q" else "; "
        raise DataError(f"example {i}: {name} has dtype {dtype}{separator}{advice}")
    if len(rows) == 1:
        return Ragged(rows[0], offsets)
    # a uint64 among int64s would make them floats
    mixed = {"q": np.int64, "d": np.float64}[typecode] if len(dtypes) > 1 else None
    flat = host_array(int(offsets[-1]), mixed or rows[0].dtype)
    return Ragged(np.concatenate(rows, out=flat, casting="same_kind"), offsets)


def _joined(arrays: Sequence[np.ndarray], kinds: str) -> Ragged | None:
    """Flat arrays of one dtype, end to end; None where they are anything else."""
    dtype, ndim = arrays[0].dtype, arrays[0].ndim
    if dtype.kind not in kinds or ndim != 1:
        return None
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays)), out=offsets[1:])
    flat = host_array(int(offsets[-1]), dtype)
    try:
        return Ragged(np.concatenate(arrays, out=flat, casting="no"), offsets)
    except (TypeError, ValueError):  # another dtype, or more dimensions
        return None


def _from_lists(name: str, rows: Sequence[list[Any]], typecode: str, first: int = 0) -> Ragged:
    """Python numbers as int64 ("q") or float64 ("d"); 0/1 masks as bytes."""
    lengths = [len(row) for row in rows]
    if typecode == "d":
        try:
            flat = b"".join([bytes(row) for row in rows])
            return Ragged.from_lengths(np.frombuffer(flat, dtype=np.uint8), lengths)
        except (TypeError, ValueError):
            pass  # floats, other numbers, or no numbers at all
    parts = []
    for i, row in enumerate(rows, start=first):
        try:
            parts.append(struct.pack(f"{len(row)}{typecode}", *row))
        except (struct.error, TypeError, OverflowError):
            raise _bad_entry(name, i, row, typecode) from None
    return Ragged.from_lengths(np.frombuffer(b"".join(parts), dtype=typecode), lengths)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _as_array(name: str, index: int, row: Any, typecode: str) -> np.ndarray:
    if isinstance(row, Tensor):
        row = _tensor_to_numpy(row)
    elif _is_sequence(row):
        return _from_lists(name, [list(row)], typecode, index).values
    elif not isinstance(row, np.ndarray):
        raise DataError(
            f"example {index}: {name} is {'None' if row is None else type(row).__name__}; give a "
            "list, a 1-D ndarray or a 1-D tensor"
        )
    if row.ndim != 1:
        raise DataError(
            f"example {index}: {name} is {row.ndim}-D with shape {row.shape}; an example is one "
            "flat row, take it out of its batch first (ids[0])"
        )
    return row


def _tensor_to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _bad_entry(name: str, index: int, row: list[Any], typecode: str) -> DataError:
    for j, entry in enumerate(row):
        try:
            struct.pack(typecode, entry)
        except (struct.error, TypeError, OverflowError):
            where = f"example {index}: {name}[{j}] is {entry!r:.40}"
            if isinstance(entry, list | tuple | np.ndarray):
                return DataError(f"{where}, so {name} is nested; an example is one flat list")
            wanted = "an integer that fits 64 bits" if typecode == "q" else "a number"
            return DataError(f"{where} ({type(entry).__name__}); it must be {wanted}")
    raise AssertionError("the row converts one by one but not as a whole")
