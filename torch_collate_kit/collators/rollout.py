"""Rollouts of a policy, one a row: the layout of RL training."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_bool, checked_optional_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.placement import Placement, padded, whole_examples
from torch_collate_kit.collators.assembly import NOTHING_LOST, assemble, pad_token_id_of
from torch_collate_kit.reading.fields import DeclaredFields, checked_fields
from torch_collate_kit.reading.raw import Examples
from torch_collate_kit.reading.rollouts import ROLLOUT_KEYS, read_rollouts

__all__ = ["RolloutCollator"]

_FIELDS = ("input_ids", "attention_mask", "position_ids")
_MADE = ("response_mask", "rollout_logprobs", "router_padding_mask", "sub_seq_lengths", "labels")


class RolloutCollator:
    """Collate rollouts into one left-padded block, with right-aligned tensors of the responses.

    A rollout has ``prompt_ids`` and ``response_ids``, ``rewards`` (one number, which goes to the
    last token, or one a response token) and ``loss_mask`` (one weight a response token; 0 where the
    policy did not write it). It may have ``logprobs`` of the response tokens, ``advantages`` (one
    number, for all response tokens, or one each), ``uid`` (of its prompt), ``trajectory_id`` (of
    the trajectory it is a step of), ``is_last_step`` (of it), ``rollout_expert_indices`` (integers
    ``[tokens, layers, top_k]``: the experts that a mixture-of-experts router chose, for all tokens
    or the first ones), and ``pixel_values`` with ``image_grid_thw``. Each of them is a list, an
    ndarray, or a tensor of any dtype and device.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``.
        pad_to_multiple_of: round the width up to it; a width that is a multiple already stays.
        max_seq_len: prompt and response longer than this are warned of; nothing is cut.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        fields: what else the examples hold, by key: ``PerToken``, ``PerResponseToken`` or
            ``PerExample`` with a dtype. It is read, checked, cut, placed and sliced as our own.

    Calling it takes a list of rollouts, or a mapping of columns, and returns a new
    :class:`~torch_collate_kit.batch.Batch` (docs/contract.md). The width ``W`` is that of the
    longest prompt and response together, rounded up, ``A`` that of the longest response:

    - ``input_ids``, ``attention_mask`` and ``position_ids`` int64 ``[B, W]``;
    - ``response_mask`` int64, ``rewards``, ``loss_mask``, and where they were given
      ``rollout_logprobs`` and ``advantages`` float32 ``[B, A]``, which match
      ``log_probs[:, -A-1:-1]``;
    - ``rollout_expert_indices`` int16 ``[B, W, layers, top_k]`` and ``router_padding_mask`` bool
      ``[B, W]``: True where no route was given, which holds ``top_k`` distinct experts;
    - ``pixel_values`` float32 and ``image_grid_thw`` int64, ragged: those of a row.

    ``row_metadata`` has ``"uids"``, ``"trajectory_ids"`` and ``"is_last_step"``, as given. It
    can be pickled into DataLoader workers. Inputs are copied, never changed.

    Raises:
        DataError: a rollout is wrong; says which, and what.
        ValueError, TypeError: a setting is wrong.

    >>> good = {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": 1.0, "loss_mask": [1, 1]}
    >>> bad = {"prompt_ids": [5, 6, 7], "response_ids": [9], "rewards": 0.0, "loss_mask": [1]}
    >>> batch = RolloutCollator(0)([good, bad])
    >>> batch["input_ids"].tolist(), batch["rewards"].tolist(), batch["response_mask"].tolist()
    ([[5, 6, 7, 8], [5, 6, 7, 9]], [[0.0, 1.0], [0.0, 0.0]], [[1, 1], [0, 1]])
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_seq_len: int | None = None,
        pad_to_multiple_of: int | None = None,
        normalize_loss: bool = False,
        fields: DeclaredFields | None = None,
    ) -> None:
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.max_seq_len = checked_optional_int(
            "max_seq_len", max_seq_len, hint="None switches it off"
        )
        self.pad_to_multiple_of = checked_optional_int(
            "pad_to_multiple_of", pad_to_multiple_of, hint="None switches it off"
        )
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.fields = checked_fields(fields, (*ROLLOUT_KEYS, *_FIELDS, *_MADE))

    def __call__(self, examples: Examples) -> Batch:
        rollouts = read_rollouts(examples, self.fields)
        lengths = rollouts.lengths
        if self.max_seq_len is not None:
            _warn_of_long(lengths, self.max_seq_len)
        multiple = self.pad_to_multiple_of or 1
        width, pieces = -(-int(lengths.max()) // multiple) * multiple, whole_examples(lengths)
        placed = rollouts.place(pieces)
        placement = Placement(
            width=width,
            response_length=int(placed.counts["responses"].max()),
            pad_token_id=self.pad_token_id,
            is_packed=False,
            segments=padded(placed.counts, width, padding_side="left"),
        )
        return assemble(
            rollouts,
            pieces,
            placed,
            placement,
            (*_FIELDS, *rollouts.names, "sub_seq_lengths"),
            normalize_loss=self.normalize_loss,
            row_metadata=rollouts.per_example,
            metadata={"num_examples": len(lengths), **NOTHING_LOST},
        )


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
