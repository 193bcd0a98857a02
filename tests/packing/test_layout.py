from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from torch_collate_kit.packing import ParallelLayout


@pytest.mark.parametrize(
    ("options", "align"),
    [
        ({}, 1),
        ({"tp": 4}, 4),
        ({"cp": 2}, 4),
        ({"tp": 4, "cp": 2}, 16),
        ({"dp": 8, "pp": 2}, 1),
        ({"fp8": True}, 16),
        ({"tp": 3, "fp8": True}, 48),
        ({"tp": 2, "cp": 2, "fp8": True}, 32),
        ({"tp": 8, "cp": 3, "fp8": True}, 48),
        ({"tp": 5, "cp": 2, "fp8": True}, 160),
    ],
)
def test_align_is_what_the_parallel_ranks_need(options: dict[str, int], align: int) -> None:
    assert ParallelLayout(**options).align == align


def test_a_pipeline_changes_nothing() -> None:
    assert ParallelLayout(pp=4, tp=2).align == ParallelLayout(tp=2).align


def test_is_immutable_hashable_and_holds_python_ints() -> None:
    layout = ParallelLayout(dp=np.int32(4), tp=2)  # type: ignore[arg-type]
    assert layout == ParallelLayout(dp=4, tp=2)
    assert hash(layout) == hash(ParallelLayout(dp=4, tp=2))
    assert type(layout.dp) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["dp", "tp", "cp", "pp"])
def test_refuses_sizes_below_one_and_non_ints(name: str) -> None:
    off = "; 1 means this kind of parallelism is off$"
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0{off}"):
        ParallelLayout(**{name: 0})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got 2.0 of type float{off}"):
        ParallelLayout(**{name: 2.0})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got True of type bool{off}"):
        ParallelLayout(**{name: True})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got None of type NoneType"):
        ParallelLayout(**{name: None})


def test_refuses_an_fp8_that_is_not_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^fp8 must be True or False, got 1$"):
        ParallelLayout(fp8=1)  # type: ignore[arg-type]
