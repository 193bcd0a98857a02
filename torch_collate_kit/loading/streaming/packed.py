"""A stream of examples into packed batches, through a bounded buffer.

The stream is cut into windows of some eight buffers. Poor rows wait within a window, and all of it
is given out at its end, so the state is the place where the window began and the number of batches
given out since: no token, no list of what waits. The price: a resumed pass reads up to a window
again, and an example is packed some three times (5-30 us).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.sampler.arguments import checked_bool, checked_rank, is_same
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
    """Where a pass stands: where its window began, and the batches since."""

    place: Place = field(default_factory=Place)
    num_batches: int = 0
    epoch: int | None = None


class PackedIterableDataset(IterableDataset[Batch | dict[str, Any]]):
    """Pack a stream of examples into batches of ``rows_per_batch`` rows of ``max_tokens``.

    Args:
        source: any iterable of examples that can be iterated again (a list, ``datasets.Dataset``,
            ``datasets.IterableDataset``), or a callable that makes one, or that makes an iterator.
            A :class:`~torch_collate_kit.loading.TokenizedDataset`, and a ``datasets.Dataset``
            without a format whose columns one can hold, are read as columns: no Python object an
            example, and tokens are copied once, when their batch is made. Others go one by one.
        tokenizer: an int pad id, or anything with ``pad_token_id``.
        buffer_size: the most examples held at a time; of columns only where they lie, and, while
            they are checked, those of a buffer that are split. Rows are as full as those of packing
            all the data at once to within 1% at 1,000: 0.1% on real and long-tailed lengths, 0.8%
            on lengths spread evenly up to ``max_tokens`` (two a row; 1.7% at 250, 0.1% at 4,000).
        rows_per_batch: rows of a batch, a multiple of ``parallel.dp``. The last batch of a pass has
            fewer, and so has one of a buffer whose examples fill fewer.
        rank, world_size: which part of the stream is read, without collectives.
        presharded: the source itself gives every rank and worker other examples; split nothing.
        collator_options: what else :class:`PackedCollator` takes: ``max_tokens`` and the other
            options of packing (or ``packing=``), ``normalize_loss``, ``train_all`` and so on.

    One ``iter()`` is one pass. A batch is what ``PackedCollator`` makes of its examples in stream
    order, ``row_metadata["example_indices"]`` counts within them; load it with
    ``DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)``. Rows leave a buffer in the
    stream order of their longest example; poor rows are packed again with what comes, at most until
    the end of a window of eight buffers (``strategy="sequential"``: never). With
    ``overflow="split"`` a piece counts as an example; ``row_metadata["example_starts"]``, and
    ``"cut"`` and ``"num_cut"`` of ``metadata``, say which are pieces. With "drop" an over-long one
    is counted in the first batch of its buffer, if need be in a dummy row.

    **Sharding.** Example ``i`` goes to shard ``i % (world_size * num_workers)``, shard
    ``rank * num_workers + worker``. ``datasets.IterableDataset`` divides its own shards over
    DataLoader workers, so it is divided over the ranks only, or not at all if it comes from
    ``split_dataset_by_node``. A callable that iterates such a source inside is ``presharded``.
    Every example is given out once, so long as all ranks have as many workers. Ranks may differ in
    their number of batches by the tail: stop all of them at the same number of steps, or agree on
    the end with an all-reduce; nothing is dropped or repeated here. ``accelerator.prepare`` of a
    DataLoader of it would divide again, and is refused: pass ``rank`` and ``world_size``, and wrap
    the loader in a :class:`~torch_collate_kit.loading.PrefetchLoader`.

    **State.** ``state_dict()`` is small JSON: where a window began in the stream, batches given out
    since, and the settings it fits. The price: a resumed pass reads and packs the window again as
    far as it was given out. That is up to eight buffers, nine where ``rows_per_batch`` rows are a
    large part of one: 8,000 examples and 0.2 s of packing at ``buffer_size=1000``. A source with
    ``state_dict`` and ``load_state_dict`` goes to the window's beginning by itself, any other is
    read and skipped; so is a ``datasets`` stream with a shuffle buffer, whose state loses the
    buffer, or with a step of a kind that is not known to be put back exactly. A
    state is of the newest ``iter()``; the next ``iter()`` goes on there to the end of the pass.
    With DataLoader workers take the state from a torchdata StatefulDataLoader: it is the workers'
    copies of the dataset that move, not this one.

    Raises:
        DataError: an example is wrong, or too long with ``overflow="raise"``; names its position in
            the stream. It is raised when its buffer is filled or its batch is made.
        StateError: a state of other settings, or of a longer stream or example.
        ValueError, TypeError: a setting is wrong.

    >>> examples = [{"input_ids": [7] * n} for n in (3, 2, 4, 1, 5)]
    >>> dataset = PackedIterableDataset(examples, tokenizer=0, max_tokens=6, buffer_size=5)
    >>> batches = iter(dataset)
    >>> next(batches)["sub_seq_lengths"].tolist(), dataset.state_dict()["num_batches"]
    ([[4, 2]], 1)
    >>> resumed = PackedIterableDataset(examples, tokenizer=0, max_tokens=6, buffer_size=5)
    >>> resumed.load_state_dict(dataset.state_dict())
    >>> [batch["sub_seq_lengths"].tolist() for batch in resumed]
    [[[3]], [[5, 1]]]
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
            source, self.rank, self.world_size, presharded=presharded, collator=self.collator
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
        """Where the newest pass stands: the next batch is the first one after it.

        The window began after ``num_read`` examples of the source (``source`` is its own state
        there, or None) and ``start`` tokens of the next one; ``num_batches`` batches were given out
        since. Besides, ``version`` and the settings that a dataset must share to load it.
        """
        if self._saved is not None:
            return copy.deepcopy(dict(self._saved))
        position = self._position or _Position(epoch=self._stream.epoch)
        settings = self._settings() | {"epoch": position.epoch}
        counts = {**position.place._asdict(), "num_batches": position.num_batches}
        return copy.deepcopy({"version": _VERSION, **settings, **counts})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state`` was taken.

        Raises:
            StateError: it does not fit, says what differs; nothing has been changed.
        """
        self._position_of(state)
        self._saved = copy.deepcopy(dict(state))

    def _settings(self) -> dict[str, Any]:
        """What a state must share with the dataset it is loaded into: all that shapes batches."""
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
        overflow, capacity = self.collator.packing.overflow, self.collator.packing.capacity
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
            del planned  # or its entries would be held on top of the next buffer
            yield batch  # the position is behind it when the consumer gets it

    def _collate(self, reader: Reader, planned: PlannedEntries) -> Batch | dict[str, Any]:
        try:
            examples = reader.examples(planned.entries)
            batch: Batch | dict[str, Any] = self.collator(PlannedExamples(planned.plan, examples))
            return batch
        except DataError as error:
            raise at_positions(error, planned.entries["position"].tolist()) from error
