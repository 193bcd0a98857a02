"""Adds pages that lie outside docs/ to the site: benchmarks, examples, notebooks, changelog.

Links between these and docs/ are written for the repository and rewritten here. A link to a file
that is no page of the site (a script) becomes its path in code font.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    "examples/configs/README.md",
    "examples/dropin/README.md",
    "notebooks/README.md",
    "benchmarks/README.md",
    "benchmarks/results/*",
)
SHOWN = {".md", ".png"}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def on_config(config: Any) -> Any:
    """Add the pages of results to the section "Benchmarks"."""
    for pages in _sections(config.nav, "Benchmarks"):
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
            title = path.stem.replace("_", " ").capitalize()
            pages.append({title: path.relative_to(ROOT).as_posix()})
    return config


def _sections(nav: list[Any], title: str) -> Iterator[list[Any]]:
    """The lists of pages under a title, however deep."""
    for entry in nav:
        for name, inside in entry.items() if isinstance(entry, dict) else ():
            if isinstance(inside, list):
                yield from [inside] if name == title else _sections(inside, title)


def on_files(files: Any, config: Any) -> Any:
    """Add the files, each under its path in the repository."""
    from mkdocs.structure.files import File

    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in SHOWN:
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that leave docs/, and those of pages outside it."""
    source = page.file.src_uri
    in_docs = (Path(config.docs_dir) / source).exists()
    place = f"docs/{source}" if in_docs else source

    def rewritten(match: re.Match[str]) -> str:
        target = match["target"]
        if ":" in target:
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if not (ROOT / wanted).exists():
            return match[0]  # mkdocs warns of it
        on_site = _on_site(wanted, files)
        if on_site is None:
            return match["text"] if match["text"].startswith("`") else f"`{wanted}`"
        relative = posixpath.relpath(on_site, posixpath.dirname(source) or ".")
        return f"[{match['text']}]({relative}{match['anchor'] or ''})"

    parts = _FENCE.split(markdown)  # every second one is a block of code
    parts[::2] = [_LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)


def _on_site(path: str, files: Any) -> str | None:
    """The page or picture that shows a file or folder of the repository, if there is one."""
    path = re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))  # as notebook_pages.py names them
    for name in (path, f"{path}/README.md"):
        if files.get_file_from_path(name) is not None:
            return name
    return None
