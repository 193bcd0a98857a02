"""One example a row, padded to the longest: the layout for small batches and for generation."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators._columns import pad_token_id_of, read_columns
from torch_collate_kit.collators._examples import Examples
from torch_collate_kit.collators._fill import NOTHING_LOST, fill_batch, token_mover
from torch_collate_kit.collators._grid import Grid, one_a_row
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing._checks import checked_bool, checked_compiled, checked_optional_int

__all__ = ["PaddedCollator"]


class PaddedCollator:
    """Collate examples into rows padded to the longest one.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``.
        padding_side: "left" keeps the last token in the last column, so that responses are aligned
            and generation can go on from there; "right" pads behind.
        pad_to_multiple_of: round the width up to it; a width that is a multiple already stays.
        max_length: the most tokens an example may have. A longer one raises; nothing is cut.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        train_all: the examples have no loss target, and every token is trained. It must be said
            where they have other keys than ``input_ids`` (and ``attention_mask``).
        compiled: run the inner loops through numba, as for
            :class:`~torch_collate_kit.collators.PackedCollator`.

    Calling it takes a list of examples, or a mapping of ragged columns, and returns a new
    :class:`~torch_collate_kit.batch.Batch` (docs/contract.md): ``input_ids``, ``position_ids``
    (0 at pads), ``attention_mask`` and ``labels`` int64 ``[B, L]``, ``loss_mask`` float32
    ``[B, A]``, ``sub_seq_lengths`` ragged int64. It can be pickled into DataLoader workers.
    Inputs are copied, never changed.

    Raises:
        DataError: an example is wrong, or longer than ``max_length``.
        ValueError, TypeError: a setting is wrong.

    >>> collate = PaddedCollator(0)
    >>> batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7], [0, 8, 9]], [[-100, 6, 7], [-100, -100, 9]])
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        padding_side: Literal["left", "right"] = "left",
        pad_to_multiple_of: int | None = None,
        max_length: int | None = None,
        normalize_loss: bool = True,
        train_all: bool = False,
        compiled: bool = False,
    ) -> None:
        if padding_side not in ("left", "right"):
            raise ValueError(f'padding_side must be "left" or "right", got {padding_side!r}')
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.padding_side = padding_side
        self.pad_to_multiple_of = checked_optional_int(
            "pad_to_multiple_of", pad_to_multiple_of, hint="None switches it off"
        )
        self.max_length = checked_optional_int(
            "max_length", max_length, hint="None switches it off"
        )
        self.train_all = checked_bool("train_all", train_all)
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.compiled = checked_compiled(compiled)

    def __call__(self, examples: Examples) -> Batch:
        columns = read_columns(examples, train_all=self.train_all)
        grid = self._grid(columns.lengths)
        return fill_batch(
            grid,
            token_mover(grid, columns, compiled=self.compiled),
            num_examples=grid.num_rows,
            pad_token_id=self.pad_token_id,
            response_length=None,
            normalize_loss=self.normalize_loss,
            metadata=dict(NOTHING_LOST),
        )

    def _grid(self, lengths: np.ndarray) -> Grid:
        width = int(lengths.max())
        if self.max_length is not None and width > self.max_length:
            i = int(np.flatnonzero(lengths > self.max_length)[0])
            raise DataError(
                f"example {i} has {lengths[i]} tokens, more than max_length={self.max_length}; "
                "truncate it when tokenizing, filter it out, or raise max_length"
            )
        if self.pad_to_multiple_of is not None:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return one_a_row(lengths, width, padding_side=self.padding_side)
