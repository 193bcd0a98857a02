"""Rows as a map-style dataset, for trainers with a sampler of their own."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from torch.utils.data import Dataset, Sampler

from torch_collate_kit._checks import KindAndSize, call_repr, checked_int
from torch_collate_kit.collators.packed import checked_collator
from torch_collate_kit.loading.checks import Indices, checked_word
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.fingerprints import digest_in_blocks
from torch_collate_kit.loading.example_sizes import is_tokenized, sized
from torch_collate_kit.loading.mixed_order import MixedOrder
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.loading.orders import seeded_generator
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.packing.atoms import NO_ATOMS, Atoms
from torch_collate_kit.packing.planner import fitted, plan_rows
from torch_collate_kit.packing.rank_plan import PlannedExamples, PlannedRow, RankPlan
from torch_collate_kit.packing.rows import Rows, running_sum
from torch_collate_kit.reading.columns import ROW_OF_DATASETS

_BLOCK = 2000  # examples planned together: more fill 0.5% better, with rows less alike in cost
_logger = logging.getLogger("torch_collate_kit.loading")


@dataclass(frozen=True)
class _Row(PlannedRow):
    source: PackedRows
    number: int

    @property
    def examples(self) -> list[int]:
        """The index in the dataset of the example of each piece."""
        first, stop = self.source.plan.row_offsets[self.number : self.number + 2]
        examples: list[int] = self.source.plan.example_indices[first:stop].tolist()
        return examples

    def __len__(self) -> int:
        return int(self.source.plan.row_tokens[self.number])

    def joined(self, rows: Sequence[PlannedRow]) -> PlannedExamples:
        own = [row for row in rows if isinstance(row, _Row) and row.source is self.source]
        if len(own) < len(rows):
            raise TypeError(
                "a batch of rows must be of one PackedRows; join the datasets in a Mixture before "
                "they are packed"
            )
        return self.source.planned([row.number for row in own])

    def __repr__(self) -> str:
        return f"<row {self.number} of {self.source!r}: {len(self.examples)} pieces>"


class PackedRows(Dataset[PlannedRow]):
    """Packed rows as a map-style dataset: a trainer's own sampler shuffles, divides and resumes.

    Args:
        examples: a ``TokenizedDataset``, or a ``Mixture`` of them.
        collate: the ``PackedCollator`` of the DataLoader, or its ``for_trainer()``, for one rank:
            the trainer divides the rows.
        seed: examples are shuffled by it before they are packed.

    Item i is a row, planned once; ``collate([rows[3], rows[8]])`` joins rows without planning
    again, and reads their examples then. Examples are planned in blocks of 2,000 and levelled, so
    that rows cost alike ("wrapped": all at once). Rows are the same in every epoch; their order is
    the trainer's. ``rows[3].examples`` are the indices of the examples in a row.

    Raises:
        TypeError, ValueError, DataError: an argument is wrong, or an example does not fit in a row.

    >>> from torch_collate_kit import PackedCollator
    >>> collate = PackedCollator(0, max_tokens=8)
    >>> dataset = TokenizedDataset([{"input_ids": [7] * n} for n in (3, 5, 4, 4, 6)])
    >>> rows = PackedRows(dataset, collate)
    >>> len(rows), collate([rows[0], rows[2]])["sub_seq_lengths"].tolist()
    (3, [[6], [4, 4]])
    """

    def __init__(
        self, examples: TokenizedDataset | Mixture, collate: Any, *, seed: int = 0
    ) -> None:
        self._examples, self._collate = examples, collate
        self._seed = checked_word("seed", seed)
        collator = checked_collator(collate)
        if not is_tokenized(examples):
            raise TypeError(
                "examples must be a TokenizedDataset or a Mixture of them, got "
                f"{KindAndSize(examples)!r}; wrap it: TokenizedDataset(examples)"
            )
        dp = collator.packing.parallel.dp
        if dp > 1:
            raise ValueError(
                f"the trainer divides rows over its ranks, so collate must be for one, not "
                f"parallel.dp={dp}; leave parallel out"
            )
        patches = None if collator.vision is None else examples.patches
        sizes, offsets, depths = sized(examples, collator.packing)
        atoms = Atoms.of(sizes, offsets, collator.packing, patches, depths=depths)
        lengths = atoms.tokens
        fitted(atoms, collator.packing)  # names an example that does not fit
        order = self._order(lengths)
        is_wrapped = collator.packing.strategy == "wrapped"  # a block ends with a row not full
        at_once = len(order) if is_wrapped else _BLOCK
        blocks = [order[start : start + at_once] for start in range(0, len(order), at_once)]
        plans = [plan_rows(atoms.alone(block), collator.packing) for block in blocks]
        self.plan = _joined(blocks, plans)
        if not len(self.plan.lengths):
            raise ValueError(f"all {len(lengths)} examples are dropped; raise max_tokens")
        lost = len(self.plan.dropped), len(self.plan.cut), self.plan.num_dropped_tokens
        if lost[2] or self.plan.num_cut_tokens:
            _logger.warning(
                "PackedRows: %d of %d examples are dropped with %d tokens, and %d are cut by %d",
                lost[0], len(lengths), lost[2], lost[1], self.plan.num_cut_tokens,
            )  # fmt: skip

    plan: PackingPlan
    """All rows; ``example_indices`` are those of the dataset."""

    def _order(self, lengths: Indices) -> Indices:
        examples = self._examples
        if isinstance(examples, TokenizedDataset):
            return seeded_generator(self._seed, 0).permutation(len(lengths))
        order = MixedOrder(examples, seed=self._seed, shuffle=True)
        return order.take(0, 0, order.size(0))

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, number: int) -> PlannedRow:
        frame = sys._getframe(1)
        is_sampler = isinstance(frame.f_locals.get("self"), Sampler)
        if is_sampler or frame.f_code.co_name == "_get_train_sampler":
            raise TypeError(
                "rows are not grouped by length: packed rows are full and cost alike; leave "
                "group_by_length (train_sampling_strategy) out"
            )
        number = checked_int("row", number, minimum=-len(self))
        if number >= len(self):
            raise IndexError(f"row {number} does not exist: there are {len(self)} rows")
        return _Row(self, number % len(self))

    def planned(self, numbers: Sequence[int]) -> PlannedExamples:
        """Return some rows as one planned batch, with their examples; a row may come twice."""
        plan = self.plan
        pieces = [np.arange(*plan.row_offsets[number : number + 2]) for number in numbers]
        offsets = running_sum(np.array([len(of_row) for of_row in pieces]))
        chosen = np.concatenate(pieces)
        rows = Rows(chosen, offsets).labels()
        size = len(self._examples)
        copies = rows * size + plan.example_indices[chosen]
        read, positions = np.unique(copies, return_inverse=True)
        examples = read % size
        part = replace(
            plan,
            atoms=replace(plan.atoms.take(chosen), examples=positions),
            row_offsets=offsets,
            left_out=NO_ATOMS,
            cut=np.flatnonzero(np.isin(examples, plan.cut)),
            num_cut_tokens=0,
        )

        def name(place: int) -> str:
            row = numbers[int(read[place] // size)]
            others = len(set(_Row(self, row).examples)) - 1
            return f"example {examples[place]} of the dataset (in row {row} with {others} others)"

        planned, of = RankPlan(part), self._examples
        if isinstance(of, Mixture):
            planned.metadata = of.counts_in(of.source_of(examples), part)
        return PlannedExamples(planned, of.__getitems__(examples), name)

    def fingerprint(self, num_rows: int | None = None) -> dict[str, Any]:
        """Return a fingerprint of the rows, or of the first so many: small JSON.

        That of the examples, how they are packed, and a digest of which pieces are in which row.
        """
        packing = checked_collator(self._collate).packing.as_state()
        plan, count = self.plan, len(self) if num_rows is None else num_rows
        offsets = plan.row_offsets[: count + 1]
        pieces = (of[: offsets[-1]] for of in (plan.example_indices, plan.starts, plan.lengths))
        digest = digest_in_blocks(np.concatenate([offsets, *pieces]))
        of_data = {"examples": self._examples.fingerprint(), "rows": digest}
        return {**of_data, "seed": self._seed, **packing}

    def to_datasets(self) -> Any:
        """Return the rows as a ``datasets.Dataset``, for trainers that accept nothing else.

        Its column ``input_ids`` has a text with the number of the row; reading it returns the row,
        as long as the format stays, and it cannot be saved. What ``datasets`` caches of it is found
        again for the same :meth:`fingerprint`. Needs the ``datasets`` package.
        """
        from datasets import Dataset as ArrowDataset

        names = [[f"{ROW_OF_DATASETS} {number}"] for number in range(len(self))]
        dataset = ArrowDataset.from_dict({"input_ids": names}).with_transform(_Read(rows=self))
        own = json.dumps(self.fingerprint(), sort_keys=True).encode()
        dataset._fingerprint = hashlib.sha256(own).hexdigest()[:16]
        return dataset

    def __repr__(self) -> str:
        seed = {"seed": self._seed} if self._seed else {}
        examples = self._examples
        shown = repr(examples if isinstance(examples, Mixture) else KindAndSize(examples))
        return call_repr(self, shown, repr(self._collate), **seed)


class _Read(dict[str, PackedRows]):
    """Transform of ``to_datasets``; a dict, so that ``save_to_disk``, which wants JSON, asks it."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows, names = self["rows"], batch["input_ids"]
        return {"input_ids": [rows[int(name.split()[-1])] for (name,) in names]}

    def items(self) -> NoReturn:
        raise TypeError(
            "rows.to_datasets() has numbers of rows and cannot be saved; save the examples, and "
            "make PackedRows of them again"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Read, ({"rows": self["rows"]},)


def _joined(blocks: list[Indices], plans: list[PackingPlan]) -> PackingPlan:
    """Return one plan of the rows of all blocks, of the examples of the dataset."""
    counts = np.concatenate([np.diff(plan.row_offsets) for plan in plans])
    return replace(
        plans[0],
        atoms=Atoms.joined([plan.atoms for plan in plans], blocks),
        row_offsets=running_sum(counts[counts > 0]),
        left_out=Atoms.joined([plan.left_out for plan in plans], blocks),
        cut=np.concatenate([block[plan.cut] for block, plan in zip(blocks, plans, strict=True)]),
        num_cut_tokens=sum(plan.num_cut_tokens for plan in plans),
    )
