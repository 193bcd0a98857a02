"""Lengths and examples that the benchmarks run on: a real mix of chats, and a long tail."""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["DEFAULT_DATA", "Examples", "examples_of", "long_tail", "real_mix", "rollouts_of"]

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
