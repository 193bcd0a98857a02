"""A stream of examples into packed batches, through a bounded buffer.

The stream is cut into windows of eight buffers, and a window is given out completely before the
next begins. So the state is the place where the window began and the number of batches since: no
tokens, no list of what waits. The cost: a resumed pass reads up to a window again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torch_collate_kit._checks import checked_bool, checked_int, checked_optional_int
from torch_collate_kit._reprs import Shown, call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.collators.packed import changed_options
from torch_collate_kit.loading.sampler.checks import checked_rank
from torch_collate_kit.loading.skipping import SkipPolicy
from torch_collate_kit.loading.streaming.shard_batches import DividedStream, ShardBatches, Turn
from torch_collate_kit.loading.streaming.shards import ExampleSource, Stream
from torch_collate_kit.loading.streaming.states import Position

__all__ = ["PackedIterableDataset"]


@dataclass
class _Pass:
    """How far a pass is, in each shard of this process."""

    positions: dict[int, Position]
    epoch: int | None  # of the source


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
        num_shards: divides the stream into as many shards, whatever ``world_size``, which must
            divide it: a saved run can go on with another number of ranks and workers.
        on_error: "raise", or "skip" to leave out examples that raise a DataError alone. Of a shard
            at most ``max_skipped``, and ``max_skipped_in_a_row`` one after the other, but not all.
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
        num_shards: int | None = None,
        on_error: str = "raise",
        max_skipped: int = 100,
        max_skipped_in_a_row: int = 10,
        **collator_options: Any,
    ) -> None:
        self.collator = PackedCollator(tokenizer, **collator_options)
        self.buffer_size = checked_int("buffer_size", buffer_size, hint="1000 packs well")
        self.rows_per_batch = checked_int("rows_per_batch", rows_per_batch)
        self.world_size = checked_int("world_size", world_size, hint="1 means one rank")
        self.rank = checked_rank(rank, self.world_size)
        self.presharded = checked_bool("presharded", presharded)
        self.on_error, self.max_skipped = on_error, max_skipped
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self._policy = SkipPolicy(on_error, max_skipped, max_skipped_in_a_row)
        hint = "None makes every worker of every rank a shard"
        self.num_shards = checked_optional_int("num_shards", num_shards, hint=hint)
        self._stream = Stream(
            source,
            self.rank,
            self.world_size,
            presharded=presharded,
            collator=self.collator,
            num_shards=self.num_shards,
        )
        self._saved: Mapping[str, Any] | None = None
        self._pass: _Pass | None = None
        self._check_rows()

    def __iter__(self) -> Iterator[Batch | dict[str, Any]]:
        own = self._own_shards()
        current = _Pass(own.start(), self._stream.epoch)
        self._saved, self._pass = None, current
        return _given_out(own.turns(current.positions, current.epoch), current)

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
                "DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is), "
                "device=accelerator.device)"
            )
        raise AttributeError(
            "a PackedIterableDataset has no set_epoch; its order is the source's: call set_epoch "
            "there"
        )

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest pass, after the last batch that it has given out.

        The window began after ``num_read`` examples of the source (``source`` is its own state
        there, or None) and ``start`` tokens of the next; ``num_batches`` is counted from there.
        With ``num_shards`` the state has these numbers for each shard of this rank. It also holds
        ``version``, the settings that must be the same, and a ``fingerprint`` of the data where
        these can be read without consuming them.
        """
        if self._saved is not None and self.num_shards is None:
            return copy.deepcopy(dict(self._saved))
        own = self._own_shards()
        if self._saved is None and self._pass is not None:
            return own.state_at(self._pass.positions, self._pass.epoch)
        return own.state_at(own.start(), self._stream.epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` goes on where ``state`` was taken.

        With ``num_shards`` a state has all shards that this rank reads: it is that of the same
        rank of as many, or what ``merge_states`` made of the states of all ranks.

        Raises:
            StateError: the state does not fit; the message says what differs, nothing has changed.
        """
        self._own_shards().positions_in(state)
        self._saved = copy.deepcopy(dict(state))

    def _check_rows(self) -> None:
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

    def _own_shards(self) -> DividedStream:
        """The shards of this process: of a rank, or of one of its workers."""
        worker = get_worker_info()
        if worker is None:
            return self._divided(0, 0)
        return self._divided(worker.num_workers, worker.id)

    def _divided(self, num_workers: int, worker: int | None = None) -> DividedStream:
        """This rank's shards over the workers of a DataLoader; for PrefetchLoader."""
        read = partial(
            ShardBatches,
            self._stream,
            rows_per_batch=self.rows_per_batch,
            buffer_size=self.buffer_size,
            policy=self._policy,
        )
        settings = self._settings()
        return DividedStream(self._stream, read, settings, num_workers, worker, self._saved)

    def _settings(self) -> dict[str, Any]:
        """All that shapes batches, but for how the stream is divided."""
        collator = self.collator
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
        }


def _given_out(turns: Iterator[Turn], current: _Pass) -> Iterator[Batch | dict[str, Any]]:
    for turn in turns:
        if turn.shard is not None and turn.after is not None:
            current.positions[turn.shard] = turn.after
        if turn.has_batch:
            yield turn.batch  # when the consumer gets it, the position is after it
        del turn  # its batch would be held beside the next
