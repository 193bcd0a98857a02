"""Correctness of packed attention: torch_varlen against SDPA, one example at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.errors import compared
from gpu.families import FAMILIES, VOCABULARY, WINDOW, small_model
from gpu.models import checkpointed
from gpu.where import Where
from torch_collate_kit import Batch, PackedCollator
from torch_collate_kit.attention import kernels
from torch_collate_kit.attention.kernels import SegmentBounds, attend

__all__ = ["alone", "checkpointing", "compiled", "drawn_batch", "families", "kernel", "packed"]

Named = dict[str, Tensor]
LENGTHS = [130, 1, 257, 64, 60]  # 512 tokens: below, at and above the kernel's block sizes


def kernel(where: Where) -> dict[str, Any]:
    """The attention alone: grouped heads, windows, head dimensions, one row and two."""
    heads: list[tuple[int, int]] = [(8, 2)] if where.is_tiny else [(8, 8), (8, 2), (4, 1)]
    windows = [None, WINDOW] if where.is_tiny else [None, 2, WINDOW, 129]
    dimensions = [64] if where.is_tiny else [64, 128, 256]
    checks = []
    for (q, kv), window, size in itertools.product(heads, windows, dimensions):
        for lengths, rows in ((LENGTHS, 1), ([130, 1, 125, 6, 64, 186], 2)):
            inputs = _heads(where, (q, kv, kv, q), rows, 512 // rows, size)
            cu = torch.tensor([0, *lengths], device=where.device).cumsum(0).int()
            true, above = (SegmentBounds(cu, cu, n, n) for n in (max(lengths), 2048))
            name = f"{q}/{kv} heads of {size}, window {window}, rows {rows}"
            exact = _sdpa(inputs, lengths, window, where.exact)
            usual = _sdpa(inputs, lengths, window, where.low)
            for what, segments in (("", true), (", max_q above the maximum", above)):
                with _fallbacks() as calls:
                    ours = _attended(inputs, segments, window, where.low)
                check = compared(name + what, ours, usual, exact, where.low)
                if where.is_cuda and calls[0]:  # then nothing was shown of the kernel
                    check |= {"is_ok": False, "reason": "torch's varlen kernel was not used"}
                checks.append(check)
    return {"checks": checks}


def families(where: Where) -> dict[str, Any]:
    """A small model of each family: logits and all gradients of packed rows."""
    return {"checks": [check for kind in FAMILIES for check in _family(where, kind)]}


def _family(where: Where, kind: str) -> list[dict[str, Any]]:
    checks = []
    layouts = {"one row": (512, False), "several rows": (260, False), "pad tails": (300, True)}
    for name, (max_tokens, fixed_width) in layouts.items():
        batch = drawn_batch(where, max_tokens, fixed_width=fixed_width)
        usual, exact = (alone(where, kind, batch, d) for d in (where.low, where.exact))
        model = small_model(kind, "torch_varlen", where.low, where.device)
        for what, change in (("", {}), (", max_q above the maximum", {"max_length_q": 4096})):
            ours = packed(model, batch, change)
            checks.append(compared(f"{kind}, {name}{what}", ours, usual, exact, where.low))
    return checks


def checkpointing(where: Where) -> dict[str, Any]:
    """Both kinds of gradient checkpointing, which run attention again in the backward pass."""
    checks = []
    batch = drawn_batch(where, 300, fixed_width=True)
    for kind in ("qwen3", "gemma3"):
        usual, exact = (alone(where, kind, batch, d) for d in (where.low, where.exact))
        for reentrant in (True, False):
            model = small_model(kind, "torch_varlen", where.low, where.device)
            checkpointed(model, use_reentrant=reentrant)
            model.enable_input_require_grads()
            name = f"{kind}, {'reentrant' if reentrant else 'not reentrant'}"
            checks.append(compared(name, packed(model, batch, {}), usual, exact, where.low))
    return {"checks": checks}


def compiled(where: Where) -> dict[str, Any]:
    """The layers under torch.compile, for three layouts; and how often each was compiled."""
    from torch._dynamo.utils import counters

    checks, graphs = [], {}
    for kind in ("gemma3",) if where.is_tiny else ("qwen3", "gemma3"):
        torch._dynamo.reset()
        counters.clear()
        model = small_model(kind, "torch_varlen", where.low, where.device)
        for layer in model.model.layers:
            layer.compile(backend=where.backend)
        for max_tokens in (512, 300, 260):
            batch = drawn_batch(where, max_tokens, fixed_width=True)
            usual, exact = (alone(where, kind, batch, d) for d in (where.low, where.exact))
            ours = packed(model, batch, {"max_length_q": 512, "max_length_k": 512})
            name = f"{kind}, rows of {max_tokens}"
            checks.append(compared(name, ours, usual, exact, where.low))
        breaks = dict(counters["graph_break"])
        checks.append({"name": f"{kind}: no graph break", "is_ok": not breaks, "found": breaks})
        graphs[kind] = counters["stats"]["unique_graphs"]
    return {"checks": checks, "graphs": graphs}


def _heads(where: Where, heads: tuple[int, ...], rows: int, width: int, size: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, [B, H, T, D], rounded to the low dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, width, number, size) for number in heads]
    drawn = [torch.randn(shape, generator=generator).to(where.low) for shape in shapes]
    return [x.transpose(1, 2).to(where.device) for x in drawn]


def _attended(
    inputs: list[Tensor], segments: SegmentBounds, window: int | None, dtype: torch.dtype
) -> Named:
    *heads, slope = (x.to(dtype) for x in inputs)
    heads = [x.detach().requires_grad_() for x in heads]
    return _with_gradients(attend(*heads, segments, window=window), heads, slope.transpose(1, 2))


def _sdpa(
    inputs: list[Tensor], lengths: list[int], window: int | None, dtype: torch.dtype
) -> Named:
    """One SDPA per segment, with the mask written out."""
    *heads, slope = (x.to(dtype) for x in inputs)
    heads = [x.detach().requires_grad_() for x in heads]
    rows, _, width, _ = heads[0].shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in heads]
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in flat), strict=True):
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        seen = seen if window is None else seen.triu(1 - window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0].transpose(0, 1))
    output = torch.cat(outputs).view(rows, width, *outputs[0].shape[1:])
    return _with_gradients(output, heads, slope.transpose(1, 2))


def _with_gradients(output: Tensor, inputs: list[Tensor], slope: Tensor) -> Named:
    gradients = torch.autograd.grad(output, inputs, slope)
    return dict(zip(("output", "query", "key", "value"), (output, *gradients), strict=True))


def drawn_batch(where: Where, max_tokens: int, *, fixed_width: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    examples = [
        {"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator)} for n in LENGTHS
    ]
    collate = PackedCollator(0, max_tokens=max_tokens, fixed_width=fixed_width)
    return collate(examples).to(where.device)


def _segments(batch: Batch) -> list[tuple[int, slice]]:
    """Row and columns of every example: rows begin with them, and end with pads."""
    found = []
    for row, lengths in enumerate(batch["sub_seq_lengths"].tolist()):
        stops = list(itertools.accumulate(lengths, initial=0))
        found += [(row, slice(a, b)) for a, b in itertools.pairwise(stops)]
    return found


def _slope(batch: Batch, segments: list[tuple[int, slice]]) -> Tensor:
    """A gradient of the logits [R, W, V], float32: random on tokens, 0 at pads."""
    generator = torch.Generator().manual_seed(1)
    shape = (*batch["input_ids"].shape, VOCABULARY)
    drawn, slope = torch.randn(shape, generator=generator), torch.zeros(shape)
    for row, columns in segments:
        slope[row, columns] = drawn[row, columns]
    return slope.to(batch["input_ids"].device)


def packed(model: Any, batch: Batch, changes: dict[str, Any]) -> Named:
    """The logits of all tokens, and all gradients, by what ``model_inputs`` returns."""
    model.zero_grad()
    segments = _segments(batch)
    slope = _slope(batch, segments)
    logits = model(**(batch.model_inputs(model, labels=False) | changes)).logits
    logits = logits.view(slope.shape)  # a model that takes one row returns one
    logits.backward(slope.to(logits.dtype))
    return {"logits": torch.cat([logits[at] for at in segments])} | _gradients(model)


def alone(where: Where, kind: str, batch: Batch, dtype: torch.dtype) -> Named:
    """The same from one example at a time, by SDPA."""
    model, segments = small_model(kind, "sdpa", dtype, where.device), _segments(batch)
    slope, parts = _slope(batch, segments), []
    for row, columns in segments:
        ids = batch["input_ids"][row, columns][None]
        logits = model(input_ids=ids, use_cache=False).logits
        logits.backward(slope[row, columns][None].to(logits.dtype))
        parts.append(logits[0])
    return {"logits": torch.cat(parts)} | _gradients(model)


def _gradients(model: Any) -> Named:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@contextlib.contextmanager
def _fallbacks() -> Iterator[list[int]]:
    """How often attention ran one SDPA per segment, because there is no kernel for what it got."""
    calls, by_segment = [0], kernels._sdpa_by_segment

    def counted(*args: Any) -> Tensor:
        calls[0] += 1
        return by_segment(*args)

    kernels._sdpa_by_segment = counted
    try:
        yield calls
    finally:
        kernels._sdpa_by_segment = by_segment
