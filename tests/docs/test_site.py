"""The site builds without a warning, its links lead somewhere, and all it loads is its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import torch_collate_kit
from torch_collate_kit import attention, losses, preference, reporting, rl, testing, vision

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """What a page names (``ids``), where it links to, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and "href" in values:
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning fails the build."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_file_and_an_anchor(site, pages):
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # links from the root of a server
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_the_search_works_from_disk(site, pages):
    """A page opened from disk may read no JSON and start no worker, but loads scripts."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    docs = json.loads(index.removeprefix("var __index = "))["docs"]
    assert any(entry["location"].startswith("guide/rl.html") for entry in docs)
    assert all(any("iframe-worker" in of for of in page.loaded) for page in pages.values())
    bundle = next(site.glob("assets/javascripts/bundle.*.js")).read_text(encoding="utf-8")
    assert "search/search_index.js" in bundle  # the theme reads it where the page is a file


def test_nothing_is_loaded_from_elsewhere(pages):
    loaded = {link for page in pages.values() for link in page.loaded}
    assert any(link.endswith(".css") for link in loaded)
    assert not [link for link in loaded if urlsplit(link).scheme not in ("", "data")]


def public_names() -> set[str]:
    """What the API pages must describe, by the path that a user imports."""
    names = {f"torch_collate_kit.{name}" for name in torch_collate_kit.__all__}
    for package in (attention, losses, preference, reporting, rl, testing, vision):
        inner = set(package.__all__) - set(torch_collate_kit.__all__)
        names |= {f"{package.__name__}.{name}" for name in inner}
    return names - {"torch_collate_kit.__version__"}


def test_every_public_name_has_its_place_in_the_reference(site, pages):
    described = {
        anchor for path, page in pages.items() if path.parent.name == "api" for anchor in page.ids
    }
    assert sorted(public_names() - described) == []


def test_docstrings_and_pages_outside_docs_are_shown(site, pages):
    text = (site / "api" / "collators.html").read_text(encoding="utf-8")
    assert ":class:" not in text
    assert "&gt;&gt;&gt;" in text or 'class="gp"' in text  # a doctest is a block of code
    assert "<blockquote>" not in text  # and not a quotation of a quotation of a quotation
    assert (site / "benchmarks" / "results" / "collate.png").exists()
    links = pages[site / "guide" / "packing.html"].links
    assert "../benchmarks/results/collate.html" in links
