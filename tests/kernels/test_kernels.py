"""transformers' CUDA paths on the CPU: which inputs keep packed rows apart, in every family.

``verdicts.py`` runs them in a process where stand-ins take the place of the kernels' packages.
What is compared are keywords, shapes and dtypes, and what they lead to; not what a GPU computes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.hybrid_models import FAMILIES
from tests.kernels import pinned
from tests.kernels import stand_ins as recurrent
from tests.kernels.verdicts import FAMILY_OF_WRAPPER
from tests.tiny_models import TRANSFORMERS
from torch_collate_kit import IsolationError, PackedCollator, families

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "isolation.md"
OUTER = {"one row": "exact", "two rows": "exact"}


def run_verdicts(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kernels.verdicts", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected_verdicts() -> dict[str, dict[str, str]]:
    expected = {**pinned.SERVED, **{f"{name} (outer)": OUTER for name in FAMILY_OF_WRAPPER}}
    since = pinned.SINCE_5_24 if TRANSFORMERS >= (5, 24) else {}
    for name, word in {**pinned.REFUSED, **since}.items():
        expected[name] = {"all keywords": word}
    expected["mamba2"] = {**expected["mamba2"], "by the backbone": "exact"}
    for name in pinned.FLASH:
        cases = OUTER if name in pinned.SERVED else pinned.FLASH_CASES
        expected |= {f"{name}, flash {version}": cases for version in (2, 3)}
    return expected


def word_of(found: dict[str, Any]) -> str:
    """The verdict; exact inputs with which the kernels read boundaries from the device wait."""
    waits = found["verdict"] == "exact" and found["reads"] > 0
    return "waits" if waits else found["verdict"]


def test_every_family_does_with_its_inputs_what_the_table_says():
    pytest.importorskip("transformers")
    expected, found = expected_verdicts(), run_verdicts()
    assert found.keys() == expected.keys()
    skipped = {name: cases["skipped"] for name, cases in found.items() if "skipped" in cases}
    ran = found.keys() - skipped
    print(f"{len(ran)} of {len(found)} ran, {len(ran & set(FAMILIES))} of {len(FAMILIES)} families")
    print(*skipped.values(), sep="\n")
    for name in sorted(ran):
        assert found[name].keys() == expected[name].keys(), name
        for case, modes in found[name].items():
            for mode, result in modes.items():
                told = f"{name}, {case}, in {mode} mode: {result}; correct the table of families"
                assert word_of(result) == expected[name][case], told
                if result["verdict"] == "error":
                    said = pinned.MESSAGES.get(name) or pinned.MESSAGES[case]
                    assert said in result["message"], told
    if "qwen4_exp" in ran:  # its n-grams of ids have no gradient: only "alone" shows that leak
        of_ids = found["qwen4_exp"]["all keywords"]["eval"]
        assert of_ids["gradient"] == 0
        assert of_ids["difference"] > 0.1


@pytest.mark.release
def test_every_planted_omission_is_caught_in_bfloat16():
    """With fresh weights, where the logits of 5 in 25 differ by less than their rounding."""
    pytest.importorskip("transformers")
    found = run_verdicts("planted")
    results = [cases for cases in found.values() if "skipped" not in cases]
    for case, words in {"ours": {"exact"}, "without seq_idx": {"leak"}}.items():
        judged = [result["verdict"] for cases in results for result in cases[case]]
        print(f"{case}: {len(judged)} runs of {len(results)} families")
        assert set(judged) == words
        assert len(judged) >= 100


@pytest.mark.parametrize("table", ["served_table", "refused_table", "verdict_table"])
def test_the_page_has_the_table(table):
    text = getattr(pinned, table)()
    assert text in PAGE.read_text(), f"docs/isolation.md lacks this table:\n{text}"


def test_the_families_of_the_table_are_those_that_run():
    with_mixers = {family.name for family in families.FAMILIES if family.mixers}
    assert with_mixers == set(FAMILIES) == {*pinned.SERVED, *pinned.REFUSED}


class Model(nn.Module):
    """A model of which only the config is read."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)


def test_a_model_that_decides_one_prompt_is_refused():
    text = SimpleNamespace(model_type="qwen3_5_text")
    model = Model(model_type="jev", get_text_config=lambda: text)
    batch = PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    with pytest.raises(IsolationError, match="in jev models: it decides one prompt per call"):
        batch.model_inputs(model)


# --- the stand-ins ---------------------------------------------------------------------------


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def delta_arguments(*decay_size: int) -> list[torch.Tensor]:
    q, k, v, g, beta = tensors((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 4, 8), (1, 9, 4, *decay_size),
                               (1, 9, 4))  # fmt: skip
    return [q, k, v, -g.exp(), beta.sigmoid()]


def repeated(*decay_size: int) -> list[torch.Tensor]:
    """The same with a key head per value head, as functions of older versions demand."""
    q, k, *others = delta_arguments(*decay_size)
    return [q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2), *others]


def scan_arguments() -> list[torch.Tensor]:
    x, dt, a, b, c = tensors((1, 9, 4, 8), (1, 9, 4), (4,), (1, 9, 2, 6), (1, 9, 2, 6))
    return [x, dt, -a.exp(), b, c]


def test_stand_ins_compute_what_transformers_computes():
    """Its plain functions, on one segment."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    bamba = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    x, weight, bias = tensors((2, 6, 9), (6, 4), (6,))
    options = {"use_qk_l2norm_in_kernel": True}
    plain = bamba.mamba2_chunk_scan.__wrapped__
    pairs = [
        (recurrent.causal_conv1d_fn(x, weight, bias, activation="silu"),
         qwen.causal_conv1d_fn.__wrapped__(x, weight, bias, activation="silu")),
        (recurrent.chunk_gated_delta_rule(*delta_arguments(), **options)[0],
         qwen.torch_chunk_gated_delta_rule.__wrapped__(*repeated(), **options)[0]),
        (recurrent.chunk_kda(*delta_arguments(8), **options)[0],
         kimi.chunk_kimi_delta_attention.__wrapped__(*repeated(8), **options)[0]),
        (recurrent.mamba_chunk_scan_combined(*scan_arguments(), 4, dt_softplus=True),
         plain(*scan_arguments(), chunk_size=4, dt_softplus=True)),
    ]  # fmt: skip
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
