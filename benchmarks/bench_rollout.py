"""How fast rollouts are collated, against plain NumPy and a copy of the output.

Claimed, for 1,024 rollouts with log-probs, medians of alternating runs in one process, one thread,
against a row-by-row NumPy version of the same fields: from columns at least 5 times faster, from
ndarrays 2.5 times, from Python lists 1.5 times (against the same on lists); a declared float32
column per response token costs at most 1.5 times a memcpy of it.

    python benchmarks/bench_rollout.py

collate, ready and delivered are explained in benchmarks/runs.py. The row-by-row version
(benchmarks/row_by_row.py) makes the same fields in the same dtypes, and is checked to give the same
values before anything is timed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Report, arguments
from row_by_row import check_equal, rollouts
from runs import HEADER, columns_of, compare, lists_of, measured, rows_of
from samples import long_tail, real_mix, rollouts_of

from torch_collate_kit import PerResponseToken, RolloutCollator
from torch_collate_kit.ragged import Ragged


def blocks(report: Report, folder: Path, rounds: int) -> None:
    count, longest = 1024, 2048
    mixes = {
        "real mix": real_mix(folder, count, longest=longest),
        "long tail": long_tail(count, longest=longest),
    }
    collate = RolloutCollator(0)
    for mix, (lengths, what) in mixes.items():
        examples = rollouts_of(lengths)
        lists = lists_of(examples)
        inputs = {"columns": columns_of(examples), "ndarrays": examples, "lists": lists}
        for given in inputs.values():
            check_equal(collate(given), rollouts(examples))
        kinds = {"ndarrays": examples, "lists": lists}
        plain = {f"row by row, {kind}": partial(rollouts, given) for kind, given in kinds.items()}
        about = f"{count} rollouts, {int(lengths.sum()):,} tokens, {what}, cut at {longest}"
        median = compare(report, mix, collate, inputs, plain, rounds=rounds, about=about)
        for kind, of, limit in (
            ("columns", "ndarrays", 5),
            ("ndarrays", "ndarrays", 2.5),
            ("lists", "lists", 1.5),
        ):
            factor = median[f"row by row, {of}"] / median[f"collate, {kind}"]
            what_for = f"{mix}: collate from {kind}, against row by row, {of}"
            report.target(what_for, factor, "x", limit)
        more = median["delivered, columns"] / median["collate, columns"]
        report.target(f"{mix}: delivered, over the call", more, "<x", 1.5)


def further_column(report: Report, folder: Path, rounds: int) -> None:
    """What a declared float32 column costs the call."""
    columns = columns_of(rollouts_of(real_mix(folder, 1024, longest=2048)[0]))
    logprobs = columns["logprobs"]
    columns["ref_logprobs"] = Ragged(logprobs.values - 0.5, logprobs.offsets)
    declared = RolloutCollator(0, fields={"ref_logprobs": PerResponseToken(torch.float32)})
    batch, source = declared(columns), torch.from_numpy(columns["ref_logprobs"].values)
    if not torch.equal(
        batch["ref_logprobs"], batch["rollout_logprobs"] - 0.5 * batch["response_mask"]
    ):
        raise AssertionError("the declared column is not in the batch as it was given")
    runs = {
        "without": partial(RolloutCollator(0), columns),
        "with": partial(declared, columns),
        "memcpy to new memory": source.clone,
    }
    times = measured(runs, 5 * rounds)
    report.times("further column", times)
    median = {name: t.median for name, t in times.items()}
    factor = (median["with"] - median["without"]) / median["memcpy to new memory"]
    note = f"ms; rollouts from columns; the declared column has {len(source):,} entries."
    header = [*HEADER[:4], "time / without"]
    rows = [row[:-1] for row in rows_of(times, "without", {})]
    report.table("A declared float32 column", header, rows, note)
    report.target("a declared float32 column, over a memcpy of it", factor, "<x", 1.5)


def widths(report: Report) -> None:
    """One block of prompt and response, and two blocks padded apart."""
    prompts, responses = np.array([5_000, 55_000]), np.array([50_000, 4_000])
    examples = []
    for prompt, response in zip(prompts.tolist(), responses.tolist(), strict=True):
        tokens = {"prompt_ids": prompt, "response_ids": response}
        example = {name: np.ones(count, dtype=np.int64) for name, count in tokens.items()}
        ones = np.ones(response, np.float32)
        values = {"rewards": ones, "loss_mask": ones, "logprobs": -ones}
        examples.append(example | values)
    batch = RolloutCollator(0)(examples)
    cells = ("input_ids", "attention_mask", "position_ids")
    one, two = batch["input_ids"].shape[1], int(prompts.max() + responses.max())
    mb = sum(batch[name].nbytes for name in cells) / 1e6
    rows = [
        [name, f"{wide:,}", f"{mb * wide / one:.2f}", f"{wide / one:.2f}x"]
        for name, wide in (("one block", one), ("prompts and responses padded apart", two))
    ]
    note = (
        "prompt 5,000 and response 50,000 beside prompt 55,000 and response 4,000; MB of "
        f"{', '.join(cells)}; the second line is counted, not measured."
    )
    report.table("Width", ["", "tokens wide", "MB", "of one block"], rows, note)


def main() -> None:
    parser = arguments(__doc__, rounds=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    claim = (
        "1,024 rollouts with log-probs, one thread, medians of alternating runs in one process: "
        "the call at least 5x a row-by-row NumPy version from columns, 2.5x from ndarrays, 1.5x "
        "from lists; a declared float32 column at most 1.5x a memcpy of it."
    )
    report = Report("rollout", claim)
    blocks(report, options.data, options.rounds)
    further_column(report, options.data, options.rounds)
    widths(report)
    report.write(options.out)


if __name__ == "__main__":
    main()
