"""Values of response tokens: right-aligned tensors, their checks, and lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch import Batch, PerResponseToken
from torch_collate_kit.batch.placement import whole_examples
from torch_collate_kit.batch.unpacking import (
    cells_by_example,
    cells_of_every_example,
    cells_of_spans,
    values_of_cells,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.columns import number_column
from torch_collate_kit.reading.entries import FieldColumn


def response_values(values: Tensor, responses: Tensor | Batch) -> list[list[float]]:
    """Return the values of the response tokens, a list of Python floats per response: a copy.

    The inverse is :func:`from_response_values`.

    Args:
        values: ``[R, A']``, any dtype and device. The last column belongs to the last cell of each
            row; ``A'`` is at least the longest response, and ``W - 1`` for packed rows.
        responses: a Batch, padded or packed, for a list per example, in the order of the collator's
            input, as :func:`~torch_collate_kit.unpack` returns; empty where the example was dropped
            or is not in these rows. Or a ``response_mask`` ``[R, A]``, not 0 at the response
            tokens, the last cells of each row, for a list per row, as :func:`unstage` accepts.

    Raises:
        DataError: a mask that is not one run of ones at the right end of its row, or that is
            negative or not finite.
        ValueError: other numbers of rows, fewer values than response tokens, a Batch that was built
            from dense tensors, or a part of a staged mini-batch whose examples it does not count.
        TypeError: not tensors.

    >>> values = torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 3.0]])
    >>> response_values(values, torch.tensor([[0, 1, 1], [0, 0, 1]]))
    [[1.0, 2.0], [3.0]]
    """
    checked_tensors(values=values)
    name, _, _ = _checked(responses)
    if len(values) != len(responses):
        raise ValueError(
            f"values has {len(values)} rows, {name} has {len(responses)}; pass those of one batch"
        )
    cells = _cells(responses, values.shape[1])
    found: list[list[float]] = values_of_cells(values, cells, torch.float64).tolist()
    return found


def from_response_values(
    values: Sequence[Any] | Ragged, responses: Tensor | Batch, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Place values per response token in a new tensor ``[R, A]``, right-aligned, 0 elsewhere.

    It multiplies ``log_probs[:, -A-1:-1]``, like ``batch["response_mask"]``, and is on the device
    of the batch (or mask). The inverse is :func:`response_values`.

    Args:
        values: a flat list, ndarray or tensor per response, with one number per token: as many as
            ``response_values`` returns, or one for each example of the rows, as
            :class:`~torch_collate_kit.losses.PerTokenOutputs` has.
        responses: as for ``response_values``; ``A`` is ``metadata["response_length"]`` of a Batch.
        dtype: of the result.

    Raises:
        DataError: another number of values than a response has tokens, or values that are not
            numbers or that ``dtype`` cannot hold.
        ValueError: another number of responses; a Batch that was built from dense tensors.
        TypeError: neither a Batch nor a tensor.

    >>> from_response_values([[1.0, 2.0], [3.0]], torch.tensor([[0, 1, 1], [0, 0, 1]]))
    tensor([[0., 1., 2.],
            [0., 0., 3.]])
    """
    name, num_columns, device = _checked(responses)
    if isinstance(responses, Batch):
        owners, cells = cells_by_example(responses, num_columns)
    if not isinstance(responses, Batch) or len(owners) != len(values):
        owners, cells = np.arange(len(values)), _cells(responses, num_columns)
    if len(values) != len(cells):
        unit = "examples" if isinstance(responses, Batch) else "rows"
        raise ValueError(
            f"values has {len(values)} entries, {name} has {len(cells)} {unit}; pass one list for "
            "each, in the order of response_values"
        )
    dense = torch.zeros(len(responses) * num_columns, dtype=dtype, device=device)
    if len(cells):
        given = number_column("values", values, "numbers")
        wrong = np.flatnonzero(given.lengths != cells.lengths)
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"example {owners[i]}: values has {given.lengths[i]} entries for "
                f"{cells.lengths[i]} response tokens; pass one entry per response token"
            )
        every = whole_examples(cells.lengths)
        flat, _ = FieldColumn("values", PerResponseToken(dtype), given).place(every, every)
        dense[torch.from_numpy(cells.values).to(device)] = flat.to(device)
    return dense.view(len(responses), num_columns)


def _checked(responses: Any) -> tuple[str, int, torch.device]:
    """Return the name for messages, the columns ``A`` of the rows, and the device."""
    if not isinstance(responses, Batch):
        checked_tensors(response_mask=responses)
        return "response_mask", responses.shape[1], responses.device
    placement, ids = responses.placement, responses.column("input_ids")
    if placement is None or ids is None:
        raise ValueError(
            "the batch was built from dense tensors, which do not say where examples lie; pass its "
            'response_mask, batch["response_mask"]'
        )
    return "the batch", placement.response_length, ids.device


def _cells(responses: Batch | Tensor, num_columns: int) -> Ragged:
    """Return the cells of each response in ``[R, num_columns]``."""
    if isinstance(responses, Batch):
        return cells_of_every_example(responses, num_columns)
    mask = checked_mask("response_mask", responses).cpu()
    counts = mask.sum(dim=1)
    is_last = torch.arange(mask.shape[1]) >= mask.shape[1] - counts[:, None]
    wrong = (mask != is_last).any(dim=1).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise DataError(
            f"row {i}: response_mask has {int(counts[i])} response tokens that are not the last "
            "cells of the row; left-pad the rows, or pass the Batch"
        )
    lengths = counts.numpy()
    cells = cells_of_spans(np.arange(len(mask)), lengths, lengths, num_columns)
    return Ragged.from_lengths(cells, lengths)


def checked_tensors(**tensors: Any) -> None:
    """Check that all are tensors ``[B, A]`` of one shape."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor [B, A], got {type(tensor).__name__}")
        if tensor.ndim != 2:
            raise ValueError(f"{name} must be [B, A], got shape {list(tensor.shape)}")
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, {first_name} has {list(first.shape)}; "
                "they must have the same rows and response columns"
            )


def refuse_cells(is_wrong: Tensor, values: Tensor, message: str) -> None:
    """Raise DataError for the first wrong cell, whose {row}, {column} and {value} are filled in."""
    cells = is_wrong.nonzero()
    if len(cells):
        row, column = cells[0].tolist()
        value = values[row, column].item()
        raise DataError(message.format(row=row, column=column, value=value))


def checked_mask(name: str, mask: Tensor) -> Tensor:
    """Return where ``mask`` is not 0; an entry that is negative or not finite is refused."""
    given = mask.detach()
    refuse_cells(
        ~((given >= 0) & given.isfinite()),
        given,
        f"row {{row}}: {name} is {{value}} at column {{column}}; it must be finite and 0 or more",
    )
    return given != 0


def wide(tensor: Tensor) -> Tensor:
    """Convert to float64 (float32 where the device has none), without a graph."""
    # In float32 the mean of equal rewards can be off by one bit, and that bit divided by
    # 0 + epsilon is an advantage of 0.01 where there is nothing to learn.
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def narrow(result: Tensor, *, like: Tensor) -> Tensor:
    """Convert to float64 if ``like`` is float64, else to float32."""
    return result.to(torch.float64 if like.dtype == torch.float64 else torch.float32)
