"""The methods of a batch for context parallelism, where several ranks compute one row."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from torch_collate_kit.batch.context_shards import shard_of
from torch_collate_kit.batch.dense import cells_of_shard
from torch_collate_kit.batch.storage import Storage

if TYPE_CHECKING:
    from torch_collate_kit.batch.batch import Batch


def is_shard(batch: Any) -> bool:
    """Return whether the batch is the part of one that a context rank has."""
    placement = getattr(batch, "placement", None)
    return placement is not None and placement.shard is not None


class ContextParallel:
    """The shards of a batch."""

    _shared: dict[str, Tensor]

    @classmethod
    @abstractmethod
    def of_storage(cls, storage: Storage, *, check: bool = True) -> Batch:
        """Return a batch of ``storage``."""

    @abstractmethod
    def stored(self) -> Storage:
        """Return all that is stored."""

    def context_shard(
        self,
        cp_rank: int,
        cp_size: int,
        *,
        layout: Literal["zigzag", "contiguous", "head_tail"] = "zigzag",
    ) -> Batch:
        """Return the cells of each row that one of ``cp_size`` context ranks computes: a copy.

        The shard is a Batch of the same rows, ``W / cp_size`` cells wide, in their order:

        - "zigzag" (TransformerEngine, Megatron-Core, ring-flash-attn) gives each rank two parts of
          every segment, as far from its start as from its end, so attention costs all the same;
        - "head_tail" (torch, Accelerate) does so with whole rows, "contiguous" (Ulysses, DeepSpeed)
          gives each rank one part of a row.

        ``input_ids``, ``position_ids`` (those in the segment), ``mrope_position_ids`` and masks are
        of its cells. ``targets``, int64 ``[R, W / cp_size]``, are the ids that they predict,
        shifted before the rows were cut: -100 where that is not trained, or the segment ends.
        ``loss_mask``, ``response_mask`` and all declared fields per token are with the cell that
        predicts, in that shape. Fields per example, images and row metadata stay whole, and so does
        ``metadata["num_loss_tokens"]``. ``metadata["cu_seq_lens"]``, int32 ``[S + 1]``, bounds the
        segments of the batch flat over its rows, ``"cu_seq_lens_local"`` their parts in the shard.
        :attr:`cells` says which cells these are. Cut rows before, not after: a shard has no slices.

        Raises:
            ValueError: segments or rows that the ranks do not divide; a batch that is a shard, was
                built from tensors, or whose segments share prefixes.

        >>> from torch_collate_kit import PackedCollator, ParallelLayout
        >>> collate = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(cp=2))
        >>> batch = collate([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [3, 4, 9]}])
        >>> shard = batch.context_shard(1, 2)
        >>> shard["input_ids"].tolist(), shard["position_ids"].tolist()
        ([[6, 7, 4, 9]], [[1, 2, 1, 2]])
        >>> shard["targets"].tolist(), shard.cells.tolist()
        ([[7, 8, 9, -100]], [1, 2, 5, 6])
        """
        return self.of_storage(shard_of(self.stored(), cp_rank, cp_size, layout))

    @property
    def cells(self) -> Tensor:
        """Cells of the batch that a shard has, ``row * W + column``: int64, in its order.

        Raises:
            ValueError: the batch is not a shard.
        """
        columns = self.stored().columns
        if columns.placement is None or columns.placement.shard is None:
            raise ValueError(
                "the batch is not a shard, so its cells are all of them; cut it with "
                "batch.context_shard(cp_rank, cp_size)"
            )
        if "cells of the batch" not in self._shared:
            self._shared["cells of the batch"] = cells_of_shard(columns)
        return self._shared["cells of the batch"]
