"""How exact a result is: its error, against the error of the usual way in the same arithmetic.

A limit on an error says little unless it is known what the arithmetic itself loses. So each result
is computed three times: by us, by the usual way (SDPA, one example at a time) in the same dtype,
and by the usual way in a dtype so exact that its own error does not count. Ours may be at most
twice the usual one, or, where that is close to 0, one rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["FACTOR", "compared", "relative_error"]

FACTOR = 2.0
_FEW = 64  # entries: a parameter with fewer is judged together with the others of its size


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact; NaN or infinite where ``found`` is.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    difference = (found.double() - exact.double()).norm()
    return float(difference / exact.double().norm())


def compared(
    name: str,
    ours: Mapping[str, Tensor],
    usual: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """One check over all tensors of a result: the worst of them is what counts.

    >>> exact = {"out": torch.tensor([1.0, 2.0])}
    >>> check = compared("same", exact, exact, exact, torch.bfloat16)
    >>> check["is_ok"], check["error"], check["rounding"]
    (True, 0.0, 0.00390625)
    """
    ours, usual, exact = (_joined(result) for result in (ours, usual, exact))
    rounding = torch.finfo(dtype).eps / 2
    worst: dict[str, Any] = {}
    for tensor, reference in exact.items():
        if not reference.abs().max() > 0:
            raise AssertionError(f"{name}: {tensor} is all zero or NaN, so nothing is compared")
        error = relative_error(ours[tensor], reference)
        others = relative_error(usual[tensor], reference)
        share = error / max(FACTOR * others, rounding)  # of what is allowed; NaN is not allowed
        if not worst or not share <= worst["share"]:
            worst = {"tensor": tensor, "error": error, "usual": others, "share": share}
    return {"name": name, "rounding": rounding, "is_ok": worst["share"] <= 1, **worst}


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a few entries as one: the error of one of them alone is chance."""
    large = {k: v.detach() for k, v in tensors.items() if v.numel() >= _FEW or len(tensors) == 1}
    small = [v.detach().flatten().double() for k, v in tensors.items() if k not in large]
    return large | ({"small ones": torch.cat(small)} if small else {})
