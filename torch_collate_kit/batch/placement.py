"""Places of the tokens of a batch in its rows: integers from which every dense field follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Pieces
from torch_collate_kit.ragged import SHORT_SPAN, Ragged, span_indices, unchecked
from torch_collate_kit.vision import VisionLayout

TargetKind = Literal["next_token", "same_token"] | None
MAX_WIDTH = int(np.iinfo(np.int32).max)  # cells of a row; places there are int32


def whole_examples(lengths: np.ndarray) -> Pieces:
    """Return pieces of one whole example per row."""
    examples = np.arange(len(lengths), dtype=np.int64)
    return Pieces(examples, np.zeros_like(examples), lengths, np.arange(len(lengths) + 1))


@dataclass(frozen=True)
class Shard:
    """The part of a batch that a context rank has."""

    rank: int
    size: int
    layout: str
    width: int  # cells of a row of the batch
    bounds: tuple[int, ...]  # where segments of the batch begin and end, flat over its rows
    content: int  # checksum of the batch, the same for all ranks
    num_trained: int | None
    """Trained targets of the shard as collated; None if that needs a wait for the device."""
    has_left_pads: bool  # whether a row of the batch begins with pads
    depth: int = 1  # how many tokens on in its segment the target of a cell is


@dataclass(frozen=True)
class Placement:
    """The segments of every row, in host memory. Legend: R rows of W cells, Q segments.

    A segment begins at a cell of its row, and its first cells hold tokens. A padded row has one; a
    packed row one for every sub-sequence, with the gap of alignment after it, and one for the pads
    at its end.

    ``segments`` maps what is counted to a Ragged of int32, a row of it for every row of the batch:

    - ``"starts"``: the first cell of each segment in its row;
    - ``"lengths"``: its tokens;
    - ``"responses"``: how many of them, the last ones, are the response;
    - ``"routed"``: how many of them, the first ones, have expert routes;
    - ``"examples"``: 1, and 0 of a dummy image; only in packed batches of images;
    - ``"firsts"`` and ``"own"``: the first cell that no earlier segment of its example has, and how
      many of these there are; only where segments share prefixes;
    - ``"targets"``: how many tokens its first cells predict; ``"depths"``: the position of its
      first token; ``"columns"`` and ``"cells"``: its first cell in its row of the batch, and how
      many it has; at a depth above 1 ``"inputs"``: how many read a token. Only in shards, whose
      segments are runs of cells of a segment of the batch, and of whose targets the last ones are
      ``"responses"``.
    """

    width: int
    response_length: int
    pad_token_id: int
    is_packed: bool
    segments: dict[str, Ragged]
    vision: VisionLayout | None = None  # the layout of images as tokens; None for a text model
    tree_width: int = 0
    """Cells of a row whose segments share prefixes: then ``width`` and the segments count tokens,
    of which several may be in one cell, and the column ``tree_cells`` has the cell of each."""
    shard: Shard | None = None
    """The part of a batch that these rows are, of those of all context ranks."""
    targets: TargetKind = "next_token"
    """What labels are of, as the collator was told; its readers never ask a width."""
    num_token_types: int = 0
    """The types of tokens in ``token_type_ids`` of the examples, 0 to one less; 0 without them."""

    @property
    def has_left_pads(self) -> bool:
        """Whether a padded row begins with pads."""
        return not self.is_packed and bool((self.segments["starts"].values > 0).any())

    def rows(self) -> np.ndarray:
        """Return the row of each segment, int64 [Q]."""
        starts = self.segments["starts"]
        return np.repeat(np.arange(len(starts)), starts.lengths)

    def numbers(self) -> np.ndarray:
        """Return the number of each segment in its row, or of a shard in that of the batch: [Q]."""
        rows = self.rows()
        if (shard := self.shard) is not None:
            bounds, first = np.array(shard.bounds), rows * shard.width
            cells = first + self.segments["columns"].values
            return np.searchsorted(bounds, cells, side="right") - 1 - np.searchsorted(bounds, first)
        return np.arange(len(rows)) - self.segments["starts"].offsets[rows]

    def first_cells(self) -> np.ndarray:
        """Return the first cell of each segment, int64 [Q], counted over all rows."""
        return self.rows() * self.width + self.segments["starts"].values

    def first_counted(self, count: str) -> np.ndarray:
        """Return the cell of each segment's first counted token, int64 [Q], over all rows."""
        first = self.first_cells()
        if count == "responses":
            last = self.segments["targets" if self.shard else "lengths"].values
            first += last - self.segments[count].values
        return first

    def cells(self, count: str) -> np.ndarray:
        """Return the cell of every counted token, int64, over all rows."""
        return span_indices(self.first_counted(count), self.segments[count].values.astype(np.int64))

    def spans(self, count: str, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return runs of counted tokens, without the first ``hidden`` cells of rows; None if short.

        int64 each: their first cells over all rows, their first tokens, and their lengths. Segments
        that continue one another are one run, so most packed rows are.
        """
        first, counted, rows = self.first_counted(count), self.segments[count].values, self.rows()
        left_out = np.clip(rows * self.width + hidden - first, 0, counted)
        cells, lengths = first + left_out - (rows + 1) * hidden, counted - left_out
        is_new = np.append(True, (cells[1:] != (cells + lengths)[:-1]) | (left_out[1:] > 0))
        runs = np.flatnonzero(is_new)
        if int(lengths.sum()) < SHORT_SPAN * len(runs):
            return None
        tokens = np.cumsum(counted, dtype=np.int64) - lengths
        return cells[runs], tokens[runs], np.add.reduceat(lengths, runs)


def sums_per_row(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the sum of each row's values, int64 [R]."""
    return np.diff(np.append(0, np.cumsum(values, dtype=np.int64))[offsets])


def too_wide(width: int, way_out: str) -> DataError:
    """Return the error for rows of more cells than int32 counts, ``MAX_WIDTH``."""
    return DataError(
        f"a row would have {width} cells, more than the {MAX_WIDTH} that int32 counts; {way_out}"
    )


def padded(counts: dict[str, np.ndarray], width: int, *, padding_side: str) -> dict[str, Ragged]:
    """Return the segments of rows with one piece each; ``counts`` are int64 [R]."""
    lengths = counts["lengths"]
    starts = width - lengths if padding_side == "left" else np.zeros_like(lengths)
    offsets = np.arange(len(lengths) + 1, dtype=np.int64)
    values = {"starts": starts, **counts}
    return {name: unchecked(numbers.astype(np.int32), offsets) for name, numbers in values.items()}


def packed(
    counts: dict[str, np.ndarray], row_offsets: np.ndarray, *, width: int, align: int
) -> dict[str, Ragged]:
    """Return the segments of packed rows; ``counts`` of the pieces are int64 [S]."""
    lengths = counts["lengths"]
    aligned = -(-lengths // align) * align if align > 1 else lengths
    before = np.append(0, np.cumsum(aligned))
    first = before[row_offsets]  # cells before each row, were rows not padded to one width
    used = first[1:] - first[:-1]
    rows = np.repeat(np.arange(len(used)), row_offsets[1:] - row_offsets[:-1])
    starts = before[:-1] - first[rows]
    has_tail = used < width
    tails = np.append(0, np.cumsum(has_tail))  # before each row
    offsets = row_offsets + tails
    places = np.arange(len(starts)) + tails[rows]
    segments = {}
    for name, count in {"starts": starts, **counts}.items():
        values = np.zeros(offsets[-1], dtype=np.int32)
        values[places] = count
        segments[name] = unchecked(values, offsets)
    segments["starts"].values[offsets[1:][has_tail] - 1] = used[has_tail]
    return segments


def longest_segments(starts: Ragged, width: int) -> list[int]:
    """Return the cells of the longest segment of each packed row; every row has one."""
    ends = np.append(starts.values[1:], width)
    ends[starts.offsets[1:] - 1] = width
    longest: list[int] = np.maximum.reduceat(ends - starts.values, starts.offsets[:-1]).tolist()
    return longest
