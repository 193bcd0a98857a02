"""Results of cells: one JSON file each, written whole or not at all, until the code changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from gpu.cells import CELLS
from gpu.where import ROOT, Where, described

__all__ = ["Results", "code_digest", "machine_name"]

# What chooses and starts cells or writes tables changes no measurement; the rest is of all cells,
# but for modules that only their own cells read.
_OF_NO_CELL = ("run", "cells", "saved", "tables", "targets", "bench_vision_gpu")
_OF_SOME_CELLS = ("attention", "batches", "hybrids", "launches", "peers", "profiling")


def code_digest(cell: str, root: Path = ROOT) -> str:
    """Twelve digits that change with the package, or with what measures this cell and how."""
    found = next((other for other in CELLS if other.name == cell), None)
    function, options, reads = (
        (found.function, found.options, found.reads) if found else ("", {}, ())
    )
    others = {*_OF_NO_CELL, *_OF_SOME_CELLS} - {function.partition(":")[0]}
    measuring = (root / "benchmarks" / "gpu").glob("*.py")
    files = [
        *(root / "torch_collate_kit").rglob("*.py"),
        *(path for path in measuring if path.stem not in others),
        *(path for pattern in reads for path in root.glob(pattern)),
        root / "benchmarks" / "samples.py",
        root / "examples" / "run_log.py",
    ]
    digest = hashlib.sha256(f"{function} {options}".encode())
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machine_name(where: Where) -> str:
    """The device as a file name.

    >>> import torch
    >>> machine_name(Where(torch.device("cpu"), is_tiny=True))
    'cpu-tiny'
    """
    name = described(where)["device"] + (" tiny" if where.is_tiny else "")
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Results:
    """The folder with the results of one machine.

    Each has a key, the code and the versions that it was measured with. A result of another key is
    measured again, and shown in the table until then.
    """

    def __init__(self, folder: Path, where: Where) -> None:
        self.folder = folder / "gpu" / machine_name(where)
        machine = described(where)
        versions = {k: machine["versions"][k] for k in ("torch", "transformers")}
        self._machine = {"device": machine["device"], **versions}
        self._keys: dict[str, dict[str, str]] = {}

    def key(self, name: str) -> dict[str, str]:
        """What a cell would be measured with now."""
        if name not in self._keys:
            self._keys[name] = {"code": code_digest(name), **self._machine}
        return self._keys[name]

    def load(self, name: str) -> dict[str, Any] | None:
        """The result of a cell for this key, None if it was not measured yet."""
        found = self.any(name)
        return found if found is not None and found["key"] == self.key(name) else None

    def any(self, name: str) -> dict[str, Any] | None:
        """The result of a cell, whatever its key."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def save(self, name: str, result: dict[str, Any]) -> None:
        """A file of that name is replaced at once, after all of the new one is on the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.json"
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(json.dumps({"cell": name, "key": self.key(name), **result}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
