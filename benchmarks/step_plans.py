"""Steps as other packers make them, and the figures by which steps are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "Figures",
    "axolotl_rows",
    "chance",
    "figures",
    "multipack_group",
    "our_steps",
    "rows_of_trl",
    "steps_of_rows",
    "trl_packing",
    "wrapped_rows",
]

LINEAR = 24576  # the default ModelCost: n * (24576 + n)
Step = tuple[np.ndarray, np.ndarray, int]  # lengths of the pieces, row of each, rows; rank by rank
Rows = tuple[np.ndarray, np.ndarray]  # sizes of the pieces row by row, and the rows' offsets


class Figures(NamedTuple):
    """An array each, with a number per step."""

    full: np.ndarray
    imbalance: np.ndarray
    time: np.ndarray
    mean_log: np.ndarray
    tokens: np.ndarray
    examples: np.ndarray


def figures(steps: Iterable[Step], ranks: int, width: int | None) -> Figures:
    """Figures of steps; ``width`` None is that of the fullest row of a step."""
    found = []
    for lengths, rows, num_rows in steps:
        cells = width or int(np.bincount(rows, lengths).max())
        per_rank, tokens = num_rows // ranks, int(lengths.sum())
        rank = rows // per_rank
        costs = np.bincount(rank, lengths * (LINEAR + lengths), minlength=ranks)
        attention = np.bincount(rank, lengths * lengths, minlength=ranks)
        time = (per_rank * cells * LINEAR + attention.max()) / costs.mean()
        mean_log = np.average(np.log2(lengths), weights=lengths)
        full = tokens / (num_rows * cells)
        found.append((full, costs.max() / costs.mean(), time, mean_log, tokens, len(lengths)))
    return Figures(*np.array(found).T)


def chance(lengths: np.ndarray, tokens: float) -> float:
    """Variance of the token mean of log2(length) of examples drawn at random, so many tokens."""
    logs = np.log2(lengths)
    middle = np.average(logs, weights=lengths)
    return float(np.average(lengths * (logs - middle) ** 2, weights=lengths)) / tokens


def our_steps(sampler: Any, number: int) -> Iterator[Step]:
    """The first steps of the epochs of a PackedBatchSampler."""
    while number > 0:
        for part in sampler:
            plan = part.plan
            rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.row_offsets))
            yield plan.lengths, rows, plan.num_rows
            number -= 1
            if not number:
                break


def steps_of_rows(rows: Rows, order: np.ndarray, batch_rows: int) -> Iterator[Step]:
    """Steps of ``batch_rows`` rows in this order, as a trainer's sampler takes them."""
    sizes, offsets = rows
    for start in range(0, len(order) - batch_rows + 1, batch_rows):
        own = [sizes[offsets[r] : offsets[r + 1]] for r in order[start : start + batch_rows]]
        yield np.concatenate(own), np.repeat(np.arange(batch_rows), list(map(len, own))), batch_rows


def multipack_group(
    lengths: np.ndarray, offset: int, capacity: int, most_rows: int, most_pieces: int
) -> list[list[int]]:
    """First fit in the order given, as axolotl publishes it: the examples of each row.

    It begins with an empty list of a row, so that numba knows its type.
    """
    space, rows = [0], [[0]]
    space.pop()
    rows.pop()
    for i, size in enumerate(lengths):
        is_new = True
        for row in range(len(space)):
            if space[row] >= size and len(rows[row]) < most_pieces:
                space[row] -= size
                rows[row].append(i + offset)
                is_new = False
                break
        if is_new:
            if len(space) >= most_rows:
                break
            space.append(capacity - size)
            rows.append([i + offset])
    return rows


def axolotl_rows(
    pack_group: Callable[..., list[list[int]]], lengths: np.ndarray, max_tokens: int
) -> list[list[int]]:
    """Rows of all examples, a group of 100,000 at a time, of at most 200 examples."""
    rows: list[list[int]] = []
    for start in range(0, len(lengths), 100_000):
        part = lengths[start : start + 100_000]
        rows += pack_group(part, start, max_tokens, len(part), 200)
    return rows


def wrapped_rows(lengths: np.ndarray, max_tokens: int, group: int) -> Rows:
    """Documents joined end to end, a group at a time, whose last row is short."""
    sizes, counts = [], []
    for start in range(0, len(lengths), group):
        ends = np.cumsum(lengths[start : start + group])
        cuts = np.union1d(np.arange(0, ends[-1], max_tokens), np.append(0, ends))
        sizes.append(np.diff(cuts))
        counts.append(np.bincount(cuts[:-1] // max_tokens))
    return np.concatenate(sizes), np.append(0, np.cumsum(np.concatenate(counts)))


def trl_packing(
    lengths: np.ndarray, max_tokens: int, strategy: str, group: int
) -> Callable[[], Any]:
    """A run of ``trl.pack_dataset``. It moves tokens as well, here of one byte.

    ImportError without TRL.
    """
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = pa.array(np.append(0, np.cumsum(lengths)), type=pa.int64())
    tokens = pa.array(np.zeros(int(lengths.sum()), dtype=np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})
    dataset = datasets.Dataset(table)

    def run() -> Any:
        return pack_dataset(dataset, max_tokens, strategy, {"batch_size": group})

    return run


def rows_of_trl(packed: Any) -> Rows:
    """The rows of a dataset that ``pack_dataset`` returned for "bfd"."""
    column = packed.with_format("arrow")[:]["seq_lengths"].combine_chunks()
    return np.asarray(column.flatten()), np.append(0, np.cumsum(column.value_lengths()))
