"""How fast the collators are, against plain NumPy, other collators and a copy of their output.

Claimed, for 1,024 examples of about 425,000 tokens, medians of alternating runs in one process, one
thread, against a row-by-row NumPy version of the same fields: packed from columns at least 3.3
times faster, from ndarrays 2 times; padded (357,000 tokens in rows of 2,048) from columns 5 times,
and in less time than a memcpy of the fields; through one DataLoader worker in at most 1.5 times the
time of the call; at most 7 bytes pickled per token; a random batch out of a TokenizedDataset 15
times faster than the rows that ``datasets`` gives; an example in a batch of 8,192 costs less than
1.3 times one in a batch of 64.

    python benchmarks/bench_collate.py

The call leaves the fields to be made when they are read, so every table has the call (collate), the
call with all fields that a step reads (ready), and what comes through a worker (delivered); see
benchmarks/runs.py. The row-by-row version (benchmarks/row_by_row.py) makes the same fields in the
same dtypes, and is checked to give the same values before anything is timed. Other collators make
fewer fields and mostly one row: they are in the table to be compared, not in the targets.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peers
import torch
from harness import Report, arguments
from row_by_row import best_fit, check_equal, first_fit, packed, padded
from runs import HEADER, Runs, columns_of, compare, lists_of, measured, ready, rows_of
from samples import Examples, examples_of, long_tail, real_mix

from torch_collate_kit import PackedCollator, PaddedCollator, TokenizedDataset


def plain_packed(examples: Examples, lists: Any, max_tokens: int) -> Runs:
    """The plain versions, checked to be equal to ours where rows are filled alike."""
    ours = PackedCollator(0, max_tokens=max_tokens)
    plan = ours.plan([len(example["input_ids"]) for example in examples])
    by_first_fit = PackedCollator(0, max_tokens=max_tokens, strategy="first_fit_decreasing")
    for given in (columns_of(examples), examples, lists):
        check_equal(ours(given), packed(examples, max_tokens=max_tokens, fill=lambda *_: plan.bins))
        plain = packed(examples, max_tokens=max_tokens, fill=first_fit)
        check_equal(by_first_fit(given), plain)
    fills = {
        "row by row, ndarrays, first fit": (examples, first_fit),
        "row by row, ndarrays": (examples, best_fit),
        "row by row, lists": (lists, best_fit),
    }
    return {
        name: partial(packed, given, max_tokens=max_tokens, fill=fill)
        for name, (given, fill) in fills.items()
    }


def plain_padded(examples: Examples, lists: Any) -> Runs:
    for given in (columns_of(examples), examples, lists):
        check_equal(PaddedCollator(0)(given), padded(examples))
    named = {"row by row, ndarrays": examples, "row by row, lists": lists}
    return {name: partial(padded, given) for name, given in named.items()}


def peer_runs(examples: Examples, max_tokens: int, layout: str) -> tuple[Runs, dict[str, str]]:
    """Peers of a layout on lists, TRL on ndarrays too; masks in the form that each one reads."""
    labelled = []
    for example in examples:
        ids, mask = example["input_ids"], example["loss_mask"]
        labels = np.where(mask != 0, ids, -100)
        labelled.append({"input_ids": ids, "labels": labels})
    lists = lists_of(labelled)
    runs: Runs = {}
    fields: dict[str, str] = {}
    for name, (collate, makes) in peers.collators().items():
        if ("padded" in name) != (layout == "padded"):
            continue
        if collate is None:
            fields[name] = "not installed"
            continue
        inputs = {"lists": lists} | ({"ndarrays": labelled} if "TRL" in name else {})
        for kind, values in inputs.items():
            key = f"{name}, {kind}"
            runs[key], fields[key] = (lambda c=collate, v=values: c(v)), makes
            batch = runs[key]()
            if int(batch["input_ids"].sum()) != sum(int(e["input_ids"].sum()) for e in examples):
                raise AssertionError(f"{key} does not hold the tokens of the examples")
    return runs, fields


def layouts(report: Report, folder: Path, rounds: int) -> None:
    """Packed and padded, real mix and long tail."""
    count, longest_padded = 1024, 2048
    mixes = {
        "real mix": (*real_mix(folder, count, longest=8192), 8192),
        "long tail": (*long_tail(count, longest=16384), 16384),
    }
    for mix, (lengths, what, max_tokens) in mixes.items():
        for layout, longest in (("packed", max_tokens), ("padded", longest_padded)):
            examples = examples_of(np.minimum(lengths, longest))
            lists = lists_of(examples)
            inputs = {"columns": columns_of(examples), "ndarrays": examples, "lists": lists}
            collate: Any = PaddedCollator(0)
            if layout == "packed":
                collate = PackedCollator(0, max_tokens=max_tokens)
                plain = plain_packed(examples, lists, max_tokens)
            else:
                plain = plain_padded(examples, lists)
            tokens = sum(len(example["input_ids"]) for example in examples)
            about = f"{count} examples, {tokens:,} tokens, {what}, cut at {longest}"
            heading = f"{layout}, {mix}"
            median = compare(report, heading, collate, inputs, plain, rounds=rounds, about=about)
            targets(report, layout, heading, median)
            if mix == "real mix":
                compare_peers(report, layout, collate, inputs, max_tokens, about)


def compare_peers(
    report: Report, layout: str, collate: Any, inputs: Mapping[str, Any], longest: int, about: str
) -> None:
    """Slow ones among them: five rounds. Ours with all fields made."""
    others, fields = peer_runs(inputs["ndarrays"], longest, layout)
    ours = {kind: lambda given=given: ready(collate(given)) for kind, given in inputs.items()}
    times = measured(ours | others, 5)
    report.times(f"{layout}, other collators", times)
    rows = rows_of(times, "columns", fields)
    rows += [[name, *["-"] * 4, made] for name, made in fields.items() if name not in times]
    note = f"ms; {about}; ours ready; last batch kept; medians of 5 rounds."
    report.table(f"{layout}, other collators", HEADER, rows, note)


def targets(report: Report, layout: str, heading: str, median: Mapping[str, float]) -> None:
    least = {"packed": (3.3, 2.0), "padded": (5.0, None)}[layout]
    for kind, limit in zip(("columns", "ndarrays"), least, strict=True):
        if limit is not None:
            factor = median["row by row, ndarrays"] / median[f"collate, {kind}"]
            report.target(f"{heading}: collate from {kind}, against row by row", factor, "x", limit)
    if layout == "padded":
        share = median["collate, columns"] / median["memcpy of the fields"]
        report.target(f"{heading}: collate from columns, over a memcpy", share, "<x", 1)
    more = median["delivered, columns"] / median["collate, columns"]
    report.target(f"{heading}: delivered, over the call", more, "<x", 1.5)


def growth(report: Report, folder: Path, rounds: int) -> None:
    """The same 8,192 examples in batches of 64 to 8,192, and the plot."""
    examples = examples_of(real_mix(folder, 8192, longest=8192)[0])
    tokens = sum(len(example["input_ids"]) for example in examples)
    collate = PackedCollator(0, max_tokens=8192)
    plain = partial(packed, max_tokens=8192, fill=best_fit)
    sizes = [64, 256, 1024, 4096, 8192]
    runs: Runs = {}
    for size in sizes:
        parts = [examples[i : i + size] for i in range(0, len(examples), size)]
        columns = [columns_of(part) for part in parts]
        runs[f"columns, {size}"] = partial(_last, collate, columns)
        runs[f"row by row, {size}"] = partial(_last, plain, parts)
    times = measured(runs, rounds)
    report.times("growth", times)
    rows, series = [], {}
    for way in ("columns", "row by row"):
        per_example = [times[f"{way}, {size}"].median / len(examples) for size in sizes]
        series[way] = [
            times[f"{way}, {size}"].median * size / len(examples) * 1e3 for size in sizes
        ]
        ratio = per_example[-1] / per_example[0]
        over_least = per_example[-1] / min(per_example)
        micros = [f"{1e6 * seconds:.2f}" for seconds in per_example]
        rows.append([way, *micros, f"{ratio:.2f}x", f"{over_least:.2f}x"])
        if way == "columns":
            report.target("cost per example, batch 64 to 8,192", ratio, "<x", 1.3)
            report.target("cost per example, cheapest batch to 8,192", over_least, "<x", 1.3)
    note = (
        f"microseconds per example; the same {len(examples):,} examples ({tokens:,} tokens) of the "
        f"real mix in batches of each size, packed; medians of {rounds} rounds. Row by row: "
        "ndarrays, best fit."
    )
    report.table("Growth", ["", *map(str, sizes), "last / first", "last / least"], rows, note)
    report.data["plot"] = {"tokens": [tokens * s // len(examples) for s in sizes], "ms": series}


def _last(collate: Callable[[Any], Any], parts: Sequence[Any]) -> Any:
    """Batch after batch, each alive until the next one is there."""
    batch = None
    for part in parts:
        batch = collate(part)
    return batch


def plot(report: Report, folder: Path) -> None:
    """Time against tokens, next to the tables."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    tokens = report.data["plot"]["tokens"]
    names = {"columns": "PackedCollator, columns", "row by row": "row-by-row NumPy, ndarrays"}
    for way, ms in report.data["plot"]["ms"].items():
        axes.loglog(tokens, ms, marker="o", label=names[way])
    axes.set(
        xlabel="tokens in the batch", ylabel="ms per batch", title="Packed collation, one thread"
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "collate.png", dpi=120)
    report.text("![time against tokens](collate.png)")


def reading(report: Report, folder: Path, rounds: int) -> None:
    """Random batches of 1,024 rows out of 20,000 on disk, memory-mapped."""
    examples = examples_of(real_mix(folder, 20_000, longest=8192)[0])
    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32"))}
        | {"loss_mask": datasets.List(datasets.Value("int8"))}
    )
    ids = [example["input_ids"].astype(np.int32) for example in examples]
    masks = [example["loss_mask"].astype(np.int8) for example in examples]
    rng = np.random.default_rng(0)
    picks = [rng.integers(0, len(examples), 1024).tolist() for _ in range(8)]
    made = datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks}, features=features)
    collate = PackedCollator(0, max_tokens=8192)
    with tempfile.TemporaryDirectory() as disk:
        made.save_to_disk(disk)
        source = datasets.load_from_disk(disk)
        kit, as_numpy = TokenizedDataset(source), source.with_format("numpy")
        for pick in picks[:1]:
            batch = kit.__getitems__(pick)
            rows = source.__getitems__(pick)
            assert batch["input_ids"].tolist() == [row["input_ids"] for row in rows]
            assert batch["loss_mask"].tolist() == [row["loss_mask"] for row in rows]
        turns = {"n": 0}

        def drawn(read: Callable[[list[int]], object]) -> Callable[[], object]:
            def run() -> object:
                turns["n"] += 1
                return read(picks[turns["n"] % len(picks)])

            return run

        def numpy_rows(pick: list[int]) -> list[dict[str, np.ndarray]]:
            columns = as_numpy[pick]
            pairs = zip(columns["input_ids"], columns["loss_mask"], strict=True)
            return [{"input_ids": a, "loss_mask": b} for a, b in pairs]

        readers: dict[str, Callable[[list[int]], Any]] = {
            "TokenizedDataset": kit.__getitems__,
            "datasets, default rows": source.__getitems__,
            "datasets, numpy format": numpy_rows,
            "datasets, arrow format": source.with_format("arrow").__getitem__,
        }
        times = measured({k: drawn(f) for k, f in readers.items()}, rounds)
        report.times("reading", times)
        tokens = statistics.mean(sum(len(ids[i]) for i in pick) for pick in picks)
        note = (
            f"ms; random batches of 1,024 rows (about {tokens:,.0f} tokens) out of {len(made):,}, "
            "input_ids int32 and loss_mask int8 in a memory-mapped Arrow file; last batch kept. "
            "The arrow format gives an Arrow table, which no collator takes."
        )
        rows = [row[:-1] for row in rows_of(times, "TokenizedDataset", {})]
        report.table("Reading from Arrow", HEADER[:-1], rows, note)
        factor = times["datasets, default rows"].median / times["TokenizedDataset"].median
        report.target("TokenizedDataset against datasets' rows", factor, "x", 15, aim=25)
        whole: dict[str, Callable[[list[int]], object]] = {
            "TokenizedDataset, PackedCollator": lambda i: collate(kit.__getitems__(i)),
            "datasets default rows, PackedCollator": lambda i: collate(source.__getitems__(i)),
            "datasets default rows, row by row": lambda i: packed(
                source.__getitems__(i), max_tokens=8192, fill=first_fit
            ),
            "datasets numpy format, row by row": lambda i: packed(
                numpy_rows(i), max_tokens=8192, fill=first_fit
            ),
        }
        times = measured({k: drawn(f) for k, f in whole.items()}, rounds)
        report.times("from Arrow to a packed batch", times)
        rows = rows_of(times, "TokenizedDataset, PackedCollator", {})
        report.table("From Arrow to a packed batch", HEADER, rows, "ms; the same batches.")


def main() -> None:
    parser = arguments(__doc__, rounds=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    claim = (
        "1,024 examples, about 425,000 tokens, one thread, medians of alternating runs in one "
        "process: the call at least 3.3x a row-by-row NumPy version packed from columns, 2x from "
        "ndarrays, 5x padded from columns; through one DataLoader worker at most 1.5x the call; at "
        "most 7 bytes per token pickled; reading 15x of datasets' rows; an example costs less than "
        "1.3x from batch 64 to 8,192."
    )
    report = Report("collate", claim)
    layouts(report, options.data, options.rounds)
    growth(report, options.data, max(5, options.rounds // 3))
    plot(report, options.out)
    reading(report, options.data, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
