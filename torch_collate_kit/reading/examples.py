"""What was read of the examples of a batch, a column at a time, and what its rows hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import FieldSpec
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged, span_indices
from torch_collate_kit.reading.fields import DeclaredFields, FieldColumn
from torch_collate_kit.reading.media import ImageColumn, Images
from torch_collate_kit.reading.numbers import Numbers
from torch_collate_kit.reading.spans import are_int32_ids, first_bad, joined, taken, with_row
from torch_collate_kit.reading.trained_runs import TrainedRuns
from torch_collate_kit.vision import VisionLayout

__all__ = ["LEAST_WEIGHT", "ExampleColumns", "PlacedColumns", "as_flags", "bad_weight"]

# Divided by the loss tokens of a batch, up to 10**8, it is still a normal float32.
LEAST_WEIGHT = 1e-30


@dataclass(frozen=True)
class PlacedColumns:
    """What the pieces of a batch hold, in the order of its rows."""

    columns: dict[str, np.ndarray | Tensor]
    entries: dict[str, np.ndarray]
    """int64 [S] each: how many of a column each piece has."""
    counts: dict[str, np.ndarray]
    """int64 [S] each: the "lengths" of the pieces, their "responses", and the "routed" tokens."""
    num_trained: np.ndarray
    """int64 [S], trained tokens of each piece."""


@dataclass(frozen=True)
class ExampleColumns:
    """The examples of a batch, SFT examples or rollouts. Legend: N examples."""

    input_ids: Numbers
    lengths: np.ndarray
    """int64 [N], tokens per example."""
    target_name: str | None
    """In which form the loss target was given, if it was."""
    target: Numbers | None
    """Labels or weights: of every token, or of the last ``num_actions``."""
    num_actions: np.ndarray | None
    """int64 [N], as given: of a rollout its response tokens."""
    fields: Sequence[FieldColumn | ImageColumn]
    per_example: dict[str, list[Any]] = field(default_factory=dict)
    """Row metadata to be: uids, trajectory_ids, is_last_step."""
    names: tuple[str, ...] = ()
    """The fields that a batch has of them, in addition to those of every SFT batch."""
    are_rollouts: bool = False
    images: Images | None = None
    """None where the collator was given no vision model; else there may be no image in it."""
    image_token_id: int | None = None
    """The id of placeholders, which are not trained."""

    @classmethod
    def of_none(cls, fields: DeclaredFields, vision: VisionLayout | None) -> ExampleColumns:
        """What a rank reads that has no examples of a batch."""
        nothing = np.zeros(0, dtype=np.int64)
        empty = Ragged(nothing, [0])
        columns = [FieldColumn(name, spec, empty) for name, spec in fields.items()]
        images = None if vision is None else Images.of_none(vision)
        of_them = [] if images is None else images.columns(nothing)
        names = (*fields, *(column.name for column in of_them))
        return cls(
            empty, nothing, None, None, None, [*columns, *of_them], names=names, images=images
        )

    def with_smallest_image(self) -> ExampleColumns:
        """The same with one more example, the smallest image of the model, which trains nothing."""
        assert self.images is not None
        layout = self.images.layout
        num_tokens = layout.smallest_tokens
        row = np.full(num_tokens, layout.image_token_id)
        target, num_actions = self.target, self.num_actions
        if target is not None:
            untrained = IGNORE_INDEX if self.target_name == "labels" else 0
            none = np.full(num_tokens if num_actions is None else 0, untrained)
            target = with_row(target, none)
        if num_actions is not None:
            num_actions = np.append(num_actions, 0)
        input_ids = with_row(self.input_ids, row)
        images = self.images.with_smallest(input_ids)
        lengths = np.append(self.lengths, num_tokens)
        names = {column.name for column in images.columns(lengths)}
        fields = [
            column.with_row(num_tokens)
            for column in self.fields
            if isinstance(column, FieldColumn) and column.name not in names
        ]
        return replace(
            self,
            input_ids=input_ids,
            lengths=lengths,
            target=target,
            num_actions=num_actions,
            fields=[*fields, *images.columns(lengths)],
            images=images,
        )

    @property
    def specs(self) -> dict[str, FieldSpec]:
        """What the columns of the fields are."""
        return {column.name: column.spec for column in self.fields}

    @property
    def columns(self) -> dict[str, Numbers]:
        """The columns of the fields, and that of the loss target in the form in which it came."""
        target = {} if self.target is None else {str(self.target_name): self.target}
        fields = [column for column in self.fields if isinstance(column, FieldColumn)]
        return target | {column.name: column.values for column in fields}

    def place(self, pieces: Pieces) -> PlacedColumns:
        """What the pieces hold; the first token of each is not trained, as nothing predicts it.

        Raises:
            DataError: an id, a label, a weight, or a number of a declared field is wrong.
        """
        ids = self._ids(pieces)
        is_image = self._is_image(ids)
        if self.num_actions is None:
            name, target = self._target(pieces)
            if is_image is not None:
                target[is_image] = IGNORE_INDEX if name == "labels" else 0
            untrained = IGNORE_INDEX if name == "labels" else 0
            trained = target if target.dtype == np.bool_ else target != untrained
            runs = self._runs(pieces, trained)
            first_actions, num_actions = pieces.starts, self._count_actions(pieces, runs)
            num_trained = pieces.lengths - 1 if runs is None else runs.counts
        else:
            name, (first_actions, num_actions) = "loss_weights", self._actions(pieces)
            target = trained = self._weights(pieces.examples, first_actions, num_actions)
            places = span_indices(np.cumsum(pieces.lengths) - num_actions, num_actions)
            if is_image is not None:
                trained[is_image[places]] = 0
            is_whole = bool(trained.all())  # as of most rollouts
            num_trained = num_actions if is_whole else TrainedRuns(trained, num_actions).counts
            if not self.are_rollouts:  # one per token, as from every other form of target
                target = np.zeros(int(pieces.lengths.sum()), dtype=trained.dtype)
                target[places] = trained
        columns: dict[str, np.ndarray | Tensor] = {"input_ids": ids, name: target}
        entries = {"input_ids": pieces.lengths, name: pieces.lengths}
        if self.are_rollouts:
            entries[name] = num_actions
        counts = {"lengths": pieces.lengths, "responses": num_actions}
        for column in self.fields:
            first, number = column.spans(pieces, first_actions, num_actions)
            columns[column.name] = column.place(pieces, first, number)
            entries[column.name] = number
            if column.spec.count == "routed":
                counts["routed"] = number
        return PlacedColumns(columns, entries, counts, num_trained)

    def _is_image(self, ids: np.ndarray) -> np.ndarray | None:
        """Where ids are placeholders of images, which are not trained; None where there are none.

        No model and no processor excludes them from the loss.
        """
        if self.image_token_id is None:
            return None
        is_image: np.ndarray = ids == self.image_token_id
        return is_image if is_image.any() else None

    def _target(self, pieces: Pieces) -> tuple[str, np.ndarray]:
        """Labels or weights, one per token, by their name as a column."""
        name, untrained = "loss_weights", 0
        if self.target_name == "labels":
            name, untrained, target = "labels", IGNORE_INDEX, self._labels(pieces)
        elif self.target is None:
            target = np.ones(int(pieces.lengths.sum()), dtype=np.bool_)
        else:
            target = self._weights(*pieces[:3])
        target[np.cumsum(pieces.lengths) - pieces.lengths] = untrained
        return name, target

    def _actions(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        """Which of its example's last ``num_actions`` tokens each piece has: first, and how many.

        Not its first token, which nothing predicts.
        """
        prompts = (self.lengths - self.num_actions)[pieces.examples]
        ends = pieces.starts + pieces.lengths
        num_actions = np.clip(ends - prompts, 0, pieces.lengths - 1)
        return ends - num_actions - prompts, num_actions

    def _runs(self, pieces: Pieces, trained: np.ndarray) -> TrainedRuns | None:
        """The trained tokens; None where all are trained but the first of each piece."""
        if self.target is None and not self.images:
            return None
        return TrainedRuns(trained, pieces.lengths)

    def _count_actions(self, pieces: Pieces, runs: TrainedRuns | None) -> np.ndarray:
        """Tokens of each piece from the first trained one to its end: int64 [S]."""
        if runs is None:
            return pieces.lengths - 1
        # the first token of a piece is not trained, so no run goes on from the piece before
        return np.maximum(np.cumsum(pieces.lengths) - runs.first, 0)

    def num_loss_tokens(self) -> np.ndarray:
        """Trained tokens of each example: int64 [N]. Its first token is not trained.

        Raises:
            DataError: a weight is wrong.
        """
        ids = joined(self.input_ids)
        is_image = self._is_image(ids.values)
        if self.target is None:
            if is_image is None:
                return self.lengths - 1
            is_trained, offsets = ~is_image, ids.offsets
        else:
            untrained = IGNORE_INDEX if self.target_name == "labels" else 0
            target = joined(self.target)
            if self.target_name != "labels" and target.values.dtype.kind == "f":
                every = np.arange(len(self.lengths)), np.zeros_like(self.lengths), target.lengths
                self._weights(*every)  # raises
            is_trained, offsets = target.values != untrained, target.offsets
            if is_image is not None:  # a target may be of the last tokens alone
                is_trained &= ~is_image[
                    span_indices(ids.offsets[1:] - target.lengths, target.lengths)
                ]
        is_trained[offsets[:-1][np.diff(offsets) == self.lengths]] = False
        before = np.append(0, np.cumsum(is_trained))
        return np.diff(before[offsets])

    def _ids(self, pieces: Pieces) -> np.ndarray:
        """int32 where they fit, else int64: a copy."""
        ids, picked = self.input_ids, pieces[:3]
        if isinstance(ids, Ragged) and are_int32_ids(ids.values):
            return taken(ids, *picked, np.int32)
        values = taken(ids, *picked)
        if are_int32_ids(values):
            return values.astype(np.int32)
        if int(values.min()) >= 0 and int(values.max()) <= np.iinfo(np.int64).max:
            return values.astype(np.int64)
        is_bad = values.astype(np.int64) < 0
        i, token = first_bad(is_bad, *picked)
        raise DataError(
            f"example {i}: input_ids is {values[is_bad][0]} at token {token}; token ids are 0 or "
            "more (-100 belongs into labels)"
        )

    def _labels(self, pieces: Pieces) -> np.ndarray:
        assert self.target is not None
        labels = taken(self.target, *pieces[:3])
        is_bad = (labels < 0) & (labels != IGNORE_INDEX)
        if is_bad.any():
            i, token = first_bad(is_bad, *pieces[:3])
            raise DataError(
                f"example {i}: labels is {labels[is_bad][0]} at token {token}; a label is a token "
                f"id, or {IGNORE_INDEX} where nothing is trained"
            )
        fits = not labels.size or labels.max() <= np.iinfo(np.int32).max
        return labels.astype(np.int32 if fits else np.int64)

    def _weights(self, examples: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The weights of these spans, bool where they are 0 and 1, else float32: a copy."""
        assert self.target is not None
        target = as_flags(self.target) if isinstance(self.target, Ragged) else self.target
        weights = taken(target, examples, starts, lengths)
        checked = _as_weights(weights)
        if checked is None:
            is_bad = _is_bad_weight(weights)
            i, entry = first_bad(is_bad, examples, starts, lengths)
            hidden = 0 if self.num_actions is None else int(self.lengths[i] - self.num_actions[i])
            value = float(weights[is_bad][0])
            raise bad_weight(i, str(self.target_name), value, entry, entry + hidden)
        return checked


def as_flags(column: Ragged) -> Ragged:
    """A column that holds nothing but 0 and 1 as bools, which are put in order in less memory."""
    values = column.values
    if values.dtype != np.bool_:
        trained = values != 0
        if np.count_nonzero(values == 1) == np.count_nonzero(trained):
            return Ragged(trained, column.offsets)
    return column


def _as_weights(values: np.ndarray) -> np.ndarray | None:
    """Loss weights as bool where all are 0 or 1, else float32: a copy; None where one is wrong."""
    if values.dtype == np.bool_:
        return values.copy()
    trained = values != 0
    if np.count_nonzero(values == 1) == np.count_nonzero(trained):
        return trained
    return None if _is_bad_weight(values).any() else values.astype(np.float32)


def _is_bad_weight(values: np.ndarray) -> np.ndarray:
    """Where a weight is negative, not finite in float32, or lost in it."""
    with np.errstate(over="ignore"):
        kept = values.astype(np.float32)
    return ~((values == 0) | ((kept >= LEAST_WEIGHT) & (kept < np.inf)))


def bad_weight(index: int, name: str, value: float, entry: int, token: int) -> DataError:
    """What is wrong with a weight: entry ``entry`` of its column, which is of token ``token``."""
    if 0 < value < 1:
        return DataError(
            f"example {index}: {name}[{entry}] is {value}, which float32 loses; a weight must be 0 "
            f"or at least {LEAST_WEIGHT}: give 0 where nothing is trained"
        )
    return DataError(
        f"example {index}: {name} is {value} at token {token}; weights must be finite and 0 or more"
    )
