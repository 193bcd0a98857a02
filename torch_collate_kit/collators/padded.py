"""One example per row, padded to the longest.

SFT examples, for small batches and for generation; rollouts of a policy in the layout of RL.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from torch_collate_kit._checks import checked_bool, checked_optional_int
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.placement import Placement, padded, whole_examples
from torch_collate_kit.collators.assembly import (
    assemble,
    made_of_images,
    own_fields,
    pad_token_id_of,
    vision_of,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.raw import KNOWN, ROLLOUT_KEYS, Examples
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.vision import VisionLayout

__all__ = ["PaddedCollator", "RolloutCollator"]

_FIELDS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "labels",
    "loss_mask",
    "sub_seq_lengths",
)
_ROLLOUT_FIELDS = ("input_ids", "attention_mask", "position_ids")
_MADE = ("response_mask", "rollout_logprobs", "router_padding_mask", "sub_seq_lengths", "labels")
_NOTHING_LOST: dict[str, Any] = {  # metadata of a layout that has a row for every example
    "num_dummy_rows": 0,
    "num_dropped": 0,
    "num_cut": 0,
    "dropped": (),
    "cut": (),
}


class PaddedCollator:
    """Collate examples into rows padded to the longest one.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``; of a vision-language model its
            processor.
        padding_side: "left" puts the last token into the last column, as generation needs; "right"
            puts the pads after the tokens.
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
        return _one_per_row(self, columns, names, self.padding_side)


class RolloutCollator:
    """Collate rollouts into one left-padded block, with right-aligned tensors of the responses.

    A rollout has ``prompt_ids``, ``response_ids``, ``rewards`` (one number, which goes to the last
    token, or one per response token) and ``loss_mask`` (one weight per response token).
    docs/contract.md has the keys that it may have, and the fields of the batch.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``; of a vision-language model its
            processor.
        max_seq_len: warn of rollouts with more tokens than this; nothing is cut.
        pad_to_multiple_of: round the width up to a multiple of it.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        fields: what else to read, by key: PerToken, PerResponseToken or PerExample, with a dtype.
        vision: how the images of a vision-language model become tokens; that of ``tokenizer`` if it
            is a processor.

    Calling it takes a list of rollouts or a mapping of columns, and returns a new
    :class:`~torch_collate_kit.batch.Batch`. Inputs are copied.

    Raises:
        DataError: a rollout is wrong.
        ValueError, TypeError: a setting is wrong.

    >>> good = {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": 1.0, "loss_mask": [1, 1]}
    >>> RolloutCollator(0)([good])["rewards"]
    tensor([[0., 1.]])
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_seq_len: int | None = None,
        pad_to_multiple_of: int | None = None,
        normalize_loss: bool = False,
        fields: DeclaredFields | None = None,
        vision: VisionLayout | None = None,
    ) -> None:
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.vision = vision_of(tokenizer, vision)
        self.max_seq_len = checked_optional_int(
            "max_seq_len", max_seq_len, hint="None switches it off"
        )
        self.pad_to_multiple_of = checked_optional_int(
            "pad_to_multiple_of", pad_to_multiple_of, hint="None switches it off"
        )
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.fields = own_fields(fields, (*ROLLOUT_KEYS, *_ROLLOUT_FIELDS, *_MADE), self.vision)

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **changed_settings(self))

    def __call__(self, examples: Examples) -> Batch:
        rollouts = read_columns(examples, rollouts=True, fields=self.fields, vision=self.vision)
        if self.max_seq_len is not None:
            _warn_of_long(rollouts.lengths, self.max_seq_len)
        made = made_of_images(self.vision)
        names = (*_ROLLOUT_FIELDS, *made, *rollouts.names, "sub_seq_lengths")
        return _one_per_row(self, rollouts, names, "left")


def _warn_of_long(lengths: np.ndarray, max_seq_len: int) -> None:
    num_long = int(np.count_nonzero(lengths > max_seq_len))
    if num_long:
        i = int(lengths.argmax())
        warnings.warn(
            f"{num_long} of {len(lengths)} rollouts are longer than max_seq_len={max_seq_len}; the "
            f"longest is example {i} with {lengths[i]} tokens. Nothing was cut; limit the tokens "
            "that are generated, or filter such rollouts out",
            stacklevel=3,
        )


def _one_per_row(
    collator: PaddedCollator | RolloutCollator,
    examples: ExampleColumns,
    names: tuple[str, ...],
    padding_side: Literal["left", "right"],
) -> Batch:
    """The Batch with one example per row. ``names`` are its fields."""
    lengths, multiple = examples.lengths, collator.pad_to_multiple_of or 1
    width = -(-int(lengths.max()) // multiple) * multiple
    placed = examples.place(whole_examples(lengths))
    # the widest run of cells from a row's first response token to its end
    pads = 0 if padding_side == "left" else width - lengths
    num_actions = placed.counts["responses"]
    longest = int(np.where(num_actions > 0, num_actions + pads, 0).max())
    segments = padded(placed.counts, width, padding_side=padding_side)
    return assemble(
        placed,
        Placement(width, longest, collator.pad_token_id, False, segments, collator.vision),
        names,
        normalize_loss=collator.normalize_loss,
        row_metadata=examples.per_example,
        metadata={"num_examples": len(lengths), **_NOTHING_LOST},
    )
