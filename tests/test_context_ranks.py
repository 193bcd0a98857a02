"""Processes that share rows: losses, gradients and training are those of whole rows."""

from __future__ import annotations

import pytest
import torch

from tests.context_ranks import LAYOUTS, compare, refusals, sequence_losses, training
from tests.ranks import on_ranks


@pytest.mark.parametrize(("dp", "cp", "seeds"), [(1, 2, 3), (1, 4, 2), (2, 2, 2)])
def test_losses_and_gradients_are_those_of_whole_rows(dp: int, cp: int, seeds: int) -> None:
    for worst in on_ranks(dp * cp, compare, dp, cp, seeds):
        assert len(worst) == 6
        for (_, dtype), differences in worst.items():
            assert max(differences) < {"float64": 1e-12, "float32": 1e-6}[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_sequences_are_those_of_whole_rows(layout: str) -> None:
    for differences in on_ranks(2, sequence_losses, layout):
        assert max(differences) < 1e-12


def test_shards_that_are_not_of_one_batch_are_refused() -> None:
    of_ranks = on_ranks(2, refusals)
    for rank, said in enumerate(of_ranks):
        assert f"shard of context rank {1 - rank} of 2, and this process is rank {rank}" in said[0]
        assert "of different batches or layouts, with the checksums" in said[-1]
    assert "shard of context rank 0 of 1, and this process is rank 0 of the 2" in of_ranks[0][1]


def test_a_run_goes_on_with_other_context_ranks() -> None:
    whole = on_ranks(1, training, 1, 1, None, 6)[0]
    state = on_ranks(4, training, 1, 4, None, 2)[0]
    state = on_ranks(4, training, 2, 2, state, 2)[2]
    state = on_ranks(2, training, 1, 2, state, 2)[0]
    assert state["loader"] == whole["loader"]
    for name, value in whole["model"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-9, atol=1e-11)
