"""A notebook becomes a page with its text, code and outputs."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "website" / "notebook_pages.py"


def pages_of(*cells: dict[str, Any]) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("notebook_pages", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.pages_of({"cells": cells}, "01_rows"))


def code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "source": [source], "outputs": list(outputs)}


def test_text_code_and_what_is_printed():
    text = {"cell_type": "markdown", "source": ["# Rows\n", "Text."]}
    printed = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    assert pages_of(text, code("print(1)\nprint(2)", printed)) == {
        "01_rows.md": (
            "# Rows\nText.\n\n````python\nprint(1)\nprint(2)\n````\n\n````text\n1\n2\n````\n"
        )
    }


def test_pictures_are_files_of_their_own():
    picture = {"data": {"image/png": base64.b64encode(b"PNG").decode(), "text/plain": "<Figure>"}}
    pages = pages_of(code("draw()", picture, picture))
    assert (pages["01_rows_0.png"], pages["01_rows_1.png"]) == (b"PNG", b"PNG")
    assert pages["01_rows.md"].count("](01_rows_") == 2
    assert "<Figure>" not in pages["01_rows.md"]


def test_html_goes_before_its_plain_text_and_on_one_line():
    shown = {"data": {"text/html": ["<table>\n", "\n", "<tr></tr></table>"], "text/plain": "Batch"}}
    page = pages_of(code("batch", shown))["01_rows.md"]
    assert "<div class='output'><table> <tr></tr></table></div>" in page
    assert "Batch" not in page
