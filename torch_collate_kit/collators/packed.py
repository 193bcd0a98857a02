"""Several examples per row: hardly any padding, and no example sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from torch_collate_kit._checks import call_repr, changed_settings, checked_bool
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.fields import PackedValues, PerToken
from torch_collate_kit.batch.placement import (
    MAX_WIDTH,
    Placement,
    TargetKind,
    longest_segments,
    packed,
    too_wide,
)
from torch_collate_kit.collators.collator import Collator, ForTrainer, check_options, check_targets
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions, PackingPlan, RankPlan
from torch_collate_kit.packing.atoms import Atoms, Patches, image_sizes
from torch_collate_kit.packing.options import Overflow, ParallelLayout, Strategy, common_options
from torch_collate_kit.packing.planner import Cuts, pack, plan_rows
from torch_collate_kit.packing.rank_plan import (
    PlannedExamples,
    counts_by_source,
    joined_rows,
    named_in_errors,
)
from torch_collate_kit.packing.rows import row_sums, running_sum
from torch_collate_kit.packing.trees import is_shared
from torch_collate_kit.ragged import Ragged, take_spans, unchecked
from torch_collate_kit.reading.entries import DeclaredFields, joined
from torch_collate_kit.reading.examples import ExampleColumns, RowColumns
from torch_collate_kit.reading.keys import KNOWN, ROLLOUT_KEYS, unknown_images
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import Examples
from torch_collate_kit.vision import VisionLayout

_FIELDS = ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask")
_MADE = (
    "response_mask",
    "rollout_logprobs",
    "router_padding_mask",
    "sub_seq_lengths",
    "cu_seq_lens",
)


class PackedCollator(Collator, ForTrainer):
    """Collate examples, or rollouts, into rows that hold several of them, isolated from each other.

    Args:
        tokenizer: an int pad id, or anything with ``pad_token_id``; the processor of a
            vision-language model.
        max_tokens: the most cells of a row.
        strategy: how rows are filled: "balanced" (default), "best_fit_decreasing",
            "first_fit_decreasing", "sequential" or "wrapped"; see :func:`~torch_collate_kit.pack`.
        overflow: what to do with an example longer than a row: "raise" (default), "truncate",
            "drop" or "split"; of lists of segments "raise" or "drop".
        parallel: the :class:`~torch_collate_kit.ParallelLayout` of the run; one device by default.
        max_patches: the most image patches of a row; no limit by default.
        isolate: False makes one segment of a row, as in pretraining; needs "wrapped".
        share_prefixes: let segments of an example share the cells of what they begin with; "auto"
            where that saves at least 13% of the cells. See docs/guide/trees.md.
        packing: a :class:`~torch_collate_kit.PackingOptions` in place of the seven options above.
        fixed_width: make every batch ``max_tokens`` wide, not as wide as its fullest row.
        normalize_loss: divide ``loss_mask`` by the batch's number of loss tokens.
        train_all: train every token of examples that have no loss target.
        targets: what labels are of: "next_token", as causal models are trained; "same_token", for
            token classification and masked language models: ``labels`` stay at their tokens, one
            per token, -100 for none; None: no token is trained, declare labels as ``PerExample``.
        fields: columns to read beside the known ones: a dict of names to PerToken,
            PerResponseToken or PerExample.
        vision: how images become tokens: ``VisionLayout.of(processor, model.config)``. By default
            that of ``tokenizer``, if it is a processor that only one ``model_type`` has.

    Calling it with a list of examples or a mapping of columns returns a new
    :class:`~torch_collate_kit.Batch`. Inputs are copied. docs/contract.md lists its fields.

    Raises:
        DataError: an example is wrong, or too long with ``overflow="raise"``.
        ValueError, TypeError: an option is wrong.

    >>> batch = PackedCollator(0, max_tokens=6)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_tokens: int | None = None,
        strategy: Strategy | None = None,
        overflow: Overflow | None = None,
        parallel: ParallelLayout | None = None,
        max_patches: int | None = None,
        isolate: bool | None = None,
        share_prefixes: bool | Literal["auto"] | None = None,
        packing: PackingOptions | None = None,
        fixed_width: bool = False,
        normalize_loss: bool = True,
        train_all: bool = False,
        fields: DeclaredFields | None = None,
        vision: VisionLayout | None = None,
        targets: TargetKind = "next_token",
    ) -> None:
        names = (*KNOWN, *ROLLOUT_KEYS, *_FIELDS, *_MADE)
        super().__init__(tokenizer, normalize_loss, fields, vision, names, targets)
        self.packing = common_options(
            packing,
            max_tokens=max_tokens,
            strategy=strategy,
            overflow=overflow,
            parallel=parallel,
            max_patches=max_patches,
            isolate=isolate,
            share_prefixes=share_prefixes,
        )
        if self.packing.strategy is None:
            self.packing = replace(self.packing, strategy="balanced")
        self.eos_token_id = None
        if self.packing.strategy == "wrapped":
            self.eos_token_id = _eos_token_id_of(tokenizer)
        if self.vision is not None:
            if self.packing.share_prefixes:
                raise ValueError(
                    "share_prefixes is for text: equal placeholders of images may stand for "
                    "different pixels; leave it out"
                )
            _refuse_unpacked(self.vision)
            if not self.packing.dummy_image_tokens:
                tokens = self.vision.smallest_tokens
                self.packing = replace(self.packing, dummy_image_tokens=tokens)
        self.fixed_width = checked_bool("fixed_width", fixed_width)
        self.train_all = checked_bool("train_all", train_all)
        check_options(targets, train_all=train_all, packing=self.packing)

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **self.changed_options())

    def plan(
        self, lengths: Sequence[int] | np.ndarray, patches: Patches | None = None
    ) -> PackingPlan:
        """Plan rows from lengths alone, as a call of the collator does.

        ``patches``: of examples with images, as in :func:`~torch_collate_kit.pack`.
        """
        return pack(lengths, packing=self.packing, patches=patches)

    def __call__(self, examples: Examples | PlannedExamples) -> Batch:
        """Collate the examples into a new Batch."""
        return self.make_batch(examples)

    def make_batch(self, examples: Any, *, for_trainer: bool = False) -> Batch:
        """Return the Batch of the examples; for ``transformers.Trainer`` with its checks."""
        examples = joined_rows(examples)
        with named_in_errors(examples):
            return self._made(examples, for_trainer=for_trainer)

    def _made(self, examples: Any, *, for_trainer: bool) -> Batch:
        if isinstance(examples, PlannedExamples):
            part = examples.part
            self._check_part(part, normalize_loss=self.normalize_loss and not for_trainer)
            columns = self._read_part(part, examples.examples)
        else:
            columns = self._read(examples, rollouts=None)
            patches, cuts = self._patches(columns)
            atoms = _atoms_of(columns, self.packing, patches)
            part = RankPlan(plan := plan_rows(atoms, self.packing, cuts))
            part.metadata = counts_by_source(examples, plan.atoms.examples, plan.atoms.tokens)
        if for_trainer:
            check_targets(columns, self.train_all)
        return self._place(columns, part)

    def _read(self, examples: Examples, *, rollouts: bool | None = False) -> ExampleColumns:
        columns = read_columns(examples, rollouts=rollouts, **self.reading)
        if columns.are_rollouts:
            if self.targets != "next_token":
                raise ValueError(
                    f"targets={self.targets!r} is for examples with input_ids; rollouts train the "
                    "next tokens that loss_mask marks: remove targets"
                )
            _check_rollouts(columns, self.packing, has_vision=self.vision is not None)
            if self.train_all:
                raise ValueError(
                    "train_all=True is for examples with input_ids; rollouts mark trained tokens "
                    "with loss_mask; remove train_all"
                )
        if self.eos_token_id is not None:
            _check_ends(columns, self.eos_token_id)
        return columns

    def _read_part(self, part: RankPlan, examples: Examples) -> ExampleColumns:
        """Read examples that a sampler or a stream has planned; none if the rank has none."""
        if part.dp_rank is None or part.indices:
            columns = self._read(examples)
        else:
            none = ExampleColumns.of_none(self.fields, self.vision)
            columns = replace(none, targets=self.targets)
        _check_planned(columns, part, self.packing)
        is_limited = part.plan.packing.max_patches is not None or part.plan.rows_multiple_of > 1
        if columns.images is not None and is_limited:
            part.check_patches(
                np.array([sum(numbers) for numbers in columns.patches()], dtype=np.int64)
            )
        return columns

    def _check_part(self, part: RankPlan, *, normalize_loss: bool) -> None:
        """Refuse a plan that was made with another collator."""
        plan, own = part.plan, self.packing
        layout = plan.packing.parallel
        given: dict[str, Any] = {"max_tokens": plan.max_tokens, "align": layout.align}
        mine: dict[str, Any] = {"max_tokens": own.max_tokens, "align": own.parallel.align}
        if layout.row_align != layout.align or own.parallel.fp8:
            given["row_align"], mine["row_align"] = layout.row_align, own.parallel.row_align
        is_by_rows = plan.rows_multiple_of == own.parallel.dp
        multiple = own.parallel.dp if is_by_rows else own.row_multiple
        given["rows_multiple_of"], mine["rows_multiple_of"] = plan.rows_multiple_of, multiple
        if self.vision is not None:
            for name in ("max_patches", "dummy_image_tokens"):
                given[name], mine[name] = getattr(plan.packing, name), getattr(own, name)
        if plan.atoms.are_lists and own.share_prefixes != "auto":
            given["share_prefixes"], mine["share_prefixes"] = plan.atoms.share, own.share_prefixes
        if given != mine:
            raise ValueError(
                f"the batch was planned for {given}, this collator has {mine}; give the sampler "
                "the collator of the DataLoader"
            )
        is_known = part.num_loss_tokens is not None and part.is_divisor
        if normalize_loss and not (is_known or part.dp_rank is None or part.dp_size == 1):
            raise ValueError(
                "the batch was planned with normalize_loss=False, this collator has True; give "
                "the sampler the collator of the DataLoader"
            )

    def _patches(self, columns: ExampleColumns) -> tuple[Patches | None, Cuts | None]:
        """Return the patches of images, None without one, and what truncation leaves."""
        packing, images = self.packing, columns.images
        if images is None or not images.units:
            return None, None
        is_whole = columns.are_rollouts or columns.segment_offsets is not None
        if packing.overflow != "truncate" or is_whole:
            return columns.patches(), None
        lengths, patches = images.cuts(packing.capacity, packing.max_patches)
        return columns.patches(), (lengths, *image_sizes(patches, len(lengths), packing.cost))

    def _place(self, columns: ExampleColumns, part: RankPlan) -> Batch:
        """Return the Batch of the rows of ``part``."""
        plan, pieces, num_examples = part.plan, part.pieces, len(columns.example_lengths)
        width = self._width(plan)
        if width > MAX_WIDTH:
            raise too_wide(width, f"lower max_tokens={plan.max_tokens}")
        per_row: dict[str, Any] = {}
        owned = [(columns.per_example, pieces)]
        if columns.per_segment:
            owned.append((columns.per_segment, columns.in_segments(pieces)))
        for named, owners in owned:
            rows = list(pairwise(owners.row_offsets.tolist()))
            for name, values in named.items():
                in_order = [values[i] for i in owners.examples.tolist()]
                per_row[name] = [PackedValues(in_order[start:stop]) for start, stop in rows]
        if self.vision is not None and part.needs_dummy_image.any():
            columns, pieces = columns.with_dummy_images(pieces, part.needs_dummy_image)
        indices = unchecked(plan.atoms.examples[part.numbers], part.pieces.row_offsets)
        if plan.atoms.are_lists:
            pieces = columns.in_segments(pieces)
            per_piece = plan.atoms.segments[part.numbers]
            offsets = running_sum(per_piece)[indices.offsets]
            indices = unchecked(np.repeat(indices.values, per_piece), offsets)
            if columns.segment_offsets is None:
                per_row["segment_numbers"] = indices
        if not self.packing.isolate:
            per_row["document_indices"] = indices
            columns, pieces = columns.end_to_end(pieces)
            firsts = indices.values[indices.offsets[:-1][np.diff(indices.offsets) > 0]]
            indices = unchecked(firsts, pieces.row_offsets)
        placed = columns.place(pieces)
        if plan.atoms.share:
            first = _first_cells(plan.atoms.cells[part.numbers], part.pieces.row_offsets)
            first = np.repeat(first, per_piece)
            per_row["shared_lengths"] = _place_in_trees(placed, columns, first)
        if self.vision is not None:
            placed.counts["examples"] = (placed.examples < num_examples).astype(np.int64)
        names = [*_FIELDS, *self._of_images, *columns.names, "sub_seq_lengths"]
        tree_width, align = 0, plan.packing.parallel.align
        if plan.atoms.share:  # a row of tokens, and where they are in a row of cells
            per_row_tokens = row_sums(pieces.lengths, pieces.row_offsets)
            tree_width, width, align = width, max(1, int(per_row_tokens.max(initial=1))), 1
        else:
            names.append("cu_seq_lens")
        segments = packed(placed.counts, pieces.row_offsets, width=width, align=align)
        longest = longest_segments(segments["starts"], width)
        response_length = {"next_token": width - 1, "same_token": width, None: 0}[self.targets]
        where = (self.pad_token_id, True, segments, self.vision, tree_width)
        return self._batch(
            placed,
            Placement(width, response_length, *where, targets=self.targets),
            tuple(dict.fromkeys(names)),
            num_loss_tokens_elsewhere=part.num_loss_tokens_elsewhere(int(placed.num_trained.sum())),
            row_metadata={"example_indices": indices, "max_segment_length": longest, **per_row},
            metadata=self._metadata(part, part.num_examples or num_examples),
            dropped=plan.left_out.examples,
            cut=plan.cut,
        )

    def _width(self, plan: PackingPlan) -> int:
        row_align = plan.packing.parallel.row_align
        fixed = plan.max_tokens // row_align * row_align  # int32 may not count it
        return fixed if self.fixed_width else plan.width

    def _metadata(self, part: RankPlan, num_examples: int) -> dict[str, Any]:
        """Return batch metadata: tokens, cells and cost over all ranks."""
        plan, dp_size = part.plan, part.dp_size or self.packing.parallel.dp
        costs = plan.cost_per_rank.reshape(dp_size, -1).sum(axis=1)
        metadata = {
            "num_examples": num_examples,
            "step_num_tokens": int(plan.atoms.tokens.sum()),
            "step_num_cells": plan.num_rows * self._width(plan),
            "num_dummy_rows": plan.num_dummy_rows,
            "cost_per_rank": tuple(costs.tolist()),
        }
        most = plan.packing.max_sequences_per_row
        if most is not None and self.fixed_width and not plan.atoms.share:
            # and the pads at its end, and where there are images a dummy
            metadata["max_segments_per_row"] = most + 1 + (self.vision is not None)
        if self.vision is not None:
            images = plan.vision_cost_per_rank.reshape(dp_size, -1).sum(axis=1)
            metadata["vision_cost_per_rank"] = tuple(images.tolist())
            metadata["num_dummy_images"] = int(np.count_nonzero(plan.needs_dummy_image))
        if plan.atoms.are_lists:
            metadata["num_segments"] = tuple(_segments_per_example(plan).tolist())
            if plan.atoms.share:
                metadata["step_num_filled_cells"] = int(plan.atoms.cells.sum())
        return metadata | (part.metadata or {})

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, those of the packing first."""
        packing, own = self.packing, changed_settings(self)
        if self.vision is not None and packing.dummy_image_tokens == self.vision.smallest_tokens:
            packing = replace(packing, dummy_image_tokens=0)  # set by the collator itself
        if packing.strategy == "balanced":  # the collators' default
            packing = replace(packing, strategy=None)
        changed = changed_settings(packing)
        del own["packing"]
        common = {"max_tokens", "strategy", "overflow", "parallel", "max_patches", "isolate"}
        common.add("share_prefixes")
        return {**(changed if changed.keys() <= common else {"packing": packing}), **own}


def checked_collator(collate: Any) -> PackedCollator:
    """Return the PackedCollator that ``collate`` is, or that it holds and calls."""
    found = collate
    while not isinstance(found, PackedCollator):
        found = getattr(found, "collate", getattr(found, "collator", None))
        if found is None:
            raise TypeError(
                f"collate must be a PackedCollator, got a {type(collate).__name__}: it says how "
                "rows are packed; for batches without packing use a PrefetchingSampler"
            )
    return found


def _check_ends(columns: ExampleColumns, eos_token_id: int) -> None:
    """Check that every document ends with the end token, which separates it from the next."""
    if columns.are_rollouts:
        raise DataError('strategy="wrapped" joins documents with input_ids, not rollouts')
    ids = joined(columns.input_ids)
    without = np.flatnonzero(ids.values[ids.offsets[1:] - 1] != eos_token_id)
    if len(without):
        i = int(without[0])
        raise DataError(
            f"example {i} ends with token {int(ids.values[ids.offsets[i + 1] - 1])}, not with "
            f"the end token {eos_token_id} of the tokenizer, which parts documents with "
            f'strategy="wrapped" ({len(without)} of {len(ids)} examples); append it to every '
            "document, as chat.tokenize_documents does"
        )


def _check_rollouts(rollouts: ExampleColumns, packing: PackingOptions, *, has_vision: bool) -> None:
    """Check that rollouts fit in a row whole, and that cells have one image and one route."""
    if rollouts.images is not None and not has_vision:
        raise unknown_images(f"example {min(rollouts.images.units)}")
    if rollouts.segment_offsets is not None:
        counts = np.diff(rollouts.segment_offsets)
        is_shared = packing.share_prefixes and counts.max() > 1
        if is_shared and "router_padding_mask" in rollouts.names:
            raise DataError(
                f"example {counts.argmax()} has rollout_expert_indices in {counts.max()} segments, "
                "and with share_prefixes a cell of several tokens could follow one route only; "
                "leave out the routes, or share_prefixes"
            )
        return  # the planner compares all segments together with a row
    capacity, max_tokens = packing.capacity, packing.max_tokens
    too_long = np.flatnonzero(rollouts.lengths > capacity)
    if len(too_long) and packing.overflow != "drop":
        i = int(too_long[0])
        raise DataError(
            f"example {i} is a rollout of {rollouts.lengths[i]} tokens, more "
            f"than the {capacity} that fit in a row with max_tokens={max_tokens}, and a "
            'rollout is never cut; raise max_tokens, or pass overflow="drop"'
        )


def _eos_token_id_of(tokenizer: Any) -> int:
    """Return the end token of a tokenizer, which must have one."""
    found = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(found, int | np.integer):
        raise ValueError(
            f'strategy="wrapped" joins documents with the end token of the tokenizer, and '
            f"{type(tokenizer).__name__} has eos_token_id={found!r}; pass a tokenizer, no pad id"
        )
    return int(found)


def _refuse_unpacked(vision: VisionLayout) -> None:
    """Refuse models whose examples cannot be packed exactly, or whose family is ambiguous."""
    if vision.family.not_packed:
        raise ValueError(
            f"examples of {vision.family_name} models are not packed: "
            f"{vision.family.not_packed}; use PaddedCollator"
        )
    if vision.shared_by:
        raise ValueError(
            "rows are packed by the rules of one model, and the processor is that of several: "
            f"{', '.join(vision.shared_by)}; pass the model's config: "
            "vision=VisionLayout.of(processor, model.config), or config=model.config to "
            "VisionLanguageCollator (PaddedCollator needs none)"
        )


def _segments_per_example(plan: PackingPlan) -> np.ndarray:
    """Return the number of segments of each example, dropped ones included: int64 [N]."""
    examples = np.append(plan.atoms.examples, plan.left_out.examples)
    counts = np.zeros(int(examples.max(initial=-1)) + 1, dtype=np.int64)
    counts[examples] = np.append(plan.atoms.segments, plan.left_out.segments)
    return counts


def _atoms_of(columns: ExampleColumns, packing: PackingOptions, patches: Patches | None) -> Atoms:
    """Return the atoms of the examples."""
    depths, are_lists = None, columns.segment_offsets is not None
    if are_lists and packing.share_prefixes:
        found = columns.trees.depths
        depths = found if is_shared(packing, columns.lengths, found) else None
    return Atoms.of(columns.lengths, columns.segment_offsets, packing, patches, depths=depths)


def _check_planned(columns: ExampleColumns, part: RankPlan, packing: PackingOptions) -> None:
    """Check that the examples are those that were planned.

    Raises:
        DataError: they have other tokens, segments or prefixes.
    """
    if (offsets := columns.segment_offsets) is None:
        return part.check_lengths(columns.lengths)
    part.check_lengths(row_sums(columns.lengths, offsets), are_lists=True)
    depths = columns.trees.depths if part.plan.atoms.share else None
    found = Atoms.of(columns.lengths, offsets, packing, depths=depths).take(part.pieces.examples)
    part.check_segments(found.cells, found.segments)


def _first_cells(cells: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Return the first cell in its row of each tree, int64 [P]; ``cells`` are those of each."""
    before = running_sum(cells)
    return before[:-1] - np.repeat(before[row_offsets[:-1]], np.diff(row_offsets))


def _place_in_trees(placed: RowColumns, columns: ExampleColumns, first: np.ndarray) -> Ragged:
    """Add the cell of every token, and the cells of its own of every segment.

    ``first`` int64 [S] is the first cell in its row of the tree of each segment. Returns the tokens
    that each segment shares, those of each row.
    """
    trees, pieces = columns.trees, placed.pieces
    starts = joined(columns.input_ids).offsets[:-1][pieces.examples]
    cells = take_spans(trees.cells, starts, pieces.lengths)
    cells = cells + np.repeat(first.astype(np.int32), pieces.lengths)
    offsets = running_sum(pieces.lengths)[pieces.row_offsets]
    placed.columns["tree_cells"] = unchecked(torch.from_numpy(cells), offsets)
    placed.specs["tree_cells"] = PerToken(torch.int32)
    placed.counts["own"] = trees.own[pieces.examples]
    placed.counts["firsts"] = first + trees.firsts[pieces.examples]
    return unchecked(trees.depths[pieces.examples], pieces.row_offsets.copy())
