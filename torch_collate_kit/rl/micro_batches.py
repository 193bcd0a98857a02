"""A rank's part of a mini-batch, cut into micro-batches of a budget of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_int, checked_optional_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.row_changes import cells_per_row, trimmed
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Ints
from torch_collate_kit.rl.staging import warn_if_images_differ

__all__ = ["fewest_micro_batches", "micro_batch_rows", "micro_batches"]


def micro_batches(
    batch: Batch, *, max_tokens: int, pad_to_multiple_of: int | None = None
) -> list[Batch]:
    """The rows of ``staged[mini_batch][rank]`` in micro-batches of at most ``max_tokens`` cells.

    A micro-batch has rows of about one length, and ``rows * width <= max_tokens``, pads included.
    Its width is that of its longest row, ``metadata["response_length"]`` that of its longest
    response: other padding is cut off, also of tensors added to the batch that have this width or
    a column per response token. Packed rows keep their width, and so do those of a Batch built from
    dense tensors.

    **The same number on every rank**, without communication: ``stage_mini_batches`` stored the
    widths of the rows of all ranks, so each rank makes as many as the one that needs most. None is
    empty, their cells are even, and the longest rows come first on every rank.

    Where some ranks have images in a micro-batch and others have none there is a warning: FSDP's
    collectives do not match then.

    Metadata is that of the mini-batch, such as the divisor ``metadata["num_loss_tokens"]``.
    :func:`unstage` restores the order of the rows; responses differ in width, so give it lists, as
    :func:`response_values` makes them.

    Args:
        batch: a rank's part, whole, as it was staged. Fields may have been added or replaced.
        max_tokens: cells of a micro-batch.
        pad_to_multiple_of: round widths up to it. It must divide the width of the batch: collate
            with ``RolloutCollator(pad_to_multiple_of=...)``.

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
            f"batch must be a Batch, got {type(batch).__name__}; pass one rank's part, "
            "staged[mini_batch][rank]"
        )
    checked_int("max_tokens", max_tokens)
    hint = "None switches it off"
    multiple = checked_optional_int("pad_to_multiple_of", pad_to_multiple_of, hint=hint) or 1
    own, of_ranks = _row_widths(batch)
    width = batch["input_ids"].shape[1] if batch.placement is None else batch.placement.width
    if width % multiple:
        raise ValueError(
            f"the rows are {width} cells wide, which is no multiple of pad_to_multiple_of="
            f"{multiple}; collate with pad_to_multiple_of={multiple}"
        )
    own, of_ranks = (-(-widths // multiple) * multiple for widths in (own, of_ranks))
    _check_budget(of_ranks, max_tokens)
    count = max(fewest_micro_batches(widths, max_tokens) for widths in of_ranks)
    has_image: Any = batch.metadata.get("row_has_image")
    if has_image is not None:
        ranks = [micro_batch_rows(widths, max_tokens, count) for widths in of_ranks]
        for i in range(count):
            of_rows = [of[rows[i]] for of, rows in zip(has_image, ranks, strict=True)]
            warn_if_images_differ(of_rows, f"micro-batch {i}")
    return [
        Batch.of_storage(trimmed(batch.select(rows).stored(), multiple_of=multiple))
        for rows in micro_batch_rows(own, max_tokens, count)
    ]


def _row_widths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows, and of those of all ranks: int64 [N] and [ranks, N]."""
    of_ranks: Any = batch.metadata.get("row_widths")
    if of_ranks is None or "row_indices" not in batch.row_metadata:
        raise ValueError(
            "the batch was not staged (it has no row_widths in its metadata), so it is not known "
            "how many micro-batches the other ranks make; pass staged[mini_batch][rank] of "
            "rl.stage_mini_batches(batch, boundaries, dp_size), for one rank and one mini-batch "
            "stage_mini_batches(batch, [0, len(batch)], 1)"
        )
    own = cells_per_row(batch.stored())
    if own is None or not any(np.array_equal(widths, own) for widths in of_ranks):
        raise ValueError(
            f"the {len(batch)} rows of the batch are not the {of_ranks.shape[1]} rows of a rank "
            "that were staged; pass staged[mini_batch][rank] whole, in its order, and slice the "
            "micro-batches"
        )
    return own, of_ranks


def _check_budget(of_ranks: np.ndarray, max_tokens: int) -> None:
    over = np.argwhere(of_ranks > max_tokens)
    if len(over):
        rank, row = over[0].tolist()
        others = f" (so have {len(over) - 1} more)" if len(over) > 1 else ""
        raise DataError(
            f"row {row} of rank {rank} has {of_ranks[rank, row]} cells{others}, more than "
            f"max_tokens={max_tokens}, and a row is never cut; raise max_tokens to "
            f"{of_ranks.max()}, filter long rollouts out before staging, or pack narrower rows"
        )


def fewest_micro_batches(widths: Ints, max_cells: int) -> int:
    """The least number of micro-batches that hold rows of these widths, int64 [N].

    Widest first, each micro-batch takes as many of the next rows as fit with its first one. No
    other choice needs fewer, since the rows that are left could not be narrower.

    >>> fewest_micro_batches(np.array([2, 8, 3, 2]), 8)
    3
    """
    return len(_sizes(np.sort(widths)[::-1].tolist(), max_cells))


def micro_batch_rows(widths: Ints, max_cells: int, num_micro_batches: int) -> list[Ints]:
    """Row numbers of each micro-batch, none without rows, widest first: int64 each.

    Their number is ``num_micro_batches``, which lies between the fewest possible and the number of
    rows, and the cells of the largest are as few as this number allows.

    >>> [rows.tolist() for rows in micro_batch_rows(np.array([2, 8, 3, 2]), 16, 2)]
    [[1], [2, 0, 3]]
    """
    order = np.argsort(-widths, kind="stable")
    descending = widths[order].tolist()
    low, high = descending[0], max_cells
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


def _sizes(descending: list[int], max_cells: int) -> list[int]:
    """Rows of each micro-batch, filled up one after the other; no row is over the budget."""
    sizes: list[int] = []
    first = 0
    while first < len(descending):
        sizes.append(min(max_cells // descending[first], len(descending) - first))
        first += sizes[-1]
    return sizes
