"""Mini-batches of a rollout batch, divided among ranks, and micro-batches of a token budget."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence, Sized
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_choice, checked_int, checked_optional_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.dense import trained_labels
from torch_collate_kit.batch.fields import cat_rows, is_per_row, take_rows
from torch_collate_kit.batch.row_changes import cells_per_row, changed_rows, trimmed
from torch_collate_kit.errors import DataError
from torch_collate_kit.losses.token_logps import is_trained_in
from torch_collate_kit.packing import ModelCost
from torch_collate_kit.packing.balance import over_ranks
from torch_collate_kit.packing.rows import Ints, row_sums
from torch_collate_kit.ragged import Ragged, span_indices
from torch_collate_kit.rl.groups import checked_boundaries

_PerRow = np.ndarray | None  # [B]; None where the batch does not say


def stage_mini_batches(
    batch: Batch,
    boundaries: Any,
    dp_size: int,
    *,
    balance: Literal["tokens", "attention"] | None = None,
) -> list[list[Batch]]:
    """Divide the rows of every mini-batch among the ranks: ``staged[mini_batch][dp_rank]``.

    Mini-batch ``m`` has the rows ``boundaries[m]`` to ``boundaries[m + 1]``. It is padded by itself
    with zero-loss rows (``Batch.pad_rows``) until ``dp_size`` divides it, then cut into equal runs.
    The rows of a rollout of several segments stay on one rank, with added rows where a rank has
    fewer. Compute and normalize advantages before.

    A staged batch keeps the width, and its metadata describes the mini-batch over all ranks
    (docs/contract.md). A divided ``loss_mask`` is divided by the ``num_loss_tokens`` of its
    mini-batch instead, so a plain sum is the token mean of the mini-batch. Added are
    ``row_metadata["row_indices"]``, int64, the row of ``batch`` that each row was, -1 for an added
    row; and for :func:`micro_batches` ``metadata["row_widths"]``, int64 ``[dp_size, rows]``, the
    cells that each row needs, and with images ``metadata["row_has_image"]``, bool of that shape. A
    mini-batch in which only some ranks have images causes a warning.

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
    totals, costs = _row_counts(batch, balance)
    staged = [_stage(batch, a, b, dp_size, totals, costs) for a, b in pairwise(edges)]
    for ranks in staged:
        if "row_has_image" in ranks[0].metadata:
            warn_if_images_differ(ranks[0].metadata["row_has_image"], "mini-batch")
    return staged


def warn_if_images_differ(rows_of_ranks: Sequence[np.ndarray], what: str) -> None:
    """Warn the caller's caller where some ranks have rows with images and others have none."""
    without = [rank for rank, has_image in enumerate(rows_of_ranks) if not has_image.any()]
    if 0 < len(without) < len(rows_of_ranks):
        warnings.warn(
            f"ranks {without} have no image in a {what} in which others have: with a trained "
            "vision tower DDP needs find_unused_parameters=True, and FSDP hangs; stage rollouts "
            "with and without images separately, or give every rollout an image",
            stacklevel=3,
        )


def unstage(staged: Sequence[Sequence[Batch]], outputs: Sequence[Sequence[Any]]) -> Any:
    """Put the outputs of the ranks in the order of the rows before staging, without added rows.

    ``outputs[mini_batch][dp_rank]`` has a row for every row of ``staged[mini_batch][dp_rank]``: a
    tensor or ndarray, rows first, or a list. All are of one kind; so is the result, a copy (tensors
    keep their graph). Any two levels of batches are accepted that hold every row once: also
    ``[micro_batches(part, ...) for ranks in staged for part in ranks]``.

    Raises:
        ValueError: other numbers of mini-batches, ranks or rows, or staged batches that are not all
            of those that ``stage_mini_batches`` returned.
        TypeError: outputs of another kind, shape or device than the first.

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
                    f"staged[{m}][{r}] has no row_indices; pass what stage_mini_batches returned"
                )
            parts.append(output)
            rows.append(part.row_metadata["row_indices"])
            _check_output(f"outputs[{m}][{r}]", output, parts[0])
            _check_length(f"outputs[{m}][{r}]", output, part, "rows")
    if not parts:
        raise ValueError("staged is empty; pass what stage_mini_batches returned")
    row_of = np.concatenate(rows)
    order = np.argsort(row_of, kind="stable")[np.count_nonzero(row_of < 0) :]
    odd = np.flatnonzero(row_of[order] != np.arange(len(order)))
    if len(odd):
        raise ValueError(
            f"row {odd[0]} of the batch is missing or there twice among the staged rows; pass "
            "every mini-batch of one stage_mini_batches call, and no other"
        )
    return take_rows(cat_rows(parts), order)


def _stage(
    batch: Batch, start: int, stop: int, dp_size: int, totals: dict[str, _PerRow], costs: _PerRow
) -> list[Batch]:
    whole = batch[start:stop]
    whole.row_metadata["row_indices"] = np.arange(start, stop, dtype=np.int64)
    metadata, examples = whole.metadata, whole.row_metadata.get("example_indices")
    for name in ("cost_per_rank", "vision_cost_per_rank", "step_num_cells"):  # of the whole batch
        metadata.pop(name, None)
    for name, per_row in totals.items():
        metadata.pop(name, None)
        if per_row is not None:
            metadata[name] = int(per_row[start:stop].sum())
    metadata["num_examples"] = len(whole) - metadata["num_dummy_rows"]
    if isinstance(examples, Ragged):  # a packed row holds several
        metadata["num_examples"] = len(np.unique(np.asarray(examples.to("cpu").values)))
    if "num_loss_tokens" in metadata and metadata.get("loss_mask_divisor", 1) != 1:
        divisor = max(metadata["num_loss_tokens"], 1)
        whole = Batch.of_storage(whole.stored().with_divisor(divisor))
    rows = _rows_of_ranks(whole, None if costs is None else costs[start:stop], dp_size)
    mini = whole.pad_rows(multiple_of=int(rows.size))
    mini.row_metadata["row_indices"][stop - start :] = -1
    if "input_ids" in mini:
        mini.metadata["step_num_cells"] = mini.num_cells
    if (rows[1:] < rows[:-1]).any():
        mini = mini.select(rows)
    widths = cells_per_row(mini.stored())
    if widths is not None:
        mini.metadata["row_widths"] = widths.reshape(dp_size, -1)
    has_image = _rows_with_images(mini)
    if has_image.any():
        mini.metadata["row_has_image"] = has_image.reshape(dp_size, -1)
    return mini.chunk(dp_size)


def _rows_of_ranks(batch: Batch, costs: _PerRow, dp_size: int) -> Ints:
    """Return the rows of the ranks, equally many: rank after rank, added rows after all others.

    The rows of a rollout of several segments stay together; of others each row is one.
    """
    numbers, is_first = batch.row_metadata.get("segment_numbers"), np.ones(len(batch), dtype=bool)
    if isinstance(numbers, Ragged) and numbers.lengths.max() == 1:
        is_first[numbers.lengths > 0] = np.asarray(numbers.values) == 0
    starts = np.flatnonzero(is_first)
    starts = np.append(starts, np.full(-len(starts) % dp_size, len(batch)))  # rollouts of no row
    counts, order = np.diff(np.append(starts, len(batch))), np.arange(len(starts))
    if costs is not None:
        per_rollout = np.add.reduceat(np.append(costs, 0), starts)
        order = over_ranks(per_rollout, dp_size, keep_order=False)
    ranks = order.reshape(dp_size, -1)
    rows = np.full((dp_size, int(counts[ranks].sum(axis=1).max())), -1)
    for own, chosen in zip(rows, ranks, strict=True):
        own[: counts[chosen].sum()] = span_indices(starts[chosen], counts[chosen])
    rows[rows < 0] = np.arange(len(batch), rows.size)
    return rows.ravel()


def _rows_with_images(batch: Batch) -> np.ndarray:
    """Return which rows have images: bool [R]."""
    columns = batch.stored().columns
    fields = () if columns.placement.vision is None else columns.placement.vision.fields
    has_image = np.zeros(len(batch), dtype=bool)
    for name in columns.values.keys() & set(fields):
        has_image |= columns.values[name].lengths > 0
    return has_image


def _row_counts(batch: Batch, balance: str | None) -> tuple[dict[str, _PerRow], _PerRow]:
    """Return per-row counts for metadata, and the costs to balance; reads the device once."""
    is_dummy = np.zeros(len(batch), dtype=bool)  # rows that were added before
    responses = batch.stored().num_tokens("responses")
    if "response_mask" in batch:
        counts = _nonzero_cells(batch["response_mask"]) if responses is None else responses
        is_dummy |= counts == 0
    given, pieces = batch.get("sub_seq_lengths"), None
    if isinstance(given, Ragged):
        pieces = given.to("cpu")
        is_dummy |= pieces.lengths == 0
    elif "attention_mask" in batch:
        lengths = np.where(is_dummy, 0, _nonzero_cells(batch["attention_mask"]))
        pieces = Ragged(lengths, np.arange(len(batch) + 1))
    elif balance is not None:
        raise ValueError(
            f"balance={balance!r} needs the lengths of the rows, but the batch has neither "
            f"sub_seq_lengths nor attention_mask, only {list(batch)}; pass balance=None"
        )
    tokens = costs = None
    if pieces is not None:
        lengths = np.asarray(pieces.values, dtype=np.int64)
        tokens = row_sums(lengths, pieces.offsets)
        costs = row_sums(ModelCost().language(lengths), pieces.offsets)
    totals = {
        "num_dummy_rows": is_dummy,
        "step_num_tokens": tokens,
        "num_loss_tokens": _num_loss_tokens(batch),
    }
    if (placement := batch.placement) is not None and placement.tree_width:
        of_segments, offsets = placement.segments, placement.segments["own"].offsets
        own, paths = (of_segments[k].values.astype(np.int64) for k in ("own", "lengths"))
        cost = ModelCost().language
        tokens = np.where(is_dummy, 0, row_sums(own, offsets))
        costs = np.where(is_dummy, 0, row_sums(cost(paths) - cost(paths - own), offsets))
        totals["step_num_filled_cells"] = tokens
    return totals, {"tokens": tokens, "attention": costs, None: None}[balance]


def _num_loss_tokens(batch: Batch) -> np.ndarray | None:
    """Return the trained cells of each row, int64 [R]; reads the device."""
    columns = batch.stored().columns
    if "loss_mask" not in batch:
        return None
    if columns and "loss_mask" in columns.names and trained_labels(batch) is None:
        return columns.num_trained()
    return _nonzero_cells(is_trained_in(batch))


def _nonzero_cells(field: Tensor) -> np.ndarray:
    return (field != 0).flatten(1).sum(dim=1).cpu().numpy()


def _check_length(name: str, given: Sized, staged: Sized, what: str) -> None:
    if len(given) != len(staged):
        raise ValueError(
            f"{name} has {len(given)} {what}, staged has {len(staged)}; pass one for each"
        )


def _check_output(name: str, output: Any, first: Any) -> None:
    if not is_per_row(output) or isinstance(output, Ragged):
        raise TypeError(
            f"{name} is {type(output).__name__}; pass a tensor or ndarray with rows first, or a "
            "list with one entry per row"
        )
    if _kind(output) != _kind(first):
        raise TypeError(
            f"{name} is {_kind(output)}, outputs[0][0] is {_kind(first)}; all must be alike"
        )


def _kind(output: Any) -> str:
    if isinstance(output, list):
        return "list"
    return f"{type(output).__name__} {list(output.shape[1:])} per row on {output.device}"


def micro_batches(
    batch: Batch, *, max_tokens: int, pad_to_multiple_of: int | None = None
) -> list[Batch]:
    """Split ``staged[mini_batch][dp_rank]`` into micro-batches of at most ``max_tokens`` cells.

    A micro-batch has rows of about one length, and ``rows * width <= max_tokens``, pads included.
    Padding beyond its longest row and longest response is cut off, also of tensors added to the
    batch that have this width or a column per response token. Packed rows and rows of a Batch built
    from dense tensors keep their width.

    Every rank returns the same number, none empty, the longest rows first, without communication:
    ``stage_mini_batches`` stored the widths of all ranks' rows. A micro-batch in which only some
    ranks have images causes a warning.

    Rows of a rollout of several segments may be in several micro-batches. Metadata is that of the
    mini-batch, and ``"is_last_part"``. :func:`unstage` restores the order of rows.

    Args:
        batch: a rank's part, whole, as it was staged. Fields may have been added or replaced.
        max_tokens: cells of a micro-batch.
        pad_to_multiple_of: round widths up to it; a divisor of the batch's width.

    Returns:
        New batches; their columns are copies.

    Raises:
        DataError: a row, of any rank, that is over the budget alone. Every rank raises it.
        ValueError: not a staged batch, or only some of its rows; a width that is not a multiple.
        TypeError: not a Batch.

    >>> from torch_collate_kit import RolloutCollator
    >>> from torch_collate_kit.rl import stage_mini_batches
    >>> rollouts = [
    ...     {"prompt_ids": [1], "response_ids": [2] * n, "rewards": 1.0, "loss_mask": [1] * n}
    ...     for n in (2, 7, 1, 3)
    ... ]
    >>> [[part]] = stage_mini_batches(RolloutCollator(0)(rollouts), [0, 4], dp_size=1)
    >>> micro = micro_batches(part, max_tokens=8)
    >>> [(m.row_metadata["row_indices"].tolist(), list(m["input_ids"].shape)) for m in micro]
    [([1], [1, 8]), ([3, 0], [2, 4]), ([2], [1, 2])]
    """
    if not isinstance(batch, Batch):
        raise TypeError(
            f"batch must be a Batch, got {type(batch).__name__}; pass staged[mini_batch][dp_rank]"
        )
    checked_int("max_tokens", max_tokens)
    multiple = checked_optional_int("pad_to_multiple_of", pad_to_multiple_of, hint="None: no") or 1
    own, of_ranks = _row_widths(batch)
    width = batch["input_ids"].shape[1] if batch.placement is None else batch.placement.width
    if width % multiple:
        raise ValueError(
            f"the rows are {width} cells wide, which is not a multiple of {multiple}; collate with "
            f"pad_to_multiple_of={multiple}"
        )
    own, of_ranks = (-(-widths // multiple) * multiple for widths in (own, of_ranks))
    _check_budget(of_ranks, max_tokens)
    count = max(len(_sizes(-np.sort(-widths), max_tokens)) for widths in of_ranks)
    ranks = [_rows(widths, max_tokens, count) for widths in of_ranks]
    has_image: Any = batch.metadata.get("row_has_image")
    if has_image is not None:
        for i in range(count):
            of_rows = [flags[rows[i]] for flags, rows in zip(has_image, ranks, strict=True)]
            warn_if_images_differ(of_rows, f"micro-batch {i}")
    parts = [
        Batch.of_storage(changed_rows(batch.stored(), partial(take_rows, rows=rows), divides=True))
        for rows in _rows(own, max_tokens, count)
    ]
    pairs = zip(of_ranks, ranks, strict=True)
    num_cells = sum(len(rows) * int(of[rows].max()) for of, chosen in pairs for rows in chosen)
    for i, part in enumerate(parts, 1):  # cells of all ranks, once they are trimmed
        part.metadata |= {"step_num_cells": num_cells, "is_last_part": i == count}
    return [Batch.of_storage(trimmed(part.stored(), multiple_of=multiple)) for part in parts]


def _row_widths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the widths of the rows, int64 [N], and of all ranks' rows, int64 [dp_size, N]."""
    of_ranks: Any = batch.metadata.get("row_widths")
    if of_ranks is None or "row_indices" not in batch.row_metadata:
        raise ValueError(
            "the batch was not staged, so the number of micro-batches of other ranks is unknown; "
            "pass staged[mini_batch][dp_rank] of rl.stage_mini_batches(batch, boundaries, dp_size)"
        )
    own = cells_per_row(batch.stored())
    if own is None or not any(np.array_equal(widths, own) for widths in of_ranks):
        raise ValueError(
            f"the {len(batch)} rows of the batch are not the {of_ranks.shape[1]} rows staged for a "
            "rank; pass staged[mini_batch][dp_rank] whole, and slice the micro-batches"
        )
    return own, of_ranks


def _check_budget(of_ranks: np.ndarray, max_tokens: int) -> None:
    over = np.argwhere(of_ranks > max_tokens)
    if len(over):
        rank, row = over[0].tolist()
        raise DataError(
            f"row {row} of rank {rank} has {of_ranks[rank, row]} cells, more than max_tokens="
            f"{max_tokens} ({len(over)} rows have), and a row is never cut; raise max_tokens to "
            f"{of_ranks.max()}, filter long rollouts out before staging, or pack narrower rows"
        )


def _rows(widths: Ints, max_cells: int, num_micro_batches: int) -> list[Ints]:
    """Return the rows of each micro-batch, widest first, with the fewest cells in the largest."""
    order = np.argsort(-widths, kind="stable")
    descending = widths[order]
    # the smallest budget for which that many are enough
    budgets = range(int(descending[0]), max_cells)
    place = bisect_left(budgets, -num_micro_batches, key=lambda n: -len(_sizes(descending, n)))
    sizes = _sizes(descending, int(descending[0]) + place)
    parts = np.split(order, np.cumsum(sizes)[:-1])
    while len(parts) < num_micro_batches:
        cells = [len(rows) * int(widths[rows[0]]) if len(rows) > 1 else 0 for rows in parts]
        i = int(np.argmax(cells))
        parts[i : i + 1] = np.array_split(parts[i], 2)
    return parts


def _sizes(descending: Ints, max_cells: int) -> list[int]:
    """Return the number of rows of each micro-batch, filled greedily, which is optimal."""
    widths, sizes, first = descending.tolist(), list[int](), 0
    while first < len(widths):
        sizes.append(min(max_cells // widths[first], len(widths) - first))
        first += sizes[-1]
    return sizes
