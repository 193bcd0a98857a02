"""Attention over context ranks, and joins of the ranks' results to whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_collate_kit.attention.kernels import SegmentBounds, attend, same_dtype
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.paths import (
    all_gather,
    check_group,
    check_one_batch,
    content_of,
    gathered_ints,
    places_in_ranks,
    reduce_scatter,
)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    path_cells: Tensor,
    context_group: dist.ProcessGroup,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend causally from this rank's cells to those of all ranks: a new tensor, ``[B, T, H, D]``.

    Keys and values are gathered from all ranks of the group; their gradients are added up over the
    ranks. Nothing of size T x T is built on a GPU. ``attn_implementation="torch_varlen"`` calls
    this in every layer for the inputs of a shard; a model of your own does it itself, with the
    keywords of ``batch.context_shard(...).model_inputs(context_group=group)``.

    Args:
        query: ``[B, H, T, D]``, the cells of a shard.
        key: ``[B, Hkv, T, D]``, as ``value``.
        value: ``[B, Hkv, T, D]``.
        cu_seq_lens_q: int32 ``[K + 1]``, bounds of runs of cells of one segment, over all rows.
        cu_seq_lens_k: int32 ``[K + 1]``, bounds of the keys of each run in ``path_cells``.
        max_length_q: cells of the longest run.
        max_length_k: keys of the run that has most.
        path_cells: int64, the keys of each run in the cells of all ranks, rank after rank.
        context_group: the ranks, over gloo or NCCL.
        scale: factor of the scores, ``D ** -0.5`` by default.
        window: a cell sees itself and the ``window - 1`` cells before it.

    Source: the all-gather of keys and values is that of A. Dubey et al., "The Llama 3 Herd of
    Models" (2024), section 3.3.2.
    """
    query, key, value = gathered(query, key, value, context_group)
    segments = SegmentBounds(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    return attend(query, key, value, segments, path_cells=path_cells, scale=scale, window=window)


def gathered(
    query: Tensor, key: Tensor, value: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query, and keys and values of all ranks along the first axis, in one exchange."""
    query, key, value = same_dtype(query, key, value)
    gather: Callable[[Tensor, Any], Tensor] = _Gather.apply
    sizes = [key.shape[-1], value.shape[-1]]
    key, value = torch.split(gather(torch.cat([key, value], dim=-1), group), sizes, dim=-1)
    return query, key, value


class _Gather(torch.autograd.Function):
    """Join tensors of all ranks; the gradient of each is the sum of what all ranks have for it.

    torch's own functions for it are private, and have other names in each release.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        joined = values.new_empty(dist.get_world_size(group) * len(values), *values.shape[1:])
        all_gather()(joined, values.contiguous(), group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        own = gradient.new_empty(len(gradient) // size, *gradient.shape[1:])
        reduce_scatter()(own, gradient.contiguous(), group=ctx.group)
        return own, None


def context_join(
    values: Tensor | Sequence[Tensor],
    shards: Batch | Sequence[Batch],
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Join values from the shards of all context ranks, in the order of the batch.

    Of cells, ``[R, W / cp_size, ...]`` per rank, such as logits or entropies, the result is
    ``[R, W, ...]``. Of trained tokens, ``[n]`` per rank, as ``token_logps`` returns, it is ``[N]``,
    as ``token_logps`` of the batch: what ``segment_sums`` and losses of sequences read. A value of
    the cell that predicts a token stays there, so ``joined[:, :-1]`` is ``[R, W - 1]``, one for
    each predicted token, as ``unpack`` accepts it.

    In a controller pass what all ranks returned and their shards, in the order of the ranks. On the
    ranks themselves pass the rank's own, and the ``group``: every rank gets the whole, and must
    compute the same from it, for the gradient of its part goes to it alone. Gradients of the model
    then add up over the ranks, as those of ``token_loss`` do. It waits for the device.

    Raises:
        ValueError: batches that are not shards, or of other ranks or different batches; values of
            other cells.
        TypeError: values that are not tensors.

    >>> from torch_collate_kit import PackedCollator, ParallelLayout
    >>> collate = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(cp=2))
    >>> batch = collate([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [3, 4, 9]}])
    >>> shards = [batch.context_shard(rank, 2) for rank in range(2)]
    >>> context_join([shard["input_ids"] for shard in shards], shards).tolist()
    [[5, 6, 7, 8, 3, 4, 9, 0]]
    """
    parts = [values] if isinstance(values, Tensor) else list(values)
    given = [shards] if isinstance(shards, Batch) else list(shards)
    placements = [_placement_of(batch) for batch in given]
    known: list[Any] = [placement.shard for placement in placements]
    if group is None:
        _check_ranks(parts, known)
        check_one_batch([content_of(shard) for shard in known])
    elif len(parts) != 1 or len(given) != 1:
        raise ValueError(
            f"with a group each rank passes its own values and shard, got {len(parts)} tensors and "
            f"{len(given)} shards; leave group out to join those of all ranks in one process"
        )
    else:
        check_group(known[0], group)
        check_one_batch(gathered_ints(content_of(known[0]), group))
    in_cells = [_in_cells(*pair) for pair in zip(parts, given, strict=True)]
    masks = [(batch["loss_mask"] != 0).to(parts[0].device) for batch in given]
    places = torch.from_numpy(places_in_ranks(placements[0], len(given[0])))
    joined = _joined(in_cells, group).index_select(0, places.to(parts[0].device))
    if parts[0].ndim == 1:
        trained = _joined([mask.to(torch.uint8) for mask in masks], group)
        return joined[trained.index_select(0, places.to(parts[0].device)) != 0]
    return joined.view(len(given[0]), known[0].width, *joined.shape[1:])


def _placement_of(batch: Any) -> Any:
    placement = getattr(batch, "placement", None)
    if placement is None or placement.shard is None:
        raise ValueError(
            "context_join() needs the shards that batch.context_shard() returned, got "
            f"{'a whole Batch' if isinstance(batch, Batch) else type(batch).__name__}"
        )
    return placement


def _check_ranks(parts: list[Tensor], shards: list[Any]) -> None:
    ranks, size = [shard.rank for shard in shards], shards[0].size if shards else 1
    if ranks != list(range(size)) or len(parts) != len(ranks):
        raise ValueError(
            f"context_join() needs the values and shards of the context ranks 0 to {size - 1}, in "
            f"that order, got {len(parts)} tensors and shards of the ranks {ranks}; on the ranks "
            "themselves pass group="
        )


def _in_cells(values: Any, shard: Batch) -> Tensor:
    """Return values per cell unchanged, and place values of trained tokens in a shard's cells."""
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be tensors, got {type(values).__name__}")
    shape = shard["loss_mask"].shape
    if values.ndim > 1 and values.shape[:2] == shape:
        return values
    trained = (shard["loss_mask"] != 0).to(values.device)
    if values.ndim != 1 or len(values) != int(trained.sum()):
        raise ValueError(
            f"values have shape {list(values.shape)}, the shard has cells {list(shape)} and "
            f"{int(trained.sum())} trained tokens; pass values of one of them"
        )
    return values.new_zeros(shape).masked_scatter(trained, values)


def _joined(parts: list[Tensor], group: Any) -> Tensor:
    """Return the cells of all ranks, rank after rank: ``[c * R * W, ...]``."""
    flat = [part.flatten(0, 1) for part in parts]
    if group is None:
        return torch.cat(flat)
    gather: Callable[[Tensor, Any], Tensor] = _GatherSame.apply
    return gather(flat[0], group)


class _GatherSame(torch.autograd.Function):
    """Join tensors of all ranks, which compute the same from them: each has its own gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _Gather.forward(ctx, values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        return gradient.chunk(size)[dist.get_rank(ctx.group)], None
