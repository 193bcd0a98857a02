"""The rank of a sampler or stream that is not told one, and tools that would divide it again."""

from __future__ import annotations

import copy
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.loading.prepared_samplers import (
    DATA,
    loader_of,
    made,
    on_rank,
    read,
    saved_and_loaded,
)
from tests.ranks import on_two_ranks
from torch_collate_kit import (
    DataError,
    PackedCollator,
    ParallelLayout,
    PrefetchLoader,
    packing_report,
)
from torch_collate_kit.loading import PackedRows, map_segments

KINDS = ("prefetching", "packed", "stream")
REFUSED = (
    "accelerator.prepare, or Lightning's use_distributed_sampler=True, would divide the batches of "
    "a {} over the ranks by itself, and cut or lose what belongs together; make it after "
    "Accelerator(), from which it has its rank, and wrap its loader in a PrefetchLoader, which "
    "they leave as it is: PrefetchLoader(DataLoader(dataset, batch_sampler=sampler, "
    "collate_fn=collate), device=accelerator.device); or pass Lightning "
    "use_distributed_sampler=False; transformers.Trainer resumes neither: give it PackedRows"
)
NOT_YET = (
    "WORLD_SIZE=2, but torch.distributed is not initialized, so the rank is unknown; make it after "
    "Accelerator() or init_process_group, or pass dp_rank"
)
NAMES = {"prefetching": "PrefetchingSampler", "packed": "PackedBatchSampler"}


def rank_of(source: Any) -> tuple[Any, int]:
    if hasattr(source, "dp_rank"):
        return source.dp_rank, source.dp_size
    layout = source.state_dict()["layout"]
    return source._division._rank, layout["dp_size"] if "dp_size" in layout else layout["dp"]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process one of several, as torch.distributed sees it."""

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: size > 0)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)

    return become


@pytest.mark.parametrize("kind", ["packed", "stream"])
@pytest.mark.parametrize(
    ("rank", "size", "layout", "expected", "num_warnings"),
    [
        (0, 0, {}, 0, 0),
        (0, 1, {"cp": 2, "tp": 2}, 0, 0),
        (0, 0, {"dp": 2}, 0, 1),
        (0, 1, {"dp": 2, "cp": 2}, 0, 1),
        (1, 2, {"dp": 2}, 1, 0),
        (1, 2, {"tp": 2}, 0, 0),
        (1, 4, {"dp": 2, "cp": 2}, 0, 0),
        (3, 4, {"dp": 2, "tp": 2}, 1, 0),
    ],
)
def test_the_rank_is_that_of_the_process_in_the_layout(
    kind: str, rank: int, size: int, layout: Any, expected: int, num_warnings: int,
    process: Any, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    process(rank, size)
    source = made(kind, ParallelLayout(**layout))
    given = made(kind, ParallelLayout(**layout), dp_rank=expected)
    assert rank_of(source) == rank_of(given) == (expected, layout.get("dp", 1))
    assert len(caplog.records) == num_warnings
    for record in caplog.records:
        assert record.levelno == logging.WARNING
        assert record.message.startswith(
            "a single process reads the rows of rank 0, of parallel.dp=2"
        )
    process(0, 1)  # it is fixed, also in a worker
    assert rank_of(pickle.loads(pickle.dumps(source))) == (expected, layout.get("dp", 1))
    assert len(caplog.records) == num_warnings


@pytest.mark.parametrize("kind", ["packed", "stream"])
@pytest.mark.parametrize(
    ("size", "layout", "advice"),
    [
        (2, {}, "ParallelLayout(dp=2)"),
        (2, {"dp": 4}, "ParallelLayout(dp=2)"),
        (4, {"dp": 1, "cp": 2}, "ParallelLayout(dp=2, cp=2)"),
        (3, {"tp": 2}, "ParallelLayout(dp=3)"),
    ],
)
def test_a_layout_of_other_processes_is_an_error(
    kind: str, size: int, layout: Any, advice: str, process: Any
) -> None:
    process(1, size)
    with pytest.raises(ValueError, match="dp_rank") as caught:
        made(kind, ParallelLayout(**layout))
    for words in (
        f"torch.distributed has {size} ranks",
        f"pass the collator parallel={advice}, or dp_rank= of your own mesh (pipelines, ",
        "or dp_rank=0 for the same data on all ranks",
    ):
        assert words in str(caught.value)
    assert rank_of(made(kind, ParallelLayout(**layout), dp_rank=0))[0] == 0


def test_a_source_that_divides_itself_needs_no_rank(process: Any) -> None:
    process(1, 2)
    assert rank_of(made("stream", presharded=True)) == (0, 1)
    with pytest.raises(ValueError, match=r"torch\.distributed has 2 ranks"):
        made("stream", presharded=True, num_shards=2)  # which are read by number
    assert rank_of(made("stream", ParallelLayout(dp=2), presharded=True)) == (1, 2)


def test_a_prefetching_sampler_reads_the_part_of_its_process(
    process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert rank_of(made("prefetching")) == (0, 1)
    assert not caplog.records
    process(1, 2)
    assert rank_of(made("prefetching")) == (1, 2)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "PrefetchingSampler reads part 1 of 2; pass dp_rank and dp_size where ranks share data, or "
        "dp_rank=0, dp_size=1 for all of it"
    )
    assert rank_of(made("prefetching", dp_rank=0, dp_size=1)) == (0, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_has_no_rank_yet(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("1", "", "auto"):
        monkeypatch.setenv("WORLD_SIZE", size)
        made(kind)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE") as caught:
        made(kind)
    assert str(caught.value) == NOT_YET + (" and dp_size" if kind == "prefetching" else "")
    made(kind, dp_rank=0, **({"dp_size": 1} if kind == "prefetching" else {}))
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(dist, "is_initialized")  # as torch is built without it
    monkeypatch.delenv("WORLD_SIZE")
    assert rank_of(made(kind)) == (0, 1)


def test_all_rows_of_a_stream_are_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    whole = made("stream", ParallelLayout(dp=2), dp_rank="all")
    assert "dp_rank='all'" in repr(whole)
    assert not caplog.records
    assert [len(batch) for batch in whole][:3] == [2, 2, 2]
    with pytest.raises(
        TypeError, match=r"dp_rank must be an int, got 'every'.*; dp_rank=\"all\" yie"
    ):
        made("stream", ParallelLayout(dp=2), dp_rank="every")
    with pytest.raises(TypeError, match="dp_rank must be an int, got 'all'"):
        made("packed", ParallelLayout(dp=2), dp_rank="all")


def test_what_the_kit_makes_itself_is_never_divided(
    process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    process(1, 2)
    collate = PackedCollator(0, max_tokens=12)
    assert sum(len(row.examples) for row in PackedRows(DATA, collate)) == len(DATA)
    found = map_segments(lambda batch: batch["sub_seq_lengths"].values, DATA, collate)
    assert found.tolist() == [[n] for n in DATA.lengths]
    assert packing_report(DATA.lengths, 12, batch_rows=2)["steps"]
    assert not caplog.records


def lightning_batch_sampler(batch_sampler: Any) -> Any:
    """Do what Lightning does with a custom batch sampler to replace its sampler (release 2.6)."""
    if hasattr(batch_sampler, "__pl_saved_args"):
        raise AssertionError("only a subclass of torch's BatchSampler has them")
    if hasattr(batch_sampler, "batch_size") and hasattr(batch_sampler, "drop_last"):
        raise AssertionError("it would be made anew, of a DistributedSampler")
    raise TypeError("Lightning can't inject a (distributed) sampler into your batch sampler")


@pytest.mark.parametrize("kind", list(NAMES))
def test_tools_that_divide_a_sampler(kind: str) -> None:
    options = {"dp_rank": 1, "dp_size": 2} if kind == "prefetching" else {"dp_rank": 1}
    sampler = made(kind, ParallelLayout(dp=2), **options)
    for ask in (
        lambda: getattr(sampler, "batch_size", None),
        lambda: getattr(sampler, "drop_last", False),
        lambda: lightning_batch_sampler(sampler),
    ):
        with pytest.raises(TypeError) as caught:
            ask()
        assert str(caught.value) == REFUSED.format(NAMES[kind])
    with pytest.raises(TypeError, match="of a PackedBatchSampler over the ranks by itself"):
        made("packed", ParallelLayout(tp=2)).batch_size  # noqa: B018 - ranks compute the same rows
    assert not hasattr(sampler, "sampler")  # which most loaders ask for, and leave
    alone = made(kind)
    assert not any(hasattr(alone, name) for name in ("batch_size", "drop_last", "sampler"))
    assert len(list(loader_of(alone))) == len(alone) == 6


def test_a_plan_that_a_tool_took_apart_is_named() -> None:
    sampler = made("packed", ParallelLayout(dp=2), dp_rank=1)
    part, collate = next(iter(sampler)), sampler._collate
    cases = [
        (part, "the collator got a RankPlan, not the examples of one plan: a tool between Packed"),
        (
            [part, part],
            "the collator got a list with a RankPlan, not the examples of one plan: a t",
        ),
        ([DATA.__getitems__(part)], "a list with a PlannedExamples, not the examples of one plan"),
        (DATA[3], "collate one example as a list: [example]; if a tool replaced the batch sampler"),
    ]
    for given, message in cases:
        with pytest.raises((TypeError, DataError)) as caught:
            collate(given)
        assert message in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_out_of_order_are_refused(kind: str) -> None:
    loader = loader_of(made(kind))
    unordered = copy.copy(loader)
    unordered.in_order = False
    with pytest.raises(ValueError, match="the DataLoader has in_order=False, so the order of batc"):
        PrefetchLoader(unordered)
    with PrefetchLoader(loader) as ordered:
        assert read(ordered) == list(range(len(DATA)))


def test_two_ranks() -> None:
    found = on_two_ranks(on_rank)
    everything = list(range(len(DATA)))
    for of in found:
        assert of["before"] == [f"{NOT_YET} and dp_size", NOT_YET, NOT_YET]
        assert len(of["wrong"]) == 2
        assert all("parallel=ParallelLayout(dp=2)" in message for message in of["wrong"])
        packed = REFUSED.format("PackedBatchSampler")
        assert of["refused"] == {
            **{(kind, way): REFUSED.format(NAMES[kind]) for kind in NAMES for way in (False, True)},
            "tensor": packed,
        }
    for name in found[0]["read"]:
        assert sorted(found[0]["read"][name] + found[1]["read"][name]) == everything, name
        assert min(len(of["read"][name]) for of in found) >= 16


def test_accelerate_saves_the_state_of_all_ranks_of_a_stream(tmp_path: Path) -> None:
    """It asks each rank for a state, and writes that of the first."""
    for left, again in on_two_ranks(partial(saved_and_loaded, num_shards=2), str(tmp_path)):
        assert left == again != []
    for (message,) in on_two_ranks(saved_and_loaded, str(tmp_path / "other")):
        assert message.endswith("only that number can go on with it; pass num_shards")
