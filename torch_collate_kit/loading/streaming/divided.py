"""A rank's shards of a stream, divided over the workers of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from torch_collate_kit.loading.streaming.rounds import Position, Turn, in_rounds
from torch_collate_kit.loading.streaming.states import positions_in, state_of_shards

if TYPE_CHECKING:
    from torch_collate_kit.loading.streaming.packed import PackedIterableDataset

__all__ = ["DividedStream"]


class DividedStream:
    """What a loader needs that knows the position of every shard after what was consumed.

    The positions are the loader's: the dataset itself is not moved. Workers of a DataLoader have
    copies, which are told where to begin, and return where a shard is with every batch.

    Raises:
        ValueError: more workers than shards.
    """

    def __init__(self, dataset: PackedIterableDataset, num_workers: int) -> None:
        self._dataset, self._num_workers = dataset, num_workers
        self._shards = dataset._stream.shards(num_workers)

    @property
    def epoch(self) -> int | None:
        """The source's own epoch, if it has one."""
        return self._dataset._stream.epoch

    def beginning(self) -> dict[int, Position]:
        """The positions at the beginning of a pass."""
        return dict.fromkeys(self._shards, Position())

    def start(self) -> dict[int, Position]:
        """The positions where the dataset itself would begin: those of a state that it has loaded.

        Raises:
            StateError: a state without shards, which workers cannot divide.
        """
        saved = self._dataset._saved
        if saved is None:
            return self.beginning()
        if self._dataset.num_shards is None and not self._num_workers:
            return self._dataset._starting_positions()
        return self.positions_in(saved)

    def turns(self, positions: Mapping[int, Position], epoch: int) -> Iterator[Turn]:
        """The turns of this process's shards in pass ``epoch``, in a worker or outside one."""
        worker = get_worker_info()
        own = {} if worker is None else {"worker": worker.id, "num_workers": worker.num_workers}
        read = partial(self._dataset._shard_batches, epoch=epoch)
        return in_rounds(self._shards, positions, read, **own)

    def state_at(self, positions: Mapping[int, Position], epoch: int | None) -> dict[str, Any]:
        """The state of this rank; ``epoch`` is the source's."""
        return state_of_shards(self._settings() | {"epoch": epoch}, positions)

    def positions_in(self, state: Mapping[str, Any]) -> dict[int, Position]:
        """The positions of this rank's shards.

        Raises:
            StateError: the state does not fit, or is damaged.
        """
        packing = self._dataset.collator.packing
        return positions_in(state, self._settings(), packing, self._shards)

    def _settings(self) -> dict[str, Any]:
        settings = self._dataset._settings()
        if self._dataset.num_shards is None:
            del settings["worker"]
            settings |= {"num_workers": self._num_workers, "num_shards": None}
        return settings
