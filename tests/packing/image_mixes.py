"""Seeded mixes of texts and images: tokens of each example, patches of each of its images."""

from __future__ import annotations

import numpy as np

__all__ = ["MIXES", "mix", "totals"]

MIXES = ("half images", "several images", "long texts", "no text")


def mix(name: str, count: int, seed: int = 0) -> tuple[np.ndarray, list[list[int]]]:
    """Log-normal texts of 20 to 2,000 tokens; an image adds a quarter of its patches in tokens.

    "half images": every second example has one of 100 to 4,000 patches; "several images": one to
    five of 100 to 1,000; "long texts": four of five, half of these with 2,000 tokens more; "no
    text": all.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, count)))
    lengths = np.clip(rng.lognormal(5.0, 1.0, count), 20, 2000).astype(np.int64)
    patches: list[list[int]] = []
    for i in range(count):
        most, largest = (5, 1000) if name == "several images" else (1, 4000)
        images = rng.integers(100, largest + 1, rng.integers(1, most + 1)).tolist()
        is_text = rng.random() < 0.2 if name == "long texts" else name != "no text" and i % 2 == 1
        patches.append([] if is_text else images)
        is_long = name == "long texts" and not is_text and rng.random() < 0.5
        lengths[i] += sum(n // 4 for n in patches[i]) + 2000 * is_long
    return lengths, patches


def totals(patches: list[list[int]]) -> np.ndarray:
    """Patches of each example: int64 [N]."""
    return np.array([sum(images) for images in patches], dtype=np.int64)
