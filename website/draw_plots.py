"""Draw the pictures of README.md and of pages in docs/guide by running their code.

python -m website.draw_plots
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch_collate_kit import PackedCollator, PaddedCollator

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["savefig.bbox"] = "tight"
    page = (DOCS / "guide" / "reports.md").read_text(encoding="utf-8")
    folder = DOCS / "assets" / "plots"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    run(page, "reports.md")
    names = run((DOCS.parent / "README.md").read_text(encoding="utf-8"), "README.md")
    draw_layouts(names["chats"])


def run(page: str, name: str) -> dict[str, Any]:
    """Run the code of a page, and return its variables."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, name, "exec"), names)
    return names


def draw_layouts(chats: Any) -> None:
    """Draw the examples of README.md, padded and packed, beside each other."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    PaddedCollator(0)(chats).plot(ax=left)
    PackedCollator(0, max_tokens=64)(chats).plot(ax=right)
    figure.savefig("layouts.png", dpi=110)


if __name__ == "__main__":
    main()
