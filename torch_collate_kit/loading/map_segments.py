"""A number or vector for every segment of a dataset: log-probs of a reference model, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators.packed import checked_collator
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.packed_sampler import PackedBatchSampler
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.ragged import Ragged


def map_segments(
    fn: Callable[[Batch], Tensor],
    examples: TokenizedDataset,
    collate: Any,
    *,
    rows: int = 1,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> np.ndarray:
    """Return a number for each segment of each example, float64 [N, K] in the dataset's order.

    Of vectors ``[S, H]``, as of ``segment_pool``, float32 [N, K, H], or float64 if they are that.
    K is the largest number of segments of an example, 1 where examples are flat; others, and
    examples that are dropped, have NaN. Such as the log-probs of a reference model, a column to add
    and to declare:

        def fn(batch):
            hidden = reference.model(**batch.model_inputs(reference, labels=False))[0]
            return segment_sums(token_logps(hidden, batch, head=reference.lm_head), batch)

        data = data.add_column("ref_logps", list(map_segments(fn, TokenizedDataset(data), collate)))
        fields = {"ref_logps": PerExample(torch.float32, shape=(2,))}

    Args:
        fn: gets a packed batch; returns ``[S]`` or ``[S, H]``, in the order of ``sub_seq_lengths``,
            as ``segment_sums`` and ``segment_pool`` do. It runs without gradients; put the model
            into eval mode yourself.
        examples: every example is read once.
        collate: the ``PackedCollator`` that plans the rows, or a collator around one. In
            ``torch.distributed`` each of its ``parallel.dp`` ranks runs its share of the rows, and
            all have the result; else this process runs all.
        rows: rows of a batch, on each rank.
        device: the device to which batches are moved before ``fn``; None leaves them.
        group: the data-parallel ranks, all ranks by default.

    Raises:
        ValueError: a collator that cuts examples into pieces; another number of ranks than ``dp``;
            ``fn`` returns another shape.
        TypeError: ``fn`` returns no tensor; ``collate`` does not pack.

    >>> from torch_collate_kit import PackedCollator
    >>> pairs = [{"input_ids": [[1, 2], [1, 3]]}, {"input_ids": [[4, 5, 6], [4, 7]]}]
    >>> def last_ids(batch):
    ...     return batch["input_ids"].flatten()[segment_ends(batch)]
    >>> from torch_collate_kit.losses import segment_ends
    >>> map_segments(last_ids, TokenizedDataset(pairs), PackedCollator(0, max_tokens=8))
    array([[2., 3.],
           [6., 7.]])
    """
    packing = checked_collator(collate).packing
    _check_whole(packing)
    rows = checked_int("rows", rows) * packing.row_multiple
    lengths = examples.lengths
    most = int(lengths.lengths.max(initial=0)) if isinstance(lengths, Ragged) else 1
    is_divided, ranks = _ranks(packing.parallel.dp, group)
    parts = []
    for rank in ranks:
        sampler = PackedBatchSampler(
            examples, collate, batch_rows=rows, shuffle=False, dp_rank=rank
        )
        for step, part in enumerate(sampler):
            batch = collate(examples.__getitems__(part))
            parts.append(_of_batch(fn, batch, sampler.examples(0, step), device))
    if is_divided:
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, parts, group=group)
        parts = [part for of_rank in of_ranks for part in of_rank]
    like = parts[0][2]
    found = np.full((len(examples), most, *like.shape[1:]), np.nan, like.dtype)
    for numbers, segments, values in parts:
        found[numbers, segments] = values
    return found


def _of_batch(
    fn: Callable[[Batch], Tensor],
    batch: Batch,
    examples: np.ndarray,
    device: torch.device | str | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the example, the segment and the value of each segment of a batch, [S] each."""
    places = batch.row_metadata["example_indices"]
    segments = batch.row_metadata.get("segment_numbers")
    # no_grad: what a model caches in inference mode, training could not use afterwards
    with torch.no_grad():
        values = fn(batch if device is None else batch.to(device))
    if not isinstance(values, Tensor):
        raise TypeError(f"fn must return a tensor, got {type(values).__name__}")
    if values.ndim not in (1, 2) or len(values) != len(places.values):
        raise ValueError(
            f"fn returned shape {list(values.shape)} for {len(places.values)} segments; return one "
            "number or vector for each entry of sub_seq_lengths, as segment_sums does"
        )
    of_segments = np.zeros(len(places.values), np.int64) if segments is None else segments.values
    is_narrow = values.ndim == 2 and values.dtype != torch.float64
    found = (values.float() if is_narrow else values.double()).cpu().numpy()
    return examples[places.values], of_segments, found


def _ranks(dp: int, group: dist.ProcessGroup | None) -> tuple[bool, list[int]]:
    """Return whether other processes have parts of the rows, and the ranks whose rows this runs."""
    if dp == 1 or not (dist.is_available() and dist.is_initialized()):
        return False, list(range(dp))
    if (size := dist.get_world_size(group)) != dp:
        raise ValueError(
            f"the collator plans rows for {dp} ranks, parallel.dp, and the group has {size}; pass "
            "the group of the data-parallel ranks"
        )
    return True, [dist.get_rank(group)]


def _check_whole(packing: PackingOptions) -> None:
    """Refuse packing in which a segment may be several pieces."""
    for name, value in (("strategy", "wrapped"), ("overflow", "split")):
        if getattr(packing, name) == value:
            raise ValueError(
                f"the collator has {name}={value!r}, which cuts an example into pieces, so that a "
                "segment has no one number; pass one that keeps examples whole"
            )
