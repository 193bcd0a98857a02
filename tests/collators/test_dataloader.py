"""Both collators as collate_fn: workers, start methods, pinning by protocol, Trainer."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.ranks import FORKS
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.packing import ParallelLayout

EXAMPLES = [{"input_ids": list(range(1, 2 + i % 7))} for i in range(20)]
COLLATORS = {
    "padded": PaddedCollator(0),
    "packed": PackedCollator(0, max_tokens=16, parallel=ParallelLayout(dp=2, tp=2)),
}


@pytest.mark.parametrize("name", COLLATORS)
@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": FORKS, "persistent_workers": True},
    ],
    ids=["0", "fork", "forkserver"],
)
def test_workers_give_the_batches_of_the_main_process(name, workers):
    collate = COLLATORS[name]
    expected = [collate(EXAMPLES[i : i + 6]) for i in range(0, 20, 6)]
    loader = DataLoader(EXAMPLES, batch_size=6, collate_fn=collate, **workers)
    for _ in range(2):  # the second epoch reuses persistent workers
        batches = list(loader)
        assert len(batches) == len(expected) == 4
        for batch, wanted in zip(batches, expected, strict=True):
            assert_same_batch(batch, wanted)


def test_model_inputs_give_the_plain_dict_that_trainer_wants():
    collate = PackedCollator(0, max_tokens=16, train_all=True).for_trainer()
    inputs = collate(EXAMPLES)
    assert type(inputs) is dict
    assert list(inputs) == [
        "input_ids",
        "position_ids",
        "labels",
        "use_cache",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    ]
    assert inputs["use_cache"] is False
    assert inputs["max_length_q"] == 7
