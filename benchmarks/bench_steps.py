"""Steps of so many full rows: how full, even and alike they are, and what planning them costs.

Claimed: on the real mix, 8,192 tokens a row, steps by rows are 99% full, the slowest of 8 ranks
with two rows each computes 1% more than the mean, and a real token costs 1.02 times the ideal, also
of a mixture whose weights change; the first of a million examples is planned in 0.05 s.

    python benchmarks/bench_steps.py
    python benchmarks/bench_steps.py --examples 100000000   # a minute and 3 GB more

A row of the tables is 256 steps of each of 3 seeds, an epoch's rest begins the next epoch
(``tail="wrap"``). *full*: tokens / (rows x max_tokens), by examples / (rows x width of the batch).
*imbalance*: cost of the slowest rank / the mean. *time*: modelled, of a real token; pads take time
in linear layers and ranks wait for the slowest; 1 is the ideal. *like*: variance between steps of
the token mean of log2(length), over that of steps planned one at a time (by examples, and of other
packers: of as many tokens of examples drawn at random); above 1, a step holds like with like.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import Report, alternate, arguments, timed
from step_plans import (
    Figures,
    axolotl_rows,
    chance,
    figures,
    multipack_group,
    our_steps,
    rows_of_trl,
    steps_of_rows,
    trl_packing,
    wrapped_rows,
)

from torch_collate_kit import Mixture, PackedBatchSampler, PackedCollator, ParallelLayout

_MAX_TOKENS, _STEPS, _SEEDS, _PEER_STEPS = 8192, 256, 3, 60
_HEADER = ["", "full", "worst", "imbalance", "99%", "worst", "time", "like", "examples, cv"]
# ranks, rows of a step, and what is wanted: imbalance, 99%, time, like
_CASES = [
    (8, 16, 1.01, 1.04, 1.02, 4.5),
    (8, 8, 1.02, 1.12, 1.03, 6.5),
    (8, 32, 1.005, 1.02, 1.01, 1.2),
    (1, 4, None, None, 1.01, 0.5),
]
_AXOLOTL = "axolotl multipack"
_BY_EXAMPLES = [(8, 256), (8, 128), (1, 64)]


def real_lengths(folder: Path, name: str = "mix_all.qwen") -> np.ndarray:
    lengths = np.load(folder / "lengths" / f"{name}.npy").astype(np.int64)
    return lengths[lengths <= _MAX_TOKENS]


def sampler_of(
    examples: Any, ranks: int, *, strategy: str | None = None, **options: Any
) -> PackedBatchSampler:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)  # wrapped documents need an end
    packing: Any = {"max_tokens": _MAX_TOKENS, "parallel": ParallelLayout(dp=ranks)}
    collate = PackedCollator(tokenizer, strategy=strategy, normalize_loss=False, **packing)
    return PackedBatchSampler(examples, collate, **options)


def joined(parts: Sequence[Figures]) -> Figures:
    return Figures(*map(np.concatenate, zip(*parts, strict=True)))


def row_of(what: str, found: Figures, lengths: np.ndarray, like: float | None = None) -> list[str]:
    """A row of a table; ``like`` if it is known of each seed."""
    if like is None:
        like = found.mean_log.var() / chance(lengths, found.tokens.mean())
    slowest, counts = found.imbalance, found.examples
    cells = [f"{100 * found.full.mean():.2f}%", f"{100 * found.full.min():.1f}%"]
    cells += [f"{slowest.mean():.3f}", f"{np.quantile(slowest, 0.99):.3f}", f"{slowest.max():.3f}"]
    spread = f"{counts.mean():.0f}, {counts.std() / counts.mean():.2f}"
    return [what, *cells, f"{found.time.mean():.3f}", f"{like:.2f}", spread]


def steps_table(report: Report, lengths: np.ndarray) -> None:
    rows = []
    for ranks, batch_size in _BY_EXAMPLES:
        of = [sampler_of(lengths, ranks, batch_size=batch_size, seed=s) for s in range(_SEEDS)]
        found = joined([figures(our_steps(one, _STEPS), ranks, None) for one in of])
        rows.append(row_of(f"{ranks} ranks, {batch_size} examples", found, lengths))
    for ranks, batch_rows, imbalance, high, modelled, most_alike in _CASES:
        options = {"batch_rows": batch_rows, "tail": "wrap"}
        of = [sampler_of(lengths, ranks, **options, seed=seed) for seed in range(_SEEDS)]
        found = joined([figures(our_steps(one, _STEPS), ranks, _MAX_TOKENS) for one in of])
        of = [sampler_of(lengths, ranks, **options, seed=s, window=1) for s in range(_SEEDS)]
        alone = joined([figures(our_steps(one, _STEPS), ranks, _MAX_TOKENS) for one in of])
        like = float(found.mean_log.var() / alone.mean_log.var())
        what = f"{ranks} x {batch_rows // ranks} rows"
        rows.append(row_of(what, found, lengths, like))
        report.target(f"{what}: full", 100 * found.full.mean(), "%", 99)
        if imbalance is not None:
            report.target(f"{what}: imbalance, mean", found.imbalance.mean(), "<", imbalance)
            high_found = float(np.quantile(found.imbalance, 0.99))
            report.target(f"{what}: imbalance, 99th percentile", high_found, "<", high)
        report.target(f"{what}: modelled time", found.time.mean(), "<", modelled)
        report.target(f"{what}: like", like, "<", most_alike)
    note = (
        f"{len(lengths):,} real conversations of at most {_MAX_TOKENS:,} tokens; {_STEPS} steps of "
        f'{_SEEDS} seeds, window 8, strategy "balanced".'
    )
    report.table("Steps of the real mix", _HEADER, rows, note)


def mixture_table(report: Report, folder: Path) -> None:
    """Two sources, read often enough that an epoch has all the steps."""
    short = real_lengths(folder)
    short = np.tile(short[short <= 1008], 20)
    long = np.tile(real_lengths(folder, "tau_airline_all.qwen"), 60)
    stages = [[9, 1], [5, 5], [3, 7]]  # of 100 steps each, which are about 99.5% full
    schedule = [(int(0.995 * 100 * k * 16 * 8192), of) for k, of in enumerate(stages)]
    wanted = {"70 / 30": [0.7] * _STEPS, "schedule": [0.9] * 100 + [0.5] * 100 + [0.3] * 56}
    rows = []
    for name, shares in wanted.items():
        full = []
        for seed in range(_SEEDS):
            weights: Any = {"schedule": schedule} if name == "schedule" else {"weights": [7, 3]}
            mixture = Mixture([short, long], by="tokens", **weights)
            sampler = sampler_of(mixture, 8, batch_rows=16, seed=seed)
            full.append(_mixed(sampler, mixture, np.array(shares)))
        found = joined([part for part, _, _ in full])
        off = max(worst for _, worst, _ in full)
        each = max(worst for _, _, worst in full)
        lengths = mixture.lengths
        row = row_of(name, found, lengths)[:-2]
        rows.append([*row, f"{100 * off:.2f}%" if name == "70 / 30" else "-", f"{100 * each:.2f}%"])
        report.target(f"mixture {name}: full", 100 * found.full.mean(), "%", 99)
        report.target(f"mixture {name}: imbalance, mean", found.imbalance.mean(), "<", 1.01)
        if name == "70 / 30":
            report.target("mixture 70 / 30: any 100 steps", 100 * off, "<% off", 0.5)
        report.target(f"mixture {name}: each stage", 100 * each, "<% off", 0.5)
    note = (
        "8 ranks with 2 rows each: short conversations and long ones by share of the tokens, "
        f"constant, or {schedule}. The last columns: how far the share of the first source is off "
        "in the worst 100 consecutive steps, and in the worst stage."
    )
    report.table("Mixtures", [*_HEADER[:-2], "any 100 steps", "stage"], rows, note)


def _mixed(
    sampler: PackedBatchSampler, mixture: Mixture, wanted: np.ndarray
) -> tuple[Figures, float, float]:
    """Figures, and how far the share is off in any 100 steps and in a stage at most."""
    steps = list(our_steps(sampler, len(wanted)))
    tokens = np.zeros((len(wanted), 2))
    for k in range(len(wanted)):
        examples = sampler.examples(0, k)
        tokens[k] = np.bincount(mixture.source_of(examples), mixture.lengths[examples], minlength=2)
    sums = np.vstack([[0, 0], tokens.cumsum(axis=0)])
    spans = sums[100:] - sums[:-100]
    edges = [0, *(np.flatnonzero(np.diff(wanted)) + 1), len(wanted)]
    begin = [at + (8 if at else 0) for at in edges[:-1]]  # a window has steps of two stages
    stages = sums[[at - 8 for at in edges[1:]]] - sums[begin]
    off = np.abs(spans[:, 0] / spans.sum(axis=1) - wanted[0]).max()
    each = np.abs(stages[:, 0] / stages.sum(axis=1) - wanted[edges[:-1]]).max()
    return figures(steps, 8, _MAX_TOKENS), float(off), float(each)


def planning(folder: Path, number: int, shuffle: Any) -> dict[str, float]:
    """CPU seconds of the first step, of later ones and of len(), and the memory of it all."""
    rng, lengths = np.random.default_rng(0), real_lengths(folder)
    lengths = np.concatenate([rng.choice(lengths, min(number, 10**7))] * max(1, number // 10**7))
    next(iter(sampler_of(lengths[:1000], 8, batch_rows=16)))  # imports
    began = time.process_time()
    sampler = sampler_of(lengths, 8, batch_rows=16, shuffle=shuffle)
    built = time.process_time() - began
    steps = iter(sampler)
    next(steps)
    first = time.process_time() - began - built
    took = []
    for _ in range(800):
        began = time.process_time()
        next(steps)
        took.append(time.process_time() - began)
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM"))
    memory = int(line.split()[1]) / 1e6
    other = sampler_of(lengths, 8, batch_rows=16, shuffle=shuffle)
    began = time.process_time()
    num_steps = other.count_steps()
    counted = time.process_time() - began
    return {
        "built": built,
        "first": first,
        "mean": float(np.mean(took)),
        "worst": max(took),
        "len": counted,
        "steps": num_steps,
        "memory": memory,
    }


def planning_table(report: Report, folder: Path, numbers: Sequence[int]) -> None:
    limits = {10**6: (0.05, 0.5, 0.3), 10**8: (0.5, None, 40)}
    rows = []
    for number in numbers:
        shuffles: list[Any] = [True, "keyed"] if number <= 10**7 else ["keyed"]
        for shuffle in shuffles:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(planning, folder, number, shuffle).result()
            times = [f"{found['built']:.3f} s", f"{found['first']:.3f} s"]
            times += [f"{1e3 * found['mean']:.2f} ms"]
            times += [f"{1e3 * found['worst']:.1f} ms", f"{found['len']:.2f} s"]
            order = "keyed" if shuffle == "keyed" else "array"
            cells = [f"{number:,}", order, *times, f"{found['steps']:,.0f}"]
            rows.append([*cells, f"{found['memory']:.2f} GB"])
            first, later, counted = limits.get(number, (None, None, None))
            what = f"{number:,} examples, {order}"
            if first is not None:
                both = found["built"] + found["first"]
                report.target(f"{what}: sampler and first step", both, "< s", first)
                report.target(f"{what}: len()", found["len"], "< s", counted)
            if later is not None:
                report.target(f"{what}: later steps", 1e3 * found["mean"], "< ms", later)
            if number == 10**8:
                report.target(f"{what}: memory", found["memory"], "< GB", 2)
    header = ["examples", "order", "sampler", "first step", "later, mean", "worst", "len()"]
    note = (
        "CPU time, 8 ranks with 2 rows each, each line in a new process. Building the sampler is a "
        "check of the lengths (0.8 GB of 100,000,000), which are read in place. Memory is the most "
        "of the process until the 800th step, with the lengths and all libraries."
    )
    report.table("Planning", [*header, "steps", "memory"], rows, note)


def peers_table(report: Report, lengths: np.ndarray, rounds: int) -> None:
    """Every packer on the same million lengths, in one process; its rows as its trainer reads."""
    rng = np.random.default_rng(1)
    found: dict[str, Figures] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name, strategy in (("batch_rows=16", None), ("batch_rows=16, wrapped", "wrapped")):
        sampler = sampler_of(lengths, 8, strategy=strategy, batch_rows=16)
        runs[name] = partial(deque, sampler, maxlen=0)  # plans every step
        found[name] = figures(our_steps(sampler, 2000), 8, _MAX_TOKENS)

    def shuffled(rows: tuple[np.ndarray, np.ndarray]) -> Figures:
        order = rng.permutation(len(rows[1]) - 1)
        return figures(steps_of_rows(rows, order, 16), 8, _MAX_TOKENS)

    for strategy in ("bfd", "wrapped"):
        name = f"TRL {strategy}, 1,000 examples"
        try:
            runs[name] = trl_packing(lengths, _MAX_TOKENS, strategy, 1000)
        except ImportError as error:
            report.text(f"{name}: left out, {error}")
            continue
        packed, rows = runs[name](), wrapped_rows(lengths, _MAX_TOKENS, 1000)
        rows = rows_of_trl(packed) if strategy == "bfd" else rows
        assert len(packed) == len(rows[1]) - 1
        found[name] = shuffled(rows)
    found["wrapped, all examples"] = shuffled(wrapped_rows(lengths, _MAX_TOKENS, len(lengths)))
    name, pack_group, number = _AXOLOTL, multipack_group, 20_000
    try:
        import numba

        pack_group, number = numba.njit(multipack_group), len(lengths)
    except ImportError:
        name += f" (plain Python, {number:,} lengths)"
    own = lengths[rng.permutation(len(lengths))[:number]]
    runs[name] = partial(axolotl_rows, pack_group, own, _MAX_TOKENS)
    kept = runs[name]()  # compiles
    rows = own[np.concatenate(list(map(np.array, kept)))], np.cumsum([0, *map(len, kept)])
    found[name] = figures(steps_of_rows(rows, np.arange(len(kept)), 16), 8, _MAX_TOKENS)
    timers = {name: timed(run, time.process_time) for name, run in runs.items()}
    times = alternate(timers, rounds=rounds, warm_up=0)
    _show_peers(report, lengths, found, {name: took.median for name, took in times.items()})


def _show_peers(
    report: Report, lengths: np.ndarray, found: dict[str, Figures], seconds: dict[str, float]
) -> None:
    ours = next(iter(found))
    for name, peer in found.items():
        share = 100 * found[ours].time.mean() / peer.time.mean()
        if name.startswith("TRL"):
            report.target(f"time of a token against {name}", share, "<%", 95)
        if name.startswith(_AXOLOTL):
            report.target(f"time of a token against {name}", share, "<%", 100)
        if name == _AXOLOTL:
            report.target("planning all against axolotl", seconds[name] / seconds[ours], "x", 1)
        if name.startswith("TRL bfd"):
            report.target("planning all against TRL bfd", seconds[name] / seconds[ours], "x", 15)
    rows = []
    for name, peer in found.items():
        took = f"{seconds[name]:.2f} s" if name in seconds else "-"
        rows.append([name, took, *row_of(name, peer, lengths)[1:]])
    note = (
        f"{len(lengths):,} lengths drawn from the real mix, 8 ranks with 2 rows each, one process, "
        "CPU time of planning everything, the median of runs in turn. TRL's rows are shuffled as "
        "its trainer does, axolotl's are read in turn; TRL also moves the tokens (int8). Rows of "
        "wrapped documents are counted with the documents apart. axolotl is its published "
        "algorithm, written again."
    )
    report.table("Beside other packers", ["", "plan", *_HEADER[1:]], rows, note)


def main() -> int:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--examples", type=int, nargs="*", default=[10**6, 10**7])
    options = parser.parse_args()
    lengths = real_lengths(options.data)
    report = Report(
        "steps",
        "by rows, steps are 99% full and even, close to the modelled ideal, also of a mixture, and "
        "planned in half a millisecond.",
    )
    steps_table(report, lengths)
    mixture_table(report, options.data)
    peers_table(report, np.random.default_rng(0).choice(lengths, 10**6), options.rounds)
    planning_table(report, options.data, options.examples)
    report.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
