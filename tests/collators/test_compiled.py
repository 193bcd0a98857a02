"""compiled=True: the same bytes as NumPy. (The fuzz tests of both collators draw it as well.)"""

from __future__ import annotations

import importlib.util
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import FORMS, FUZZ, batches, packed_options, padded_options
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout, pack
from torch_collate_kit.ragged import Ragged

numba = pytest.importorskip("numba", reason="the extra 'fast' is not installed")


def both(cls, *args, **options):
    return [cls(*args, **{**options, "compiled": compiled}) for compiled in (False, True)]


@pytest.mark.parametrize("form", FORMS)
@FUZZ
@given(data=st.data())
def test_equal_to_numpy(form: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(form))
    padded = both(PaddedCollator, 3, **data.draw(padded_options(drawn.lengths)))
    options = data.draw(packed_options(drawn.lengths))
    layout = ParallelLayout(**options.layout)
    packed = both(PackedCollator, 3, parallel=layout, **options.collator)
    for plain, compiled in (padded, packed):
        assert plain(drawn.given) == compiled(drawn.given)


@FUZZ
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=200),
    st.integers(60, 300),
    st.sampled_from((None, 1, 2, 5)),
    st.sampled_from((1, 4)),
    st.sampled_from((1, 3)),
)
def test_plans_are_equal(lengths, max_tokens, limit, align, ranks):
    options = {"align": align, "rows_multiple_of": ranks, "max_sequences_per_row": limit}
    plain, compiled = (pack(lengths, max_tokens, compiled=c, **options) for c in (False, True))
    assert plain.bins == compiled.bins


@pytest.mark.parametrize("limit", [None, 7])
def test_large_plans_are_equal(limit):
    lengths = np.minimum(np.random.default_rng(5).geometric(0.004, size=50_000), 4096)
    options = {"max_sequences_per_row": limit}
    plain, compiled = (pack(lengths, 4096, compiled=c, **options) for c in (False, True))
    assert np.array_equal(plain.example_indices, compiled.example_indices)
    assert np.array_equal(plain.row_offsets, compiled.row_offsets)


def test_a_capacity_too_large_for_the_loop_is_planned_without_it():
    lengths = [5_000_000, 3, 2_000_000, 7]
    plain, compiled = (pack(lengths, 6_000_000, compiled=c) for c in (False, True))
    assert plain.bins == compiled.bins


def test_plans_go_through_the_loop_where_its_table_is_small(monkeypatch):
    compiled_planning = importlib.import_module("torch_collate_kit.packing._compiled")
    loop, capacities = compiled_planning.best_fit_rows, []

    def counted(distinct, counts, capacity, max_pieces):
        capacities.append(capacity)
        return loop(distinct, counts, capacity, max_pieces)

    monkeypatch.setattr(compiled_planning, "best_fit_rows", counted)
    for max_tokens, limit in [(131_072, None), (4096, 500), (6_000_000, None), (131_072, 50)]:
        pack([max_tokens, 2, 7], max_tokens, max_sequences_per_row=limit, compiled=True)
    assert capacities == [131_072, 4096]


@pytest.mark.parametrize("cls", [PaddedCollator, PackedCollator])
@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": [1, -2], "loss_mask": [1, 1]},
        {"input_ids": [-1, 2], "loss_mask": [1, 1]},
        {"input_ids": [1, 2], "loss_mask": [0.0, -1.0]},
        {"input_ids": [1, 2], "loss_mask": [0.0, float("nan")]},
        {"input_ids": [1, 2], "loss_mask": [float("inf"), 0.0]},
    ],
)
def test_bad_input_has_the_same_message(cls, wrong):
    options = {"max_tokens": 8} if cls is PackedCollator else {}
    good = {"input_ids": [3, 4, 5], "loss_mask": [0.0, 1.0, 1.0]}
    messages = []
    for collate in both(cls, 0, **options):
        with pytest.raises(DataError, match="example 1: ") as caught:
            collate([good, wrong])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_all_that_is_done_for_a_token_is_done_without_the_gil(monkeypatch):
    """One call a loop and batch, however many examples, and the loops release the GIL."""
    lengths = np.full(3000, 20)
    columns = {"input_ids": Ragged.from_lengths(np.ones(lengths.sum(), dtype=np.int64), lengths)}
    collate = PackedCollator(0, max_tokens=40, compiled=True)
    expected = collate(columns)
    filling = importlib.import_module("torch_collate_kit.collators._compiled")
    planning = importlib.import_module("torch_collate_kit.packing._compiled")
    calls = []
    for module, names in (
        (filling, ("_find_loss", "_fill_tokens", "_fill_positions")),
        (planning, ("_best_fit",)),
    ):
        for name in names:
            loop = getattr(module, name)
            assert loop.targetoptions["nogil"] is True, name

            def counted(*args, loop=loop, name=name):
                calls.append(name)
                return loop(*args)

            monkeypatch.setattr(module, name, counted)
    assert collate(columns) == expected
    assert sorted(calls) == ["_best_fit", "_fill_positions", "_fill_tokens", "_find_loss"]


def test_it_goes_into_a_worker_by_pickle():
    collate = pickle.loads(pickle.dumps(PackedCollator(0, max_tokens=8, compiled=True)))
    assert collate.compiled
    assert collate([{"input_ids": [5, 6]}])["input_ids"].tolist() == [[5, 6]]


@pytest.mark.parametrize("cls", [PaddedCollator, PackedCollator])
def test_without_numba(cls, monkeypatch):
    options = {"max_tokens": 8} if cls is PackedCollator else {}
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"needs numba: pip install 'torch_collate_kit\[fast"):
            cls(0, compiled=True, **options)
        with pytest.raises(ImportError, match="compiled=True needs numba: pip install"):
            pack([3, 2], 8, compiled=True)
    with pytest.raises(TypeError, match="compiled must be True or False, got 1"):
        cls(0, compiled=1, **options)
