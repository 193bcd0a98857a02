"""A reader in shuffled order: blocks of entries of another reader, each shuffled in itself.

A sliding buffer depends on all that came before it, so its state would have to hold it. A block is
read again from where it begins, so a place is that and the number of its entries given out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.order import seeded_generator
from torch_collate_kit.loading.streaming.entries import ENTRY, place_after
from torch_collate_kit.loading.streaming.readers import Reader
from torch_collate_kit.loading.streaming.states import Place


class ShuffledReader:
    """Reads what ``reader`` reads from ``place`` on, in blocks of ``block_size`` shuffled entries.

    ``words`` and the place of a block seed its order, so it is the same whenever it is read.
    ``reader`` begins at the block of the place.
    """

    def __init__(
        self, reader: Reader, place: Place, *, block_size: int, words: tuple[int, ...]
    ) -> None:
        self._reader, self._block_size, self._words = reader, block_size, words
        self._next, self._num_given = place._replace(taken=0), place.taken
        self._block = np.empty(0, dtype=ENTRY)

    @property
    def place(self) -> Place:
        """The place after all that was read."""
        return self._reader.place

    def examples(self, entries: np.ndarray, *, as_rows: bool = False) -> Any:
        """Return the examples of entries, for a collator."""
        return self._reader.examples(entries, as_rows=as_rows)

    def read(self, num_entries: int) -> np.ndarray:
        """Return the next entries, ENTRY [num_entries]; fewer only at the end of the stream."""
        parts = [np.empty(0, dtype=ENTRY)]
        while num_entries and (len(self._block) or self._begin_block()):
            parts.append(self._block[:num_entries])
            # a copy: a view would hold the examples that were given out
            self._block = self._block[num_entries:].copy()
            num_entries -= len(parts[-1])
        return np.concatenate(parts)

    def _begin_block(self) -> bool:
        """Read the next block, and return whether there is one."""
        begin, num_given = self._next, self._num_given
        block = self._reader.read(self._block_size)
        if num_given and num_given >= len(block):
            raise StateError(
                f"the state is after {num_given} examples of a shuffled block of {len(block)} that "
                f"begins after example {begin.num_read} of the stream; the source is not what it "
                "was when the state was saved"
            )
        if not len(block):
            return False
        self._next, self._num_given = place_after(block[-1]), 0
        generator = seeded_generator(*self._words, begin.num_read + 1, begin.start)
        block = block[generator.permutation(len(block))]
        _set_places(block[:-1], begin)
        _set_places(block[-1:], self._next)
        block["taken"][:-1] = np.arange(1, len(block))
        self._block = block[num_given:].copy()
        return True


def _set_places(entries: np.ndarray, place: Place) -> None:
    entries["num_read"], entries["next_start"] = place.num_read, place.start
    for i in range(len(entries)):  # assigned as a whole, a list would be taken for an array
        entries["source"][i] = place.source
    entries["taken"] = 0
