"""Execute notebooks in a fresh kernel: ``make notebooks`` writes their outputs, CI compares them.

The kernel is the Python that runs this file, whatever Jupyter kernels are installed.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {  # of every notebook, so that no machine or Python version shows in a diff
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TIME = re.compile(r"\b\d+\.\d m?s\b")  # as packing_report prints them
SETTINGS = {  # nothing is downloaded, and sums do not depend on the number of cores
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses ipywidgets, for its progress bars
}


def notebook_paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, *, seconds_per_cell: int = 300) -> tuple[Any, float]:
    """The notebook with its outputs, and the CPU seconds of its kernel; the file stays as it is.

    It runs in a temporary folder that has ``examples`` where the repository has it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, with its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import time\nprint(time.process_time())"))
    # without folders to search, "python3" is the kernel of this Python
    kernels = KernelSpecManager(kernel_dirs=[])
    kernel = AsyncKernelManager(kernel_spec_manager=kernels)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(FOLDER.parent / "examples")
        beside = Path(folder) / "notebooks"
        beside.mkdir()
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=seconds_per_cell,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],  # else a warning about TCP, on every start
            resources={"metadata": {"path": str(beside)}},
        )
        search = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, search)), "IPYTHONDIR": folder}
        client.execute(env={**os.environ, **SETTINGS, **paths})
    notebook.metadata = nbformat.from_dict(METADATA)
    [printed] = notebook.cells.pop().outputs
    return notebook, float(printed.text)


def outputs_as_text(notebook: Any) -> list[dict[str, str]]:
    """What each cell showed, by MIME type or stream; images and times are not compared."""
    shown = []
    for cell in notebook.cells:
        texts: dict[str, str] = {}
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                parts = {output.name: output.text}
            else:
                parts = dict(output.get("data", {"error": str(output.get("ename"))}))
            for kind, text in parts.items():
                text = "(image)\n" if kind.startswith("image/") else text
                if TIME.search(text):  # the columns of a table are as wide as its times
                    text = re.sub(" +", " ", TIME.sub("(time)", text))
                texts[kind] = texts.get(kind, "") + text
        shown.append(texts)
    return shown


def named(name: str) -> Path:
    """The notebook of a path, a name or the beginning of a name, such as 06."""
    found = [path for path in notebook_paths() if path.name.startswith(Path(name).name)]
    if len(found) != 1:
        names = ", ".join(path.stem for path in notebook_paths())
        raise SystemExit(f"execute.py: {name} is not one notebook; there are {names}")
    return found[0]


def main() -> None:
    """Execute the notebooks named as arguments, all of them by default, and write them."""
    for path in [named(name) for name in sys.argv[1:]] or notebook_paths():
        notebook, cpu_seconds = execute(path)
        nbformat.write(notebook, path)
        print(f"{path.name:<32}{cpu_seconds:6.1f} CPU s {path.stat().st_size / 1000:7.0f} kB")


if __name__ == "__main__":
    main()
