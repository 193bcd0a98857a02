"""Small data for loader tests, and a collate function that can be watched and made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.loading.hang_guard import once_main_thread_waits
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import batch_digest

EXAMPLES = [{"input_ids": list(range(10 * i, 10 * i + 1 + i % 5))} for i in range(13)]
COLLATORS: dict[str, Callable[[Any], Any]] = {
    "padded": PaddedCollator(0),
    "packed": PackedCollator(0, max_tokens=8),
}


def make_sampler(**options: Any) -> PrefetchingSampler:
    return PrefetchingSampler(len(EXAMPLES), **{"batch_size": 4, "seed": 3, **options})


def make_loader(
    collate: Callable[[Any], Any] = COLLATORS["packed"],
    *,
    num_workers: int = 0,
    persistent_workers: bool = False,
    prefetch: bool = True,
    warn_after: float | None = 60.0,
    **sampler_options: Any,
) -> PrefetchLoader:
    loader = DataLoader(
        EXAMPLES,
        batch_sampler=make_sampler(**sampler_options),
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    return PrefetchLoader(loader, prefetch=prefetch, warn_after=warn_after)


def collated(collate: Any, indices: Any, epoch: int, step: int) -> Any:
    """A batch as a loader gives it out."""
    batch = collate([EXAMPLES[i] for i in indices])
    batch.metadata |= {"epoch": epoch, "step": step}
    return batch


def expected_digests(num_epochs: int, collate: Any = COLLATORS["packed"], **options: Any) -> list:
    """The stream written out: no loader, no thread."""
    sampler = make_sampler(**options)
    return digests_of([list(sampler) for _ in range(num_epochs)], collate)


def digests(batches: Any) -> list[str]:
    return [batch_digest(batch) for batch in batches]


def digests_of(epochs: Any, collate: Any = COLLATORS["packed"]) -> list:
    """Of batches of indices, a list for each epoch from 0 on."""
    places = [(of, epoch, k) for epoch, steps in enumerate(epochs) for k, of in enumerate(steps)]
    return digests(collated(collate, *place) for place in places)


def rollout(num_tokens: int) -> dict[str, Any]:
    ones = np.ones(num_tokens, dtype=np.int64)
    return {"prompt_ids": ones, "response_ids": ones, "rewards": 1.0, "loss_mask": ones}


def tokens(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": np.ones(n, dtype=np.int64)} for n in lengths]


def every_layout(scale: int) -> list[Batch]:
    """One of every layout; long ones spend their time where NumPy releases the GIL."""
    few, many = scale, 3 * scale
    return [
        PaddedCollator(0)(tokens(many, *[1] * 5)),  # mostly pads
        PackedCollator(0, max_tokens=many)(tokens(few, few, many)),
        RolloutCollator(0)([rollout(many), rollout(few)]),
        PackedCollator(0, max_tokens=2 * many)([rollout(many), rollout(few)]),
    ]


class OwnSampler:
    """The protocol and no more: every iter() counts, also those a DataLoader makes in vain.

    It is moved in two lines, with ``between`` in between.
    """

    def __init__(self, num_steps: int = 3) -> None:
        self.num_steps, self.epoch, self.step = num_steps, 0, 0
        self.between: Callable[[], object] = lambda: None

    def __iter__(self) -> Iterator[list[int]]:
        steps = [[10 * self.epoch + step] for step in range(self.step, self.num_steps)]
        self.epoch, self.step = self.epoch + 1, 0
        return iter(steps)

    def __len__(self) -> int:
        return self.num_steps

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        self.epoch = epoch
        self.between()
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self.epoch, self.step)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        is_over = step == self.num_steps > 0
        return {"epoch": epoch + 1, "step": 0} if is_over else {"epoch": epoch, "step": step}

    def load_state_dict(self, state: Any) -> None:
        self.set_epoch(state["epoch"], step=state["step"])


class Watched:
    """The packed collator: counts, blocks before a batch, fails at a batch."""

    def __init__(self) -> None:
        self.num_begun = self.num_built = 0
        self.is_reading = False
        self.began = threading.Condition()
        self.errors: dict[int, BaseException] = {}  # by the number of the batch
        self.gates: dict[int, threading.Event] = {}
        self.failed = threading.Event()

    def __call__(self, examples: Any) -> Any:
        self.is_reading = True
        try:
            number = self.num_begun
            with self.began:
                self.num_begun += 1
                self.began.notify_all()
            if number in self.gates:
                self.gates[number].wait()
            self._explode(self.errors.get(number))
            self.num_built += 1
            return COLLATORS["packed"](examples)
        finally:
            self.is_reading = False

    def _explode(self, error: BaseException | None) -> None:
        if error is not None:
            self.failed.set()
            raise error

    def wait_until_begun(self, count: int) -> None:
        with self.began:
            self.began.wait_for(lambda: self.num_begun >= count)

    def release_later(self, number: int) -> None:
        """Opens a gate after the main thread has gone on to wait for it."""
        once_main_thread_waits(self.gates[number].set)
