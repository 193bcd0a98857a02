"""A stream of examples into packed batches, through a bounded buffer.

The stream is cut into windows of eight buffers, and a window is given out completely before the
next begins. So the state is the place where the window began and the number of batches since: no
tokens, no list of what waits. The cost: a resumed pass reads up to a window again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torch_collate_kit._checks import checked_bool, checked_int
from torch_collate_kit._reprs import Shown, call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.collators.packed import changed_options
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.sampler.arguments import checked_rank, is_same
from torch_collate_kit.loading.streaming.readers import Reader, at_positions, reader_of
from torch_collate_kit.loading.streaming.shards import ExampleSource, Place, Stream
from torch_collate_kit.loading.streaming.windows import PlannedEntries, Windows
from torch_collate_kit.packing import PlannedExamples

__all__ = ["PackedIterableDataset"]

_VERSION = 3  # goes up with _NUM_BUFFERS and with any change to which examples make a batch
_MAX_COUNT = 2**63 - 1
_NUM_BUFFERS = 8  # of a window; 4 lose 0.9% on lengths spread evenly, for half the reading


@dataclass
class _Position:
    """The position of a pass: where its window began, and the batches since."""

    place: Place = field(default_factory=Place)
    num_batches: int = 0
    epoch: int | None = None


class PackedIterableDataset(IterableDataset[Batch | dict[str, Any]]):
    """Packs a stream of examples into batches of ``rows_per_batch`` rows of ``max_tokens``.

    Args:
        source: an iterable of examples that can be iterated again, or a callable that makes one.
            A ``TokenizedDataset``, or a ``datasets.Dataset`` without a format, is read as columns.
        tokenizer: an int pad id, or anything with ``pad_token_id``.
        buffer_size: the most examples held at a time. At 1,000, rows are within 1% of the fullest.
        rows_per_batch: a multiple of ``parallel.dp``. The last batch of a pass may have fewer rows.
        rank, world_size: which part of the stream is read, without collectives.
        presharded: the source gives every rank and worker different examples; do not split it.
        collator_options: all other options of ``PackedCollator``: ``max_tokens``, ``packing``, ...

    One ``iter()`` is one pass. Batches are those that ``PackedCollator`` makes of their examples in
    stream order. Load it with ``DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)``.
    docs/loading.md describes buffers and windows, sharding over ranks and workers, and resuming.

    Raises:
        DataError: an example is wrong or too long; the message names its position in the stream.
        TypeError, ValueError: a setting is wrong.

    >>> examples = [{"input_ids": [7] * n} for n in (3, 2, 4, 1, 5)]
    >>> dataset = PackedIterableDataset(examples, tokenizer=0, max_tokens=6, buffer_size=5)
    >>> [batch["sub_seq_lengths"].tolist() for batch in dataset]
    [[[4, 2]], [[3]], [[5, 1]]]
    """

    def __init__(
        self,
        source: ExampleSource,
        *,
        tokenizer: Any,
        buffer_size: int = 1000,
        rows_per_batch: int = 1,
        rank: int = 0,
        world_size: int = 1,
        presharded: bool = False,
        **collator_options: Any,
    ) -> None:
        self.collator = PackedCollator(tokenizer, **collator_options)
        self.buffer_size = checked_int("buffer_size", buffer_size, hint="1000 packs well")
        self.rows_per_batch = checked_int("rows_per_batch", rows_per_batch)
        self.world_size = checked_int("world_size", world_size, hint="1 means one rank")
        self.rank = checked_rank(rank, self.world_size)
        self.presharded = checked_bool("presharded", presharded)
        self._stream = Stream(
            source,
            self.rank,
            self.world_size,
            presharded=presharded,
            collator=self.collator,
        )
        self._saved: Mapping[str, Any] | None = None
        self._position: _Position | None = None
        dp = self.collator.packing.parallel.dp
        if self.rows_per_batch % dp:
            raise ValueError(
                f"rows_per_batch must be a multiple of dp={dp}, got {self.rows_per_batch}"
            )
        if self.buffer_size < self.rows_per_batch:
            raise ValueError(
                f"buffer_size must be at least rows_per_batch={self.rows_per_batch}, got "
                f"{self.buffer_size}; a row holds one example or more"
            )

    def __iter__(self) -> Iterator[Batch | dict[str, Any]]:
        position = _Position() if self._saved is None else self._position_of(self._saved)
        position.epoch = self._stream.epoch
        self._saved, self._position = None, position
        return self._batches(position)

    def __repr__(self) -> str:
        own = changed_settings(self)
        return call_repr(
            self,
            repr(Shown(self._stream.source)),
            tokenizer=self.collator.pad_token_id,
            **changed_options(self.collator),
            **own,
        )

    @staticmethod
    def as_is(batch: Any) -> Any:
        """``collate_fn`` for ``batch_size=None``: torch's own rebuilds a Batch without metadata."""
        return batch

    @property
    def set_epoch(self) -> Any:
        """None: the order is the source's. Accelerate's loaders look for it before each pass."""
        caller = sys._getframe(1).f_locals.get("self")
        if type(caller).__name__ in ("DataLoaderDispatcher", "IterableDatasetShard"):
            raise TypeError(
                "accelerator.prepare of a DataLoader of a PackedIterableDataset would divide its "
                "batches over the ranks by itself, and cut what belongs together; give the dataset "
                "rank=accelerator.process_index, world_size=accelerator.num_processes, and wrap "
                "the loader in a PrefetchLoader, which prepare leaves as it is: PrefetchLoader("
                "StatefulDataLoader(dataset, batch_size=None, collate_fn=dataset.as_is), "
                "device=accelerator.device)"
            )
        raise AttributeError(
            "a PackedIterableDataset has no set_epoch; its order is the source's: call set_epoch "
            "there"
        )

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest pass, after the last batch that it has given out.

        The window began after ``num_read`` examples of the source (``source`` is its own state
        there, or None) and ``start`` tokens of the next; ``num_batches`` is counted from there. It
        also holds ``version`` and the settings that must be the same.
        """
        if self._saved is not None:
            return copy.deepcopy(dict(self._saved))
        position = self._position or _Position(epoch=self._stream.epoch)
        settings = self._settings() | {"epoch": position.epoch}
        counts = {**position.place._asdict(), "num_batches": position.num_batches}
        return copy.deepcopy({"version": _VERSION, **settings, **counts})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` goes on where ``state`` was taken.

        Raises:
            StateError: the state does not fit; the message says what differs, nothing has changed.
        """
        self._position_of(state)
        self._saved = copy.deepcopy(dict(state))

    def _settings(self) -> dict[str, Any]:
        """All that shapes batches; a state must have the same."""
        worker, collator = get_worker_info(), self.collator
        rank, world_size = self._stream.node
        return {
            "buffer_size": self.buffer_size,
            "rows_per_batch": self.rows_per_batch,
            **collator.packing.as_state(),
            "fixed_width": collator.fixed_width,
            "pad_token_id": collator.pad_token_id,
            "normalize_loss": collator.normalize_loss,
            "model_inputs": collator.model_inputs,
            "train_all": collator.train_all,
            "fields": ", ".join(f"{name}: {spec}" for name, spec in collator.fields.items()),
            "rank": rank,
            "world_size": world_size,
            "num_workers": 0 if worker is None else worker.num_workers,
            "worker": 0 if worker is None else worker.id,
            "presharded": self.presharded,
            "epoch": self._stream.epoch,
        }

    def _position_of(self, state: Mapping[str, Any]) -> _Position:
        version = state.get("version") if isinstance(state, Mapping) else None
        if not is_same(version, _VERSION):
            raise StateError(
                f"the state has version {version!r}, this one reads version {_VERSION}; pass what "
                "state_dict() of a PackedIterableDataset gave, in the same version of the library"
            )
        settings = self._settings()
        if missing := sorted(settings.keys() - state.keys()):
            raise StateError(f"the state has no {', '.join(missing)}; it is damaged")
        for name, expected in settings.items():
            if not is_same(state[name], expected):
                raise StateError(
                    f"the state is of {name}={state[name]!r}, the dataset has "
                    f"{name}={expected!r}; resume with the settings it was saved with"
                )
        counts = [state.get(name) for name in ("num_read", "start", "num_batches")]
        if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts):
            raise StateError(
                f"the state's num_read, start, num_batches are {counts}; it is damaged"
            )
        self._check_start(state["start"])
        place = Place(state["num_read"], state["start"], state.get("source"))
        return _Position(place, state["num_batches"])

    def _check_start(self, start: int) -> None:
        packing = self.collator.packing
        overflow, capacity = packing.overflow, packing.capacity - packing.reserved
        if start and overflow != "split":
            raise StateError(
                f"the state's start is {start}, within an example, but with overflow={overflow!r} "
                "none is split; it is damaged"
            )
        if start % capacity:
            raise StateError(
                f"the state's start is {start}, but pieces of examples begin every {capacity} "
                "tokens; it is damaged"
            )

    def _batches(self, position: _Position) -> Iterator[Batch | dict[str, Any]]:
        reader = reader_of(self._stream, position.place)
        packing = self.collator.packing
        windows = Windows(
            reader.read,
            packing,
            rows_per_batch=self.rows_per_batch,
            buffer_size=self.buffer_size,
            # sequential rows stay in order, so none of them can wait
            num_buffers=1 if packing.strategy == "sequential" else _NUM_BUFFERS,
        )
        batches = iter(windows)
        for num_skipped in range(position.num_batches):
            if next(batches, (None, position.place))[1] is not None:  # the window ends
                raise StateError(
                    f"the state is {position.num_batches} batches after example "
                    f"{position.place.num_read} of the stream, where at most {num_skipped + 1} "
                    "follow now; the source is not what it was when the state was saved"
                )
        for planned, next_window in batches:
            batch = self._collate(reader, planned)
            position.num_batches += 1
            if next_window is not None:
                position.place, position.num_batches = next_window, 0
            del planned  # its entries would be held beside the next buffer
            yield batch  # when the consumer gets it, the position is after it

    def _collate(self, reader: Reader, planned: PlannedEntries) -> Batch | dict[str, Any]:
        try:
            examples = reader.examples(planned.entries)
            batch: Batch | dict[str, Any] = self.collator(PlannedExamples(planned.plan, examples))
            return batch
        except DataError as error:
            raise at_positions(error, planned.entries["position"].tolist()) from error
