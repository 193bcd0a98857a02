"""Ragged against a list of lists."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit.ragged import Ragged

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def of_numpy(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, dtype=np.int64)


def of_torch(rows: list[list[int]]) -> Ragged:
    return of_numpy(rows).to("cpu")


def in_the_middle(rows: list[list[int]]) -> Ragged:
    """The same rows, but values lie before and behind them in memory."""
    return of_numpy([[77, 88], *rows, [99]])[1:-1]


def in_the_middle_of_torch(rows: list[list[int]]) -> Ragged:
    return of_torch([[77, 88], *rows, [99]])[1:-1]


MAKERS = [of_numpy, of_torch, in_the_middle, in_the_middle_of_torch]


@pytest.fixture(params=MAKERS)
def ragged(request: pytest.FixtureRequest) -> Ragged:
    return request.param(ROWS)


# --- what it holds -------------------------------------------------------------------------------


def test_rows_by_any_index(ragged: Ragged) -> None:
    assert [ragged[i - 4].tolist() for i in range(4)] == ROWS
    assert ragged[np.int64(2)].tolist() == [4]
    assert repr(ragged).startswith("Ragged(4 rows, 6 values, ")


@pytest.mark.parametrize(
    "offsets", [[0, 1, 3], np.array([0, 1, 3], dtype=np.int32), torch.tensor([0, 1, 3]), (0, 1, 3)]
)
def test_offsets_are_always_numpy_int64(offsets: Any) -> None:
    for values in (np.arange(3), torch.arange(3)):
        ragged = Ragged(values, offsets)
        assert ragged.values is values
        assert isinstance(ragged.offsets, np.ndarray)
        assert ragged.offsets.dtype == np.int64
        assert ragged.to("cpu").offsets.dtype == np.int64


# --- views and copies ----------------------------------------------------------------------------


def test_rows_and_slices_are_views() -> None:
    ragged = of_numpy(ROWS)
    ragged[0][1] = 20
    ragged[2:][1][0] = 50
    assert ragged.tolist() == [[1, 20, 3], [], [4], [50, 6]]
    tensors = of_torch(ROWS)
    tensors[1:3][1][0] = 40
    assert tensors.tolist() == [[1, 2, 3], [], [40], [5, 6]]


def test_take_cat_and_from_rows_copy(ragged: Ragged) -> None:
    for copied in (ragged.take([0, 1, 2, 3]), Ragged.cat([ragged])):
        assert copied.offsets.tolist() == [0, 3, 3, 4, 6]
        copied.values[:] = 0
    assert ragged.tolist() == ROWS
    row = np.array([1, 2])
    Ragged.from_rows([row]).values[:] = 0
    assert row.tolist() == [1, 2]


@pytest.mark.parametrize("index", [slice(None), slice(1, 3)])
def test_to_a_device_moves_the_values_and_leaves_the_shape(ragged: Ragged, index: slice) -> None:
    moved = ragged[index].to("meta", non_blocking=True)
    assert moved.values.device.type == "meta"
    assert moved.lengths.tolist() == ragged[index].lengths.tolist()  # no device is asked
    assert isinstance(ragged.to("cpu").values, torch.Tensor)
    assert ragged[index].to("cpu").tolist() == ROWS[index]


# --- from_rows -----------------------------------------------------------------------------------


def test_from_rows_takes_rows_of_every_kind_and_keeps_or_sets_the_dtype() -> None:
    for make in (list, tuple, np.array, torch.tensor):
        for rows in ([make([1, 2]), make([3])], [[1, 2], make([3])], iter([make([1, 2]), [3]])):
            ragged = Ragged.from_rows(rows)
            assert isinstance(ragged.values, np.ndarray)
            assert ragged.values.dtype == np.int64
            assert ragged.tolist() == [[1, 2], [3]]
    half = [np.array([0.5], dtype=np.float16)]
    assert Ragged.from_rows(half).values.dtype == np.float16
    assert Ragged.from_rows(half, dtype=np.float32).values.dtype == np.float32
    assert Ragged.from_rows([[], [0.5], []]).tolist() == [[], [0.5], []]
    for empty in ([[], [3]], [[], []]):  # NumPy calls an empty list float64
        assert Ragged.from_rows(empty).values.dtype == np.int64
    assert Ragged.from_rows([[]], dtype=np.float32).values.dtype == np.float32


# --- equality and pickling -----------------------------------------------------------------------


def test_equal_ignores_the_dtype_but_not_the_type() -> None:
    assert of_numpy(ROWS) == Ragged.from_rows(ROWS, dtype=np.float32)
    assert of_numpy(ROWS) == Ragged.from_rows(ROWS, dtype=np.int32).to("cpu")
    assert of_numpy(ROWS) != ROWS
    with pytest.raises(TypeError, match="unhashable"):
        hash(of_numpy(ROWS))


@pytest.mark.parametrize("make", [of_numpy, of_torch])
def test_the_pickle_of_a_slice_holds_its_rows_alone(make: Any) -> None:
    ragged = make([[i] * 100 for i in range(100)])
    sliced = ragged[40:42]
    assert len(pickle.dumps(sliced)) < 4000  # 200 int64 are 1600 bytes, all are 80,000
    assert pickle.loads(pickle.dumps(sliced)).tolist() == sliced.tolist()


# --- errors --------------------------------------------------------------------------------------

FORM = r"offsets must be one-dimensional.*for one row pass"
WITHIN = r"must not decrease and must lie within 0\.\.2 .*got \["
REFUSED: list[tuple[Any, type[Exception], str]] = [
    *[(lambda of=of: Ragged(np.arange(2), of), ValueError, FORM)
      for of in ([], np.zeros((1, 2), dtype=np.int64), [0.0, 2.0], [[0, 2]])],
    *[(lambda of=of: Ragged(np.arange(2), of), ValueError, WITHIN)
      for of in ([0, 3], [-1, 2], [0, 2, 1], [2, 0], [0, 9, 2])],
    *[(lambda at=at, of=of: of(ROWS)[at], IndexError, f"row {at} of a Ragged with 4 rows")
      for at in (4, -5) for of in MAKERS],
    *[(lambda at=at: of_numpy(ROWS).take([at]), IndexError, "out of bounds") for at in (4, -5)],
    (lambda: of_numpy(ROWS).take(np.array([False, True, True, False])), TypeError, "integers"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_has_no_rows_is_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# --- any sequence of operations ------------------------------------------------------------------

row_lists = st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=6)


@given(rows=row_lists, make=st.sampled_from(MAKERS), data=st.data())
def test_operations_do_what_they_do_to_a_list(rows: list[Any], make: Any, data: Any) -> None:
    ragged = make(rows)
    for _ in range(data.draw(st.integers(1, 4))):
        bounds = st.none() | st.integers(-7, 7)
        operation = data.draw(st.sampled_from(["slice", "take", "cat", "to", "pickle"]))
        if operation == "slice":
            step = data.draw(st.sampled_from([None, 1, 2, -1]))
            index = slice(data.draw(bounds), data.draw(bounds), step)
            ragged, rows = ragged[index], rows[index]
        elif operation == "take" and rows:
            picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
            ragged, rows = ragged.take(picked), [rows[i] for i in picked]
        elif operation == "cat":
            ragged, rows = Ragged.cat([ragged, ragged[:1]]), rows + rows[:1]
        elif operation == "to":
            ragged = ragged.to("cpu")
        elif operation == "pickle":
            ragged = pickle.loads(pickle.dumps(ragged))
        assert ragged.tolist() == rows
        assert ragged.lengths.tolist() == [len(row) for row in rows]
        assert [row.tolist() for row in ragged] == rows


# --- spans of one array --------------------------------------------------------------------------

SPAN_VALUES = {
    "int32": np.arange(900, dtype=np.int32),
    "bool": np.arange(900) % 3 > 0,
    "float16": np.arange(900, dtype=np.float16),
    "big-endian": np.arange(900, dtype=">i8"),
    "read-only": np.frombuffer(bytes(900), dtype=np.uint8),
    "strided": np.arange(1800)[::2],
    "2-D": np.arange(1800).reshape(900, 2),
    "objects": np.array([str(i) for i in range(900)], dtype=object),
    "dates": np.arange(900).astype("datetime64[s]"),
}


@pytest.mark.parametrize("longest", [5, 400])
@pytest.mark.parametrize("name", SPAN_VALUES)
def test_spans_of_any_values(name: str, longest: int) -> None:
    """Short ones are gathered by an index, long ones are copied one by one."""
    values = SPAN_VALUES[name]
    ragged = Ragged.from_lengths(values[: 2 * longest + 1], [1, longest - 1, 0, longest, 1])
    rows = [3, 2, 1, 3]
    taken = ragged.take(rows).values
    assert taken.dtype == values.dtype
    assert np.array_equal(taken, np.concatenate([ragged[row] for row in rows]))
    assert not np.may_share_memory(taken, values)
    assert taken.flags.writeable
