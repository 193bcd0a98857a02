"""The page of one machine, made from the JSON of its cells; nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness import Report
from pages import page

from gpu.cells import CELLS, chosen
from gpu.saved import Results, machine_name
from gpu.targets import add_targets
from gpu.where import Where, described

__all__ = ["summary", "write_page"]

Found = Mapping[str, Any]
_CLAIM = (
    "packed rows train at least 2.5 times the real tokens per second of padding, nothing waits for "
    "data, nothing is compiled again, and packed attention is as exact as SDPA in the same dtype"
)
_SPEED_NOTE = (
    "**How to read the tables of speed.** Tokens are real ones, without pads. MFU counts the FLOPs "
    "of the true lengths: 6 per weight of a matrix and token, and 12 * heads * head_dim per layer "
    "and pair of a token and one that it sees (examples/run_log.py), over the dense bf16 peak "
    "of the GPU. *full*: the share of cells that hold a token. *waiting*: the share of the time in "
    "which the training thread waited for a batch. *copies hidden*: batches that were on the "
    "device before the GPU had finished the step before. *graphs*: compiled after the warm-up. "
    "*loss*: of "
    "the first step's examples, before training. The variants of a table alternate in one process, "
    "by blocks of steps; each is a loop as in examples/sft.py, with the loss read in every step."
)
_TRAINERS_NOTE = (
    "Each run begins with the same weights and trains the same number of steps of as many tokens; "
    "runs alternate. Ours and Trainer have the same examples in every step, so their losses can be "
    "compared; TRL packs on its own. The first two steps are not timed."
)
_LAUNCH_NOTE = (
    "Microseconds between the returns of launches of a tiny kernel by the training thread. *lost*: "
    "what that thread lost per batch, against launching alone. *over 1 ms*: the share of the time "
    "that went into launches of more than a millisecond, which waited for Python's lock."
)


def write_page(folder: Path, results: Results, where: Where) -> tuple[Path, int]:
    """Write ``gpu-<machine>.json`` and ``.md``; the page, and how many checks failed."""
    cells = {cell.name: results.any(cell.name) for cell in chosen(tiny=where.is_tiny)}
    found = {name: result for name, result in cells.items() if result is not None}
    report = Report(f"gpu-{machine_name(where)}", _CLAIM)
    failed = _correctness(report, found)
    _speed(report, found)
    _trainers(report, found)
    _launches(report, found)
    _profiles(report, found)
    _not_measured(report, found, list(cells))
    add_targets(report, {} if where.is_tiny else found, described(where)["device"])
    older = [name for name, result in found.items() if result["key"] != results.key(name)]
    if older:
        report.text(f"Measured with other code or libraries than the rest: {', '.join(older)}.")
    now = {"date": datetime.now(timezone.utc).date().isoformat(), **described(where)}
    options = "" if not where.is_tiny else " --cpu --tiny"
    whole = {
        "name": report.name,
        "claim": _CLAIM,
        "command": f"python benchmarks/gpu/run.py{options}",
    }
    whole |= {**now, **report.data, "parts": report.parts}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.name}.md"
    path.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    path.write_text(page(whole), encoding="utf-8")
    return path, failed


def summary(result: Found) -> str:
    """One line on what a cell found."""
    if "error" in result:
        return str(result["error"])
    if "checks" in result:
        failed = [check["name"] for check in result["checks"] if not check["is_ok"]]
        said = f"{len(result['checks']) - len(failed)} checks passed"
        said += f", {len(failed)} FAILED: {failed[0]}" if failed else ""
        said += "".join(f"; left out: {each}" for each in result.get("left_out", []))
        return result.get("skipped", said)
    if "variants" in result:
        return "; ".join(f"{v['variant']} {_rate(v)}" for v in result["variants"])
    if "rows" in result:
        return "; ".join(f"{r['name']} {1e6 * r['mean']:.1f} us" for r in result["rows"])
    return f"{result['idle_share']:.1%} of the time no kernel ran"


def _correctness(report: Report, found: Mapping[str, Found]) -> int:
    """How many checks failed; a cell of correctness that ended with an error is one of them."""
    rows, failed = [], []
    ours = {cell.name for cell in CELLS if cell.is_correctness}
    for name, result in found.items():
        failed += [check for check in result.get("checks", []) if not check["is_ok"]]
        if name in ours and "error" in result:
            failed.append({"name": name, "error": result["error"]})
        if result.get("checks"):
            judged = [check for check in result["checks"] if "share" in check]
            worst = max(judged, key=lambda check: check["share"], default=None)
            passed = sum(check["is_ok"] for check in result["checks"])
            errors = (
                ["equal or not", "-", ""]
                if worst is None
                else [f"{worst['error']:.2e}", f"{worst['usual']:.2e}", worst["name"]]
            )
            rows.append([name, f"{passed} of {len(result['checks'])}", *errors])
        elif "skipped" in result:
            rows.append([name, "-", "-", "-", result["skipped"]])
    if rows:
        note = (
            "Errors are relative (norm of the difference over norm of the exact result). Ours may "
            "be at most twice that of the usual way in the same dtype, or one rounding of it. "
            "Shown is the check of each kind that came closest to the limit."
        )
        header = ["checks", "passed", "error", "usual error", "which"]
        report.table("Correctness", header, rows, note)
    if failed:
        rows = [
            [c["name"], json.dumps({k: v for k, v in c.items() if k != "name"})] for c in failed
        ]
        report.table("Checks that failed", ["check", "found"], rows)
    every = [check for result in found.values() for check in result.get("checks", [])]
    passed = sum(check["is_ok"] for check in every)
    report.data["checks"] = {"passed": passed, "failed": len(failed)}
    return len(failed)


def _speed(report: Report, found: Mapping[str, Found]) -> None:
    header = ["", "tokens/s", "of the first", "MFU", "peak GB", "full", "waiting"]
    header += ["copies hidden", "graphs", "loss"]
    if _of_kind(found, "parameters"):
        report.text(_SPEED_NOTE)
    for name, result in _of_kind(found, "parameters").items():
        first = result["variants"][0].get("tokens_per_second")
        rows = []
        for v in result["variants"]:
            if v["error"]:
                rows.append([v["variant"], v["error"], *["-"] * 7, _number(v["first_loss"], ".4f")])
                continue
            rows.append(
                [
                    v["variant"],
                    _rate(v),
                    f"{v['tokens_per_second'] / first:.2f}x" if first else "-",
                    _number(v["mfu"], ".1%"),
                    f"{v['peak_bytes'] / 1e9:.1f}",
                    f"{v['efficiency']:.1%}",
                    _number(v["wait_share"], ".2%"),
                    _number(v["copies_hidden"], ".0%"),
                    str(v["graphs_after_warm_up"]),
                    _number(v["first_loss"], ".4f"),
                ]
            )
        report.table(f"Speed: {name}", header, rows, _about(result))
        report.data[name] = result["variants"]


def _trainers(report: Report, found: Mapping[str, Found]) -> None:
    of_trainers = {k: r for k, r in _of_kind(found, "variants").items() if "parameters" not in r}
    for name, result in of_trainers.items():
        ours = next((v for v in result["variants"] if v["variant"].startswith("ours")), {})
        rows = []
        for v in result["variants"]:
            if "error" in v:
                rows.append([v["variant"], v["error"], *["-"] * 5])
                continue
            faster = ours.get("tokens_per_second", 0) / v["tokens_per_second"]
            rows.append(
                [
                    v["variant"],
                    _rate(v),
                    f"{faster:.2f}x" if faster else "-",
                    _number(v["mfu"], ".1%"),
                    f"{v['peak_bytes'] / 1e9:.1f}",
                    f"{v['first_loss']:.4f}",
                    f"{v['last_loss']:.4f}",
                ]
            )
        header = ["", "tokens/s", "ours over it", "MFU", "peak GB", "first loss", "last loss"]
        report.table(f"Trainers: {name}", header, rows, f"{_about(result)} {_TRAINERS_NOTE}")
        report.data[name] = result["variants"]


def _launches(report: Report, found: Mapping[str, Found]) -> None:
    for name, result in _of_kind(found, "rows").items():
        rows = [
            [
                row["name"],
                *(f"{1e6 * row[k]:.2f}" for k in ("median", "mean", "p99", "most")),
                f"{row['over_alone']:.2f}x",
                f"{row['held_share']:.1%}",
                f"{1e3 * row['lost_per_batch']:.2f} ms",
            ]
            for row in result["rows"]
        ]
        header = ["", "median", "mean", "99%", "longest", "mean over alone", "over 1 ms", "lost"]
        note = f"Batches of {result['examples']:,} examples. {_LAUNCH_NOTE}"
        report.table("Kernel launches beside collation", header, rows, note)
        report.data[name] = result["rows"]


def _profiles(report: Report, found: Mapping[str, Found]) -> None:
    for name, result in _of_kind(found, "idle_share").items():
        rows = [[t["name"][:90], f"{t['share']:.1%}", f"{t['calls']:,.0f}"] for t in result["top"]]
        note = (
            f"{_about(result)} {result['variant']}: {result['kernels']:,} kernels per step; "
            f"{result['idle_share']:.1%} of the time none ran (the profiler itself slows launches)."
        )
        header = ["kernel", "share of kernel time", "calls per step"]
        report.table(f"Where the time goes: {name}", header, rows, note)


def _not_measured(report: Report, found: Mapping[str, Found], names: list[str]) -> None:
    rows = [[name, str(r["error"])] for name, r in found.items() if r.get("error")]
    rows += [[name, each] for name, r in found.items() for each in r.get("left_out", [])]
    rows += [[name, "left for a later run"] for name in names if name not in found]
    if rows:
        report.table("Not measured", ["cell", "why"], rows)


def _of_kind(found: Mapping[str, Found], key: str) -> dict[str, Found]:
    return {name: result for name, result in found.items() if key in result}


def _about(result: Found) -> str:
    model = result["model"] if "Qwen" in result["model"] else f"Qwen3-{result['model']}"
    said = f"{model}, {result['setting']}, AdamW (fused); a step is "
    said += f"{result['examples_per_step']} examples, a micro-batch at most "
    said += f"{result['max_tokens']:,} cells; lengths: {result['lengths']}."
    too_large = "; ".join(result["too_large"])
    return said + (f" Did not fit: {too_large}." if too_large else "")


def _rate(variant: Found) -> str:
    if variant.get("error"):
        return str(variant["error"])
    return f"{variant['tokens_per_second']:,.0f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
