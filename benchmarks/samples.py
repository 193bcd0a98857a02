"""Lengths and examples that the benchmarks run on: a real mix of chats, and a long tail."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torch_collate_kit.ragged import Ragged

__all__ = [
    "DEFAULT_DATA",
    "IMAGE_MIXES",
    "Examples",
    "examples_of",
    "image_mix",
    "long_tail",
    "real_mix",
    "rollouts_of",
]

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
Examples = list[dict[str, np.ndarray]]


def real_mix(folder: Path, count: int, *, longest: int, seed: int = 0) -> tuple[np.ndarray, str]:
    """``count`` lengths drawn from real conversations, cut at ``longest``, and what they are.

    Without the file: a seeded mixture of three log-normal parts with about the same quantiles.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, count)))
    path = folder / "lengths" / "mix_all.mistral.npy"
    if path.exists():
        lengths = np.load(path).astype(np.int64)
        what = f"{len(lengths):,} real conversations (GSM8K, Taskmaster-4, tau-bench, SQuALITY)"
        drawn = rng.choice(lengths, count, replace=count > len(lengths))
    else:
        what = f"SYNTHETIC mix of lengths ({path.name} is not in {folder.name}/lengths)"
        print(f"{path} does not exist: the lengths are a seeded synthetic mix; pass --data")
        median, sigma = np.array([[190, 0.35], [560, 0.45], [5000, 0.45]])[
            rng.choice(3, count, p=[0.66, 0.32, 0.02])
        ].T
        drawn = np.exp(np.log(median) + sigma * rng.standard_normal(count)).astype(np.int64)
    return np.clip(drawn, 8, longest), what


def long_tail(count: int, *, longest: int, seed: int = 0) -> tuple[np.ndarray, str]:
    """``count`` log-normal lengths: half below 120, a few up to ``longest``."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, count, 1)))
    drawn = np.exp(np.log(120) + 1.6 * rng.standard_normal(count)).astype(np.int64)
    return np.clip(drawn, 8, longest), "log-normal lengths, median 120, sigma 1.6"


IMAGE_MIXES = {
    "half images": "every second example has an image of 100 to 4,000 patches",
    "several images": "every second example has one to five images of 100 to 1,000 patches",
    "long texts": "four of five have an image, half of these with 2,000 tokens of text more",
    "no text": "every example has an image of 100 to 4,000 patches",
}


def image_mix(name: str, count: int, *, seed: int = 0) -> tuple[np.ndarray, Ragged]:
    """Tokens of each example, and the patches of each of its images, of which four make a token.

    Texts are log-normal, 20 to 2,000 tokens, median 148.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, count, 4)))
    lengths = np.clip(rng.lognormal(5.0, 1.0, count), 20, 2000).astype(np.int64)
    has_image = np.arange(count) % 2 == 0
    if name in ("long texts", "no text"):
        has_image = rng.random(count) < (0.8 if name == "long texts" else 1.0)
    if name == "long texts":
        lengths += 2000 * (has_image & (rng.random(count) < 0.5))
    several = name == "several images"
    numbers = np.where(has_image, rng.integers(1, 6 if several else 2, count), 0)
    patches = rng.integers(100, 1001 if several else 4001, int(numbers.sum()))
    np.add.at(lengths, np.repeat(np.arange(count), numbers), patches // 4)
    return lengths, Ragged.from_lengths(patches, numbers)


def examples_of(lengths: np.ndarray, *, seed: int = 0) -> Examples:
    """Examples of these lengths as ndarrays: int64 ids, float32 mask with an untrained prompt."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, len(lengths), 2)))
    examples = []
    for length in lengths.tolist():
        mask = np.ones(length, dtype=np.float32)
        mask[: int(length * rng.uniform(0.1, 0.6))] = 0
        ids = rng.integers(1, 32_000, length)
        examples.append({"input_ids": ids, "loss_mask": mask})
    return examples


def rollouts_of(lengths: np.ndarray, *, seed: int = 0) -> Examples:
    """Rollouts of these lengths: a prompt of 10 to 60%, rewards and log-probs of each token."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, len(lengths), 3)))
    rollouts = []
    for length in lengths.tolist():
        prompt = max(1, int(length * rng.uniform(0.1, 0.6)))
        response = length - prompt
        rewards = np.zeros(response, dtype=np.float32)
        rewards[-1] = rng.integers(0, 2)
        rollouts.append(
            {
                "prompt_ids": rng.integers(1, 32_000, prompt),
                "response_ids": rng.integers(1, 32_000, response),
                "rewards": rewards,
                "loss_mask": (rng.random(response) < 0.9).astype(np.float32),
                "logprobs": np.log(rng.uniform(0.01, 1, response)).astype(np.float32),
            }
        )
    return rollouts
