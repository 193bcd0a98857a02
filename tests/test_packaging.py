"""The archives that users get: what is in them, and that the wheel works where it is installed.

They are built once, without network, from a copy of the tree, so that nothing is left in it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import pytest

from torch_collate_kit import __version__
from torch_collate_kit.chat import tokenize_documents

ROOT = Path(__file__).parents[1]
NAME = f"torch_collate_kit-{__version__}"
NOT_SOURCE = (
    *(".*", "*.egg-info", "*.pyc", "__pycache__", "build", "dist", "outputs", "site"),
)  # fmt: skip
FOLDERS = ("torch_collate_kit", "tests", "examples", "benchmarks", "docs", "website", "notebooks")
FILES = (
    *("setup.cfg", "pyproject.toml", "constraints.txt", "Makefile", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)  # fmt: skip


def run(*command: str | Path, **options: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the wheel is made from the unpacked sdist, as pip would."""
    folder = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "tree")
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    return archives / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of a new environment, in which only the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    [found] = folder.glob("lib/python*/site-packages")
    return found


def source_files() -> Iterator[str]:
    """Every file of the folders that tests read, and those beside them."""
    copied = shutil.ignore_patterns(*NOT_SOURCE)
    folders = [ROOT / name for name in FOLDERS if (ROOT / name).is_dir()]
    while folders:
        folder = folders.pop()
        names = [path.name for path in folder.iterdir()]
        for name in set(names) - copied(str(folder), names):
            path = folder / name
            if path.is_dir():
                folders.append(path)
            else:
                yield path.relative_to(ROOT).as_posix()
    yield from FILES
    yield from (name for name in ("mkdocs.yml",) if (ROOT / name).exists())


def test_the_sdist_has_all_that_its_tests_need(archives: Path) -> None:
    with tarfile.open(archives / f"{NAME}.tar.gz") as archive:
        members = [m.name.removeprefix(f"{NAME}/") for m in archive.getmembers() if m.isfile()]
    expected = set(source_files())
    assert len(expected) > 250
    assert expected - set(members) == set()
    made = {"PKG-INFO"} | {name for name in members if ".egg-info/" in name}
    others = set(members) - expected - made
    assert others == set()


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {PurePosixPath(name).parts[0] for name in names}
    assert folders == {"torch_collate_kit", f"{NAME}.dist-info"}
    sources = {name for name in source_files() if name.startswith("torch_collate_kit/")}
    assert {name for name in names if name.startswith("torch_collate_kit/")} == sources
    assert "torch_collate_kit/py.typed" in sources
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    with zipfile.ZipFile(wheel) as archive:
        said = HeaderParser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())
        scripts = archive.read(f"{NAME}.dist-info/entry_points.txt").decode().split("\n")
    assert "torch-collate-kit = torch_collate_kit.__main__:main" in scripts
    named = (said["Name"], said["Version"], said["Requires-Python"], said["License-Expression"])
    assert named == ("torch_collate_kit", __version__, ">=3.10", "Apache-2.0")
    needed = {line for line in said.get_all("Requires-Dist", []) if "extra" not in line}
    assert {line.split(">=")[0] for line in needed} == {
        *("torch", "numpy", "datasets", "transformers", "accelerate"),
    }  # fmt: skip
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert str(said.get_payload()).strip() == readme.strip()


def test_an_installed_wheel_collates(site_packages: Path, tmp_path: Path) -> None:
    """Torch comes from here; the package must come from there."""
    code = (
        f"import sys; sys.path.insert(0, {str(site_packages)!r})\n"
        "import torch_collate_kit as kit\n"
        "batch = kit.PackedCollator(0, max_tokens=8)([{'input_ids': [5, 6]}, {'input_ids': [7]}])\n"
        "print(kit.__file__, kit.__version__, batch['input_ids'].tolist())"
    )
    printed = run(sys.executable, "-P", "-c", code, cwd=tmp_path)
    where = site_packages / "torch_collate_kit" / "__init__.py"
    assert printed.split(maxsplit=2) == [str(where), __version__, "[[5, 6, 7]]\n"]


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
    (tmp_path / "datasets.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"):
        tokenize_documents([], None)
