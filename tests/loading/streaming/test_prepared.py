"""A stream under Accelerate: it works, or ends in one message that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
from tests import prepared_stream
from tests.ranks import on_two_ranks

REFUSED = (
    "accelerator.prepare, or Lightning's use_distributed_sampler=True, would divide the batches of "
    "a PackedIterableDataset over the ranks by itself, and cut or lose what belongs together; make "
    "it after Accelerator(), from which it has its rank, and wrap its loader in a PrefetchLoader, "
    "which they leave as it is: PrefetchLoader(DataLoader(dataset, batch_size=None, "
    "collate_fn=dataset.as_is), device=accelerator.device); or pass Lightning "
    "use_distributed_sampler=False; transformers.Trainer resumes neither: give it PackedRows"
)


def check(found: dict[str, Any]) -> None:
    expected = prepared_stream.tokens_of(
        prepared_stream.stream(dp_rank=found["dp_rank"], dp_size=found["dp_size"])
    )
    assert len(expected) > 10
    assert found["None"] == found["True"] == REFUSED
    assert found["False"] == (expected if found["dp_size"] == 1 else REFUSED)
    assert found["PrefetchLoader"] == expected


def test_on_one_rank() -> None:
    check(prepared_stream.all_ways())


def test_on_two_ranks() -> None:
    found = on_two_ranks(prepared_stream.all_ways)
    assert [of["dp_rank"] for of in found] == [0, 1]
    for of in found:
        check(of)


def test_it_has_no_set_epoch_for_anybody_else() -> None:
    dataset = prepared_stream.stream()
    assert not hasattr(dataset, "set_epoch")
    with pytest.raises(AttributeError, match="no set_epoch; its order is the source's: call se"):
        dataset.set_epoch(1)
