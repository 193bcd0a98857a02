"""Which attention a run uses: the first that machine and model can do, proved by a check."""

from __future__ import annotations

import argparse
import importlib.util
import re
from typing import Any, NamedTuple

import torch
import transformers

import torch_collate_kit as kit

FLASH = ["flash_attention_3", "flash_attention_2"]
NAMES = [*FLASH, "torch_varlen", "sdpa", "eager"]  # the fastest first

# Attention that cannot do what a model or a batch asks for raises one of these.
CANNOT = (kit.IsolationError, ImportError, NotImplementedError, RuntimeError, ValueError)


class Attention(NamedTuple):
    """The options of `Batch.model_inputs` that belong to the attention of a model."""

    attention: str
    mask: str | None = None
    sliding_window: int | None = None

    def __str__(self) -> str:
        return f"{self.attention} with a block mask" if self.mask else self.attention


def choose_attention(
    model: Any, batch: kit.Batch, device: torch.device, args: argparse.Namespace
) -> tuple[Attention, str]:
    """The attention that the model has from now on, and one line that says which, and why.

    `batch` has two examples; packed ones must not see each other. `--attention auto` tries what the
    device may have, the fastest first.
    """
    names = [args.attention]
    if args.attention == "auto":
        names = NAMES if device.type == "cuda" else NAMES[len(FLASH) :]
        names = ["sdpa", "eager"] if args.no_packing else names
    reasons: list[str] = []
    for name in names:
        if reason := why_not(name, model, device, args) or why_refused(name, model):
            reasons.append(f"{name} {reason}")
            continue
        for attention in ways_to_use(name, model, args):
            if reason := why_it_fails(attention, model, batch, args):
                reasons.append(f"{attention} {reason}")
                continue
            why = "; ".join(reasons) or f"the first choice on {device.type}"
            asked = args.attention != "auto" and not reasons
            return attention, f"attention: {attention} ({'as asked for' if asked else why})"
    what = f"train {type(model).__name__}"
    what += "" if args.no_packing else " on packed rows, use --no-packing"
    cannot = "no attention can"
    if args.attention != "auto":
        cannot = f"--attention {args.attention} cannot"
    raise kit.IsolationError(f"{cannot} {what}: {'; '.join(reasons)}")


def ways_to_use(name: str, model: Any, args: argparse.Namespace) -> list[Attention]:
    """As it is, and with a mask: some models (gpt-oss, Falcon) make theirs without positions."""
    if name not in ("sdpa", "eager") or args.no_packing:
        return [Attention(name)]
    config = model.config.get_text_config()
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return [Attention(name), Attention(name, "block", config.sliding_window if slides else None)]


def why_not(name: str, model: Any, device: torch.device, args: argparse.Namespace) -> str | None:
    """Why this attention is not tried; None if it is."""
    if name == "sdpa" and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return f"leaves out the soft-capping of {type(model).__name__}"
    if name in FLASH:
        is_installed = {
            "flash_attention_2": transformers.utils.is_flash_attn_2_available,
            "flash_attention_3": transformers.utils.is_flash_attn_3_available,
        }
        if device.type != "cuda":
            return "needs a CUDA GPU"
        if not is_installed[name]():
            return "is not installed"
        # gpt-oss and others have sinks, which most flash attention leaves out in silence
        known = getattr(model, "_compatible_flash_implementations", None) or [name]
        if not model._supports_flash_attn or name not in known:
            return f"is not supported by {type(model).__name__}"
    elif name != "torch_varlen" or device.type != "cuda":
        return None
    elif importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"needs a newer torch than {torch.__version__}"
    return why_no_kernel(name, model, torch.cuda.get_device_capability(device), args)


def why_no_kernel(
    name: str, model: Any, capability: tuple[int, int], args: argparse.Namespace
) -> str | None:
    """The limits of the kernels for CUDA."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name == "flash_attention_3" and capability[0] != 9:
        return "needs a Hopper GPU (compute capability 9), this one has {}.{}".format(*capability)
    if capability < (8, 0):
        return "needs a GPU of compute capability 8.0, this one has {}.{}".format(*capability)
    if args.precision != "bf16":
        return "needs bfloat16, and this run is in float32"
    if size % 8 or size > 256:
        return f"needs a head size that divides by 8 and is at most 256, this model has {size}"
    return None


def why_refused(name: str, model: Any) -> str | None:
    """Give the text model this attention; a vision tower keeps its own. Or why it has another."""
    kit.register_torch_varlen()
    has_parts = "text_config" in model.config.sub_configs
    try:
        model.set_attn_implementation({"text_config": name} if has_parts else name)
    except CANNOT as error:
        return f"is refused: {in_short(error)}"
    found = model.config.get_text_config()._attn_implementation
    return None if found == name else f"cannot be set, {type(model).__name__} keeps {found}"


def why_it_fails(
    attention: Attention, model: Any, batch: kit.Batch, args: argparse.Namespace
) -> str | None:
    """Why packed examples are not apart, in training too, or not what they are alone."""
    if args.no_packing:
        return None
    inputs: Any = batch
    try:
        if attention.mask:
            inputs = batch.model_inputs(**attention._asdict(), labels=False)
        kit.check_isolation(model, inputs)
    except CANNOT as error:
        return f"fails: {in_short(error)}"
    return None


def in_short(error: Exception) -> str:
    """The beginning of a message, without its reasons and ways out."""
    return re.split(r"[:;.] ", " ".join(str(error).split()) or type(error).__name__)[0]
