"""What a sampler's state holds besides its position, and how that is written as small JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.checks import (
    Indices,
    are_pairs,
    damaged_state,
    is_count,
    is_same,
)

__all__ = ["Growth", "Layouts", "digest_in_blocks", "digest_of", "ints_of_text", "text_of_ints"]

_MOST_LAYOUTS = 50  # about 30 bytes each in a state
_MAX_COUNT = 2**63 - 1
_MAX_UNPACKED = 2**21  # bytes of a text of ints: 131,071 reshuffles
_BLOCK, _MAX_THREADS = 2**22, 8  # counts hashed at a time, by so many threads
_Position: TypeAlias = tuple[int, int]


class Layouts:
    """The settings that may change from resume to resume, such as the number of ranks.

    An entry holds all settings from its position on; in a state, those that its step has changed.

    >>> layouts = Layouts([((0, 0), {"world_size": 8})])
    >>> layouts.change((0, 340), {"world_size": 6})
    >>> layouts.at((0, 339)), layouts.at((2, 0))
    ({'world_size': 8}, {'world_size': 6})
    >>> layouts.until((0, 400), max_bytes=100)
    [[0, 0, {'world_size': 8}], [0, 340, {'world_size': 6}]]
    """

    def __init__(self, entries: list[tuple[_Position, dict[str, Any]]]) -> None:
        self._entries = entries  # (position, settings from it on)

    @classmethod
    def of_state(cls, entries: Any, position: _Position, like: Mapping[str, Any]) -> Layouts:
        """From the entries of a state of this position, of settings ``like`` these.

        Raises:
            StateError: they are not that.
        """
        found: list[tuple[_Position, dict[str, Any]]] = []
        settings: dict[str, Any] = {}
        for entry in entries if isinstance(entries, list) else []:
            if not _is_entry(entry) or not entry[2].keys() <= like.keys():
                raise _damaged(entries)
            settings = {**settings, **entry[2]}
            num_ranks = settings.get("world_size", settings.get("dp"))
            is_whole = settings.keys() == like.keys()  # from the first entry on
            if not is_whole or not num_ranks or not is_count(num_ranks):
                raise _damaged(entries)
            found.append(((entry[0], entry[1]), settings))
        positions = [at for at, _ in found]
        if not positions or positions != sorted(set(positions)) or positions[-1] > position:
            raise _damaged(entries)
        return cls(found)

    def at(self, position: _Position) -> dict[str, Any]:
        """The settings of a step; StateError if they are no longer known."""
        first = self._entries[0][0]
        if position < first:
            raise StateError(
                f"the layout of epoch {position[0]} step {position[1]} is not known: a state keeps "
                f"the last {_MOST_LAYOUTS} changes of it at most, back to epoch {first[0]} step "
                f"{first[1]}; its examples are known without a rank"
            )
        return next(settings for at, settings in reversed(self._entries) if at <= position)

    def check(self, make: Callable[[dict[str, Any]], object]) -> None:
        """StateError for settings that ``make`` refuses."""
        for (epoch, step), settings in self._entries:
            try:
                make(settings)
            except (TypeError, ValueError, OverflowError) as error:
                raise damaged_state(
                    f"a layout of epoch {epoch} step {step} that no run can have had: {error}"
                ) from error

    def change(self, position: _Position, settings: Mapping[str, Any]) -> None:
        """These settings from ``position`` on, and nothing after."""
        self._entries = [entry for entry in self._entries if entry[0] < position]
        if not self._entries or not is_same(self._entries[-1][1], dict(settings)):
            self._entries = [*self._entries, (position, dict(settings))][-_MOST_LAYOUTS:]

    def until(self, position: _Position, *, max_bytes: int) -> list[list[Any]]:
        """The entries up to a position, for a state of it: as many of the last as fit, as JSON."""
        self.at(position)  # that it is known
        known = [entry for entry in self._entries if entry[0] <= position]
        while len(json.dumps(found := _as_changes(known))) > max_bytes and len(known) > 1:
            known = known[1:]
        return found


def _as_changes(known: list[tuple[_Position, dict[str, Any]]]) -> list[list[Any]]:
    entries: list[list[Any]] = []
    before: dict[str, Any] = {}
    for at, settings in known:
        changed = {
            k: v for k, v in settings.items() if k not in before or not is_same(v, before[k])
        }
        entries.append([*at, changed])
        before = settings
    return entries


def _is_entry(entry: Any) -> bool:
    """Whether it is [epoch, step, settings]."""
    if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not isinstance(entry[2], dict):
        return False
    return all(map(is_count, entry[:2]))


def _damaged(entries: Any) -> StateError:
    return damaged_state(
        f"layouts={entries!r}, not a list of [epoch, step, settings] in order, none after its "
        "position"
    )


class Growth:
    """The number of examples by epoch: more from some epochs on.

    >>> growth = Growth([(0, 100)]).to(120, from_epoch=3)
    >>> growth.at(2), growth.at(3), growth.before(4), growth.as_state()
    (100, 120, 420, [[0, 100], [3, 120]])
    """

    def __init__(self, changes: list[tuple[int, int]]) -> None:
        self._changes = changes  # (epoch, examples from it on)

    @classmethod
    def of_state(cls, changes: Any) -> Growth:
        """From what ``as_state`` gave; StateError if it is anything else."""
        numbers = [n for at in changes for n in at] if are_pairs(changes) else []
        epochs, sizes = numbers[::2], numbers[1::2]
        are_counts = numbers and all(is_count(n, _MAX_COUNT) for n in numbers)
        is_rising = are_counts and epochs == sorted(set(epochs)) and sizes == sorted(sizes)
        if not is_rising or epochs[0] != 0 or sizes[0] < 1:
            raise damaged_state(
                f"num_examples={changes!r}, not a list of [epoch, examples from it on]"
            )
        return cls(list(zip(epochs, sizes, strict=True)))

    def to(self, num_examples: int, *, from_epoch: int) -> Growth:
        """With so many examples from an epoch on, in place of changes to come."""
        if num_examples == self.last:
            return self
        before = [change for change in self._changes if change[0] < from_epoch]
        return Growth([*before, (from_epoch, num_examples)])

    @property
    def last(self) -> int:
        """What there is now."""
        return self._changes[-1][1]

    def at(self, epoch: int) -> int:
        """Examples of an epoch."""
        return next(n for first, n in reversed(self._changes) if first <= epoch)

    def before(self, epoch: int) -> int:
        """Examples of all epochs before one."""
        starts = [min(first, epoch) for first, _ in self._changes] + [epoch]
        sizes = [n for _, n in self._changes]
        return sum(n * (b - a) for n, a, b in zip(sizes, starts, starts[1:], strict=False))

    def as_state(self) -> list[list[int]]:
        """All changes, those to come as well: [epoch, examples from it on]."""
        return [list(change) for change in self._changes]


def digest_of(counts: Sequence[Indices]) -> str:
    """A digest of counts per example, such as lengths, by which a state tells them from others."""
    found = hashlib.blake2b(digest_size=16)
    for of_source in counts:
        found.update(np.ascontiguousarray(of_source, dtype="<i8").data)
    return found.hexdigest()


def digest_in_blocks(counts: Indices) -> str:
    """A digest of very many counts: threads hash a block of them each, 0.6 s per 1e8 and core.

    >>> digest_in_blocks(np.arange(3)) == digest_in_blocks(np.array([0, 2, 1]))
    False
    """
    counts = np.ascontiguousarray(counts, dtype="<i8")
    blocks = [counts[i : i + _BLOCK].data for i in range(0, len(counts), _BLOCK)]
    with ThreadPoolExecutor(_MAX_THREADS) as threads:  # hashlib releases the GIL
        digests = threads.map(lambda block: hashlib.sha256(block).digest(), blocks)
        return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def text_of_ints(numbers: npt.ArrayLike) -> str:
    """Many ints of 64 bits as a short text: about a byte each where they are small.

    >>> text = text_of_ints([[0, n] for n in range(-500, 500)])
    >>> len(text) < 2000, ints_of_text("numbers", text, shape=(-1, 2))[1]
    (True, [0, -499])
    """
    planes = np.array(numbers, dtype="<i8").view(np.uint8).reshape(-1, 8).T
    return base64.b85encode(zlib.compress(planes.tobytes(), 9)).decode()


def ints_of_text(name: str, text: str, *, shape: tuple[int, ...]) -> list[Any]:
    """The numbers of ``text_of_ints``, else StateError."""
    try:
        reader = zlib.decompressobj()
        unpacked = reader.decompress(base64.b85decode(text), _MAX_UNPACKED)
        if len(unpacked) == _MAX_UNPACKED:
            raise damaged_state(f"{name}, a text that unpacks to {_MAX_UNPACKED} bytes or more")
        if not reader.eof:
            raise ValueError("the text ends early")
        planes = np.frombuffer(unpacked, np.uint8).reshape(8, -1)
        numbers: list[Any] = np.array(planes.T, order="C").view("<i8").reshape(shape).tolist()
    except (ValueError, zlib.error) as error:
        raise damaged_state(f"{name}={text[:80]!r}, which cannot be read") from error
    return numbers
