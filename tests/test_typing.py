"""What a type checker says to users: mypy takes the README's code, and knows what a call gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of other packages nothing is read: a minute of mypy for what is not ours.
SETTINGS = """
[mypy]
python_version = 3.11
strict = True
warn_return_any = False
disallow_subclassing_any = False
disallow_any_unimported = False
[mypy-torch.*,transformers.*,datasets.*,accelerate.*,pyarrow.*,torchdata.*]
ignore_missing_imports = True
follow_imports = skip
[mypy-numpy.*]
ignore_missing_imports = True
[mypy-torch_collate_kit.*]
ignore_errors = True
"""
CALLS = """
from typing import Any
from typing_extensions import assert_type
from torch_collate_kit import (
    Batch, PackedCollator, PackingOptions, PaddedCollator, ParallelLayout, RolloutCollator
)

examples = [{"input_ids": [1, 2, 3]}]
assert_type(PaddedCollator(0)(examples), Batch)
assert_type(RolloutCollator(0)(examples), Batch)
assert_type(PackedCollator(0, max_tokens=8)(examples), Batch)
assert_type(PackedCollator(0, max_tokens=8).for_trainer()(examples), dict[str, Any])
packing = PackingOptions(8)
assert_type(PackedCollator(0, packing=packing)(examples), Batch)
assert_type(PackedCollator(0, packing=packing).for_trainer()(examples), dict[str, Any])
options = PackedCollator(
    0,
    max_tokens=8,
    strategy="balanced",
    parallel=ParallelLayout(dp=2),
    overflow="split",
    fixed_width=True,
    normalize_loss=False,
    train_all=True,
)
print(options(examples).metadata["num_loss_tokens"], options(examples).chunk(2)[0].model_inputs())
"""
MISTAKES = """
from torch_collate_kit import PackedCollator, PackingOptions
PackedCollator()
PackedCollator(0, max_tokens="8")
PackedCollator(0, max_tokens=8, strateggy="balanced")
PackedCollator(0, max_tokens=8).for_trainer()([]).metadata
PackedCollator(0, packing=PackingOptions(8), model_inputs=True)
"""


def checked(folder: Path, files: dict[str, str], *more: str) -> list[str]:
    """The lines that mypy prints on these files, under the settings above and more options."""
    from mypy import api

    (folder / "mypy.ini").write_text(SETTINGS)
    for name, code in files.items():
        (folder / name).write_text(code, encoding="utf-8")
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
    found, errors, _ = api.run([*options, "--no-error-summary", *more, *files])
    assert not errors, errors
    return found.splitlines()


def blocks(page: Path) -> str:
    """The code of a page that is not a session with ``>>>``."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(block for block in found if ">>> " not in block)


def test_calls_and_pages_have_types_and_wrong_settings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Batch | dict` had no attribute metadata, and no chunk. Users' functions need no types."""
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    files = {f"page_{page.stem.lower()}.py": blocks(page) for page in pages}
    del files["page_reports.py"]  # to matplotlib axes.figure may be a SubFigure, without savefig
    files = {name: code for name, code in files.items() if code}
    assert "page_readme.py" in files
    assert len(files) > 8
    files |= {"calls.py": CALLS, "mistakes.py": MISTAKES}
    found = checked(tmp_path, files, "--allow-untyped-defs", "--allow-untyped-calls")
    assert [line for line in found if not line.startswith("mistakes.py:")] == []
    lines = {int(line.split(":")[1]) for line in found if ": error:" in line}
    mistakes = [n for n, line in enumerate(MISTAKES.splitlines(), start=1) if line[:3] == "Pac"]
    assert sorted(lines) == mistakes, found
