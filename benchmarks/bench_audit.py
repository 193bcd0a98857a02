"""How many tokens a second audit looks at, from columns, with every check that it has.

Claimed: at least 3 million tokens per second of one core, for examples and for rollouts, from
ragged columns and from a TokenizedDataset.

    python benchmarks/bench_audit.py

Lengths are those of real conversations, ids are random bytes of a made-up tokenizer with a chat
template, so that no check is left out for want of one; every row ends with EOS. Processor time, one
thread. Before anything is timed, each form must come out clean, and with a mask of zeros must not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, alternate, arguments, timed
from samples import real_mix

from torch_collate_kit import TokenizedDataset, audit
from torch_collate_kit.chat.preview import byte_tokenizer
from torch_collate_kit.ragged import Ragged

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_TOKENS = 4096


def rows_of(lengths: np.ndarray, eos: int) -> dict[str, Ragged]:
    """Rows with a random prompt, and an answer half as long that ends with EOS."""
    lengths = np.maximum(lengths, 8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, size=int(lengths.sum()), dtype=np.int32)
    ends = np.cumsum(lengths)
    ids[ends - 1] = eos
    places = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    mask = (places >= np.repeat(lengths // 2, lengths)).astype(np.int8)
    return {
        "input_ids": Ragged.from_lengths(ids, lengths),
        "loss_mask": Ragged.from_lengths(mask, lengths),
    }


def rollouts_of(rows: dict[str, Ragged]) -> dict[str, Any]:
    """The same tokens as rollouts, four to a group."""
    ids, lengths = rows["input_ids"], rows["input_ids"].lengths
    prompts, is_response = lengths // 2, rows["loss_mask"].values > 0
    responses = lengths - prompts
    logprobs = -np.random.default_rng(1).random(int(responses.sum()), dtype=np.float32) - 0.1
    return {
        "prompt_ids": Ragged.from_lengths(ids.values[~is_response], prompts),
        "response_ids": Ragged.from_lengths(ids.values[is_response], responses),
        "loss_mask": Ragged.from_lengths(np.ones(len(logprobs), dtype=np.int8), responses),
        "logprobs": Ragged.from_lengths(logprobs, responses),
        "rewards": np.arange(len(lengths)) % 2.0,
        "uid": [i // 4 for i in range(len(lengths))],
    }


def table_of(rows: dict[str, Ragged]) -> TokenizedDataset:
    """The rows as a dataset of one Arrow table in memory."""
    import pyarrow as pa

    lists = {
        name: pa.LargeListArray.from_arrays(of.offsets, pa.array(of.values))
        for name, of in rows.items()
    }
    return TokenizedDataset(pa.table(lists))


def labelled(rows: dict[str, Ragged]) -> dict[str, Ragged]:
    ids, mask = rows["input_ids"], rows["loss_mask"].values
    labels = np.where(mask > 0, ids.values, -100).astype(np.int32)
    return {"input_ids": ids, "labels": Ragged(labels, ids.offsets)}


def check(data: Any, name: str, column: str, tokenizer: Any) -> None:
    """Raises unless a zeroed mask is found, and nothing in the data as it is."""
    report = audit(data, tokenizer)
    if not report.ok:
        raise AssertionError(f"{name}: {report}")
    if isinstance(data, TokenizedDataset):
        return
    values = np.full_like(data[column].values, -100 if column == "labels" else 0)
    broken = {**data, column: Ragged(values, data[column].offsets)}
    if "masks_all_zero" not in audit(broken, tokenizer).names:
        raise AssertionError(f"{name}: a mask of zeros was not found")


def measure(report: Report, folder: Path, count: int, rounds: int) -> None:
    lengths, what = real_mix(folder, count, longest=MAX_TOKENS)
    tokenizer = byte_tokenizer(TEMPLATE)
    rows = rows_of(lengths, tokenizer.eos_token_id)
    data = {
        "examples with loss_mask": rows,
        "examples with labels": labelled(rows),
        "TokenizedDataset": table_of(rows),
        "rollouts with logprobs": rollouts_of(rows),
    }
    runs: dict[str, Callable[[], float]] = {}
    for name, given in data.items():
        check(given, name, "labels" if "labels" in name else "loss_mask", tokenizer)
        call = partial(audit, given, tokenizer, max_tokens=MAX_TOKENS)
        runs[name] = timed(call, clock=time.process_time)
    times = alternate(runs, rounds=rounds, warm_up=1)
    report.times("audit", times)
    num_tokens = len(rows["input_ids"].values)
    table = []
    for name, of in times.items():
        speed = num_tokens / of.median / 1e6
        report.target(f"{name}, million tokens/s", speed, "", 3)
        table.append([name, *of.cells(), f"{speed:.3g}"])
    header = ["", "ms", "quartiles", "minimum", "million tokens/s"]
    note = f"{len(lengths):,} rows, {num_tokens:,} tokens, {what}; all checks; {rounds} rounds."
    report.table("From columns", header, table, note)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--count", type=int, default=20_000, help="rows")
    options = parser.parse_args()
    claim = "audit looks at 3 million tokens per second of one core or more, with every check."
    report = Report("audit", claim)
    measure(report, options.data, options.count, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
