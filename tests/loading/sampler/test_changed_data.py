"""Data that grew or changed between two runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from torch_collate_kit import PackedBatchSampler, PrefetchingSampler, TokenizedDataset
from torch_collate_kit.errors import StateError

ROWS = [{"input_ids": [i, i + 1, *range(i % 5)]} for i in range(31)]


def packed(rows: list[dict[str, Any]], **options: Any) -> PackedBatchSampler:
    dataset = TokenizedDataset(rows, train_all=True)
    counts = dataset.num_loss_tokens
    return packed_sampler(
        dataset.lengths, batch_size=4, max_tokens=16, seed=2, num_loss_tokens=counts, **options
    )


def prefetching(rows: list[dict[str, Any]], **options: Any) -> PrefetchingSampler:
    return PrefetchingSampler(TokenizedDataset(rows), batch_size=4, seed=2, **options)


def read(sampler: Any) -> list[list[int]]:
    return [part if isinstance(part, list) else part.indices for part in sampler]


@pytest.mark.parametrize("make", [packed, prefetching])
def test_data_that_grew_are_refused_and_a_new_sampler_goes_on(make: Any) -> None:
    for step, following in ((0, 3), (2, 4)):
        state = json.loads(json.dumps(make(ROWS[:23]).state_at(3, step)))
        grown = make(ROWS)
        with pytest.raises(
            StateError,
            match=rf"^state is of 23 examples, the data has 31; .* call set_epoch\({following}\)",
        ):
            grown.load_state_dict(state)
        assert (grown.epoch, grown.state_dict()["step"]) == (0, 0), "nothing has changed"
        grown.set_epoch(following)
        assert sorted(i for part in read(grown) for i in part) == list(range(31))
    with pytest.raises(TypeError, match="allow_appended"):
        make(ROWS, allow_appended=True)


def test_any_other_change_is_refused() -> None:
    state = prefetching(ROWS).state_at(0, 2)
    longer = [*ROWS[:4], {"input_ids": [1] * 9}, *ROWS[5:]]
    swapped = [*ROWS[:5], ROWS[10], *ROWS[6:10], ROWS[5], *ROWS[11:]]
    retokenized = [{"input_ids": [n + 7 for n in row["input_ids"]]} for row in ROWS]
    for rows, differs in (
        (longer, r"state is of num_tokens=\d+, lengths='\w{32}', token_ids='\w{32}', this sampler"),
        (swapped, r"state is of token_ids='\w{32}', this sampler has token_ids='\w{32}'; build"),
        (
            retokenized,
            r"state is of token_ids='\w{32}', this sampler has token_ids='\w{32}'; build",
        ),
        (ROWS[:-1], "state is of 31 examples, the data has 30; examples were taken away; build"),
    ):
        with pytest.raises(StateError, match=f"^{differs}"):
            prefetching(rows).load_state_dict(state)
    packed_state = packed(ROWS).state_at(0, 2)
    with pytest.raises(StateError, match=r"^state is of num_tokens=\d+, lengths_digest="):
        packed(longer).load_state_dict(packed_state)


def test_a_size_alone_is_compared_with_a_size() -> None:
    """Data without a fingerprint: only their number is known."""
    sampler = PrefetchingSampler(31, batch_size=4, seed=2)
    sampler.load_state_dict(prefetching(ROWS).state_at(0, 2))
    assert sampler.state_dict()["fingerprint"] is None
    prefetching(ROWS).load_state_dict(sampler.state_dict())


def test_a_fingerprint_is_of_the_rows_not_of_how_they_are_held() -> None:
    import datasets

    of_lists = TokenizedDataset(ROWS).fingerprint()
    arrow = datasets.Dataset.from_list(ROWS)
    assert TokenizedDataset(arrow).fingerprint() == of_lists
    halves = datasets.concatenate_datasets([arrow.select(range(15)), arrow.select(range(15, 31))])
    assert TokenizedDataset(halves).fingerprint() == of_lists
    turned = arrow.select([*range(30, -1, -1)])
    assert TokenizedDataset(turned).fingerprint() != of_lists
    assert TokenizedDataset(turned).fingerprint() == TokenizedDataset(ROWS[::-1]).fingerprint()
    empty = TokenizedDataset(ROWS).fingerprint(0)
    assert empty["num_tokens"] == 0
    with pytest.raises(ValueError, match=r"^num_examples must be at most 31, got 32$"):
        TokenizedDataset(ROWS).fingerprint(32)
    lengths = np.array([len(row["input_ids"]) for row in ROWS])
    assert of_lists["num_tokens"] == lengths.sum()
