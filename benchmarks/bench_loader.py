"""How much of the collation PrefetchLoader hides behind the step, and what it costs itself.

Claimed: with a 20 ms collate under a 25 ms step that releases the GIL, at least 95% of the collate
time is hidden; under a step of small Python ops, which needs the GIL, one DataLoader worker hides
90% of PackedCollator's; the loader itself costs under 0.2 ms per step, with prefetching on and off.

    python benchmarks/bench_loader.py

Hidden share = 1 - (time per step with prefetching - step alone) / collate time. A run is
``--steps`` steps of one epoch, and its time per step their median; runs with prefetching, without,
with a DataLoader worker process, and of the step alone alternate, and the figure is the median of
the runs. The first batch of an epoch is hidden by nothing and is left out. The collate time is
measured inside the collator in the runs without prefetching.

The collators: "NumPy" sorts arrays (no GIL); "half Python" spends half its time in Python bytecode,
with the GIL; "PackedCollator" reads random rows of a TokenizedDataset and packs them. The steps:
"sleep", what waiting for an accelerator looks like; "matmul", one thread of torch, which takes the
GIL only between its calls; "small ops", many torch calls of microseconds, which need the GIL as
much as any Python does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Report, Times, alternate, arguments
from samples import examples_of, real_mix
from torch.utils.data import DataLoader

from torch_collate_kit import PackedCollator, PrefetchingSampler, PrefetchLoader, TokenizedDataset

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None

_COLLATE, _STEP = 0.020, 0.025


class Repeated:
    """Does ``work`` ``count`` times, whatever it is called with.

    Then it asks for 4 KB: malloc puts off merging the small blocks that were freed until somebody
    does. After 25 ms of small ops that takes 3 ms, which belong to them and not to the next batch.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.count, self._work = 1, work

    def __call__(self, _: object = None) -> None:
        for _ in range(self.count):
            self._work()
        bytes(4096)


def sorting() -> Repeated:
    """Work outside of the GIL."""
    return Repeated(partial(np.sort, np.random.default_rng(0).random(2_000)))


def count_up() -> None:
    """Work that holds the GIL."""
    total = 0
    for i in range(100):
        total += i


class Halves:
    """Sorting and counting in turn, of equal time, in eight slices."""

    def __init__(self) -> None:
        works = sorting(), Repeated(count_up)
        self._parts = [calibrated(work, _COLLATE / 16) for work in works]

    def __call__(self, indices: object = None) -> None:
        for part in self._parts * 8:
            part()


class Packed:
    """Random rows of a dataset, read as columns and packed: ``count`` rows per batch."""

    def __init__(self, folder: Path) -> None:
        self.count = 1000
        lengths, self.what = real_mix(folder, 20_000, longest=8192)
        self._dataset = TokenizedDataset(examples_of(lengths))
        self._pack = PackedCollator(0, max_tokens=8192)
        self._rng = np.random.default_rng(0)

    def __call__(self, indices: object = None) -> Any:
        rows = self._rng.integers(0, len(self._dataset), self.count)
        return self._pack(self._dataset.__getitems__(rows))


def matmul() -> Repeated:
    matrix = torch.rand(512, 512)
    return Repeated(lambda: torch.mm(matrix, matrix))


def small_ops() -> Repeated:
    vector = torch.rand(64)
    return Repeated(lambda: vector.add(1.0).mul(2.0).tanh())


def sleep(batch: object = None) -> None:
    time.sleep(_STEP)


def calibrated(work: Any, seconds: float) -> Any:
    """``work`` with the ``count`` that takes about ``seconds`` when nothing else runs."""
    for _ in range(4):
        samples = []
        for _ in range(9):
            began = time.perf_counter()
            work()
            samples.append(time.perf_counter() - began)
        work.count = max(1, round(work.count * seconds / statistics.median(samples)))
    return work


class Timed:
    """A collator that notes how long each call took."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self.seconds: list[float] = []

    def __call__(self, indices: Any) -> Any:
        began = time.perf_counter()
        batch = self._collate(indices)
        self.seconds.append(time.perf_counter() - began)
        return batch


def seconds_per_step(batches: Iterator[Any], step: Callable[[Any], object]) -> list[float]:
    """Each step with the wait for the next batch. The first batch is hidden by nothing."""
    batch = next(batches)
    seconds, began = [], time.perf_counter()
    step(batch)
    for batch in batches:
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
        step(batch)
    return seconds


def compare(
    collate: Callable[[Any], Any], step: Callable[[Any], object], num_steps: int, rounds: int
) -> tuple[dict[str, Times], dict[str, float], float]:
    """Time per step of the four ways to run, their means, and the collate time."""

    def dataloader(collate_fn: Callable[[Any], Any], **options: Any) -> DataLoader[Any]:
        indices: Any = range(num_steps + 1)  # all the work is the collator's
        sampler = PrefetchingSampler(indices, batch_size=1)
        return DataLoader(indices, batch_sampler=sampler, collate_fn=collate_fn, **options)

    noting = Timed(collate)
    loaders: dict[str, Any] = {
        "prefetch on": PrefetchLoader(dataloader(collate)),
        "prefetch off": PrefetchLoader(dataloader(noting), prefetch=False),
        "1 worker": dataloader(collate, num_workers=1, persistent_workers=True),
    }
    means: dict[str, list[float]] = {name: [] for name in [*loaders, "step alone"]}

    def run(name: str) -> Callable[[], float]:
        def seconds() -> float:
            batches = iter(loaders[name]) if name in loaders else repeat(None, num_steps + 1)
            took = seconds_per_step(batches, step)
            assert len(took) == num_steps
            means[name].append(statistics.mean(took))
            return statistics.median(took)

        return seconds

    times = alternate({name: run(name) for name in means}, rounds=rounds, warm_up=1)
    loaders["prefetch on"].close()
    loaders["prefetch off"].close()
    mean = {name: statistics.median(values) for name, values in means.items()}
    return times, mean, statistics.median(noting.seconds)


def measure_overlap(report: Report, folder: Path, num_steps: int, rounds: int) -> None:
    packed = Packed(folder)
    collators: dict[str, Callable[[], Any]] = {
        "NumPy": lambda: calibrated(sorting(), _COLLATE),
        "half Python": Halves,
        "PackedCollator": lambda: calibrated(packed, _COLLATE),
    }
    steps: dict[str, Callable[[], Any]] = {
        "sleep": lambda: sleep,
        "matmul": lambda: calibrated(matmul(), _STEP),
        "small ops": lambda: calibrated(small_ops(), _STEP),
    }
    rows = []
    for step_name, make_step in steps.items():
        for name, make in collators.items():  # made here: the machine's speed drifts
            times, means, collate = compare(make(), make_step(), num_steps, rounds)
            key = f"{name} under {step_name}"
            report.times(key, times)
            report.data[key] |= {"collate_seconds": collate, "mean_seconds_a_step": means}
            medians = {way: t.median for way, t in times.items()}
            shares = [
                1 - (figures[way] - figures["step alone"]) / collate
                for way, figures in (
                    ("prefetch on", medians),
                    ("prefetch on", means),
                    ("1 worker", medians),
                )
            ]
            cells = [f"{1e3 * seconds:.1f}" for seconds in (collate, *medians.values())]
            rows.append([step_name, name, *cells, *(f"{share:.1%}" for share in shares)])
            if step_name == "sleep" or key == "NumPy under matmul":
                report.target(f"collate time hidden: {key}", 100 * shares[0], "%", 95)
            if key == "PackedCollator under small ops":
                report.target(f"collate time hidden: {key}, 1 worker", 100 * shares[2], "%", 90)
    note = (
        f"ms per step, medians of {rounds} runs of {num_steps} steps. PackedCollator: about "
        f"{packed.count} examples a batch with the lengths of {packed.what}. The targets are on "
        "steps that release the GIL; the other rows show what happens when the step needs it too: "
        "Python gives it up only every 5 ms (sys.setswitchinterval). There a worker process hides "
        "more: its batch is columns, a seventh of the bytes of its fields."
    )
    ways = ["collate", "prefetch on", "prefetch off", "1 worker", "step alone"]
    header = ["step", "collator", *ways, "hidden", "hidden, by means", "hidden, 1 worker"]
    report.table("Overlap", header, rows, note)


def measure_overhead(report: Report, rounds: int, step_seconds: float, num_steps: int) -> None:
    """A collator that returns at once: all that is left is the loader."""

    def dataloader(kind: Any = DataLoader) -> Any:
        sampler = PrefetchingSampler(num_steps, batch_size=1, shuffle=False)
        return kind(range(num_steps), batch_sampler=sampler, collate_fn=len)

    def run(loader: Any) -> Callable[[], float]:
        def seconds() -> float:
            began = time.perf_counter()
            for _ in loader:
                if step_seconds:
                    time.sleep(step_seconds)
            return (time.perf_counter() - began) / num_steps

        return seconds

    on, off = PrefetchLoader(dataloader()), PrefetchLoader(dataloader(), prefetch=False)
    runs = {"DataLoader": dataloader(), "prefetch off": off, "prefetch on": on}
    if StatefulDataLoader is not None:
        runs["torchdata StatefulDataLoader"] = dataloader(StatefulDataLoader)
    times = alternate({name: run(loader) for name, loader in runs.items()}, rounds=rounds)
    on.close()
    off.close()
    step = f"a step of {1e3 * step_seconds:g} ms" if step_seconds else "an empty step"
    report.times(f"overhead, {step}", times)
    bare = times["DataLoader"].median
    more = {name: 1e3 * (t.median - bare) for name, t in times.items()}
    rows = [[name, *t.cells(), f"{more[name]:.4f}"] for name, t in times.items()]
    note = f"ms per step, {rounds} epochs of {num_steps} steps, {step} (sleep), collate_fn=len."
    header = ["loader", "median", "quartiles", "minimum", "more than DataLoader"]
    report.table(f"Overhead, {step}", header, rows, note)
    for way in ("prefetch off", "prefetch on"):
        report.target(f"loader overhead, {step}, {way}", more[way], "< ms", 0.2)


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=30, help="steps per run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    claim = (
        "With a 20 ms collate under a 25 ms step that releases the GIL, at least 95% of the "
        "collate time is hidden; under small Python ops one worker hides 90% of PackedCollator's; "
        "loader overhead under 0.2 ms per step. Medians of alternating runs in one process."
    )
    report = Report("loader", claim)
    measure_overhead(report, options.rounds, step_seconds=0, num_steps=2000)
    measure_overhead(report, options.rounds, step_seconds=0.002, num_steps=300)
    measure_overlap(report, options.data, options.steps, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
