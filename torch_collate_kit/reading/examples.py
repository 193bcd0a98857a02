"""Columns of examples, and of the rows of a batch made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import computed_once
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import FieldSpec, PerExample, PerResponseToken, PerToken
from torch_collate_kit.batch.placement import TargetKind, whole_examples
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.packing.rows import Pieces, row_sums, running_sum
from torch_collate_kit.packing.trees import Trees, trees_of
from torch_collate_kit.ragged import Ragged, span_indices, unchecked
from torch_collate_kit.reading.columns import Numbers, tensor_to_numpy
from torch_collate_kit.reading.entries import (
    DeclaredFields,
    FieldColumn,
    count_trained,
    joined,
    placed_ids,
    placed_labels,
    placed_weights,
    segment_name,
    taken,
    weighted,
    with_row,
)
from torch_collate_kit.reading.images import Images, read_images
from torch_collate_kit.vision import VisionLayout

_Values = tuple[FieldSpec, np.ndarray | Tensor, Pieces]  # values, and which entries they are


@dataclass(frozen=True)
class RowColumns:
    """Columns of the pieces of a batch, in the order of its rows."""

    pieces: Pieces
    columns: dict[str, Ragged]  # tensors, with the entries of each row
    specs: dict[str, FieldSpec]  # specs of the columns; ids have no pad yet
    counts: dict[str, np.ndarray]
    """int64 [S] each: the "lengths" of the pieces, their "responses", and the "routed" tokens."""
    num_trained: np.ndarray  # int64 [S], trained tokens of each piece
    examples: np.ndarray  # int64 [S], the example of each piece
    segment_numbers: np.ndarray | None
    """int64 [S], which of its example's segments each piece is; None of one each."""


@dataclass(frozen=True)
class ExampleColumns:
    """SFT examples or rollouts of a batch, column by column. Legend: N examples.

    With ``segment_offsets`` examples are lists of segments, and N counts segments everywhere but in
    ``per_example`` and the fields that are declared ``PerExample``.
    """

    input_ids: Numbers
    target: FieldColumn | None
    """Loss target, if it was given: labels or weights, of all or the last ``num_actions``."""
    num_actions: np.ndarray | None  # int64 [N], as given: of a rollout its response tokens
    fields: Sequence[FieldColumn]
    names: tuple[str, ...]  # fields of the batch in addition to those of every batch
    images: Images | None
    """None where the collator was given no vision model; else there may be no image in it."""
    per_example: dict[str, list[Any]] = field(default_factory=dict)
    """Row metadata to be: declared ``PerExample(str)``."""
    per_segment: dict[str, list[Any]] = field(default_factory=dict)
    """Row metadata to be, of rollouts: uids, trajectory_ids, is_last_step."""
    are_rollouts: bool = False
    weights: np.ndarray | None = None
    """float32 [N], what multiplies the loss weights of each example, if it was given."""
    segment_offsets: np.ndarray | None = None
    """int64, the first segment of each example, and the number of all; None of one each."""
    targets: TargetKind = "next_token"

    @classmethod
    def of_none(cls, fields: DeclaredFields, vision: VisionLayout | None) -> ExampleColumns:
        """Return the columns for a rank without examples of a batch."""
        empty = Ragged(np.zeros(0, dtype=np.int64), [0])
        texts: dict[str, list[Any]] = {
            name: [] for name, spec in fields.items() if spec.dtype is str
        }
        columns = [
            FieldColumn(name, spec, Ragged(np.zeros((0, *getattr(spec, "shape", ()))), [0]))
            for name, spec in fields.items()
            if name not in texts
        ]
        images = None if vision is None else read_images({}, vision, empty)
        names = (column.name for column in columns), () if images is None else images.arrays
        return cls(empty, None, None, columns, (*chain(*names),), images, texts)

    def with_dummy_images(self, pieces: Pieces, rows: np.ndarray) -> tuple[ExampleColumns, Pieces]:
        """Add the smallest image as an untrained example, a piece of it to these rows: bool [R]."""
        assert self.images is not None
        layout = self.images.layout
        num_tokens, target, num_actions = layout.smallest_tokens, self.target, self.num_actions
        input_ids = with_row(self.input_ids, np.full(num_tokens, layout.image_token_id))
        columns = replace(
            self,
            input_ids=input_ids,
            target=None if target is None else target.with_row(num_tokens),
            num_actions=None if num_actions is None else np.append(num_actions, 0),
            fields=[column.with_row(num_tokens) for column in self.fields],
            images=self.images.with_smallest(input_ids),
            weights=None if self.weights is None else np.append(self.weights, np.float32(0)),
        )
        if self.segment_offsets is not None:
            offsets = np.append(self.segment_offsets, len(input_ids))
            columns = replace(columns, segment_offsets=offsets)
        ends = pieces.row_offsets[1:][rows]
        return columns, Pieces(
            np.insert(pieces.examples, ends, len(self.example_lengths)),
            np.insert(pieces.starts, ends, 0),
            np.insert(pieces.lengths, ends, num_tokens),
            pieces.row_offsets + np.append(0, np.cumsum(rows)),
        )

    def end_to_end(self, pieces: Pieces) -> tuple[ExampleColumns, Pieces]:
        """Return every row of pieces as one example, and its piece; rows may be empty."""
        others = [column.name for column in self.fields if column.spec.count != "lengths"]
        if self.num_actions is not None or others:
            raise DataError(
                f"the examples have {[*others, 'num_actions'][0]}, which is of a whole example; "
                "isolate=False makes one example of a row: leave it out, or keep documents apart"
            )
        ends = running_sum(pieces.lengths)[pieces.row_offsets]
        offsets = np.unique(ends)  # an empty row ends where it begins

        def rows_of(values: Numbers) -> Ragged:
            return unchecked(np.asarray(taken(values, pieces)), offsets)

        target = self.target
        columns = replace(
            self,
            input_ids=rows_of(self.input_ids),
            target=None if target is None else replace(target, values=rows_of(target.values)),
            fields=[replace(column, values=rows_of(column.values)) for column in self.fields],
        )
        numbers = np.arange(len(offsets) - 1)
        filled = running_sum(ends[1:] > ends[:-1])
        return columns, Pieces(numbers, np.zeros_like(numbers), np.diff(offsets), filled)

    @computed_once
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens per example, or per segment of examples that are lists of them."""
        return self.input_ids.lengths

    @property
    def example_lengths(self) -> np.ndarray | Ragged:
        """The tokens of each example: int64, or a Ragged with those of its segments."""
        if self.segment_offsets is None:
            return self.lengths
        return unchecked(self.lengths, self.segment_offsets)

    @computed_once
    def trees(self) -> Trees:
        """The prefix trees of the segments of each example."""
        ids, offsets = joined(self.input_ids), self.segment_offsets
        if offsets is None:  # a rank without examples
            offsets = np.zeros(1, dtype=np.int64)
        return trees_of(ids.values, ids.offsets, offsets)

    def patches(self) -> list[list[int]]:
        """Return the patches of each image of every example, in lists."""
        assert self.images is not None
        found, offsets = self.images.patches, self.segment_offsets
        if offsets is None:
            return found
        return [[*chain(*found[start:stop])] for start, stop in pairwise(offsets.tolist())]

    def in_segments(self, pieces: Pieces) -> Pieces:
        """Return pieces of whole examples as the pieces of their segments."""
        if self.segment_offsets is None:  # a rank without examples
            return pieces
        counts = np.diff(self.segment_offsets)[pieces.examples]
        segments = span_indices(self.segment_offsets[pieces.examples], counts)
        offsets = running_sum(counts)[pieces.row_offsets]
        return Pieces(segments, np.zeros_like(segments), self.lengths[segments], offsets)

    def examples_of(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the example of each piece, and the number of its segment there: int64 [S]."""
        if self.segment_offsets is None:
            return pieces.examples, None
        places = np.searchsorted(self.segment_offsets, pieces.examples, side="right") - 1
        return places, pieces.examples - self.segment_offsets[places]

    def place(self, pieces: Pieces) -> RowColumns:
        """Return the columns of the pieces, whose first tokens nothing predicts or trains."""
        with examples_named(segment_name(self.segment_offsets)):
            placed, counts, num_trained = self._placed(pieces)
        examples, numbers = self.examples_of(pieces)
        whole = pieces
        if numbers is not None:  # what is of an example stands where its first segment is
            is_first = numbers == 0
            first, offsets = examples[is_first], running_sum(is_first)[pieces.row_offsets]
            whole = Pieces(first, 0 * first, 0 * first, offsets)
        for column in self.fields:
            if isinstance(column.spec, PerExample):
                values, entries = column.place(whole, whole)
                placed[column.name] = column.spec, values, entries
        columns: dict[str, Ragged] = {}
        specs: dict[str, FieldSpec] = {}
        for name, (spec, given, entries) in placed.items():
            offsets = np.append(0, np.cumsum(entries.lengths))[entries.row_offsets]
            columns[name], specs[name] = unchecked(torch.as_tensor(given), offsets), spec
        return RowColumns(pieces, columns, specs, counts, num_trained, examples, numbers)

    def _placed(
        self, pieces: Pieces
    ) -> tuple[dict[str, _Values], dict[str, np.ndarray], np.ndarray]:
        """Return all but the numbers of examples; the counts, and trained tokens, of the pieces."""
        ids = placed_ids(self.input_ids, pieces, self.num_actions if self.are_rollouts else None)
        image_token_id = None if self.images is None else self.images.layout.image_token_id
        is_image = None if image_token_id is None else ids == image_token_id
        target, responses, num_trained = self._target(pieces, is_image)
        counts = {"lengths": pieces.lengths, "responses": responses.lengths}
        placed: dict[str, _Values] = {"input_ids": (PerToken(torch.int64), ids, pieces)}
        if self._has_labels:
            placed["labels"] = PerToken(torch.int64, IGNORE_INDEX), target, pieces
            if self.weights is not None:
                weights = self._times_weights(target != IGNORE_INDEX, pieces)
                placed["loss_weights"] = PerToken(torch.float32), weights, pieces
        elif self.are_rollouts:
            placed["loss_weights"] = PerResponseToken(torch.float32), target, responses
        elif self.targets is not None:
            placed["loss_weights"] = PerToken(torch.float32), target, pieces
        for column in self.fields:
            if isinstance(column.spec, PerExample):
                continue
            values, entries = column.place(pieces, responses)
            placed[column.name] = column.spec, values, entries
            if column.spec.count == "routed":
                counts["routed"] = entries.lengths
        if self.images is not None:
            placed |= self.images.place(pieces)
        return placed, counts, num_trained

    def checked(self, *, limits: bool = True) -> dict[str, Ragged]:
        """Return all columns but images as ndarrays in the dtypes of a batch, a row per example."""
        images = None if self.images is None else replace(self.images, arrays={})
        found = replace(self, images=images)
        if not limits:
            fields = [replace(column, most=math.inf) for column in self.fields]
            found = replace(found, fields=fields)
        placed = found.place(whole_examples(self.lengths))
        return {
            name: Ragged(tensor_to_numpy(name, None, column.values), column.offsets)
            for name, column in placed.columns.items()
        }

    def num_loss_tokens(
        self, image_token_id: int | None = None, *, per_segment: bool = False
    ) -> np.ndarray:
        """Count the trained tokens of each example, int64; image tokens are not trained."""
        is_image = None
        if image_token_id is not None:
            is_image = joined(self.input_ids).values == image_token_id
        with examples_named(segment_name(self.segment_offsets)):
            counts = self._target(whole_examples(self.lengths), is_image)[2]
        if self.segment_offsets is None or per_segment:
            return counts
        return row_sums(counts, self.segment_offsets)

    def _target(
        self, pieces: Pieces, is_image: np.ndarray | None
    ) -> tuple[np.ndarray, Pieces, np.ndarray]:
        """Return labels or weights, the response tokens, and trained tokens per piece."""
        if self.targets is None:
            none = np.zeros_like(pieces.lengths)
            return none, pieces._replace(lengths=none), none
        untrained = IGNORE_INDEX if self._has_labels else 0
        if self.targets == "same_token":
            target = self._given(pieces)
            if is_image is not None:
                target[is_image] = untrained
            before = running_sum(target != untrained)  # any token may be trained, the first, too
            return target, pieces, np.diff(before[running_sum(pieces.lengths)])
        if self.num_actions is None:
            responses, most = pieces, pieces.lengths - 1
            target = self._given(pieces)
            target[np.cumsum(pieces.lengths) - pieces.lengths] = untrained
        else:
            responses = last_of_examples(pieces, self.lengths, self.num_actions)
            most = responses.lengths
            target = self._given(responses)
            if is_image is not None:
                is_image = is_image[span_indices(np.cumsum(pieces.lengths) - most, most)]
        if is_image is not None and is_image.any():  # no model and no processor excludes them
            target[is_image] = untrained
        trained = target if target.dtype == np.bool_ else target != untrained
        if np.count_nonzero(trained) == most.sum():
            num_trained = num_responses = most
        else:
            num_trained, num_responses = count_trained(trained, responses.lengths)
        if self.num_actions is None:
            if pieces.starts.any():
                num_responses = self._responses_of_split(pieces, num_responses)
            responses = pieces._replace(lengths=num_responses)
        elif not self.are_rollouts:  # one per token, as from every other form of target
            given, kinds = target, np.tile([False, True], len(most))
            target = np.repeat(kinds, np.stack([pieces.lengths - most, most], 1).ravel())
            if num_trained is not most or given.dtype != np.bool_:
                weights = np.zeros(len(target), dtype=given.dtype)
                weights[target] = given
                target = weights
        return target, responses, num_trained

    def _responses_of_split(self, pieces: Pieces, num_responses: np.ndarray) -> np.ndarray:
        """Return ``num_responses`` int64 [S], in pieces of split examples by the whole example."""
        split = np.unique(pieces.examples[pieces.starts > 0])
        whole = Pieces(split, np.zeros_like(split), self.lengths[split], np.zeros(0))
        num_actions = np.zeros_like(self.lengths)
        num_actions[split] = self._target(whole, None)[1].lengths
        of_whole = last_of_examples(pieces, self.lengths, num_actions).lengths
        return np.where(np.isin(pieces.examples, split), of_whole, num_responses)

    @property
    def _has_labels(self) -> bool:
        return self.target is not None and self.target.name == "labels"

    def _given(self, entries: Pieces) -> np.ndarray:
        """Return the labels, or the loss weights with those of the examples: a copy."""
        if self._has_labels:
            assert self.target is not None
            labels = placed_labels(self.target.values, entries)
            if self.weights is not None:
                is_untrained = self.weights[entries.examples] == 0
                labels[np.repeat(is_untrained, entries.lengths)] = IGNORE_INDEX
            return labels
        if self.target is None:
            weights = np.ones(int(entries.lengths.sum()), dtype=np.bool_)
        else:
            weights = placed_weights(
                self.target.name, self.target.values, entries, self._unit_of_weights
            )
        return self._times_weights(weights, entries)

    def _times_weights(self, values: np.ndarray, entries: Pieces) -> np.ndarray:
        if self.weights is None:
            return values
        name = "" if self.target is None else self.target.name
        return weighted(name, values, self.weights, entries, self._unit_of_weights)

    @property
    def _unit_of_weights(self) -> str:
        return "token" if self.num_actions is None else "response token"


def last_of_examples(pieces: Pieces, lengths: np.ndarray, num_actions: np.ndarray) -> Pieces:
    """Return the response tokens of each piece: the last ``num_actions`` of its example."""
    prompts = (lengths - num_actions)[pieces.examples]
    ends = pieces.starts + pieces.lengths
    num_responses = np.clip(ends - prompts, 0, pieces.lengths - 1)
    return pieces._replace(starts=ends - num_responses - prompts, lengths=num_responses)
