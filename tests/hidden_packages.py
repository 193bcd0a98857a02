"""An import hook: all packages but torch, NumPy and what they require look absent."""

from __future__ import annotations

import re
import sys
from importlib import metadata

_OURS = ("torch_collate_kit", "tests")


class _Hidden:
    """An import hook that finds none of ``names``, as if their packages were not installed."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])


def hide() -> None:
    """Before torch is imported, which loads some of them where they are installed."""
    names = _other_packages()
    loaded = sorted(names & {name.partition(".")[0] for name in sys.modules} - {"_distutils_hack"})
    assert "torch" not in sys.modules, "call hide() before torch is imported"
    assert not loaded, f"{loaded} cannot be hidden any more"
    sys.meta_path.insert(0, _Hidden(names))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _other_packages() -> set[str]:
    """Top-level modules of what is installed, but for torch, NumPy and what they require."""
    installed = {_plain(found.metadata["Name"]) for found in metadata.distributions()}
    kept: set[str] = set()
    todo = ["torch", "numpy"]
    while todo:
        name = todo.pop()
        if name in kept or name not in installed:
            continue
        kept.add(name)
        wanted = [r for r in metadata.requires(name) or () if "extra ==" not in r]
        todo += [_plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted]
    hidden: set[str] = set()
    needed: set[str] = set(_OURS)
    for found in metadata.distributions():  # packages_distributions() of Python 3.10 misses some
        modules = needed if _plain(found.metadata["Name"]) in kept else hidden
        modules |= {path.parts[0].removesuffix(".py") for path in found.files or ()}
    return hidden - needed
