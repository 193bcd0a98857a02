"""PackingOptions and ParallelLayout: one object behind pack, collator, sampler and stream."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest

from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.packing import PackingOptions, ParallelLayout, pack
from torch_collate_kit.testing import batch_digest

LENGTHS = [5, 30, 9, 2, 14, 8, 8, 1, 22, 3]
EXAMPLES = [{"input_ids": list(range(1, n + 1))} for n in LENGTHS]
KEYWORDS: dict[str, Any] = {
    "max_tokens": 23,
    "strategy": "balanced",
    "parallel": ParallelLayout(dp=2, tp=4),
    "overflow": "split",
    "max_sequences_per_row": 3,
    "balance": "tokens",
}
PACKING = PackingOptions(**KEYWORDS)


def digests(make: Any, **keywords: Any) -> list[str]:
    return [batch_digest(batch) for batch in make(**keywords)]


def collated(**keywords: Any) -> list[Any]:
    return [PackedCollator(0, **keywords)(EXAMPLES)]


def planned(**keywords: Any) -> list[Any]:
    return [pack(LENGTHS, **keywords)]


@pytest.mark.parametrize("make", [collated, planned])
def test_one_object_is_the_same_as_its_keywords(make: Any) -> None:
    expected = digests(make, **KEYWORDS)
    assert digests(make, packing=PACKING) == expected
    for name, other in [
        ("max_tokens", 27),
        ("overflow", "truncate"),
        ("parallel", ParallelLayout(dp=2)),
    ]:
        assert digests(make, **KEYWORDS | {name: other}) != expected


@pytest.mark.parametrize("make", [collated, planned])
def test_the_packing_is_said_once(make: Any) -> None:
    message = (
        "packing= and max_tokens, strategy both say how to pack; pass one of them, such as "
        "packing=dataclasses.replace(packing, ...)"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        make(packing=PACKING, max_tokens=23, strategy="balanced")
    message = "max_tokens must be an int, got None of type NoneType; pass max_tokens=4096, or"
    with pytest.raises(TypeError, match=f"^{message}"):
        make(strategy="balanced")
    with pytest.raises(TypeError, match=r"^packing must be a PackingOptions, got 23$"):
        make(packing=23)
    with pytest.raises(TypeError, match="strategi"):
        make(max_tokens=23, strategi="balanced")


@pytest.mark.parametrize("given", [{"packing": PACKING}, {"max_tokens": 8, "parallel": 0}])
def test_align_beside_a_layout_is_refused(given: dict[str, Any]) -> None:
    message = "align is that of the parallel layout; pass either it or pa"
    with pytest.raises(TypeError, match=f"^{message}"):
        pack(LENGTHS, align=4, **given)


def test_pack_of_a_layout_is_that_of_its_align_and_dp() -> None:
    of_numbers = pack(LENGTHS, 32, align=4, rows_multiple_of=2)
    of_layout = pack(LENGTHS, 32, parallel=ParallelLayout(dp=2, tp=4))
    assert batch_digest(of_numbers) == batch_digest(of_layout)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"strategy": "best"}, ValueError, "strategy must be one of 'best_fit_decreasing', 'first"),
        ({"balance": "cost"}, ValueError, "balance must be one of 'attention', 'tokens', None"),
        ({"overflow": None}, ValueError, "overflow must be one of 'raise', 'truncate', 'drop'"),
        ({"max_tokens": 3}, ValueError, "max_tokens must be at least align=4, got 3: not one al"),
        ({"max_tokens": 8.0}, TypeError, "max_tokens must be an int, got 8.0 of type float"),
        ({"max_sequences_per_row": 0}, ValueError, "max_sequences_per_row must be at least 1"),
        ({"parallel": 2}, TypeError, "parallel must be a ParallelLayout, got 2; ParallelLayout("),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        PackingOptions(**KEYWORDS | keywords)


def test_options_are_values() -> None:
    assert PACKING == PackingOptions(**KEYWORDS) == pickle.loads(pickle.dumps(PACKING))
    assert {PACKING: 1}[PackingOptions(**KEYWORDS)] == 1
    assert PACKING.capacity == 20


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("max_token", "there is no option 'max_token'; did you mean max_tokens?"),
        ("stratgy", "there is no option 'stratgy'; did you mean strategy?"),
        ("xyz", "there is no option 'xyz'; there are max_tokens, strategy, parallel"),
    ],
)
def test_an_option_that_does_not_exist_is_named(keyword: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        pack([1, 2], 4, **{keyword: 3})


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


def test_a_layout_is_immutable_hashable_and_holds_python_ints() -> None:
    layout = ParallelLayout(dp=np.int32(4), tp=2)  # type: ignore[arg-type]
    assert layout == ParallelLayout(dp=4, tp=2)
    assert hash(layout) == hash(ParallelLayout(dp=4, tp=2))
    assert type(layout.dp) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["dp", "tp", "cp", "pp"])
def test_a_layout_refuses_sizes_below_one_and_non_ints(name: str) -> None:
    off = "; 1 means this kind of parallelism is off$"
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0{off}"):
        ParallelLayout(**{name: 0})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got 2.0 of type float{off}"):
        ParallelLayout(**{name: 2.0})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got True of type bool{off}"):
        ParallelLayout(**{name: True})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got None of type NoneType"):
        ParallelLayout(**{name: None})


def test_a_layout_refuses_an_fp8_that_is_not_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^fp8 must be True or False, got 1$"):
        ParallelLayout(fp8=1)  # type: ignore[arg-type]
