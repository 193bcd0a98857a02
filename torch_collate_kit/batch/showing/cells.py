"""The contents of every cell of a batch: one by one, in blocks, and in runs that look the same."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.counts import examples_per_row
from torch_collate_kit.batch.fields import IGNORE_INDEX
from torch_collate_kit.batch.storage import Columns, Storage
from torch_collate_kit.ragged import Ragged, span_indices


class Kind(IntEnum):
    """The kind of thing that a cell holds."""

    TOKEN = 0
    IMAGE = 1
    FILLER = 2
    GAP = 3
    PAD = 4


NAMES = {
    Kind.IMAGE: "image",
    Kind.FILLER: "filler, of no example",
    Kind.GAP: "alignment gap",
    Kind.PAD: "padding",
}


class Runs(NamedTuple):
    """Neighbouring cells of a row that look the same; int64 [N] each."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    kinds: np.ndarray
    segments: np.ndarray
    examples: np.ndarray
    trained: np.ndarray  # 1, or 0 where it is not trained or that is not known


class Cells(NamedTuple):
    """The cells of R rows, W wide; arrays in host memory."""

    kinds: np.ndarray
    """uint8 [R, W]: TOKEN, IMAGE (a placeholder), FILLER (a token of no example), GAP or PAD.

    Fillers are the tokens of rows that fill up a batch, and of dummy images.
    """
    segments: np.ndarray
    """int64 [R, W]: the segment of the row that a token belongs to; -1 where there is none."""
    trained: np.ndarray | None
    """bool [R, W]; None where that is not known without waiting for a device."""
    num_examples: np.ndarray  # int64 [R]: the examples of each row, which are its first segments

    @property
    def is_own(self) -> np.ndarray:
        """Cells with a token or an image of an example: bool [R, W]."""
        return (self.kinds == Kind.TOKEN) | (self.kinds == Kind.IMAGE)

    @property
    def examples(self) -> np.ndarray:
        """int64 [R, W]: the number of its example among those of all rows; -1 where none is."""
        before = np.cumsum(self.num_examples) - self.num_examples
        return np.where(self.is_own, before[:, None] + self.segments, -1)

    @property
    def looks(self) -> np.ndarray:
        """int64 [R, W]: a number for the segment, the kind, and whether the cell is trained."""
        return (
            (self.segments + 1) * 16
            + self.kinds * 2
            + (0 if self.trained is None else self.trained)
        )

    def in_blocks(self, most: int) -> tuple[Cells, int]:
        """Return at most ``most`` blocks per row, each the look of most of its cells, and its size.

        The last block of a row may have fewer cells.
        """
        size = 1
        while size * most < self.kinds.shape[1]:
            size *= 2
        looks = self.looks
        blocks = np.zeros((len(looks), -(-looks.shape[1] // size)), dtype=np.int64)
        for row, number in np.ndindex(blocks.shape):
            cells = looks[row, number * size : (number + 1) * size]
            found, counts = np.unique(cells, return_counts=True)
            blocks[row, number] = found[counts.argmax()]
        trained = None if self.trained is None else blocks % 2 == 1
        kinds = (blocks // 2 % 8).astype(np.uint8)
        return Cells(kinds, blocks // 16 - 1, trained, self.num_examples), size

    def runs(self) -> Runs:
        """Return the runs of all rows, row by row."""
        looks, width = self.looks.ravel(), max(1, self.kinds.shape[1])
        is_first = np.diff(looks, prepend=-1) != 0
        is_first[::width] = True
        first = np.flatnonzero(is_first)
        kinds, segments = (numbers.ravel()[first] for numbers in (self.kinds, self.segments))
        lengths, examples = np.diff(first, append=looks.size), self.examples.ravel()[first]
        return Runs(*np.divmod(first, width), lengths, kinds, segments, examples, looks[first] % 2)


def example_numbers(stored: Storage) -> np.ndarray | None:
    """Return ``row_metadata["example_indices"]`` of all rows, joined; None if not known."""
    indices = stored.row_metadata.get("example_indices")
    if not isinstance(indices, Ragged) or not _is_readable(indices.values):
        return None
    return np.asarray(indices.values)


def cells_of(stored: Storage) -> Cells | None:
    """Return the cells of all rows, without making a dense field or waiting for a device.

    None for a batch built from dense tensors without ``input_ids`` ``[R, W]`` in host memory.
    """
    counts = examples_per_row(stored)
    if stored.columns:
        kinds, segments = _of_columns(stored.columns, counts)
    elif (found := _of_dense(stored.given)) is not None:
        kinds, segments = found
        if counts is None:
            counts = segments.max(axis=1, initial=-1) + 1
        kinds[segments >= counts[:, None]] = Kind.FILLER
    else:
        return None
    assert counts is not None
    return Cells(kinds, segments, _trained(stored, kinds.shape), counts)


def _of_columns(columns: Columns, counts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return kinds and segments; ``counts`` are the examples of each row."""
    placement, shape = columns.placement, (columns.num_rows, columns.placement.width)
    kinds = np.full(shape[0] * shape[1], Kind.PAD, dtype=np.uint8)
    numbers, lengths = placement.numbers(), placement.segments["lengths"].values.astype(np.int64)
    is_own = numbers < counts[placement.rows()]
    if placement.is_packed:
        first = placement.first_cells()
        sizes = np.diff(first, append=len(kinds))  # segments cover their rows
        kinds[span_indices(first + lengths, (sizes - lengths) * (is_own | (lengths > 0)))] = (
            Kind.GAP
        )
    cells = placement.cells("lengths")
    kinds[cells] = np.repeat(np.where(is_own, Kind.TOKEN, Kind.FILLER), lengths)
    ids, vision = columns.values["input_ids"].values, placement.vision
    if vision is not None and vision.image_token_id is not None and _is_readable(ids):
        images = cells[ids.numpy() == vision.image_token_id]
        kinds[images[kinds[images] == Kind.TOKEN]] = Kind.IMAGE
    segments = np.full(len(kinds), -1, dtype=np.int64)
    segments[cells] = np.repeat(numbers, lengths)
    return kinds.reshape(shape), segments.reshape(shape)


def _of_dense(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return kinds and segments, fillers taken for tokens."""
    ids: Any = given.get("input_ids")
    if not _is_readable(ids) or ids.ndim != 2:
        return None
    is_token = np.ones(ids.shape, dtype=bool)
    mask: Any = given.get("attention_mask")
    if _is_readable(mask) and mask.shape == ids.shape:
        is_token = (mask != 0).numpy()
    kinds = np.where(is_token, Kind.TOKEN, Kind.PAD).astype(np.uint8)
    segments = np.zeros(ids.shape, dtype=np.int64)
    boundaries = given.get("cu_seq_lens")
    if isinstance(boundaries, Ragged) and _is_readable(boundaries.values):
        for row, edges in enumerate(map(np.asarray, boundaries)):
            segments[row] = np.searchsorted(edges[1:], np.arange(ids.shape[1]), side="right")
            in_use = np.isin(segments[row], segments[row][is_token[row]])
            kinds[row][in_use & ~is_token[row]] = Kind.GAP
    return kinds, np.where(is_token, segments, -1)


def _trained(stored: Storage, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return which cells are trained, by the columns or a given ``loss_mask``, else ``labels``.

    None: nothing is, with ``targets=None``, or it is not in host memory.
    """
    columns, given = stored.columns, stored.given
    trained = np.zeros(shape, dtype=bool)
    if columns and columns.placement.targets is None:
        return None
    if columns and "loss_mask" not in given:
        if not _is_readable(columns.values[columns.target].values):
            return None
        cells = columns.placement.cells(str(columns.specs[columns.target].count))
        trained.reshape(-1)[cells] = columns.is_trained().numpy()
        return trained
    name, ignored = ("loss_mask", 0) if "loss_mask" in given else ("labels", IGNORE_INDEX)
    values: Any = given.get(name)
    if not _is_readable(values) or values.ndim != 2 or values.shape[1] > shape[1]:
        return None
    trained[:, shape[1] - values.shape[1] :] = (values.detach() != ignored).numpy()
    return trained


def _is_readable(values: Any) -> bool:
    """Return whether this is a tensor or an array in host memory."""
    return isinstance(values, np.ndarray) or (
        isinstance(values, Tensor) and values.device.type == "cpu"
    )
