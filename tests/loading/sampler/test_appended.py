"""Data appended between two runs, and data that changed in another way."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from tests.loading.sampler.sampler_oracle import curriculum
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
@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_the_running_epoch_keeps_its_order(make: Any, tail: str, shuffle: bool | str) -> None:
    old = make(ROWS[:23], tail=tail, shuffle=shuffle)
    new = make(ROWS, tail=tail, shuffle=shuffle, allow_appended=True)
    new.load_state_dict(json.loads(json.dumps(old.state_at(1, 2))))
    old.set_epoch(1, step=2)
    assert read(new) == read(old), "of the 23"
    alone = make(ROWS, tail=tail, shuffle=shuffle)
    if tail == "wrap":  # the 24-th comes after the 46 of two epochs
        following = [i for batch in read(new) for i in batch]
        first = [i for step in range(alone.count_steps(2)) for i in alone.examples(2, step)]
        assert following[2:] == list(alone._budget.order.take(2, 0, 31))[: len(following) - 2], (
            first
        )
    else:
        assert read(new) == [alone.examples(2, s).tolist() for s in range(len(alone))][: len(new)]
    assert new.state_dict()["num_examples"] == [[0, 23], [2, 31]]
    for epoch, sampler in ((0, old), (1, old)):
        assert new.examples(epoch, 3).tolist() == sampler.examples(epoch, 3).tolist()
    assert new.when(30, 1) == []
    assert new.when(30, 3) == [
        (3, s) for s in range(9) if s < new.count_steps(3) and 30 in new.examples(3, s)
    ]


@pytest.mark.parametrize("make", [packed, prefetching])
def test_appended_again_and_resumed_without_asking_twice(make: Any) -> None:
    first = make(ROWS[:13])
    second = make(ROWS[:20], allow_appended=True)
    second.load_state_dict(first.state_at(0, 1))
    third = make(ROWS, allow_appended=True)
    third.load_state_dict(second.state_at(0, 2))  # before the 20 were ever read
    assert third.state_dict()["num_examples"] == [[0, 13], [1, 31]]
    second.set_epoch(1, step=1)
    third.load_state_dict(second.state_dict())
    assert third.state_dict()["num_examples"] == [[0, 13], [1, 20], [2, 31]]
    again = make(ROWS)  # the state knows all 31 now
    again.load_state_dict(json.loads(json.dumps(third.state_dict())))
    assert read(again) == read(third)
    at_start = make(ROWS, allow_appended=True)
    at_start.load_state_dict(first.state_at(2, 0))
    assert at_start.state_dict()["num_examples"] == [[0, 13], [2, 31]], "no epoch runs"


@pytest.mark.parametrize("allow_appended", [True, False])
def test_any_other_change_is_refused(allow_appended: bool) -> None:
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
            prefetching(rows, allow_appended=allow_appended).load_state_dict(state)
    packed_state = packed(ROWS).state_at(0, 2)
    with pytest.raises(StateError, match=r"^state is of num_tokens=\d+, lengths_digest="):
        packed(longer, allow_appended=allow_appended).load_state_dict(packed_state)
    changed = [*longer, {"input_ids": [1, 2]}]
    with pytest.raises(StateError, match=r"^state is of "):
        prefetching(changed, allow_appended=allow_appended).load_state_dict(state)
    with pytest.raises(StateError, match=r"^state is of "):
        packed(changed, allow_appended=allow_appended).load_state_dict(packed_state)


def test_appended_data_must_be_allowed() -> None:
    state = prefetching(ROWS[:30]).state_at(0, 2)
    with pytest.raises(
        StateError, match=r"^state is of 30 examples, the data has 31; if they were"
    ):
        prefetching(ROWS).load_state_dict(state)
    ordered = PrefetchingSampler(20, batch_size=5, order=curriculum, allow_appended=True)
    with pytest.raises(
        StateError, match="allow_appended=True cannot keep the running epoch's order"
    ):
        ordered.load_state_dict(
            PrefetchingSampler(19, batch_size=5, order=curriculum).state_at(0, 1)
        )


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
