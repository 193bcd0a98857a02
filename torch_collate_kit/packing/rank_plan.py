"""The share of one rank in a plan: the examples that it reads, and the rows that they fill."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import plural, type_name
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.packing.atoms import NO_INTS, Atoms
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints, Pieces, row_sums, running_sum


@dataclass(eq=False, repr=False, init=False)
class RankPlan:
    """The plan of a batch, and the examples that one rank reads for it.

    ``PackedBatchSampler`` yields it in place of the list of indices that a DataLoader passes to a
    dataset's ``__getitems__``. A ``TokenizedDataset`` understands it. Your own dataset does with

        def __getitems__(self, indices):
            return indices.with_examples([self[i] for i in indices.indices])

    and then ``PackedCollator`` follows the plan. It cannot be iterated, or a dataset without
    support for plans would return the examples alone, and each rank would pack its own.
    ``indices``, ``lengths`` and ``num_loss_tokens`` are int64 [E], of all examples of the batch;
    ``dp_size`` divides ``plan.rows_multiple_of``, and is that by default.

    >>> from torch_collate_kit import ParallelLayout, pack
    >>> lengths = np.array([5, 3, 9, 2])  # of examples 40, 41, 42 and 43 of a dataset
    >>> plan = pack(lengths, 10, parallel=ParallelLayout(dp=2))
    >>> part = RankPlan(plan, 0, np.arange(40, 44), lengths)
    >>> part.indices, part.lengths.tolist()
    ([40, 41, 43], [5, 3, 2])
    """

    plan: PackingPlan
    """The plan of the whole batch."""
    dp_rank: int | None
    """The rank whose rows are collated; None for those of all ranks."""
    dp_size: int | None
    """Number of ranks that divide the rows; None where the rows of all ranks are collated."""
    rows: range
    """The rows of the plan that are collated."""
    numbers: Ints
    """int64 [S], the number in the plan of each piece in these rows."""
    pieces: Pieces
    """The pieces in these rows; ``pieces.examples`` are positions among the examples read."""
    indices: list[int]
    """The dataset indices that the rank reads; none for all ranks, whose examples are at hand."""
    lengths: Ints
    """int64 [len(indices)], the number of tokens that the plan assumes for each of them."""
    num_examples: int
    """Number of examples in the batch, over all ranks; 0 for as many as are at hand."""
    num_loss_tokens: int | None = None
    """Number of loss tokens in the batch, over all ranks; None if unknown."""
    own_num_loss_tokens: int | None = None
    """Number of loss tokens in the examples that the rank reads; None if unknown."""
    is_divisor: bool = True
    """Whether a loss is divided by these numbers, so that other examples are refused."""
    metadata: dict[str, Any] | None = None
    """Metadata of the whole batch besides that of the plan."""
    epoch: int | None = None
    """The epoch of the sampler, so that a dataset may draw anew in each; None without a sampler."""

    def __init__(
        self,
        plan: PackingPlan,
        dp_rank: int | None = None,
        indices: Ints = NO_INTS,
        lengths: Ints = NO_INTS,
        num_loss_tokens: Ints | None = None,
        *,
        dp_size: int | None = None,
    ) -> None:
        self.plan, self.dp_rank, self.dp_size = plan, dp_rank, dp_size
        self.rows, self.num_examples = range(len(plan.row_offsets) - 1), len(indices)
        if dp_rank is not None:
            self.dp_size = dp_size or plan.rows_multiple_of
            each = plan.rows_multiple_of // self.dp_size  # ranks of the plan, whose rows follow
            first, last = plan.rank_rows(dp_rank * each), plan.rank_rows((dp_rank + 1) * each - 1)
            self.rows = range(first.start, last.stop)
        offsets = plan.row_offsets[self.rows.start : self.rows.stop + 1]
        chosen = slice(int(offsets[0]), int(offsets[-1]))
        self.numbers = np.arange(chosen.start, chosen.stop)
        examples = positions = plan.atoms.examples[chosen]
        self.indices, self.lengths = [], lengths[:0]
        if dp_rank is not None:
            examples, positions = np.unique(examples, return_inverse=True)
            self.indices, self.lengths = indices[examples].tolist(), lengths[examples]
        starts, tokens = plan.atoms.starts[chosen], plan.atoms.tokens[chosen]
        self.pieces = Pieces(positions, starts, tokens, offsets - offsets[0])
        if num_loss_tokens is not None:
            self.num_loss_tokens = int(np.delete(num_loss_tokens, plan.left_out.examples).sum())
            self.own_num_loss_tokens = int(num_loss_tokens[examples].sum())

    def without(self, positions: Sequence[int]) -> RankPlan:
        """Return the same rows without the examples at ``positions`` of ``indices``.

        The width stays, the rest of a row moves up, and a row may be left without a piece. Other
        ranks are not informed, so batch-wide counts stay as planned.

        Raises:
            IndexError: a position that is not of ``indices``.

        >>> from torch_collate_kit import pack
        >>> lengths = np.array([3, 2, 4])
        >>> part = RankPlan(pack(lengths, max_tokens=5), 0, np.arange(10, 13), lengths)
        >>> part.without([1]).indices, len(part.without([1]).rows)
        ([10, 12], 2)
        """
        is_read = np.ones(len(self.indices), dtype=bool)
        is_read[[int(position) for position in positions]] = False
        examples, starts, lengths, offsets = self.pieces
        is_kept = is_read[examples]
        shorter = copy.copy(self)
        shorter.indices = np.array(self.indices, dtype=np.int64)[is_read].tolist()
        shorter.lengths, shorter.numbers = self.lengths[is_read], self.numbers[is_kept]
        shorter.pieces = Pieces(
            running_sum(is_read)[examples[is_kept]],
            starts[is_kept],
            lengths[is_kept],
            running_sum(is_kept)[offsets],
        )
        shorter.own_num_loss_tokens = None
        return shorter

    @property
    def atoms(self) -> Atoms:
        """The atoms of these rows, with the numbers of examples in the batch."""
        return self.plan.atoms.take(self.numbers)

    @property
    def needs_dummy_image(self) -> npt.NDArray[np.bool_]:
        """[rows] rows that need a dummy image, as planned or since they lost their images: bool.

        The latter in a plan for several ranks, whatever ``dp_size`` is: rows do not depend on it.
        """
        rows = slice(self.rows.start, self.rows.stop)
        needed = self.plan.needs_dummy_image[rows]
        first, stop = self.plan.row_offsets[[rows.start, rows.stop]]
        if self.plan.rows_multiple_of == 1 or len(self.numbers) == stop - first:
            return needed
        row_patches = row_sums(self.atoms.patches, self.pieces.row_offsets)
        return needed | ((self.plan.row_patches[rows] > 0) & (row_patches == 0))

    @property
    def patches(self) -> Ints:
        """int64 [len(indices)], the patches of images planned for each example that is read."""
        return self._patches_of(len(self.indices))

    def _patches_of(self, num_examples: int) -> Ints:
        patches = np.zeros(num_examples, dtype=np.int64)
        np.add.at(patches, self.pieces.examples, self.atoms.patches)
        return patches

    def check_lengths(self, lengths: Ints, *, are_lists: bool = False) -> None:
        """Check that the examples read have the planned lengths.

        ``are_lists``: they are lists of segments.
        """
        if self.dp_rank is None:
            self._check_whole(lengths)
        else:
            self._check_own(lengths)
        if len(self.numbers) and are_lists != self.plan.atoms.are_lists:
            one, several = "one segment", "a list of segments"
            found, planned = (several, one) if are_lists else (one, several)
            raise self._other_segments(int(self.pieces.examples.min()), found, planned)

    def _check_own(self, lengths: Ints) -> None:
        if len(lengths) != len(self.indices):
            raise DataError(
                f"the batch has {len(lengths)} examples where {len(self.indices)} were asked for; "
                "a dataset's __getitems__ must return one per index, in their order"
            )
        wrong = np.flatnonzero(lengths != self.lengths)
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"{self._name(i)} has {lengths[i]} tokens, the sampler "
                f"has {self.lengths[i]}; its lengths must be those of the dataset that is read: "
                "pass dataset.lengths"
            )

    def _check_whole(self, lengths: Ints) -> None:
        """Check the lengths of all examples in the plan, dropped ones included."""
        plan = self.plan
        numbered = np.append(plan.atoms.examples, plan.left_out.examples)
        num_planned = int(numbered.max(initial=-1)) + 1
        if len(lengths) != num_planned:
            raise DataError(
                f"there are {len(lengths)} examples, and the plan was made for {num_planned}; "
                "pass all that were planned, in their order, and no others"
            )
        ends = np.zeros_like(lengths)
        np.maximum.at(ends, plan.atoms.examples, plan.atoms.starts + plan.atoms.tokens)
        beyond = np.flatnonzero(ends > lengths)
        if len(beyond):
            i = int(beyond[0])
            raise DataError(
                f"example {i} has {lengths[i]} tokens, the plan reads {ends[i]} of it; an "
                "example must stay as it was when it was planned"
            )

    def check_segments(self, cells: Ints, counts: Ints) -> None:
        """Check the cells and segments of each piece in these rows, int64 [S]."""
        planned_cells, planned_counts = self.atoms.cells, self.atoms.segments
        is_other = (planned_cells != cells) | (planned_counts != counts)
        if is_other.any():
            piece = int(is_other.argmax())
            found, planned = (
                f"a list of {plural(int(number[piece]), 'segment')} in {cells_S[piece]} cells"
                for number, cells_S in ((counts, cells), (planned_counts, planned_cells))
            )
            raise self._other_segments(int(self.pieces.examples[piece]), found, planned)

    def _name(self, i: int) -> str:
        is_known = i < len(self.indices)
        return f"example {self.indices[i]} of the dataset" if is_known else f"example {i}"

    def _other_segments(self, i: int, found: str, planned: str) -> DataError:
        return DataError(
            f"{self._name(i)} is {found}, the plan was made for {planned}; pass the sampler the "
            "dataset that is read, or its lengths"
        )

    def check_patches(self, patches: Ints) -> None:
        """Check that the examples read have the planned patches of images, int64."""
        planned = self._patches_of(len(patches))
        if self.dp_rank is None:
            cut = np.isin(np.arange(len(patches)), [*self.plan.cut, *self.plan.left_out.examples])
            planned = np.where(cut, patches, planned)
        wrong = np.flatnonzero(patches != planned)
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"{self._name(i)} has {patches[i]} patches of images, the plan was made for "
                f"{planned[i]}; pass the sampler patches= of the dataset that is read"
            )

    def num_loss_tokens_elsewhere(self, found: int) -> int:
        """Return the loss tokens of other ranks, after a check of those ``found`` here; or 0."""
        if self.own_num_loss_tokens not in (None, found):
            if not self.is_divisor:
                return 0
            raise DataError(
                f"the examples at {self.indices} of the dataset have {found} loss "
                f"tokens, the sampler has {self.own_num_loss_tokens}; its num_loss_tokens must "
                "be those of the dataset that is read: pass dataset.num_loss_tokens"
            )
        return 0 if self.num_loss_tokens is None else self.num_loss_tokens - found

    def with_examples(self, examples: Any) -> PlannedExamples:
        """Return the plan with the examples at ``indices``, a list or columns, for a collator."""
        return PlannedExamples(self, examples)

    def __repr__(self) -> str:
        rank = "all ranks" if self.dp_rank is None else f"rank {self.dp_rank} of {self.dp_size}"
        return f"RankPlan({rank}: {len(self.indices)} examples of {self.plan!r})"

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError(
            "PackedBatchSampler yields plans, and this dataset takes a list of indices; wrap it: "
            "TokenizedDataset(dataset), or give it a __getitems__ as RankPlan's docstring shows"
        )


@dataclass(frozen=True)
class PlannedExamples:
    """Examples for ``PackedCollator``, and the plan that it follows."""

    plan: RankPlan | PackingPlan
    """The share of one rank in a batch, or the whole."""
    examples: Any
    """A list or columns: the examples at ``plan.indices`` in that order; for a whole batch, all
    that the plan numbers."""
    name: Callable[[int], str] | None = None
    """Returns what an error calls an example, from its place; by default its index in the dataset,
    or of a whole batch its place."""

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse what torch's own collate function does first."""
        raise TypeError(
            "a planned batch is not a list of examples; pass the DataLoader the collate_fn that "
            "the sampler was made with: DataLoader(data, batch_sampler=PackedBatchSampler(data, "
            "collate, ...), collate_fn=collate)"
        )

    @property
    def part(self) -> RankPlan:
        """The plan, as the share of one rank or as all of it."""
        return RankPlan(self.plan) if isinstance(self.plan, PackingPlan) else self.plan


def named_in_errors(examples: Any) -> AbstractContextManager[None]:
    """Name examples in a DataError as ``PlannedExamples.name`` does."""
    if not isinstance(examples, PlannedExamples):
        return examples_named(None)
    return examples_named(examples.name or examples.part._name)


class PlannedRow(ABC):
    """A planned row of a dataset of rows, whose examples are read when it is collated."""

    @abstractmethod
    def joined(self, rows: Sequence[PlannedRow]) -> PlannedExamples:
        """Return rows of this dataset, this one included, as one batch with its examples."""


def joined_rows(examples: Any) -> Any:
    """Return a list of planned rows, or of dicts with one as ``input_ids``, as one planned batch.

    Anything else is returned as it is. TypeError for plans that lost their examples.
    """
    is_list = isinstance(examples, list | tuple) and len(examples) > 0
    given = examples[0] if is_list else examples
    if isinstance(given, RankPlan) or (is_list and isinstance(given, PlannedExamples)):
        raise TypeError(
            f"the collator got {'a list with ' * is_list}{type_name(given)}, not the examples of "
            "one plan: a tool between PackedBatchSampler, dataset and collator divides or joins "
            "batches; turn that off, or pass it a PrefetchLoader"
        )
    if not is_list:
        return examples
    rows = examples
    if isinstance(examples[0], Mapping):
        if not isinstance(examples[0].get("input_ids"), PlannedRow):
            return examples
        rows = [example["input_ids"] for example in examples]
    return rows[0].joined(rows) if isinstance(rows[0], PlannedRow) else examples


class SourceName(str):
    """The name of a source, which a ``Mixture`` has added to an example."""


class MixedExamples(list[Any]):
    """Examples as a ``Mixture`` reads them: a list, with the source of each.

    >>> mixed = MixedExamples([{"input_ids": [5, 6]}, {"input_ids": [7]}], ["web", "math"], [1, 0])
    >>> counts_by_source(mixed, np.arange(2), np.array([2, 1]))["source_tokens"]
    {'web': 1, 'math': 2}
    """

    def __init__(
        self, examples: Iterable[Any], names: Sequence[str], sources: Sequence[int] | Ints
    ) -> None:
        super().__init__(examples)
        self.names, self.sources = names, np.asarray(sources, dtype=np.int64)


def counts_by_source(examples: Any, numbers: Ints, lengths: Ints) -> dict[str, dict[str, int]]:
    """Return metadata: the examples and tokens of each source; none unless they are mixed.

    ``numbers`` and ``lengths``, int64 [S], are the example and the tokens of each piece of a batch.
    """
    if not isinstance(examples, MixedExamples):
        return {}
    return source_counts(examples.names, examples.sources, numbers, lengths)


def source_counts(
    names: Sequence[str], sources: Ints, numbers: Ints, lengths: Ints
) -> dict[str, dict[str, int]]:
    """Return metadata: the examples and tokens of each source in pieces of a batch, by name.

    ``sources``, int64 [E], are those of the examples that ``numbers`` count.
    """
    of_examples, of_pieces = sources[np.unique(numbers)], sources[numbers]
    examples = np.bincount(of_examples, minlength=len(names)).tolist()
    tokens = np.bincount(of_pieces, lengths, minlength=len(names)).astype(np.int64).tolist()
    return {
        "source_examples": dict(zip(names, examples, strict=True)),
        "source_tokens": dict(zip(names, tokens, strict=True)),
    }
