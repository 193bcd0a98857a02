"""Tools to test your own loader: digests of batches, and a check that it resumes at every step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from operator import index
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.unpacking import unpack
from torch_collate_kit.packing import RankPlan
from torch_collate_kit.ragged import Ragged

__all__ = ["assert_exact_resume", "batch_digest"]

_END = object()


def batch_digest(batch: Any) -> str:
    """Hash everything in a batch: equal for batches that are equal to the last byte.

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
    """Yield the bytes of a value: its kind, then its contents."""
    kind, inside = type(value).__name__, value
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        cells = value.detach().cpu().contiguous().reshape(-1)
        yield cells.view(torch.uint8).numpy().tobytes() if len(cells) else b""
        return
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            raise TypeError(f"batch_digest of an array of {value.dtype}: its bytes are addresses")
        yield f"array {value.dtype.str} {list(value.shape)}".encode()
        yield value.tobytes()
        return
    if value is None or isinstance(value, (bool, int, float, str, bytes, range)):
        yield f"{kind} {value!r}".encode()
        return
    if isinstance(value, Ragged):
        inside = [value.lengths, value.values]
    elif isinstance(value, Batch):
        inside = [len(value), value.stored().contents(), value.row_metadata, value.metadata]
    elif isinstance(value, Mapping):
        kind, inside = "mapping", [[key, value[key]] for key in sorted(value, key=repr)]
    elif isinstance(value, RankPlan):  # whose rows follow from the rest
        inside = [{name: part for name, part in vars(value).items() if name != "rows"}]
    elif dataclasses.is_dataclass(value):
        inside = [[field.name, getattr(value, field.name)] for field in dataclasses.fields(value)]
    elif not isinstance(value, (list, tuple)):
        raise TypeError(
            f"batch_digest of a {kind}; pass a Batch, Ragged, tensors, arrays, numbers, strings, "
            "None, or mappings, lists, tuples and dataclasses of these"
        )
    yield f"{kind} {len(inside)}".encode()
    for item in inside:
        yield from _parts(item)


def assert_exact_resume(
    make: Callable[..., Any],
    *,
    num_steps: int,
    stops: Iterable[int] | None = None,
    max_state_bytes: int = 16_384,
    dp_sizes: Sequence[int] | None = None,
) -> list[str]:
    """Stop at every step, load the state into a new object, and compare all later batches.

    A run that saves at every step is compared with one that does not: saving must change nothing.

    Args:
        make: creates a loader, an iterable dataset or a sampler. It is iterable (one ``iter()`` is
            an epoch), has ``state_dict`` (samplers of this package also ``state_at``) and
            ``load_state_dict``, and may have ``close``.
        num_steps: number of batches to compare, over as many epochs as needed.
        stops: numbers of batches after which to stop; by default 0, 1, ... ``num_steps`` - 1.
        max_state_bytes: the largest size of a state as JSON.
        dp_sizes: numbers of ranks; then ``make(dp_rank, dp_size)`` creates one rank's object. A run
            of the first number resumes with each other one, and halfway with the first again. All
            ranks must have the same state; tokens of the examples and number of loss tokens of each
            step are compared.

    Returns the digest of every batch, with ``dp_sizes`` of every step. An AssertionError says what
    differs, or that a state is too large, not JSON or not that of all ranks.

    >>> from torch_collate_kit import PrefetchingSampler
    >>> len(assert_exact_resume(lambda: PrefetchingSampler(10, batch_size=4, seed=1), num_steps=7))
    7
    """
    run = partial(_run, make, num_steps)
    first, *others = dp_sizes or [0]
    expected, _ = run(first, saves=False)
    found, states = run(first)
    _compare(found, expected, "the run that saves at every step")
    for after, state in enumerate(states):
        assert len(state) <= max_state_bytes, (
            f"the state after {after} batches has {len(state)} bytes as JSON, more than "
            f"max_state_bytes={max_state_bytes}; a state is a position, not the data there"
        )
    for stop in range(num_steps) if stops is None else stops:
        name = f"resumed after {stop} of {num_steps} batches"
        if not dp_sizes:
            _compare(run(0, stop, states[stop], saves=False)[0], expected, name, stop)
        for dp_size in others:
            changed, back = f"{name}, {first} -> {dp_size} ranks", (stop + num_steps) // 2
            found, later = run(dp_size, stop, states[stop])
            _compare(found, expected, changed, stop)
            found, _ = run(first, back, later[back - stop])
            _compare(found, expected, f"{changed} -> {first} after {back}", back)
    return [digest for digest, _ in expected]


def _run(
    make: Any, num_steps: int, dp_size: int, done: int = 0, state: str = "", saves: bool = True
) -> tuple[list[tuple[str, bool]], list[str]]:
    """Return the steps after ``done``, each with whether it begins an epoch, and the states."""
    found: list[tuple[str, bool]] = []
    states: list[str] = []
    with ExitStack() as stack:
        ranks = [make(rank, dp_size) for rank in range(dp_size)] if dp_size else [make()]
        for rank in ranks:
            stack.callback(getattr(rank, "close", lambda: None))
            if state:
                rank.load_state_dict(json.loads(state))
        if saves:
            states.append(_as_json([rank.state_dict() for rank in ranks], done))
        num_empty, after = 0, done
        while after < num_steps and num_empty < 2:
            begin, states_after = after, [_state_after(rank) for rank in ranks]
            for parts in zip_longest(*map(iter, ranks), fillvalue=_END):
                ended = sum(part is _END for part in parts)
                assert not ended, f"{ended} of {len(ranks)} ranks end an epoch before the others"
                digest = _digest_of_step(parts) if dp_size else batch_digest(parts[0])
                found.append((digest, after == begin))
                after += 1
                if saves:
                    taken = [state_after(after - begin) for state_after in states_after]
                    states.append(_as_json(taken, after))
                if after == num_steps:
                    break
            num_empty = num_empty + 1 if after == begin else 0
    assert after == num_steps, f"asked for {num_steps} batches, the source has {after}"
    return found, states


def _state_after(source: Any) -> Callable[[int], dict[str, Any]]:
    """Return a function of a number of batches of the next iter(): the state after them."""
    if not hasattr(source, "state_at"):
        return lambda num_taken: source.state_dict()
    epoch, step = source.epoch, source.state_dict()["step"]
    return lambda num_taken: source.state_at(epoch, step + num_taken)


def _as_json(of_ranks: list[dict[str, Any]], after: int) -> str:
    """Return the state that all ranks have as JSON."""
    try:
        text, *others = {json.dumps(state, allow_nan=False) for state in of_ranks}
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the state after {after} batches is not JSON: {error}") from error
    assert not others, (
        f"after {after} steps the states of the {len(of_ranks)} ranks differ; a state that every "
        "rank can load is the same on all of them"
    )
    return text


def _compare(found: list[Any], expected: list[Any], run: str, first: int = 0) -> None:
    for i, (mine, wanted) in enumerate(zip(found, expected[first:], strict=True), first):
        assert mine[0] == wanted[0], f"{run}: batch {i} differs"
        # the first batch after a resume is the first of its iter() in any case
        assert i == first or mine[1] == wanted[1], f"{run}: an epoch begins at another batch, {i}"


def _digest_of_step(parts: Sequence[Any]) -> str:
    """Hash the examples of a step in any order, and its number of loss tokens."""
    if isinstance(parts[0], Batch):
        found = [part.metadata.get("num_loss_tokens") for part in parts]
        own = sum(int(part.row_metadata["num_trained"].values.sum()) for part in parts)
        assert None in found or sum(found) == own or set(found) == {own}, (
            f"the ranks have num_loss_tokens={found}, and their batches {own} in all"
        )
        texts = (ids for part in parts for ids in unpack(part["input_ids"], part) if len(ids))
        return batch_digest([sorted(map(batch_digest, texts)), own])
    counts = {getattr(part, "num_loss_tokens", None) for part in parts}
    assert len(counts) == 1, f"the ranks have num_loss_tokens={counts}"
    batches = [part.indices if isinstance(part, RankPlan) else part for part in parts]
    try:
        return batch_digest([sorted(index(i) for batch in batches for i in batch), *counts])
    except TypeError as error:
        raise TypeError(
            f"dp_sizes compares examples, which a {type(parts[0]).__name__} does not name; let "
            "make() return a loader of Batches, or a sampler of indices or plans"
        ) from error
