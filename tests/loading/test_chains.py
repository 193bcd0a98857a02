"""Some of the random chains of ``python -m tests.loading.chains``, all without a mismatch."""

from __future__ import annotations

import pytest

from tests.loading import chains
from tests.loading.chain_runs import BY_ROWS, KINDS
from torch_collate_kit.loading.orders.order import KeyedOrder


def test_chains_of_runs_serve_what_an_unbroken_run_serves() -> None:
    total, told = chains.run(28, 7)
    assert not told
    for kind in (*KINDS, "stream"):
        assert total[f"{kind}: chains"] == 4
        assert total[f"{kind}: steps"] > 10
    for kind in ("rows", *BY_ROWS):
        assert total[f"{kind}: rows"] > 50
    assert total["full rows: epochs"] > 0


def test_a_chain_with_workers() -> None:
    total, told = chains.run(7, 3, num_with_workers=4)
    assert not told
    assert sum(count for name, count in total.items() if name.endswith(": steps")) > 10


def test_chains_see_a_keyed_order_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    take = KeyedOrder.take
    monkeypatch.setattr(chains, "KINDS", KINDS[2:4])  # of others, such an order may never end
    monkeypatch.setattr(KeyedOrder, "take", lambda self, a, b: take(self, a and a - 1, b - 1))
    assert chains.run(8, 7)[1]
