"""`make gpu`: what only a CUDA GPU can show, in cells that are saved one by one.

    python benchmarks/gpu/run.py                        # what is not measured yet, for nine minutes
    python benchmarks/gpu/run.py --parts correctness    # one part of it
    python benchmarks/gpu/run.py --cells padding-0.6B --again
    python benchmarks/gpu/run.py --table                # write the page from what is there
    python benchmarks/gpu/run.py --cpu --tiny           # the same code, small, without a GPU

Each cell runs in a process of its own: if it crashes, or runs out of memory, that is its result,
and the next one is measured. A cell that was measured with the same code, torch, transformers and
device is skipped, so a run that was stopped goes on where it was. README.md in this folder says
what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from gpu.cells import PARTS, Cell, chosen
from gpu.saved import Results
from gpu.tables import summary, write_page
from gpu.where import ROOT, Where, is_out_of_memory

_RESERVE = 5  # seconds of the budget for the page


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a check of correctness failed; 2 for arguments that are wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.cpu != given.tiny:
        parser.error("--cpu and --tiny go together: real sizes take hours on a CPU")
    if not given.cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU; --cpu --tiny runs the same code, small, without one")
    device = torch.device("cpu" if given.cpu else "cuda")
    where = Where(device, is_tiny=given.tiny)
    out = given.out or (ROOT / "build" if given.tiny else ROOT / "benchmarks" / "results")
    results = Results(out, where)
    try:
        results.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{results.folder}: {error.strerror}; pass --out with a folder to write to")
    try:
        cells = chosen(parts=given.parts.split(","), names=_names(given.cells), tiny=given.tiny)
    except ValueError as error:
        parser.error(str(error))
    if given.cell:
        return _measure(chosen(names=[given.cell], tiny=given.tiny)[0], where, results)
    if not given.table:
        try:
            _run_all(cells, results, given, out)
        except KeyboardInterrupt:
            print("stopped; what was measured is saved, and the next run goes on", flush=True)
    page, failed = write_page(out, results, where)
    print(f"{page}: {failed} failed checks" if failed else page)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="of %(default)s")
    add("--cells", default="", help="names, separated by commas; none: all of the parts")
    add("--minutes", type=float, default=9.0, help="no cell is begun that would take longer")
    add("--again", action="store_true", help="also measure what was measured already")
    add("--table", action="store_true", help="measure nothing, write the page")
    add("--out", type=Path, help="folder for results; none: benchmarks/results")
    add("--cpu", action="store_true", help="without a GPU; needs --tiny")
    add("--tiny", action="store_true", help="small models, a few steps: a trial of the code")
    add("--cell", help=argparse.SUPPRESS)  # in its own process
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _run_all(cells: list[Cell], results: Results, given: argparse.Namespace, out: Path) -> None:
    deadline = time.monotonic() + 60 * given.minutes - _RESERVE
    for number, cell in enumerate(cells, 1):
        head = f"[{number}/{len(cells)}] {cell.name}"
        found = results.load(cell.name)
        if found is not None and not given.again:
            error = f": {found['error']} (--again tries it anew)" if "error" in found else ""
            print(f"{head}: measured already{error}", flush=True)
            continue
        left = deadline - time.monotonic()
        if left < (1 if given.tiny else cell.seconds):
            print(f"{head}: {left:.0f} s are left, left for the next run", flush=True)
            continue
        began = time.monotonic()
        is_done = _in_a_process(cell, results, given, out, left)
        took = time.monotonic() - began
        said = summary(results.load(cell.name) or {}) if is_done else "time is up, not saved"
        print(f"{head}: {said} ({took:.0f} s)", flush=True)


def _in_a_process(
    cell: Cell, results: Results, given: argparse.Namespace, out: Path, left: float
) -> bool:
    """Whether there is a result now, which may be that it failed."""
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", cell.name]
    command += ["--out", str(out), *["--cpu", "--tiny"] * given.cpu]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # transformers.Trainer would split each micro-batch over all GPUs of a machine
    environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    before, log = results.load(cell.name), results.folder / "logs" / f"{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        code = _exit_code(command, environment, file, min(cell.limit, left))
    if code is None and left < cell.limit:
        return False
    tail = log.read_text(encoding="utf-8", errors="replace")[-1000:]
    if code is None:
        results.save(cell.name, {"error": f"stopped after {cell.limit} s", "output": tail})
    elif code != 0 and results.load(cell.name) == before:
        results.save(cell.name, {"error": f"the process ended with {code}", "output": tail})
    return True


def _exit_code(
    command: list[str], environment: dict[str, str], log: Any, seconds: float
) -> int | None:
    """Of a process that is killed after ``seconds``, then None; or when this one is interrupted."""
    process = None
    try:
        with _uninterrupted():
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # its DataLoader workers with it
            process.wait()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A signal to stop is obeyed at the end: a process that is just starting is then known."""
    told: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, lambda number, _: told.append(number)) for s in signals]
    try:
        yield
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)
    if told:
        raise KeyboardInterrupt


def _measure(cell: Cell, where: Where, results: Results) -> int:
    """In the process of the cell: measure, and save whatever comes of it."""
    began = time.perf_counter()
    found: dict[str, Any]
    try:
        found = cell.run(where)
    except Exception as error:
        message = "out of memory: " if is_out_of_memory(error) else ""
        message = f"{message}{type(error).__name__}: {error}"[:300]
        found = {"error": message, "output": traceback.format_exc()[-3000:]}
    results.save(cell.name, {**found, "took": time.perf_counter() - began})
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cell must not outlive it
    sys.exit(main())
