"""The copy of batches to a device, which overlaps compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_collate_kit.ragged import Ragged


class Sent(NamedTuple):
    """A batch on its way to the device."""

    batch: Any
    copied: torch.cuda.Event | None  # on the CUDA stream


class DeviceCopy:
    """A copier of batches, from the thread that builds them to the one that trains."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            if device.index is None:  # the current device is a thread's own
                device = torch.device("cuda", torch.cuda.current_device())
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.device = device

    def send(self, batch: Any) -> Sent:
        """Begin to copy a batch; on CUDA from pinned memory on a separate stream, no wait."""
        if self._stream is None:
            return Sent(_mapped(batch, lambda part: part.to(self.device)), None)
        pinned = _mapped(batch, _pin)
        with torch.cuda.stream(self._stream):
            moved = _mapped(pinned, lambda part: part.to(self.device, non_blocking=True))
            return Sent(moved, self._stream.record_event())

    def receive(self, sent: Sent) -> Any:
        """Return the copy of a batch. On CUDA the current stream waits for it, not the caller."""
        if sent.copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(sent.copied)

            def record(part: Any) -> Any:
                # allocated on the other stream, which must not reuse it before this one is done
                (part.values if isinstance(part, Ragged) else part).record_stream(stream)
                return part

            _mapped(sent.batch, record)
        return sent.batch


def device_copy(device: torch.device | str | int | None) -> DeviceCopy | None:
    """Return the copier to a device; None where there is nothing to copy: no device, or the CPU."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        if found.type == "cpu":
            return None
        torch.empty(0, device=found)
        return DeviceCopy(found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # of torch's backends
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device={device!r} cannot be used here: {reason}; leave device out, or name one that "
            "this machine and this build of torch have"
        ) from error


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change every tensor and every object with ``.to()`` in a structure."""
    if hasattr(value, "to"):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _pin(part: Any) -> Any:
    """Pin a part in host memory. TypeError if the memory of its copy could not be recorded."""
    if not isinstance(part, Tensor | Ragged) and not hasattr(part, "record_stream"):
        name = type(part).__name__
        raise TypeError(
            f"the batch holds a {name}, which has .to() but is no tensor, mapping, list or tuple: "
            "which memory its copy on the CUDA device takes cannot be seen; collate into one of "
            f"these, or give {name} a record_stream(stream) that calls it on each of its tensors"
        )
    on_host = not isinstance(part, Tensor) or part.device.type == "cpu"
    return part.pin_memory() if on_host and hasattr(part, "pin_memory") else part
