"""Results of cells: one JSON file each, written whole or not at all, until the code changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from gpu.where import ROOT, Where, described

__all__ = ["Results", "code_digest", "machine_name"]

# What writes tables or starts cells changes no measurement.
_NOT_MEASURED = ("run.py", "tables.py", "page.py", "saved.py", "bench_vision_gpu.py")


def code_digest(root: Path = ROOT) -> str:
    """Twelve digits that change with the package, or with what measures it."""
    digest = hashlib.sha256()
    files = [
        *sorted((root / "torch_collate_kit").rglob("*.py")),
        *sorted((root / "benchmarks" / "gpu").glob("*.py")),
        root / "examples" / "flops.py",
    ]
    for path in files:
        if path.name not in _NOT_MEASURED or "torch_collate_kit" in path.parts:
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

    ``key`` is the code and the versions that they were measured with: a result of another key is
    measured again, and shown in the table until then.
    """

    def __init__(self, folder: Path, where: Where) -> None:
        self.folder = folder / "gpu" / machine_name(where)
        machine = described(where)
        versions = {k: machine["versions"][k] for k in ("torch", "transformers")}
        self.key = {"code": code_digest(), "device": machine["device"], **versions}

    def load(self, name: str) -> dict[str, Any] | None:
        """The result of a cell for this key, None if it was not measured yet."""
        found = self.any(name)
        return found if found is not None and found["key"] == self.key else None

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
            file.write(json.dumps({"cell": name, "key": self.key, **result}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
