"""Datasets in any form -> flat columns, by the readers of the collators.

Rows that a reader refuses are set aside with its message, and the rest is read without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.raw import MEDIA, first_with
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reporting.audit.columns import AuditColumns, RolloutColumns
from torch_collate_kit.vision import VisionLayout

__all__ = ["ReadRows", "Refused", "read_rows"]

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class Refused:
    """A row that no collator takes."""

    number: int
    message: str
    of_images: bool = False
    """Whether its text would be taken without its images."""


@dataclass(frozen=True)
class ReadRows:
    """What was read: None if nothing was."""

    columns: AuditColumns | None
    refused: list[Refused]
    has_unread_images: bool = False
    """Whether there are images, and no processor that says how many tokens they take."""
    without_answer: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int64, numbers of chat records that give no row, as nothing in them would be trained."""


@dataclass(frozen=True)
class _Block:
    """Some rows, of which the reader has taken all."""

    numbers: np.ndarray
    columns: AuditColumns
    form: str


def read_rows(
    rows: Callable[[int, int], Any],
    num_rows: int,
    *,
    train_all: bool = False,
    vision: VisionLayout | None = None,
) -> ReadRows:
    """``rows(start, stop)`` gives examples or rollouts, as a list or as columns.

    Raises:
        DataError: no row can be read; the error of the first.
    """
    blocks: list[_Block] = []
    refused: list[Refused] = []
    reader = _Reader(rows, train_all, vision, blocks, refused)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        reader.read(start, min(start + _ROWS_AT_A_TIME, num_rows))
    if not blocks:
        if refused and not any(row.of_images for row in refused):
            raise DataError(refused[0].message)
        return ReadRows(None, refused, reader.has_unread_images)
    counts: Counter[str] = Counter()
    for block in blocks:
        counts[block.form] += len(block.numbers)
    usual = counts.most_common(1)[0][0]
    for block in blocks:
        if block.form != usual:
            what = f"it has {block.form}, the others have {usual}; give every row the same keys"
            refused += [Refused(i, f"row {i}: {what}") for i in block.numbers.tolist()]
    kept = [block.columns for block in blocks if block.form == usual]
    refused.sort(key=lambda row: row.number)
    return ReadRows(_joined(kept), refused, reader.has_unread_images)


@dataclass
class _Reader:
    """Reads spans of rows, halving those with a row that is refused."""

    rows: Callable[[int, int], Any]
    train_all: bool
    vision: VisionLayout | None
    blocks: list[_Block]
    refused: list[Refused]
    has_unread_images: bool = False

    def read(self, start: int, stop: int) -> None:
        examples: Any = None
        has_image = None
        try:
            examples = self.rows(start, stop)
            if self.vision is None:
                examples, has_image = _without_images(examples)
                self.has_unread_images |= bool(has_image is not None and has_image.any())
            found = _read(examples, self.train_all, self.vision)
            columns = _flat(found, np.arange(start, stop))
        except DataError as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                self.read(start, middle)
                self.read(middle, stop)
                return
            message = str(error).replace("example 0", f"row {start}", 1)
            self.refused.append(Refused(start, message, self._is_of_images(examples)))
            return
        if found.images is not None:
            has_image = np.isin(np.arange(stop - start), [*found.images.units])
        columns = replace(columns, has_image=has_image)
        form = ", ".join(_form(found))
        self.blocks.append(_Block(columns.numbers, columns, form))

    def _is_of_images(self, examples: Any) -> bool:
        """Whether what was refused is taken without its images."""
        if self.vision is None or examples is None:
            return False
        try:
            found = _read(_without_images(examples)[0], self.train_all, None)
            _flat(found, np.arange(1))
        except DataError:
            return False
        return True


def _read(examples: Any, train_all: bool, vision: VisionLayout | None) -> ExampleColumns:
    return read_columns(examples, rollouts=None, train_all=train_all, vision=vision)


def _without_images(examples: Any) -> tuple[Any, np.ndarray | None]:
    """The examples without image fields, and which had some: bool [N], or None."""
    if not isinstance(examples, Mapping) and not all(isinstance(e, Mapping) for e in examples):
        return examples, None  # refused by the reader
    names = set(first_with(examples)) & set(MEDIA)
    if not names:
        return examples, None
    if isinstance(examples, Mapping):
        text = {key: column for key, column in examples.items() if key not in names}
        columns = zip(*(examples[name] for name in names), strict=True)
        return text, np.array([any(entry is not None for entry in row) for row in columns])
    rows = [{key: value for key, value in e.items() if key not in names} for e in examples]
    has_image = [any(e.get(name) is not None for name in names) for e in examples]
    return rows, np.array(has_image)


def _form(found: ExampleColumns) -> Sequence[str]:
    """What tells the form of examples: where their loss is, and what rollouts have."""
    if not found.are_rollouts:
        return ["no loss target" if found.target is None else found.target.name]
    images = () if found.images is None else found.images.arrays
    return [*(column.name for column in found.fields), *images, *found.per_example]


def _flat(found: ExampleColumns, numbers: np.ndarray) -> AuditColumns:
    columns = {name: column.values for name, column in found.checked().items()}
    ids, lengths = columns["input_ids"], found.lengths
    if "labels" in columns:
        labels = columns["labels"]
        return AuditColumns(numbers, ids, lengths, labels != IGNORE_INDEX, True, labels)
    weights = columns["loss_weights"]
    if not found.are_rollouts:
        return AuditColumns(numbers, ids, lengths, weights != 0, found.target is not None)
    assert found.num_actions is not None
    trained = np.zeros(len(ids), dtype=np.bool_)
    firsts = np.cumsum(lengths) - found.num_actions
    trained[span_indices(firsts, found.num_actions)] = weights != 0
    return AuditColumns(numbers, ids, lengths, trained, True, rollouts=_rollouts(found, columns))


def _rollouts(found: ExampleColumns, columns: dict[str, np.ndarray]) -> RolloutColumns:
    is_last = found.per_example.get("is_last_step")
    assert found.num_actions is not None
    firsts = np.cumsum(found.num_actions) - found.num_actions
    return RolloutColumns(
        found.num_actions,
        columns["loss_weights"],
        np.add.reduceat(columns["rewards"], firsts, dtype=np.float64),
        columns.get("rollout_logprobs"),
        found.per_example.get("uids"),
        None if is_last is None else np.array(is_last),
    )


def _joined(blocks: Sequence[AuditColumns]) -> AuditColumns:
    """The rows of all blocks, which have the same form."""
    if len(blocks) == 1:
        return blocks[0]
    rollouts = [block.rollouts for block in blocks if block.rollouts is not None]
    return AuditColumns(
        numbers=np.concatenate([block.numbers for block in blocks]),
        ids=np.concatenate([block.ids for block in blocks]),
        lengths=np.concatenate([block.lengths for block in blocks]),
        trained=np.concatenate([block.trained for block in blocks]),
        has_target=blocks[0].has_target,
        labels=_joined_or_none([block.labels for block in blocks]),
        rollouts=_joined_rollouts(rollouts) if rollouts else None,
        has_image=_joined_images(blocks),
    )


def _joined_images(blocks: Sequence[AuditColumns]) -> np.ndarray | None:
    if all(block.has_image is None for block in blocks):
        return None
    return np.concatenate(
        [
            np.zeros(len(of.lengths), dtype=np.bool_) if of.has_image is None else of.has_image
            for of in blocks
        ]
    )


def _joined_rollouts(parts: Sequence[RolloutColumns]) -> RolloutColumns:
    return RolloutColumns(
        num_actions=np.concatenate([part.num_actions for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        logprobs=_joined_or_none([part.logprobs for part in parts]),
        uids=None if parts[0].uids is None else [uid for part in parts for uid in part.uids or ()],
        is_last_step=_joined_or_none([part.is_last_step for part in parts]),
    )


def _joined_or_none(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """All have it, or none: they have the same form."""
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays else None
