"""How fast rollouts are collated, against plain NumPy, SkyRL's loops and a copy of the output.

Claimed, for 1,024 rollouts with log-probs, medians of alternating runs in one process, one thread:
from ndarrays at least 3 times faster than a row-by-row NumPy version of the same fields, from
Python lists 1.3 times (against the same on lists), from columns within twice a memcpy of its
output.

    python benchmarks/bench_rollout.py

The row-by-row version (benchmarks/row_by_row.py) makes the same fields in the same dtypes, and is
checked to give the same values before anything is timed. SkyRL's loops make no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import peers
import torch
from harness import STATES, Report, Times, arguments
from row_by_row import check_equal, rollouts
from runs import HEADER, Runs, columns_of, copies, lists_of, measured, rows_of, ways
from samples import DEFAULT_DATA, Examples, long_tail, real_mix, rollouts_of

from torch_collate_kit import RolloutCollator


def runs_of(examples: Examples) -> Runs:
    """Ours from three kinds of input, and the plain version, all checked to be equal."""
    lists = lists_of(examples)
    inputs = {"columns": columns_of(examples), "ndarrays": examples, "lists": lists}
    runs = ways(RolloutCollator, inputs)
    plain = rollouts(examples)
    for run in runs.values():
        check_equal(run(), plain)
    return {
        **runs,
        "row by row, ndarrays": lambda: rollouts(examples),
        "row by row, lists": lambda: rollouts(lists),
        **copies(RolloutCollator(0)(examples)),
    }


def targets(report: Report, mix: str, times: Mapping[str, Times]) -> None:
    median = {name: t.median for name, t in times.items()}
    for suffix in ("", ", compiled"):
        if f"columns{suffix}" not in median:
            continue
        for kind, limit, aim in (("ndarrays", 3, 6), ("lists", 1.3, 1.6)):
            factor = median[f"row by row, {kind}"] / median[kind + suffix]
            what = f"from {kind}{suffix}, against row by row, {kind} ({mix})"
            report.target(what, factor, "x", limit, aim=aim)
        floor = median[f"columns{suffix}"] / median["memcpy of the output"]
        report.target(f"from columns{suffix}, over a memcpy ({mix})", floor, "<x", 2)


def compare(report: Report, folder: Path, rounds: int) -> None:
    count, longest = 1024, 2048
    mixes = {
        "real mix": real_mix(folder, count, longest=longest),
        "long tail": long_tail(count, longest=longest),
    }
    for mix, (lengths, what) in mixes.items():
        examples = rollouts_of(lengths)
        runs = runs_of(examples)
        widest = max(len(example["response_ids"]) for example in examples)
        about = (
            f"ms; {count} rollouts, {int(lengths.sum()):,} tokens, {what}, cut at {longest}; "
            f"the batch is {int(lengths.max())} wide, its responses {widest}"
        )
        for state in STATES:
            times = measured(runs, rounds, state)
            report.times(f"{mix}, {state}", times)
            rows = [row[:-1] for row in rows_of(times, "columns", {})]
            note = f"{about}; {STATES[state]}; medians of {rounds} rounds."
            report.table(f"{mix}, {state}", HEADER[:-1], rows, note)
            if state != "freed":
                targets(report, f"{mix}, {state}", times)
        skyrl = peers.skyrl_rollouts()
        if mix == "real mix" and skyrl is not None:
            ours = {name: runs[name] for name in ("columns", "ndarrays", "lists")}
            times = measured(ours | {"SkyRL, lists": partial(skyrl, lists_of(examples))}, 5, "kept")
            report.times("other collators", times)
            fields = {"SkyRL, lists": "no positions"}
            report.table("Other collators", HEADER, rows_of(times, "columns", fields), about)


def widths(report: Report) -> None:
    """One block of prompt and response, and two blocks padded apart."""
    prompts, responses = np.array([5_000, 55_000]), np.array([50_000, 4_000])
    examples = []
    for prompt, response in zip(prompts.tolist(), responses.tolist(), strict=True):
        tokens = {"prompt_ids": prompt, "response_ids": response}
        example = {name: np.ones(count, dtype=np.int64) for name, count in tokens.items()}
        values = dict.fromkeys(("rewards", "loss_mask", "logprobs"), np.ones(response, np.float32))
        examples.append(example | values)
    batch = RolloutCollator(0)(examples)
    cells = ("input_ids", "attention_mask", "position_ids")
    one, two = batch["input_ids"].shape[1], int(prompts.max() + responses.max())
    mb = sum(batch[name].nbytes for name in cells) / 1e6
    rows = [
        ["one block", f"{one:,}", f"{mb:.2f}", "1.00x"],
        [
            "prompts and responses padded apart",
            f"{two:,}",
            f"{mb * two / one:.2f}",
            f"{two / one:.2f}x",
        ],
    ]
    note = (
        "prompt 5,000 and response 50,000 beside prompt 55,000 and response 4,000; MB of "
        f"{', '.join(cells)}; the second line is counted, not measured."
    )
    report.table("Width", ["", "tokens wide", "MB", "of one block"], rows, note)


def main() -> None:
    parser = arguments(__doc__, rounds=11)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with real lengths")
    options = parser.parse_args()
    torch.set_num_threads(1)
    claim = (
        "1,024 rollouts with log-probs, one thread, medians of alternating runs in one process: "
        "from ndarrays at least 3x a row-by-row NumPy version, from lists 1.3x, from columns "
        "within 2x of a memcpy of the output."
    )
    report = Report("rollout", claim)
    compare(report, options.data, options.rounds)
    widths(report)
    report.write(options.out)


if __name__ == "__main__":
    main()
