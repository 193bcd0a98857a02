"""One example per row: padded to the longest, or rollouts in the layout of RL training."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from torch_collate_kit._checks import checked_bool, checked_choice, checked_optional_int, plural
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.fields import PackedValues
from torch_collate_kit.batch.placement import (
    MAX_WIDTH,
    Placement,
    TargetKind,
    padded,
    too_wide,
    whole_examples,
)
from torch_collate_kit.collators.collator import Collator, ForTrainer, check_options, check_targets
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rank_plan import counts_by_source
from torch_collate_kit.packing.rows import Pieces, row_sums
from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.examples import ExampleColumns, RowColumns
from torch_collate_kit.reading.keys import KNOWN, ROLLOUT_KEYS
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import Examples
from torch_collate_kit.vision import VisionLayout

_FIELDS = ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask", "sub_seq_lengths")
_ROLLOUT_FIELDS = ("input_ids", "attention_mask", "position_ids")
_MADE = ("response_mask", "rollout_logprobs", "router_padding_mask", "sub_seq_lengths", "labels")


class _OneExamplePerRow(Collator):
    """Collator of one example per row, of at most ``max_length`` tokens."""

    def _set_lengths(
        self,
        max_length: int | None,
        overflow: str,
        choices: tuple[str, ...],
        pad_to_multiple_of: int | None,
    ) -> None:
        hint = "None switches it off"
        self.max_length = checked_optional_int("max_length", max_length, hint=hint)
        multiple = checked_optional_int("pad_to_multiple_of", pad_to_multiple_of, hint=hint)
        self.pad_to_multiple_of = multiple
        checked_choice("overflow", overflow, choices)
        if overflow != "raise" and max_length is None:
            raise ValueError(
                f"overflow={overflow!r} is for examples longer than max_length, which is None; "
                "pass max_length, too"
            )
        self.overflow = overflow

    def _collated(
        self, given: Any, examples: ExampleColumns, names: tuple[str, ...], side: str
    ) -> Batch:
        """Return the Batch of the examples, padded on this side; ``names`` are its fields."""
        pieces, dropped, cut = self._fit(examples)
        lengths, multiple = pieces.lengths, self.pad_to_multiple_of or 1
        width = -(-int(lengths.max()) // multiple) * multiple
        if width > MAX_WIDTH:
            way_out = f"shorten example {lengths.argmax()} when tokenizing, or filter it out"
            raise too_wide(width, way_out)
        placed = examples.place(pieces)
        # the widest run of cells from a row's first response token to its end
        pads = 0 if side == "left" else width - lengths
        num_actions = placed.counts["responses"]
        longest = int(np.where(num_actions > 0, num_actions + pads, 0).max())
        longest = width if self.targets == "same_token" else longest
        where = (width, longest, self.pad_token_id, False)
        segments = padded(placed.counts, width, padding_side=side)
        metadata: dict[str, Any] = {"num_examples": len(examples.example_lengths)}
        per_row, in_order = dict[str, Any](), examples.per_segment
        if examples.segment_offsets is None:
            in_order = in_order | examples.per_example
        else:
            per_row = {k: _at_first(values, placed) for k, values in examples.per_example.items()}
            metadata["num_segments"] = tuple(np.diff(examples.segment_offsets).tolist())
        for name, values in in_order.items():
            per_row[name] = [values[i] for i in pieces.examples.tolist()]
        metadata |= counts_by_source(given, placed.examples, pieces.lengths)
        return self._batch(
            placed,
            Placement(*where, segments, self.vision, targets=self.targets),
            names,
            row_metadata=per_row,
            metadata={**metadata, "num_dummy_rows": 0},
            dropped=dropped,
            cut=cut,
        )

    def _fit(self, examples: ExampleColumns) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Return pieces of at most ``max_length`` tokens; which examples are dropped, and cut."""
        lengths, max_length, of_segments = examples.lengths, self.max_length, examples.lengths
        whole, none = whole_examples(lengths), np.zeros(0, dtype=np.int64)
        offsets, in_all = examples.segment_offsets, ""
        if offsets is not None:
            if self.overflow == "truncate":
                raise ValueError(
                    "overflow='truncate' cuts examples, and these have several segments, which "
                    "stay together: cut them when they are tokenized, and pass overflow='raise' "
                    "or 'drop'"
                )
            lengths = row_sums(lengths, offsets)
        if max_length is None or not len(too_long := np.flatnonzero(lengths > max_length)):
            return whole, none, none
        i = int(too_long[0])
        if offsets is not None:
            in_all = f" in {plural(int(offsets[i + 1] - offsets[i]), 'segment')}"
        found = f"example {i} has {lengths[i]} tokens{in_all}, more than max_length={max_length}"
        if self.overflow == "raise":
            others = f" ({len(too_long) - 1} more are too long)" if len(too_long) > 1 else ""
            is_whole = examples.are_rollouts or offsets is not None
            ways = '"drop"' if is_whole else '"truncate" or "drop"'
            raise DataError(
                f"{found}{others}; raise max_length, shorten it, or pass overflow={ways}"
            )
        if self.overflow == "drop":
            if len(too_long) == len(lengths):
                raise DataError(
                    f"{found}, and so has every other, so nothing of the batch is left; raise "
                    "max_length"
                )
            kept = np.delete(np.arange(len(lengths)), too_long)
            if offsets is not None:
                kept = span_indices(offsets[kept], np.diff(offsets)[kept])
            return whole_examples(of_segments[kept])._replace(examples=kept), too_long, none
        if examples.images is not None and examples.images.units:
            lengths = examples.images.cuts(max_length, None)[0]
        lengths = np.minimum(lengths, max_length)
        if not lengths.all():
            raise DataError(
                f"example {lengths.argmin()} begins with an image of more than max_length="
                f"{max_length} tokens, and an image is never cut; make the image smaller, or pass "
                'overflow="drop"'
            )
        return whole._replace(lengths=lengths), none, too_long


def _at_first(values: list[Any], placed: RowColumns) -> list[PackedValues]:
    """Return the value of each example in the row of its first segment, as a tuple per row."""
    assert placed.segment_numbers is not None
    pairs = zip(placed.examples.tolist(), placed.segment_numbers.tolist(), strict=True)
    return [PackedValues([] if number else [values[i]]) for i, number in pairs]


class PaddedCollator(_OneExamplePerRow, ForTrainer):
    """Collate examples into rows padded to the longest one.

    Args:
        tokenizer, normalize_loss, train_all, fields, vision, targets: as in
            :class:`PackedCollator`.
        padding_side: "left" puts the last token into the last column, as generation needs; "right"
            puts the pads after the tokens, where no causal model reads them. RecurrentGemma, RWKV
            and xLSTM need "right": they read pads on the left as tokens.
        pad_to_multiple_of: round the width up to a multiple of it.
        max_length: the most tokens of an example; no limit by default.
        overflow: what to do with a longer example: "raise" (default), "truncate" it to its first
            tokens, never through an image, or "drop" it. ``metadata`` counts both.

    Calling it returns a new :class:`~torch_collate_kit.Batch`, as of :class:`PackedCollator`.

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
        targets: TargetKind = "next_token",
    ) -> None:
        super().__init__(tokenizer, normalize_loss, fields, vision, (*KNOWN, *_FIELDS), targets)
        checked_choice("padding_side", padding_side, ("left", "right"))
        self.padding_side = padding_side
        choices = ("raise", "truncate", "drop")
        self._set_lengths(max_length, overflow, choices, pad_to_multiple_of)
        self.train_all = checked_bool("train_all", train_all)
        check_options(targets, train_all=train_all, packing=None)

    def __call__(self, examples: Examples) -> Batch:
        """Collate the examples into a new Batch."""
        return self.make_batch(examples)

    def make_batch(self, examples: Any, *, for_trainer: bool = False) -> Batch:
        """Return the Batch of the examples; for ``transformers.Trainer`` with its checks."""
        columns = read_columns(examples, **self.reading)
        if for_trainer:
            check_targets(columns, self.train_all)
        names = (*_FIELDS, *self._of_images, *columns.names)
        return self._collated(examples, columns, names, self.padding_side)


class RolloutCollator(_OneExamplePerRow):
    """Collate rollouts into one left-padded block, with right-aligned tensors of the responses.

    A rollout has ``prompt_ids``, ``response_ids``, ``rewards`` (one number, which goes to the last
    token, or one per response token) and ``loss_mask`` (one weight per response token).
    docs/contract.md has the keys that it may have, and the fields of the batch.

    Args:
        tokenizer, normalize_loss, fields, vision: as in :class:`PackedCollator`.
        max_length: the most tokens of a rollout, prompt and response; no limit by default.
        overflow: what to do with a longer rollout: "raise" (default), or "drop" it, which
            ``metadata`` counts. A rollout is never cut.
        pad_to_multiple_of: round the width up to a multiple of it.

    Calling it returns a new :class:`~torch_collate_kit.Batch`, as of :class:`PackedCollator`.

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
        names = (*ROLLOUT_KEYS, *_ROLLOUT_FIELDS, *_MADE)
        super().__init__(tokenizer, normalize_loss, fields, vision, names)
        self._set_lengths(max_length, overflow, ("raise", "drop"), pad_to_multiple_of)

    def __call__(self, examples: Examples) -> Batch:
        """Collate the examples into a new Batch."""
        rollouts = read_columns(examples, rollouts=True, fields=self.fields, vision=self.vision)
        names = (*_ROLLOUT_FIELDS, *self._of_images, *rollouts.names, "sub_seq_lengths")
        return self._collated(examples, rollouts, names, "left")
