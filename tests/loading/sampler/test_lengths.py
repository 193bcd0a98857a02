"""``len()`` is exact, and nothing on the way of an epoch asks for it."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.building import packed_sampler
from torch_collate_kit import Mixture, PackedBatchSampler, PrefetchLoader, TokenizedDataset
from torch_collate_kit.loading.sampler import by_rows

LENGTHS = np.random.default_rng(0).integers(1, 60, 3_000)


def sampler_of(lengths: Any = LENGTHS, **options: Any) -> PackedBatchSampler:
    given = {"max_tokens": 100, "batch_rows": 2, "normalize_loss": False, **options}
    return packed_sampler(lengths, **given)


def backwards(epoch: int, rng: np.random.Generator) -> np.ndarray:
    return np.argsort(LENGTHS)[:: -2 - epoch]


MIXED = Mixture([LENGTHS[:2_000], LENGTHS[2_000:]], weights=[5, 3], by="tokens")
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "kept": (LENGTHS, {}),
    "dropped": (LENGTHS, {"tail": "drop"}),
    "wrapped around": (LENGTHS, {"tail": "wrap"}),
    "keyed": (LENGTHS, {"shuffle": "keyed"}),
    "in pieces": (LENGTHS, {"max_tokens": 40, "overflow": "split"}),
    "in the user's order": (LENGTHS, {"order": backwards}),
    "mixed": (MIXED, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_length_is_the_number_of_steps(case: str, caplog: pytest.LogCaptureFixture) -> None:
    lengths, options = CASES[case]
    counting, reading = (sampler_of(lengths, **options) for _ in range(2))
    expected = []
    for _ in range(2):
        number = len(reading)
        expected.append(sum(1 for _ in reading))
        assert number == expected[-1]
    assert [counting.count_steps(epoch) for epoch in (1, 0)] == expected[::-1]
    assert not caplog.records


def test_a_count_that_takes_long_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_rows, "_LONG_SECONDS", -1)
    sampler = sampler_of()
    len(sampler)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("torch_collate_kit.loading", logging.WARNING)
    assert "counting the steps of epoch 0, of 3000 examples, takes" in record.getMessage()


def test_reading_moving_and_resuming_do_not_count_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = TokenizedDataset([{"input_ids": [1] * n} for n in LENGTHS])
    sampler = sampler_of(data)

    def loader_of(sampler: PackedBatchSampler) -> PrefetchLoader:
        return PrefetchLoader(DataLoader(data, batch_sampler=sampler, collate_fn=sampler._collate))

    with monkeypatch.context() as patch:
        patch.setattr(by_rows.ByRows, "num_steps", lambda *_: pytest.fail("the epoch is counted"))
        with loader_of(sampler) as loader:
            for _ in loader:
                break
            assert len(list(loader.steps(11))) == 11
            loader.reshuffle()
            next(iter(loader))
            loader.set_epoch(2)
            next(iter(loader))
            state = json.dumps(loader.state_dict())
        resumed = sampler_of(data)
        loader = loader_of(resumed)
        loader.load_state_dict(json.loads(state))
        assert next(iter(loader)).metadata["step"] == 1
    with loader:
        assert len(loader) == (number := sampler.count_steps(2))
        assert sum(1 for _ in loader) == number - 2
