"""Where a cell runs: a CUDA GPU with real sizes, or the CPU with tiny ones, the same code."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["DATA", "ROOT", "Where", "described", "is_out_of_memory"]

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TORCH_COLLATE_KIT_DATA", ROOT.parent / "shared" / "data"))
_NEEDED = ("torch", "transformers", "accelerate", "numpy")
_KERNELS = ("causal_conv1d", "flash-linear-attention", "mamba_ssm")
_USED_IF_THERE = ("pytest", "trl", "flash_attn", "liger_kernel", "triton", *_KERNELS)


@dataclass(frozen=True)
class Where:
    """A device, and whether sizes are tiny. Tiny runs say nothing about speed."""

    device: torch.device
    is_tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def low(self) -> torch.dtype:
        """What attention computes in; the CPU has no kernel of its own, and takes float32."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def exact(self) -> torch.dtype:
        """What results of ``low`` are compared with."""
        return torch.float32 if self.is_cuda else torch.float64

    @property
    def backend(self) -> str:
        """Of torch.compile: on the CPU one that needs no C++ compiler."""
        return "inductor" if self.is_cuda else "aot_eager"

    def autocast(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.autocast(self.device.type, dtype)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes of tensors at most since ``reset_peak``; 0 on the CPU."""
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Also where the driver, Triton or a library of CUDA has found none left."""
    message = str(error)
    is_said = "CUDA error: out of memory" in message or "[CUDA]: out of memory" in message
    return isinstance(error, torch.OutOfMemoryError) or is_said or "ALLOC_FAILED" in message


def described(where: Where) -> dict[str, Any]:
    """The machine and its versions, as they stand below the tables."""
    found = {"python": platform.python_version()}
    for name in (*_NEEDED, *_USED_IF_THERE):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if not where.is_cuda:
        return {"device": "CPU", "versions": found}
    properties = torch.cuda.get_device_properties(0)
    found["cuda"] = str(torch.version.cuda)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return {"device": properties.name, "memory": memory, "versions": found}
