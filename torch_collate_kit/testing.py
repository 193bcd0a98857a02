"""Tools to test your own loader: digests of batches, and resuming at every step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.ragged import Ragged

__all__ = ["assert_exact_resume", "batch_digest"]


def batch_digest(batch: Any) -> str:
    """A hash of everything in a batch: equal for batches that are equal to the last byte.

    Accepts a Batch (what it stores, and its metadata), tensors, arrays, Ragged, numbers, strings,
    None, and mappings, lists, tuples and dataclasses of these. Dtypes, shapes and the kind of a
    sequence count; the order of keys does not.

    Raises:
        TypeError: the batch contains something else.

    >>> batch_digest({"a": torch.tensor([1])}) == batch_digest({"a": torch.tensor([1])})
    True
    >>> batch_digest(torch.tensor([1])) == batch_digest(torch.tensor([1], dtype=torch.int32))
    False
    """
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(batch):
        # its length too, so that parts cannot be confused when joined
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """The bytes of a value: its kind, then its contents."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        cells = value.detach().cpu().contiguous().reshape(-1)
        yield cells.view(torch.uint8).numpy().tobytes() if len(cells) else b""
    elif isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            raise TypeError(f"batch_digest of an array of {value.dtype}: its bytes are addresses")
        yield f"array {value.dtype.str} {list(value.shape)}".encode()
        yield value.tobytes()
    elif isinstance(value, Ragged):
        yield b"ragged"
        yield from _parts(value.lengths)
        yield from _parts(value.flat_values)
    elif isinstance(value, Batch):
        yield f"batch {len(value)}".encode()
        yield from _parts(value.contents())
        yield from _parts(value.row_metadata)
        yield from _parts(value.metadata)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield type(value).__name__.encode()
        for field in dataclasses.fields(value):
            yield field.name.encode()
            yield from _parts(getattr(value, field.name))
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        raise TypeError(
            f"batch_digest of a {type(value).__name__}; it knows Batch, Ragged, tensors, arrays, "
            "numbers, strings, None, and mappings, lists, tuples and dataclasses of these"
        )


def assert_exact_resume(
    make: Callable[[], Any],
    *,
    num_steps: int,
    stops: Iterable[int] | None = None,
    max_state_bytes: int = 16_384,
) -> list[str]:
    """Stop at every step, load the state into a new object, and compare all later batches.

    Every state is converted to JSON and back. A run that saves its state at every step is compared
    with one that does not, because saving must have no side effects.

    Args:
        make: creates the object, the same one each time: a loader, an iterable dataset or a
            sampler. It is iterable (one ``iter()`` is an epoch), has ``state_dict`` (samplers of
            this package also ``state_at``) and ``load_state_dict``, and may have ``close``.
        num_steps: number of batches to compare, over as many epochs as needed.
        stops: numbers of batches after which to stop; by default 0, 1, ... ``num_steps`` - 1.
        max_state_bytes: the largest size of a state as JSON.

    Returns:
        The digest of every batch, in order.

    Raises:
        AssertionError: a batch differs, an epoch begins at another batch, there are fewer than
            ``num_steps`` batches, or a state is too large or not JSON.

    >>> from torch_collate_kit.loading.sampler import PrefetchingSampler
    >>> len(assert_exact_resume(lambda: PrefetchingSampler(10, 4, seed=1), num_steps=7))
    7
    """
    expected = _digests(make, num_steps)
    states: list[str] = []

    def save(state: dict[str, Any]) -> None:
        states.append(_as_json(state, after=len(states), max_bytes=max_state_bytes))

    _compare(_digests(make, num_steps, save=save), expected, "the run that saves at every step")
    for stop in range(num_steps) if stops is None else stops:
        found = _digests(make, num_steps - stop, state=json.loads(states[stop]))
        _compare(found, expected[stop:], f"resumed after {stop} of {num_steps} batches", stop)
    return [digest for digest, _ in expected]


def _digests(
    make: Callable[[], Any],
    num_steps: int,
    *,
    state: dict[str, Any] | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> list[tuple[str, bool]]:
    """The digest of each of the next batches, and whether it is the first of its iter()."""
    found: list[tuple[str, bool]] = []
    source = make()
    with closing(source) if hasattr(source, "close") else nullcontext():
        if state is not None:
            source.load_state_dict(state)
        if save is not None:
            save(source.state_dict())
        num_empty = 0
        while len(found) < num_steps and num_empty < 2:
            before = len(found)
            state_after = _state_after(source)
            for batch in source:
                found.append((batch_digest(batch), len(found) == before))
                if save is not None:
                    save(state_after(len(found) - before))
                if len(found) == num_steps:
                    break
            num_empty = num_empty + 1 if len(found) == before else 0
    assert len(found) == num_steps, f"asked for {num_steps} batches, the source has {len(found)}"
    return found


def _state_after(source: Any) -> Callable[[int], dict[str, Any]]:
    """The state after a number of batches of the next iter(), which samplers do not count."""
    if not hasattr(source, "state_at"):
        return lambda num_taken: source.state_dict()
    epoch, step = source.epoch, source.state_dict()["step"]
    return lambda num_taken: source.state_at(epoch, step + num_taken)


def _as_json(state: dict[str, Any], *, after: int, max_bytes: int) -> str:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the state after {after} batches is not JSON: {error}") from error
    assert len(text) <= max_bytes, (
        f"the state after {after} batches has {len(text)} bytes as JSON, more than "
        f"max_state_bytes={max_bytes}; a state is a position, not the data there"
    )
    return text


def _compare(
    found: list[tuple[str, bool]], expected: list[tuple[str, bool]], run: str, first: int = 0
) -> None:
    for i, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        assert mine[0] == wanted[0], f"{run}: batch {first + i} differs"
        # the first batch after a resume is the first of its iter() in any case
        assert mine[1] == wanted[1] or i == 0, (
            f"{run}: an epoch begins at another batch, {first + i}"
        )
