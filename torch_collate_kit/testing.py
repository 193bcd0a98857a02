"""Tools to test your own loader: digests of batches, and a check that it resumes at every step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.unpacking import cells_of_every_example, shares_prefixes, unpack
from torch_collate_kit.packing import RankPlan
from torch_collate_kit.ragged import Ragged

__all__ = ["assert_exact_resume", "batch_digest"]

_END = object()
_ROW_FIELDS = ("input_ids", "position_ids", "labels", "loss_mask")

# The digest of each step, and whether it begins an epoch; states as JSON
_Found: TypeAlias = tuple[list[tuple[str, bool]], list[str]]


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
        inside = [{name: of for name, of in vars(value).items() if name != "rows"}]
    elif dataclasses.is_dataclass(value):
        inside = [[field.name, getattr(value, field.name)] for field in dataclasses.fields(value)]
    elif not isinstance(value, (list, tuple)):
        raise TypeError(
            f"batch_digest of a {kind}; it knows Batch, Ragged, tensors, arrays, numbers, "
            "strings, None, and mappings, lists, tuples and dataclasses of these"
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
    same_rows: bool = False,
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
        dp_sizes: numbers of ranks; then ``make(dp_rank, dp_size)`` creates one rank's object.
            The run of the first number is stopped, goes on with each of the others, and halfway
            with the first again. All ranks live in this process, and must have the same state.
            Compared are the examples of each step over all ranks, whatever rows they are in, and
            their number of loss tokens.
        same_rows: with ``dp_sizes``, the rows of all ranks, one after the other, must be equal.

    Returns:
        The digest of every batch, in order; of every step with ``dp_sizes``.

    Raises:
        AssertionError: a batch differs, an epoch begins at another batch, there are fewer than
            ``num_steps`` batches, or a state is too large, not JSON, or not that of all ranks.
        TypeError: with ``dp_sizes``, a batch that is no Batch, RankPlan or list of indices.

    >>> from torch_collate_kit import PrefetchingSampler
    >>> len(assert_exact_resume(lambda: PrefetchingSampler(10, batch_size=4, seed=1), num_steps=7))
    7
    >>> def make(dp_rank, dp_size):
    ...     return PrefetchingSampler(
    ...         10, batch_size=4, dp_rank=dp_rank, dp_size=dp_size, tail="wrap"
    ...     )
    >>> len(assert_exact_resume(make, num_steps=7, dp_sizes=[4, 2, 3]))
    7
    """
    digest = partial(_digest_of_step, same_rows=same_rows) if dp_sizes else _digest_of_batch

    def run(
        dp_size: int | None, done: int = 0, state: str | None = None, *, saves: bool = True
    ) -> _Found:
        ranks = [make()] if dp_size is None else [make(rank, dp_size) for rank in range(dp_size)]
        return _run(ranks, digest, done, state, num_steps, max_state_bytes if saves else None)

    sizes: Sequence[int | None] = dp_sizes or [None]
    first, *others = sizes
    expected, _ = run(first, saves=False)
    found, states = run(first)
    _compare(found, expected, "the run that saves at every step")
    for stop in range(num_steps) if stops is None else stops:
        name = f"resumed after {stop} of {num_steps} batches"
        if dp_sizes is None:
            found, _ = run(None, stop, states[stop], saves=False)
            _compare(found, expected[stop:], name, stop)
        for dp_size in others:
            changed = f"{name}, {first} -> {dp_size} ranks"
            found, later = run(dp_size, stop, states[stop])
            _compare(found, expected[stop:], changed, stop)
            back = stop + (num_steps - stop) // 2
            found, _ = run(first, back, later[back - stop])
            _compare(found, expected[back:], f"{changed} -> {first} after {back}", back)
    return [digest for digest, _ in expected]


def _run(
    ranks: list[Any],
    digest: Callable[[list[Any]], str],
    done: int,
    state: str | None,
    num_steps: int,
    max_state_bytes: int | None,
) -> _Found:
    """Return the steps after ``done``, and the states around them, unless without a limit."""
    found: list[tuple[str, bool]] = []
    states: list[str] = []

    def save(from_ranks: Iterable[dict[str, Any]]) -> None:
        if max_state_bytes is None:
            return
        after = done + len(found)
        texts = [_as_json(one, after=after, max_bytes=max_state_bytes) for one in from_ranks]
        assert len(set(texts)) == 1, (
            f"after {after} steps the states of the {len(texts)} ranks differ; a state that every "
            "rank can load is the same on all of them"
        )
        states.append(texts[0])

    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(getattr(rank, "close", lambda: None))
            if state is not None:
                rank.load_state_dict(json.loads(state))
        save(rank.state_dict() for rank in ranks)
        num_empty = 0
        while done + len(found) < num_steps and num_empty < 2:
            before, after = len(found), [_state_after(rank) for rank in ranks]
            for parts in _in_step([iter(rank) for rank in ranks]):
                found.append((digest(parts), len(found) == before))
                save(state_after(len(found) - before) for state_after in after)
                if done + len(found) == num_steps:
                    break
            num_empty = num_empty + 1 if len(found) == before else 0
    assert done + len(found) == num_steps, (
        f"asked for {num_steps} batches, the source has {done + len(found)}"
    )
    return found, states


def _in_step(ranks: list[Iterator[Any]]) -> Iterator[list[Any]]:
    """Yield the batches of all ranks, a step at a time."""
    while True:
        parts = [next(rank, _END) for rank in ranks]
        num_ended = sum(part is _END for part in parts)
        assert num_ended in (0, len(parts)), (
            f"{num_ended} of {len(parts)} ranks end an epoch before the others"
        )
        if num_ended:
            return
        yield parts


def _digest_of_batch(parts: list[Any]) -> str:
    return batch_digest(parts[0])


def _digest_of_step(parts: list[Any], *, same_rows: bool) -> str:
    """Hash the rows in the order of the ranks, or else the examples in any order."""
    if same_rows and all(isinstance(part, Batch) for part in parts):
        first = parts[0]
        names = [n for n in _ROW_FIELDS if n in first and isinstance(first[n], torch.Tensor)]
        whole = [torch.cat([part[name] for part in parts]) for name in names]
        return batch_digest([whole, _num_loss_tokens(parts)])
    if same_rows and all(isinstance(part, RankPlan) for part in parts):
        return batch_digest([parts[0].plan, _num_loss_tokens(parts)])
    examples = sorted(example for part in parts for example in _examples_of(part))
    return batch_digest([examples, _num_loss_tokens(parts)])


def _examples_of(part: Any) -> list[Any]:
    """Return digests or indices of the examples of a batch."""
    if isinstance(part, Batch):
        ids = unpack(part["input_ids"], part)
        labels: list[Any] = [None] * len(ids)
        if "labels" in part and shares_prefixes(part):  # per token, where ids are per cell
            dense = part["labels"]
            cells = cells_of_every_example(part, dense.shape[1], "tokens")
            labels = [dense.flatten()[torch.from_numpy(of)] for of in cells]
        elif "labels" in part:
            labels = unpack(part["labels"], part)
        return [batch_digest([i, row]) for i, row in zip(ids, labels, strict=True) if len(i)]
    if isinstance(part, RankPlan):
        return list(part.indices)
    if isinstance(part, (list, np.ndarray)) and all(hasattr(i, "__index__") for i in part):
        return [int(i) for i in part]
    raise TypeError(
        f"dp_sizes compares examples, which a {type(part).__name__} does not name; let make() "
        "return a loader of Batches, or a sampler of indices or plans"
    )


def _num_loss_tokens(parts: list[Any]) -> int | None:
    """Return the loss tokens of a step, on which all ranks agree, or the sum of their own."""
    if isinstance(parts[0], Batch):
        found = [part.metadata.get("num_loss_tokens") for part in parts]
        own = sum(int(part.row_metadata["num_trained"].values.sum()) for part in parts)
        assert None in found or sum(found) == own or set(found) == {own}, (
            f"the ranks have num_loss_tokens={found}, and their batches {own} in all"
        )
        return own
    found = [getattr(part, "num_loss_tokens", None) for part in parts]
    assert len(set(found)) == 1, f"the ranks have num_loss_tokens={found}"
    return found[0]


def _state_after(source: Any) -> Callable[[int], dict[str, Any]]:
    """Return a function of a number of batches of the next iter(): the state after them."""
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
