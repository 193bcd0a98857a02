"""on_error="skip": what fails is left out and counted, nothing else changes, rows stay planned."""

from __future__ import annotations

import json
import os
import signal
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.building import packed_sampler
from tests.loading.prefetch.toy_data import COLLATORS, EXAMPLES, collated, digests, make_sampler
from tests.loading.seals import resealed
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import PackedIterableDataset, PrefetchLoader, TokenizedDataset
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.testing import assert_exact_resume, batch_digest

ORDER = list(make_sampler())  # the steps of epoch 0: 4, 4, 4 and 1 examples
PACKED = COLLATORS["packed"]


class Broken(Dataset):
    """Reading an example of ``errors`` raises; one of ``bad`` has an id that no collator takes."""

    def __init__(self, errors: dict[int, Any] | None = None, bad: Any = ()) -> None:
        self.errors, self.bad = errors or {}, bad

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.errors:
            raise self.errors[index]
        return {"input_ids": [-5]} if index in self.bad else EXAMPLES[index]


def loader_of(dataset: Any, collate: Any = PACKED, **options: Any) -> PrefetchLoader:
    names = ("num_workers", "persistent_workers", "worker_init_fn", "multiprocessing_context")
    workers = {name: options.pop(name) for name in names if name in options}
    loader = DataLoader(dataset, batch_sampler=make_sampler(), collate_fn=collate, **workers)
    return PrefetchLoader(loader, **{"on_error": "skip", **options})


def expected_without(gone: set[int], collate: Any = PACKED) -> list[str]:
    """Epoch 0 written out: each batch collated without what is gone, which its metadata names."""
    found = []
    for step, indices in enumerate(ORDER):
        batch = collated(collate, [i for i in indices if i not in gone], 0, step)
        skipped = [i for i in indices if i in gone]
        batch.metadata |= {"skipped": skipped} if skipped else {}
        found.append(batch_digest(batch))
    return found


class Unpicklable(Exception):
    """An error that a worker cannot send."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} {b}")


SETTINGS = [("padded", {"prefetch": False}), ("packed", {}), ("packed", {"num_workers": 2})]


@pytest.mark.parametrize(("name", "setting"), SETTINGS, ids=str)
def test_what_cannot_be_read_or_collated_is_left_out(said, name, setting):
    first, second, third = ORDER[0][1], ORDER[2][0], ORDER[2][3]
    errors = {first: Unpicklable("no such", "shard"), third: KeyError("text")}
    dataset = Broken(errors, bad={second})
    with loader_of(dataset, COLLATORS[name], **setting) as loader:
        found, skipped = digests(loader), loader.skipped
    assert found == expected_without({first, second, third}, COLLATORS[name])
    minus = "input_ids is -5 at token 0"
    errors = ["Unpicklable: no such shard", minus, "KeyError: 'text'"]
    places = [(0, 0, first), (0, 2, second), (0, 2, third)]
    assert [one[:3] for one in skipped] == places
    assert [one.error.partition(";")[0] for one in skipped] == [
        f"example {place[2]} of the dataset: {error}"
        for place, error in zip(places, errors, strict=True)
    ]
    assert said == [
        f"skipped: in step {one.step} of epoch 0, {one.error} ({number} of at most 100)"
        for number, one in enumerate(skipped, start=1)
    ]


def tokens_of(batch: Any) -> Any:
    return batch["input_ids"]


@pytest.mark.parametrize(
    ("collate", "num_workers"), [(None, 0), (tokens_of, 2)], ids=["plain", "workers"]
)
def test_what_a_stream_has_left_out_is_listed_too(said, collate, num_workers):
    rows = [{"input_ids": [-5]} if i in (2, 5, 9) else e for i, e in enumerate(EXAMPLES)]

    def make() -> PrefetchLoader:
        stream = PackedIterableDataset(rows, PACKED, buffer_size=1, num_shards=2, on_error="skip")
        data = DataLoader(stream, batch_size=None, num_workers=num_workers, collate_fn=collate)
        return PrefetchLoader(data)

    with make() as loader:
        batches = iter(loader)
        assert next(batches) is not None
        state = loader.state_dict()
        assert "skipped" not in state
        list(batches)
        skipped = loader.skipped
        assert sorted(one.example for one in skipped) == [2, 5, 9]
        assert {(one.epoch, one.error) for one in skipped} == {(0, None)}
        steps = [(step.epoch, step.step) for step in loader.timeline]
        assert all(one[:2] in steps for one in skipped)
        assert len(said) == (0 if num_workers else 3)  # the stream's own: workers log there
        loader.load_state_dict(state)
        assert loader.skipped == []
        list(loader)
        assert loader.skipped == [one for one in skipped if one.step > 0]


# ---- what is not an example's fault ----


class Fails:
    """A collate function that fails for more than one example, as often as there are errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, examples: Any) -> Any:
        if len(examples) > 1 and self.errors:
            raise self.errors.pop(0)
        return PACKED(examples)


def test_an_error_that_no_example_has_alone_is_raised():
    second = RuntimeError("only together, again")
    with loader_of(EXAMPLES, Fails(RuntimeError("only together"), second)) as loader:
        with pytest.raises(RuntimeError, match="only together, again"):
            list(loader)
        assert loader.skipped == []
        assert loader.state_dict()["sampler"]["step"] == 0


@pytest.mark.parametrize(("name", "num_workers"), [("padded", 0), ("packed", 1)])
def test_a_step_without_any_example_is_raised_at_its_step(name, num_workers):
    gone = set(ORDER[1])
    with loader_of(Broken(bad=gone), COLLATORS[name], num_workers=num_workers) as loader:
        batches = loader.steps(4)
        next(batches)
        message = (
            "nothing is left to collate: all examples of a batch of 4 could not be read or "
            f"collated; the first one: example {ORDER[1][0]} of the dataset: input_ids is -5 at"
        )
        with pytest.raises(DataError, match=message):
            next(batches)
        assert loader.state_dict()["sampler"]["step"] == 1
        assert loader.skipped == []


@pytest.mark.parametrize(
    "error",
    [MemoryError(), StateError("moved"), torch.OutOfMemoryError("cuda"), KeyboardInterrupt()],
    ids=repr,
)
@pytest.mark.parametrize("where", ["reading", "alone"])
def test_what_is_never_skipped(error, where):
    odd = ORDER[1][1]
    errors = {odd: error} if where == "reading" else {ORDER[1][0]: ValueError(), odd: error}
    with loader_of(Broken(errors)) as loader:
        batches = loader.steps(4)
        next(batches)
        with pytest.raises(type(error)):
            next(batches)
        assert loader.skipped == []


# ---- budgets ----


def test_more_than_max_skipped_in_all():
    bad = [ORDER[step][1] for step in range(3)]
    with loader_of(Broken(bad=set(bad)), max_skipped=2) as loader:
        batches = loader.steps(4)
        for _ in range(2):
            next(batches)
        message = (
            rf"(?s)^3 examples are wrong, more than max_skipped=2; the last one: in step 2 of "
            rf"epoch 0, example {bad[-1]} of the dataset: input_ids is -5.*\nTraceback \(most rec"
        )
        for attempt in (batches, loader.steps(1)):  # it can be tried again, and fails again
            with pytest.raises(DataError, match=message):
                next(attempt)
        assert [one.example for one in loader.skipped] == bad[:2]
        assert loader.state_dict()["sampler"]["step"] == 2
    with loader_of(Broken(bad=set(bad)), max_skipped=3) as loader:
        assert len(list(loader)) == 4


@pytest.mark.parametrize(
    ("bad", "limit", "message"),
    [
        ([*ORDER[0][2:], *ORDER[1][:2]], 4, None),
        ([*ORDER[0][2:], *ORDER[1][:2]], 3, "4 examples in a row are wrong, more than"),
        (ORDER[0][::2], 1, None),
        ([ORDER[0][3], ORDER[1][1]], 1, None),
    ],
)
def test_more_than_max_skipped_in_a_row(bad, limit, message):
    """In the order in which they are read, across steps, and after a resume."""
    for resumes in (False, True):
        with loader_of(Broken(bad=set(bad)), max_skipped_in_a_row=limit) as loader:
            next(loader.steps(1))
            if resumes:
                state = json.loads(json.dumps(loader.state_dict()))
                loader.load_state_dict(state)
            if message is None:
                assert len(list(loader)) == 3
                continue
            last = f" max_skipped_in_a_row={limit}; the last one: in step 1 of epoch 0, example "
            with pytest.raises(DataError, match=message + last):
                next(loader.steps(1))


# ---- states ----


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumes_exactly_and_goes_on_counting(num_workers):
    gone = {ORDER[0][3], ORDER[1][0], ORDER[2][2]}

    def make() -> PrefetchLoader:
        return loader_of(Broken(bad=gone), num_workers=num_workers)

    stops = [2] if num_workers else None
    found = assert_exact_resume(make, num_steps=8, stops=stops)
    assert found[:4] == expected_without(gone)
    with make() as loader, make() as resumed:
        batches = loader.steps(8)
        for _ in range(6):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [one[:3] for one in resumed.skipped] == [one[:3] for one in loader.skipped]
        assert {one.error for one in resumed.skipped} == {None}
        list(batches), list(resumed.steps(2))
        assert resumed.state_dict() == loader.state_dict()
        assert len(loader.skipped) == 6


def test_a_loader_that_raises_keeps_what_was_skipped_before():
    """It does not know which examples of its batches follow one another, so none is in a row."""
    with loader_of(Broken(bad=set(ORDER[0][2:]))) as loader:
        next(loader.steps(1))
        state = loader.state_dict()
    assert state["skipped"]["in_a_row"] == 2
    with loader_of(EXAMPLES, on_error="raise") as loader:
        loader.load_state_dict(state)
        assert loader.skipped == [(0, 0, i, None) for i in ORDER[0][2:]]
        next(loader.steps(1))
        assert loader.state_dict()["skipped"] == state["skipped"]
        del state["skipped"]
        loader.load_state_dict(resealed(state))
        assert loader.skipped == []


# ---- settings ----


def test_a_stream_is_refused_and_takes_the_option_itself():
    stream = PackedIterableDataset(EXAMPLES, PACKED)
    message = r"a stream has no sampler; pass it to the stream: PackedIterableDataset\(..., on_err"
    with pytest.raises(TypeError, match=message):
        PrefetchLoader(DataLoader(stream, batch_size=None), on_error="skip")


def test_the_loader_of_the_caller_is_not_changed_and_the_repr_names_its_dataset():
    data = DataLoader(EXAMPLES, batch_sampler=make_sampler(), collate_fn=PACKED)
    plain = repr(PrefetchLoader(data))
    loader = PrefetchLoader(data, on_error="skip", max_skipped=7)
    assert repr(loader) == plain.replace(") [", ", on_error='skip', max_skipped=7) [")
    assert (data.dataset, data.collate_fn) == (EXAMPLES, PACKED)


def test_a_fault_that_has_passed_costs_nothing(said):
    with loader_of(EXAMPLES, Fails(OSError("timed out"))) as loader:
        assert digests(loader) == expected_without(set())
    assert said == []


class Killed(Dataset):
    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_an_error():
    with (
        loader_of(Killed(), num_workers=1) as loader,
        pytest.raises(RuntimeError, match=r"DataLoader worker .* (exited|is killed)"),
    ):
        list(loader)


def test_wrong_settings():
    with pytest.raises(ValueError, match="on_error must be one of 'raise', 'skip'; got None"):
        loader_of(EXAMPLES, on_error=None)
    for name in ("max_skipped", "max_skipped_in_a_row"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            loader_of(EXAMPLES, **{name: 0})


LAYOUT = ParallelLayout(dp=2, tp=2)
COLUMNS = TokenizedDataset([{"input_ids": [7 + i] * (1 + i % 5)} for i in range(13)])
TRAINED = COLUMNS.num_loss_tokens


class Planned(Dataset):
    """Columns of which some cannot be read."""

    def __init__(self, gone: Any) -> None:
        self.gone = gone

    def __len__(self) -> int:
        return len(COLUMNS)

    def __getitems__(self, part: Any) -> Any:
        for index in part.indices:
            if index in self.gone:
                raise OSError(f"row {index}")
        return COLUMNS.__getitems__(part)


def ranks(gone: Any, *, on_error: str = "skip", **workers: Any) -> list[PrefetchLoader]:
    collate = PackedCollator(0, max_tokens=12, parallel=LAYOUT)
    made = []
    for rank in range(2):
        options = {"num_loss_tokens": TRAINED, "packing": collate.packing}
        sampler = packed_sampler(COLUMNS.lengths, batch_size=6, dp_rank=rank, **options)
        data = DataLoader(Planned(gone), batch_sampler=sampler, collate_fn=collate, **workers)
        made.append(PrefetchLoader(data, on_error=on_error))
    return made


def batches_of(loaders: list[PrefetchLoader]) -> list[list[Any]]:
    """Of each rank, those of one epoch."""
    return [list(loader) for loader in loaders]


def row_written_out(batch: Any, row: int, gone: Any) -> list[int]:
    """The cells of a planned row without some examples, by a loop."""
    cells: list[int] = []
    for example, length in zip(named(batch, row), batch["sub_seq_lengths"][row], strict=True):
        if example not in gone:
            cells += [7 + example] * int(length) + [0] * (int(length) % 2)  # tp=2: even
    return cells + [0] * (batch["input_ids"].shape[1] - len(cells))


def named(batch: Any, row: int) -> list[int]:
    """The dataset's examples in a row: their ids say which they are."""
    cells = batch["input_ids"][row]
    starts = batch["cu_seq_lens"][row][:-1] - batch["cu_seq_lens"][row][0]
    return [int(cells[i]) - 7 for i in starts.tolist() if cells[i]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_a_plan_the_rows_stay_without_the_pieces_that_fail(num_workers):
    plain = batches_of(ranks((), on_error="raise"))
    gone = {named(plain[0][0], 0)[0], named(plain[1][1], -1)[-1]}
    gone |= {i for row in range(len(plain[0][2])) for i in named(plain[0][2], row)}  # all of a rank
    found = batches_of(ranks(gone, num_workers=num_workers))
    assert [len(of) for of in found] == [len(of) for of in plain] == [3, 3]
    num_changed = 0
    for mine, planned in zip(chain(*found), chain(*plain), strict=True):
        lost = [i for row in range(len(planned)) for i in named(planned, row) if i in gone]
        assert mine.metadata.get("skipped", []) == sorted(lost)
        if not lost:
            assert batch_digest(mine) == batch_digest(planned)
            continue
        num_changed += 1
        rows = [row_written_out(planned, row, gone) for row in range(len(planned))]
        assert mine["input_ids"].tolist() == rows
        told = {k: v for k, v in mine.metadata.items() if k != "skipped"}
        assert told == planned.metadata  # what is said of the whole batch, the divisor too
        is_lost = torch.isin(planned["input_ids"], torch.tensor([7 + i for i in lost]))
        remaining = (planned["labels"] != -100) & ~is_lost
        assert int((mine["labels"] != -100).sum()) == int(remaining.sum())
        weight = 1 / planned.metadata["num_loss_tokens"]
        assert np.allclose(mine["loss_mask"].sum().item(), int(remaining.sum()) * weight)
    assert num_changed == 3
    assert (found[0][2]["labels"] == -100).all()
    assert found[0][2].metadata["num_loss_tokens"] > 0
