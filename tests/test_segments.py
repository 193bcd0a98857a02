"""Segments by hand, in NumPy and in torch, and every way around and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit.segments import (
    cu_seqlens_from_lengths,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    position_ids_from_lengths,
    segment_ids_from_lengths,
)

Make = Callable[..., Any]
ALL = (
    cu_seqlens_from_lengths,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    position_ids_from_lengths,
    segment_ids_from_lengths,
)


def numpy_array(values: list[int], dtype: str = "int64") -> np.ndarray:
    return np.array(values, dtype=dtype)


def torch_tensor(values: list[int], dtype: str = "int64") -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


@pytest.fixture(params=[numpy_array, torch_tensor])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def check(result: Any, expected: list[int], like: Any, dtype: str = "int64") -> None:
    assert type(result) is type(like)
    assert str(result.dtype).removeprefix("torch.") == dtype
    assert result.ndim == 1
    assert result.tolist() == expected


# lengths, boundaries, positions, segment ids
BY_HAND = [
    ([3, 2], [0, 3, 5], [0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
    ([4], [0, 4], [0, 1, 2, 3], [0, 0, 0, 0]),
    ([1, 1, 1], [0, 1, 2, 3], [0, 0, 0], [0, 1, 2]),
    ([2, 0, 1], [0, 2, 2, 3], [0, 1, 0], [0, 0, 2]),
    ([0, 2], [0, 0, 2], [0, 1], [1, 1]),
    ([2, 0], [0, 2, 2], [0, 1], [0, 0]),
    ([0], [0, 0], [], []),
    ([], [0], [], []),
]


@pytest.mark.parametrize(("lengths", "cu_seqlens", "positions", "segments"), BY_HAND)
def test_by_hand(
    make: Make,
    lengths: list[int],
    cu_seqlens: list[int],
    positions: list[int],
    segments: list[int],
) -> None:
    given_lengths = make(lengths)
    check(cu_seqlens_from_lengths(given_lengths), cu_seqlens, given_lengths, "int32")
    check(position_ids_from_lengths(given_lengths), positions, given_lengths)
    check(segment_ids_from_lengths(given_lengths), segments, given_lengths)
    check(lengths_from_cu_seqlens(make(cu_seqlens, "int32")), lengths, given_lengths)
    seen = [n for n in lengths if n]  # a segment without tokens leaves no trace in positions
    check(lengths_from_position_ids(make(positions)), seen, given_lengths)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([5, 6, 7, 0, 1], [3, 2]),  # the row starts in the middle of a document
        ([0, 1, 5, 6], [2, 2]),  # a jump forward is a start as well
        ([2, 1, 0], [1, 1, 1]),
        ([3, 3], [1, 1]),
        ([0, 1, 2, 3], [4]),  # two documents that count on are one, here and in transformers
        ([7], [1]),
    ],
)
def test_a_segment_starts_where_a_position_does_not_follow(
    make: Make, positions: list[int], lengths: list[int]
) -> None:
    given_positions = make(positions)
    check(lengths_from_position_ids(given_positions), lengths, given_positions)


def test_boundaries_need_not_start_at_zero(make: Make) -> None:
    check(lengths_from_cu_seqlens(make([4, 7, 9], "int32")), [3, 2], make([]))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_every_integer_dtype_gives_the_same_dtypes(make: Make, dtype: str) -> None:
    lengths = make([2, 1], dtype)
    check(cu_seqlens_from_lengths(lengths), [0, 2, 3], lengths, "int32")
    check(position_ids_from_lengths(lengths), [0, 1, 0], lengths)
    check(segment_ids_from_lengths(lengths), [0, 0, 1], lengths)
    check(lengths_from_cu_seqlens(make([0, 2, 3], dtype)), [2, 1], lengths)
    check(lengths_from_position_ids(make([0, 1, 0], dtype)), [2, 1], lengths)


def test_sums_beyond_the_dtype_of_the_lengths_are_right(make: Make) -> None:
    lengths = make([200, 100], "uint8")  # 300 does not fit 8 bits
    assert cu_seqlens_from_lengths(lengths).tolist() == [0, 200, 300]
    assert position_ids_from_lengths(lengths).tolist() == [*range(200), *range(100)]


def test_strided_input_works(make: Make) -> None:
    lengths = make([3, 9, 2, 9])[::2]
    assert cu_seqlens_from_lengths(lengths).tolist() == [0, 3, 5]
    assert position_ids_from_lengths(lengths).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("function", ALL)
def test_the_argument_is_neither_changed_nor_returned(make: Make, function: Make) -> None:
    argument = make([0, 2, 3])
    result = function(argument)
    result[:] = 99
    assert argument.tolist() == [0, 2, 3]


lengths_lists = st.lists(st.integers(0, 40), max_size=12)


@given(lengths_lists)
def test_round_trips(lengths: list[int]) -> None:
    for make in (numpy_array, torch_tensor):
        given_lengths = make(lengths)
        boundaries = cu_seqlens_from_lengths(given_lengths)
        assert lengths_from_cu_seqlens(boundaries).tolist() == lengths
        positions = position_ids_from_lengths(given_lengths)
        assert lengths_from_position_ids(positions).tolist() == [n for n in lengths if n]
        segments = segment_ids_from_lengths(given_lengths)
        assert np.bincount(np.asarray(segments), minlength=len(lengths)).tolist() == lengths
        starts = np.asarray(boundaries)[np.asarray(segments)]
        assert (starts + np.asarray(positions)).tolist() == list(range(sum(lengths)))


@given(lengths_lists)
def test_numpy_and_torch_agree_with_a_loop(lengths: list[int]) -> None:
    positions, segments, boundaries = [], [], [0]
    for segment, length in enumerate(lengths):
        for position in range(length):
            positions.append(position)
            segments.append(segment)
        boundaries.append(boundaries[-1] + length)
    for make in (numpy_array, torch_tensor):
        given_lengths = make(lengths)
        assert position_ids_from_lengths(given_lengths).tolist() == positions
        assert segment_ids_from_lengths(given_lengths).tolist() == segments
        assert cu_seqlens_from_lengths(given_lengths).tolist() == boundaries


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_boundaries_that_int32_does_not_hold_are_refused(make: Make, dtype: str) -> None:
    most = 2**31 - 1
    assert cu_seqlens_from_lengths(make([most - 5, 5], dtype)).tolist() == [0, most - 5, most]
    with pytest.raises(ValueError, match=r"2147483648 tokens are more than int32 .* batch\.chunk"):
        cu_seqlens_from_lengths(make([most - 5, 6], dtype))
