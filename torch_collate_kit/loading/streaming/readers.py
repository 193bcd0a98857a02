"""What waits in the buffer, as arrays: examples, or pieces of those that were split.

Two readers make them. A source of columns is read by integers alone: an entry says which tokens of
which row, and the tokens are copied once, when their batch is made. Any other source is read
example by example, and an entry holds its example.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.streaming.shards import Columns, Example, Place, Stream
from torch_collate_kit.reading.numbers import joined
from torch_collate_kit.reading.raw import Examples
from torch_collate_kit.reading.sft import read_columns

__all__ = ["ENTRY", "Reader", "at_position", "piece_limit", "place_behind", "reader_of"]

ENTRY = np.dtype(
    [
        ("position", np.int64),  # of the example in the source
        ("start", np.int64),  # its first token in the example
        ("num_tokens", np.int64),
        ("is_piece", np.bool_),
        ("num_read", np.int64),  # where a pass goes on that has given out all up to this entry:
        ("next_start", np.int64),  # the fields of its Place
        ("source", np.object_),
        ("example", np.object_),  # or the piece; None where rows are read by position
    ]
)


class Reader(Protocol):
    def read(self, num_entries: int) -> np.ndarray:
        """The next entries, ENTRY [num_entries]; fewer at the end of the stream only.

        Raises:
            DataError: an example cannot be packed; names its position in the stream.
        """

    def examples(self, entries: np.ndarray) -> Examples:
        """What a collator takes for them."""


def reader_of(stream: Stream, place: Place, collator: PackedCollator[Any]) -> Reader:
    """What comes behind ``place``."""
    found = stream.read(place)
    kind: Any = _ColumnReader if isinstance(found, Columns) else _ExampleReader
    reader: Reader = kind(found, place, collator)
    return reader


def place_behind(entry: Any) -> Place:
    """Where a pass goes on that has given out all up to this entry."""
    return Place(int(entry["num_read"]), int(entry["next_start"]), entry["source"])


class _ExampleReader:
    """Looks at every example by itself, for they may be anything."""

    def __init__(
        self,
        examples: Iterator[tuple[Example, int, Place]],
        place: Place,
        collator: PackedCollator[Any],
    ) -> None:
        self._collator = collator
        self._entries = self._read(examples, place)

    def read(self, num_entries: int) -> np.ndarray:
        return np.fromiter(islice(self._entries, num_entries), dtype=ENTRY)

    def examples(self, entries: np.ndarray) -> Examples:
        examples: list[Example] = entries["example"].tolist()
        return examples

    def _read(
        self, examples: Iterator[tuple[Example, int, Place]], before: Place
    ) -> Iterator[tuple[Any, ...]]:
        limit = piece_limit(self._collator)
        for example, position, after in examples:
            try:
                num_tokens = self._checked_length(example)
                pieces = [(0, example)]
                if is_split := self._collator.overflow == "split" and num_tokens > limit:
                    pieces = list(pieces_of(example, limit, train_all=self._collator.train_all))
            except DataError as error:
                raise at_position(error, position) from error
            _check_start(before, position, num_tokens)
            for start, piece in pieces:
                stop = min(start + limit, num_tokens) if is_split else num_tokens
                behind = after if stop == num_tokens else before._replace(start=stop)
                if start >= before.start:
                    yield position, start, stop - start, is_split, *behind, piece
            before = after
        _check_start(before)

    def _checked_length(self, example: Example) -> int:
        try:
            num_tokens = len(example["input_ids"])
        except (TypeError, KeyError, IndexError):
            num_tokens = 0
        if not num_tokens or _is_too_long(self._collator, num_tokens):
            self._collator([example])  # raises what is wrong with it
        return num_tokens


class _ColumnReader:
    """No Python object an example: lengths come from offsets, rows when their batch is made."""

    def __init__(self, columns: Columns, place: Place, collator: PackedCollator[Any]) -> None:
        self._dataset, self._positions = columns
        self._collator = collator
        self._before = place  # of the first of the positions
        if not self._positions:
            _check_start(place)
        self._ready = np.empty(0, dtype=ENTRY)  # pieces of the last example before them
        is_split = collator.overflow == "split"
        self._limit = piece_limit(collator) if is_split else np.iinfo(np.int64).max

    def read(self, num_entries: int) -> np.ndarray:
        while len(self._ready) < num_entries and self._positions:
            more = self._read(num_entries - len(self._ready))
            self._ready = np.concatenate([self._ready, more])
        entries, self._ready = np.split(self._ready, [num_entries])
        return entries

    def examples(self, entries: np.ndarray) -> Examples:
        positions, is_piece = entries["position"], entries["is_piece"]
        if not is_piece.any():
            return self._dataset.__getitems__(positions)
        stops = entries["start"] + entries["num_tokens"]
        return self._dataset._pieces(positions, is_piece, entries["start"], stops)

    def _read(self, num_entries: int) -> np.ndarray:
        """Entries of one example or more, of no more than make ``num_entries``."""
        span = self._positions[:num_entries]
        positions = np.arange(span.start, span.stop, span.step)
        try:
            lengths = self._dataset._lengths_at(positions)
            _check_start(self._before, span[0], int(lengths[0]))
            num_pieces = -(-lengths // self._limit)
            counts = num_pieces.copy()  # without those that are before the place
            counts[0] = max(0, counts[0] + -self._before.start // self._limit)
            num_used = 1 + int(np.searchsorted(np.cumsum(counts), num_entries))
            positions, lengths = positions[:num_used], lengths[:num_used]
            self._check(positions, lengths)
        except DataError as error:
            if len(span) > 1:
                return self._read(1)  # those before the wrong one are given out
            raise at_position(error, span[0]) from error
        entries = self._entries_of(positions, lengths, num_pieces[:num_used], counts[:num_used])
        self._positions = self._positions[len(positions) :]
        self._before = Place(int(positions[-1]) + 1)
        return entries

    def _check(self, positions: np.ndarray, lengths: np.ndarray) -> None:
        is_wrong = (lengths == 0) | _is_too_long(self._collator, lengths)
        if is_wrong.any():  # the collator says what is
            self._collator(self._dataset.__getitems__(positions[is_wrong][:1]))
        is_split = lengths > self._limit
        if is_split.any():  # its pieces would hide what is wrong with the whole
            whole = self._dataset.__getitems__(positions[is_split])
            read_columns(whole, train_all=self._collator.train_all)

    def _entries_of(
        self, positions: np.ndarray, lengths: np.ndarray, num_pieces: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """The last ``counts`` of the pieces of each example; the whole is one piece."""
        rows = np.repeat(np.arange(len(counts)), counts)
        nth = num_pieces[rows] - np.cumsum(counts)[rows] + np.arange(len(rows))
        starts = nth * self._limit
        num_tokens = np.minimum(lengths[rows] - starts, self._limit)
        is_last = nth + 1 == num_pieces[rows]
        num_read_before = np.append(self._before.num_read, positions[:-1] + 1)
        entries = np.empty(len(rows), dtype=ENTRY)  # objects are None
        entries["position"], entries["start"] = positions[rows], starts
        entries["num_tokens"], entries["is_piece"] = num_tokens, num_pieces[rows] > 1
        entries["num_read"] = np.where(is_last, positions[rows] + 1, num_read_before[rows])
        entries["next_start"] = np.where(is_last, 0, starts + num_tokens)
        return entries


def piece_limit(collator: PackedCollator[Any]) -> int:
    """The most tokens of an example in a row: what pieces have, but the last one."""
    align = collator.parallel.align
    return collator.max_tokens // align * align


def _check_start(place: Place, position: int = -1, num_tokens: int = 0) -> None:
    """That the example at ``position``, the next one after the place, reaches beyond it."""
    if place.start and place.start >= num_tokens:
        if num_tokens:
            found = f"example {position} of the stream, which has {num_tokens}"
        else:
            found = f"an example after {place.num_read} of the stream, which ends there"
        raise StateError(
            f"the state is after token {place.start} of {found}; the source is not what it was "
            "when the state was saved"
        )


def _is_too_long(collator: PackedCollator[Any], num_tokens: Any) -> Any:
    return (num_tokens > piece_limit(collator)) & (collator.overflow == "raise")


def pieces_of(
    example: Example, limit: int, *, train_all: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Pieces of ``limit`` tokens and a rest: (first token, piece). Arrays are views.

    Raises:
        DataError: the example is wrong; it is called example 0.

    >>> [(start, p["input_ids"].tolist()) for start, p in pieces_of({"input_ids": [4, 5, 6]}, 2)]
    [(0, [4, 5]), (2, [6])]
    """
    columns = read_columns([example], train_all=train_all)
    num_tokens = int(columns.lengths[0])
    target = None if columns.target is None else joined(columns.target)[0]
    # A loss_mask may be of the last num_actions tokens only.
    prompt = 0 if columns.num_actions is None else num_tokens - int(columns.num_actions[0])
    for start in range(0, num_tokens, limit):
        stop = min(start + limit, num_tokens)
        piece: dict[str, Any] = {"input_ids": joined(columns.input_ids)[0][start:stop]}
        if columns.target_name is not None and target is not None:
            piece[columns.target_name] = target[max(start - prompt, 0) : max(stop - prompt, 0)]
        if columns.num_actions is not None:
            piece["num_actions"] = len(piece["loss_mask"])
        if "attention_mask" in example:
            piece["attention_mask"] = example["attention_mask"][start:stop]
        yield start, piece


def at_position(error: DataError, position: int) -> DataError:
    """The error of an example that was looked at alone, with its position in the stream.

    >>> at_position(DataError("example 0 is empty"), 7)
    DataError('example 7 of the stream is empty')
    """
    name = f"example {position} of the stream"
    message = str(error).removeprefix(f"row {position}: ")
    if "example 0" in message:
        return DataError(message.replace("example 0", name, 1))
    return DataError(f"{name}: {message}")
