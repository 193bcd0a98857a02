"""Examples in, raw columns out: the known keys, one entry an example, nothing converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

__all__ = ["Examples", "first_keys", "first_with", "is_sequence", "one_value", "raw_columns"]

Examples = Sequence[Mapping[str, Any]] | Mapping[str, Any]


def raw_columns(examples: Examples, known: Sequence[str], ids: str, hint: str) -> dict[str, Any]:
    """The known columns: a Ragged or a list each. ``ids`` is the one that counts the examples."""
    if isinstance(examples, Mapping):
        if _is_one_example(examples.get(ids, ())):
            raise DataError(
                f"a mapping is taken as columns, but its {ids} are the tokens of one example; "
                "collate one example as a list: [example]"
            )
        raw = {key: _rows(key, examples[key]) for key in known if key in examples}
    elif is_sequence(examples):
        raw = _transpose(examples, known, ids)
    else:
        raise TypeError(
            "examples must be a list of mappings or a mapping of columns, got "
            f"{type(examples).__name__}; of a dataset pass dataset[i:j], of a DataFrame "
            'df.to_dict("records")'
        )
    if ids not in raw:
        given = sorted(map(str, first_keys(examples)))
        if ids == "input_ids" and {"prompt_ids", "response_ids"} & set(given):
            hint = "rollouts go into RolloutCollator, or into PackedCollator without a sampler"
        if ids == "response_ids" and "input_ids" in given:
            hint += "; examples with input_ids go into PaddedCollator"
        raise DataError(f"no {ids} in example 0, got keys {given}; {hint}")
    for key, column in raw.items():
        if not hasattr(column, "__len__") or getattr(column, "ndim", 1) == 0:
            raise DataError(
                f"column {key} is {type(column).__name__}, which has no rows; a mapping is taken "
                "as columns, with one entry per example"
            )
    num_examples = len(raw[ids])
    if not num_examples:
        raise DataError("the batch is empty (0 examples); give at least one")
    for key, column in raw.items():
        if len(column) != num_examples:
            raise DataError(f"column {key} has {len(column)} rows, {ids} has {num_examples}")
    return raw


def first_keys(examples: Examples) -> Mapping[str, Any]:
    """A mapping with the keys of example 0."""
    return examples if isinstance(examples, Mapping) else examples[0]


def first_with(examples: Examples) -> dict[str, int]:
    """All keys, and the first example that has each."""
    if isinstance(examples, Mapping):
        return dict.fromkeys(examples, 0)
    first = examples[0].keys()
    found = dict.fromkeys(first, 0)
    for i, example in enumerate(examples):
        if example.keys() != first:
            found |= dict.fromkeys(example.keys() - found.keys(), i)
    return found


def _is_one_example(column: Any) -> bool:
    """Whether the ids are tokens, not rows of tokens."""
    if isinstance(column, Ragged):
        return False
    if isinstance(column, np.ndarray | Tensor):
        return column.ndim < 2 and not (isinstance(column, np.ndarray) and column.dtype.hasobject)
    return not hasattr(column, "__iter__") or isinstance(
        next(iter(column), None), int | float | np.number
    )


def _rows(name: str, column: Any) -> Any:
    """A column as it is, but of a nested tensor its rows, which have no len() otherwise."""
    if isinstance(column, np.ma.MaskedArray):
        raise DataError(
            f"column {name} is a masked array, whose mask would be lost; give .filled(value)"
        )
    return column.unbind() if isinstance(column, Tensor) and column.is_nested else column


def _transpose(
    examples: Sequence[Mapping[str, Any]], names: Sequence[str], ids: str
) -> dict[str, list[Any]]:
    if not len(examples):
        raise DataError("the batch is empty (0 examples); give at least one")
    if set(map(type, examples)) != {dict}:
        for i, example in enumerate(examples):
            if not isinstance(example, Mapping):
                raise DataError(
                    f"example {i} is a {type(example).__name__}; an example is a mapping with "
                    f"{ids} (of a pandas row pass row.to_dict())"
                )
    first = examples[0].keys()
    known = [key for key in names if key in first]
    for i, example in enumerate(examples):
        if example.keys() != first and {k for k in names if k in example} != set(known):
            odd = sorted(set(known) ^ {k for k in names if k in example})
            raise DataError(
                f"example {i} and example 0 differ in {', '.join(odd)}; every example of a batch "
                "needs the same keys"
            )
    return {key: [example[key] for example in examples] for key in known}


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence, and no string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def one_value(value: Any) -> Any:
    """The number in a NumPy scalar, or in an array or tensor of one entry."""
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return value.item() if is_dense and value.numel() == 1 else value
    if isinstance(value, np.ma.MaskedArray):  # of a masked entry it would be 0
        return value
    single = isinstance(value, np.generic | np.ndarray) and value.size == 1
    return value.item() if single else value
