"""Collators as collate_fn in workers that receive them by pickle, in two epochs."""

from __future__ import annotations

from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.ranks import FORKS
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.packing import ParallelLayout

EXAMPLES = [{"input_ids": list(range(1, 2 + i % 7))} for i in range(20)]
COLLATORS = (
    PaddedCollator(0),
    PackedCollator(0, max_tokens=16, parallel=ParallelLayout(dp=2, tp=2)),
)


class Both:
    """Is sent to the worker with its collators."""

    def __init__(self) -> None:
        self.collators = COLLATORS

    def __call__(self, examples):
        return [collate(examples) for collate in self.collators]


def test_workers_give_the_batches_of_the_main_process():
    workers = {"num_workers": 1, "multiprocessing_context": FORKS, "persistent_workers": True}
    loader = DataLoader(EXAMPLES, batch_size=6, collate_fn=Both(), **workers)
    for _ in range(2):  # the second epoch reuses persistent workers
        found = list(loader)
        assert len(found) == 4
        for i, batches in enumerate(found):
            for batch, wanted in zip(batches, Both()(EXAMPLES[6 * i : 6 * i + 6]), strict=True):
                assert_same_batch(batch, wanted)
