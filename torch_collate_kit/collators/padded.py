"""One example per row, padded to the longest: for small batches and for generation."""

from __future__ import annotations

from typing import Any, Literal

from torch_collate_kit._checks import checked_bool, checked_choice, checked_optional_int
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators.assembly import (
    checked_overflow,
    made_of_images,
    one_per_row,
    own_fields,
    pad_token_id_of,
    vision_of,
)
from torch_collate_kit.collators.trainer import TrainerCollator, check_targets
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
        tokenizer: an int pad id, or anything with ``pad_token_id``; the processor of a
            vision-language model.
        padding_side: "left" puts the last token into the last column, as generation needs; "right"
            puts the pads after the tokens, where no causal model reads them. RecurrentGemma, RWKV
            and xLSTM need "right": they read pads on the left as tokens.
        pad_to_multiple_of: round the width up to a multiple of it.
        max_length: the most tokens of an example; no limit by default.
        overflow: what to do with a longer example: "raise" (default), "truncate" it to its first
            tokens, never through an image, or "drop" it. ``metadata`` counts both.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        train_all: train every token of examples that have no loss target.
        fields: columns to read beside the known ones: a dict of names to PerToken,
            PerResponseToken or PerExample.
        vision: how images become tokens: ``VisionLayout.of(processor, model.config)``. By default
            that of ``tokenizer``, if it is a processor.

    Calling it with a list of examples or a mapping of columns returns a new
    :class:`~torch_collate_kit.Batch`. Inputs are copied. docs/contract.md lists its fields.

    Raises:
        DataError: an example is wrong, or too long with ``overflow="raise"``.
        ValueError, TypeError: an option is wrong.

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
        overflow: Literal["raise", "truncate", "drop"] = "raise",
        normalize_loss: bool = True,
        train_all: bool = False,
        fields: DeclaredFields | None = None,
        vision: VisionLayout | None = None,
    ) -> None:
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.vision = vision_of(tokenizer, vision)
        checked_choice("padding_side", padding_side, ("left", "right"))
        self.padding_side: Literal["left", "right"] = padding_side
        hint = "None switches it off"
        self.pad_to_multiple_of = checked_optional_int(
            "pad_to_multiple_of", pad_to_multiple_of, hint=hint
        )
        self.max_length = checked_optional_int("max_length", max_length, hint=hint)
        self.overflow = checked_overflow(overflow, ("raise", "truncate", "drop"), self.max_length)
        self.train_all = checked_bool("train_all", train_all)
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.fields = own_fields(fields, (*KNOWN, *_FIELDS), self.vision)

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **changed_settings(self))

    def for_trainer(self) -> TrainerCollator:
        """Return the collator for ``transformers.Trainer``: calls return ``batch.model_inputs()``.

        Examples must have a loss target, or the collator ``train_all=True``: Trainer removes a
        ``loss_mask`` column before the collator sees it.

        Raises:
            ValueError: the collator declares fields, which model inputs do not have.

        >>> collate = PaddedCollator(0).for_trainer()
        >>> collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])["labels"].tolist()
        [[-100, 6, 7]]
        """
        return TrainerCollator(self)

    def __call__(self, examples: Examples) -> Batch:
        """Collate the examples into a new Batch."""
        return self.make_batch(examples)

    def make_batch(self, examples: Examples, *, for_trainer: bool = False) -> Batch:
        """Return the Batch of the examples; for ``transformers.Trainer`` with its checks."""
        columns = read_columns(
            examples, train_all=self.train_all, fields=self.fields, vision=self.vision
        )
        if for_trainer:
            check_targets(columns, self.train_all)
        names = (*_FIELDS, *made_of_images(self.vision), *columns.names)
        return one_per_row(self, columns, names, self.padding_side)
