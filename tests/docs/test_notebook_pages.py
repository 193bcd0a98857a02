"""A notebook becomes a page with its text, code and outputs."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "website" / "notebook_pages.py"


def code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "source": [source], "outputs": list(outputs)}


def test_text_code_pictures_and_html() -> None:
    """Pictures are files of their own; HTML goes before its plain text, on one line."""
    spec = importlib.util.spec_from_file_location("notebook_pages", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = {"cell_type": "markdown", "source": ["# Rows\n", "Text."]}
    printed = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    picture = {"data": {"image/png": base64.b64encode(b"PNG").decode(), "text/plain": "<Figure>"}}
    shown = {"data": {"text/html": ["<table>\n", "\n", "<tr></tr></table>"], "text/plain": "Batch"}}
    cells = [text, code("print(1)\nprint(2)", printed), code("draw()", picture), code("b", shown)]
    pages = dict(module.pages_of({"cells": cells}, "01_rows"))
    page = pages["01_rows.md"]
    start = "# Rows\nText.\n\n````python\nprint(1)\nprint(2)\n````\n\n````text\n1\n2\n````\n"
    assert page.startswith(start)
    assert pages["01_rows_0.png"] == b"PNG"
    assert page.count("](01_rows_") == 1
    assert "<div class='output'><table> <tr></tr></table></div>" in page
    assert "Batch" not in page
    assert "<Figure>" not in page
