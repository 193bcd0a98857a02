"""Packages of CUDA kernels that look installed in this process; plain torch is behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any
from unittest import mock

from tests.kernels import flash, recurrent

_MODULES: dict[str, dict[str, Any]] = {
    "causal_conv1d": {"causal_conv1d_fn": recurrent.causal_conv1d_fn},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": recurrent.chunk_gated_delta_rule},
    "fla.ops.kda": {"chunk_kda": recurrent.chunk_kda},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": recurrent.mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": recurrent.mamba_split_conv1d_scan_combined,
    },
    "flash_attn": {
        "flash_attn_func": flash.flash_attn_func,
        "flash_attn_varlen_func": flash.flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash.unused,
    },
    "flash_attn.bert_padding": {"pad_input": flash.unused, "unpad_input": flash.unused},
    "flash_attn_interface": {
        "flash_attn_func": flash.interface_func,
        "flash_attn_varlen_func": flash.interface_varlen_func,
        "flash_attn_with_kvcache": flash.unused,
    },
}
_DISTRIBUTIONS = {  # name: version, module
    "causal-conv1d": ("1.7.0", "causal_conv1d"),
    "flash-linear-attention": ("0.6.0", "fla"),
    "mamba-ssm": ("2.3.2", "mamba_ssm"),
    "flash-attn": ("2.8.3", "flash_attn"),
    "flash-attn-3": ("3.0.0", "flash_attn_interface"),
}


class _Distribution(Distribution):
    def __init__(self, name: str, version: str, module: str) -> None:
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self._texts = {"METADATA": head, "top_level.txt": module}

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder(DistributionFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        wanted = getattr(context, "name", None)
        for name, (version, module) in _DISTRIBUTIONS.items():
            if wanted is None or wanted.replace("_", "-") == name:
                yield _Distribution(name, version, module)


def install() -> None:
    """Make the packages importable; before transformers is imported, which binds them then."""
    assert "transformers" not in sys.modules, "call install() before transformers is imported"
    for path, functions in _MODULES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__spec__ = ModuleSpec(name, None, is_package=True)
                module.__path__ = []
                sys.modules[name] = module
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(sys.modules[path]).update(functions)
    sys.meta_path.insert(0, _Finder())


def claim_cuda() -> None:
    """Let transformers find the CUDA device that it demands of FlashAttention, from now on."""
    from transformers.utils import import_utils

    with mock.patch("torch.cuda.is_available", return_value=True):
        import_utils.is_torch_cuda_available.cache_clear()
        checks = [getattr(import_utils, f"is_flash_attn_{version}_available") for version in (2, 3)]
        for check in checks:
            check.cache_clear()
            assert check(), check
