"""Execute notebooks in a fresh kernel: ``make notebooks`` writes their outputs, CI compares them.

The kernel is the Python that runs this file, whatever Jupyter kernels are installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
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
SETTINGS = {  # nothing is downloaded, and sums do not depend on the number of cores
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses ipywidgets, for its progress bars
}


def notebook_paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, *, seconds_per_cell: int = 120) -> Any:
    """The notebook with its outputs, run in a temporary folder; the file stays as it is.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, with its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
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
    return notebook


def outputs_as_text(notebook: Any) -> list[dict[str, str]]:
    """What each code cell showed, by MIME type or stream; of an image only that it is there."""
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
                texts[kind] = texts.get(kind, "") + text
        shown.append(texts)
    return shown


def main() -> None:
    """Execute the notebooks named as arguments, all of them by default, and write them."""
    for path in [Path(name) for name in sys.argv[1:]] or notebook_paths():
        began = time.perf_counter()
        notebook = execute(path)
        nbformat.write(notebook, path)
        kilobytes = path.stat().st_size / 1000
        print(f"{path.name:<32}{time.perf_counter() - began:6.1f} s {kilobytes:7.0f} kB")


if __name__ == "__main__":
    main()
