"""The package as a whole: a light import, names that exist, an example for every name."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import torch_collate_kit
from torch_collate_kit import losses, rl, vision

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


@pytest.mark.parametrize("name", modules())
def test_public_names_exist(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert all(hasattr(module, public) for public in names)
    assert module.__doc__ or name.endswith("_version")


PACKAGES = (torch_collate_kit, losses, rl, vision)
NAMES = sorted({(package, name) for package in PACKAGES for name in package.__all__}, key=str)


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_every_public_name_has_an_example_that_doctest_runs(package, name):
    thing = getattr(package, name)
    if name in ("IGNORE_INDEX", "__version__"):
        return
    assert ">>> " in thing.__doc__
