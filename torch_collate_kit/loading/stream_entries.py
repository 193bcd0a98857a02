"""Entries of a stream: its examples, or the pieces of those that are split, one by one.

Nothing is cut here: the collator takes those tokens of an example that the plan names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.orders import seeded_generator
from torch_collate_kit.loading.shards import Example
from torch_collate_kit.loading.skipping import Skipped, SkipPolicy, named
from torch_collate_kit.loading.states import Place
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.atoms import Atoms, image_sizes
from torch_collate_kit.packing.planner import fitted
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.trees import depths_of
from torch_collate_kit.reading.keys import KNOWN, MEDIA
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import are_nested

_NO_DEPTHS = np.zeros(0, dtype=np.int64)


class Entry(NamedTuple):
    """An example of a stream, or a piece of one."""

    example: Any  # the whole of it
    position: int  # of the example in the source
    num_tokens: int
    place: Place  # after it
    start: int = 0  # its first token in the example
    is_piece: bool = False
    patches: Sequence[int] = ()  # of its images
    segments: Sequence[int] | None = None  # tokens of each, if it is a list of segments
    depths: np.ndarray = _NO_DEPTHS  # tokens that each segment shares, if prefixes are shared
    where: str = "the stream"  # where positions count, in the words of an error message
    skipped: tuple[Skipped, ...] = ()  # wrong examples that were left out before it
    source: int = 0  # its number in a mixture


class LeftOut:
    """The wrong examples that are left out where a shard is read, until an entry carries them.

    ``where`` is where their positions count, and ``shard`` the name of the shard: both may be "the
    stream" or "shard 3 of the stream".
    """

    def __init__(self, policy: SkipPolicy, where: str, shard: str = "") -> None:
        self._policy, self.where, self.shard = policy, where, shard
        self.skipped: list[Skipped] = []

    def add(self, error: DataError, position: int) -> None:
        """Leave out an example; DataError: it may not be, or too many were one after the other."""
        skipped = Skipped(position, str(named(error, [(position, self.where)])))
        if not self._policy.skips:
            raise DataError(skipped.reason) from error
        self.skipped.append(skipped)
        self._policy.check_in_a_row(len(self.skipped), skipped)

    def take(self) -> tuple[Skipped, ...]:
        """Return those that were left out since the last call."""
        taken, self.skipped = tuple(self.skipped), []
        return taken


def atoms_of(entries: Sequence[Entry], packing: PackingOptions) -> Atoms:
    """Return what is planned of entries; DataError if only some are lists of segments."""
    lengths, offsets, depths = [entry.num_tokens for entry in entries], None, None
    are_lists = [entry.segments is not None for entry in entries]
    if any(are_lists):
        if not all(are_lists):
            flat, nested = (entries[are_lists.index(kind)].position for kind in (False, True))
            raise DataError(
                f"example {nested} of the stream is a list of segments, and example {flat} is not; "
                "give every example a list, of one where it has one segment"
            )
        segments = [entry.segments or () for entry in entries]
        lengths, offsets = [*chain(*segments)], running_sum(np.array([*map(len, segments)]))
        if packing.share_prefixes:
            depths = np.concatenate([entry.depths for entry in entries])
    patches: Any = np.zeros(len(entries), dtype=np.int64)
    if any(entry.patches for entry in entries):
        patches = [entry.patches for entry in entries]
    tokens = np.array(lengths, dtype=np.int64)
    atoms = Atoms.of(tokens, offsets, packing, patches, depths=depths)
    if packing.overflow != "split":
        return atoms
    return replace(atoms, starts=np.array([entry.start for entry in entries], dtype=np.int64))


def read_entries(
    examples: Iterable[tuple[Example, int, Place]],
    place: Place,
    collator: PackedCollator,
    left_out: LeftOut,
) -> Iterator[Entry]:
    """Yield the entries of ``examples``, which come after ``place``.

    Raises:
        DataError: an example cannot be packed; names its position in the stream.
        StateError: the place is within an example that is shorter.
    """
    packing, where = collator.packing, left_out.where
    longest = packing.capacity - packing.reserved
    if packing.strategy == "wrapped":  # documents are cut anywhere
        longest = 2**63 - 1
    for example, position, after in examples:
        try:
            if isinstance(example, DataError):
                raise example
            num_tokens, patches, segments, depths = _measured(example, collator, longest)
            entry = Entry(
                example, position, num_tokens, after, 0, False, patches, segments, depths, where
            )
            pieces = [entry]
            if num_tokens > longest or entry.patches or entry.segments is not None:
                pieces = _fitted(entry, place, collator)
        except DataError as error:
            left_out.add(error, position)
            place = after
            continue
        check_start(place, position, num_tokens)
        for piece in pieces:
            if piece.start >= place.start:
                yield piece._replace(skipped=left_out.take()) if left_out.skipped else piece
        place = after
    check_start(place)


def _measured(
    example: Any, collator: PackedCollator, longest: int
) -> tuple[int, Sequence[int], Sequence[int] | None, np.ndarray]:
    """Return the tokens of an example, patches of its images, its segments, what these share."""
    try:
        ids: Any = example["input_ids"]
        num_tokens = len(ids)
    except (TypeError, LookupError):
        ids, num_tokens = (), 0
    if num_tokens and not _is_flat(ids) and are_nested([ids]):
        return _measured_segments(example, ids, collator)
    if not num_tokens or (collator.packing.overflow == "raise" and num_tokens > longest):
        _check(collator, [example])  # raises what is wrong with it besides its length
    patches = () if collator.vision is None else _patches(example, [example], collator)
    return num_tokens, patches, None, _NO_DEPTHS


def _is_flat(ids: Any) -> bool:
    """Return whether these are no lists of segments, as nearly always and in half the time."""
    if type(ids) is np.ndarray:
        return ids.ndim == 1 and not ids.dtype.hasobject
    return type(ids) is list and type(ids[0]) is int


def _measured_segments(
    example: Any, ids: Any, collator: PackedCollator
) -> tuple[int, Sequence[int], Sequence[int], np.ndarray]:
    media = [key for key in MEDIA if example.get(key) is not None]
    try:
        segments = [*map(len, ids)]
        parts = [{key: example[key][i] for key in media} for i in range(len(ids))]
    except (TypeError, LookupError):
        segments, parts = [0], []
    depths, arrays = _NO_DEPTHS, []
    shares = bool(collator.packing.share_prefixes)
    if shares:
        arrays = [np.asarray(segment) for segment in ids]
    if not all(segments) or any(ids.ndim != 1 or ids.dtype.kind not in "iu" for ids in arrays):
        _check(collator, [example])  # raises what is wrong with them
    if shares:
        offsets = running_sum(np.array(segments))
        depths = depths_of(np.concatenate(arrays), offsets, np.array([0, len(segments)]))
    patches = () if collator.vision is None else _patches(example, parts, collator)
    return sum(segments), patches, segments, depths


def _patches(example: Any, parts: list[Any], collator: PackedCollator) -> Sequence[int]:
    """Return the patches of each image of an example, whose segments are ``parts``."""
    assert collator.vision is not None
    try:
        patches = [number for part in parts for number in collator.vision.patches(part)]
        image_sizes([patches], 1, collator.packing.cost)  # checks them
        return patches
    except (TypeError, ValueError, LookupError, AttributeError):
        _check(collator, [example])  # raises what is wrong with its images
        raise


def _fitted(entry: Entry, before: Place, collator: PackedCollator) -> list[Entry]:
    """Return the pieces of an example that comes after ``before``. DataError if it is too long."""
    packing, total = collator.packing, entry.num_tokens
    pieces = fitted(atoms_of([entry], packing), packing)
    if packing.overflow != "split" or len(pieces.starts) < 2:
        return [entry]
    example = _as_arrays(entry.example, collator)
    return [
        entry._replace(
            example=example,
            num_tokens=length,
            place=entry.place if start + length == total else before._replace(start=start + length),
            start=start,
            is_piece=True,
        )
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
    ]


def _as_arrays(example: Any, collator: PackedCollator) -> Example:
    """Return a checked example without unknown keys, its lists as arrays for all pieces."""
    _check(collator, [example])
    known = {key: example[key] for key in (*KNOWN, *collator.fields) if key in example}
    return {k: np.asarray(v) if isinstance(v, list | tuple) else v for k, v in known.items()}


def _check(collator: PackedCollator, examples: Any) -> None:
    """Raise DataError if an example is wrong, however long."""
    options = {name: getattr(collator, name) for name in ("train_all", "fields", "vision")}
    read_columns(examples, targets=collator.targets, **options)


def check_start(place: Place, position: int = -1, num_tokens: int = 0) -> None:
    """Raise StateError unless the next example, at ``position``, reaches beyond the place."""
    if place.start and place.start >= num_tokens:
        if num_tokens:
            found = f"example {position} of the stream, which has {num_tokens}"
        else:
            found = f"an example after {place.num_read} of the stream, which ends there"
        raise StateError(
            f"the state is after token {place.start} of {found}; the source is not what it was "
            "when the state was saved"
        )


def shuffled_blocks(
    entries: Iterator[Entry], place: Place, *, block_size: int, words: tuple[int, ...]
) -> Iterator[Entry]:
    """Yield ``entries`` from ``place`` on, in blocks of ``block_size`` that are each shuffled.

    A sliding buffer depends on all that came before it, so its state would have to hold it. A block
    is read again from where it begins, so a place is that and the number of its entries given out.
    ``words`` and the place of a block seed its order. ``entries`` begin at the block of the place.
    """
    begin, num_given = place._replace(taken=0), place.taken
    while True:
        block = list(islice(entries, block_size))
        if num_given and num_given >= len(block):
            raise StateError(
                f"the state is after {num_given} examples of a shuffled block of {len(block)} that "
                f"begins after example {begin.num_read} of the stream; the source is not what it "
                "was when the state was saved"
            )
        if not block:
            return
        after = block[-1].place
        order = seeded_generator(*words, begin.num_read + 1, begin.start).permutation(len(block))
        rest = [block[i] for i in reversed(order.tolist()[num_given:])]
        block.clear()  # nothing here refers to an entry that was given out
        taken = num_given
        while rest:
            taken += 1
            yield rest.pop()._replace(place=begin._replace(taken=taken) if rest else after)
        begin, num_given = after, 0
