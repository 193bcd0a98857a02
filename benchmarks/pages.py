"""Pages of results, made from the JSON that the scripts write: nothing is measured here.

A page begins with what a user would ask, then come the targets, those that are missed first, then
every table. ``python benchmarks/pages.py`` writes all pages again, and the tables of README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from answers import ANSWERS
from figures import Results, Rows

__all__ = ["markdown_table", "page", "readme"]

HERE = Path(__file__).resolve().parent
_BEGIN, _END = "<!-- made by pages.py -->", "<!-- end -->"


def page(results: Mapping[str, Any]) -> str:
    """The page of one script.

    >>> print(page({"name": "sums", "command": "python sums.py", "cpu": "two cores"}))
    # sums
    <BLANKLINE>
    `python sums.py`
    <BLANKLINE>
    ## Machine and versions
    <BLANKLINE>
    - command: python sums.py
    - cpu: two cores
    <BLANKLINE>
    """
    name = results["name"]
    blocks = [f"# {name}", f"`{results['command']}`"]
    kind = name.partition("-")[0]  # of a GPU the name goes on with the machine
    if kind in ANSWERS:
        rows = [[*row] for row in ANSWERS[kind](results).items()]
        blocks.append(markdown_table(["question", "measured"], rows))
    if results.get("targets"):
        blocks += _targets(results["claim"], results["targets"])
    blocks += [_part(part) for part in results.get("parts", [])]
    facts = [
        key
        for key in ("command", "date", "cpu", "load", "device", "memory", "versions")
        if key in results
    ]
    lines = "\n".join(f"- {key}: {_fact(results[key])}" for key in facts)
    return (
        "\n\n".join(block.strip("\n") for block in [*blocks, "## Machine and versions", lines])
        + "\n"
    )


def readme(text: str, all_results: Mapping[str, Mapping[str, Any]]) -> str:
    """README.md with the tables between its marks made from all results."""
    before, _, rest = text.partition(_BEGIN)
    _, mark, after = rest.partition(_END)
    if not mark:
        raise ValueError(f"README.md has no {_BEGIN} and {_END} to write between")
    asked = markdown_table(["question", "measured", "page"], _overview(all_results))
    missed = [
        [_link(name), *_row(target)[:3]]
        for name, results in all_results.items()
        for target in results.get("targets", [])
        if target["verdict"] == "MISSED"
    ]
    total = sum(len(results.get("targets", [])) for results in all_results.values())
    heading = f"**Missed: {len(missed)} of {total} targets.** All of them are on the pages."
    below = markdown_table(["page", "target", "measured", "wanted"], missed) if missed else ""
    blocks = [before + _BEGIN, asked, heading, below, _END + after]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _targets(claim: str, targets: Sequence[Mapping[str, Any]]) -> list[str]:
    missed = [target for target in targets if target["verdict"] == "MISSED"]
    others = [target for target in targets if target["verdict"] != "MISSED"]
    counted = f"{len(others)} of {len(targets)} are met. What was aimed at: {claim}"
    rows = [_row(target) for target in missed + others]
    return ["## Targets", counted, markdown_table(["target", "measured", "wanted", ""], rows)]


def _row(target: Mapping[str, Any]) -> list[str]:
    return [target["what"], target["measured"], target["wanted"], target["verdict"]]


def _part(part: Mapping[str, Any]) -> str:
    if "text" in part:
        return str(part["text"])
    note = f"{part['note']}\n\n" if part["note"] else ""
    return f"## {part['heading']}\n\n{note}{markdown_table(part['header'], part['rows'])}"


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return str(value)


def _link(name: str) -> str:
    return f"[{name}](results/{name}.md)"


def _overview(all_results: Mapping[str, Results]) -> Rows:
    """The questions of README.md, each with its page."""
    asked = [
        ("collate", "How long does packing"),
        ("rollout", "How long does collating"),
        ("loader", "How much of a step"),
        ("vision", "What does a training step gain"),
        ("packing", "How full are the rows?"),
        ("collate", "How large is a batch?"),
        ("collate", "Against TRL"),
        ("skyrl", "Against SkyRL, packed"),
        ("skyrl", "Against SkyRL, padded"),
        ("skyrl", "Against SkyRL, rollouts"),
        ("packing", "Against axolotl"),
        ("collate", "Against NumPy"),
        ("packing", "How long does planning"),
        ("scale", "How long does a rank plan"),
        ("elastic", "What do the same rows"),
        ("balance", "How even are"),
        ("steps", "How full and even is"),
        ("chat", "How much longer"),
        ("windows", "What is kept"),
        ("hybrids", "What does packing a hybrid"),
        ("hybrids", "What does isolate_mixers"),
        ("encoders", "What does packing an encoder"),
        ("trees", "What do shared prefixes"),
        ("agents", "What do an agent's steps"),
        ("preference", "What does packing preference"),
        ("preference", "What does it cost to keep pairs"),
    ]
    asked += [
        (name, "How fast is a Qwen3") for name in sorted(all_results) if name.startswith("gpu-")
    ]
    rows = []
    for name, begin in asked:
        kind = name.partition("-")[0]
        answers = ANSWERS[kind](all_results[name]).items()
        found = [row for row in answers if row[0].startswith(begin)]
        if kind != "gpu":
            (_,) = found
        rows += [[*row, f"[{name}](results/{name}.md)"] for row in found]
    return rows


def main(folder: Path = HERE / "results") -> int:
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    all_results = {results["name"]: results for results in read}
    for name, results in all_results.items():
        (folder / f"{name}.md").write_text(page(results), encoding="utf-8")
    path = folder.parent / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8"), all_results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
