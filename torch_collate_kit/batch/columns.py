"""The columns of a batch on their device: what a batch holds at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.fields import IGNORE_INDEX, FieldSpec
from torch_collate_kit.batch.placement import Placement, sums_per_row
from torch_collate_kit.batch.rows import cat
from torch_collate_kit.ragged import Ragged, unchecked


@dataclass(frozen=True)
class Columns:
    """The columns of a batch on their device, and where their entries lie; false if it has none.

    ``values`` maps a name to its column, a Ragged, ``specs`` to what it has one entry of.
    ``loss_weights`` (without them ``labels``) is what the loss mask follows from.
    ``segments`` is the placement again, as Ragged tensors on the device, and
    ``num_segments`` int32 [R].
    """

    values: dict[str, Any]
    specs: dict[str, FieldSpec]
    names: tuple[str, ...]
    """The fields of the batch, in their order."""
    placement: Placement
    segments: dict[str, Any]

    @classmethod
    def of(
        cls,
        values: dict[str, Ragged],
        specs: dict[str, FieldSpec],
        names: tuple[str, ...],
        placement: Placement,
        device: torch.device | None = None,
    ) -> Columns:
        """Return columns on ``device`` (None: the host), with the segments of ``placement``."""

        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        host = placement.segments
        segments: dict[str, Any] = {
            name: unchecked(moved(of.values), of.offsets) for name, of in host.items()
        }
        segments["num_segments"] = moved(host["starts"].lengths.astype(np.int32))
        return cls(values, specs, names, placement, segments)

    @classmethod
    def none(cls) -> Columns:
        """Return the columns of a batch that was built from dense tensors: none."""
        return cls({}, {}, (), Placement(0, 0, 0, False, {}), {})

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.segments["num_segments"])

    def change(
        self,
        column: Callable[[str, Ragged], Ragged],
        counts: Callable[[str, Any], Any],
        **placement: Any,
    ) -> Columns:
        """Return a copy with every column and every count per segment changed."""
        on_host = {name: counts(name, of) for name, of in self.placement.segments.items()}
        return replace(
            self,
            values={name: column(name, values) for name, values in self.values.items()},
            segments={name: counts(name, of) for name, of in self.segments.items()},
            placement=replace(self.placement, segments=on_host, **placement),
        )

    @classmethod
    def cat(cls, columns: Sequence[Columns]) -> Columns:
        """Return the rows of all ``columns``; none where they are of different kinds."""
        first = columns[0]
        if any(part.values.keys() != first.values.keys() for part in columns):
            return cls.none()
        hosts = [part.placement.segments for part in columns]
        on_host = {k: cat([segments[k] for segments in hosts]) for k in hosts[0]}
        return replace(
            first,
            values={k: cat([part.values[k] for part in columns]) for k in first.values},
            segments={k: cat([part.segments[k] for part in columns]) for k in first.segments},
            placement=replace(first.placement, segments=on_host),
        )

    def filled(self, values: dict[str, Any], segments: dict[str, Any]) -> Columns:
        """Return a copy with these tensors, which the placement shares in host memory."""
        if not self:
            return self
        if segments["num_segments"].device.type == "cpu":
            pairs = [
                (k, of, of.values.numpy()) for k, of in segments.items() if k != "num_segments"
            ]
        else:  # copies, or they would keep the memory alive that the batch was moved out of
            pairs = [(k, of, of.values.copy()) for k, of in self.placement.segments.items()]
        on_host = {k: unchecked(values, of.offsets) for k, of, values in pairs}
        placement = replace(self.placement, segments=on_host)
        return replace(self, values=values, segments=segments, placement=placement)

    def in_full(self) -> dict[str, Any]:
        """Return the columns in the dtypes of their dense fields, and where they lie."""
        columns = {
            name: Ragged(column.values.to(self.specs[name].dtype), column.offsets)
            for name, column in self.values.items()
        }
        sizes = {k: value for k, value in vars(self.placement).items() if k != "segments"}
        return columns | {"placement": {**self.placement.segments, **sizes}}

    @property
    def target(self) -> str:
        """The column that the loss fields follow from."""
        return "loss_weights" if "loss_weights" in self.values else "labels"

    def is_trained(self) -> Tensor:
        """Return whether each entry of the target is trained, bool."""
        values: Tensor = self.values[self.target].values
        if values.dtype == torch.bool:
            return values
        return values != (IGNORE_INDEX if self.target == "labels" else 0)

    def num_trained(self) -> np.ndarray:
        """Return the loss tokens of each row, int64 [R]; reads the device."""
        return sums_per_row(self.is_trained().cpu().numpy(), self.values[self.target].offsets)
