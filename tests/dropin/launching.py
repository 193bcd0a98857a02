"""Start a drop-in script as its user would, and read the losses it wrote."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.ranks import on_two_ranks

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "dropin"


def load_script(name: str) -> ModuleType:
    """A module of examples/dropin, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def skip_without(*packages: str) -> None:
    """Skip the test where a stack is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make dropin` runs this")


def run_script(name: str, folder: Path, *, num_ranks: int = 1) -> dict[str, Any]:
    """``losses`` and ``numbers`` of its steps, and what it ``printed``; it must exit with 0."""
    output = folder / "output.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    done = subprocess.run(
        [
            sys.executable,
            *(launcher if num_ranks > 1 else []),
            str(FOLDER / f"{name}.py"),
            str(output),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(FOLDER.parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(output.read_text()), "printed": done.stdout}


def run_on_two_ranks(name: str, folder: Path) -> dict[str, Any]:
    """The same of two ranks without torchrun, which takes ten seconds to start them."""
    output = folder / "output.json"
    printed = on_two_ranks(_run_on_rank, str(FOLDER / f"{name}.py"), str(output))
    return {**json.loads(output.read_text()), "printed": printed[0]}


def _run_on_rank(script: str, output: str) -> str:
    sys.argv = [script, output]
    sys.path.insert(0, str(FOLDER))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
