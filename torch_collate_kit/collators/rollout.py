"""Rollouts of a policy, one per row: the layout of RL training."""

from __future__ import annotations

from typing import Any, Literal

from torch_collate_kit._checks import checked_bool, checked_optional_int
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
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.keys import ROLLOUT_KEYS
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import Examples
from torch_collate_kit.vision import VisionLayout

__all__ = ["RolloutCollator"]

_FIELDS = ("input_ids", "attention_mask", "position_ids")
_MADE = ("response_mask", "rollout_logprobs", "router_padding_mask", "sub_seq_lengths", "labels")


class RolloutCollator:
    """Collate rollouts into one left-padded block, with right-aligned tensors of the responses.

    A rollout has ``prompt_ids``, ``response_ids``, ``rewards`` (one number, which goes to the last
    token, or one per response token) and ``loss_mask`` (one weight per response token).
    docs/contract.md has the keys that it may have, and the fields of the batch.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``; the processor of a
            vision-language model.
        max_length: the most tokens of a rollout, prompt and response; no limit by default.
        overflow: what to do with a longer rollout: "raise" (default), or "drop" it, which
            ``metadata`` counts. A rollout is never cut.
        pad_to_multiple_of: round the width up to a multiple of it.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        fields: columns to read beside the known ones: a dict of names to PerToken,
            PerResponseToken or PerExample.
        vision: how images become tokens: ``VisionLayout.of(processor, model.config)``. By default
            that of ``tokenizer``, if it is a processor.

    Calling it with a list of rollouts or a mapping of columns returns a new
    :class:`~torch_collate_kit.Batch`. Inputs are copied. docs/contract.md lists its fields.

    Raises:
        DataError: a rollout is wrong, or too long with ``overflow="raise"``.
        ValueError, TypeError: an option is wrong.

    >>> good = {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": 1.0, "loss_mask": [1, 1]}
    >>> RolloutCollator(0)([good])["rewards"]
    tensor([[0., 1.]])
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        overflow: Literal["raise", "drop"] = "raise",
        pad_to_multiple_of: int | None = None,
        normalize_loss: bool = False,
        fields: DeclaredFields | None = None,
        vision: VisionLayout | None = None,
    ) -> None:
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.vision = vision_of(tokenizer, vision)
        hint = "None switches it off"
        self.max_length = checked_optional_int("max_length", max_length, hint=hint)
        self.overflow = checked_overflow(overflow, ("raise", "drop"), self.max_length)
        self.pad_to_multiple_of = checked_optional_int(
            "pad_to_multiple_of", pad_to_multiple_of, hint=hint
        )
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.fields = own_fields(fields, (*ROLLOUT_KEYS, *_FIELDS, *_MADE), self.vision)

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **changed_settings(self))

    def __call__(self, examples: Examples) -> Batch:
        """Collate the examples into a new Batch."""
        rollouts = read_columns(examples, rollouts=True, fields=self.fields, vision=self.vision)
        made = made_of_images(self.vision)
        names = (*_FIELDS, *made, *rollouts.names, "sub_seq_lengths")
        return one_per_row(self, rollouts, names, "left")
