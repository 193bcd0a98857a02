"""The public harness: what it accepts, and the faults that it is there to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests import building
from torch_collate_kit import PaddedCollator, PrefetchLoader, TokenizedDataset
from torch_collate_kit.batch import Batch
from torch_collate_kit.loading import PackedBatchSampler, PrefetchingSampler
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.testing import assert_exact_resume, batch_digest


def make_batch(**changes: Any) -> Batch:
    fields = {"x": torch.tensor([[1, 2], [3, 4]]), "r": Ragged(torch.arange(3), [0, 1, 3])}
    fields |= changes.pop("fields", {})
    return Batch(fields, row_metadata={"ids": ["a", "b"]}, metadata={"n": 3} | changes)


DIFFERENT = [
    *(torch.tensor([1, 2], dtype=dtype) for dtype in (torch.int64, torch.int32, torch.bfloat16)),
    *(torch.tensor(values) for values in ([1, 3], [[1, 2]], 1, -0.0, 0.0, [])),
    *(np.array([1, 2]), np.array([1, 2], dtype=">i8"), np.array([[1, 2]])),
    *([1, 2], (1, 2), [[1], [2]], [[1, 2], []], 1, 1.0, True, "1", b"1", None, {"a": 1}, {"b": 1}),
    *(Ragged(torch.arange(3), offsets) for offsets in ([0, 1, 3], [0, 2, 3])),
    *(make_batch(), make_batch(n=4), make_batch(ids=["a", "c"])),
    make_batch(fields={"x": torch.tensor([[1, 2], [3, 5]])}),
]


def test_digests_differ_when_anything_does():
    assert len({batch_digest(value) for value in DIFFERENT}) == len(DIFFERENT) == 30


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, np.array([object()])])
def test_digests_of_other_things_are_refused(value):
    with pytest.raises(TypeError, match="batch_digest of a"):
        batch_digest(value)


class Counter:
    """Epochs of numbers, counted from the last epoch's end; resumes exactly."""

    def __init__(self, num_steps: int = 3) -> None:
        self.num_steps, self.epoch, self.step = num_steps, 0, 0
        self.is_closed = False

    def __iter__(self) -> Iterator[Any]:
        while self.step < self.num_steps:
            self.step += 1
            yield self.value()
        self.epoch, self.step = self.epoch + 1, 0

    def value(self) -> Any:
        return {"x": torch.tensor([100 * self.epoch + self.step])}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]

    def close(self) -> None:
        self.is_closed = True


def test_an_exact_loader_passes_and_every_one_is_closed():
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Counter())
        return made[-1]

    found = assert_exact_resume(make, num_steps=7)
    values = [1, 2, 3, 101, 102, 103, 201]
    assert found == [batch_digest({"x": torch.tensor([v])}) for v in values]
    assert len(made) == 2 + 7  # two whole runs, and one for every stop
    assert all(counter.is_closed for counter in made)


class OffByOne(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.step += self.step == 2


class ForgetsTheEpoch(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class OfTheProducer(Counter):
    """Saves where its lookahead is."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": min(self.step + 1, self.num_steps)}


class DisturbedBySaving(Counter):
    def state_dict(self) -> dict[str, Any]:
        self.step += self.step == 2
        return super().state_dict()


class NotRepeatable(Counter):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        NotRepeatable.made += 1

    def value(self) -> Any:
        return NotRepeatable.made


class EpochBeginsElsewhere(Counter):
    """The same batches after a resume, but the epochs are cut in other places."""

    cut = 99

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            if self.step == self.cut:
                return

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.cut = 2


class NeedsTuples(Counter):
    """What was a tuple is a list after JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.epoch, self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(state["at"], tuple):
            self.epoch, self.step = state["at"]


class OfTensors(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}


class OfData(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"buffer": list(range(10_000))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OffByOne, "resumed after 2 of 7 batches: batch 2 differs"),
        (ForgetsTheEpoch, "resumed after 4 of 7 batches: batch 4 differs"),
        (OfTheProducer, "resumed after 0 of 7 batches: batch 0 differs"),
        (DisturbedBySaving, "the run that saves at every step: batch 2 differs"),
        (NotRepeatable, "the run that saves at every step: batch 0 differs"),
        (EpochBeginsElsewhere, "resumed after 0 of 7 batches: an epoch begins at another batch, 2"),
        (NeedsTuples, "resumed after 1 of 7 batches: batch 1 differs"),
        (OfTensors, "the state after 0 batches is not JSON"),
        (OfData, "the state after 0 batches has 58902 bytes as JSON, more than"),
    ],
)
def test_faults_are_found_and_named(make: Callable[[], Any], message: str):
    with pytest.raises(AssertionError, match=message):
        assert_exact_resume(make, num_steps=7)


LENGTHS = np.random.default_rng(3).integers(2, 30, size=29)
ROWS = TokenizedDataset([{"input_ids": [i + 1] * n} for i, n in enumerate(LENGTHS)], train_all=True)


def packed_sampler(rank: int, world_size: int, **options: Any) -> PackedBatchSampler:
    given = {"batch_size": 6, "max_tokens": 40, "parallel": ParallelLayout(dp=world_size)}
    counts = LENGTHS - 1
    return building.packed_sampler(
        LENGTHS, dp_rank=rank, num_loss_tokens=counts, **{**given, **options}
    )


def packed_loader(rank: int, world_size: int, **options: Any) -> PrefetchLoader:
    sampler = packed_sampler(rank, world_size, **options)
    collate = sampler._collate
    return PrefetchLoader(DataLoader(ROWS, batch_sampler=sampler, collate_fn=collate))


def padded_loader(rank: int, world_size: int) -> PrefetchLoader:
    sampler = PrefetchingSampler(ROWS, batch_size=6, tail="drop", dp_rank=rank, dp_size=world_size)
    return PrefetchLoader(DataLoader(ROWS, batch_sampler=sampler, collate_fn=PaddedCollator(0)))


@pytest.mark.parametrize("make", [packed_sampler, packed_loader, padded_loader])
def test_ranks_that_change(make: Callable[..., Any]) -> None:
    found = assert_exact_resume(make, num_steps=7, dp_sizes=[2, 1, 3], stops=[0, 2, 6])
    assert len(found) == 7
    assert found == assert_exact_resume(make, num_steps=7, dp_sizes=[1], stops=[])


class Faulty(PrefetchingSampler):
    """Loses, keeps or tells something that ranks must agree on."""

    def __init__(self, fault: str, rank: int, world_size: int) -> None:
        super().__init__(20, batch_size=4, dp_rank=rank, dp_size=world_size)
        self.fault = fault

    def __iter__(self) -> Any:
        it = super().__iter__()
        if self.fault == "lost" and self._division._size == 2:
            return iter([batch[:-1] for batch in it])
        if self.fault == "uneven" and self._division._rank == 1:
            return iter(list(it)[:-1])
        return iter([map(str, batch) for batch in it]) if self.fault == "texts" else it

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        own = {"rank": self._division._rank} if self.fault == "own states" else {}
        return {**super().state_at(epoch, step), **own}


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("lost", AssertionError, r"resumed after 0 of 3 batches, 1 -> 2 ranks: batch 0 differs"),
        ("uneven", AssertionError, r"1 of 2 ranks end an epoch before the others"),
        ("own states", AssertionError, r"after 1 steps the states of the 2 ranks differ; a state"),
        ("texts", TypeError, r"dp_sizes compares examples, which a map does not name; let make"),
    ],
)
def test_faults_that_a_change_of_ranks_shows(
    fault: str, error: type[Exception], message: str
) -> None:
    num_steps = 7 if fault == "uneven" else 3
    with pytest.raises(error, match=message):
        assert_exact_resume(partial(Faulty, fault), num_steps=num_steps, dp_sizes=[1, 2])


def test_a_divisor_that_is_neither_the_steps_nor_the_ranks() -> None:
    def make(rank: int, world_size: int) -> Any:
        loader = packed_loader(rank, world_size)
        collate = loader._loader._loader.collate_fn

        def wrong(examples: Any) -> Batch:
            batch = collate(examples)
            batch.metadata["num_loss_tokens"] += 1
            return batch

        vars(loader._loader._loader)["collate_fn"] = wrong
        return loader

    with pytest.raises(
        AssertionError, match=r"the ranks have num_loss_tokens=\[\d+\], and their batches \d+"
    ):
        assert_exact_resume(make, num_steps=2, dp_sizes=[1])
