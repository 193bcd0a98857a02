"""The columns of a batch on their device: what a batch holds at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torch_collate_kit.batch.fields import IGNORE_INDEX, FieldSpec
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.rows import cat
from torch_collate_kit.ragged import Ragged

__all__ = ["Columns"]


@dataclass(frozen=True)
class Columns:
    """The columns of a batch on their device, and where their entries lie.

    ``values`` maps a name to its column, a Ragged, ``specs`` to what it has one entry of.
    ``loss_weights`` (or ``labels``, where labels were given) is what the loss fields follow from.
    ``segments`` is the placement again, as Ragged tensors on the device, and
    ``num_segments`` int32 [R].
    """

    values: dict[str, Any]
    specs: dict[str, FieldSpec]
    names: tuple[str, ...]
    """The fields of the batch, in their order."""
    placement: Placement
    segments: dict[str, Any]

    @property
    def num_rows(self) -> int:
        return len(self.segments["num_segments"])

    def change(self, rows: Callable[[Any], Any]) -> Columns:
        """The same with other rows: ``rows`` takes a Ragged or a tensor with one entry per row."""
        return replace(
            self,
            values={name: rows(column) for name, column in self.values.items()},
            segments={name: rows(counts) for name, counts in self.segments.items()},
            placement=self.placement.change(rows),
        )

    @classmethod
    def cat(cls, parts: Sequence[Columns]) -> Columns | None:
        """The rows of all parts; None where they are not columns of the same kinds."""
        first = parts[0]
        if any(part.values.keys() != first.values.keys() for part in parts):
            return None
        return replace(
            first,
            values={k: cat([part.values[k] for part in parts]) for k in first.values},
            segments={k: cat([part.segments[k] for part in parts]) for k in first.segments},
            placement=replace(
                first.placement,
                segments={
                    k: Ragged.cat([part.placement.segments[k] for part in parts])
                    for k in first.placement.segments
                },
            ),
        )

    def emptied(self) -> Columns:
        """The same without its tensors."""
        return replace(self, values={}, segments={})

    def filled(self, values: dict[str, Any], segments: dict[str, Any]) -> Columns:
        """The same, held by these tensors; in host memory the placement shares them."""
        on_host = segments["num_segments"].device.type == "cpu"
        placement = self.placement.change(_copied)
        if on_host:
            per_segment = {k: v for k, v in segments.items() if k != "num_segments"}
            placement = replace(
                placement,
                segments={k: Ragged(v.values.numpy(), v.offsets) for k, v in per_segment.items()},
            )
        return replace(self, values=values, segments=segments, placement=placement)

    def in_full(self) -> dict[str, Any]:
        """The columns in the dtypes of their dense fields, and where they lie.

        Two batches with equal dense fields have equal ones, whatever dtypes they are stored in.
        """
        columns = {
            name: Ragged(
                column.flat_values.to(self.specs[name].dtype), column.offsets - column.offsets[0]
            )
            for name, column in self.values.items()
        }
        placement = self.placement
        scalars = {
            name: getattr(placement, name)
            for name in ("width", "response_length", "pad_token_id", "is_packed", "vision")
        }
        return columns | {"placement": {**placement.segments, **scalars}}

    def trained(self) -> np.ndarray:
        """int64 [R], loss tokens of each row; read from the device."""
        if "labels" in self.values:
            column = self.values["labels"]
            is_trained = column.flat_values != IGNORE_INDEX
        else:
            column = self.values["loss_weights"]
            is_trained = column.flat_values != 0
        before = np.append(0, np.cumsum(is_trained.cpu().numpy()))
        return np.diff(before[column.offsets - column.offsets[0]])


def _copied(ragged: Ragged) -> Ragged:
    """It would keep the memory alive that the batch was moved out of."""
    return Ragged(ragged.flat_values.copy(), ragged.offsets - ragged.offsets[0])
