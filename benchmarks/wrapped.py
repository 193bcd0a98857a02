"""Documents joined and cut, against best fit with long ones split: padding, cuts, context lost.

    python benchmarks/wrapped.py [LENGTHS.npy]

By default the lengths of the real mix in the data folder; each document gets an end token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from torch_collate_kit import pack

FOLDER = Path(os.environ.get("TORCH_COLLATE_KIT_DATA", Path(__file__).parents[2] / "shared/data"))
LIMITS = (2048, 8192)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else FOLDER / "lengths/mix_all.qwen.npy"
    lengths = np.load(path).astype(np.int64) + 1
    print(f"{len(lengths):,} documents, {lengths.sum():,} tokens")
    for limit in LIMITS:
        for strategy, overflow in (("wrapped", None), ("best_fit_decreasing", "split")):
            plan = pack(lengths, limit, strategy=strategy, overflow=overflow)
            padding = 1 - plan.lengths.sum() / (plan.num_rows * limit)
            lost = plan.lengths[plan.starts > 0].sum() / lengths.sum()
            cut = len(plan.cut) / len(lengths)
            print(
                f"{limit:>6,} {strategy:<20} padding {padding:.2%}, documents cut {cut:.1%}, "
                f"tokens with context lost {lost:.1%}"
            )


if __name__ == "__main__":
    main()
