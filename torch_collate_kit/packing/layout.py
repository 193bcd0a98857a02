"""How a training run is split over devices: the sizes that packing depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torch_collate_kit._checks import checked_bool, checked_int
from torch_collate_kit._reprs import dataclass_repr

__all__ = ["ParallelLayout"]


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions: data, tensor, context, pipeline; and fp8 on or off.

    The four sizes are ints of at least 1 and are kept as Python ints. Immutable and hashable.
    ``pp`` changes nothing here: pipeline stages exchange blocks of one shape, which is
    ``PackedCollator(fixed_width=True)`` with a fixed number of rows (docs/contract.md).

    Raises:
        TypeError: a size is not an int, or ``fp8`` is not a bool.
        ValueError: a size is below 1.

    >>> layout = ParallelLayout(dp=4, tp=2, cp=2, fp8=True)
    >>> layout.align
    32
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    fp8: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "fp8":
                name, value = field.name, getattr(self, field.name)
                size = checked_int(name, value, hint="1 means this kind of parallelism is off")
                object.__setattr__(self, field.name, size)
        checked_bool("fp8", self.fp8)

    def __repr__(self) -> str:
        return dataclass_repr(self)

    @property
    def align(self) -> int:
        """Every sub-sequence is padded to a multiple of this many tokens.

        Sequence parallelism cuts a sub-sequence into ``tp`` parts, context parallelism into
        ``2 * cp``: each rank takes one chunk from either end, which balances causal attention. An
        fp8 matrix product needs a token dimension, the tokens of one context rank, that is a
        multiple of 16.

        >>> ParallelLayout(tp=4).align, ParallelLayout(tp=4, cp=2).align
        (4, 16)
        """
        align = self.tp * 2 * self.cp if self.cp > 1 else self.tp
        return math.lcm(align, 16 * self.cp) if self.fp8 else align
