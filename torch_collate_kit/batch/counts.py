"""Tokens, cells and padding of a batch, and of the step that its rows are part of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

OF_A_STEP = ("step_num_tokens", "step_num_cells", "step_num_filled_cells")
"""Metadata that :class:`StepCounts` reads; the last only where segments share prefixes."""


class StepCounts:
    """Tokens, cells and padding of a whole step, over all ranks, the same on every rank.

    Raises:
        ValueError: a count is read that the batch does not have.

    >>> StepCounts({"step_num_tokens": 6, "step_num_cells": 8}).padding
    0.25
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the rows of all ranks, without pads."""
        return self._known("num_tokens")

    @property
    def num_cells(self) -> int:
        """Number of cells in the rows of all ranks, which are computed, pads included."""
        return self._known("num_cells")

    @property
    def padding(self) -> float:
        """Share of the cells of all ranks that hold no token, 0 to 1.

        Where segments share prefixes the cells that align a tree count as filled.
        """
        filled = self._metadata.get("step_num_filled_cells")
        filled = self.num_tokens if filled is None else filled
        return 1 - filled / self.num_cells if self.num_cells else 0.0

    def _known(self, name: str) -> int:
        count: int | None = self._metadata.get(f"step_{name}")
        if count is None:
            raise ValueError(
                f"{name} of the whole step is not known to this batch: it comes from a "
                "stream, was built from tensors, or some of its rows were joined or added later; "
                f"batch.{name} counts its own rows: sum that over micro-batches and ranks"
            )
        return count

    def __repr__(self) -> str:
        counts = (f"{name[5:]}={self._metadata.get(name)}" for name in OF_A_STEP[:2])
        return f"StepCounts({', '.join(counts)})"


class Counted:
    """The counts of a batch."""

    metadata: dict[str, Any]

    @abstractmethod
    def stored(self) -> Storage:
        """Return all that is stored."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in these rows, without pads, added rows and dummy images.

        A token that segments share counts for each, so there may be more than cells.

        Raises:
            ValueError: the batch was built from tensors that do not tell; else no device is read.
        """
        return num_tokens(self.stored())

    @property
    def num_cells(self) -> int:
        """Number of cells in these rows, pads included: ``batch["input_ids"].numel()``.

        Raises:
            ValueError: the batch has no ``input_ids``.
        """
        return num_cells(self.stored())

    @property
    def padding(self) -> float:
        """Share of these cells that hold no token, 0 to 1. Raises as the two counts do."""
        return 1 - num_filled(self.stored()) / self.num_cells if self.num_cells else 0.0

    @property
    def step(self) -> StepCounts:
        """``num_tokens``, ``num_cells`` and ``padding`` of the whole step, over all ranks.

        Known without communication where all its rows were planned or collated together.
        docs/contract.md lists where that is; elsewhere they raise ValueError.
        """
        return StepCounts(self.metadata)


def num_tokens(stored: Storage) -> int:
    """Return the tokens of examples in these rows; reads no device if there are columns."""
    if (counted := _counted(stored, "lengths")) is not None:
        return counted
    lengths: Any = stored.given.get("sub_seq_lengths")
    if isinstance(lengths, Ragged):
        return int(lengths.values.sum())
    mask: Any = stored.given.get("attention_mask")
    if mask is None or stored.metadata.get("num_dummy_rows"):
        raise ValueError(
            "num_tokens needs sub_seq_lengths, or attention_mask in a batch without added rows; "
            f"this one was built from the tensors {list(stored.given)}"
        )
    return int((mask != 0).sum())


def num_filled(stored: Storage) -> int:
    """Return the cells of these rows that hold a token of an example, or several that share it."""
    shares = stored.columns and stored.columns.placement.tree_width
    counted = _counted(stored, "own") if shares else None
    return num_tokens(stored) if counted is None else counted


def _counted(stored: Storage, count: str) -> int | None:
    """Return the sum of a count over the segments of examples; None without columns."""
    counts = examples_per_row(stored)
    if not stored.columns or counts is None:
        return None
    placement = stored.columns.placement
    is_own = placement.numbers() < counts[placement.rows()]
    return int(placement.segments[count].values[is_own].sum(dtype=np.int64))


def num_cells(stored: Storage) -> int:
    """Return the cells of these rows."""
    shape = stored.row_shapes().get("input_ids")
    if shape is None:
        raise ValueError(f"num_cells needs input_ids, and the batch has {', '.join(stored.names)}")
    return stored.num_rows * prod(shape)


def examples_per_row(stored: Storage) -> np.ndarray | None:
    """Return the number of sub-sequences of each row, int64 [R].

    None for a batch without ``row_metadata["example_indices"]``, as one that was built by hand.
    """
    indices = stored.row_metadata.get("example_indices")
    return indices.lengths if isinstance(indices, Ragged) else None
