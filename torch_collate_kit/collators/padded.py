"""One example per row, padded to the longest: for small batches and for generation."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from torch_collate_kit._checks import checked_bool, checked_optional_int
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators.assembly import (
    made_of_images,
    one_per_row,
    own_fields,
    pad_token_id_of,
    vision_of,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.keys import KNOWN
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import Examples
from torch_collate_kit.vision import VisionLayout

__all__ = ["PaddedCollator"]

_FIELDS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "labels",
    "loss_mask",
    "sub_seq_lengths",
)


class PaddedCollator:
    """Collate examples into rows padded to the longest one.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``; of a vision-language model its
            processor.
        padding_side: "left" puts the last token into the last column, as generation needs; "right"
            puts the pads after the tokens, where no causal model reads them. RecurrentGemma, RWKV
            and xLSTM need "right": they read pads on the left as tokens.
        pad_to_multiple_of: round the width up to a multiple of it.
        max_length: the most tokens an example may have. A longer one raises; nothing is cut.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        train_all: the examples have no loss target, and every token is trained.
        fields: what else to read, by key: PerToken, PerResponseToken or PerExample, with a dtype.
        vision: how the images of a vision-language model become tokens; that of ``tokenizer`` if it
            is a processor.

    Calling it takes a list of examples or a mapping of columns, and returns a new
    :class:`~torch_collate_kit.batch.Batch`. Inputs are copied. docs/contract.md has the fields.

    Raises:
        DataError: an example is wrong, or longer than ``max_length``.
        ValueError, TypeError: a setting is wrong.

    >>> batch = PaddedCollator(0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
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
        fields: DeclaredFields | None = None,
        vision: VisionLayout | None = None,
    ) -> None:
        if padding_side not in ("left", "right"):
            raise ValueError(f'padding_side must be "left" or "right", got {padding_side!r}')
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.vision = vision_of(tokenizer, vision)
        self.padding_side: Literal["left", "right"] = padding_side
        self.pad_to_multiple_of = checked_optional_int(
            "pad_to_multiple_of", pad_to_multiple_of, hint="None switches it off"
        )
        self.max_length = checked_optional_int(
            "max_length", max_length, hint="None switches it off"
        )
        self.train_all = checked_bool("train_all", train_all)
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.fields = own_fields(fields, (*KNOWN, *_FIELDS), self.vision)

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **changed_settings(self))

    def __call__(self, examples: Examples) -> Batch:
        columns = read_columns(
            examples, train_all=self.train_all, fields=self.fields, vision=self.vision
        )
        too_long = np.flatnonzero(columns.lengths > (self.max_length or np.inf))
        if len(too_long):
            i = int(too_long[0])
            raise DataError(
                f"example {i} has {columns.lengths[i]} tokens, more than max_length="
                f"{self.max_length}; truncate it when tokenizing, filter it out, or raise "
                "max_length"
            )
        names = (*_FIELDS, *made_of_images(self.vision), *columns.names)
        return one_per_row(self, columns, names, self.padding_side)
