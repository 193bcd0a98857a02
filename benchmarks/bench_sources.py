"""What it costs to read data where it is: packed rows, files of tokens, raw texts.

Claimed: rows are unpacked at 1.5 times the speed at which TRL packs them, both with their files
written; documents are read from a ``.bin`` as fast as megatron-core reads 16 at a time, and 3 times
as fast at 256; a file of 1e8 tokens is opened with all checks in the time of 100 of its reads of
256; texts are tokenized at 1.2 times the speed of ``datasets.map`` of the raw tokenizer.

    python benchmarks/bench_sources.py

What is not installed (TRL, megatron-core: ``pip install --no-deps megatron-core``) is left out. Of
the reads the result is one int64 tensor in each case, as a collator needs it.
"""

from __future__ import annotations

import json
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from harness import Report, alternate, arguments, timed
from transformers import AutoTokenizer

from torch_collate_kit.chat import tokenize_documents
from torch_collate_kit.loading import token_files, unpack_dataset

TOKENS, DOCUMENTS = 100_000_000, 111_000


def ratio(times: dict[str, Any], slow: str, fast: str) -> float:
    return times[slow].median / times[fast].median


def packed_rows(report: Report, rounds: int, folder: Path) -> None:
    try:
        from trl import pack_dataset
    except ImportError:
        report.text("TRL is not installed: unpacking is not compared.")
        return
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.5, 0.8, 20_000).clip(4, 2048).astype(int)
    ids = [rng.integers(3, 30_000, n).astype(np.int32) for n in lengths]
    labels = [np.where(np.arange(len(row)) < len(row) // 2, -100, row) for row in ids]
    datasets.Dataset.from_dict({"input_ids": ids, "labels": labels}).save_to_disk(folder / "rows")
    documents = datasets.load_from_disk(folder / "rows")
    packed = pack_dataset(documents, 4096)
    runs = {
        "TRL pack_dataset": timed(lambda: pack_dataset(documents, 4096)),
        "unpack_dataset": timed(lambda: unpack_dataset(packed)),
    }
    times = alternate(runs, rounds=rounds, warm_up=1)
    report.times("packed rows", times)
    found = ratio(times, "TRL pack_dataset", "unpack_dataset")
    report.target("unpacking, beside packing by TRL", found, "x", 1.5)
    rows = [
        [name, *t.cells(), f"{lengths.sum() / t.median / 1e6:.1f}"] for name, t in times.items()
    ]
    header = ["by", "ms, median", "quartiles", "least", "million tokens per second"]
    report.table("Rows packed by TRL (bfd, 4,096 tokens)", header, rows)


def written(folder: Path) -> Path:
    """Write a ``.bin`` and its ``.idx`` as Megatron does."""
    rng = np.random.default_rng(0)
    lengths = rng.geometric(DOCUMENTS / TOKENS, DOCUMENTS).astype(np.int32)
    tokens = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens[ends - 1] = 0
    tokens.tofile(folder / "data.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, DOCUMENTS, DOCUMENTS + 1)
    pointers = (ends - lengths) * 2
    parts = [head, lengths.tobytes(), pointers.tobytes(), np.arange(DOCUMENTS + 1).tobytes()]
    (folder / "data.idx").write_bytes(b"".join(parts))
    (folder / "raw.bin").hardlink_to(folder / "data.bin")
    return folder / "data.bin"


def files(report: Report, rounds: int, folder: Path) -> None:
    path = written(folder)
    dataset = token_files(path)
    size = len(pickle.dumps(dataset)) / 2**20
    report.target("pickle of 1e8 tokens for a worker", size, "<MB", 2)
    opens = {
        "Megatron, all checks": timed(lambda: token_files(path)),
        "by end token": timed(
            lambda: token_files(path.with_name("raw.bin"), dtype="uint16", end_id=0)
        ),
    }
    times = alternate(opens, rounds=rounds)
    report.times("open", times)
    report.table(
        "Opening 1e8 tokens", ["how", "ms", "quartiles", "least"],
        [[name, *t.cells()] for name, t in times.items()],
    )  # fmt: skip
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    except ImportError:
        report.text("megatron-core is not installed: reads are not compared.")
        return
    theirs: Any = IndexedDataset(str(path.with_suffix("")), mmap=True)
    rng, rows = np.random.default_rng(1), []
    for count in (1, 16, 256, 4096):
        num_reads = max(4, 2000 // count)
        batches = [rng.integers(0, DOCUMENTS, count).tolist() for _ in range(num_reads)]

        def megatron(batches: Any = batches) -> None:
            for batch in batches:
                torch.from_numpy(np.concatenate([theirs[i] for i in batch]).astype(np.int64))

        def ours(batches: Any = batches) -> None:
            for batch in batches:
                ids = dataset.__getitems__(batch)["input_ids"].values
                torch.from_numpy(ids.astype(np.int64))

        runs: dict[str, Callable[[], float]] = {
            "megatron-core": timed(megatron),
            "ours": timed(ours),
        }
        read = alternate(runs, rounds=rounds)
        report.times(f"reads of {count}", read)
        found = ratio(read, "megatron-core", "ours")
        if count in (16, 256):
            report.target(f"reads of {count} documents", found, "x", {16: 1.0, 256: 3.0}[count])
        if count == 256:
            opened = times["Megatron, all checks"].median * num_reads / read["megatron-core"].median
            report.target("opening, in reads of 256 by megatron-core", opened, "<x", 100)
        us = [f"{read[name].median / num_reads * 1e6:,.0f}" for name in runs]
        rows.append([str(count), *us, f"{found:.2f}"])
    header = ["documents", "megatron-core, us", "ours, us", "times as fast"]
    report.table("Documents in random order as one int64 tensor", header, rows)


def texts(report: Report, rounds: int, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizers" / "mistral-32k-chatml")
    lines = (data / "chat_long_squality_50.jsonl").read_text(encoding="utf-8").splitlines()
    contents = [m["content"] for line in lines for m in json.loads(line)["messages"]]
    given = datasets.Dataset.from_dict({"text": [text for text in contents if text]})

    def raw() -> Any:
        def call(batch: Any) -> Any:
            return {"input_ids": tokenizer(batch["text"])["input_ids"]}

        return given.map(call, batched=True, remove_columns=["text"])

    ends = [tokenizer.eos_token_id]
    ours = tokenize_documents(given, tokenizer, end=True)[0]["input_ids"][:]
    assert ours == [ids + ends for ids in raw()["input_ids"]]
    runs = {
        "datasets.map": timed(raw),
        "tokenize_documents": timed(lambda: tokenize_documents(given, tokenizer)),
    }
    times = alternate(runs, rounds=rounds, warm_up=1)
    report.times("texts", times)
    found = ratio(times, "datasets.map", "tokenize_documents")
    report.target("texts, beside datasets.map of the raw tokenizer", found, "x", 1.2)
    rows = [[name, *t.cells()] for name, t in times.items()]
    report.table("Raw texts", ["by", "ms, median", "quartiles", "least"], rows)


def main() -> None:
    options = arguments(__doc__, rounds=7).parse_args()
    torch.set_num_threads(1)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    report = Report("sources", "Data is read where it is, faster than by the tools that wrote it.")
    with tempfile.TemporaryDirectory() as folder:
        packed_rows(report, options.rounds, Path(folder))
        files(report, options.rounds, Path(folder))
    texts(report, options.rounds, options.data)
    report.write(options.out)


if __name__ == "__main__":
    main()
