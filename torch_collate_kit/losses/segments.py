"""Reductions over the segments of a batch: sums, ends, and sums by example or value of a field.

Legend: S segments, one for each entry of ``sub_seq_lengths``, row by row; n trained tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_choice
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.context_shards import refuse_shard
from torch_collate_kit.batch.dense import cells_of_rows
from torch_collate_kit.batch.fields import PerExample
from torch_collate_kit.batch.unpacking import in_rows, segment_spans, shares_prefixes, token_width
from torch_collate_kit.losses.token_logps import (
    check_batch,
    check_floats,
    loss_mask_of,
    trained_cells,
    widened,
)
from torch_collate_kit.ragged import Ragged, span_indices

_HINT = "pass one value for each trained token, as token_logps returns"


def segment_sums(
    values: Tensor, batch: Batch, *, weights: Tensor | None = None, mean: bool = False
) -> Tensor:
    """Return the sum of each segment's values, [S] in the order of the rows; gradients flow.

    There is one sum for each entry of ``batch["sub_seq_lengths"]``, so none for pads and added
    rows. The segments of an example are neighbours: ``sums[0::2]`` are those of chosen answers.

    Args:
        values: ``[n]``, one for each trained token, as :func:`token_logps` returns.
        batch: the Batch of these values.
        weights: ``[n]``, factors of the values.
        mean: divide by the segment's trained tokens, or by the sum of its weights. A segment
            without trained tokens has 0.

    Nothing waits for the device, but as in ``token_logps``.

    Raises:
        ValueError: other numbers of values or weights than the batch has trained tokens; a Batch
            that does not say where its segments are.
        TypeError: values that are not a tensor of floats; not a Batch.

    >>> from torch_collate_kit import PackedCollator, segment_sums
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> batch["sub_seq_lengths"].tolist()
    [[3, 2]]
    >>> segment_sums(torch.tensor([-1.0, -2.0, -4.0]), batch)
    tensor([-3., -4.])
    """
    check_floats("values", values, _HINT)
    checked_bool("mean", mean)
    check_batch(batch)
    segments, num_segments = _segments_of_trained(batch)
    given = {"values": values} if weights is None else {"values": values, "weights": weights}
    for name, tensor in given.items():
        check_shape(name, tensor, (len(segments),), "trained tokens")
    return _reduced(values, weights, segments, num_segments, mean=mean)


def spread_over_segments(values: Tensor, batch: Batch, *, mean: bool) -> Tensor:
    """Return the sum, or the mean, of its segment's values for each trained token: [n]."""
    segments, num_segments = _segments_of_trained(batch)
    sums = _reduced(values, None, segments, num_segments, mean=mean)
    return sums.index_select(0, segments)


def segment_values(values: Tensor, batch: Batch) -> Tensor:
    """Return its segment's value for each trained token, [n]: the way back of segment_sums.

    ``values`` ``[S]`` have any dtype, such as bool; gradients flow. Raises as
    :func:`segment_sums`.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> segment_values(torch.tensor([-3.0, -4.0]), batch)
    tensor([-3., -3., -4.])
    """
    check_batch(batch)
    segments, num_segments = _segments_of_trained(batch)
    check_shape("values", values, (num_segments,), "segments")
    return values.index_select(0, segments)


def segment_ends(batch: Batch) -> Tensor:
    """Return the cell of each segment's last token, int64 [S], counted over all rows.

    The cells index ``[R * W]``: ``values.flatten(0, 1)[segment_ends(batch)]`` of values
    ``[R, W, ...]`` are the scores of a reward model, classes or embeddings. Pads that alignment or
    padding put after a segment are not its end. The order is that of :func:`segment_sums`, on the
    device of the batch.

    Raises:
        ValueError: a Batch that does not say where its segments are.
        TypeError: not a Batch.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> segment_ends(batch)
    tensor([2, 4])
    """
    check_batch(batch)
    firsts, lengths = segment_spans(batch)
    return _cells_at(firsts + lengths - 1, batch)


def segment_pool(
    hidden: Tensor,
    batch: Batch,
    *,
    how: Literal["first", "last", "mean"],
    weights: Tensor | None = None,
) -> Tensor:
    """Return one vector per segment, ``[S, H]`` in the order of the rows; gradients flow.

    For classes, scores and embeddings. The order is that of :func:`segment_sums`, and of
    ``PerExample`` values where an example is one segment; dtype and device are those of ``hidden``.
    A mean of half precision is summed in fp32.

    Args:
        hidden: ``[R, W, H]``, or ``[1, R * W, H]`` of a model that gets all rows as one.
        batch: the Batch of these rows, with any ``targets``.
        how: the "first" token of a segment ([CLS]), its "last" one (causal models), or the "mean".
        weights: for "mean": ``[R, W]``, a factor for each token, such as 0 for those of a prompt;
            a segment without weight has 0. Where prefixes are shared, ``[R, U]``.

    Raises:
        ValueError: an unknown ``how``; weights of another shape, or not for "mean"; hidden states
            of other cells, such as one vector per row; a Batch without its segments.
        TypeError: hidden states that are not a tensor of floats; not a Batch.

    >>> from torch_collate_kit import PackedCollator
    >>> collate = PackedCollator(0, max_tokens=8, targets=None)
    >>> batch = collate([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 5]}])
    >>> segment_pool(batch["input_ids"][..., None].float(), batch, how="mean")
    tensor([[3.0000],
            [1.5000]])
    """
    check_floats("hidden", hidden, "pass model(...).last_hidden_state")
    check_batch(batch)
    checked_choice("how", how, ("first", "last", "mean"))
    rows, width = batch["input_ids"].shape
    states = in_rows(hidden, rows, width)
    if states.ndim != 3 or states.shape[:2] != (rows, width):
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, the batch has {rows} rows of {width} cells; "
            f"pass last_hidden_state, [{rows}, {width}, H] (a pooler_output has one vector per row)"
        )
    if weights is not None and how != "mean":
        raise ValueError(f"weights are factors in a mean, and how={how!r}; remove one of the two")
    firsts, lengths = segment_spans(batch)
    ends = firsts if how == "first" else firsts + lengths - 1
    tokens = span_indices(firsts, lengths) if how == "mean" else ends
    taken = states.flatten(0, 1).index_select(0, _cells_at(tokens, batch))
    if how != "mean":
        return taken
    if weights is not None:
        check_shape("weights", weights, (len(batch), token_width(batch)), "cells")
        weights = weights.flatten()[torch.from_numpy(tokens).to(weights.device)]
    numbers = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    segments = numbers.to(taken.device, non_blocking=True)
    return _reduced(taken, weights, segments, len(lengths), mean=True).to(states.dtype)


def sums_by(
    values: Tensor | Sequence[Tensor],
    batches: Batch | Sequence[Batch],
    name: str,
    *,
    per: Literal["token", "example"] = "token",
    group: dist.ProcessGroup | None = None,
) -> dict[Any, tuple[float, int]]:
    """Return the sum and the count of values for each value of a PerExample field, over all ranks.

    Such as the loss per source, the sum divided by the count: ``sums_by(-logps, batch, "source")``.
    All ranks of ``torch.distributed`` must call it, a rank without rows with empty lists, and get
    the same result. It waits for the device.

    Args:
        values: ``[n]``, one for each trained token, as :func:`token_logps` returns, or a list.
        batches: the Batch of these values, or the micro-batches.
        name: a declared ``PerExample`` field, of numbers or strings.
        per: "example" for values ``[P]``, one for each example in row order, as losses of pairs.
        group: the data-parallel ranks, all ranks by default.

    Raises:
        ValueError: no such field; other numbers of values than trained tokens or examples.
        TypeError: values that are not tensors; not a Batch.

    >>> from torch_collate_kit import PackedCollator, PerExample
    >>> examples = [{"input_ids": [1, 2], "part": "a"}, {"input_ids": [3, 1, 2], "part": "b"}]
    >>> batch = PackedCollator(0, max_tokens=8, fields={"part": PerExample(str)})(examples)
    >>> sums_by(torch.tensor([1.0, 2.0, 4.0]), batch, "part")
    {'a': (4.0, 1), 'b': (3.0, 2)}
    """
    checked_choice("per", per, ("token", "example"))
    single = isinstance(batches, Batch)
    given: Any = ([values], [batches]) if single else (values, batches)
    parts: list[Any] = [
        _sums_by_key(own, batch, name, per) for own, batch in zip(*given, strict=True)
    ]
    found: dict[Any, tuple[float, int]] = {}
    for key, total, count in (entry for part in _of_all_ranks(parts, group) for entry in part):
        before = found.get(key, (0.0, 0))
        found[key] = before[0] + total, before[1] + int(count)
    return {key: found[key] for key in sorted(found)}


def example_losses(
    sums: Tensor | Sequence[Tensor],
    batches: Batch | Sequence[Batch],
    *,
    sampler: Any = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, np.ndarray]:
    """Return the loss of each example and its trained tokens, over all ranks: a table.

    Keep ``segment_sums(-token_logps(...).detach(), batch)`` and the batch in the loop, which waits
    for nothing, and call this where losses are logged, on every rank: one copy, one gather.

    Columns have a row per example, ascending: ``"example"``, ``"loss"``, a sum, ``"tokens"``, and
    ``"source"`` if declared, or known of a ``Mixture``. Segments and pieces of an example add up.
    ``sums`` ``[S]`` are of one batch, or a list of micro-batches': of one step, with the
    ``sampler`` of a ``PrefetchLoader``, whose batches know their epoch and step, of any. Examples
    are then indices in its dataset, else those of the collator's input.

    Raises:
        ValueError: other numbers of sums; a context shard; documents that are not isolated; batches
            not of this sampler, or without one of several steps.
        TypeError: sums that are not tensors of floats; not a Batch.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> {name: column.tolist() for name, column in example_losses(torch.ones(2), batch).items()}
    {'example': [0, 1], 'loss': [1.0, 1.0], 'tokens': [1, 2]}
    """
    given: Any = ([sums], [batches]) if isinstance(batches, Batch) else (list(sums), list(batches))
    if len(given[0]) != len(given[1]):
        raise ValueError(f"{len(given[0])} sums for {len(given[1])} batches; pass one for each")
    read = None if sampler is None else functools.cache(sampler.examples)
    parts = [_of_segments(own, batch, read) for own, batch in zip(*given, strict=True)]
    if parts:
        numbers = torch.cat([part.pop("numbers") for part in parts], dim=1).cpu().double().numpy()
        parts = [_joined(parts) | {"loss": numbers[0], "tokens": numbers[1]}]
    none = dict.fromkeys(("example", "loss", "tokens"), np.zeros(0, np.int64))
    found = _joined(_of_all_ranks(parts, group) or [none | {"place": np.zeros((0, 3))}])
    place, mixture = found.pop("place"), getattr(sampler, "mixture", None)
    if sampler is None and len(np.unique(place, axis=0)) < len(place):
        why = "the batches are of several steps, or of ranks that collated their own"
        raise ValueError(f"an example comes twice: {why}; pass sampler=, that of the loader")
    examples, first, rows = np.unique(found["example"], return_index=True, return_inverse=True)
    table = {name: column[first] for name, column in found.items()}
    for name, dtype in (("loss", np.float64), ("tokens", np.int64)):
        table[name] = np.bincount(rows, found[name], len(examples)).astype(dtype)
    if "source" not in table and mixture is not None:
        table["source"] = np.array(mixture.names)[mixture.source_of(examples)]
    return table


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _of_segments(sums: Any, batch: Any, read: Callable[..., Any] | None) -> dict[str, Any]:
    """Return columns of segments: example, place, source, and numbers ``[2, S]`` on the device."""
    check_floats("sums", sums, "pass those that segment_sums returns")
    check_batch(batch)
    segments, num_segments = _segments_of_trained(batch)
    check_shape("sums", sums, (num_segments,), "segments")
    metadata, sums = batch.row_metadata, widened(sums.detach())
    if "document_indices" in metadata:
        raise ValueError("a segment of isolate=False has several examples; pack with isolate=True")
    names = ("example_indices", "example_starts", "segment_numbers")
    place = np.stack([metadata.get(name, metadata[names[1]]).values for name in names], axis=1)
    counts = _added(torch.ones_like(segments, dtype=sums.dtype), segments, num_segments)
    columns = {"place": place, "example": place[:, 0], "numbers": torch.stack([sums, counts])}
    if "source" in metadata or "source" in batch:
        keys, owners = _keys(batch, "source")
        columns["source"] = np.array(keys)[owners]
    if read is not None:
        columns["example"] = _in_dataset(batch, read)[place[:, 0]]
    return columns


def _in_dataset(batch: Batch, read: Callable[..., Any]) -> np.ndarray:
    """Return the index in the dataset of each example that the collator got, int64."""
    epoch, step, number = (batch.metadata.get(name) for name in ("epoch", "step", "num_examples"))
    if epoch is None or step is None:
        way_out = "load it with a PrefetchLoader, or leave sampler out for the collator's indices"
        raise ValueError(f"the batch has no epoch and step, so its examples are unknown; {way_out}")
    examples: np.ndarray = read(epoch, step, own=True)
    if len(examples) != number:  # some were skipped, and the others numbered anew
        examples = examples[~np.isin(examples, batch.metadata.get("skipped", []))]
    if len(examples) != number:
        has = f"the batch has {number} examples, step {step} of epoch {epoch} has {len(examples)}"
        raise ValueError(f"{has} in this sampler; pass that of the loader")
    return examples


def _of_all_ranks(parts: list[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Return the parts of all ranks, in their order."""
    if not (dist.is_available() and dist.is_initialized()):
        return parts
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, parts, group=group)
    return [part for of_rank in of_ranks for part in of_rank]


def _sums_by_key(values: Any, batch: Any, name: str, per: str) -> list[tuple[Any, float, float]]:
    """Return key, sum and count of each example of a batch."""
    check_floats("values", values, _HINT)
    check_batch(batch)
    keys, examples = _keys(batch, name)
    values, ones = values.detach().double(), torch.ones_like(values, dtype=torch.float64)
    if per == "example":
        check_shape("values", values, (len(keys),), "examples")
        sums = torch.stack([values, ones])
    else:
        segments, num_segments = _segments_of_trained(batch)
        check_shape("values", values, (len(segments),), "trained tokens")
        of_segments = torch.stack([_added(part, segments, num_segments) for part in (values, ones)])
        to = torch.from_numpy(examples).to(values.device)
        sums = of_segments.new_zeros(2, len(keys)).index_add(1, to, of_segments)
    return list(zip(keys, *sums.tolist(), strict=True))


def _keys(batch: Batch, name: str) -> tuple[list[Any], np.ndarray]:
    """Return the field's value of each example, and the example of each segment, int64 [S]."""
    refuse_shard(batch.stored(), "read by examples", "join values with attention.context_join()")
    per_row, numbers = (batch.row_metadata.get(k) for k in (name, "segment_numbers"))
    columns = batch.stored().columns
    spec: Any = columns.specs.get(name) if columns else None
    counts = batch.row_metadata["example_indices"].lengths if columns else np.zeros(0, np.int64)
    num_segments = int(counts.sum())
    if (
        columns and per_row is not None and not isinstance(per_row, Ragged)
    ):  # strings: a tuple per packed row, else one per row
        pairs = zip(per_row, counts.tolist(), strict=True)
        keys = [k for row, n in pairs for k in (row if isinstance(row, tuple) else [row] * n)]
    elif isinstance(spec, PerExample) and not spec.shape:
        keys = batch[name].values.tolist()
    else:
        way_out = f"declare it in the collator, fields={{{name!r}: PerExample(str)}}"
        raise ValueError(f"the batch has no PerExample field {name!r} of one value; {way_out}")
    is_first = np.ones(num_segments, bool) if numbers is None else np.asarray(numbers.values) == 0
    if len(keys) == num_segments:
        keys = [key for key, first in zip(keys, is_first.tolist(), strict=True) if first]
    return keys, np.cumsum(is_first) - 1


def _segments_of_trained(batch: Batch) -> tuple[Tensor, int]:
    """Return the segment of each trained token, int64 [n], and the number of segments."""
    firsts, _ = segment_spans(batch)
    cells, mask = trained_cells(batch), loss_mask_of(batch)
    hidden = token_width(batch) - mask.shape[1]
    cells = cells + (cells // max(mask.shape[1], 1) + 1) * hidden
    starts = torch.from_numpy(firsts).to(cells.device, non_blocking=True)
    return torch.searchsorted(starts, cells, right=True) - 1, len(firsts)


def _reduced(
    values: Tensor, weights: Tensor | None, segments: Tensor, num_segments: int, *, mean: bool
) -> Tensor:
    """Return the sum, or the mean, of each segment's values ``[n, ...]``."""
    values = widened(values)
    factors = values.new_ones(len(values)) if weights is None else weights.to(values.dtype)
    factors = factors.view(-1, *[1] * (values.ndim - 1))
    if weights is not None:  # where() first: a token that weighs nothing may be infinite
        values = torch.where(factors != 0, values, 0) * factors
    sums = _added(values, segments, num_segments)
    totals = _added(factors, segments, num_segments) if mean else sums.new_ones(1)
    return sums / torch.where(totals == 0, 1, totals)


def _added(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Return the sum of each segment, [S, ...]."""
    return values.new_zeros(num_segments, *values.shape[1:]).index_add(0, segments, values)


def _cells_at(tokens: np.ndarray, batch: Batch) -> Tensor:
    """Return the cells of tokens, which are counted over all rows: int64 on the batch's device."""
    places = torch.from_numpy(tokens).to(batch["input_ids"].device, non_blocking=True)
    return cells_of_rows(batch).flatten()[places] if shares_prefixes(batch) else places


def check_shape(name: str, values: Any, shape: tuple[int, ...], unit: str) -> None:
    """Check that ``values`` is a tensor of this shape."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
    if tuple(values.shape) != shape:
        has = f"the batch has {' x '.join(map(str, shape))} {unit}"
        raise ValueError(f"{name} have shape {list(values.shape)}, {has}; pass {[*shape]}")
