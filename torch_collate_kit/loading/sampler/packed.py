"""Packing over data-parallel ranks: every rank plans the whole batch and reads its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int, checked_lengths
from torch_collate_kit._reprs import KindAndSize
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.orders.checks import (
    Indices,
    checked_collator,
    checked_rank,
    damaged_state,
    is_count,
    is_same,
)
from torch_collate_kit.loading.orders.mixture import MixedOrder, Mixture
from torch_collate_kit.loading.orders.order import Order, ShuffledOrder, UserOrder
from torch_collate_kit.loading.orders.states import digest_in_blocks
from torch_collate_kit.loading.sampler.budgets import Budget, ByExamples, ByRows, Entries, Step
from torch_collate_kit.loading.sampler.epochs import NEW_RUN, EpochSampler
from torch_collate_kit.packing import PackingOptions, RankPlan, pack
from torch_collate_kit.packing.pieces import ImageLoad, Patches, cut_to_fit, image_load
from torch_collate_kit.packing.rows import running_sum

__all__ = ["PackedBatchSampler"]


class PackedBatchSampler(EpochSampler):
    """Batches whose rows are planned over all ranks, of which each rank reads only its own.

    Args:
        examples: a ``TokenizedDataset``, a ``Mixture`` of them, or the number of tokens of every
            example, ints [N].
        collate: the ``PackedCollator`` of the DataLoader, or a collator around one. Its ``packing``
            says how rows are filled, and for how many ranks (``packing.parallel.dp``).
        batch_size: examples of a step over all ranks.
        batch_rows: in place of ``batch_size``, the rows of a step over all ranks, a multiple of
            ``dp``: every step is full, and costs the same.
        window: by rows, the steps that are planned together.
        dp_rank: the rank whose rows are yielded.
        shuffle, seed, tail, order, allow_appended: as for ``PrefetchingSampler``; a kept tail may
            be of any size, since ranks without examples get rows of pads.
        num_loss_tokens: beside bare lengths, trained tokens of every example, ints [N]. With
            several ranks and ``normalize_loss=True`` the loss is divided by those of all ranks.
        patches: beside bare lengths, patches of images of every example, ints [N], or of each of
            its images, a Ragged or a list of lists (see :func:`~torch_collate_kit.packing.pack`).

    Every rank computes the same order and plan, without collectives, so all have equally many rows
    of one width. It yields a ``RankPlan``, which a ``TokenizedDataset`` passes on to the collator.
    By rows, or with ``rows_multiple_of``, a state goes on with the same rows on any number of ranks
    that divides them; by examples without it, with the same examples in each step, packed anew.

    By rows a window takes what comes next in the order, as long as its rows have 0.5% of their
    cells free. Its pieces are levelled over the rows. Groups of ``rows_multiple_of`` rows that cost
    alike (by default the number of ranks of the first start) are dealt to the steps: the rule, and
    how full and even steps are, is in docs/loading.md.

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
        examples: TokenizedDataset | Mixture | npt.ArrayLike,
        collate: Any,
        *,
        batch_size: int | None = None,
        batch_rows: int | None = None,
        window: int = 8,
        dp_rank: int = 0,
        shuffle: bool | str = True,
        seed: int = 0,
        tail: str = "keep",
        order: UserOrder | None = None,
        allow_appended: bool = False,
        num_loss_tokens: npt.ArrayLike | None = None,
        patches: Patches | None = None,
    ) -> None:
        self._collate = checked_collator(collate)
        self._packing = self._collate.packing
        dp = self._packing.parallel.dp
        checked_rank(dp_rank, dp, "parallel.dp")
        is_dataset = isinstance(examples, TokenizedDataset | Mixture)
        self._shown_examples = repr(KindAndSize(examples)) if is_dataset else None
        if isinstance(examples, Mixture):
            self._shown_examples = repr(examples)
        if _is_tokenized(examples) and (num_loss_tokens is not None or patches is not None):
            raise TypeError(
                "num_loss_tokens and patches are read from the TokenizedDataset; pass them only "
                "beside bare lengths"
            )
        self._window = checked_int("window", window)
        self._group = self._packing.row_multiple
        num_global = self._checked_global(batch_size, batch_rows)
        self._read(examples, patches)
        if self._collate.normalize_loss and _is_tokenized(examples):
            cut = cut_to_fit(self._lengths, self._packing, self._images).cut
            num_loss_tokens = None if dp == 1 and len(cut) else examples.num_loss_tokens
        self._counts = self._checked_counts(num_loss_tokens)
        self._entries = self._entries_by_rows() if num_global[0] == "batch_rows" else None
        super().__init__(
            examples if is_dataset else len(self._lengths),  # type: ignore[arg-type]
            num_global=num_global,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            order=order,
            dp_rank=dp_rank,
            dp_size=dp,
            allow_appended=allow_appended,
        )

    def _checked_global(self, batch_size: int | None, batch_rows: int | None) -> tuple[str, int]:
        """Return which of the two numbers is given, and it."""
        if (batch_size is None) == (batch_rows is None):
            raise TypeError(
                "pass one of batch_size, the examples of a step, and batch_rows, its rows; got "
                f"batch_size={batch_size!r}, batch_rows={batch_rows!r}"
            )
        if batch_rows is None:
            return "batch_size", checked_int("batch_size", batch_size)
        batch_rows = checked_int("batch_rows", batch_rows)
        for name, divisor in (
            ("parallel.dp", self._packing.parallel.dp),
            ("rows_multiple_of", self._group),
        ):
            if batch_rows % divisor:
                raise ValueError(
                    f"batch_rows must be a multiple of {name}={divisor}, got {batch_rows}; it "
                    "counts the rows of a step over all ranks"
                )
        return "batch_rows", batch_rows

    def _read(self, examples: Any, patches: Patches | None) -> None:
        """Read lengths and patches; an example that does not fit is named before any batch."""
        if isinstance(examples, TokenizedDataset | Mixture):
            if _is_tokenized(examples):
                patches = None if self._collate.vision is None else examples.patches
            examples = examples.lengths
        self._lengths = checked_lengths(examples).copy()
        self._images, self._image_costs_digest = None, None
        if patches is not None:
            images = image_load(patches, len(self._lengths), self._packing.cost)
            self._images = ImageLoad(images.patches.copy(), images.costs)
            self._image_costs_digest = digest_in_blocks(images.costs)
        if (self._packing.overflow == "raise" and not self._all_fit()) or patches is not None:
            cut_to_fit(self._lengths, self._packing, self._images)

    def _all_fit(self) -> bool:
        """Return whether no length has to be looked at again, nor arrays made of all of them."""
        return self._images is None and int(self._lengths.max(initial=0)) <= self._packing.capacity

    def _entries_by_rows(self) -> Entries:
        """Return what an order by rows counts: examples, or with "split" their pieces."""
        if len(self._lengths) and self._all_fit():
            return Entries(self._lengths)
        pieces = cut_to_fit(self._lengths, self._packing, self._images)
        if not len(pieces.lengths):
            raise ValueError(
                f"all {len(self._lengths)} examples are longer than max_tokens="
                f"{self._packing.max_tokens} and dropped; raise max_tokens"
            )
        if self._packing.overflow != "split" or not len(pieces.cut):
            return Entries(self._lengths, self._images)
        images = None if self._images is None else ImageLoad(pieces.patches, pieces.vision_costs)
        return Entries(pieces.lengths, images, pieces.example_indices, pieces.starts)

    def _piece_offsets(self) -> Indices | None:
        if self._entries is None or self._entries.examples is None:
            return None
        return running_sum(np.bincount(self._entries.examples, minlength=len(self._lengths)))

    def _new_order(self, examples: Any) -> ShuffledOrder | MixedOrder:
        order = super()._new_order(examples)
        if isinstance(order, MixedOrder):
            entries = Entries(self._lengths) if self._entries is None else self._entries
            return MixedOrder(
                examples,
                seed=self._seed,
                shuffle=self._shuffle,
                lengths=entries.lengths,
                offsets=self._piece_offsets(),
            )
        return order

    def _new_budget(self, order: Order) -> Budget:
        number = self._num_global[1]
        if self._entries is None:
            return ByExamples(order, self._tail, number, least=1)  # rows are divided, not examples
        return ByRows(
            order,
            self._tail,
            self._entries,
            self._packing,
            batch_rows=number,
            window=self._window,
            group=self._group,
        )

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

    def _pick(self, step: Step) -> RankPlan:
        packing, batch, plan = self._packing, step.examples, step.plan
        lengths, dp = self._lengths[batch], packing.parallel.dp
        counts = None if self._counts is None else self._counts[batch]
        if plan is None:
            images = None if self._images is None else self._images.take(batch)
            plan = pack(lengths, packing=packing, patches=images)
        return RankPlan(plan, self._dp_rank, batch, lengths, counts, dp_size=dp)

    def _layout(self) -> dict[str, Any]:
        if self._entries is not None:
            return {"dp": self._packing.parallel.dp}
        return {**self._packing.as_state(), "image_costs_digest": self._image_costs_digest}

    def _fits(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        fits = super()._fits(like)
        if self._entries is None:
            return fits
        packing = self._packing.as_state()
        del packing["dp"]
        packing |= {"rows_multiple_of": self._group, "reserved": self._packing.reserved}
        return {
            **fits,
            "window": self._window,
            **packing,
            "image_costs_digest": self._image_costs_digest,
        }

    def _load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if self._entries is not None and isinstance(state, Mapping):
            group, rows = state.get("rows_multiple_of"), self._num_global[1]
            is_own = self._packing.rows_multiple_of is not None
            if not is_own and is_count(group, rows) and group and rows % group == 0:
                self._group = group  # that of the first start
        return super()._load(state)

    def _check_layout(self, layout: dict[str, Any]) -> None:
        if self._entries is not None:
            if not is_count(layout["dp"]) or not layout["dp"]:
                raise damaged_state(f"layout={layout!r}")
            return
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
        if self._entries is not None:
            return False
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


def _is_tokenized(examples: Any) -> TypeGuard[TokenizedDataset | Mixture]:
    """Return whether trained tokens can be read from the examples."""
    if isinstance(examples, Mixture):
        return examples.is_tokenized
    return isinstance(examples, TokenizedDataset)


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
