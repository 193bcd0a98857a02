"""The cells of `make gpu`: each is measured in a process of its own, and saved when it is done."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu.where import Where

__all__ = ["CELLS", "PARTS", "Cell", "chosen"]

PARTS = ("correctness", "speed", "hybrids", "launch")


@dataclass(frozen=True)
class Cell:
    """A function of this folder with its options, and the seconds that it takes.

    ``seconds`` is what it took, or is thought to take, on an H100; a run that has less time left
    does not begin it. After ``limit`` it is stopped, and that is its result.
    """

    name: str
    part: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    seconds: int = 30
    limit: int = 180
    in_tiny: bool = True
    """Whether a tiny run has it: one cell of each kind is enough there."""
    reads: tuple[str, ...] = ()
    """Patterns of files beside its own that it depends on: it is measured again if they change."""

    @property
    def is_correctness(self) -> bool:
        """Whether an error in it counts as a check that failed."""
        return self.part == "correctness" or self.function == "hybrids:families"

    def run(self, where: Where) -> dict[str, Any]:
        module, _, name = self.function.partition(":")
        result: dict[str, Any] = getattr(importlib.import_module(f"gpu.{module}"), name)(
            where, **self.options
        )
        return result


_OURS, _PADDED = "packed, torch_varlen", "padded, sdpa"
_SORTED = "padded and sorted, sdpa"
_COMPILED, _FIXED = "packed, torch_varlen, compiled", "packed, torch_varlen, fixed width"
_MASKS = [
    _OURS,
    "packed, sdpa with a mask",
    "packed, flex, fixed width",
    "packed, flash_attention_2",
]
_PEERS = [
    "ours: packed, torch_varlen",
    "Trainer, flattened, torch_varlen",
    "Trainer, flattened, flash_attention_2",
    "Trainer, flattened, sdpa",
    "TRL, packed",
]
# Rows of one width are full on average if a step has many of them.
_WIDE = {"rows": 8, "steps": 3}
_SAMPLES = ("tests/batch_samples.py",)
_TESTS = ("tests/*.py", "tests/gpu/*.py", "tests/rl/rollouts.py", "examples/*.py")
_PACKED_HELPERS = ("benchmarks/gpu/attention.py",)
_LIGER = ["Trainer, flattened, torch_varlen, Liger"]


def _speed(name: str, size: str, variants: list[str], seconds: int, **more: Any) -> Cell:
    in_tiny = more.pop("in_tiny", False)
    options = {"size": size, "variants": variants, **more}
    return Cell(name, "speed", "speed:compare", options, seconds, 3 * seconds, in_tiny)


def _peers(name: str, size: str, trainers: list[str], seconds: int, *, in_tiny: bool) -> Cell:
    options = {"size": size, "trainers": trainers}
    return Cell(name, "speed", "peers:against_peers", options, seconds, 3 * seconds, in_tiny)


def _profile(name: str, size: str, variant: str, seconds: int, *, in_tiny: bool) -> Cell:
    options = {"size": size, "variant": variant}
    return Cell(name, "speed", "profiling:profiled", options, seconds, 3 * seconds, in_tiny)


# In the order of their worth: what is not reached in one run is measured in the next.
CELLS = (
    Cell("attention", "correctness", "attention:kernel", seconds=25),
    Cell("families", "correctness", "attention:families", seconds=30),
    Cell("fields", "correctness", "batches:dense_fields", seconds=15, reads=_SAMPLES),
    Cell("head-loss", "correctness", "batches:head_loss", seconds=15),
    Cell("isolation", "correctness", "batches:isolation", seconds=20),
    _speed("padding-0.6B", "0.6B", [_OURS, _PADDED, _SORTED], 70, in_tiny=True),
    _speed("padding-1.7B", "1.7B", [_OURS, _PADDED], 90),
    Cell("hybrids", "hybrids", "hybrids:families", seconds=40, reads=_PACKED_HELPERS),
    Cell("hybrids-0.8B", "hybrids", "hybrids:compare_layouts", seconds=120, limit=360),
    Cell("launches", "launch", "launches:launch_delay", seconds=35),
    Cell("captured", "speed", "graphs:captured_step", seconds=40, in_tiny=False),
    _peers("trainers-0.6B", "0.6B", _PEERS, 80, in_tiny=True),
    _speed("compiled-1.7B", "1.7B", [_FIXED, _COMPILED], 90, in_tiny=True, **_WIDE),
    _speed("padding-4B", "4B", [_OURS, _PADDED], 130, steps=3),
    Cell("checkpointing", "correctness", "attention:checkpointing", seconds=20),
    _speed("attention-1.7B", "1.7B", _MASKS, 100),
    _profile("profile-1.7B", "1.7B", _COMPILED, 60, in_tiny=False),
    _speed("prefetch-0.6B", "0.6B", [_OURS, f"{_OURS}, no prefetch", f"{_OURS}, a worker"], 45),
    _speed("logits-0.6B", "0.6B", [_OURS, f"{_OURS}, whole logits"], 45, in_tiny=True),
    _profile("profile-0.6B", "0.6B", _OURS, 45, in_tiny=True),
    _peers("trainers-1.7B", "1.7B", _PEERS, 110, in_tiny=False),
    Cell("compiled", "correctness", "attention:compiled", seconds=90, limit=240),
    Cell("gpu-tests", "correctness", "batches:gpu_tests", seconds=150, limit=400, reads=_TESTS),
    _speed("compiled-0.6B", "0.6B", [_FIXED, _COMPILED], 70, **_WIDE),
    _speed("compiled-4B", "4B", [_FIXED, _COMPILED], 120, **_WIDE),
    _speed("attention-0.6B", "0.6B", _MASKS, 70),
    _speed("padding-8B", "8B", [_OURS], 90, steps=3),
    _peers("liger-0.6B", "0.6B", _LIGER, 40, in_tiny=False),
)


def chosen(*, parts: Sequence[str] = PARTS, names: Sequence[str] = (), tiny: bool) -> list[Cell]:
    """The cells of these parts and with these names (all of them without names), in their order.

    Raises:
        ValueError: a part or a name that is none.

    >>> [cell.name for cell in chosen(parts=["launch"], tiny=True)]
    ['launches']
    """
    every = [cell for cell in CELLS if cell.in_tiny or not tiny or cell.name in names]
    for what, given, known in (
        ("part", parts, PARTS),
        ("cell", names, [cell.name for cell in CELLS]),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
    picked = [cell for cell in every if cell.part in parts]
    return [cell for cell in picked if not names or cell.name in names]
