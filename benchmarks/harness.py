"""What the benchmarks share: alternating runs, the machine, and a report as JSON and Markdown.

Runs of one comparison alternate in one process, each round beginning with another one, because the
state of the allocator and of the machine moves figures by a factor of two and moves all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from pages import markdown_table, page
from samples import DEFAULT_DATA

__all__ = ["Report", "Times", "alternate", "arguments", "timed"]

_HERE = Path(__file__).resolve().parent
_DISTRIBUTIONS = (
    *("torch_collate_kit", "torch", "numpy", "pyarrow", "datasets", "transformers"),
    *("torchdata", "trl", "axolotl", "numba", "skyrl"),
)


@dataclass(frozen=True)
class Times:
    """Seconds of the rounds of one candidate."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(quartiles[1], quartiles[0], quartiles[2], min(seconds), len(seconds))

    def cells(self) -> list[str]:
        """Median, quartiles and minimum for a table, in ms."""
        quartiles = f"{_ms(self.lower_quartile)} - {_ms(self.upper_quartile)}"
        return [_ms(self.median), quartiles, _ms(self.least)]


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.01 else f"{ms:.4f}"


def timed(
    function: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """A run of ``function`` that returns its seconds, its last result alive: a training loop."""
    kept: list[object] = [None]

    def run() -> float:
        began = clock()
        result = function()
        seconds = clock() - began
        kept[0] = result
        return seconds

    return run


def alternate(
    runs: Mapping[str, Callable[[], float]], *, rounds: int, warm_up: int = 2
) -> dict[str, Times]:
    """Every run once a round, in turn, each returning its seconds; no garbage collection inside."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-warm_up, rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            gc.disable()
            try:
                took = runs[name]()
            finally:
                gc.enable()
            if i >= 0:
                seconds[name].append(took)
    return {name: Times.of(values) for name, values in seconds.items()}


@dataclass
class Report:
    """Targets and tables of one script, written to ``<name>.json``, and a page ``<name>.md``."""

    name: str
    claim: str
    parts: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def target(self, what: str, value: float, unit: str, limit: float, *, aim: float | None = None):
        """A promise kept or not: at least ``limit``, or at most where the unit begins with "<"."""
        at_most = unit.startswith("<")
        unit = unit.removeprefix("<")
        sign = "at most" if at_most else "at least"

        def met(bound: float) -> bool:
            return value <= bound if at_most else value >= bound

        verdict = (
            "aim reached" if aim is not None and met(aim) else "met" if met(limit) else "MISSED"
        )
        aimed = "" if aim is None else f", aim {aim:g}{unit}"
        target = {"what": what, "value": value, "limit": limit, "aim": aim, "verdict": verdict}
        target |= {"measured": f"{value:.3g}{unit}", "wanted": f"{sign} {limit:g}{unit}{aimed}"}
        self.data.setdefault("targets", []).append(target)
        print(" | ".join([what, target["measured"], target["wanted"], verdict]), flush=True)

    def table(self, heading: str, header: Sequence[str], rows: Sequence[Sequence[str]], note=""):
        cells = [list(row) for row in rows]
        part = {"heading": heading, "note": note, "header": list(header), "rows": cells}
        self.parts.append(part)
        print(f"\n## {heading}\n\n{note}\n\n{markdown_table(header, cells)}", flush=True)

    def text(self, text: str) -> None:
        self.parts.append({"text": text})
        print(text, flush=True)

    def times(self, key: str, times: Mapping[str, Times]) -> None:
        """Keep every figure of a comparison in the JSON."""
        self.data[key] = {name: asdict(value) for name, value in times.items()}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = "python " + " ".join(["benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        results = {"name": self.name, "claim": self.claim, "command": command, **_machine()}
        results |= self.data | {"parts": self.parts}
        (folder / f"{self.name}.json").write_text(json.dumps(results, indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(page(results))


def _two_or_more(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is too few: quartiles need 2 or more")
    return int(text)


def arguments(doc: str | None, *, rounds: int, data: bool = True) -> argparse.ArgumentParser:
    """The options that every script has; ``data`` for one that reads real lengths or chats."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=_two_or_more, default=rounds, help="rounds of alternating runs, at least 2"
    )
    parser.add_argument("--out", type=Path, default=_HERE / "results", help="folder for results")
    if data:
        parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with real data")
    return parser


def _machine() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].split(":", 1)[1].strip() if lines else cpu
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": f"{os.getloadavg()[0]:.1f} processes waiting or running at the end",
        "versions": versions,
    }
