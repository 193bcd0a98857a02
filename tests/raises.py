"""List every `raise` of the package that the tests never run.

    python -m tests.raises [arguments of pytest]

Runs pytest with a package whose `raise` statements note that they were reached, in its worker and
child processes, too. Prints the others, each with its file and line. The exit code is their number.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_collate_kit"
FILE = "TORCH_COLLATE_KIT_RAISES"  # environment variable: where the raises that ran are noted
# A module of this name in PYTHONPATH is imported by every Python process that starts.
START = "import runpy; runpy.run_path({path!r})['install']()\n"


def raises_in(path: Path) -> dict[str, str]:
    """Return file:line and text of every raise of an exception; a bare one passes an error on."""
    source = path.read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    name = path.relative_to(ROOT).as_posix()
    texts = {node.lineno: ast.get_source_segment(source, node) for node in found if node.exc}
    return {f"{name}:{line}": " ".join((texts[line] or "").split()) for line in sorted(texts)}


class _Notes(ast.NodeTransformer):
    """Adds before each raise a call that writes down its place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        note = f"__import__('sys')._note_raise('{self.name}:{node.lineno}')"
        call = ast.copy_location(ast.parse(note).body[0], node)
        return [ast.fix_missing_locations(call), node]


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        name = Path(path).relative_to(ROOT).as_posix()
        return compile(_Notes(name).visit(ast.parse(data)), path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # nothing is read from __pycache__


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec and spec.origin and Path(spec.origin).is_relative_to(PACKAGE):
            spec.loader = _Loader(fullname, spec.origin)
            return spec
        return None


def install() -> None:
    """Make this process note the raises that it reaches, each once."""
    seen: set[str] = set()

    def note(place: str) -> None:
        if place not in seen and FILE in os.environ:
            seen.add(place)
            with open(os.environ[FILE], "a", encoding="utf-8") as file:
                file.write(f"{place}\n")

    sys._note_raise = note  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(START.format(path=__file__))
        noted = Path(folder) / "noted"
        noted.touch()
        paths = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {FILE: str(noted), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        reached = set(noted.read_text(encoding="utf-8").split())
    every = {k: v for path in sorted(PACKAGE.rglob("*.py")) for k, v in raises_in(path).items()}
    never = {place: text for place, text in every.items() if place not in reached}
    for place, text in never.items():
        print(f"{place}: {text[:120]}")
    print(f"of {len(every)} raises, {len(never)} never ran")
    sys.exit(min(len(never), 255))


if __name__ == "__main__":
    main()
