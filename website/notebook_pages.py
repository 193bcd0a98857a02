"""Adds the notebooks to the site as pages: their text, code, and committed outputs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add a page and its pictures for every notebook."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for name, content in pages_of(notebook, path.stem):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def pages_of(notebook: dict[str, Any], stem: str) -> Iterator[tuple[str, str | bytes]]:
    """The files that show a notebook: pictures, and last the page itself."""
    parts: list[str] = []
    num_pictures = 0
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if source:
            parts.append(_fenced("python", source))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{num_pictures}.png"
                num_pictures += 1
                yield name, base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({name})")
            elif "text/html" in data:
                lines = "".join(data["text/html"]).splitlines()
                parts.append("<div class='output'>" + " ".join(filter(None, lines)) + "</div>")
            else:
                text = "".join(data.get("text/plain", output.get("text", "")))
                parts.append(_fenced("text", text.rstrip("\n")))
    yield f"{stem}.md", "\n\n".join(parts) + "\n"


def _fenced(language: str, text: str) -> str:
    return f"````{language}\n{text}\n````"
