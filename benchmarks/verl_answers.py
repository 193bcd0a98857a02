"""Check that the lines of docs/guide/off_policy.md are verl's own code, on unpacked data.

    python benchmarks/verl_answers.py

verl is run from the source of its installed package, or of the folder that the environment variable
VERL names: to import it needs Ray and more. Weights, rejections and divergences of 100 random
batches must differ by at most 1e-12 in float64; without verl nothing is compared.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from torch_collate_kit import PackedCollator, PerResponseToken, rl, segment_sums
from torch_collate_kit.losses import segment_values, trained_values

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "off_policy.md"
LINES = dict(re.findall(r"^\| (.*?) \| `([^`]+)` \|$", PAGE.read_text("utf-8"), re.M))
LOW, HIGH, MOST = 0.8, 1.25, 0.05


def verl_functions() -> dict[str, Any] | None:
    """Return the functions of verl that are compared; None where it is not installed."""
    spec = importlib.util.find_spec("verl")
    found = Path(os.environ.get("VERL", str(Path(spec.origin).parent) if spec else ""))
    files = {
        name: found / "trainer" / "ppo" / f"{name}.py"
        for name in ("rollout_corr_helper", "core_algos")
    }
    if not all(path.exists() for path in files.values()):
        return None

    # of verl.utils.torch_functional, which imports more than torch
    def mean(values: Any, mask: Any, axis: Any = None) -> Any:
        return (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)

    sums = SimpleNamespace(masked_sum=lambda v, mask, axis=None: (v * mask).sum(axis))
    sums.masked_mean = lambda v, mask, axis=None: mean(v, mask, axis)
    names = {"torch": torch, "math": math, "verl_F": sums, "Any": Any, "SAFETY_BOUND": 20.0}
    for path in files.values():
        text = path.read_text("utf-8")
        for part in re.split(r"^(?=def |class |@|SUPPORTED|TOKEN_LEVEL)", text, flags=re.M):
            if re.match(
                r"def (_parse|compute_rollout_(rej|correction_w)|kl_penal)|SUPPORTED|TOKEN", part
            ):
                exec(f"from __future__ import annotations\n{part}", names)
    names["compute_is_metrics"] = names["compute_rs_metrics"] = lambda **_: {}
    return names


def main() -> None:
    verl = verl_functions()
    if verl is None:
        sys.exit("verl is not installed: nothing was compared")
    largest = {"weights": 0.0, "rejections": 0.0, "k1, k2, k3": 0.0}
    for seed in range(100):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, 6)
        mask = torch.from_numpy((np.arange(8) < lengths[:, None]) & (rng.random((6, 8)) < 0.8))
        old = torch.from_numpy(rng.normal(-2, 1, (6, 8)))
        sampled = old + torch.from_numpy(rng.normal(0, 0.3, (6, 8)))
        places = np.arange(48).reshape(6, 8)
        rollouts = [
            {
                "prompt_ids": [5],
                "response_ids": [6] * n,
                "rewards": 0.0,
                "loss_mask": row[:n],
                "place": at[:n],
            }
            for n, row, at in zip(lengths.tolist(), mask.numpy(), places, strict=True)
        ]
        collate = PackedCollator(0, max_tokens=16, fields={"place": PerResponseToken(torch.int64)})
        batch = collate(rollouts)
        place = trained_values(batch["place"], batch)
        names: dict[str, Any] = {
            "math": math,
            "rl": rl,
            "batch": batch,
            "segment_sums": segment_sums,
        }
        names |= {"segment_values": segment_values, "low": LOW, "high": HIGH, "most": MOST}
        names |= {"old": old.flatten()[place], "sampled": sampled.flatten()[place]}
        names["r"] = rl.log_ratios(names["old"], names["sampled"], batch)
        ratio, floats = old - sampled, mask.double()
        for line, level, bounds in (
            *(("TIS; ", "token", HIGH), ("TIS by", "sequence", HIGH)),
            *(("MIS, ", "token", f"{LOW}_{HIGH}"), ("MIS by", "sequence", f"{LOW}_{HIGH}")),
        ):
            exec(next(of for name, of in LINES.items() if name.startswith(line)), names)
            wanted, _ = verl["compute_rollout_correction_weights"](ratio, floats, level, bounds)
            error = (names["weights"] - wanted.flatten()[place]).abs().max().item()
            largest["weights"] = max(largest["weights"], error)
        for rule in (name.strip("`") for name in LINES if name.startswith("`")):
            bounds = f"{LOW}_{HIGH}" if rule.endswith("k1") else str(MOST)
            exec(LINES[f"`{rule}`"], names)
            wanted, _ = verl["compute_rollout_rejection_mask"](ratio, floats, rule, bounds)
            error = (names["keep"].double() - wanted.flatten()[place]).abs().max().item()
            largest["rejections"] = max(largest["rejections"], error)
        for kind in ("k1", "k2", "k3"):
            error = rl.kl_estimates(old, sampled, kind=kind) - verl["kl_penalty"](
                old, sampled, kind
            )
            largest["k1, k2, k3"] = max(largest["k1, k2, k3"], error.abs().max().item())
    for name, error in largest.items():
        print(f"{name}: largest difference {error:.1e}")
    assert max(largest.values()) <= 1e-12


if __name__ == "__main__":
    main()
