"""One training stream: the same batches, to the byte, whatever builds them and wherever it stops.

The reference is a loop over plain lists. Every way to run it through the public API is compared
with it, by the digest of every batch, over three epochs that are reshuffled on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.loading.hang_guard import fails_when_it_hangs, our_threads
from tests.loading.sampler.sampler_oracle import epochs_of, flat
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.loading import (
    MixedSampler,
    PackedBatchSampler,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.packing import ParallelLayout, RankPlan
from torch_collate_kit.testing import assert_exact_resume, batch_digest

NUM_EXAMPLES, BATCH_SIZE, MAX_TOKENS, SEED = 22, 8, 12, 3  # a tail of 6: four ranks get 2, 2, 1, 1
TOKENS = [range(10 * i, 10 * i + 1 + i % 7) for i in range(NUM_EXAMPLES)]
EXAMPLES = [{"input_ids": [*ids], "loss_mask": [i % 3 / 2 for i in ids]} for ids in TOKENS]
DATASET = TokenizedDataset(EXAMPLES)
ORDER = {"batch_size": BATCH_SIZE, "seed": SEED}
RESHUFFLES = [(1, 1), (1, 2), (2, 1)]  # epoch, batches consumed
NUM_STEPS = {"keep": 3 + 3 + 3, "drop": 2 + 2 + 2, "wrap": 2 + 3 + 3}

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    with fails_when_it_hangs():
        yield
    assert our_threads() == []


class Case(NamedTuple):
    """One way to run the stream."""

    collator: str
    num_ranks: int
    tail: str
    source: str = "columns"
    prefetch: bool = True
    num_workers: int = 0


AXES = Case(
    collator=["padded", "packed"],
    num_ranks=[1, 2, 4],
    tail=["keep", "drop", "wrap"],
    source=["columns", "list"],
    prefetch=[True, False],
    num_workers=[0, 2],
)
EVERY = [Case(*values) for values in product(*AXES[:-1])]
# half of them, in which every three values of three axes still meet
WITHOUT_WORKERS = [case for i, case in enumerate(EVERY) if (i + i // 2 + i // 4) % 2 == 0]
WITH_WORKERS = [  # every two values of two axes meet
    Case("padded", 1, "keep", "columns", True, 2),
    Case("packed", 1, "drop", "list", False, 2),
    Case("packed", 1, "wrap", "columns", True, 2),
    Case("packed", 2, "keep", "list", False, 2),
    Case("padded", 2, "drop", "columns", True, 2),
    Case("padded", 2, "wrap", "list", False, 2),
    Case("packed", 4, "keep", "columns", True, 2),
    Case("padded", 4, "drop", "list", True, 2),
    Case("packed", 4, "wrap", "columns", False, 2),
]


# ---- the reference: a loop over plain lists ----


def collator_of(case: Case) -> Callable[[Any], Any]:
    if case.collator == "padded":  # ranks know nothing of each other's loss tokens
        return PaddedCollator(0, normalize_loss=case.num_ranks == 1)
    return PackedCollator(0, max_tokens=MAX_TOKENS, parallel=ParallelLayout(dp=case.num_ranks))


def joined(case: Case, parts: Sequence[Batch]) -> Any:
    """The batch of all ranks; of padded ones, each of its own width, the rows without pads."""
    if case.num_ranks == 1 or case.collator == "packed":
        return Batch.cat(parts)
    return unpadded(parts)


def unpadded(parts: Sequence[Batch]) -> dict[str, Any]:
    """Tokens of every row, then the ids, labels and loss weights of all rows without their pads.

    And the step, the same on all ranks.
    """
    columns = {"lengths": [part["sub_seq_lengths"].values for part in parts]}
    for name in ("input_ids", "labels", "loss_mask"):
        columns[name] = []
        for part in parts:
            cells, is_real = part[name], part["attention_mask"].bool()
            missing = is_real.shape[1] - cells.shape[1]  # the mask is right-aligned
            columns[name].append(torch.nn.functional.pad(cells, (missing, 0))[is_real])
    (step,) = {step_named(part) for part in parts}
    return {"step": step, **{name: torch.cat(tensors) for name, tensors in columns.items()}}


def step_named(batch: Batch) -> tuple[int, int]:
    return batch.metadata["epoch"], batch.metadata["step"]


@cache
def steps_of(tail: str) -> list[list[list[int]]]:
    """The examples of each step of each epoch."""
    order = {"tail": tail, "seed": SEED, "reshuffles": RESHUFFLES}
    return epochs_of(NUM_EXAMPLES, BATCH_SIZE, 3, **order)


def numbered(epochs: Iterable[list[Any]]) -> Iterator[tuple[tuple[int, int], Any]]:
    """The epoch and step of everything, and itself."""
    for epoch, steps in enumerate(epochs):
        for step, indices in enumerate(steps):
            yield (epoch, step), indices


def with_step(batch: Batch, epoch: int, step: int) -> Batch:
    batch.metadata |= {"epoch": epoch, "step": step}
    return batch


@cache
def reference(collator: str, num_ranks: int, tail: str) -> list[str]:
    case = Case(collator, num_ranks, tail)
    collate = collator_of(case)
    batches = [
        with_step(collate([EXAMPLES[i] for i in indices]), *at)
        for at, indices in numbered(steps_of(tail))
    ]
    return [batch_digest(joined(case, [batch])) for batch in batches]


# ---- the same through the public API ----


class PlannedList(Dataset):
    """A list of examples that knows of plans, as RankPlan's docstring shows."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return EXAMPLES[index]

    def __getitems__(self, indices: RankPlan) -> Any:
        return indices.with_examples([self[i] for i in indices.indices])


class Ranks:
    """The loaders of all ranks as one: batches joined, reshuffled at the same steps, one state."""

    def __init__(self, loaders: Any, join: Any, reshuffles: Any = RESHUFFLES) -> None:
        self.loaders, self.join, self.reshuffles = loaders, join, reshuffles

    def __iter__(self) -> Iterator[Any]:
        for parts in zip(*self.loaders, strict=True):
            self.reshuffle_where_due()
            yield self.join(parts)

    def reshuffle_where_due(self) -> None:
        """With ``prefetch`` the batch that would have come next is in flight."""
        state = self.state_dict()["sampler"]
        if (state["epoch"], state["step"]) in self.reshuffles:
            self.reshuffle()

    def reshuffle(self) -> None:
        for loader in self.loaders:
            loader.reshuffle()

    def state_dict(self) -> dict[str, Any]:
        state, *others = (loader.state_dict() for loader in self.loaders)
        assert all(other == state for other in others), "ranks in different places"
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def sampler_of(case: Case, rank: int) -> Any:
    if case.collator == "packed" and case.num_ranks > 1:
        return packed_sampler_of(case, rank)
    order = {"tail": case.tail, "rank": rank, "world_size": case.num_ranks, **ORDER}
    return PrefetchingSampler(NUM_EXAMPLES, **order)


def packed_sampler_of(case: Case, rank: int) -> PackedBatchSampler:
    return PackedBatchSampler(
        DATASET.lengths,
        max_tokens=MAX_TOKENS,
        parallel=ParallelLayout(dp=case.num_ranks),
        num_loss_tokens=DATASET.num_loss_tokens,
        tail=case.tail,
        rank=rank,
        **ORDER,
    )


def loader_of(case: Case, sampler: Any) -> PrefetchLoader:
    dataset: Any = DATASET
    if case.source == "list":
        dataset = PlannedList() if isinstance(sampler, PackedBatchSampler) else EXAMPLES
    workers = {"num_workers": case.num_workers, "persistent_workers": case.num_workers > 0}
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator_of(case), **workers)
    return PrefetchLoader(loader, prefetch=case.prefetch)


def ranks_of(case: Case, **options: Any) -> Ranks:
    loaders = [loader_of(case, sampler_of(case, rank)) for rank in range(case.num_ranks)]
    return Ranks(loaders, lambda parts: joined(case, parts), **options)


# ---- the tests ----


@pytest.mark.parametrize(("cases", "num_axes"), [(WITHOUT_WORKERS, 3), (WITH_WORKERS, 2)])
def test_the_values_of_the_axes_meet(cases, num_axes):
    for axes in combinations(range(5), num_axes):
        met = {tuple(case[axis] for axis in axes) for case in cases}
        assert met == set(product(*(AXES[axis] for axis in axes)))


@pytest.mark.parametrize("tail", AXES.tail)
def test_the_reference_has_what_is_promised(tail):
    plain = epochs_of(NUM_EXAMPLES, BATCH_SIZE, 3, tail=tail, seed=SEED)
    first, stop = len(plain[0]), len(plain[0]) + len(plain[1])  # of epoch 1
    steps, plain = flat(steps_of(tail)), flat(plain)
    assert len(steps) == len(plain) == NUM_STEPS[tail]
    same = [i for i, step in enumerate(plain) if step == steps[i]]
    # in front of the reshuffles; a tail that is carried over is one of them
    assert same == [*range(first + 1), *([] if tail == "wrap" else [stop])]
    assert {len(step) for step in steps} == ({BATCH_SIZE, 6} if tail == "keep" else {BATCH_SIZE})
    for collator, num_ranks in product(AXES.collator, AXES.num_ranks):
        digests = reference(collator, num_ranks, tail)
        assert len(set(digests)) == len(digests) == len(steps)


def test_the_rows_of_padded_batches_are_the_examples():
    collate = PaddedCollator(0, normalize_loss=False)
    parts = [collate(EXAMPLES[:6]), collate(EXAMPLES[6:9])]
    found = unpadded([with_step(part, 2, 1) for part in parts])
    assert found["step"] == (2, 1)
    assert found["lengths"].tolist() == [len(e["input_ids"]) for e in EXAMPLES[:9]]
    assert found["input_ids"].tolist() == flat(e["input_ids"] for e in EXAMPLES[:9])
    assert found["loss_mask"].tolist() == flat([0, *e["loss_mask"][1:]] for e in EXAMPLES[:9])


@pytest.mark.parametrize("case", WITHOUT_WORKERS, ids=str)
def test_one_stream_stopped_at_every_step(case):
    expected = reference(case.collator, case.num_ranks, case.tail)
    assert assert_exact_resume(lambda: ranks_of(case), num_steps=len(expected)) == expected


@pytest.mark.parametrize("case", WITH_WORKERS, ids=str)
def test_one_stream_out_of_worker_processes(case):
    expected = reference(case.collator, case.num_ranks, case.tail)
    # starting workers takes a while
    stops = range(len(expected)) if (case.num_ranks, case.tail) == (1, "wrap") else [4]
    found = assert_exact_resume(lambda: ranks_of(case), num_steps=len(expected), stops=stops)
    assert found == expected


@pytest.mark.parametrize("tail", AXES.tail)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_controller_of_many_ranks_reads_the_same_stream(num_ranks, tail):
    """Of one process, with lists of indices, or with plans for a single rank."""
    case = Case("packed", num_ranks, tail)
    whole = PrefetchingSampler(NUM_EXAMPLES, tail=tail, **ORDER)
    for sampler in [whole, packed_sampler_of(case, 0)] if num_ranks == 1 else [whole]:
        with closing(Ranks([loader_of(case, sampler)], lambda parts: parts[0])) as loader:
            found = [batch_digest(batch) for _ in range(3) for batch in loader]
        assert found == reference("packed", num_ranks, tail)


@pytest.mark.parametrize("collator", AXES.collator)
@pytest.mark.parametrize("num_ranks", AXES.num_ranks)
def test_across_epochs_by_steps(collator, num_ranks):
    case = Case(collator, num_ranks, "wrap")
    expected = reference(*case[:3])
    with closing(ranks_of(case)) as ranks:
        found = []
        for parts in zip(*(x.steps(len(expected)) for x in ranks.loaders), strict=True):
            ranks.reshuffle_where_due()
            found.append(batch_digest(ranks.join(parts)))
    assert found == expected


@pytest.mark.parametrize(("collator", "tail"), [("padded", "keep"), ("packed", "wrap")])
def test_what_one_setting_saves_another_goes_on_with(collator, tail):
    """Every state of every setting is the same; a state says nothing of how batches are built."""
    cases = [Case(collator, 2, tail, *way) for way in product(AXES.source, AXES.prefetch)]
    runs = [states_at_every_step(case) for case in cases]
    assert all(run == runs[0] for run in runs)
    expected = reference(*cases[0][:3])
    for stop, state in enumerate(runs[0]):
        with closing(ranks_of(cases[stop % 4])) as ranks:
            ranks.load_state_dict(json.loads(state))
            found = [batch_digest(batch) for _ in range(3) for batch in ranks]
        assert found[: len(expected) - stop] == expected[stop:]


def states_at_every_step(case: Case) -> list[str]:
    with closing(ranks_of(case)) as ranks:
        states = [ranks.state_dict()]
        states += [ranks.state_dict() for _ in range(3) for _ in ranks]
    return [json.dumps(state) for state in states]


@pytest.mark.parametrize("prefetch", AXES.prefetch)
@pytest.mark.parametrize("tail", AXES.tail)
@pytest.mark.parametrize("collator", AXES.collator)
def test_saved_in_front_of_a_reshuffle(collator, tail, prefetch):
    """The run that is resumed there reshuffles before it asks for a batch, and is the same."""
    case = Case(collator, 2, tail, prefetch=prefetch)
    expected = reference(*case[:3])
    with closing(ranks_of(case, reshuffles=())) as ranks:
        first = [batch_digest(batch) for batch in ranks]
        batches = iter(ranks)
        first.append(batch_digest(next(batches)))
        state = json.loads(json.dumps(ranks.state_dict()))
        assert state["sampler"]["reshuffles"] == []
        ranks.reshuffle()
        kept = json.loads(json.dumps(ranks.state_dict()))
        assert kept["sampler"]["reshuffles"] == [[1, 1]]
        assert batch_digest(next(batches)) == expected[len(first)]
    assert first == expected[: len(first)]
    for saved in (state, kept):
        with closing(ranks_of(case)) as resumed:
            resumed.load_state_dict(saved)
            if saved is state:
                resumed.reshuffle()
            rest = [batch_digest(batch) for _ in range(2) for batch in resumed]
        assert rest == expected[len(first) :]


# ---- the harness on what is nested otherwise ----


@pytest.fixture
def stateful() -> Any:
    reason = "torchdata is not installed"
    return pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader


@pytest.fixture(params=["examples", "tokens", "one of two ranks"])
def make_mixed(request) -> Callable[[], MixedSampler]:
    options = {
        "examples": {"num_steps": 4},
        "tokens": {"by": "tokens", "lengths": [DATASET.lengths[:9], DATASET.lengths[9:]]},
        "one of two ranks": {"num_steps": 4, "rank": 1, "world_size": 2},
    }[request.param]
    return lambda: MixedSampler([9, NUM_EXAMPLES - 9], 6, weights=[3, 1], seed=SEED, **options)


@pytest.mark.parametrize("setting", ["plain", "prefetch", "workers"])
def test_a_mixture(make_mixed, setting):
    num_workers = 2 if setting == "workers" else 0
    collate = PackedCollator(0, max_tokens=MAX_TOKENS)

    def make() -> PrefetchLoader:
        options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(DATASET, batch_sampler=make_mixed(), collate_fn=collate, **options)
        return PrefetchLoader(loader, prefetch=setting != "plain")

    sampler = make_mixed()
    steps = list(numbered(list(sampler) for _ in range(9)))[:9]
    batches = (with_step(collate([EXAMPLES[i] for i in indices]), *at) for at, indices in steps)
    expected = [batch_digest(batch) for batch in batches]
    stops = [6] if num_workers else None
    assert assert_exact_resume(make, num_steps=9, stops=stops) == expected
    order = [batch_digest(indices) for _, indices in steps]
    assert assert_exact_resume(make_mixed, num_steps=9) == order


def test_a_stateful_loader_alone_saves_the_packed_sampler(stateful):
    case = Case("packed", 2, "wrap")

    def make() -> Any:
        sampler = packed_sampler_of(case, 1)
        return stateful(DATASET, batch_sampler=sampler, collate_fn=collator_of(case))

    assert len(set(assert_exact_resume(make, num_steps=8))) == 8
