"""Long traces of agents: what truncation loses, and what windows cost instead.

Claimed: windows of airline traces and of questions about long stories train every trained token
once, right after its predecessor, wherever the prompt leaves room; they take as many cells as the
prototype of the algorithm did, within 3%; as a tree the airline traces take at most 1.03 times the
tokens of the whole traces; and a window's text is what the chat template writes for the messages
that are left.

    python benchmarks/bench_windows.py

128 airline traces of tau-bench, with their tools in the prompt ("tools") and without ("plain"), and
50 stories of SQuALITY. An end is the last token of a run of trained tokens.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, arguments

from torch_collate_kit import ChatOptions, DataError, tokenize_chat
from torch_collate_kit.chat import windows
from torch_collate_kit.chat.preview import byte_tokenizer
from torch_collate_kit.packing.trees import trees_of

Row = dict[str, Any]
# Cells of windows, and of the tree, over the tokens of all rows: the prototype's
_EXPECTED = {
    ("tools", 6144): (1.81, 1.00),
    ("tools", 8192): (1.25, 1.00),
    ("plain", 2048): (2.93, 1.03),
    ("plain", 4096): (1.30, 1.01),
    ("plain", 8192): (1.03, 1.00),
    ("squality", 8192): (3.68, 0.68),
}
_REFUSED = [("tools", 2048), ("tools", 4096), ("squality", 2048), ("squality", 4096)]
_TEMPLATES = ("qwen2_5", "llama3_1", "glm4moe")


def tokenized(folder: Path) -> dict[str, list[Row]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizers" / "mistral-32k-chatml")
    tools = json.loads((folder / "chat_tools_tau_airline.tools.json").read_text(encoding="utf-8"))
    stories = messages_of(folder / "chat_long_squality_50.jsonl")
    traces = messages_of(folder / "chat_tools_tau_airline_128.jsonl")
    found = {}
    for name, chats, given in (
        ("tools", traces, tools), ("plain", traces, None), ("squality", stories, None)
    ):  # fmt: skip
        rows = [
            tokenize_chat({"messages": of}, tokenizer, ChatOptions(tools=given)) for of in chats
        ]
        names = ("input_ids", "loss_mask")
        found[name] = [
            {n: row[n] for n in names} | {"places": [*range(len(row["input_ids"]))]} for row in rows
        ]
    return found


def messages_of(path: Path) -> list[Any]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def ends_of(mask: list[int]) -> np.ndarray:
    """The last tokens of the runs of trained tokens."""
    is_trained = np.append(np.array(mask, dtype=np.bool_), False)
    return np.flatnonzero(is_trained[:-1] & ~is_trained[1:])


def check_law(row: Row, found: list[Row], limit: int) -> None:
    """Each trained token in one window, right after its predecessor; none is longer than limit."""
    times = np.zeros(len(row["places"]), dtype=np.int64)
    for window in found:
        places, mask = np.array(window["places"]), np.array(window["loss_mask"])
        new = np.flatnonzero(mask)
        assert len(places) <= limit
        assert (places[new] == places[new - 1] + 1).all()
        times[places[new]] += 1
    assert (times == row["loss_mask"]).all()


def cells_of_tree(found: list[Row]) -> int:
    lengths = [len(window["input_ids"]) for window in found]
    ids = np.concatenate([window["input_ids"] for window in found]).astype(np.int32)
    trees = trees_of(ids, np.append(0, np.cumsum(lengths)), np.array([0, len(found)]))
    return int(trees.num_cells[0])


def measure(rows: list[Row], limit: int, overlap: int = 0) -> dict[str, float]:
    """Shares of all trained tokens, ends and tokens."""
    total, trained, num_ends = 0, 0, 0
    of: dict[str, float] = dict.fromkeys(
        ("over", "kept", "kept ends", "cut", "dropped to", "windows", "cells", "tree", "refused"), 0
    )
    for row in rows:
        mask, length = row["loss_mask"], len(row["input_ids"])
        ends = ends_of(mask)
        total, trained, num_ends = total + length, trained + sum(mask), num_ends + len(ends)
        of["over"] += length > limit
        of["kept"] += sum(mask[:limit])
        of["kept ends"] += int((ends < limit).sum())
        of["cut"] += length > limit and mask[limit - 1] and mask[limit]
        of["dropped to"] += sum(mask) if length <= limit else 0
        try:
            found = windows(row, limit, overlap=overlap)
        except DataError:
            of["refused"] += 1
            continue
        check_law(row, found, limit)
        of["windows"] += sum(mask)
        of["cells"] += sum(len(window["input_ids"]) for window in found)
        of["tree"] += cells_of_tree(found)
    divisors = {"over": len(rows), "kept ends": num_ends, "cells": total, "tree": total}
    shares = {name: count / divisors.get(name, trained) for name, count in of.items()}
    return shares | {"cut": of["cut"], "refused": of["refused"]}


def table(report: Report, sets: dict[str, list[Row]]) -> None:
    lines = []
    for (name, limit), (cells, tree) in _EXPECTED.items():
        found = measure(sets[name], limit)
        more = measure(sets[name], limit, overlap=limit // 4)
        lines.append([f"{name}, {limit:,}", f"{found['over']:.0%}"])
        lines[-1] += [f"{found['kept']:.0%}, {found['kept ends']:.0%}, {found['cut']:.0f}"]
        lines[-1] += [f"{found['dropped to']:.0%}", f"{found['windows']:.0%}"]
        lines[-1] += [f"{found['cells']:.2f}", f"{found['tree']:.3f}"]
        lines[-1] += [f"+{more['cells'] / found['cells'] - 1:.0%}", f"{found['refused']:.0f}"]
        for what, wanted in (("cells", cells), ("tree", tree)):
            away = 100 * abs(found[what] / wanted - 1)
            report.target(f"{name}, {limit:,}: {what}, away from {wanted:.2f}", away, "<%", 3)
    for name, limit in _REFUSED:
        assert measure(sets[name], limit)["refused"] == len(sets[name])
        lines.append([f"{name}, {limit:,}", "100%", *["-"] * 6, f"{len(sets[name])}"])
    header = ["set, max_length", "over", "truncate: trained, ends, rows cut in an answer"]
    header += ["drop: trained", "windows: trained", "cells", "tree", "overlap of a quarter"]
    note = (
        "Shares of the trained tokens and ends of all rows. Cells are tokens of windows over the "
        "tokens of all rows, with one prompt per window, and as a tree with one per row. Refused "
        "are rows whose prompt fills a window."
    )
    report.table("What is kept, and at what cost", [*header, "refused"], lines, note)
    num_rows = sum(len(sets[name]) for name, _ in (*_EXPECTED, *_REFUSED))
    report.text(f"The law was checked on {num_rows} rows in windows, without and with overlap.")


def texts(report: Report, folder: Path, limit: int) -> None:
    """Compare windows with what a template writes for their messages alone."""
    chats = messages_of(folder / "chat_tools_tau_airline_128.jsonl")[:10]
    trl: Any = importlib.util.find_spec("trl")
    paths = {"chatml": folder / "tokenizers" / "mistral-32k-chatml" / "chat_template.jinja"}
    if trl is not None:
        templates = Path(trl.origin).parent / "chat_templates"
        paths |= {name: templates / f"{name}.jinja" for name in _TEMPLATES}
    lines, shares = [], []
    for name, path in paths.items():
        tokenizer = byte_tokenizer(path.read_text(encoding="utf-8"))
        equal, inside, total, refused = 0, 0, 0, 0
        for messages in chats:
            try:
                row = tokenize_chat({"messages": messages}, tokenizer)
            except DataError:
                refused += 1
                continue
            ids, mask = row["input_ids"], row["loss_mask"]
            runs = [int(end) for end in ends_of(mask)]
            starts = [i for i in range(1, len(mask)) if mask[i] > mask[i - 1]]
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            places = [*range(len(ids))]
            for window in windows({"input_ids": ids, "loss_mask": mask, "p": places}, limit):
                total += 1
                body = window["p"][starts[0] :]
                if body[0] not in starts:
                    inside += 1  # it begins inside an answer, where no message does
                    continue
                first = turns[starts.index(body[0])]
                last = turns[sum(end <= body[-1] for end in runs) - 1]
                short = [*messages[: turns[0]], *messages[first : last + 1]]
                alone = tokenize_chat({"messages": short}, tokenizer)["input_ids"]
                length = len(window["input_ids"])
                rest = tokenizer.decode(alone[length:]).strip()
                equal += alone[:length] == window["input_ids"] and not rest
        lines.append([name, f"{refused}", f"{total}", f"{inside}", f"{equal}"])
        shares.append(equal / (total - inside))
    header = [
        "template",
        "traces refused",
        "windows",
        "begin inside an answer",
        "as the template writes them",
    ]
    note = f"{len(chats)} traces without tools, one token per byte, windows of {limit:,}."
    report.table("Text of windows", header, lines, note)
    report.target("windows written as the template does, least", 100 * min(shares), "%", 100)


def main() -> None:
    parser = arguments(__doc__, rounds=2)
    options = parser.parse_args()
    report = Report("windows", "Long traces are trained whole, for few more cells.")
    sets = tokenized(options.data)
    table(report, sets)
    texts(report, options.data, 8192)
    rows = [{n: row[n] for n in ("input_ids", "loss_mask")} for row in sets["tools"]]
    began = time.perf_counter()
    for row in rows:
        windows(row, 8192)
    rate = sum(len(row["input_ids"]) for row in rows) / (time.perf_counter() - began) / 1e6
    report.target("million tokens made into windows per second", rate, "", 1)
    report.write(options.out)


if __name__ == "__main__":
    main()
