"""The lengths of examples, whatever holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit._checks import checked_int, checked_lengths
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing.pieces import Patches
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.raw import check_even, is_sequence

__all__ = ["DataLengths", "checked_limits", "data_lengths"]

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
    module = type(data).__module__
    if isinstance(data, str | Path) or module.startswith(("datasets.", "pyarrow.")):
        names = getattr(data, "column_names", None)
        if isinstance(names, list) and "input_ids" not in names:
            data = {name: _column(data, name) for name in names}
        else:
            data = _tokenized(data)
    if isinstance(data, Batch):
        raise TypeError(
            "data is a Batch, whose rows are padded or packed already; pass the examples that the "
            "batch was made of"
        )
    if isinstance(data, TokenizedDataset):
        _check_masks(data)
        if data.vision is not None:
            return DataLengths(data.lengths, data.patches, data.vision.smallest_tokens)
    if isinstance(data, TokenizedDataset | Ragged):
        return DataLengths(data.lengths)
    if is_sequence(data) and any(isinstance(entry, Mapping) for entry in data[:1]):
        return DataLengths(_num_tokens(_columns_of(data)))
    if isinstance(data, Mapping):
        _check_columns(data)
        return DataLengths(_num_tokens(data))
    if not hasattr(data, "__len__") or isinstance(data, bytes):
        raise TypeError(f"data must have lengths, got {type(data).__name__}; {_HINT}")
    return DataLengths(data)


def _tokenized(source: Any) -> TokenizedDataset:
    """Its token ids, and masks if it has them."""
    try:
        return TokenizedDataset(source, columns=["input_ids", "attention_mask"])
    except ValueError:
        return TokenizedDataset(source, columns=["input_ids"])


def _column(dataset: Any, name: str) -> Any:
    """A column of a datasets.Dataset or of a pyarrow Table."""
    is_table = type(dataset).__module__.startswith("pyarrow.")
    return dataset.column(name).to_pylist() if is_table else dataset.with_format(None)[name]


def _names_of_ids(keys: Collection[str]) -> tuple[str, ...]:
    """Of rollouts, or of examples; the latter if there are neither."""
    return next((names for names in _IDS if all(name in keys for name in names)), _IDS[0])


def _columns_of(examples: Sequence[Any]) -> dict[str, list[Any]]:
    """The ids of examples, or of rollouts, and their masks."""
    names = _names_of_ids(examples[0])
    for i, example in enumerate(examples):
        is_mapping = isinstance(example, Mapping)
        if not is_mapping or any(name not in example for name in names):
            keys = sorted(map(str, example)) if is_mapping else type(example).__name__
            raise DataError(
                f"example {i} has no {names[0]}, got {keys}; tokenize it first (tokenize_chat), or "
                "pass lengths"
            )
    columns = {name: [example[name] for example in examples] for name in names}
    return columns | {"attention_mask": [example.get("attention_mask") for example in examples]}


def _check_columns(columns: Mapping[str, Any]) -> None:
    """That there are ids, a row for each example, and as many rows of everything else."""
    name = _names_of_ids(columns)[0]
    if name not in columns:
        raise DataError(f"no input_ids among the columns {sorted(map(str, columns))}; {_HINT}")
    if isinstance(next(iter(columns[name]), None), int | np.integer):
        raise DataError(
            f"a mapping is taken as columns, but its {name} are the tokens of one example; pass a "
            "list: [example]"
        )
    check_even(columns, name)


def _num_tokens(columns: Mapping[str, Any]) -> Any:
    """int64 [N], of each example or rollout."""
    masks = columns.get("attention_mask")
    for i, mask in enumerate(() if masks is None else masks):
        if mask is not None and 0 in mask:
            raise _padded_error(i)
    counts = [
        [_num_ids(i, name, row) for i, row in enumerate(columns[name])]
        for name in _names_of_ids(columns)
    ]
    return np.array(counts, dtype=np.int64).sum(axis=0)


def _num_ids(i: int, name: str, ids: Any) -> int:
    """How many there are, unless they are no token ids."""
    if not hasattr(ids, "__len__") or isinstance(ids, str | bytes) or getattr(ids, "ndim", 1) == 0:
        raise DataError(
            f"example {i}: {name} must be token ids, such as [5, 6], got {type(ids).__name__}; "
            "tokenize it first, or drop the example"
        )
    return len(ids)


def _check_masks(data: TokenizedDataset) -> None:
    """That no row is padded; reads the masks, some rows at a time."""
    for start in range(0, len(data), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(data)))
        masks = data._column_at("attention_mask", rows)
        if isinstance(masks, Ragged) and not masks.values.all():
            place = int((masks.values == 0).argmax())
            raise _padded_error(start + int(np.searchsorted(masks.offsets, place, "right")) - 1)


def _padded_error(i: int) -> DataError:
    return DataError(
        f"example {i} is padded: its attention_mask has a 0, and pads would count as tokens; "
        "tokenize without padding"
    )
