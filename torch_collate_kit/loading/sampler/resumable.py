"""What a batch sampler must have to be stopped and resumed at any step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["ResumableSampler"]


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler that can be resumed at any step: what ``PrefetchLoader`` needs.

    One ``iter()`` is one epoch, which is fixed then, and ``epoch`` becomes the next one. A consumer
    counts its batches and saves ``state_at(epoch, batches)``, since ``state_dict()`` is ahead of
    it. It must not have an attribute ``batch_size``: Accelerate would read it and lose batches. An
    int ``num_examples`` is compared with the length of the dataset.

    >>> from torch_collate_kit.loading import PrefetchingSampler
    >>> isinstance(PrefetchingSampler(10, batch_size=4), ResumableSampler)
    True
    """

    @property
    def epoch(self) -> int:
        """The epoch that the next ``iter()`` yields."""

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches of indices, from the start step."""

    def __len__(self) -> int:
        """Steps of epoch ``self.epoch``, counted from its step 0."""

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """The next ``iter()`` yields this epoch from this step."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next ``iter()``, and what it must fit: small JSON."""

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The same with ``step`` steps of ``epoch`` consumed."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; StateError, and nothing changed, when it does not fit."""
