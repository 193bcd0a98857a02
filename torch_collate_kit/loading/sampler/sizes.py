"""Tokens, images, segments and trained tokens of the examples that a sampler plans."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import computed_once
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.collators.packed_checks import refuse_parts
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.fingerprints import digest_in_blocks
from torch_collate_kit.loading.orders import Mixture
from torch_collate_kit.loading.orders.checks import Indices
from torch_collate_kit.loading.sampler.budgets import Step
from torch_collate_kit.loading.sampler.by_rows import Entries
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.pieces import Load, Patches, cut_to_fit
from torch_collate_kit.packing.planner import sizes_of
from torch_collate_kit.packing.rows import row_sums, running_sum
from torch_collate_kit.packing.segments import bare_lengths
from torch_collate_kit.packing.trees import is_shared
from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.runs import end_to_end

_EXAMPLES_AT_A_TIME = 256  # whose loss tokens are counted


class ExampleSizes:
    """What a plan needs of each example; ``load`` and ``counts`` are None where unknown.

    ``lengths`` and ``counts`` (trained tokens) are int64 [N], ``load`` is what examples hold
    besides tokens: images, and several segments. Lengths are read in place where they are int64
    already: a copy of 1e8 would take a second and 0.8 GB.
    """

    def __init__(
        self,
        examples: Any,
        collate: PackedCollator,
        num_loss_tokens: npt.ArrayLike | None,
        patches: Patches | None,
    ) -> None:
        self._collate, self._packing = collate, collate.packing
        self._is_wrapped = self._packing.strategy == "wrapped"
        if is_tokenized(examples) and (num_loss_tokens is not None or patches is not None):
            raise TypeError(
                "num_loss_tokens and patches are read from the TokenizedDataset; pass them only "
                "beside bare lengths"
            )
        self._read(examples, patches)
        self.are_divisors = collate.normalize_loss or not is_tokenized(examples)
        if is_tokenized(examples):
            num_loss_tokens = self._counts_in(examples)
        self.counts = self._checked_counts(num_loss_tokens)

    def _counts_in(self, examples: TokenizedDataset | Mixture) -> Indices | None:
        """Return the loss tokens of a dataset where they are known, or will be refused."""
        is_alone = self._packing.parallel.dp == 1
        if not self.are_divisors and (is_alone or self._is_wrapped or self._runs is not None):
            return None
        has_cuts = not (self._is_wrapped or self._runs is not None or self._all_fit()) and (
            len(cut_to_fit(self.lengths, self._packing, self.load).cut) > 0
        )
        if not self.are_divisors:  # then no example is refused here
            with suppress(TypeError, ValueError):
                return None if has_cuts else examples.num_loss_tokens
            return None
        counts = examples.num_loss_tokens
        is_unknown = self._is_wrapped and bool((counts != self.lengths - 1).any())
        return None if is_alone and (has_cuts or is_unknown) else counts

    def _read(self, examples: Any, patches: Patches | None) -> None:
        """Read lengths and patches; an example that does not fit is named before any batch."""
        if is_tokenized(examples):
            patches = None if self._collate.vision is None else examples.patches
        self._examples = examples
        lengths, load = sized(examples, self._packing, patches)
        self.lengths = lengths.view()
        self.lengths.flags.writeable = False
        self.load, self.patches, self.image_costs_digest = load, None, None
        if patches is not None:
            assert load is not None
            self.patches = load.patches.copy()
            self.load = load._replace(patches=self.patches)
            self.image_costs_digest = digest_in_blocks(load.costs)
        self._segments = None if load is None else load.segments
        self._runs = None if load is None else load.runs
        check_parts(examples, self._collate, load)
        is_checked = self._packing.overflow == "raise" or self.load is not None
        if not self._all_fit() and is_checked:
            cut_to_fit(self.lengths, self._packing, self.load)

    def _all_fit(self) -> bool:
        """Return whether no length has to be looked at again, nor arrays made of all of them."""
        return self.load is None and int(self.lengths.max(initial=0)) <= self._packing.capacity

    def entries(self) -> Entries:
        """Return what an order by rows counts: examples, or with "split" their pieces."""
        if self._all_fit() or not len(self.lengths):  # an empty dataset is refused by the sampler
            return Entries(self.lengths)
        pieces = cut_to_fit(self.lengths, self._packing, self.load)
        if not len(pieces.lengths):
            raise ValueError(
                f"all {len(self.lengths)} examples are longer than max_tokens="
                f"{self._packing.max_tokens} and dropped; raise max_tokens"
            )
        if self._packing.overflow != "split" or not len(pieces.cut):
            return Entries(self.lengths, self.load)
        load = None
        if self.load is not None:
            load = Load(pieces.patches, pieces.vision_costs, segments=pieces.runs)
        counts = np.bincount(pieces.example_indices, minlength=len(self.lengths))
        offsets = running_sum(counts)
        return Entries(pieces.lengths, load, pieces.example_indices, pieces.starts, offsets)

    def counts_of(self, step: Step) -> Indices | None:
        """Return the loss tokens of the examples of a step, or of their pieces: int64."""
        if self.counts is None or self._runs is None or step.entries is None:
            return None if self.counts is None else self.counts[step.examples]
        return self._counts_of_runs[step.entries]

    @computed_once
    def _counts_of_runs(self) -> Indices:
        """int64 [P], loss tokens of the runs of all examples, which are cut between segments."""
        runs, counts = self._runs, self.counts
        assert runs is not None, "counted where examples are cut between segments"
        assert counts is not None, "counted where the loss is normalized"
        of_runs = np.diff(runs.offsets)
        found, cut = counts.repeat(of_runs), np.flatnonzero(of_runs > 1)
        for start in range(0, len(cut), _EXAMPLES_AT_A_TIME):
            block = cut[start : start + _EXAMPLES_AT_A_TIME]
            columns = read_columns(
                self._examples.__getitems__(block), train_all=self._collate.train_all
            )
            of_segments = columns.num_loss_tokens(per_segment=True)
            places = span_indices(runs.offsets[block], of_runs[block])
            bounds = running_sum(runs.segments.counts[places])
            found[places] = row_sums(of_segments, bounds)
        return found

    def _checked_counts(self, num_loss_tokens: npt.ArrayLike | None) -> Indices | None:
        """Return the loss tokens of every example, checked; None where none are needed."""
        lengths, packing, load = self.lengths, self._packing, self.load
        if num_loss_tokens is None:
            if packing.parallel.dp > 1 and self._collate.normalize_loss:
                raise ValueError(
                    "normalize_loss=True divides by the loss tokens of all ranks, which bare "
                    "lengths do not tell; pass a TokenizedDataset, or num_loss_tokens=, or collate "
                    "with normalize_loss=False and give token_loss the sum over the ranks"
                )
            return None
        counts = np.asarray(num_loss_tokens)
        if counts.shape != lengths.shape or counts.dtype.kind not in "iu":
            raise ValueError(
                f"num_loss_tokens must be one int for each of the {len(lengths)} examples, got "
                f"shape {counts.shape}, dtype {counts.dtype}; pass dataset.num_loss_tokens"
            )
        firsts = 1 if self._segments is None else self._segments.counts
        wrong = (counts < 0) | (counts > lengths - firsts)
        if wrong.any():
            i = int(wrong.argmax())
            raise DataError(
                f"example {i} has num_loss_tokens={counts[i]} of {lengths[i]} tokens; at most all "
                "but the first (of each segment) are trained: pass dataset.num_loss_tokens"
            )
        if self._is_wrapped:
            untrained = np.flatnonzero(counts != lengths - 1)
            if len(untrained):
                raise ValueError(
                    f"not all tokens of example {int(untrained[0])} are trained, and it is not "
                    'known which are in a piece that strategy="wrapped" cuts; collate with '
                    "normalize_loss=False and give token_loss the sum over the ranks"
                )
            return counts.astype(np.int64)
        if self._runs is not None:  # segments stay whole
            return counts.astype(np.int64)
        cut = cut_to_fit(lengths, packing, load).cut
        if len(cut):
            limit = packing.capacity - (packing.reserved if self.patches is not None else 0)
            raise ValueError(
                f"it is not known how many loss tokens are left of example {int(cut[0])}, cut to "
                f"{limit} tokens by overflow={packing.overflow!r}; cut it when tokenizing, or "
                "collate with normalize_loss=False and without num_loss_tokens="
            )
        return counts.astype(np.int64)

    def lost(self, packing: PackingOptions) -> tuple[int, list[int]]:
        """Return the number of tokens cut off, and the examples dropped."""
        if packing.overflow in ("raise", "split"):
            return 0, []
        load = self.load
        try:
            if load is not None and self._segments is not None and packing != self._packing:
                others = sized(self._examples, packing, None)[1]
                load = load._replace(segments=None if others is None else others.segments)
            pieces = cut_to_fit(self.lengths, packing, load)
        except ValueError as error:
            raise StateError(f"state is of a packing that no run can have had: {error}") from error
        return pieces.num_cut_tokens, pieces.dropped.tolist()

    def fingerprint(self, *, with_trees: bool) -> dict[str, Any]:
        """Return digests of the sizes of all examples, as JSON; ``with_trees`` of their cells."""
        counted = {
            "lengths_digest": self.lengths,
            "patches_digest": self.patches,
            "loss_tokens_digest": self.counts if self.are_divisors else None,
        }
        if self._segments is not None:
            counted["num_segments_digest"] = self._segments.counts
            counted["segments_digest"] = self._segments.lengths
            if with_trees:
                of, runs = self._segments, self._runs
                counted["trees_digest"] = of.cells if of.shares else None
                counted["runs_digest"] = None if runs is None else runs.lengths
        digests = {
            name: None if numbers is None else digest_in_blocks(numbers)
            for name, numbers in counted.items()
        }
        return {"num_tokens": int(self.lengths.sum()), **digests}


def sized(
    examples: Any, packing: PackingOptions, patches: Patches | None
) -> tuple[Indices, Load | None]:
    """Return what a plan needs of a dataset, a Mixture or bare lengths, as ``sizes_of`` does."""
    lengths, depths = examples, None
    if isinstance(examples, TokenizedDataset | Mixture):
        lengths = examples.lengths
    if packing.share_prefixes:
        if not is_tokenized(examples):
            raise bare_lengths(packing)
        shared = examples.shared_lengths
        if shared is not None and is_shared(packing, lengths.values, shared.values):
            depths = shared.values

    def ids_of(example: int) -> tuple[np.ndarray, Indices]:
        return end_to_end(examples[example]["input_ids"])

    return sizes_of(lengths, packing, patches, depths=depths, ids_of=ids_of)


def check_parts(examples: Any, collate: PackedCollator, load: Load | None) -> None:
    """Refuse lists of segments that must not be parted, before any batch."""
    if load is not None and load.segments is not None and is_tokenized(examples):
        sources = examples.sources if isinstance(examples, Mixture) else [examples]
        names = {name for source in sources for name in source.column_names}
        refuse_parts(collate.packing, collate.fields, names)


def is_tokenized(examples: Any) -> TypeGuard[TokenizedDataset | Mixture]:
    """Return whether trained tokens can be read from the examples."""
    if isinstance(examples, Mixture):
        return examples.is_tokenized
    return isinstance(examples, TokenizedDataset)
