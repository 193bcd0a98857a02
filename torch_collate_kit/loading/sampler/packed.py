"""Packing over data-parallel ranks: every rank plans the whole batch and reads its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit._reprs import KindAndSize, changed_settings
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.sampler.checks import Indices, checked_rank, is_same
from torch_collate_kit.loading.sampler.epochs import NEW_RUN
from torch_collate_kit.loading.sampler.shuffled import Order, OrderedSampler
from torch_collate_kit.loading.sampler.states import digest_in_blocks
from torch_collate_kit.packing import PackingOptions, RankPlan, pack
from torch_collate_kit.packing.options import packing_options
from torch_collate_kit.packing.pieces import ImageLoad, Patches, cut_to_fit, image_load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torch_collate_kit.packing.options import PackingKeywords

__all__ = ["PackedBatchSampler"]


class PackedBatchSampler(OrderedSampler):
    """Batches whose rows are planned over all ranks, of which each rank reads only its own.

    Args:
        lengths: tokens of every example, ints [N]: ``TokenizedDataset.lengths``.
        batch_size: examples of a step over all ranks.
        patches: patches of images of every example, ints [N], or of each of its images, a Ragged
            or a list of lists (see :func:`~torch_collate_kit.packing.pack`).
        max_tokens, packing, options: as for ``PackedCollator``, which must have the same.
        rank: of ``parallel.dp`` ranks.
        num_loss_tokens: trained tokens of every example, ints [N]; the loss is divided by those of
            the whole batch. Without them the collator needs ``normalize_loss=False``.
        shuffle, seed, drop_last, tail, order, allow_appended: as for ``PrefetchingSampler``; a kept
            tail may be of any size, since ranks without examples get rows of pads.

    Every rank computes the same order and plan, without collectives, so all have as many rows, of
    one width. It yields a ``RankPlan``, which a ``TokenizedDataset`` passes on to the collator.
    With ``rows_multiple_of`` a state goes on with the same rows on any number of ranks that divides
    it; without it, with the same examples in each step, packed anew.

    Raises:
        TypeError, ValueError, DataError: an argument or a length is wrong. See docs/loading.md.

    >>> from torch_collate_kit.packing import ParallelLayout
    >>> options = {"max_tokens": 8, "parallel": ParallelLayout(dp=2)}
    >>> sampler = PackedBatchSampler([3, 1, 4, 2], batch_size=4, shuffle=False, **options)
    >>> part = next(iter(sampler))
    >>> part.dp_rank, part.indices, part.plan.bins
    (0, [1, 2], [[2, 1], [0, 3]])
    """

    _ranks = "dp"

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        batch_size: int,
        patches: Patches | None = None,
        max_tokens: int | None = None,
        packing: PackingOptions | None = None,
        rank: int = 0,
        num_loss_tokens: npt.ArrayLike | None = None,
        shuffle: bool | str = True,
        seed: int = 0,
        drop_last: bool = False,
        tail: str = "keep",
        order: Order | None = None,
        allow_appended: bool = False,
        **options: Unpack[PackingKeywords],
    ) -> None:
        self._lengths = checked_lengths(lengths).copy()
        self._packing = packing_options(packing, max_tokens, options)
        dp = self._packing.parallel.dp
        checked_rank(rank, dp, "parallel.dp")
        self._images, self._image_costs_digest = None, None
        if patches is not None:
            images = image_load(patches, len(self._lengths), self._packing.cost)
            self._images = ImageLoad(images.patches.copy(), images.costs)
            self._image_costs_digest = digest_in_blocks(images.costs)
        if self._packing.overflow == "raise" or patches is not None:
            # Names an example that does not fit, before the first batch.
            cut_to_fit(self._lengths, self._packing, self._images)
        self._counts = None if num_loss_tokens is None else self._checked_counts(num_loss_tokens)
        super().__init__(
            len(self._lengths),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            tail=tail,
            order=order,
            rank=rank,
            world_size=dp,
            allow_appended=allow_appended,
        )

    def _checked_counts(self, num_loss_tokens: npt.ArrayLike) -> Indices:
        """Loss tokens of every example: at most all tokens but the first, and none cut off."""
        lengths, packing, images = self._lengths, self._packing, self._images
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
                f"num_loss_tokens cannot tell how many are left of example {int(cut[0])}, cut to "
                f"{limit} tokens by overflow={packing.overflow!r}; cut it when tokenizing, or "
                "leave num_loss_tokens out and collate with normalize_loss=False"
            )
        return counts.astype(np.int64)

    def __repr__(self) -> str:
        given = {"patches": self._images and self._images.patches, "num_loss_tokens": self._counts}
        settings: dict[str, Any] = {k: KindAndSize(of) for k, of in given.items() if of is not None}
        settings |= changed_settings(self._packing)
        lengths = f"<{self.num_examples:,} lengths, {int(self._lengths.sum()):,} tokens>"
        return self._shown(lengths, **settings)

    @property
    def _least_examples(self) -> int:
        return 1  # rows are divided over the ranks, not examples

    def _pick(self, batch: Indices) -> RankPlan:
        packing, lengths = self._packing, self._lengths[batch]
        counts = None if self._counts is None else self._counts[batch]
        images = None if self._images is None else self._images.take(batch)
        plan = pack(lengths, packing=packing, patches=images)
        return RankPlan(plan, self._rank, batch, lengths, counts, dp_size=packing.parallel.dp)

    def _layout(self) -> dict[str, Any]:
        return {**self._packing.as_state(), "image_costs_digest": self._image_costs_digest}

    def _use_layout(self, layout: Mapping[str, Any]) -> None:
        self._packing = _packing_of(layout)

    def _load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        layout = super()._load(state)
        self._layouts.check(_packing_of)
        self._check_same_tokens(_packing_of(layout))
        return layout

    def _check_same_tokens(self, before: PackingOptions) -> None:
        """That examples which were too long then, and lost tokens, lose the same ones now."""
        now = self._packing
        if before != now and self._lost(before) != self._lost(now):
            raise StateError(
                f"state is of max_tokens={before.max_tokens}, overflow={before.overflow!r}, this "
                f"sampler has max_tokens={now.max_tokens}, overflow={now.overflow!r}, which drops "
                f"or cuts other examples, so steps would not have what they had; {NEW_RUN}"
            )

    def _lost(self, packing: PackingOptions) -> tuple[int, list[int]]:
        """Tokens cut off, and the examples dropped."""
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

    def _counted(self) -> dict[str, Indices | None]:
        """By their names in a state, the counts that must be the same."""
        patches = None if self._images is None else self._images.patches
        return {
            "lengths_digest": self._lengths,
            "patches_digest": patches,
            "loss_tokens_digest": self._counts,
        }

    def _rank_settings(self) -> dict[str, int]:
        return {"rank": self._rank} if self._rank else {}

    def _fingerprint(self, num_examples: int) -> dict[str, Any]:
        digests = {
            name: None if counts is None else digest_in_blocks(counts[:num_examples])
            for name, counts in self._counted().items()
        }
        return {"num_tokens": int(self._lengths[:num_examples].sum()), **digests}


def _packing_of(layout: Mapping[str, Any]) -> PackingOptions:
    known = {key: value for key, value in layout.items() if key != "image_costs_digest"}
    packing = PackingOptions.from_state(known)
    if not is_same(packing.as_state(), known):
        raise ValueError(f"{known} is {packing.as_state()}")
    costs = layout["image_costs_digest"]
    if costs is not None and not isinstance(costs, str):
        raise ValueError(f"image_costs_digest={costs!r} is no digest")
    return packing
