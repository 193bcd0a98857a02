"""With torch and NumPy alone: other packages are hidden from a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torch_collate_kit import packing_report

ROOT = Path(__file__).parents[1]


def test_all_but_what_names_its_package_works_with_torch_and_numpy_alone():
    code = (
        "from tests import hidden_packages\n"
        "hidden_packages.hide()\n"
        "from tests import bare_environment\n"
        "bare_environment.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch and NumPy are enough"


def test_a_package_that_is_installed_and_broken_is_not_called_absent(tmp_path, monkeypatch):
    (tmp_path / "pandas.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"):
        packing_report([3], show=False).to_frame()
