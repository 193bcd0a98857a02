"""The package as a whole: a light import, names that exist, an example for every name."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import torch_collate_kit

IMPORT = """
import sys, time
start = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - start
start = time.perf_counter()
import torch_collate_kit
kit_seconds = time.perf_counter() - start
heavy = {"transformers", "datasets", "accelerate", "matplotlib", "pyarrow", "pandas", "flash_attn"}
print(kit_seconds / torch_seconds, *sorted(heavy & sys.modules.keys()))
"""


def test_the_import_is_light():
    """At most 10% on top of torch, in the best of three runs; nothing heavy is loaded."""
    ratios = []
    for _ in range(3):
        command = [sys.executable, "-c", IMPORT]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        ratio, *heavy = done.stdout.split()
        assert heavy == []
        ratios.append(float(ratio))
    assert min(ratios) < 0.10, ratios


def modules():
    found = pkgutil.walk_packages(torch_collate_kit.__path__, "torch_collate_kit.")
    return ["torch_collate_kit", *sorted(module.name for module in found)]


@pytest.mark.parametrize("name", modules())
def test_public_names_exist(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert all(hasattr(module, public) for public in names)
    assert module.__doc__ or name.endswith("_version")


@pytest.mark.parametrize("name", sorted(set(torch_collate_kit.__all__) - {"__version__"}))
def test_every_public_name_has_an_example_that_doctest_runs(name):
    thing = getattr(torch_collate_kit, name)
    if name == "IGNORE_INDEX":
        assert thing == -100
        return
    if name == "rl":  # a package of functions
        assert all(">>> " in getattr(thing, function).__doc__ for function in thing.__all__)
        return
    assert ">>> " in thing.__doc__
