"""The package as a whole: a light import, names that exist, and tests that use public ones."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import torch_collate_kit

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


@functools.cache
def modules():
    found = pkgutil.walk_packages(torch_collate_kit.__path__, "torch_collate_kit.")
    return ["torch_collate_kit", *sorted(module.name for module in found)]


def test_public_names_exist():
    for name in modules():
        module = importlib.import_module(name)
        missing = [n for n in getattr(module, "__all__", []) if not hasattr(module, n)]
        assert not missing, f"{name} has no {missing}"


OFFERED = "attention batch chat collators errors loading losses packing preference ragged reporting"
OFFERED = sorted([*OFFERED.split(), "rl", "testing", "vision"])


def test_completion_offers_public_names_only():
    """`kit.` offered `annotations`, `families` and `reading`, and no `testing` until imported."""
    assert dir(torch_collate_kit) == sorted([*torch_collate_kit.__all__, *OFFERED])
    for name in OFFERED:
        package = getattr(torch_collate_kit, name)
        assert dir(package) == sorted(package.__all__), name
    at_home = {name for offered in OFFERED for name in getattr(torch_collate_kit, offered).__all__}
    assert set(torch_collate_kit.__all__) - at_home == {"__version__"}


ROOT = Path(__file__).parents[1]
NOT_OFFERED = {"byte_tokenizer", "left_padding_fault"}  # stand-ins that pages and examples need


def code_of(path: Path) -> str:
    """A page, a script, a notebook's cells, or of the package the examples of its docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    if path.is_relative_to(ROOT / "torch_collate_kit"):
        return "\n".join(re.findall(r"(?:>>>|\.\.\.) (.*)", text))
    return text


def test_pages_and_examples_spell_each_name_in_one_way():
    """Top-level names from the top, all others from their package, never from a module in it."""
    kit, found, num_read = torch_collate_kit, [], 0
    folders = "*.md docs/**/*.md examples/**/*.[mp][dy] notebooks/*.ipynb torch_collate_kit/**/*.py"
    for path in (path for pattern in folders.split() for path in ROOT.glob(pattern)):
        if path.name == "CHANGELOG.md":
            continue
        code = code_of(path)
        names = r"from torch_collate_kit\.?([\w.]*) import (\([^)]*\)|[^\n#`)]*)"
        used = [
            (home, n) for home, many in re.findall(names, code) for n in re.findall(r"\w+", many)
        ]
        used += re.findall(r"\bkit\.(\w+)\.(\w+)", code) if "ollate_kit as kit" in code else []
        num_read += len(used)
        for home, name in used:
            is_top = name in kit.__all__ or (name in OFFERED and not home)
            package = getattr(kit, home, None) if home in OFFERED else None
            is_right = not home if is_top else name in getattr(package, "__all__", [])
            is_right |= home in kit.__all__ or name in NOT_OFFERED  # kit.Batch.cat
            found += [] if is_right else [f"{path.relative_to(ROOT)}: {home}.{name}"]
    assert found == []
    assert num_read > 200


MOST_PRIVATE_FILES = 24


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
    folder, private = Path(__file__).parent, {}
    for path in sorted(folder.rglob("*.py")):
        names = r"from (torch_collate_kit[\w.]*) import (\([^)]*\)|[^\n#]*)"
        for home, many in re.findall(names, path.read_text(encoding="utf-8")):
            inside = [name for name in re.findall(r"\w+", many) if not is_public(home, name)]
            if inside:
                private.setdefault(str(path.relative_to(folder)), []).extend(inside)
    assert len(private) <= MOST_PRIVATE_FILES, f"{len(private)} files: {private}"


def test_programs_beside_the_package_import_what_it_has():
    """Benchmarks, examples and the website, of which CI runs a few only."""
    root, wrong, num_read = Path(__file__).parents[1], [], 0
    for folder in ("benchmarks", "examples", "website"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and "torch_collate_kit" in (node.module or ""):
                    home = importlib.import_module(node.module)
                    names = [alias.name for alias in node.names]
                    known = {
                        *dir(home),
                        *(of.name for of in pkgutil.iter_modules(getattr(home, "__path__", []))),
                    }
                    wrong += [f"{path.name}: {name}" for name in names if name not in known]
                    num_read += len(names)
    assert not wrong
    assert num_read > 100
