"""Several examples per row: hardly any padding, and no example sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import numpy as np

from torch_collate_kit._checks import checked_bool
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.placement import (
    MAX_WIDTH,
    Pieces,
    Placement,
    longest_segments,
    packed,
    too_wide,
)
from torch_collate_kit.batch.rows import PackedValues
from torch_collate_kit.collators.assembly import (
    assemble,
    made_of_images,
    own_fields,
    pad_token_id_of,
    refuse_unpacked,
    vision_of,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions, PackingPlan, PlannedExamples, RankPlan
from torch_collate_kit.packing.options import packing_options
from torch_collate_kit.packing.pieces import ImageLoad, Patches, image_load
from torch_collate_kit.packing.planner import plan_of
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.keys import KNOWN, ROLLOUT_KEYS, unknown_images
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import Examples
from torch_collate_kit.vision import VisionLayout

__all__ = ["PackedCollator", "changed_options"]

_FIELDS = ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask")
_MADE = (
    "response_mask",
    "rollout_logprobs",
    "router_padding_mask",
    "sub_seq_lengths",
    "cu_seq_lens",
)

B = TypeVar("B", bound=Batch | dict[str, Any])

if TYPE_CHECKING:
    from typing_extensions import Required, TypedDict, Unpack

    from torch_collate_kit.packing.options import PackingKeywords

    class _Settings(TypedDict, total=False):
        """What is not of the packing; ``model_inputs`` says what a call returns."""

        fixed_width: bool
        normalize_loss: bool
        train_all: bool
        fields: DeclaredFields | None
        vision: VisionLayout | None

    class _Options(PackingKeywords, _Settings, total=False):
        """All, with the packing as keywords."""

        max_tokens: Required[int]


class PackedCollator(Generic[B]):
    """Collate examples, or rollouts, into rows that hold several of them, isolated from each other.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``; of a vision-language model its
            processor.
        max_tokens: cells that a row may have. How rows are filled is also said by ``strategy``,
            ``parallel``, ``overflow``, ``max_sequences_per_row``, ``balance``, ``max_patches``,
            ``cost`` and ``dummy_image_tokens``: the fields of
            :class:`~torch_collate_kit.packing.PackingOptions`.
        packing: these in one object instead.
        fixed_width: make every batch ``max_tokens`` wide, not as wide as its fullest row.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        model_inputs: return the dict of ``Batch.model_inputs()``, for transformers.Trainer.
        train_all: the examples have no loss target, and every token is trained.
        fields: what else to read, by key: PerToken, PerResponseToken or PerExample, with a dtype.
        vision: how the images of a vision-language model become tokens:
            ``VisionLayout.of(processor, model.config)``. A processor as ``tokenizer`` is enough
            where only one ``model_type`` has it.

    Calling it takes a list of examples or a mapping of columns, and returns a new
    :class:`~torch_collate_kit.batch.Batch`. Inputs are copied. docs/contract.md has the fields.

    Raises:
        DataError: an example is wrong, or too long with ``overflow="raise"``.
        ValueError, TypeError: a setting is wrong, or does not fit the sampler's.

    >>> batch = PackedCollator(0, max_tokens=6)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    """

    @overload
    def __init__(
        self: PackedCollator[Batch],
        tokenizer: Any,
        *,
        model_inputs: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: PackedCollator[dict[str, Any]],
        tokenizer: Any,
        *,
        model_inputs: Literal[True],
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: PackedCollator[Any],
        tokenizer: Any,
        *,
        model_inputs: bool,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: PackedCollator[Batch],
        tokenizer: Any,
        *,
        packing: PackingOptions,
        model_inputs: Literal[False] = False,
        **settings: Unpack[_Settings],
    ) -> None: ...
    @overload
    def __init__(
        self: PackedCollator[dict[str, Any]],
        tokenizer: Any,
        *,
        packing: PackingOptions,
        model_inputs: Literal[True],
        **settings: Unpack[_Settings],
    ) -> None: ...
    def __init__(
        self,
        tokenizer: Any,
        *,
        max_tokens: int | None = None,
        packing: PackingOptions | None = None,
        fixed_width: bool = False,
        normalize_loss: bool = True,
        model_inputs: bool = False,
        train_all: bool = False,
        fields: DeclaredFields | None = None,
        vision: VisionLayout | None = None,
        **options: Unpack[PackingKeywords],
    ) -> None:
        self.pad_token_id = pad_token_id_of(tokenizer)
        self.vision = vision_of(tokenizer, vision)
        refuse_unpacked(self.vision)
        self.packing = packing_options(packing, max_tokens, options)
        if self.vision is not None and not self.packing.dummy_image_tokens:
            tokens = self.vision.smallest_tokens
            self.packing = replace(self.packing, dummy_image_tokens=tokens)
        self.fixed_width = checked_bool("fixed_width", fixed_width)
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss)
        self.train_all = checked_bool("train_all", train_all)
        self.model_inputs = checked_bool("model_inputs", model_inputs)
        names = (*KNOWN, *ROLLOUT_KEYS, *_FIELDS, *_MADE)
        self.fields = own_fields(fields, names, self.vision)
        if self.fields and self.model_inputs:
            raise ValueError(
                "model_inputs=True passes on what a model reads, so "
                f"{', '.join(self.fields)} would be lost; take the Batch, and "
                "batch.model_inputs() for the model"
            )

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **changed_options(self))

    def plan(
        self, lengths: Sequence[int] | np.ndarray, patches: Patches | ImageLoad | None = None
    ) -> PackingPlan:
        """Which example goes where, from lengths alone: what calling the collator follows.

        ``patches``: of examples with images, see ``pack``.
        """
        return plan_of(lengths, self.packing, patches)

    def __call__(self, examples: Examples | PlannedExamples) -> B:
        if isinstance(examples, PlannedExamples):
            part = examples.part
            columns = self._read_part(part, examples.examples)
        else:
            columns = self._read(examples, rollouts=None)
            part = RankPlan.whole(self.plan(columns.lengths, self._images(columns)))
        batch = self._place(columns, part)
        if not self.model_inputs:
            return cast(B, batch)
        _refuse_weights(batch)
        return cast(B, batch.model_inputs())

    def _read(self, examples: Examples, *, rollouts: bool | None = False) -> ExampleColumns:
        columns = read_columns(
            examples,
            rollouts=rollouts,
            train_all=self.train_all,
            fields=self.fields,
            vision=self.vision,
        )
        if columns.are_rollouts:
            self._check_rollouts(columns)
        elif self.model_inputs and columns.target is None and not self.train_all:
            raise DataError(
                "example 0 has no loss target: transformers.Trainer and TRL remove a loss_mask "
                "column before the collator sees it; give labels (tokenize_chat with labels=True), "
                "or set remove_unused_columns=False, or pass train_all=True to train every token"
            )
        return columns

    def _check_rollouts(self, rollouts: ExampleColumns) -> None:
        if rollouts.images is not None and self.vision is None:
            raise unknown_images(f"example {min(rollouts.images.units)}")
        if self.train_all:
            raise ValueError(
                "train_all=True is for examples with input_ids; of a rollout its loss_mask says "
                "what is trained, so leave train_all out"
            )
        if self.model_inputs:
            raise ValueError(
                "model_inputs=True passes on labels alone, so the rewards of rollouts would be "
                "lost; take the Batch, and batch.model_inputs(labels=False) for the model"
            )
        capacity, max_tokens = self.packing.capacity, self.packing.max_tokens
        too_long = np.flatnonzero(rollouts.lengths > capacity)
        if len(too_long) and self.packing.overflow != "drop":
            i = int(too_long[0])
            raise DataError(
                f"example {i} is a rollout of {rollouts.lengths[i]} tokens, more "
                f"than the {capacity} that fit in a row with max_tokens={max_tokens}, and a "
                'rollout is never cut; raise max_tokens, or pass overflow="drop"'
            )

    def _read_part(self, part: RankPlan, examples: Examples) -> ExampleColumns:
        """Examples that a sampler or a stream has planned; none, if the rank has none."""
        self._check_part(part)
        if part.rank is None or part.indices:
            columns = self._read(examples)
        else:
            columns = ExampleColumns.of_none(self.fields, self.vision)
        part.check_lengths(columns.lengths)
        is_limited = part.plan.max_patches is not None or part.plan.num_ranks > 1
        if columns.images is not None and is_limited:
            part.check_patches(np.array([sum(of) for of in columns.images.patches], dtype=np.int64))
        return columns

    def _check_part(self, part: RankPlan) -> None:
        """That a sampler or a stream planned as this collator would."""
        plan, own = part.plan, self.packing
        given = {"max_tokens": plan.max_tokens, "align": plan.align, "ranks": plan.num_ranks}
        mine = {"max_tokens": own.max_tokens, "align": own.parallel.align, "ranks": own.num_ranks}
        if self.vision is not None:
            for name in ("max_patches", "dummy_image_tokens"):
                given[name], mine[name] = getattr(plan, name), getattr(own, name)
        if given != mine:
            raise ValueError(
                f"the batch was planned for {given}, the collator has {mine}; give "
                "PackedBatchSampler and PackedCollator the same: packing=collator.packing"
            )
        is_known = part.rank is None or part.num_loss_tokens is not None or part.num_parts == 1
        if self.normalize_loss and not self.model_inputs and not is_known:
            raise ValueError(
                "normalize_loss=True divides by the loss tokens of the whole batch, and this rank "
                f"reads one of its {part.num_parts} parts; pass num_loss_tokens="
                "dataset.num_loss_tokens to PackedBatchSampler, or normalize_loss=False here and "
                "the sum over the ranks to token_loss"
            )

    def _images(self, columns: ExampleColumns) -> ImageLoad | None:
        """What their images take; None without any."""
        images, packing = columns.images, self.packing
        if images is None or not images.units:
            return None
        load = image_load(images.patches, len(columns.input_ids), packing.cost)
        if packing.overflow != "truncate" or columns.are_rollouts:
            return load
        return load.with_cuts(*images.cuts(packing.capacity, packing.max_patches), packing.cost)

    def _place(self, columns: ExampleColumns, part: RankPlan) -> Batch:
        """The rows of the part."""
        plan, chosen, num_examples = part.plan, part.pieces, len(columns.input_ids)
        width = self.packing.capacity if self.fixed_width else plan.width
        if width > MAX_WIDTH:
            raise too_wide(width, f"lower max_tokens={plan.max_tokens}")
        pieces = Pieces(part.positions, plan.starts[chosen], plan.lengths[chosen], part.row_offsets)
        per_row = _per_row(columns.per_example, pieces)
        if part.needs_dummy_image.any():
            columns, pieces = columns.with_dummy_images(pieces, part.needs_dummy_image)
        placed = columns.place(pieces)
        num_trained = int(placed.num_trained.sum())
        part.check_loss_tokens(num_trained)
        if self.vision is not None:
            placed.counts["examples"] = (pieces.examples < num_examples).astype(np.int64)
        segments = packed(placed.counts, pieces.row_offsets, width=width, align=plan.align)
        made = made_of_images(self.vision)
        names = dict.fromkeys((*_FIELDS, *made, *columns.names, "sub_seq_lengths", "cu_seq_lens"))
        return assemble(
            placed,
            Placement(width, width - 1, self.pad_token_id, True, segments, self.vision),
            tuple(names),
            normalize_loss=self.normalize_loss,
            num_loss_tokens_elsewhere=part.num_loss_tokens_elsewhere(num_trained),
            row_metadata={
                "example_indices": Ragged(plan.example_indices[chosen], part.row_offsets),
                "max_segment_length": longest_segments(segments["starts"], width),
                **per_row,
            },
            metadata=self._metadata(part, part.num_examples or num_examples),
        )

    def _metadata(self, part: RankPlan, num_examples: int) -> dict[str, Any]:
        """Of the whole plan: what is lost, and what every rank has to compute."""
        plan, num_ranks = part.plan, part.world_size or self.packing.parallel.dp
        costs = plan.cost_per_rank.reshape(num_ranks, -1).sum(axis=1)
        metadata = {
            "num_examples": num_examples,
            "num_tokens": int(plan.lengths.sum()),
            "num_dummy_rows": plan.num_dummy_rows,
            "cost_per_rank": tuple(costs.tolist()),
        }
        if self.vision is not None:
            images = plan.vision_cost_per_rank.reshape(num_ranks, -1).sum(axis=1)
            metadata["vision_cost_per_rank"] = tuple(images.tolist())
            metadata["num_dummy_images"] = int(np.count_nonzero(plan.needs_dummy_image))
        return {
            **metadata,
            "num_dropped": len(plan.dropped),
            "num_cut": len(plan.cut),
            "dropped": tuple(plan.dropped.tolist()),
            "cut": tuple(plan.cut.tolist()),
        }


def _per_row(per_example: dict[str, list[Any]], pieces: Pieces) -> dict[str, Any]:
    """Values of the examples, in the order of their pieces, for each row."""
    rows = list(pairwise(pieces.row_offsets.tolist()))
    per_row = {}
    for name, values in per_example.items():
        in_order = [values[i] for i in pieces.examples.tolist()]
        per_row[name] = [PackedValues(in_order[start:stop]) for start, stop in rows]
    return per_row


def _refuse_weights(batch: Batch) -> None:
    """Labels say which tokens are trained, not how much."""
    weights = batch.column("loss_weights")
    if weights is not None and weights.is_floating_point():
        odd = weights[(weights != 0) & (weights != 1)]
        raise DataError(
            f"model_inputs=True passes on labels, no loss_mask, but a token has weight "
            f"{float(odd[0]):g}; give masks of 0 and 1, or take the Batch and token_loss"
        )


def changed_options(collator: PackedCollator[Any]) -> dict[str, Any]:
    """The options that are not the default, those of the packing first, as keywords."""
    settings = {**changed_settings(collator.packing), **changed_settings(collator)}
    return {name: value for name, value in settings.items() if name != "packing"}
