"""Values of response tokens: out of right-aligned rows as lists, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.numbers import joined, spans, weight_column
from torch_collate_kit.rl.response_tensors import checked_mask

__all__ = ["from_response_values", "response_values"]


def response_values(values: Tensor, responses: Tensor | Batch) -> list[list[float]]:
    """The values of the response tokens, a list of Python floats per response: a copy.

    Rows are right-aligned: the last column of ``values`` belongs to the last cell of the row. The
    inverse is :func:`from_response_values`.

    Args:
        values: ``[R, A']``, any dtype and device, with a gradient or without. ``A'`` is at least
            the longest response, and ``W - 1`` for packed rows (what a forward pass over the last
            ``A'`` cells returned).
        responses: what says where the responses are.

            - A Batch, padded or packed: a list per example, in the order of the examples, as
              :class:`~torch_collate_kit.PerTokenOutputs` has them. Rows that were added have none.
            - A ``response_mask`` ``[R, A]``, not 0 at the response tokens, which are the last cells
              of their row: a list per row, in the order of the rows, so that
              :func:`unstage` takes them; an empty one for a row of zeros.

    Raises:
        TypeError: not tensors.
        ValueError: other numbers of rows, fewer values than response tokens, or a Batch that was
            built from dense tensors.
        DataError: a mask that is not one run of ones at the right end of its row, or that is
            negative or not finite.

    >>> values = torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 3.0]])
    >>> response_values(values, torch.tensor([[0, 1, 1], [0, 0, 1]]))
    [[1.0, 2.0], [3.0]]
    """
    _check_2d("values", values)
    found = _spans(responses)
    if len(values) != found.num_rows:
        raise ValueError(
            f"values has {len(values)} rows, {found.name} has {found.num_rows}; "
            "give the values of the same rows"
        )
    cells = found.cells(values.shape[1])
    flat = values.detach().reshape(-1)[torch.from_numpy(cells).to(values.device)]
    numbers = flat.cpu().double().tolist()
    return [numbers[a:b] for a, b in pairwise(found.offsets.tolist())]


def from_response_values(
    values: Sequence[Any] | Ragged,
    responses: Tensor | Batch,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values per response token as a new tensor ``[R, A]``, right-aligned, 0 elsewhere.

    It multiplies ``log_probs[:, -A-1:-1]``, as ``batch["response_mask"]`` does, and is on the
    device of the batch (or the mask); :func:`response_values` is the inverse.

    Args:
        values: a flat list, ndarray or tensor per response, with a number for each of its tokens,
            in the order that ``response_values(..., responses)`` gives; also the lists of
            :class:`~torch_collate_kit.PerTokenOutputs`.
        responses: a Batch, padded or packed (``A`` is its ``metadata["response_length"]``), or a
            ``response_mask`` ``[R, A]``; as for ``response_values``.
        dtype: of the result.

    Raises:
        DataError: another number of values than a response has tokens, or no numbers; it says of
            which one, by its place in ``values``.
        ValueError: another number of responses; a Batch that was built from dense tensors.
        TypeError: neither a Batch nor a tensor.

    >>> from_response_values([[1.0, 2.0], [3.0]], torch.tensor([[0, 1, 1], [0, 0, 1]]))
    tensor([[0., 1., 2.],
            [0., 0., 3.]])
    """
    found = _spans(responses)
    counts = np.diff(found.offsets)
    if len(values) != len(counts):
        raise ValueError(
            f"values has {len(values)} entries, {found.name} has {len(counts)} {found.unit}; give "
            "one list for each, in the order that response_values gives"
        )
    dense = torch.zeros(found.num_rows * found.num_columns, dtype=dtype, device=found.device)
    if len(counts):
        given = joined(weight_column("values", values, "give numbers"))
        wrong = np.flatnonzero(given.lengths != counts)
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"example {i}: values has {given.lengths[i]} entries for {counts[i]} response "
                "tokens; give one entry per response token"
            )
        cells = torch.from_numpy(found.cells(found.num_columns)).to(found.device)
        flat = torch.from_numpy(given.flat_values.copy()).to(found.device, dtype)
        dense[cells] = flat
    return dense.view(found.num_rows, found.num_columns)


class _Spans(NamedTuple):
    """Where the response tokens are, in the order of the responses; a response has spans."""

    name: str
    """Of the argument, and what it has several of, for messages."""
    unit: str
    num_rows: int
    num_columns: int
    device: torch.device
    offsets: np.ndarray
    """int64 [E + 1], the tokens of each response among all."""
    rows: np.ndarray
    """int64 [S], the row of each span."""
    from_end: np.ndarray
    """int64 [S], the columns from its first token to the end of the row."""
    counts: np.ndarray
    """int64 [S], its tokens."""

    def cells(self, num_columns: int) -> np.ndarray:
        """int64 [T], where the tokens are in flat right-aligned rows of so many columns."""
        too_few = np.flatnonzero((self.from_end > num_columns) & (self.counts > 0))
        if len(too_few):
            i = too_few[self.from_end[too_few].argmax()]
            raise ValueError(
                f"row {self.rows[i]} has response tokens in its last {self.from_end[i]} cells, but "
                f"values has {num_columns} columns; take the values of at least the last A cells"
            )
        return spans((self.rows + 1) * num_columns - self.from_end, self.counts)


def _spans(responses: Any) -> _Spans:
    if isinstance(responses, Batch):
        return _spans_of_batch(responses)
    _check_2d("response_mask", responses)
    mask = checked_mask("response_mask", responses).cpu()
    lengths = mask.sum(dim=1)
    columns = torch.arange(mask.shape[1])
    wrong = (mask != (columns >= mask.shape[1] - lengths[:, None])).any(dim=1).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise DataError(
            f"row {i}: response_mask has {int(lengths[i])} response tokens that are not the last "
            "cells of the row; responses are right-aligned without gaps (left-pad the rows, or "
            "pass the Batch)"
        )
    counts = lengths.numpy()
    offsets = np.append(0, np.cumsum(counts))
    rows = np.arange(len(mask))
    shape = len(mask), mask.shape[1]
    return _Spans("response_mask", "rows", *shape, responses.device, offsets, rows, counts, counts)


def _spans_of_batch(batch: Batch) -> _Spans:
    placement, ids = batch.placement, batch.column("input_ids")
    if placement is None or ids is None:
        raise ValueError(
            "the batch was built from dense tensors, which do not say where examples lie; pass its "
            'response_mask, batch["response_mask"]'
        )
    examples, firsts = (batch.row_metadata[k] for k in ("example_indices", "example_starts"))
    starts, lengths, counts = (
        placement.segments[k].flat_values.astype(np.int64)
        for k in ("starts", "lengths", "responses")
    )
    rows = np.repeat(np.arange(len(batch)), placement.row_counts)
    is_piece = (lengths > 0) & (examples.lengths > 0)[rows]  # no pad tail, no added row
    rows, counts = rows[is_piece], counts[is_piece]
    from_end = placement.width - (starts + lengths)[is_piece] + counts
    owners, first_tokens = (np.asarray(of.flat_values) for of in (examples, firsts))
    order = np.lexsort((first_tokens, owners))
    owners, first_tokens = owners[order], first_tokens[order]
    again = np.flatnonzero((np.diff(owners) == 0) & (np.diff(first_tokens) == 0))
    if len(again):
        raise ValueError(
            f"a piece of example {owners[again[0]]} is in the batch twice, so its values have no "
            "order; take them before batches are joined or rows repeated"
        )
    before = np.append(0, np.cumsum(counts[order]))
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    return _Spans(
        "the batch",
        "examples",
        len(batch),
        placement.response_length,
        ids.device,
        before[np.append(begins, len(order))],
        rows[order],
        from_end[order],
        counts[order],
    )


def _check_2d(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.ndim != 2:
        raise ValueError(
            f"{name} must be two-dimensional, rows first, got shape {list(tensor.shape)}"
        )
