"""A model's outputs per example: the cells of every example in the rows of a batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.batch.context_shards import refuse_shard
from torch_collate_kit.batch.dense import cells_of_responses, cells_of_rows
from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.ragged import Ragged, span_indices

Count = Literal["responses", "tokens", "predicted"]
Values = TypeVar("Values", bound=Tensor | np.ndarray)

_NEEDED = ("example_indices", "example_starts", "num_actions")


def unpack(values: Values, batch: Batch) -> list[Values]:
    """Return values of the cells of a batch's rows as one tensor (or array) per example.

    ``values`` ``[R, W, ...]`` have an entry per cell, such as logits or predicted ids: entry ``t``
    of the result for an example is that of its token ``t``. ``[R, W - 1, ...]`` have one for every
    cell but the first, such as the log-probabilities of the tokens: an example of n tokens has
    n - 1, since nothing predicts its first one. ``[1, R * W, ...]``, of models that get all rows of
    a Batch as one, are read as ``[R, W, ...]``. What lies at padding, and in rows that fill up a
    batch, is left out. The results are parts of one copy, on the same device; gradients flow.

    The list has ``metadata["num_examples"]`` entries, in the order in which the examples were given
    to the collator, or an entry per segment if examples have several. The pieces of a split example
    are joined. An example that was dropped, or whose rows are elsewhere
    (``batch.chunk``, slices), has empty entries.

    Raises:
        ValueError: other rows or columns than the batch has; rows that do not say where examples
            lie.
        TypeError: values that are neither a tensor nor an array; something other than a Batch.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    >>> batch["input_ids"].tolist()
    [[7, 8, 9, 5, 6]]
    >>> unpack(batch["input_ids"], batch)
    [tensor([5, 6]), tensor([7, 8, 9])]
    """
    if not isinstance(values, Tensor | np.ndarray):
        raise TypeError(f"values must be a tensor or an array, got {type(values).__name__}")
    if not isinstance(batch, Batch):
        raise TypeError(
            "unpack() needs the Batch that the collator returned, which says where examples lie, "
            f"got {type(batch).__name__}"
        )
    width = _checked_width(batch)
    values = in_rows(values, len(batch), batch["input_ids"].shape[1])
    if batch.placement is not None and batch.placement.tree_width:
        values = _of_tokens(values, batch)
    _check_shape(values, batch, width)
    count: Count = "tokens" if values.shape[1] == width else "predicted"
    cells = cells_of_every_example(batch, values.shape[1], count)
    flat: Any = values.reshape(-1, *values.shape[2:])
    is_tensor = isinstance(flat, Tensor)
    picked = flat[torch.from_numpy(cells.values).to(flat.device) if is_tensor else cells.values]
    return [picked[begin:end] for begin, end in pairwise(cells.offsets.tolist())]


def _checked_width(batch: Batch) -> int:
    """Return the cells of a row; refuse a batch that does not say where its examples lie."""
    refuse_shard(batch.stored(), "read by examples", "join values with attention.context_join()")
    if not all(isinstance(batch.row_metadata.get(name), Ragged) for name in _NEEDED):
        raise ValueError(
            "the batch was built without the row metadata of a collator, so it does not say where "
            "examples lie; pass the Batch that the collator returned"
        )
    return token_width(batch)


def _of_tokens(values: Values, batch: Batch) -> Values:
    """Return values of cells ``[R, W, ...]``, which segments share, per token: [R, U, ...]."""
    given: Any = values
    if given.ndim < 2 or tuple(given.shape[:2]) != tuple(batch["input_ids"].shape):
        raise ValueError(
            f"values have shape {list(given.shape)}, and the batch, whose segments share prefixes, "
            f"has cells {list(batch['input_ids'].shape)}; give one entry per cell"
        )
    cells = cells_of_rows(batch)
    flat = given.reshape(-1, *given.shape[2:])
    picked = flat[cells.to(flat.device) if isinstance(flat, Tensor) else cells.cpu().numpy()]
    return cast("Values", picked)


def in_rows(values: Values, num_rows: int, width: int) -> Values:
    """Return values of all cells in one row, ``[1, R * W, ...]``, as ``[R, W, ...]``: a view.

    So ``model_inputs(model)`` passes packed rows to models whose kernels take one row.
    """
    given: Any = values
    if num_rows > 1 and tuple(given.shape[:2]) == (1, num_rows * width):
        given = given.reshape(num_rows, width, *given.shape[2:])
    return cast("Values", given)


def _check_shape(values: Any, batch: Batch, width: int) -> None:
    num_rows, most = len(batch), int(targets_of(batch) == "next_token")
    if values.ndim < 2 or len(values) != num_rows or width - values.shape[1] not in (0, most):
        others = f", or [{num_rows}, {width - 1}, ...], one per predicted token (of response "
        others = f"{others}tokens [R, A] take rl.response_values)" * most
        raise ValueError(
            f"values have shape {list(values.shape)}, the batch has {num_rows} rows of {width} "
            f"cells; give [{num_rows}, {width}, ...], one entry per cell{others}"
        )


def cells_of_every_example(batch: Batch, num_columns: int, count: Count = "responses") -> Ragged:
    """Return the cells of every example that was collated; none for one without rows here."""
    examples, cells = cells_by_example(batch, num_columns, count)
    last = int(examples[-1]) if len(examples) else -1
    num_examples = batch.metadata.get("num_examples", last + 1)
    of_segments = batch.metadata.get("num_segments")
    if last >= num_examples:
        raise ValueError(
            f'the rows have an example {last}, and metadata["num_examples"] is {num_examples}, so '
            "they are a part of another batch, such as a staged mini-batch; bring the values into "
            "its rows first (rl.unstage), and pass that batch"
        )
    places = examples
    if of_segments is not None:
        offsets = np.append(0, np.cumsum(of_segments, dtype=np.int64))
        num_examples = int(offsets[-1])
        owners, numbers = (
            np.asarray(batch.row_metadata[name].values)
            for name in ("example_indices", "segment_numbers")
        )
        places = np.sort(offsets[owners] + numbers)
    lengths = np.zeros(num_examples, dtype=np.int64)
    lengths[places] = cells.lengths
    return Ragged.from_lengths(cells.values, lengths)


def cells_by_example(
    batch: Batch, num_columns: int, count: Count = "responses"
) -> tuple[np.ndarray, Ragged]:
    """Return the examples, int64 [E] ascending, and the cells of their tokens, ragged int64.

    Of an example with several segments one entry for each of them, in their order.
    """
    width = _checked_width(batch)
    per_row = batch.row_metadata["example_indices"].lengths  # 0 in an added row
    owners, firsts, responses = (np.asarray(batch.row_metadata[k].values) for k in _NEEDED)
    numbers = np.zeros_like(owners)
    if isinstance(found := batch.row_metadata.get("segment_numbers"), Ragged):
        numbers = np.asarray(found.values)
    rows = np.repeat(np.arange(len(batch)), per_row)
    order = np.lexsort((firsts, numbers, owners))
    owners, firsts, numbers = owners[order], firsts[order], numbers[order]
    is_other = (np.diff(owners) != 0) | (np.diff(numbers) != 0)
    again = np.flatnonzero(~is_other & (np.diff(firsts) == 0))
    if len(again):
        raise ValueError(
            f"a piece of example {owners[again[0]]} is in the batch twice, so its values have no "
            "order; take them before batches are joined or rows repeated"
        )
    begins, lengths = _pieces(batch, per_row)
    after = width - begins - lengths  # the cells of the row after a piece
    counts = {"responses": responses, "tokens": lengths, "predicted": lengths - 1}[count][order]
    cells = cells_of_spans(rows[order], after[order] + counts, counts, num_columns)
    first_pieces = np.append(0, np.flatnonzero(is_other) + 1)[: len(owners)]
    before = np.append(0, np.cumsum(counts))
    return owners[first_pieces], Ragged(cells, before[np.append(first_pieces, len(owners))])


def _pieces(batch: Batch, num_pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first cell in its row, and the length, of each piece of an example: int64 [S]."""
    if (placement := batch.placement) is not None:
        starts, lengths = (placement.segments[name] for name in ("starts", "lengths"))
    else:
        lengths, found = batch["sub_seq_lengths"].to("cpu"), batch.get("cu_seq_lens")
        if not isinstance(found, Ragged):
            found = Ragged(batch["attention_mask"].argmax(1), np.arange(len(batch) + 1))
        starts = found.to("cpu")
    first, length = (
        np.asarray(column.values, dtype=np.int64)[span_indices(column.offsets[:-1], num_pieces)]
        for column in (starts, lengths)
    )
    return first, length


def cells_of_spans(
    rows: np.ndarray, from_end: np.ndarray, counts: np.ndarray, num_columns: int
) -> np.ndarray:
    """Return the cells, [T], of spans that begin ``from_end`` columns before their row ends."""
    too_few = np.flatnonzero((from_end > num_columns) & (counts > 0))
    if len(too_few):
        i = too_few[from_end[too_few].argmax()]
        raise ValueError(
            f"row {rows[i]} has response tokens in its last {from_end[i]} cells, but values has "
            f"{num_columns} columns; take the values of at least the last A cells"
        )
    return span_indices((rows + 1) * num_columns - from_end, counts)


def values_of_cells(values: Tensor, cells: Ragged, dtype: torch.dtype) -> Ragged:
    """Return the values ``[R, A]`` in these cells, in host memory: a copy without a graph."""
    places = torch.from_numpy(cells.values).to(values.device)
    picked = values.detach().reshape(-1)[places].cpu().to(dtype)
    return Ragged(picked.numpy(), cells.offsets)


def segment_spans(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the first cell of each segment, over all rows, and its tokens: int64 [S]."""
    width = _checked_width(batch)
    per_row = batch.row_metadata["example_indices"].lengths  # 0 in an added row
    firsts, lengths = _pieces(batch, per_row)
    return np.repeat(np.arange(len(batch)), per_row) * width + firsts, lengths


def response_cells(batch: Batch) -> Tensor | None:
    """Return the flat cells of ``[R, A]`` that hold response tokens, int64 [n], on the device."""
    stored = batch.stored()
    if not stored.columns or "loss_mask" in stored.given:
        return None
    return cells_of_responses(stored.columns, batch._shared)


def targets_of(batch: Any) -> TargetKind:
    """Return what the labels of a batch are of; of one built from tensors the next tokens."""
    placement = getattr(batch, "placement", None)
    return "next_token" if placement is None else cast("TargetKind", placement.targets)


def shares_prefixes(batch: Any) -> bool:
    """Return whether rows of the batch have fewer cells than tokens, since segments share them."""
    placement = getattr(batch, "placement", None)
    return placement is not None and placement.tree_width > 0


def branches_of(batch: Batch) -> tuple[Tensor, list[int], np.ndarray]:
    """Return the branch of each cell [R, W], -1 at pads, their rows, and which see which.

    A branch has cells between which no path divides. The last is bool [S, S], whether a branch
    sees another.
    """
    placement, column = batch.placement, batch.stored().columns.values["tree_cells"]
    assert placement is not None
    cells = column.values.cpu().numpy().astype(np.int64)
    lengths = placement.segments["lengths"].values
    before = np.full(len(batch) * placement.tree_width, -1)  # the cell before; -2: none
    ends = np.cumsum(lengths)
    for row, start, end in np.stack([placement.rows(), ends - lengths, ends], axis=1).tolist():
        path = cells[start:end] + row * placement.tree_width
        before[path] = np.append(-2, path[:-1])[: len(path)]
    num_after = np.bincount(before[before >= 0], minlength=len(before))
    branches = np.full(len(before), -1)
    above: list[list[int]] = []
    of_rows: list[int] = []
    for cell in np.flatnonzero(before != -1).tolist():  # a path leads to later cells
        earlier = int(before[cell])
        if earlier >= 0 and num_after[earlier] == 1:
            branches[cell] = branches[earlier]
            continue
        branches[cell] = len(above)
        above.append([*(above[branches[earlier]] if earlier >= 0 else []), len(above)])
        of_rows.append(cell // placement.tree_width)
    sees = np.zeros((len(above), len(above)), dtype=bool)
    for branch, path in enumerate(above):
        sees[branch, path] = True
    ids = torch.from_numpy(branches).view(len(batch), -1)
    return ids.to(column.values.device), of_rows, sees


def token_width(batch: Batch) -> int:
    """Return the tokens of a row, pads included; the cells of one without shared prefixes.

    Raises:
        ValueError: fields per token and per cell without the placement, which relates them.
    """
    if (placement := batch.placement) is not None:
        return placement.width
    width, mask = int(batch["input_ids"].shape[1]), batch.get("loss_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= max(width, 1):
        raise ValueError(
            f"loss_mask has {mask.shape[1]} columns, rows have {width} cells: of rows that share "
            'prefixes (share_prefixes), and of targets="same_token", tensors alone do not say what '
            "a column is of; pass the Batch that the collator returned, otherwise a loss_mask of "
            f"at most {width - 1} columns, for next tokens"
        )
    return width


def before_and_at(batch: Batch, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cells that predict tokens, and those of the tokens: int64 [K] each.

    ``tokens`` int64 [K] count the columns of ``[R, U - 1]``, of which the first token has none.
    """
    cells = cells_of_rows(batch)
    return cells[:, :-1].flatten()[tokens], cells[:, 1:].flatten()[tokens]
