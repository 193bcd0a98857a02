"""Some of the random chains of ``python -m tests.loading.chains``, all without a mismatch."""

from __future__ import annotations

import pytest

from tests.loading import chains
from torch_collate_kit.loading.orders.permutations import KeyedOrder


def test_chains_of_runs_serve_what_an_unbroken_run_serves() -> None:
    total, told = chains.run(40, 7)
    assert not told
    for kind in ("prefetching", "mixed", "packed", "rows", "stream"):
        assert total[f"{kind}: chains"] == 8
        assert total[f"{kind}: steps"] > 20
    assert total["rows: rows"] > 100


def test_a_chain_with_workers() -> None:
    total, told = chains.run(5, 3, num_with_workers=5)
    assert not told
    assert sum(count for name, count in total.items() if name.endswith(": steps")) > 10


def test_chains_see_a_keyed_order_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    take = KeyedOrder.take
    monkeypatch.setattr(KeyedOrder, "take", lambda self, a, b: take(self, a and a - 1, b - 1))
    assert chains.run(10, 7)[1]
