"""Packing over data-parallel ranks: every rank plans the whole batch and reads its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import KindAndSize
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.orders import Mixture
from torch_collate_kit.loading.orders.checks import (
    NEW_RUN,
    Indices,
    Shuffle,
    Tail,
    checked_collator,
    is_same,
)
from torch_collate_kit.loading.orders.mixed_order import MixedOrder
from torch_collate_kit.loading.orders.order import Order, UserOrder
from torch_collate_kit.loading.ranks import rank_in
from torch_collate_kit.loading.sampler.budgets import Budget, ByExamples, Step, Windows
from torch_collate_kit.loading.sampler.by_rows import ByRows
from torch_collate_kit.loading.sampler.resuming import ResumingSampler
from torch_collate_kit.loading.sampler.sizes import ExampleSizes
from torch_collate_kit.loading.sampler.wrapped import ByTokens
from torch_collate_kit.packing import PackingOptions, RankPlan
from torch_collate_kit.packing.atoms import Patches
from torch_collate_kit.packing.planner import plan_rows
from torch_collate_kit.packing.rows import running_sum


class PackedBatchSampler(ResumingSampler):
    """Batches whose rows are planned over all ranks, of which each rank reads only its own.

    Args:
        examples: a ``TokenizedDataset``, a ``Mixture`` of them, or the number of tokens of every
            example, ints [N] (an int64 array is read in place: do not change it meanwhile).
        collate: the ``PackedCollator`` of the DataLoader, or a collator around one. Its ``packing``
            says how rows are filled, and for how many ranks (``packing.parallel.dp``).
        batch_size: examples of a step over all ranks.
        batch_rows: in place of ``batch_size``, the rows of a step over all ranks, a multiple of
            ``dp``: every step is full, and costs the same.
        window: by rows, the steps that are planned together.
        dp_rank: the rank whose rows are yielded; by default ``parallel.place`` of this process in
            ``torch.distributed`` when the sampler is made.
        shuffle, seed, tail, order, allow_appended: as for ``PrefetchingSampler``; a kept tail may
            be of any size, since ranks without examples get rows of pads.
        num_loss_tokens: beside bare lengths, trained tokens of every example, ints [N]. With
            several ranks and ``normalize_loss=True`` the loss is divided by those of all ranks.
            Of a dataset they are read; docs/loss.md says when batches have the whole step's.
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
        dp_rank: int | None = None,
        shuffle: Shuffle = True,
        seed: int = 0,
        tail: Tail = "keep",
        order: UserOrder | None = None,
        allow_appended: bool = False,
        num_loss_tokens: npt.ArrayLike | None = None,
        patches: Patches | None = None,
    ) -> None:
        self._collate = checked_collator(collate)
        self._packing = self._collate.packing
        self._is_wrapped = self._packing.strategy == "wrapped"
        parallel = self._packing.parallel
        dp_rank = rank_in(parallel, dp_rank)
        is_dataset = isinstance(examples, TokenizedDataset | Mixture)
        shown = examples if isinstance(examples, Mixture) else KindAndSize(examples)
        self._shown_examples = repr(shown) if is_dataset else None
        self._window = checked_int("window", window)
        self._group = self._packing.row_multiple
        num_global = self._checked_global(batch_size, batch_rows)
        self._sizes = ExampleSizes(examples, self._collate, num_loss_tokens, patches)
        self._entries = self._sizes.entries() if num_global[0] == "batch_rows" else None
        ordered: Any = examples if is_dataset else len(self._sizes.lengths)
        super().__init__(
            ordered,
            num_global=num_global,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            order=order,
            dp_rank=dp_rank,
            dp_size=parallel.dp,
            allow_appended=allow_appended,
        )
        self._num_ranks = parallel.dp * parallel.cp * parallel.tp

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

    def _piece_offsets(self) -> Indices | None:
        entries = self._entries
        if entries is None or entries.atoms is None or not entries.are_pieces:
            return None
        return running_sum(np.bincount(entries.atoms.examples, minlength=len(self._sizes.lengths)))

    def _entry_lengths(self) -> Indices:
        return self._sizes.lengths if self._entries is None else self._entries.lengths

    def _new_budget(self, order: Order) -> Budget:
        number, packing = self._num_global[1], self._packing
        if self._entries is None:
            return ByExamples(order, self._tail, number, least=1)  # rows are divided, not examples
        windows = Windows(number, self._window, self._group)
        if self._is_wrapped:
            return ByTokens(order, self._tail, self._sizes.lengths, packing, windows)
        return ByRows(order, self._tail, self._entries, packing, windows)

    def __repr__(self) -> str:
        sizes, examples = self._sizes, self._shown_examples
        given = {} if examples else {"patches": sizes.patches, "num_loss_tokens": sizes.counts}
        shown: dict[str, Any] = {k: KindAndSize(of) for k, of in given.items() if of is not None}
        lengths = f"<{self.num_examples:,} lengths, {int(sizes.lengths.sum()):,} tokens>"
        return self._shown(f"{examples or lengths}, {self._collate!r}", **shown)

    def _pick(self, step: Step) -> RankPlan:
        packing, batch, plan = self._packing, step.examples, step.plan
        sizes, dp = self._sizes, packing.parallel.dp
        lengths = sizes.lengths[batch]
        counts = None if sizes.counts is None else sizes.counts[batch]
        if plan is None:
            plan = plan_rows(sizes.atoms(batch), packing)
        if self._is_wrapped:
            counts = None
        part = RankPlan(plan, self._dp_rank, batch, lengths, counts, dp_size=dp)
        if not sizes.are_divisors:
            part.is_divisor = False
        if self._is_wrapped and sizes.counts is not None:  # all tokens are trained
            firsts = len(plan.lengths) if packing.isolate else plan.num_rows - plan.num_dummy_rows
            part.num_loss_tokens = int(plan.lengths.sum()) - firsts
        if isinstance(self._order, MixedOrder):
            mixture = self._order.mixture
            part.metadata = mixture.counts_in(mixture.source_of(batch), plan)
        return part

    def _layout(self) -> dict[str, Any]:
        if self._entries is not None:
            return {"dp": self._packing.parallel.dp}
        return {**self._packing.as_state(), "image_costs_digest": self._sizes.image_costs_digest}

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
            "image_costs_digest": self._sizes.image_costs_digest,
        }

    def _load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if self._entries is not None and isinstance(state, Mapping):
            group, rows = state.get("rows_multiple_of"), self._num_global[1]
            is_own = self._packing.rows_multiple_of is not None
            if not is_own and type(group) is int and group > 0 and rows % group == 0:
                self._group = group  # that of the first start
        return super()._load(state)

    def _check_layout(self, layout: dict[str, Any]) -> None:
        if self._entries is not None:
            return
        known = {key: of for key, of in layout.items() if key != "image_costs_digest"}
        before = PackingOptions.from_state(known)
        now = self._packing  # what was too long then, and lost tokens, must lose the same ones now
        if before != now and self._sizes.lost(before) != self._sizes.lost(now):
            was, has = (
                f"max_tokens={of.max_tokens}, overflow={of.overflow!r}"
                + (f", share_prefixes={of.share_prefixes!r}" if of.share_prefixes else "")
                for of in (before, now)
            )
            raise StateError(
                f"state is of {was}, this sampler has {has}, which drops or cuts other examples, "
                f"so steps would not have what they had; {NEW_RUN}"
            )

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
        own = self._sizes.fingerprint(num_examples, with_trees=self._entries is not None)
        return {**own, **super()._fingerprint(num_examples)}
