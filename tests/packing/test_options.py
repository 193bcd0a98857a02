"""PackingOptions and ParallelLayout: one object behind pack, collator, sampler and stream."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest

from torch_collate_kit.packing import PackingOptions, ParallelLayout, pack
from torch_collate_kit.testing import batch_digest

LENGTHS = [5, 30, 9, 2, 14, 8, 8, 1, 22, 3]
COMMON: dict[str, Any] = {
    "max_tokens": 23,
    "strategy": "balanced",
    "parallel": ParallelLayout(dp=2, tp=4),
    "overflow": "split",
    "max_patches": 30,
}
KEYWORDS = {**COMMON, "max_sequences_per_row": 3, "balance": "tokens"}
PACKING = PackingOptions(**KEYWORDS)


def test_the_common_options_of_pack_are_those_of_the_object() -> None:
    expected = batch_digest(pack(LENGTHS, packing=PackingOptions(**COMMON)))
    assert batch_digest(pack(LENGTHS, **COMMON)) == expected
    changes = {"max_tokens": 27, "strategy": "sequential", "overflow": "truncate"}
    for name, other in {**changes, "parallel": ParallelLayout(dp=2), "max_patches": 3}.items():
        assert batch_digest(pack(LENGTHS, **COMMON | {name: other})) != expected
    assert batch_digest(pack(LENGTHS, 30)) == batch_digest(
        pack(LENGTHS, packing=PackingOptions(30))
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        *(
            ({"packing": PACKING, name: value}, f"packing= and {name} both say how to pack; pass")
            for name, value in COMMON.items()
        ),
        ({"packing": PACKING} | COMMON, "packing= and max_tokens, strategy, overflow, parallel, "),
        ({"strategy": "balanced"}, "max_tokens must be an int, got None of type NoneType; pass"),
        ({"packing": 23}, "packing must be a PackingOptions, got 23"),
        ({"max_tokens": 23, "strategi": "balanced"}, "pack() got an unexpected keyword argument"),
    ],
)
def test_how_to_pack_is_said_once(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        pack(LENGTHS, **keywords)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"strategy": "best"}, ValueError, "strategy must be one of 'best_fit_decreasing', 'first_fit"),
    ({"strategy": ["balanced"]}, ValueError, "strategy must be one of 'best_fit_decreasing', 'fir"),
    ({"balance": "cost"}, ValueError, "balance must be one of 'attention', 'tokens', None; got 'c"),
    ({"overflow": None}, ValueError, "overflow must be one of 'raise', 'truncate', 'drop', "),
    ({"max_tokens": 3}, ValueError, "max_tokens must be at least align=4, got 3: not one aligned"),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 8.0}, TypeError, "max_tokens must be an int, got 8.0 of type float"),
    ({"max_tokens": True}, TypeError, "max_tokens must be an int, got True of type bool"),
    ({"max_sequences_per_row": 0}, ValueError, "max_sequences_per_row must be at least 1, got 0"),
    ({"rows_multiple_of": 0}, ValueError, "rows_multiple_of must be at least 1, got 0; None"),
    ({"rows_multiple_of": 3}, ValueError, "rows_multiple_of must be a multiple or a divisor of dp"),
    ({"max_patches": 0}, ValueError, "max_patches must be at least 1, got 0; None means no limit"),
    ({"parallel": 2}, TypeError, "parallel must be a ParallelLayout, got 2; ParallelLayout(dp=2)"),
    ({"cost": 3}, TypeError, "cost must be a ModelCost, got 3; ModelCost.of(model.config)"),
    ({"dummy_image_tokens": -1}, ValueError, "dummy_image_tokens must be at least 0, got -1"),
    ({"dummy_image_tokens": None}, TypeError, "dummy_image_tokens must be an int, got None"),
    ({"dummy_image_tokens": 17}, ValueError, "dummy_image_tokens=17 leaves no room for text in a"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "message"), WRONG)
def test_wrong_options_are_refused_when_they_are_made(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        PackingOptions(**KEYWORDS | keywords)


def test_options_are_values() -> None:
    assert PACKING == PackingOptions(**KEYWORDS) == pickle.loads(pickle.dumps(PACKING))
    assert {PACKING: 1}[PackingOptions(**KEYWORDS)] == 1
    assert PACKING.capacity == 20


def test_align_is_what_the_parallel_ranks_need() -> None:
    layouts = {(1, 1): 1, (4, 1): 4, (1, 2): 4, (4, 2): 16}
    for (tp, cp), align in layouts.items():
        assert ParallelLayout(dp=3, tp=tp, cp=cp).align == align
        assert ParallelLayout(dp=3, tp=tp, cp=cp).row_align == align


def test_a_layout_is_immutable_hashable_and_holds_python_ints() -> None:
    layout = ParallelLayout(dp=np.int32(4), tp=2)  # type: ignore[arg-type]
    assert layout == ParallelLayout(dp=4, tp=2)
    assert hash(layout) == hash(ParallelLayout(dp=4, tp=2))
    assert type(layout.dp) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["dp", "tp", "cp"])
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
