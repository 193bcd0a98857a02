"""Turns the package's docstrings into the Markdown that the API pages are made of.

Doctests become blocks of code, ``:class:`~package.Name` `` becomes a link to ``Name``, and the name
of a page in docs/ becomes a link to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

_DOCS = Path(__file__).parents[1] / "docs"
_PAGE = re.compile(r"docs/(\w+\.md)")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")
_DOCTEST = re.compile(r"^(?P<indent>[ ]*)>>> .*?(?=\n[ ]*\n|\Z)", re.M | re.S)


class Docstrings(griffe.Extension):
    """Rewrites all docstrings of the package when it has been loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for obj in _objects(pkg):
            if obj.docstring is not None:
                obj.docstring.value = _as_markdown(obj.docstring.value, obj)


def _objects(obj: Any) -> Iterator[Any]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _as_markdown(text: str, obj: Any) -> str:
    text = _ROLE.sub(lambda match: _link(match[1], obj), text)
    text = _PAGE.sub(_page_link, text)
    return _DOCTEST.sub(lambda match: _fenced(match[0], match["indent"]), text)


def _page_link(match: re.Match[str]) -> str:
    """A link from api/, where all docstrings are shown."""
    return f"[{match[0]}](../{match[1]})" if (_DOCS / match[1]).exists() else match[0]


def _fenced(code: str, indent: str) -> str:
    return f"{indent}```pycon\n{code}\n{indent}```"


def _link(target: str, obj: Any) -> str:
    """A link to what the API pages describe; other names are left in code font."""
    name = target.rpartition(".")[2]
    owner = obj if obj.is_class else obj.parent
    if owner is not None and owner.is_class and name in owner.members:
        name = f"{owner.name}.{name}"
    for package in (obj.package, obj.package.members["rl"]):
        found = package.members.get(name.partition(".")[0])
        if found is not None:  # a function may have the name of its module
            inside = f"{name}." if found.is_module else ""
            return f"[`{name}`][{package.path}.{inside}{name}]"
    return f"`{name}`"
