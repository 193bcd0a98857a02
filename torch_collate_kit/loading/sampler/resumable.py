"""The protocol of a batch sampler that can be stopped and resumed at any step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler that can be resumed at any step: what ``PrefetchLoader`` needs.

    One ``iter()`` is one epoch, which is fixed then, and ``epoch`` becomes the next one. A consumer
    counts its batches and saves ``state_at(epoch, batches)``, since ``state_dict()`` is the next
    epoch. It must not have an attribute ``batch_size``: Accelerate would read it and lose batches.
    An int ``num_examples`` is compared with the length of the dataset.

    >>> from torch_collate_kit import PrefetchingSampler
    >>> isinstance(PrefetchingSampler(10, batch_size=4), ResumableSampler)
    True
    """

    @property
    def epoch(self) -> int:
        """The epoch that the next ``iter()`` yields."""

    def __iter__(self) -> Iterator[Any]:
        """Return one epoch of batches of indices, from the start step."""

    def __len__(self) -> int:
        """Return the number of steps of epoch ``self.epoch``, counted from its step 0."""

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Let the next ``iter()`` yield this epoch from this step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next ``iter()``, and what it must fit: small JSON."""

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps of ``epoch``."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises StateError, and changes nothing, if it does not fit."""
