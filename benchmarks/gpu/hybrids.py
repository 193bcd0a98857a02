"""Hybrid models: packed rows by the kernels of recurrent layers, and by ``isolate_mixers``.

The kernels are used where their packages can be imported; what is left out for want of them is
named. An exact result is computed by transformers' plain functions, since some kernels refuse fp32.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from gpu.attention import alone, drawn_batch, packed
from gpu.errors import compared
from gpu.families import HYBRIDS, small_model
from gpu.models import HYBRID
from gpu.speed import ISOLATED, OURS, compare
from gpu.where import Where
from torch_collate_kit import Batch, isolate_mixers
from torch_collate_kit.families import FAMILIES

__all__ = ["compare_layouts", "families"]


def families(where: Where) -> dict[str, Any]:
    """Logits and gradients of packed rows against each example alone; waits for the device."""
    checks, left_out = [], []
    for kind in HYBRIDS:
        missing = _missing_kernels(kind, where)
        left_out += [f"{kind} by kernels: {missing}"] * bool(missing)
        ways = ["isolate_mixers"] if missing else ["kernels", "isolate_mixers"]
        for name, max_tokens in (("one row", 512), ("several rows", 260)):
            batch = drawn_batch(where, max_tokens, fixed_width=False)
            usual = alone(where, kind, batch, where.low)
            with _plain_functions(kind, where):
                exact = alone(where, kind, batch, where.exact)
            for way in ways:
                model = small_model(kind, "torch_varlen", where.low, where.device)
                if way == "isolate_mixers":
                    isolate_mixers(model)
                ours = packed(model, batch, {})
                what = f"{kind} by {way}, {name}"
                checks.append(compared(what, ours, usual, exact, where.low))
                if where.is_cuda:
                    checks.append({"name": f"{what}: waits"} | _waits(model, batch))
    return {"checks": checks, "left_out": left_out}


def compare_layouts(where: Where) -> dict[str, Any]:
    """Speed of a Qwen3.5 on packed rows and on padded ones."""
    missing = _missing_kernels("qwen3_5", where)
    ways = [ISOLATED] if missing else [OURS, ISOLATED]
    variants = [*(way.name for way in ways), "padded, sdpa"]
    found = compare(where, size=HYBRID, variants=variants)
    return found | {"left_out": [f"{OURS.name}: {missing}"] * bool(missing)}


def _missing_kernels(kind: str, where: Where) -> str:
    """Why the kernels of a family cannot run here; nothing if they can."""
    packages = next(family.packages for family in FAMILIES if family.name == kind)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported"
    return "" if where.is_cuda else "they need a CUDA GPU"


@contextlib.contextmanager
def _plain_functions(kind: str, where: Where) -> Iterator[None]:
    """Without kernels: the functions of the modeling file that transformers replaces by them."""
    small_model(kind, "sdpa", where.low, where.device)  # imports the file
    module = vars(sys.modules[f"transformers.models.{kind}.modeling_{kind}"])
    replaced = {
        name: function
        for name, function in module.items()
        if inspect.isfunction(function) and hasattr(function, "__wrapped__")
    }
    module |= {name: function.__wrapped__ for name, function in replaced.items()}
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        module |= replaced


def _waits(model: Any, batch: Batch) -> dict[str, Any]:
    """How often a step waits for the device: its inputs, forward and backward pass."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            logits = model(**batch.model_inputs(model, labels=False)).logits
            logits.backward(torch.ones_like(logits))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    at = [f"{w.filename}:{w.lineno}" for w in told if "synchroniz" in str(w.message)]
    return {"is_ok": not at, "waits": len(at), "at": sorted(set(at))[:5]}
