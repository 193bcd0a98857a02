"""Micro-batches of a token budget from a rank's part of a mini-batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_int, checked_optional_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.row_changes import cells_per_row, trimmed
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Ints
from torch_collate_kit.rl.staging import warn_if_images_differ


def micro_batches(
    batch: Batch, *, max_tokens: int, pad_to_multiple_of: int | None = None
) -> list[Batch]:
    """Split ``staged[mini_batch][dp_rank]`` into micro-batches of at most ``max_tokens`` cells.

    A micro-batch has rows of about one length, and ``rows * width <= max_tokens``, pads included.
    Padding beyond its longest row and longest response is cut off, also of tensors added to the
    batch that have this width or a column per response token. Packed rows and rows of a Batch built
    from dense tensors keep their width.

    Every rank returns the same number, without communication: ``stage_mini_batches`` stored the
    widths of all ranks' rows. None is empty, and the longest rows come first on every rank. A
    micro-batch in which only some ranks have images gives a warning.

    Metadata is that of the mini-batch, such as the divisor ``metadata["num_loss_tokens"]``, and
    ``"is_last_part"``, as of ``Batch.split``.
    :func:`unstage` restores the order of rows, from lists as :func:`response_values` returns them.

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
            of_rows = [of[rows[i]] for of, rows in zip(has_image, ranks, strict=True)]
            warn_if_images_differ(of_rows, f"micro-batch {i}")
    parts = batch.split(_rows(own, max_tokens, count))
    pairs = [(of, rows) for of, parts in zip(of_ranks, ranks, strict=True) for rows in parts]
    num_cells = sum(len(rows) * int(of[rows].max()) for of, rows in pairs)
    for part in parts:
        part.metadata["step_num_cells"] = num_cells  # of all ranks, once they are trimmed
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
    low, high = int(descending[0]), max_cells
    while low < high:  # the smallest budget for which that many are enough
        middle = (low + high) // 2
        if len(_sizes(descending, middle)) <= num_micro_batches:
            high = middle
        else:
            low = middle + 1
    parts = np.split(order, np.cumsum(_sizes(descending, high))[:-1])
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
