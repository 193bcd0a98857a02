"""A rollout batch cut into mini-batches, each padded and divided among the ranks by itself."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.rows import cat, is_per_row, take
from torch_collate_kit.batch.trimming import cells_per_row
from torch_collate_kit.packing.balance import attention_cost, over_ranks
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl.boundaries import checked_boundaries

__all__ = ["stage_mini_batches", "unstage"]


class _RowCounts(NamedTuple):
    """int64 [B] each; None where the batch does not say."""

    is_dummy: np.ndarray  # bool: a row that was added before
    tokens: np.ndarray | None
    loss_tokens: np.ndarray | None
    costs: np.ndarray | None


def stage_mini_batches(
    batch: Batch,
    boundaries: Any,
    dp_size: int,
    *,
    balance: Literal["tokens", "attention"] | None = None,
) -> list[list[Batch]]:
    """The rows of every mini-batch and rank: ``staged[mini_batch][dp_rank]``.

    Mini-batch ``m`` has the rows ``boundaries[m]`` to ``boundaries[m + 1]``. It is padded by itself
    with zero-loss rows (``Batch.pad_rows``) until ``dp_size`` divides it, then cut into equal runs,
    so every rank gets as many rows as the others. Compute and normalize advantages before.

    A staged batch keeps the width, and its metadata describes the mini-batch over all ranks
    (docs/contract.md). A divided ``loss_mask`` is divided by the ``num_loss_tokens`` of its
    mini-batch instead, so a plain sum is the token mean of the mini-batch.

    Two entries are added: ``row_metadata["row_indices"]``, int64, the row of ``batch`` that each
    row was, -1 for an added one, for :func:`unstage`; and ``metadata["row_widths"]``, int64
    ``[dp_size, rows]``, the cells that each row of each rank needs, for :func:`micro_batches`.

    With ``balance`` rows are distributed so that their tokens, or their attention cost (linear plus
    quadratic), are even over the ranks, and the i-th rows of all ranks are about as long. Without,
    rows keep their order.

    Fields are views of ``batch`` where nothing was added, moved or multiplied, otherwise copies.

    Raises:
        ValueError: boundaries that do not rise from 0 to ``len(batch)``, an unknown ``balance``, or
            ``balance`` without lengths.
        TypeError: not a Batch, or not integers.

    >>> import torch
    >>> batch = Batch({"input_ids": torch.arange(5)[:, None]})
    >>> staged = stage_mini_batches(batch, [0, 3, 5], dp_size=2)
    >>> [[part.row_metadata["row_indices"].tolist() for part in ranks] for ranks in staged]
    [[[0, 1], [2, -1]], [[3], [4]]]
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a Batch, got {type(batch).__name__}; collate first")
    checked_int("dp_size", dp_size, hint="1 means no data parallelism")
    checked_choice("balance", balance, ("tokens", "attention", None))
    edges = checked_boundaries(boundaries, len(batch))
    counts = _row_counts(batch, balance)
    return [_stage(batch, a, b, dp_size, counts) for a, b in pairwise(edges)]


def unstage(staged: Sequence[Sequence[Batch]], outputs: Sequence[Sequence[Any]]) -> Any:
    """What the ranks computed, in the order of the rows that were staged, without added rows.

    ``outputs[mini_batch][dp_rank]`` has a row for every row of ``staged[mini_batch][dp_rank]``: a
    tensor or ndarray, rows first, or a list. All are of one kind; so is the result, a copy (tensors
    keep their graph). Any two levels of batches are accepted that hold every row once: also
    ``[micro_batches(part, ...) for ranks in staged for part in ranks]``.

    Raises:
        ValueError: other numbers of mini-batches, ranks or rows, shapes or devices that differ, or
            staged batches that are not all of those that ``stage_mini_batches`` returned.
        TypeError: outputs of another kind, or of several.

    >>> import torch
    >>> batch = Batch({"input_ids": torch.arange(3)[:, None]})
    >>> staged = stage_mini_batches(batch, [0, 3], dp_size=2)
    >>> unstage(staged, [[part["input_ids"] * 10 for part in ranks] for ranks in staged]).tolist()
    [[0], [10], [20]]
    """
    parts: list[Any] = []
    rows: list[np.ndarray] = []
    _check_length("outputs", outputs, staged, "mini-batches")
    for m, (ranks, of_ranks) in enumerate(zip(staged, outputs, strict=True)):
        _check_length(f"outputs[{m}]", of_ranks, ranks, "ranks")
        for r, (part, output) in enumerate(zip(ranks, of_ranks, strict=True)):
            if "row_indices" not in part.row_metadata:
                raise ValueError(
                    f"staged[{m}][{r}] has no row_indices in its row_metadata; pass what "
                    "stage_mini_batches returned"
                )
            parts.append(output)
            rows.append(part.row_metadata["row_indices"])
            _check_output(f"outputs[{m}][{r}]", output, parts[0])
            _check_length(f"outputs[{m}][{r}]", output, part, "rows")
    if not parts:
        raise ValueError("staged is empty; pass what stage_mini_batches returned")
    row_of = np.concatenate(rows)
    kept = np.flatnonzero(row_of >= 0)
    order = kept[np.argsort(row_of[kept], kind="stable")]
    odd = np.flatnonzero(row_of[order] != np.arange(len(order)))
    if len(odd):
        raise ValueError(
            f"row {odd[0]} of the batch is missing or there twice among the staged rows; pass "
            "every mini-batch of one stage_mini_batches call, and no other"
        )
    return take(cat(parts), order)


def _stage(batch: Batch, start: int, stop: int, dp_size: int, counts: _RowCounts) -> list[Batch]:
    whole = batch[start:stop]
    is_dummy = counts.is_dummy[start:stop]
    whole.row_metadata["row_indices"] = np.arange(start, stop, dtype=np.int64)
    metadata = whole.metadata
    metadata["num_dummy_rows"] = int(is_dummy.sum())
    metadata["num_examples"] = _num_examples(whole, is_dummy)
    for name, per_row in (("num_tokens", counts.tokens), ("num_loss_tokens", counts.loss_tokens)):
        metadata.pop(name, None)
        if per_row is not None:
            metadata[name] = int(per_row[start:stop].sum())
    if counts.loss_tokens is not None and metadata.get("loss_mask_divisor", 1) != 1:
        whole = whole.divide_loss_mask(max(metadata["num_loss_tokens"], 1))
    mini = whole.pad_rows(multiple_of=dp_size)
    mini.row_metadata["row_indices"][stop - start :] = -1
    if counts.costs is not None:
        costs = np.append(counts.costs[start:stop], np.zeros(len(mini) - len(whole), np.int64))
        mini = mini.select(over_ranks(costs, len(mini), dp_size, keep_order=False))
    widths = cells_per_row(mini)
    if widths is not None:
        mini.metadata["row_widths"] = widths.reshape(dp_size, -1)
    return mini.chunk(dp_size)


def _num_examples(rows: Batch, is_dummy: np.ndarray) -> int:
    pieces = rows.row_metadata.get("example_indices")  # a packed row holds several examples
    if isinstance(pieces, Ragged):
        return len(np.unique(np.asarray(pieces.to("cpu").values)))
    return int((~is_dummy).sum())


def _row_counts(batch: Batch, balance: str | None) -> _RowCounts:
    """For all mini-batches at once, since the device may have to be read."""
    is_dummy = np.zeros(len(batch), dtype=bool)
    responses = batch.num_tokens_per_row("responses")
    if "response_mask" in batch:
        counts = _nonzero_cells(batch["response_mask"]) if responses is None else responses
        is_dummy |= counts == 0
    tokens = costs = None
    lengths = batch.get("sub_seq_lengths")
    if isinstance(lengths, Ragged):
        on_host = lengths.to("cpu")
        is_dummy |= on_host.lengths == 0
        pieces = np.asarray(on_host.values, dtype=np.int64)
        tokens = _row_sums(pieces, on_host.offsets)
        costs = _row_sums(attention_cost(pieces), on_host.offsets)
    elif "attention_mask" in batch:
        tokens = np.where(is_dummy, 0, _nonzero_cells(batch["attention_mask"]))
        costs = attention_cost(tokens)
    if balance == "tokens":
        costs = tokens
    if balance is not None and costs is None:
        raise ValueError(
            f"balance={balance!r} needs the lengths of the rows, but the batch has neither "
            f"sub_seq_lengths nor attention_mask, only {list(batch)}; pass balance=None"
        )
    return _RowCounts(is_dummy, tokens, batch.num_loss_tokens_per_row(), costs if balance else None)


def _nonzero_cells(field: Tensor) -> np.ndarray:
    return (field != 0).flatten(1).sum(dim=1).cpu().numpy()


def _row_sums(pieces: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(pieces)])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _check_length(name: str, given: Sized, staged: Sized, what: str) -> None:
    if len(given) != len(staged):
        raise ValueError(
            f"{name} has {len(given)} {what}, staged has {len(staged)}; give one for each"
        )


def _check_output(name: str, output: Any, first: Any) -> None:
    if not is_per_row(output) or isinstance(output, Ragged):
        raise TypeError(
            f"{name} is {type(output).__name__}; give a tensor or ndarray with rows first, or a "
            "list with one entry per row"
        )
    if type(output) is not type(first):
        raise TypeError(
            f"{name} is {type(output).__name__}, outputs[0][0] is {type(first).__name__}; give "
            "all outputs as one kind"
        )
    if isinstance(output, list):
        return
    if output.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"{name} has rows of shape {list(output.shape[1:])}, outputs[0][0] of "
            f"{list(first.shape[1:])}; rows must have one shape, or be given as lists"
        )
    if isinstance(output, Tensor) and output.device != first.device:
        raise ValueError(
            f"{name} is on {output.device}, outputs[0][0] on {first.device}; move all to one "
            "device, for instance with .cpu()"
        )
