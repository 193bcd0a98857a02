"""The package as a whole: a light import, names that exist, and tests that use public ones."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_collate_kit
from torch_collate_kit import losses, preference, rl, vision

IMPORT = """
import sys, torch
before = set(sys.modules)
import torch_collate_kit
print(*sorted(sys.modules.keys() - before))
"""
LOADED_WITH_TORCH = {"numpy", "torch", "torch_collate_kit"}
NUMPY_RANDOM = 20  # modules of it, with Cython's and the standard library's that it needs


def test_the_import_is_light():
    """No other package comes along, and few modules beside our own: counted, not timed."""
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "torch_collate_kit.batch" in names
    roots = {name.partition(".")[0] for name in names}
    cython = {root for root in roots if "cython" in root}  # put there by compiled modules
    assert roots - LOADED_WITH_TORCH - cython <= sys.stdlib_module_names
    others = [name for name in names if not name.startswith("torch_collate_kit")]
    assert len(others) <= 2 * NUMPY_RANDOM, others


def modules():
    found = pkgutil.walk_packages(torch_collate_kit.__path__, "torch_collate_kit.")
    return ["torch_collate_kit", *sorted(module.name for module in found)]


def test_public_names_exist():
    for name in modules():
        module = importlib.import_module(name)
        missing = [n for n in getattr(module, "__all__", []) if not hasattr(module, n)]
        assert not missing, f"{name} has no {missing}"


PACKAGES = (torch_collate_kit, losses, preference, rl, vision)
NAMES = sorted({(package, name) for package in PACKAGES for name in package.__all__}, key=str)


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_every_public_name_has_an_example_that_doctest_runs(package, name):
    thing = getattr(package, name)
    if name in ("IGNORE_INDEX", "__version__"):
        return
    assert ">>> " in thing.__doc__


MOST_PRIVATE_FILES = 23


def private_imports(path: Path) -> list[str]:
    """The names that a test file takes from the package, and that no public package offers."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch_collate_kit."):
            names = [(str(node.value), "")] if str(node.value) in modules() else []
        else:
            continue
        found += [f"{package}:{name}" for package, name in names if not is_public(package, name)]
    return found


def is_public(package: str, name: str) -> bool:
    root, _, below = package.partition(".")
    if root != "torch_collate_kit":
        return True
    if "." in below or below.startswith("_"):
        return False
    offered = getattr(importlib.import_module(package), "__all__", [])
    return not name or name in offered or (not below and is_public(f"{package}.{name}", ""))


def test_few_tests_go_past_public_names():
    """A test that uses the inside keeps it from being changed."""
    folder = Path(__file__).parent
    private = {
        str(path.relative_to(folder)): found
        for path in sorted(folder.rglob("*.py"))
        if (found := private_imports(path))
    }
    listed = "\n".join(f"{name}: {', '.join(found)}" for name, found in private.items())
    assert len(private) <= MOST_PRIVATE_FILES, f"{len(private)} files\n{listed}"
