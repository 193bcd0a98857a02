"""Tokens, images, segments and trained tokens of the examples that a sampler plans."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.by_rows import Entries
from torch_collate_kit.loading.checks import Indices
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.fingerprints import digest_in_blocks
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.atoms import Atoms, Patches, checked_sizes
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.planner import fitted
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.trees import bare_lengths, is_shared


class ExampleSizes:
    """What a plan needs of each example; ``counts`` are None where unknown.

    ``lengths`` and ``counts`` (trained tokens) are int64 [N]. Lengths are read in place where they
    are int64 already, and of text alone nothing else is held: 1e8 take 0.8 GB for each column.
    """

    def __init__(
        self,
        examples: Any,
        collate: PackedCollator,
        num_loss_tokens: npt.ArrayLike | None,
        patches: Patches | None,
    ) -> None:
        self._examples, self._collate, self._packing = examples, collate, collate.packing
        self._is_wrapped = self._packing.strategy == "wrapped"
        self.num_firsts = int(collate.targets == "next_token")  # of a segment, never trained
        has_tokens = is_tokenized(examples)
        if has_tokens and (num_loss_tokens is not None or patches is not None):
            raise TypeError(
                "num_loss_tokens and patches are read from the TokenizedDataset; pass them only "
                "beside bare lengths"
            )
        if has_tokens:
            patches = None if collate.vision is None else examples.patches
        self._sizes, offsets, depths = sized(examples, self._packing)
        self._atoms, self.patches, self.image_costs_digest = None, None, None
        if offsets is not None or patches is not None:
            self._atoms = Atoms.of(self._sizes, offsets, self._packing, patches, depths=depths)
        if patches is not None:
            assert self._atoms is not None
            self.patches = self._atoms.patches.copy()
            self._atoms = replace(self._atoms, patches=self.patches)
            self.image_costs_digest = digest_in_blocks(self._atoms.vision_costs)
        self.lengths = (self._sizes if self._atoms is None else self._atoms.tokens).view()
        self.lengths.flags.writeable = False
        if not self._all_fit() and (self._packing.overflow == "raise" or self._atoms is not None):
            self._fitted()
        self.are_divisors = collate.normalize_loss or not has_tokens
        counts = self._counts_in(examples) if has_tokens else num_loss_tokens
        self.counts = self._checked_counts(counts)

    def _counts_in(self, examples: TokenizedDataset | Mixture) -> Indices | None:
        """Return the loss tokens of a dataset where they are known, or will be refused."""
        is_alone, targets = self._packing.parallel.dp == 1, self._collate.targets
        if targets is None:
            return None
        if not self.are_divisors and (is_alone or self._is_wrapped):
            return None
        has_cuts = not (self._is_wrapped or self._all_fit()) and len(self._fitted().cut) > 0
        if not self.are_divisors:  # then no example is refused here
            with suppress(TypeError, ValueError):
                return None if has_cuts else examples.count_loss_tokens(targets)
            return None
        counts = examples.count_loss_tokens(targets)
        is_unknown = self._is_wrapped and bool((counts != self.lengths - self.num_firsts).any())
        return None if is_alone and (has_cuts or is_unknown) else counts

    def _all_fit(self) -> bool:
        """Return whether no length has to be looked at again, nor arrays made of all of them."""
        return self._atoms is None and int(self.lengths.max(initial=0)) <= self._packing.capacity

    def _fitted(self) -> PackingPlan:
        """Return all examples as they fit in rows, one or a piece of one in each."""
        atoms = self._atoms
        return fitted(atoms or Atoms.of(self.lengths, None, self._packing), self._packing)

    def entries(self) -> Entries:
        """Return what an order by rows counts: examples, or with "split" their pieces."""
        if self._all_fit() or not len(self.lengths):  # an empty dataset is refused by the sampler
            return Entries(self.lengths)
        pieces = self._fitted()
        if not len(pieces.lengths):
            raise ValueError(
                f"all {len(self.lengths)} examples are longer than max_tokens="
                f"{self._packing.max_tokens} and dropped; raise max_tokens"
            )
        if self._packing.overflow != "split" or not len(pieces.cut):
            return Entries(self.lengths, self._atoms)
        offsets = running_sum(np.bincount(pieces.example_indices, minlength=len(self.lengths)))
        return Entries(pieces.lengths, pieces.atoms, offsets)

    def atoms(self, examples: Indices) -> Atoms:
        """Return what is planned of some examples, numbered from 0."""
        return Entries(self.lengths, self._atoms).planned(examples, self._packing)

    def _checked_counts(self, num_loss_tokens: npt.ArrayLike | None) -> Indices | None:
        """Return the loss tokens of every example, checked; None where none are needed."""
        lengths, packing, atoms = self.lengths, self._packing, self._atoms
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
        firsts = self.num_firsts * (1 if atoms is None else atoms.segments)
        wrong = (counts < 0) | (counts > lengths - firsts)
        if wrong.any():
            i = int(wrong.argmax())
            raise DataError(
                f"example {i} has num_loss_tokens={counts[i]} of {lengths[i]} tokens; at most all "
                "but the first (of each segment) are trained: pass dataset.num_loss_tokens"
            )
        if self._is_wrapped:
            untrained = np.flatnonzero(counts != lengths - self.num_firsts)
            if len(untrained):
                raise ValueError(
                    f"not all tokens of example {int(untrained[0])} are trained, and it is not "
                    'known which are in a piece that strategy="wrapped" cuts; collate with '
                    "normalize_loss=False and give token_loss the sum over the ranks"
                )
            return counts.astype(np.int64)
        cut = self._fitted().cut
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
        try:
            sizes, offsets, depths = sized(self._examples, packing)
            atoms = Atoms.of(sizes, offsets, packing, self.patches, depths=depths)
            pieces = fitted(atoms, packing)
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
        if (atoms := self._atoms) is not None and atoms.are_lists:
            counted["num_segments_digest"] = atoms.segments
            counted["segments_digest"] = self._sizes
            if with_trees:
                counted["trees_digest"] = atoms.cells if atoms.share else None
        digests = {
            name: None if numbers is None else digest_in_blocks(numbers)
            for name, numbers in counted.items()
        }
        return {"num_tokens": int(self.lengths.sum()), **digests}


def sized(examples: Any, packing: PackingOptions) -> tuple[Indices, Indices | None, Indices | None]:
    """Return the checked lengths, offsets and depths of a dataset, a Mixture or bare lengths.

    As ``Atoms.of`` takes them.
    """
    lengths, depths = examples, None
    if isinstance(examples, TokenizedDataset | Mixture):
        lengths = examples.lengths
    if packing.share_prefixes:
        if not is_tokenized(examples):
            raise bare_lengths(packing)
        shared = examples.shared_lengths
        if shared is not None and is_shared(packing, lengths.values, shared.values):
            depths = shared.values
    return *checked_sizes(lengths), depths


def is_tokenized(examples: Any) -> TypeGuard[TokenizedDataset | Mixture]:
    """Return whether trained tokens can be read from the examples."""
    if isinstance(examples, Mixture):
        return examples.is_tokenized
    return isinstance(examples, TokenizedDataset)
