"""Divisors of losses: loss tokens or examples of a step, over its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.batch.context_shards import refuse_shard
from torch_collate_kit.ragged import Ragged


def global_num_loss_tokens(
    batches: Batch | Tensor | Iterable[Batch | Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Count the loss tokens of an optimizer step, over its micro-batches and all ranks.

    This is the divisor of :func:`token_loss`: the cells of ``loss_mask`` that are not 0, or the
    trained labels. If ``torch.distributed`` is initialized, one all-reduce of 8 bytes sums over the
    ranks; every rank must call it, a rank without rows with an empty list.

    Args:
        batches: this rank's micro-batches of the step: a Batch, unshifted labels ``[R, W]``, or any
            number of these.
        group: the data-parallel ranks, all ranks by default. Of context shards all ranks count;
            of whole batches that they share, one rank of each context group does.

    Returns:
        A scalar int64 tensor on the device of the batches, or on one that the backend can reduce
        on. Nothing waits for it.

    Raises:
        TypeError: neither a Batch nor labels.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> micro_batches = [batch[i : i + 1] for i in range(len(batch))]
    >>> global_num_loss_tokens(micro_batches)
    tensor(3)
    """
    counts = [_num_loss_tokens(batch) for batch in _listed(batches)]
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    return _over_ranks(total, group)


def global_num_examples(
    batches: Batch | Iterable[Batch], *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Count the examples of an optimizer step, over its micro-batches and all ranks.

    This is the divisor of losses per example, such as those of pairs in
    ``torch_collate_kit.preference``: an example of several segments counts once, one that was
    split once, where it begins, and an added row not at all. If ``torch.distributed`` is
    initialized, one all-reduce of 8 bytes sums over the ranks; every rank must call it, a rank
    without rows with an empty list.

    Args:
        batches: this rank's micro-batches of the step: a Batch, or any number of these.
        group: the data-parallel ranks, all ranks by default.

    Returns:
        A scalar int64 tensor in host memory, or on a device that the backend can reduce on. Nothing
        waits for it. Where a step may have no example (all dropped), divide by ``.clamp(min=1)``.

    Raises:
        TypeError: not a Batch.
        ValueError: a Batch without the row metadata of a collator.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> global_num_examples([batch[0:1], batch[1:2]])
    tensor(2)
    """
    total = sum(_num_examples(batch) for batch in _listed(batches))
    return _over_ranks(torch.tensor(total, dtype=torch.int64), group)


def _listed(batches: Any) -> Iterable[Any]:
    is_single = isinstance(batches, Mapping | Tensor) or not isinstance(batches, Iterable)
    return [batches] if is_single else batches


def _over_ranks(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks of the group, if there are any."""
    if dist.is_available() and dist.is_initialized():
        backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
        devices = [part.partition(":")[0] for part in backends.split(",")]
        if total.device.type not in devices:  # nccl has none for the host
            total = total.to(devices[0])
        dist.all_reduce(total, group=group)
    return total


def _num_loss_tokens(batch: Any) -> Tensor:
    if isinstance(batch, Batch):
        return torch.count_nonzero(batch["loss_mask"])
    if isinstance(batch, Tensor):
        check_labels(batch)
        return torch.count_nonzero(batch[..., 1:] != IGNORE_INDEX)
    raise TypeError(
        "global_num_loss_tokens needs a Batch, labels or a list of these, got "
        f"{type(batch).__name__}; pass the Batch that the collator returned, or its labels, "
        'batch["labels"]'
    )


def _num_examples(batch: Any) -> int:
    if not isinstance(batch, Batch):
        raise TypeError(
            f"global_num_examples needs a Batch or a list of these, got {type(batch).__name__}; "
            "pass the Batch that the collator returned"
        )
    refuse_shard(batch.stored(), "counted by examples", "count the batch, group= its data ranks")
    starts = batch.row_metadata.get("example_starts")
    if not isinstance(starts, Ragged):
        raise ValueError(
            "the batch was built without the row metadata of a collator, so it does not say where "
            "examples begin; pass the Batch that the collator returned"
        )
    begins = np.asarray(starts.values) == 0
    if (numbers := batch.row_metadata.get("segment_numbers")) is not None:
        begins &= np.asarray(numbers.values) == 0
    return int(begins.sum())


def check_labels(labels: Tensor) -> None:
    """Refuse a mask under the name of labels, and unsigned labels, whose -100 is a token id."""
    is_signed = labels.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    if not is_signed:
        raise TypeError(
            f"labels must be token ids or {IGNORE_INDEX}, got {labels.dtype}; pass the Batch, or "
            'unshifted labels, batch["labels"]'
        )
