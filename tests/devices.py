"""What makes the host wait for a device, refused: on CUDA by torch, on the meta device here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "item", "is_nonzero")
COPIES = ("_to_copy", "copy_")


class NoWaiting(TorchDispatchMode):
    """Refuses what must know values of a device, copies to the host, and those that block."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func._schema.name.removeprefix("aten::"), kwargs or {}
        assert not any(name.startswith(odd) for odd in WAITING), name
        if name.startswith("index"):  # a mask must be counted
            masks = [a for of in args if isinstance(of, list | tuple) for a in of if a is not None]
            assert all(mask.dtype not in (torch.bool, torch.uint8) for mask in masks), name
        result = func(*args, **options)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if any(t.is_meta for t in tensors) and isinstance(result, Tensor):
            assert result.is_meta, f"{name} brings values to the host"
        if name in COPIES and result.is_meta and tensors[-1].device.type == "cpu":
            waits = not (options.get("non_blocking") or (name == "copy_" and True in args[2:]))
            assert not waits, f"{name} waits until a tensor is on the device"
        self.seen += 1
        return result


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Fail where the host waits for the device; something must run on it."""
    if device == "meta":
        with NoWaiting() as mode:
            yield
        assert mode.seen > 0
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
