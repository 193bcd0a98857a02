"""Packing over data-parallel ranks: every rank plans the whole batch and reads its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit._reprs import KindAndSize
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.sampler.checks import (
    Indices,
    checked_collator,
    checked_rank,
    damaged_state,
    is_same,
)
from torch_collate_kit.loading.sampler.epochs import NEW_RUN
from torch_collate_kit.loading.sampler.shuffled import Order, OrderedSampler
from torch_collate_kit.loading.sampler.states import digest_in_blocks
from torch_collate_kit.packing import PackingOptions, RankPlan, pack
from torch_collate_kit.packing.pieces import ImageLoad, Patches, cut_to_fit, image_load

__all__ = ["PackedBatchSampler"]


class PackedBatchSampler(OrderedSampler):
    """Batches whose rows are planned over all ranks, of which each rank reads only its own.

    Args:
        examples: a ``TokenizedDataset``, or the number of tokens of every example, ints [N].
        collate: the ``PackedCollator`` of the DataLoader, or a collator around one. Its ``packing``
            says how rows are filled, and for how many ranks (``packing.parallel.dp``).
        batch_size: examples of a step over all ranks.
        dp_rank: the rank whose rows are yielded.
        shuffle, seed, tail, order, allow_appended: as for ``PrefetchingSampler``; a kept tail may
            be of any size, since ranks without examples get rows of pads.
        num_loss_tokens: beside bare lengths, trained tokens of every example, ints [N]. With
            several ranks and ``normalize_loss=True`` the loss is divided by those of all ranks.
        patches: beside bare lengths, patches of images of every example, ints [N], or of each of
            its images, a Ragged or a list of lists (see :func:`~torch_collate_kit.packing.pack`).

    Every rank computes the same order and plan, without collectives, so all have equally many rows
    of one width. It yields a ``RankPlan``, which a ``TokenizedDataset`` passes on to the collator.
    With ``rows_multiple_of`` a state goes on with the same rows on any number of ranks that divides
    it; without it, with the same examples in each step, packed anew.

    Raises:
        TypeError, ValueError, DataError: an argument or a length is wrong. See docs/loading.md.

    >>> from torch_collate_kit import PackedCollator, ParallelLayout
    >>> collate = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(dp=2))
    >>> rows = [{"input_ids": [7] * n} for n in (3, 1, 4, 2)]
    >>> sampler = PackedBatchSampler(TokenizedDataset(rows), collate, batch_size=4, shuffle=False)
    >>> part = next(iter(sampler))
    >>> part.indices, part.plan.bins, part.num_loss_tokens
    ([1, 2], [[2, 1], [0, 3]], 6)
    """

    def __init__(
        self,
        examples: TokenizedDataset | npt.ArrayLike,
        collate: Any,
        *,
        batch_size: int,
        dp_rank: int = 0,
        shuffle: bool | str = True,
        seed: int = 0,
        tail: str = "keep",
        order: Order | None = None,
        allow_appended: bool = False,
        num_loss_tokens: npt.ArrayLike | None = None,
        patches: Patches | None = None,
    ) -> None:
        self._collate = checked_collator(collate)
        self._packing = self._collate.packing
        dp = self._packing.parallel.dp
        checked_rank(dp_rank, dp, "parallel.dp")
        is_dataset = isinstance(examples, TokenizedDataset)
        self._shown_examples = repr(KindAndSize(examples)) if is_dataset else None
        if is_dataset and (num_loss_tokens is not None or patches is not None):
            raise TypeError(
                "num_loss_tokens and patches are read from the TokenizedDataset; pass them only "
                "beside bare lengths"
            )
        self._read(examples, patches)
        if isinstance(examples, TokenizedDataset) and self._collate.normalize_loss:
            cut = cut_to_fit(self._lengths, self._packing, self._images).cut
            num_loss_tokens = None if dp == 1 and len(cut) else examples.num_loss_tokens
        self._counts = self._checked_counts(num_loss_tokens)
        super().__init__(
            examples if isinstance(examples, TokenizedDataset) else len(self._lengths),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            order=order,
            dp_rank=dp_rank,
            dp_size=dp,
            allow_appended=allow_appended,
        )

    def _read(self, examples: Any, patches: Patches | None) -> None:
        """Read lengths and patches; an example that does not fit is named before any batch."""
        if isinstance(examples, TokenizedDataset):
            patches = None if self._collate.vision is None else examples.patches
            examples = examples.lengths
        self._lengths = checked_lengths(examples).copy()
        self._images, self._image_costs_digest = None, None
        if patches is not None:
            images = image_load(patches, len(self._lengths), self._packing.cost)
            self._images = ImageLoad(images.patches.copy(), images.costs)
            self._image_costs_digest = digest_in_blocks(images.costs)
        if self._packing.overflow == "raise" or patches is not None:
            cut_to_fit(self._lengths, self._packing, self._images)

    def _checked_counts(self, num_loss_tokens: npt.ArrayLike | None) -> Indices | None:
        """Return the loss tokens of every example, checked; None where none are needed."""
        lengths, packing, images = self._lengths, self._packing, self._images
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
        wrong = (counts < 0) | (counts >= lengths)
        if wrong.any():
            i = int(wrong.argmax())
            raise DataError(
                f"example {i} has num_loss_tokens={counts[i]} of {lengths[i]} tokens; at most all "
                "but the first are trained: pass dataset.num_loss_tokens"
            )
        cut = cut_to_fit(lengths, packing, images).cut
        if len(cut):
            limit = packing.capacity - (packing.reserved if images else 0)
            raise ValueError(
                f"it is not known how many loss tokens are left of example {int(cut[0])}, cut to "
                f"{limit} tokens by overflow={packing.overflow!r}; cut it when tokenizing, or "
                "collate with normalize_loss=False and without num_loss_tokens="
            )
        return counts.astype(np.int64)

    def __repr__(self) -> str:
        given = {"patches": self._images and self._images.patches, "num_loss_tokens": self._counts}
        shown: dict[str, Any] = {k: KindAndSize(of) for k, of in given.items() if of is not None}
        examples = self._shown_examples
        if examples is None:
            examples = f"<{self.num_examples:,} lengths, {int(self._lengths.sum()):,} tokens>"
            return self._shown(f"{examples}, {self._collate!r}", **shown)
        return self._shown(f"{examples}, {self._collate!r}")

    @property
    def _least_examples(self) -> int:
        return 1  # rows are divided over the ranks, not examples

    def _pick(self, batch: Indices) -> RankPlan:
        packing, lengths = self._packing, self._lengths[batch]
        counts = None if self._counts is None else self._counts[batch]
        images = None if self._images is None else self._images.take(batch)
        plan, dp = pack(lengths, packing=packing, patches=images), packing.parallel.dp
        return RankPlan(plan, self._dp_rank, batch, lengths, counts, dp_size=dp)

    def _layout(self) -> dict[str, Any]:
        return {**self._packing.as_state(), "image_costs_digest": self._image_costs_digest}

    def _check_layout(self, layout: dict[str, Any]) -> None:
        try:
            before = _packing_of(layout)
        except (TypeError, ValueError, OverflowError) as error:
            raise damaged_state(f"a layout that no run can have had: {error}") from error
        now = self._packing  # what was too long then, and lost tokens, must lose the same ones now
        if before != now and self._lost(before) != self._lost(now):
            raise StateError(
                f"state is of max_tokens={before.max_tokens}, overflow={before.overflow!r}, this "
                f"sampler has max_tokens={now.max_tokens}, overflow={now.overflow!r}, which drops "
                f"or cuts other examples, so steps would not have what they had; {NEW_RUN}"
            )

    def _lost(self, packing: PackingOptions) -> tuple[int, list[int]]:
        """Return the number of tokens cut off, and the examples dropped."""
        if packing.overflow in ("raise", "split"):
            return 0, []
        try:
            pieces = cut_to_fit(self._lengths, packing, self._images)
        except DataError as error:
            raise StateError(f"state is of a packing that no run can have had: {error}") from error
        return pieces.num_cut_tokens, pieces.dropped.tolist()

    def _replans(self, before: Mapping[str, Any]) -> bool:
        other = {k for k, v in self._layout().items() if not is_same(v, before.get(k))}
        planned_for = before.get("rows_multiple_of") or before["dp"]
        return (
            other - {"dp", "rows_multiple_of"} != set() or planned_for != self._packing.row_multiple
        )

    def _rank_settings(self) -> dict[str, int]:
        return {"dp_rank": self._dp_rank} if self._dp_rank else {}

    def _fingerprint(self, num_examples: int) -> dict[str, Any]:
        counted = {
            "lengths_digest": self._lengths,
            "patches_digest": None if self._images is None else self._images.patches,
            "loss_tokens_digest": self._counts,
        }
        digests = {
            name: None if counts is None else digest_in_blocks(counts[:num_examples])
            for name, counts in counted.items()
        }
        known = super()._fingerprint(num_examples)
        return {"num_tokens": int(self._lengths[:num_examples].sum()), **digests, **known}


def _packing_of(layout: Mapping[str, Any]) -> PackingOptions:
    """Return the options of packing in a layout; TypeError, ValueError if no run can have them."""
    known = {key: value for key, value in layout.items() if key != "image_costs_digest"}
    packing = PackingOptions.from_state(known)
    if not is_same(packing.as_state(), known):
        raise ValueError(f"{known} is {packing.as_state()}")
    costs = layout["image_costs_digest"]
    if costs is not None and not isinstance(costs, str):
        raise ValueError(f"image_costs_digest={costs!r} is no digest")
    return packing
