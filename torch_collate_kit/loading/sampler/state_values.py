"""What states hold besides positions: counts and pairs, digests, and many ints as a text."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.arguments import MAX_WORD, Indices

_BLOCK, _MAX_THREADS = 2**22, 8


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


def is_same(found: Any, expected: Any) -> bool:
    """Whether an entry of a state is the expected JSON value, of the same types all through.

    >>> is_same([1, "a"], [1, "a"]), is_same(True, 1), is_same(np.arange(2), 1)
    (True, False, False)
    """
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        same_keys = found.keys() == expected.keys()
        return same_keys and all(is_same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return bool(found == expected)


def told_apart(these: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """What both have and is not the same, as these have it."""
    told = []
    for key in [key for key in these if key in others]:
        mine, other = these[key], others[key]
        if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
            told += [f"{k}={v!r}" for k, v in mine.items() if not is_same(v, other[k])]
        elif not is_same(mine, other):
            told.append(f"{key}={mine!r}")
    return ", ".join(told)


def is_count(value: Any, most: int = MAX_WORD) -> bool:
    """Whether it is an int, and no bool, of 0 .. ``most``."""
    return type(value) is int and 0 <= value <= most


def are_pairs(value: Any) -> bool:
    """Whether it is a list of pairs, which are tuples where no JSON was between."""
    are = isinstance(value, list) and all(isinstance(at, list | tuple) for at in value)
    return are and all(len(at) == 2 for at in value)


def damaged_state(found: str) -> StateError:
    """The error of a state that no sampler gave."""
    return StateError(f"state has {found}; pass what state_dict() gave")


def state_int(name: str, value: Any) -> int:
    """``value`` when it is an int of 0 .. 2**32 - 1, else StateError."""
    if not is_count(value):
        raise damaged_state(f"{name}={value!r}, not an int between 0 and {MAX_WORD}")
    number: int = value
    return number


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
        planes = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).reshape(8, -1)
        numbers: list[Any] = np.array(planes.T, order="C").view("<i8").reshape(shape).tolist()
    except (ValueError, zlib.error) as error:
        raise damaged_state(f"{name}={text!r}, which cannot be read") from error
    return numbers
