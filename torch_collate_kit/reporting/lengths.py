"""The lengths of examples, whatever holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int, checked_lengths
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing.images import Patches
from torch_collate_kit.reading.raw import check_even, is_sequence

__all__ = ["DataLengths", "checked_limits", "data_lengths"]

_Ints = npt.NDArray[np.int64]
_IDS = (("input_ids",), ("prompt_ids", "response_ids"))
_ROWS = 4096  # read at a time
_HINT = (
    "tokenize first (tokenize_chat_dataset), or pass lengths; data is lengths, a TokenizedDataset, "
    "a datasets.Dataset, or examples with input_ids"
)


class DataLengths(NamedTuple):
    """What a plan needs of examples."""

    lengths: Any
    """int64 [N], tokens of each example."""
    patches: Patches | None = None
    """Vision patches of each example; None where there are no images, or they are not known."""
    dummy_image_tokens: int = 0
    """Tokens of the smallest image, which a row without one may need."""


def data_lengths(data: Any) -> DataLengths:
    """The lengths of ``data``: integers, a dataset, examples, or columns. Reads only masks.

    Raises:
        DataError: no example, a length below 1, examples without token ids, padded examples,
            columns of different lengths.
        TypeError: something else, such as a tokenizer, a Batch or a single number.

    >>> data_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]).lengths.tolist()
    [3, 1]
    """
    found = _found(data)
    lengths = checked_lengths(found.lengths)
    if not len(lengths):
        raise DataError("there are no examples (0 lengths), so nothing to report; pass at least 1")
    return found._replace(lengths=lengths)


def checked_limits(max_tokens: int | Sequence[int]) -> list[int]:
    """One ``max_tokens`` or several, each once, in the order given.

    Raises:
        TypeError, ValueError: no ints, ints below 1, or none.

    >>> checked_limits(8), checked_limits([8, 16, 8])
    ([8], [8, 16])
    """
    is_one = isinstance(max_tokens, str) or not isinstance(max_tokens, Sequence | np.ndarray)
    given: Any = [max_tokens] if is_one else max_tokens
    if not len(given):
        raise ValueError("max_tokens is empty; give at least one")
    return list(dict.fromkeys(checked_int("max_tokens", limit) for limit in given))


def _found(data: Any) -> DataLengths:
    if isinstance(data, str | Path) or type(data).__module__.startswith(("datasets.", "pyarrow.")):
        names = getattr(data, "column_names", ["input_ids"])
        if isinstance(names, list) and "input_ids" not in names:
            return DataLengths(_of_columns({name: _column(data, name) for name in names}))
        if isinstance(names, list) and "attention_mask" in names:
            _check_masks(data)
        data = TokenizedDataset(data, columns=["input_ids"])
    if isinstance(data, Batch):
        raise TypeError(
            "data is a Batch, whose rows are padded or packed already; pass the examples that the "
            "batch was made of"
        )
    if isinstance(data, TokenizedDataset) and data.vision is not None:
        return DataLengths(data.lengths, data.patches, data.vision.smallest_tokens)
    if isinstance(data, Mapping):
        return DataLengths(_of_columns(data))
    if hasattr(data, "lengths"):  # a TokenizedDataset or a Ragged
        return DataLengths(data.lengths)
    if is_sequence(data) and any(isinstance(entry, Mapping) for entry in data[:1]):
        return DataLengths(np.array([_length(i, example) for i, example in enumerate(data)]))
    if not hasattr(data, "__len__") or isinstance(data, bytes):
        raise TypeError(f"data must have lengths, got {type(data).__name__}; {_HINT}")
    return DataLengths(data)


def _length(i: int, example: Any) -> int:
    """Tokens of an example or a rollout."""
    if isinstance(example, Mapping):
        for names in _IDS:
            if all(name in example for name in names):
                _check_not_padded(i, example.get("attention_mask"))
                return sum(_num_ids(i, name, example[name]) for name in names)
    keys = sorted(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
    raise DataError(
        f"example {i} has no input_ids, got {keys}; tokenize it first (tokenize_chat), or pass "
        "lengths"
    )


def _num_ids(i: int, name: str, ids: Any) -> int:
    """How many there are, unless they are no token ids."""
    if not hasattr(ids, "__len__") or isinstance(ids, str | bytes) or getattr(ids, "ndim", 1) == 0:
        raise DataError(
            f"example {i}: {name} must be token ids, such as [5, 6], got {type(ids).__name__}; "
            "tokenize it first, or drop the example"
        )
    return len(ids)


def _check_not_padded(i: int, attention_mask: Any) -> None:
    if attention_mask is not None and 0 in attention_mask:
        raise DataError(
            f"example {i} is padded: its attention_mask has a 0, and pads would count as tokens; "
            "tokenize without padding"
        )


def _check_masks(dataset: Any) -> None:
    """The attention masks of a datasets.Dataset or of a pyarrow Table, some rows at a time."""
    is_table = type(dataset).__module__.startswith("pyarrow.")
    start = 0
    batches = dataset.to_batches(_ROWS) if is_table else dataset.with_format("arrow").iter(_ROWS)
    for batch in batches:
        column = batch.column(batch.schema.get_field_index("attention_mask"))
        for chunk in getattr(column, "chunks", [column]):
            if not np.asarray(chunk.flatten()).all():
                for i, mask in enumerate(chunk.to_pylist(), start=start):
                    _check_not_padded(i, mask)
            start += len(chunk)


def _column(dataset: Any, name: str) -> Any:
    """A column of a datasets.Dataset or of a pyarrow Table."""
    is_table = type(dataset).__module__.startswith("pyarrow.")
    return dataset.column(name).to_pylist() if is_table else dataset.with_format(None)[name]


def _of_columns(columns: Mapping[str, Any]) -> _Ints:
    for names in _IDS:
        if all(name in columns for name in names):
            if not hasattr(next(iter(columns[names[0]]), []), "__len__"):
                raise DataError(
                    f"a mapping is taken as columns, but its {names[0]} are the tokens of one "
                    "example; pass a list: [example]"
                )
            check_even(columns, names[0])
            masks = columns.get("attention_mask")
            for i, mask in enumerate(() if masks is None else masks):
                _check_not_padded(i, mask)
            counts = [
                [_num_ids(i, name, row) for i, row in enumerate(columns[name])] for name in names
            ]
            return np.array(counts, dtype=np.int64).sum(axis=0)
    raise DataError(f"no input_ids among the columns {sorted(map(str, columns))}; {_HINT}")
