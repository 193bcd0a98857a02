"""PrefetchLoader inside Accelerate."""

from __future__ import annotations

import torch

from tests.loading.prefetch.toy_data import (
    expected_digests,
    make_loader,
)
from torch_collate_kit.testing import batch_digest


def test_accelerate_takes_it_as_it_is_and_saves_it(tmp_path):
    from accelerate import Accelerator

    expected = expected_digests(2)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    with make_loader() as loader:
        prepared_model, prepared = accelerator.prepare(model, loader)
        assert prepared is loader
        assert prepared_model is not None
        accelerator.register_for_checkpointing(loader)
        batches = loader.steps(8)
        for _ in range(3):
            next(batches)
        accelerator.save_state(str(tmp_path))  # the fourth is in flight
        rest = [batch_digest(batch) for batch in batches]
        assert rest == expected[3:]
        accelerator.load_state(str(tmp_path))
        assert [batch_digest(batch) for batch in loader.steps(5)] == expected[3:]
    accelerator.free_memory()

    accelerator = Accelerator(cpu=True)
    with make_loader() as loader:  # another process
        accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.register_for_checkpointing(loader)
        accelerator.load_state(str(tmp_path))
        assert [batch_digest(batch) for batch in loader.steps(5)] == expected[3:]
