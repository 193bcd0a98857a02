"""Training speed of Qwen3 models with random weights: variants that alternate in one process."""

from __future__ import annotations

from typing import Any

from gpu.lengths import ROWS, Layout, loader_of, mix_of
from gpu.models import HYBRID, VOCABULARY, Setting, fitting
from gpu.training import Runner, Variant, alternated, as_in, train_step
from gpu.where import Where

__all__ = ["ISOLATED", "OURS", "VARIANTS", "compare", "prepared"]

_FIXED = Layout("packed", fixed_width=True)
OURS = Variant("packed, torch_varlen")
ISOLATED = Variant("packed, torch_varlen, isolate_mixers", isolated=True)
VARIANTS = {
    variant.name: variant
    for variant in (
        OURS,
        Variant("padded, sdpa", Layout("padded"), "sdpa"),
        Variant("padded and sorted, sdpa", Layout("sorted"), "sdpa"),
        Variant("packed, sdpa with a mask", attention="sdpa"),
        # of one width, or its kernels and its masks are compiled anew for every width
        Variant("packed, flex, fixed width", _FIXED, "flex_attention"),
        Variant("packed, flash_attention_2", attention="flash_attention_2"),
        Variant("packed, torch_varlen, compiled", _FIXED, compiled=True),
        Variant("packed, torch_varlen, fixed width", _FIXED),
        Variant("packed, torch_varlen, whole logits", whole_logits=True),
        Variant("packed, torch_varlen, no prefetch", Layout("packed", prefetch=False)),
        Variant("packed, torch_varlen, a worker", Layout("packed", num_workers=1)),
        ISOLATED,
    )
}


def compare(
    where: Where,
    *,
    size: str,
    variants: list[str],
    max_tokens: int = 8192,
    rows: int = ROWS,
    rounds: int = 2,
    steps: int = 4,
) -> dict[str, Any]:
    """Speed, memory and waiting of each variant, on the same examples."""
    first = VARIANTS[variants[0]] if size == HYBRID else OURS
    mix, model, optimizer, setting, too_large = prepared(where, size, max_tokens, rows, first)
    runners = [Runner(VARIANTS[name], model, optimizer, setting, mix, where) for name in variants]
    rounds, steps, warm_up = (1, 2, 1) if where.is_tiny else (rounds, steps, 2)
    results = alternated(runners, where, rounds=rounds, steps=steps, warm_up=warm_up)
    return {
        **about(size, mix, setting, too_large),
        "parameters": sum(p.numel() for p in model.parameters()),
        "variants": results,
    }


def about(size: str, mix: Any, setting: Setting, too_large: list[str]) -> dict[str, Any]:
    """What every result of a model says of it and of its data."""
    return {
        "model": size,
        "setting": str(setting),
        "too_large": too_large,
        "lengths": mix.what,
        "max_tokens": mix.max_tokens,
        "examples_per_step": mix.batch_size,
    }


def prepared(
    where: Where, size: str, max_tokens: int, rows: int = ROWS, first: Variant = OURS
) -> tuple[Any, Any, Any, Setting, list[str]]:
    """Data, model, optimizer and the setting that fits, after two steps of rows of full width."""
    mix = mix_of(where, 512 if where.is_tiny else VOCABULARY, max_tokens=max_tokens, rows=rows)

    def one_step(model: Any, optimizer: Any, setting: Setting) -> None:
        as_in(first, model, where)
        with loader_of(mix, _FIXED, where) as loader:
            for batch in loader.steps(1):
                train_step(model, optimizer, batch, first, setting, where)

    return mix, *fitting(size, where, one_step)
