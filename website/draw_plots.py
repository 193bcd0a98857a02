"""Draws the pictures of docs/guide/reports.md by running its code.

python -m website.draw_plots
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["savefig.bbox"] = "tight"
    page = (DOCS / "guide" / "reports.md").read_text(encoding="utf-8")
    folder = DOCS / "assets" / "plots"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, "reports.md", "exec"), names)


if __name__ == "__main__":
    main()
