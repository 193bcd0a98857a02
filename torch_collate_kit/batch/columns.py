"""The columns of a batch on their device: what a batch holds at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.fields import IGNORE_INDEX, FieldSpec
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.rows import cat
from torch_collate_kit.ragged import Ragged, unchecked

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

    @classmethod
    def of(
        cls,
        values: dict[str, Ragged],
        specs: dict[str, FieldSpec],
        names: tuple[str, ...],
        placement: Placement,
    ) -> Columns:
        """Columns in host memory, whose segments are those of the placement."""
        host = placement.segments
        segments: dict[str, Any] = {
            name: unchecked(torch.from_numpy(of.values), of.offsets) for name, of in host.items()
        }
        segments["num_segments"] = torch.from_numpy(host["starts"].lengths.astype(np.int32))
        return cls(values, specs, names, placement, segments)

    @property
    def num_rows(self) -> int:
        return len(self.segments["num_segments"])

    def change(
        self,
        column: Callable[[str, Ragged], Ragged],
        counts: Callable[[str, Any], Any],
        **placement: Any,
    ) -> Columns:
        """The same with every column changed, and all that is counted of the segments.

        Both functions take a name and a Ragged, ``counts`` also the tensor ``"num_segments"``.
        """
        on_host = {name: counts(name, of) for name, of in self.placement.segments.items()}
        return replace(
            self,
            values={name: column(name, values) for name, values in self.values.items()},
            segments={name: counts(name, of) for name, of in self.segments.items()},
            placement=replace(self.placement, segments=on_host, **placement),
        )

    @classmethod
    def cat(cls, parts: Sequence[Columns | None]) -> Columns | None:
        """The rows of all parts; None where they are not columns of the same kinds."""
        columns = [part for part in parts if part is not None]
        if len(columns) < len(parts):
            return None
        first = columns[0]
        if any(part.values.keys() != first.values.keys() for part in columns):
            return None
        hosts = [part.placement.segments for part in columns]
        on_host = {k: cat([segments[k] for segments in hosts]) for k in hosts[0]}
        return replace(
            first,
            values={k: cat([part.values[k] for part in columns]) for k in first.values},
            segments={k: cat([part.segments[k] for part in columns]) for k in first.segments},
            placement=replace(first.placement, segments=on_host),
        )

    def emptied(self) -> Columns:
        """The same without its tensors."""
        return replace(self, values={}, segments={})

    def filled(self, values: dict[str, Any], segments: dict[str, Any]) -> Columns:
        """The same, held by these tensors; in host memory the placement shares them."""
        if segments["num_segments"].device.type == "cpu":
            per_segment = {k: of for k, of in segments.items() if k != "num_segments"}
            on_host = {k: Ragged(of.values.numpy(), of.offsets) for k, of in per_segment.items()}
        else:  # copies, or they would keep the memory alive that the batch was moved out of
            host = self.placement.segments
            on_host = {k: Ragged(of.values.copy(), of.offsets) for k, of in host.items()}
        placement = replace(self.placement, segments=on_host)
        return replace(self, values=values, segments=segments, placement=placement)

    def in_full(self) -> dict[str, Any]:
        """The columns in the dtypes of their dense fields, and where they lie.

        Two batches with equal dense fields have equal ones, whatever dtypes they are stored in.
        """
        columns = {
            name: Ragged(column.values.to(self.specs[name].dtype), column.offsets)
            for name, column in self.values.items()
        }
        sizes = {k: value for k, value in vars(self.placement).items() if k != "segments"}
        return columns | {"placement": {**self.placement.segments, **sizes}}

    @property
    def target(self) -> str:
        """The column that the loss fields follow from."""
        return "labels" if "labels" in self.values else "loss_weights"

    def is_trained(self) -> Tensor:
        """bool, one for each entry of the target."""
        values: Tensor = self.values[self.target].values
        if values.dtype == torch.bool:
            return values
        return values != (IGNORE_INDEX if self.target == "labels" else 0)

    def num_trained(self) -> np.ndarray:
        """int64 [R], loss tokens of each row; read from the device."""
        before = np.append(0, np.cumsum(self.is_trained().cpu().numpy()))
        return np.diff(before[self.values[self.target].offsets])
