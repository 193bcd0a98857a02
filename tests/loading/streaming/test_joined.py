"""strategy="wrapped" in a stream: every token once, in full rows, and exact resume anywhere."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.loading.seals import resealed
from torch_collate_kit import PackedCollator, PackedIterableDataset, TokenizedDataset
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import merge_states
from torch_collate_kit.packing import PackingOptions, ParallelLayout

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)
RNG = np.random.default_rng(0)
DOCUMENTS = [
    {"input_ids": [*RNG.integers(2, 9999, n - 1).tolist(), 1]} for n in RNG.integers(2, 150, 45)
]
TOKENS = [token for document in DOCUMENTS for token in document["input_ids"]]
SOURCES: dict[str, Any] = {
    "list": lambda: DOCUMENTS,
    "columns": lambda: TokenizedDataset(DOCUMENTS),
    "callable": lambda: lambda: iter(DOCUMENTS),
}


def stream_of(source: str = "list", dp: int = 1, rank: int | None = 0, **options: Any) -> Any:
    isolate = options.pop("isolate", True)
    layout = ParallelLayout(dp=dp)
    packing = PackingOptions(32, strategy="wrapped", isolate=isolate, parallel=layout)
    given = {"batch_rows": 2 * dp, "buffer_size": 20, "dp_rank": rank, **options}
    collate = PackedCollator(TOKENIZER, packing=packing)
    return PackedIterableDataset(SOURCES[source](), collate, **given)


def tokens_of(batches: Any) -> list[int]:
    return [token for batch in batches for token in batch["input_ids"].flatten().tolist() if token]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("isolate", [True, False])
def test_batches_are_the_documents_end_to_end(source: str, isolate: bool) -> None:
    batches = list(stream_of(source, isolate=isolate))
    assert tokens_of(batches) == TOKENS
    assert {batch["input_ids"].shape for batch in batches[:-1]} == {(2, 32)}
    whole = list(stream_of(source, dp=2, rank="all", isolate=isolate))
    assert sorted(tokens_of(whole)) == sorted(TOKENS)
    assert {batch["input_ids"].shape for batch in whole[:-1]} == {(4, 32)}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}, {"num_shards": 3}])
def test_it_goes_on_after_any_batch(source: str, options: dict[str, Any]) -> None:
    running, whole, states = stream_of(source, **options), [], []
    for batch in running:
        whole.append(batch["input_ids"].tolist())
        states.append(json.loads(json.dumps(running.state_dict())))
    found = [token for rows in whole for row in rows for token in row if token]
    assert sorted(found) == sorted(TOKENS)
    assert (found == TOKENS) == (not options)
    for step in (0, 3, 11, len(whole) - 2):
        resumed = stream_of(source, **options)
        resumed.load_state_dict(states[step])
        assert [batch["input_ids"].tolist() for batch in resumed] == whole[step + 1 :]


def test_ranks_go_on_with_the_shards_of_others() -> None:
    ranks = [stream_of(dp=2, rank=rank, num_shards=4) for rank in (0, 1)]
    iterators = [iter(rank) for rank in ranks]
    found = [next(iterator) for _ in range(3) for iterator in iterators]
    alone = stream_of(num_shards=4)
    alone.load_state_dict(merge_states([rank.state_dict() for rank in ranks]))
    assert sorted([*tokens_of(found), *tokens_of(alone)]) == sorted(TOKENS)


def test_what_cannot_be() -> None:
    collate = PackedCollator(TOKENIZER, max_tokens=32, strategy="wrapped")
    without_end = PackedIterableDataset([{"input_ids": [5, 6]}], collate)
    with pytest.raises(DataError, match="not with the end token 1 of the tokenizer"):
        list(without_end)
    state = stream_of().state_dict()
    state["shards"]["0"]["start"] = 500  # tokens of the first document
    damaged = stream_of()
    damaged.load_state_dict(resealed(state))
    with pytest.raises(StateError, match="after token 500 of example 0 of the stream, which has"):
        list(damaged)
