"""Options and calls used together, as runs use them: each by what a user would see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.loading.hang_guard import fails_when_it_hangs
from torch_collate_kit import (
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.errors import StateError
from torch_collate_kit.testing import batch_digest

LENGTHS = np.random.default_rng(0).integers(1, 20, 41)
EXAMPLES = [{"input_ids": [1 + i, *[7] * (n - 1)]} for i, n in enumerate(LENGTHS.tolist())]
COLLATE = PackedCollator(0, max_tokens=20)


@pytest.mark.parametrize("window", [1, 3])
def test_an_example_is_in_the_steps_that_say_so_also_where_epochs_overlap(window: int) -> None:
    options: dict[str, Any] = {"batch_rows": 2, "window": window, "tail": "wrap"}
    sampler = PackedBatchSampler(LENGTHS, COLLATE, seed=3, **options)
    for epoch in range(4):
        steps = [sampler.examples(epoch, step) for step in range(sampler.count_steps(epoch))]
        for example in range(len(LENGTHS)):
            found = [(epoch, step) for step, of in enumerate(steps) if example in of]
            assert sampler.when(example, epoch) == found


def test_every_piece_of_a_split_example_is_named_as_cut() -> None:
    collate = PackedCollator(0, max_tokens=8, overflow="split")
    dataset = TokenizedDataset(EXAMPLES)
    plans, batches = (PackedBatchSampler(dataset, collate, batch_rows=2, seed=1) for _ in range(2))
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate)
    places = []
    for plan, batch in zip(plans, loader, strict=True):
        pieces = [plan.indices[i] for i in range(batch.metadata["num_examples"])]
        cut = [i for i, example in enumerate(pieces) if LENGTHS[example] > 8]
        assert (batch.metadata["cut"], batch.metadata["num_cut"]) == (tuple(cut), len(cut))
        places += [pieces[i] for i in cut]
    expected = {i: -(-n // 8) for i, n in enumerate(LENGTHS.tolist()) if n > 8}
    assert {i: places.count(i) for i in {*places}} == expected


def test_lengths_of_a_mixture_that_changed_are_refused() -> None:
    """Their number and their sum did not change."""

    def sampler(first: Any) -> PrefetchingSampler:
        return PrefetchingSampler(Mixture([first, LENGTHS[20:]], by="tokens"), batch_size=4)

    state = sampler(LENGTHS[:20]).state_dict()
    sampler(LENGTHS[:20]).load_state_dict(state)
    with pytest.raises(StateError):
        sampler(LENGTHS[:20][::-1]).load_state_dict(state)


def stream() -> PackedIterableDataset:
    return PackedIterableDataset(EXAMPLES, COLLATE, buffer_size=4, shuffle=True, seed=2)


def test_the_state_of_a_chosen_pass_is_its_beginning() -> None:
    """Before the loop that reads it, and without one."""
    other, chosen = stream(), stream()
    other.set_epoch(2)
    expected = [batch_digest(batch) for batch in other]
    assert expected != [batch_digest(batch) for batch in stream()]
    batches = iter(chosen)
    next(batches)
    chosen.load_state_dict(chosen.state_dict())  # of pass 0
    chosen.set_epoch(2)
    resumed = stream()
    resumed.load_state_dict(chosen.state_dict())
    assert [batch_digest(batch) for batch in resumed] == expected


def test_workers_that_live_on_go_to_a_place_in_the_pass_that_they_would_read_next() -> None:
    def loader() -> PrefetchLoader:
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        data = stream()
        return PrefetchLoader(DataLoader(data, batch_size=None, collate_fn=data.as_is, **options))

    with fails_when_it_hangs(), loader() as whole, loader() as moved:
        per_pass = len(list(whole))
        list(whole.steps(3))
        state = whole.state_dict()
        expected = [batch_digest(batch) for batch in whole.steps(per_pass)]
        assert len(list(moved)) == per_pass
        moved.load_state_dict(state)
        assert [batch_digest(batch) for batch in moved.steps(per_pass)] == expected


def test_bad_examples_around_a_good_batch_are_not_in_a_row() -> None:
    rows: list[Any] = [{"input_ids": [i + 1]} for i in range(9)]
    rows[2] = rows[6] = {"input_ids": []}  # the last of a batch, and the first of the next but one
    sampler = PrefetchingSampler(9, batch_size=3, shuffle=False)
    data = DataLoader(rows, batch_sampler=sampler, collate_fn=PaddedCollator(0))
    options: dict[str, Any] = {"on_error": "skip", "max_skipped_in_a_row": 1}
    with fails_when_it_hangs(), PrefetchLoader(data, **options) as loader:
        assert [len(batch) for batch in loader] == [2, 3, 2]
        assert [skipped.example for skipped in loader.skipped] == [2, 6]


def test_a_new_epoch_is_announced_by_no_loop_that_begins_within_one() -> None:
    def loader() -> PrefetchLoader:
        sampler = PrefetchingSampler(9, batch_size=3, shuffle=False)
        return PrefetchLoader(DataLoader(list(range(9)), batch_sampler=sampler))  # type: ignore[arg-type]

    seen: list[int] = []
    with fails_when_it_hangs(), loader() as first, loader() as resumed:
        for number, epochs in ((2, [0]), (1, [0]), (1, [0, 1])):
            list(first.steps(number, on_epoch=seen.append))
            assert seen == epochs
        resumed.load_state_dict(first.state_dict())
        list(resumed.steps(2, on_epoch=seen.append))
        assert seen == [0, 1]
        list(resumed.steps(1, on_epoch=seen.append))
        assert seen == [0, 1, 2]


def test_examples_as_long_as_a_row_one_at_a_time() -> None:
    sampler = PackedBatchSampler([20] * 5, COLLATE, batch_rows=1, window=1)
    steps = list(sampler)
    assert sorted(i for step in steps for i in step.indices) == list(range(5))
    assert [len(step.indices) for step in steps] == [1] * 5
