"""One random chain of runs of a sampler: settings, the runs, and what is wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.building import packed_collator, packed_sampler
from tests.loading import chain_truth as truth
from torch_collate_kit import (
    Mixture,
    PaddedCollator,
    ParallelLayout,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
)

MIXED, BY_ROWS = ("mixed", "mixed rows"), ("full rows", "mixed rows")
KINDS = ("prefetching", "mixed", "packed", "rows", *BY_ROWS)
Position = tuple[int, int]


@dataclass
class Leg:
    """A run on some ranks, up to where it is stopped."""

    dp_size: int
    num_steps: int
    num_workers: int
    reshuffles: bool
    packing: dict[str, Any] = field(default_factory=dict)


@dataclass
class Chain:
    """What is the same in all its runs, and the runs."""

    kind: str
    behind_loader: bool
    order: dict[str, Any]
    legs: list[Leg]
    examples: truth.Examples
    mixture: dict[str, Any] | None
    multiple: int | None
    patches: list[int] | None
    counted: bool

    @property
    def is_packed(self) -> bool:
        return self.kind not in ("prefetching", "mixed")

    def on_one_rank(self) -> Chain:
        """The same rows, without a loader and without other ranks."""
        multiple = self.multiple
        if self.kind in BY_ROWS:
            multiple = multiple or self.legs[0].dp_size
        legs = [replace(leg, dp_size=1, num_workers=0) for leg in self.legs]
        return replace(self, legs=legs, multiple=multiple, behind_loader=False)

    def sampler(self, rank: int, leg: Leg, dp_size: int) -> Any:
        examples, order = self.examples, self.order
        lengths: Any = np.array([len(example["input_ids"]) for example in examples])
        if self.mixture is not None:
            cut = self.mixture["cut"]
            settings = {k: v for k, v in self.mixture.items() if k != "cut"}
            lengths = Mixture(np.split(lengths, [cut]), **settings)
        if not self.is_packed:
            data = lengths if self.mixture else len(examples)
            return PrefetchingSampler(data, dp_rank=rank, dp_size=dp_size, **order)
        counts = [truth.num_trained(example) for example in examples]
        return packed_sampler(
            lengths,
            dp_rank=rank,
            patches=self.patches,
            num_loss_tokens=counts if self.counted else None,
            **self.packing(leg, dp_size),
            **order,
        )

    def packing(self, leg: Leg, dp_size: int) -> dict[str, Any]:
        options = {**leg.packing, "rows_multiple_of": self.multiple}
        options["parallel"] = ParallelLayout(dp=dp_size, tp=options.pop("tp"))
        return options

    def collator(self, leg: Leg, dp_size: int) -> Any:
        if not self.is_packed:
            return PaddedCollator(0)
        return packed_collator(0, normalize_loss=self.counted, **self.packing(leg, dp_size))


def random_chain(rng: np.random.Generator, kind: str, *, with_workers: bool) -> Chain:
    """Settings and runs drawn by ``rng``."""
    multiple = truth.multiple_of(rng) if kind == "rows" else None
    tail = "wrap" if kind == "mixed" else str(rng.choice(["keep", "drop", "wrap"]))
    tail = "keep" if (kind, tail) == ("mixed rows", "drop") else tail  # an epoch may have no step
    num_examples, batch_size = int(rng.integers(20, 400)), truth.log_uniform(rng, 90)
    num_examples = max(num_examples, batch_size) if tail == "drop" else num_examples
    if kind in BY_ROWS:
        batch_size = int(rng.choice([1, 4, 6, 12, 24]))  # rows
        multiple = int(rng.choice(truth.divisors_up_to(batch_size, 64)))
        multiple = None if rng.random() < 0.5 else multiple
        num_examples = max(num_examples, 25 * batch_size) if tail == "drop" else num_examples
    sizes = _sizes(rng, kind, multiple, num_examples, batch_size, tail)
    if with_workers:
        sizes = [size for size in sizes if size <= 3] or [1]
    changes = kind not in MIXED and rng.random() < 0.4
    legs = [
        Leg(
            dp_size=int(rng.choice(sizes)),
            num_steps=int(rng.integers(0, 6)),
            num_workers=int(rng.integers(1, 3)) if with_workers else 0,
            reshuffles=bool(changes and rng.random() < 0.5),
        )
        for number in range(3)
    ]
    patched = kind in ("packed", "rows") and rng.random() < 0.2
    patches = rng.integers(0, 20, size=num_examples).tolist() if patched else None
    packings = _packings(rng, patches is not None, fixed=kind in BY_ROWS)
    for leg in legs:
        leg.packing = next(packings)
    return Chain(
        kind=kind,
        behind_loader=patches is None and (with_workers or rng.random() < 0.5),
        order=_order(rng, kind, batch_size, tail),
        legs=legs,
        examples=truth.examples_of(rng, num_examples, 30),
        mixture=_mixture(rng, num_examples) if kind in MIXED else None,
        multiple=multiple,
        patches=patches,
        counted=bool(rng.random() < 0.7),
    )


def _sizes(
    rng: np.random.Generator,
    kind: str,
    multiple: int | None,
    num_examples: int,
    batch_size: int,
    tail: str,
) -> list[int]:
    if kind in BY_ROWS:
        group = multiple or batch_size
        sizes = truth.divisors_up_to(batch_size, 64)
        return [size for size in sizes if size % group == 0 or group % size == 0]
    if multiple is not None:
        return truth.divisors_up_to(multiple, 64)
    most = 64
    if kind == "prefetching":
        rest = truth.smallest_tail(num_examples, batch_size) if tail == "keep" else batch_size
        most = min(64, rest)
    if kind == "mixed":
        most = min(64, batch_size)
    return [truth.log_uniform(rng, most) for _ in range(3)] + [most]


def _order(rng: np.random.Generator, kind: str, batch_size: int, tail: str) -> dict[str, Any]:
    shuffle = [True, True, False, "keyed"][int(rng.integers(4))]
    order: dict[str, Any] = {"tail": tail, "shuffle": shuffle, "seed": int(rng.integers(2**32))}
    if kind in BY_ROWS:
        return {**order, "batch_rows": batch_size, "window": int(rng.integers(1, 9))}
    order["batch_size"] = batch_size
    if kind != "mixed" and tail == "wrap" and rng.random() < 0.2:
        order["order"], order["shuffle"] = _curriculum, True
    return order


def _mixture(rng: np.random.Generator, num_examples: int) -> dict[str, Any]:
    """Settings of a mixture of two sources, the second from example ``cut`` on."""
    weights = [rng.integers(1, 9, size=2).tolist() for _ in range(3)]
    settings: dict[str, Any] = {"cut": int(rng.integers(1, num_examples)), "weights": weights[0]}
    settings["by"] = str(rng.choice(["examples", "tokens"]))
    settings["stop"] = str(rng.choice(["first_exhausted", "all_exhausted"]))
    if rng.random() < 0.4:
        steps = np.cumsum(rng.integers(1, 6, size=2)).tolist()
        settings["schedule"] = list(zip(steps, weights[1:], strict=True))
    if rng.random() < 0.4:
        settings["max_passes"] = [float(rng.choice([1, 1.5, 2.5])), None]
    return settings


def _curriculum(epoch: int, rng: np.random.Generator) -> Any:
    """Repeats, leaves out, and has another length each epoch."""
    return rng.integers(0, 20, size=[31, 4, 19, 6, 23][epoch % 5])


def _packings(rng: np.random.Generator, patched: bool, *, fixed: bool) -> Iterator[dict[str, Any]]:
    """Options of every run: the same ones, or one after the other."""
    changes = not fixed and rng.random() < 0.3
    packing: dict[str, Any] = {}
    while True:
        if changes or not packing:
            packing = {
                "max_tokens": int(rng.choice([32, 48, 64, 128])),
                "tp": int(rng.choice([1, 1, 2, 4])),
                "strategy": str(rng.choice(["best_fit_decreasing", "sequential", "balanced"])),
                "balance": [None, "attention", "tokens"][int(rng.integers(3))],
                "max_sequences_per_row": [None, 3][int(rng.integers(2))],
            }
            packing |= {"max_patches": int(rng.integers(20, 60))} if patched else {}
        yield packing


@dataclass
class Step:
    """What all ranks were given in a step; row by row if it was packed."""

    position: Position
    parts: list[list[int]]
    num_loss_tokens: int
    rows: list[Any]
    raw: list[Any]
    named: set[Any]


def position_after(at: Position | None, lengths: Callable[[int], int]) -> Position:
    """Where a run is after the step at ``at``."""
    if at is None:
        return 0, 0
    epoch, step = at
    return (epoch + 1, 0) if step + 1 == lengths(epoch) else (epoch, step + 1)


class Runner:
    """Runs the legs of a chain, or all of them unbroken on one rank."""

    def __init__(self, chain: Chain, *, unbroken: bool) -> None:
        self.chain, self.unbroken = chain, unbroken
        self.lengths: Callable[[int], int] = chain.sampler(0, chain.legs[0], 1).count_steps
        self.steps: list[Step] = []
        self.reshuffles: list[Position] = []
        self.states: list[str] = []
        self.last: Any = None  # a sampler of the last run
        self.running: Any = None
        self.wrong: Counter[str] = Counter()

    def run(self) -> None:
        state: str | None = None
        samplers: list[Any] = []
        for leg in self.chain.legs:
            self.dataset = TokenizedDataset(self.chain.examples)
            packed_as = self.chain.legs[0] if self.unbroken else leg
            dp_size = 1 if self.unbroken else leg.dp_size
            if not (self.unbroken and samplers):
                ranks = range(dp_size)
                samplers = [self.chain.sampler(rank, leg, dp_size) for rank in ranks]
            with ExitStack() as stack:
                sources = self._sources(stack, samplers, leg, dp_size)
                for source in sources if state and not self.unbroken else []:
                    source.load_state_dict(json.loads(state))
                self.lengths = samplers[0].count_steps
                self._serve(sources, samplers, leg, packed_as, dp_size)
                at = position_after(self.steps[-1].position if self.steps else None, self.lengths)
                if leg.reshuffles:
                    self._reshuffle(sources, at)
                state = self._state(sources, at, moved=bool(leg.num_steps))
            self.last = samplers[0]

    def _sources(self, stack: ExitStack, samplers: list[Any], leg: Leg, dp_size: int) -> list[Any]:
        if not self.chain.behind_loader or self.unbroken:
            return samplers
        collate = self.chain.collator(leg, dp_size)
        options: dict[str, Any] = {"collate_fn": collate, "num_workers": leg.num_workers}
        loaders = [DataLoader(self.dataset, batch_sampler=s, **options) for s in samplers]
        return [stack.enter_context(PrefetchLoader(loader)) for loader in loaders]

    def _serve(
        self, sources: list[Any], samplers: list[Any], leg: Leg, packed_as: Leg, dp_size: int
    ) -> None:
        if not leg.num_steps:
            return
        if sources is not samplers:
            raw = [list(loader.steps(leg.num_steps)) for loader in sources]
        else:
            raw = [self._drawn(sampler, leg.num_steps) for sampler in samplers]
        for parts in zip(*raw, strict=True):
            before = self.steps[-1].position if self.steps else None
            epoch, step = position_after(before, self.lengths)
            while step >= self.lengths(epoch):
                epoch, step = epoch + 1, 0
            self.steps.append(self._step((epoch, step), list(parts), packed_as, dp_size))

    def _step(self, at: Position, parts: list[Any], leg: Leg, dp_size: int) -> Step:
        if isinstance(parts[0], list):
            trained = [truth.num_trained(self.chain.examples[i]) for part in parts for i in part]
            return Step(at, parts, sum(trained), [], parts, {at})
        if self.chain.patches is not None:
            rows = [tuple(row) for row in parts[0].plan.bins]
            trained = [truth.num_trained(self.chain.examples[i]) for p in parts for i in p.indices]
            total = {part.num_loss_tokens for part in parts} - {None} or {sum(trained)}
            read = [list(part.indices) for part in parts]
            return Step(at, read, total.pop() if len(total) == 1 else -1, rows, parts, {at})
        batches, named = parts, {at}
        if hasattr(parts[0], "indices"):
            collate = self.chain.collator(leg, dp_size)
            batches = [collate(self.dataset.__getitems__(part)) for part in parts]
        else:
            named = {(b.metadata.get("epoch"), b.metadata.get("step")) for b in parts}
        counts = [batch.metadata["num_loss_tokens"] for batch in batches]
        total = sum(counts)
        if self.chain.is_packed and self.chain.counted:
            total = counts[0] if len(set(counts)) == 1 else -1
        rows = [row for batch in batches for row in truth.rows_of(batch)]
        read = [truth.decoded(batch) for batch in batches]
        return Step(at, read, total, rows if self.chain.is_packed else [], parts, named)

    def _reshuffle(self, sources: list[Any], at: Position) -> None:
        self.reshuffles.append(at)
        self.running = None
        for source in sources:
            if hasattr(source, "set_epoch") and not isinstance(source, PrefetchLoader):
                source.set_epoch(at[0], step=at[1])
            source.reshuffle()

    def _state(self, sources: list[Any], at: Position, *, moved: bool) -> str:
        states = {
            json.dumps(
                source.state_at(*at)
                if moved and hasattr(source, "state_at")
                else source.state_dict()
            )
            for source in sources
        }
        self.wrong["states of ranks differ"] += len(states) > 1
        state = states.pop()
        self.states.append(state)
        return state

    def _drawn(self, sampler: Any, num_steps: int) -> list[Any]:
        """The next batches. An unbroken run goes on with the iterator that it has."""
        found: list[Any] = []
        batches = self.running if self.running is not None else iter(sampler)
        while len(found) < num_steps:
            batch = next(batches, None)
            if batch is None:
                batches = iter(sampler)
            else:
                found.append(batch)
        if self.unbroken:
            self.running = batches
        return found
