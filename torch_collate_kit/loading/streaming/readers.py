"""Entries of the buffer as arrays: examples, or pieces of those that were split.

There are two readers. Of a source of columns only lengths are read: an entry says which tokens of
which row it is, and the tokens are copied once, when their batch is made. Any other source is read
example by example, and an entry holds its example. Nothing is cut here: the collator takes those
tokens of an example that the plan names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from operator import index
from typing import Any, Protocol

import numpy as np

from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.streaming.entries import ENTRY
from torch_collate_kit.loading.streaming.shards import Example, Part, Stream
from torch_collate_kit.loading.streaming.skipping import WrongExamples
from torch_collate_kit.loading.streaming.states import Place
from torch_collate_kit.packing.atoms import Atoms, checked_sizes
from torch_collate_kit.packing.planner import fitted, num_pieces
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.trees import depths_of
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.keys import KNOWN, MEDIA
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import Examples, are_nested


class Reader(Protocol):
    """Reads the entries of a shard, from a place on."""

    @property
    def place(self) -> Place:
        """The place after all that was read."""

    def read(self, num_entries: int) -> np.ndarray:
        """Return the next entries, ENTRY [num_entries]; fewer only at the end of the stream."""

    def examples(self, entries: np.ndarray, *, as_rows: bool = False) -> Examples:
        """Return the examples of entries, for a collator; ``as_rows`` as a list."""


class _ExampleReader:
    """Reads every example on its own, because it may be anything."""

    def __init__(
        self,
        examples: Iterator[tuple[Example, int, Place]],
        place: Place,
        collator: PackedCollator,
        wrong: WrongExamples,
    ) -> None:
        self._collator, self._wrong = collator, wrong
        self.place = place  # after the examples that were read
        self._entries = self._read(examples)

    def read(self, num_entries: int) -> np.ndarray:
        """Return the next entries, ENTRY [num_entries]; fewer only at the end of the stream.

        Raises:
            DataError: an example cannot be packed; names its position in the stream.
        """
        return np.fromiter(islice(self._entries, num_entries), dtype=ENTRY)

    def examples(self, entries: np.ndarray, *, as_rows: bool = False) -> Examples:
        """Return the examples of entries, for a collator."""
        examples: list[Example] = entries["example"].tolist()
        return examples

    def _read(self, examples: Iterator[tuple[Example, int, Place]]) -> Iterator[tuple[Any, ...]]:
        packing = self._collator.packing
        for example, position, after in examples:
            try:
                num_tokens, atoms = self._sizes(example)
                pieces, sizes = [(0, num_tokens)], [0] * 5
                if atoms is not None:
                    plan = fitted(atoms, packing)
                    if packing.overflow == "split":
                        pieces = [*zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True)]
                    columns = [atoms.patches, atoms.vision_costs]
                    columns += [atoms.cells, atoms.segments, atoms.costs] if atoms.are_lists else []
                    sizes[: len(columns)] = [int(column[0]) for column in columns]
                if is_split := len(pieces) > 1:
                    example = self._as_arrays(example)
            except DataError as error:
                self._wrong.leave_out(error, position)
                self.place = after
                continue
            before = self.place
            check_start(before, position, num_tokens)
            for start, length in pieces:
                stop = start + length
                following = after if stop == num_tokens else before._replace(start=stop)
                if start >= before.start:
                    of = position, start, length, is_split, *sizes
                    yield *of, *following, example, self._wrong.taken(), 0
            self.place = after
        check_start(self.place)

    def _sizes(self, example: Example) -> tuple[int, Atoms | None]:
        """Return the tokens of one example, and what is planned; None of a text that fits."""
        ids: Any = example.get("input_ids") if isinstance(example, Mapping) else None
        packing = self._collator.packing
        if ids is None or not are_nested([ids]):
            num_tokens, patches = self._length(example), self._patches(example, [example])
            if not patches and num_tokens <= packing.capacity - packing.reserved:
                return num_tokens, None
            return num_tokens, Atoms.of(np.array([num_tokens]), None, packing, [patches])
        media = [key for key in MEDIA if example.get(key) is not None]
        try:
            counts = [*map(len, ids)]
            parts = [{key: example[key][i] for key in media} for i in range(len(ids))]
        except (TypeError, LookupError):
            counts, parts = [0], []
        if not all(counts):
            _check(self._collator, [example])  # raises what is wrong
        depths = self._depths(example) if packing.share_prefixes else None
        images, offsets = [self._patches(example, parts)], np.array([0, len(counts)])
        return sum(counts), Atoms.of(np.array(counts), offsets, packing, images, depths=depths)

    def _depths(self, example: Any) -> np.ndarray:
        """Return the tokens that each segment of an example shares, int64."""
        ids = [np.asarray(segment) for segment in example["input_ids"]]
        if any(segment.ndim != 1 or segment.dtype.kind not in "iu" for segment in ids):
            _check(self._collator, [example])  # raises what is wrong with them
        offsets = running_sum(np.array([*map(len, ids)]))
        return depths_of(np.concatenate(ids), offsets, np.array([0, len(ids)]))

    def _patches(self, example: Example, parts: list[Any]) -> list[int]:
        """Return the patches of each image of one example, whose segments are ``parts``."""
        vision = self._collator.vision
        if vision is None:
            return []
        try:
            return [index(number) for part in parts for number in vision.patches(part)]
        except (TypeError, ValueError, LookupError, AttributeError):
            _check(self._collator, [example])  # raises what is wrong with its images
            raise

    def _as_arrays(self, example: Example) -> Example:
        """Return a checked example without unknown keys, its lists as arrays for all pieces."""
        _check(self._collator, [example])
        known = {key: example[key] for key in (*KNOWN, *self._collator.fields) if key in example}
        is_nested = are_nested([known["input_ids"]])
        return {
            key: _arrays_of(value, is_nested=is_nested)
            if isinstance(value, list | tuple)
            else value
            for key, value in known.items()
        }

    def _length(self, example: Example) -> int:
        try:
            num_tokens = len(example["input_ids"])
        except (TypeError, KeyError, IndexError):
            num_tokens = 0
        packing = self._collator.packing
        if not num_tokens or (packing.overflow == "raise" and num_tokens > packing.capacity):
            _check(self._collator, [example])  # raises what is wrong with it besides its length
        return num_tokens


class _RowReader:
    """No Python object per example: lengths come from offsets, rows when their batch is made."""

    def __init__(
        self,
        dataset: TokenizedDataset,
        positions: range,
        place: Place,
        collator: PackedCollator,
        wrong: WrongExamples,
    ) -> None:
        self._dataset, self._positions = dataset, positions
        self._collator, self._wrong = collator, wrong
        self.place = place  # before the first of the positions
        if not positions:
            check_start(place)
        self._ready = np.empty(0, dtype=ENTRY)  # pieces of the last example before them

    def read(self, num_entries: int) -> np.ndarray:
        while len(self._ready) < num_entries and self._positions:
            more = self._read(num_entries - len(self._ready))
            if len(more):
                more["skipped"][0] = self._wrong.taken()
            self._ready = np.concatenate([self._ready, more])
        entries, self._ready = np.split(self._ready, [num_entries])
        return entries

    def examples(self, entries: np.ndarray, *, as_rows: bool = False) -> Examples:
        if (
            as_rows or entries["is_piece"].any()
        ):  # views: of a long row no more is copied than its piece
            return [self._dataset[row] for row in entries["position"].tolist()]
        return self._dataset.__getitems__(entries["position"])

    def _read(self, num_entries: int) -> np.ndarray:
        """Return entries of at least one example, and of no more than make ``num_entries``.

        None of an example that is wrong, and left out.
        """
        span = self._positions[:num_entries]
        positions = np.arange(span.start, span.stop, span.step)
        try:
            atoms = self._atoms(positions)
            check_start(self.place, span[0], int(atoms.tokens[0]))
            counts = num_pieces(atoms, self._collator.packing)
            counts[0] -= self._num_given()
            num_used = 1 + int(np.searchsorted(np.cumsum(counts), num_entries))
            positions, atoms = (
                positions[:num_used],
                atoms.take(np.arange(len(positions[:num_used]))),
            )
            self._check(positions[atoms.tokens == 0][:1])
            entries = self._entries_of(positions, atoms)
            # before any of its pieces is given out
            self._check(np.unique(entries["position"][entries["is_piece"]]))
        except DataError as error:
            if len(span) > 1:
                return self._read(len(span) // 2)  # those before the wrong one are given out
            self._wrong.leave_out(error, span[0])
            self._positions, self.place = self._positions[1:], Place(span[0] + 1)
            return np.empty(0, dtype=ENTRY)
        self._positions = self._positions[len(positions) :]
        self.place = Place(int(positions[-1]) + 1)
        return entries

    def _check(self, positions: np.ndarray) -> None:
        if len(positions):
            _check(self._collator, self._dataset.__getitems__(positions))

    def _num_given(self) -> int:
        """Return how many pieces of the first example are before the place."""
        start, packing = self.place.start, self._collator.packing
        return -(-start // (packing.capacity - packing.reserved))

    def _atoms(self, positions: np.ndarray) -> Atoms:
        """Return what is planned of these rows."""
        lengths, packing = self._dataset._lengths_at(positions), self._collator.packing
        if not isinstance(lengths, Ragged):
            return Atoms.of(lengths, None, packing, np.zeros_like(lengths))
        empty = np.flatnonzero(lengths.values == 0)
        if len(empty):
            self._check(positions[np.searchsorted(lengths.offsets, empty[:1], side="right") - 1])
        depths = self._dataset._depths_at(positions) if packing.share_prefixes else None
        return Atoms.of(*checked_sizes(lengths), packing, depths=depths)

    def _entries_of(self, positions: np.ndarray, atoms: Atoms) -> np.ndarray:
        """Return the pieces of each example; of the first one only those after the place.

        Raises:
            DataError: an example is too long.
        """
        packing, lengths = self._collator.packing, atoms.tokens
        pieces = fitted(atoms, packing).atoms
        if packing.overflow == "split":
            is_left = (pieces.examples > 0) | (pieces.starts >= self.place.start)
            atoms = pieces.take(np.flatnonzero(is_left))
        rows, starts, num_tokens = atoms.examples, atoms.starts, atoms.tokens
        is_last = starts + num_tokens == lengths[rows]
        num_read_before = np.append(self.place.num_read, positions[:-1] + 1)
        entries = np.zeros(len(rows), dtype=ENTRY)
        entries["source"] = entries["example"] = None
        entries["skipped"].fill(())
        entries["position"], entries["start"] = positions[rows], starts
        entries["num_tokens"], entries["is_piece"] = num_tokens, num_tokens < lengths[rows]
        entries["num_read"] = np.where(is_last, positions[rows] + 1, num_read_before[rows])
        entries["next_start"] = np.where(is_last, 0, starts + num_tokens)
        if atoms.are_lists:
            entries["cells"], entries["num_segments"] = atoms.cells, atoms.segments
            entries["cost"] = atoms.costs
        return entries


def _arrays_of(value: Any, *, is_nested: bool) -> Any:
    """Return a list as an array, or as an array for each segment."""
    if is_nested and value and isinstance(value[0], list | tuple):
        return [np.asarray(of) for of in value]
    return np.asarray(value)


def check_start(place: Place, position: int = -1, num_tokens: int = 0) -> None:
    """Raise StateError unless the next example, at ``position``, reaches beyond the place."""
    if place.start and place.start >= num_tokens:
        if num_tokens:
            found = f"example {position} of the stream, which has {num_tokens}"
        else:
            found = f"an example after {place.num_read} of the stream, which ends there"
        raise StateError(
            f"the state is after token {place.start} of {found}; the source is not what it was "
            "when the state was saved"
        )


def _check(collator: PackedCollator, examples: Examples) -> None:
    """Raise DataError if an example is wrong, however long."""
    of = collator
    read_columns(examples, train_all=of.train_all, fields=of.fields, vision=of.vision)


def reader_of(stream: Stream, part: Part, place: Place, wrong: WrongExamples) -> Reader:
    """Return a reader of what comes after ``place`` in a shard."""
    dataset = stream.columns(part, place)
    if dataset is None:
        return _ExampleReader(stream.examples(part, place), place, stream.collator, wrong)
    return _RowReader(dataset, part.after(place, len(dataset)), place, stream.collator, wrong)
