"""Correctness of what the device makes of a batch: fields, the loss through the head, isolation."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from gpu.errors import compared
from gpu.families import VOCABULARY, small_model
from gpu.where import ROOT, Where
from torch_collate_kit import Batch, IsolationError, PackedCollator, check_isolation, token_loss
from torch_collate_kit.ragged import Ragged

__all__ = ["dense_fields", "gpu_tests", "head_loss", "isolation"]


def dense_fields(where: Where) -> dict[str, Any]:
    """Every field of every kind of batch, made on the device, against the CPU's: equal to the bit.

    Among them the M-RoPE positions of packed images.
    """
    from tests.batch_samples import KINDS  # of a checkout; needs no pytest

    checks = []
    for kind, make in KINDS.items():
        expected, moved = make(), make().to(where.device)
        different = [name for name in expected if not _same(moved[name], expected[name])]
        is_ok = list(moved) == list(expected) and len(expected) > 0 and not different
        check = {"name": f"fields of a batch: {kind}", "is_ok": is_ok, "fields": len(expected)}
        checks.append(check | {"different": different})
    return {"checks": checks}


def head_loss(where: Where) -> dict[str, Any]:
    """``token_loss(head=)`` against the loss of whole logits: value and gradients."""
    generator = torch.Generator().manual_seed(0)
    lengths = [700, 1, 900, 447]  # 2048 tokens: two chunks, none of them whole
    examples = [
        {"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator)} for n in lengths
    ]
    for example in examples:
        trained = torch.rand(len(example["input_ids"]), generator=generator) < 0.7
        example["loss_mask"] = trained.float()
    batch = PackedCollator(0, max_tokens=2050, fixed_width=True)(examples).to(where.device)
    hidden = torch.randn(1, 2050, 256, generator=generator).to(where.device)
    weight = (torch.randn(VOCABULARY, 256, generator=generator) * 0.05).to(where.device)
    checks = []
    for name, capped in (("plain", None), ("with a softcap", 5.0)):
        ours, usual, exact = (
            _losses(batch, hidden, weight, dtype, through_head=through_head, capped=capped)
            for dtype, through_head in ((where.low, True), (where.low, False), (where.exact, False))
        )
        checks.append(compared(f"loss through the head, {name}", ours, usual, exact, where.low))
    return {"checks": checks}


def isolation(where: Where) -> dict[str, Any]:
    """``check_isolation`` under autocast: packed rows pass, and a leak is found."""
    generator = torch.Generator().manual_seed(0)
    examples = [
        {"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator)}
        for n in (60, 1, 90, 40)
    ]
    batch = PackedCollator(0, max_tokens=128)(examples).to(where.device)
    checks = []
    for kind in ("qwen3", "gemma3"):
        for attention in ("torch_varlen", "sdpa"):
            model = small_model(kind, attention, torch.float32, where.device)
            with where.autocast():
                found = _leak(model, batch.model_inputs(attention))
            name = f"{kind}, {attention}, autocast: isolated"
            checks.append({"name": name, "is_ok": found is None, "message": found})
        leaking = batch.model_inputs("sdpa") | {
            "attention_mask": torch.ones_like(batch["input_ids"])
        }
        with where.autocast():
            found = _leak(model, leaking)
        is_ok = found is not None and "a 2-D attention_mask is passed" in found
        name = f"{kind}, sdpa with a 2-D mask, autocast: the leak is found"
        checks.append({"name": name, "is_ok": is_ok, "message": found})
    return {"checks": checks}


def gpu_tests(where: Where) -> dict[str, Any]:
    """Tests marked gpu that need no other package, where pytest is installed."""
    name = "tests/gpu"
    paths_of_tests = [name, "tests/test_attention.py", "tests/test_batch_derivations.py"]
    if importlib.util.find_spec("pytest") is None:
        return {"checks": [], "skipped": f"{name}: pytest is missing"}
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    command += paths_of_tests
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    code, lines = _echoed(command, environment)
    results = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
    last = next((line for line in reversed(lines) if results.search(line)), lines[-1])
    counts = {word: int(n) for n, word in results.findall(last)}
    problems = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    is_ok = code == 0 and (counts.get("passed", 0) > 0 or not where.is_cuda)
    check = {"name": f"{name}: {last.strip('= ')}", "is_ok": is_ok, "problems": problems}
    return {"checks": [check], "counts": counts}


def _echoed(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """The exit code and the lines that were printed; also in the cell's log, if it is stopped."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, **options) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return process.returncode, [line for line in lines if line] or ["it printed nothing"]


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Ragged):
        return bool(found == expected)
    return found.dtype == expected.dtype and torch.equal(found.cpu(), expected)


def _losses(
    batch: Batch,
    hidden: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    through_head: bool,
    capped: float | None = None,
) -> dict[str, Tensor]:
    hidden = hidden.detach().to(dtype).requires_grad_()
    head = torch.nn.Linear(256, VOCABULARY, bias=False, device=hidden.device, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    options = {"num_loss_tokens": batch.metadata["num_loss_tokens"]}
    if through_head:
        loss = token_loss(hidden, batch, head=head, logit_softcap=capped, **options)
    else:
        logits = head(hidden)
        logits = logits if capped is None else capped * torch.tanh(logits / capped)
        loss = token_loss(logits, batch, **options)
    loss.backward()
    return {"loss": loss, "hidden": hidden.grad, "weight": head.weight.grad}


def _leak(model: Any, inputs: dict[str, Any]) -> str | None:
    try:
        check_isolation(model, inputs)
    except IsolationError as error:
        return str(error)
    return None
