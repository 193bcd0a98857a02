"""What a type checker says to users: mypy takes the README's code, and knows what a call gives."""

from __future__ import annotations

import os
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
[mypy-numpy.*,torch.*,transformers.*,datasets.*,accelerate.*,pyarrow.*,torchdata.*]
ignore_missing_imports = True
follow_imports = skip
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
# In each line a choice that there is not, and one that there is.
CHOICES = """
kit.PackedCollator(0, max_tokens=8, strategy="best_fit|best_fit_decreasing")
kit.PackedCollator(0, max_tokens=8, overflow="cut|split")
kit.PackingOptions(8, strategy="best_fit|wrapped")
kit.PackingOptions(8, overflow="cut|drop")
kit.PackingOptions(8, balance="flops|tokens")
kit.PackingOptions(8, share_prefixes="always|auto")
kit.pack([1], 8, strategy="best_fit|sequential")
kit.pack([1], 8, overflow="cut|truncate")
kit.packing_report([1], 8, strategies=["best_fit|balanced"])
kit.packing_report([1], 8, overflow="cut|raise")
kit.packing_report([1], 8, balance="flops|attention")
kit.packing_report([1], 8).plot("tokens|lengths")
kit.PaddedCollator(0, padding_side="top|right")
kit.PaddedCollator(0, overflow="split|drop")
kit.RolloutCollator(0, overflow="truncate|drop")
kit.VisionLanguageCollator(None, overflow="cut|split")
kit.VisionLanguageCollator(None, padding_side="top|left")
kit.VisionLanguageCollator(None, require_images="some|all")
kit.ChatOptions(train_on="first|each")
kit.ChatOptions(overflow="split|drop")
kit.PrefetchingSampler(8, batch_size=2, tail="pad|wrap")
kit.PrefetchingSampler(8, batch_size=2, shuffle="hashed|keyed")
kit.PackedBatchSampler([8], None, batch_size=2, tail="pad|drop")
kit.PackedBatchSampler([8], None, batch_size=2, shuffle="hashed|keyed")
kit.PackedIterableDataset([], None, on_error="ignore|skip")
kit.PrefetchLoader(None, on_error="ignore|skip")
kit.Mixture([8], by="rows|tokens")
kit.Mixture([8], stop="never|all_exhausted")
kit.Batch({}).context_shard(0, 2, layout="striped|head_tail")
kit.Batch({}).model_inputs(mask="causal|block")
kit.losses.sums_by(None, kit.Batch({}), "a", per="row|example")
kit.preference.tokenize_preferences(None, None, keep="prompt|prompt_end")
kit.rl.compute_advantages(None, None, [], estimator="ppo|grpo")
kit.rl.compute_advantages(None, None, [], estimator="gae", group_of_one="drop|zero")
kit.rl.normalize_advantages(None, None, [], reduction="mean|token_mean")
kit.rl.stage_mini_batches(kit.Batch({}), [], dp_size=1, balance="flops|tokens")
"""


def checked(folder: Path, files: dict[str, str], *more: str) -> list[str]:
    """The lines that mypy prints on these files, under the settings above and more options."""
    from mypy import api

    (folder / "mypy.ini").write_text(SETTINGS)
    for name, code in files.items():
        (folder / name).write_text(code, encoding="utf-8")
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", os.devnull]
    found, errors, _ = api.run([*options, "--no-error-summary", *more, *files])
    assert not errors, errors
    return found.splitlines()


def blocks(page: Path) -> str:
    """The code of a page that is not a session with ``>>>``."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(block for block in found if ">>> " not in block)


@pytest.mark.parametrize(
    "folder", ["", pytest.param("docs/guide", marks=pytest.mark.release)], ids=["readme", "guide"]
)
def test_calls_and_pages_have_types_and_wrong_settings_are_errors(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Batch | dict` had no attribute metadata, and no chunk. Users' functions need no types."""
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    pages = sorted((ROOT / folder).glob("*.md")) if folder else [ROOT / "README.md"]
    files = {f"page_{page.stem.lower()}.py": blocks(page) for page in pages}
    files.pop("page_reports.py", "")  # to matplotlib axes.figure may be a SubFigure
    files = {name: code for name, code in files.items() if code}
    assert len(files) > (8 if folder else 0)
    wrong, right = re.sub(r"\|\w+", "", CHOICES), re.sub(r"\w+\|", "", CHOICES)
    imported = "import torch_collate_kit as kit"  # and no package of it
    files |= {
        "calls.py": f"{CALLS}{imported}{right}",
        "mistakes.py": f"{MISTAKES}{imported}{wrong}",
    }
    found = checked(tmp_path, files, "--allow-untyped-defs", "--allow-untyped-calls")
    assert [line for line in found if not line.startswith("mistakes.py:")] == []
    lines = {int(line.split(":")[1]) for line in found if ": error:" in line}
    calls = enumerate(files["mistakes.py"].splitlines(), start=1)
    assert sorted(lines) == [n for n, line in calls if re.match(r"Pac|kit\.", line)], found
