"""Digests that tell the data of a stream from others, where it can be read without consuming it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.fingerprints import fingerprint_of, sampled_rows
from torch_collate_kit.loading.orders.checks import differences
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.source import are_nested, is_a


class SourceFingerprint:
    """The fingerprint of a source, made when it is first asked for.

    Of a list it is made again when the list has other examples than before: ``on_epoch`` of a
    loader may change the data between two epochs.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._made: dict[str, Any] | None = None
        self._seen: list[Any] = []  # examples of a list when it was made

    def __call__(self) -> dict[str, Any] | None:
        """Small JSON; None if the source can only be consumed."""
        source = self._source
        if type(source) not in (list, tuple):
            self._made = self._made or _fingerprint(source)
            return self._made
        seen = [len(source), *(source[i] for i in sampled_rows(len(source)).tolist())]
        is_same = len(seen) == len(self._seen) and seen[:1] == self._seen[:1]
        if not is_same or any(a is not b for a, b in zip(seen[1:], self._seen[1:], strict=True)):
            self._made, self._seen = _of_examples(source), seen
        return self._made


def check_same_data(saved: Any, mine: Mapping[str, Any] | None) -> None:
    """Check that the fingerprint in a state does not contradict that of the source.

    Raises:
        StateError: it is of other data.
    """
    if saved is None or (mine is None and isinstance(saved, Mapping)):
        return
    assert mine is not None
    if was := differences(saved, mine):
        raise StateError(
            f"the state is of data with {was}, the source has {differences(mine, saved)}; resume "
            "with the data of the run that saved it, or start without the state"
        )


def _fingerprint(source: Any) -> dict[str, Any] | None:
    if is_a(source, "datasets", "IterableDataset"):
        return {"num_files": getattr(source, "num_shards", None)}
    if not hasattr(source, "__len__"):
        return None
    number = {"num_examples": len(source)}
    try:
        if is_a(source, "datasets", "Dataset"):
            source = TokenizedDataset(source, columns=["input_ids"])
        return number | (source.fingerprint() if isinstance(source, TokenizedDataset) else {})
    except (DataError, TypeError, ValueError):  # no ids in columns, or a null among them
        return number


def _of_examples(examples: Sequence[Any]) -> dict[str, Any]:
    lengths: Any = np.fromiter(map(_length, examples), dtype=np.int64, count=len(examples))
    if examples and are_nested([_ids(examples[0])]):
        found = [[*map(len, ids)] for ids in map(_ids, examples) if are_nested([ids])]
        lengths = Ragged.from_rows(found, dtype=np.int64)
    return {
        "num_examples": len(examples),
        **fingerprint_of(lengths, lambda rows: _token_ids([examples[i] for i in rows.tolist()])),
    }


def _ids(example: Any) -> Any:
    try:
        return example["input_ids"]
    except (TypeError, LookupError, AttributeError):
        return ()


def _length(example: Any) -> int:
    try:
        return len(_ids(example))
    except TypeError:
        return 0


def _token_ids(examples: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return the ids of all examples that have some, end to end."""
    found = [np.empty(0, dtype=np.int64)]
    for example in examples:
        ids = _ids(example)
        for part in ids if are_nested([ids]) else [ids]:
            try:
                row = np.asarray(part)
            except (TypeError, ValueError):
                continue
            if row.ndim == 1 and row.dtype.kind in "iu":
                found.append(row.astype(np.int64))
    return np.concatenate(found)
